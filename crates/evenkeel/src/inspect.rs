//! `evenkeel inspect MODEL`

use std::path::PathBuf;

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{DType, Device};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{Batch, Context, Gradients, Images, Input, LossOptions, Model, Parameters, RotaryTables};
use evenkeel_store::Folder;
use evenkeel_train::{AdamW, AdamWOptions};

use crate::{Mistake, text};

#[derive(clap::Args)]
pub struct Arguments {
    /// A Hugging Face model folder.
    model: PathBuf,
    /// Sequences (or images) of the training step to measure.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    batch: u32,
    /// Tokens of each sequence; 1024 by default, or as many as the model has positions for.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    sequence: Option<u32>,
}

/// Inputs that a dry run makes up at most: ids of tokens, or values of pixels.
const MOST_INPUTS: usize = 1 << 26;

pub fn run(arguments: &Arguments) -> Result<String, Mistake> {
    let folder = Folder::open(&arguments.model)?;
    let model = Model::open(&folder)?;
    model.check(&folder)?;
    let config = &model.config;
    let batch = arguments.batch as usize;
    let sequence = sequence(arguments, config.input)?;
    let (inputs, of_input, per_step) = match config.input {
        Input::Tokens { .. } => {
            let tied = if config.tied { ", tied" } else { "" };
            let of_input = format!("vocabulary     {}{tied}", config.classes);
            (batch * sequence, of_input, format!("{batch} × {sequence} tokens"))
        }
        Input::Images { size, patch, channels } => {
            let of_input = format!("images         {size}², patch {patch}, {} labels", config.classes);
            (batch * channels * size * size, of_input, format!("{batch} images"))
        }
    };
    if inputs > MOST_INPUTS {
        let what = format!("a step of {per_step} is too large to be inspected");
        return Err(Mistake {
            what,
            hint: Some("memory and work grow evenly with --batch: inspect a smaller one".into()),
        });
    }
    let mut rows = Vec::new();
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::Bf16)] {
        for (recompute, keep) in [("no", Keep::Everything), ("yes", Keep::Stream)] {
            let need = training_need(&model, dtype, keep, batch, sequence);
            let row = [name, recompute].map(str::to_owned).into_iter();
            let bytes = [need.state_bytes, need.peak_bytes].map(text::bytes);
            rows.push(row.chain(bytes).chain([text::flops(need.flops)]).collect());
        }
    }
    let lines = [
        format!("architecture   {} ({})", config.family.class, config.family.model_type),
        format!("parameters     {}", text::count(model.parameter_count())),
        format!("layers         {}", config.layers.len()),
        format!("hidden         {}, FFN {}", config.hidden, config.ffn),
        format!("heads          {} of size {}, {} for keys and values", config.heads, config.head_dim, config.kv_heads),
        of_input,
        format!("\nTo train it with AdamW, {per_step} a step:"),
        text::table(&["dtype", "recompute", "state", "peak memory", "work per step"], &rows),
    ];
    Ok(lines.join("\n"))
}

fn sequence(arguments: &Arguments, input: Input) -> Result<usize, Mistake> {
    const USUAL: usize = 1024;
    let Input::Tokens { learned_positions } = input else { return Ok(1) };
    let longest = learned_positions.unwrap_or(usize::MAX);
    match arguments.sequence.map(|sequence| sequence as usize) {
        None => Ok(USUAL.min(longest)),
        Some(sequence) if sequence <= longest => Ok(sequence),
        Some(sequence) => Err(Mistake {
            what: format!("--sequence is {sequence}, this model has {longest} positions"),
            hint: Some(format!("use --sequence {longest} or less")),
        }),
    }
}

struct Need {
    /// Parameters, gradients and moments.
    state_bytes: u64,
    peak_bytes: u64,
    flops: u128,
}

/// What one training step takes, from a dry run.
fn training_need(model: &Model, dtype: DType, keep: Keep, batch: usize, sequence: usize) -> Need {
    let device = Device::dry();
    let queue = device.compute();
    let parameters = Parameters::allocate(&model.specs, dtype, queue);
    let gradients = Gradients::new(&model.specs, queue);
    let options = AdamWOptions { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, clip_norm: Some(1.0) };
    let _optimizer = AdamW::new(options, &model.specs, queue);
    let state_bytes = device.usage().live_bytes;
    let batch = match model.config.input {
        Input::Tokens { .. } => {
            let tokens = batch * sequence;
            let (ids, labels) = (vec![0; tokens], vec![IGNORE; tokens]);
            Batch::tokens(queue, &ids, &labels, Segments::uniform(batch, sequence))
        }
        Input::Images { size, channels, .. } => {
            let pixels = vec![0.0; batch * channels * size * size];
            let images = Images { pixels: &pixels, count: batch };
            Batch::images(queue, images, &vec![0; batch], model.config.input, dtype)
        }
    };
    let tables = RotaryTables::new(&model.config, queue, sequence);
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch };
    pass::losses_and_gradients(model, &context, &gradients, LossOptions { smoothing: 0.0, scale: 1.0 }, keep);
    Need { state_bytes, peak_bytes: device.usage().peak_bytes, flops: device.counts().flops() }
}
