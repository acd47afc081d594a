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
    /// Tokens of each sequence.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    sequence: u32,
}

pub fn run(arguments: &Arguments) -> Result<(), Mistake> {
    let folder = Folder::open(&arguments.model)?;
    let model = Model::open(&folder)?;
    model.check(&folder)?;
    let config = &model.config;
    println!("architecture   {} ({})", config.family.class, config.family.model_type);
    println!("parameters     {}", text::count(model.parameter_count()));
    println!("layers         {}", config.layers.len());
    println!("hidden         {}, FFN {}", config.hidden, config.ffn);
    println!("heads          {} of {}, {} for keys and values", config.heads, config.head_dim, config.kv_heads);
    match config.input {
        Input::Tokens { .. } => {
            println!("vocabulary     {}{}", config.classes, if config.tied { ", tied" } else { "" })
        }
        Input::Images { size, patch, .. } => {
            println!("images         {size}², patch {patch}, {} labels", config.classes)
        }
    }
    let (batch, sequence) = (arguments.batch as usize, arguments.sequence as usize);
    match config.input {
        Input::Tokens { .. } => println!("\nTo train it with AdamW, {batch} × {sequence} tokens a step:"),
        Input::Images { .. } => println!("\nTo train it with AdamW, {batch} images a step:"),
    }
    let mut rows = Vec::new();
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::Bf16)] {
        for (recompute, keep) in [("no", Keep::Everything), ("yes", Keep::Stream)] {
            let need = training_need(&model, dtype, keep, batch, sequence);
            let row = [name, recompute].map(str::to_owned).into_iter();
            rows.push(
                row.chain([need.state_bytes, need.peak_bytes].map(text::bytes)).chain([flops(need.flops)]).collect(),
            );
        }
    }
    println!("{}", text::table(&["dtype", "recompute", "state", "peak memory", "work per step"], &rows));
    Ok(())
}

fn flops(count: u64) -> String {
    format!("{:.2} TFLOP", count as f64 / 1e12)
}

struct Need {
    /// Parameters, gradients and moments.
    state_bytes: u64,
    peak_bytes: u64,
    flops: u64,
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
