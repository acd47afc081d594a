//! `evenkeel inspect MODEL`

use std::path::PathBuf;

use evenkeel_device::DType;
use evenkeel_model::{Input, Model};
use evenkeel_store::Folder;
use evenkeel_train::{AdamWOptions, Samples, TrainerOptions, cost};

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
        for recompute in [false, true] {
            let optimizer = AdamWOptions::default();
            let options = TrainerOptions { optimizer, label_smoothing: 0.0, recompute, longest: sequence };
            let cost = cost(&model, options, dtype, &[Samples::blank(config.input, batch, sequence)]);
            let row = [name, if recompute { "yes" } else { "no" }].map(str::to_owned).into_iter();
            let bytes = [cost.state_bytes, cost.peak_bytes].map(text::bytes);
            rows.push(row.chain(bytes).chain([text::flops(cost.flops)]).collect());
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
