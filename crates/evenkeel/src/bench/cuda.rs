//! `evenkeel bench step --device cuda`: whole training steps on a GPU, of models that PyTorch is measured on, too.

mod ranks;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use evenkeel_device::kernel::{IGNORE, Kernel, Order};
use evenkeel_device::{Device, DeviceKind, KernelTime, Replays, cuda_memory};
use evenkeel_model::{Cut, Model, Parameters, ZeroSharding};
use evenkeel_step::schedule::{Arrangement, Schedule};
use evenkeel_train::{Observe, OptimizerOptions, Prepared, Samples, Trainer, TrainerOptions};
use serde_json::{Value, json};

use super::llama::AdapterArguments;
use super::median;
use crate::device::Precision;
use crate::{Failure, Mistake, device, text};

/// A model and the step that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Preset {
    /// Llama of 1.0 billion parameters, 8 sequences of 2048 tokens.
    Llama1b,
    /// GPT-2 of 124 million parameters, 32 sequences of 1024 tokens.
    Gpt2,
    /// ViT of 1.2 billion parameters, 64 images.
    Vit1b,
    /// Eight layers of Llama 8B's shape, 4 sequences of 4096 tokens.
    Llama8l,
    /// Llama 8B's shape, 2 sequences of 2048 tokens; with --lora.
    Llama8b,
}

impl Preset {
    /// Those whose whole training fits one GPU.
    pub const ALL: [Preset; 4] = [Preset::Llama1b, Preset::Gpt2, Preset::Vit1b, Preset::Llama8l];

    pub fn workload(self, sizes: Sizes) -> Workload {
        let (name, sequences, length) = match self {
            Preset::Llama1b => ("llama1b", 8, Some(2048)),
            Preset::Gpt2 => ("gpt2", 32, Some(1024)),
            Preset::Vit1b => ("vit1b", 64, None),
            Preset::Llama8l => ("llama8l", 4, Some(4096)),
            Preset::Llama8b => ("llama8b", 2, Some(2048)),
        };
        Workload {
            name: name.to_owned(),
            config: self.config(),
            count: sizes.sequences.unwrap_or(sequences),
            length: length.map(|length| sizes.length.unwrap_or(length)),
        }
    }

    fn config(self) -> Value {
        let llama = |hidden, layers, ffn, longest, tied| {
            json!({
                "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 32,
                "num_key_value_heads": 8, "intermediate_size": ffn, "vocab_size": 32000,
                "max_position_embeddings": longest, "tie_word_embeddings": tied,
            })
        };
        match self {
            Preset::Llama1b => llama(2048, 16, 8192, 2048, true),
            Preset::Llama8l => llama(4096, 8, 14336, 4096, false),
            Preset::Llama8b => llama(4096, 32, 14336, 4096, false),
            Preset::Gpt2 => json!({
                "model_type": "gpt2", "vocab_size": 50304, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
                "n_head": 12,
            }),
            Preset::Vit1b => json!({
                "model_type": "vit", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
                "intermediate_size": 8192, "image_size": 224, "patch_size": 16, "num_labels": 10,
            }),
        }
    }
}

/// A model's config.json, and what a step trains it on.
#[derive(Clone, Debug)]
pub struct Workload {
    pub name: String,
    pub config: Value,
    /// Sequences of tokens, or images.
    pub count: usize,
    /// Tokens of a sequence.
    pub length: Option<usize>,
}

impl Workload {
    /// A language model of one's own.
    pub fn of_config(name: String, config: Value, sizes: Sizes) -> Workload {
        let (count, length) = (sizes.sequences.unwrap_or(1), Some(sizes.length.unwrap_or(4096)));
        Workload { name, config, count, length }
    }

    fn model(&self, adapters: &AdapterArguments) -> Result<Model, Mistake> {
        let model = Model::from_json(&self.config);
        let model = model.map_err(|error| Mistake { what: format!("{}: {error}", self.name), hint: None })?;
        Ok(adapters.adapt(model)?.for_device(DeviceKind::Cuda))
    }

    fn trainer_options(&self) -> TrainerOptions {
        TrainerOptions {
            optimizer: Some(OptimizerOptions::default()),
            label_smoothing: 0.0,
            longest: self.length.unwrap_or(1),
            dropout_seed: 0,
        }
    }

    /// What a step's throughput counts.
    fn unit(&self) -> &'static str {
        if self.length.is_some() { "tokens" } else { "images" }
    }

    fn units(&self) -> f64 {
        (self.count * self.length.unwrap_or(1)) as f64
    }

    fn samples(&self, model: &Model, step: u64) -> Samples {
        let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(1000 + step);
        let mut below = |end: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) % end
        };
        let count = self.count;
        let Some(sequence) = self.length else {
            let pixels = (0..count * 3 * 224 * 224).map(|_| below(4096) as f32 / 1024.0 - 2.0).collect();
            return Samples::Images { pixels, labels: (0..count).map(|_| below(10) as u32).collect() };
        };
        let ids: Vec<u32> = (0..count * sequence).map(|_| below(model.config.classes as u64) as u32).collect();
        let is_last = |t: usize| (t + 1).is_multiple_of(sequence);
        let labels = (0..ids.len()).map(|t| if is_last(t) { IGNORE } else { ids[t + 1] }).collect();
        Samples::Tokens { ids, labels, segment_lengths: vec![sequence; count] }
    }
}

/// Sizes that replace the model's own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    /// Sequences or images.
    pub sequences: Option<usize>,
    pub length: Option<usize>,
}

pub struct Options {
    pub workloads: Vec<Workload>,
    pub precision: Precision,
    pub warmup: usize,
    pub steps: usize,
    pub breakdown: bool,
    pub json: bool,
    pub cut: Cut,
    pub virtual_gpus: Vec<u32>,
    /// Whether CUDA graphs are replayed.
    pub graph: bool,
    pub adapters: AdapterArguments,
    pub recompute: bool,
}

/// An H200 reaches these with a bf16 product of 8192³ and with a device copy; shares are relative to them.
const PEAK_FLOPS_PER_S: f64 = 790e12;
const PEAK_BYTES_PER_S: f64 = 4.3e12;

pub fn run(options: &Options) -> Result<String, Failure> {
    let reports = options.workloads.iter().map(|workload| measure(workload, options));
    Ok(reports.collect::<Result<Vec<String>, Failure>>()?.join("\n"))
}

fn measure(workload: &Workload, options: &Options) -> Result<String, Failure> {
    if options.cut.weights.len() > 1 || !options.virtual_gpus.is_empty() {
        return ranks::measure(workload, options);
    }
    let begin = Instant::now();
    let model = workload.model(&options.adapters)?;
    let device = device::start_cuda(0)?;
    device.replay_graphs(false);
    let parameters = Parameters::random(&model, options.precision.into(), ZeroSharding::NONE, 0, device.compute());
    let mut trainer = Trainer::alone(model.clone(), device.clone(), parameters, workload.trainer_options());
    trainer.rearrange(Arrangement::of(Schedule::usual(options.recompute, 1)));
    // Two batches in turn, on the GPU beforehand as PyTorch's are: loading data is not timed.
    let prepared = [0, 1].map(|step| trainer.prepare(&[workload.samples(&model, step)]));
    let mut prepared = prepared.into_iter().collect::<Result<Vec<Prepared>, _>>()?;
    let mut number = 0;
    let mut step = || -> Result<(Duration, f64), Failure> {
        let start = Instant::now();
        number += 1;
        let outcome = trainer.step_on(&mut prepared[number % 2], LR, Observe::Nothing).outcome;
        // The update is still on its way when the loss is known.
        device.compute().finish();
        Ok((start.elapsed(), outcome.loss))
    };
    let (_, first_loss) = step()?;
    let to_first_step = begin.elapsed();
    device.replay_graphs(options.graph);
    let free_bytes = || Ok::<u64, Failure>(cuda_memory(0).map_err(device::fault)?.free_bytes);
    let free_before = free_bytes()?;
    for _ in 1..options.warmup {
        step()?;
    }
    let beside_bytes = free_before.saturating_sub(free_bytes()?);
    let (mut times, mut loss, before) = (Vec::new(), first_loss, device.replays());
    for _ in 0..options.steps {
        let (time, new_loss) = step()?;
        times.push(time.as_secs_f64());
        loss = new_loss;
    }
    let replays = device.replays();
    let median = median(times.iter().copied());
    let (units, unit) = (workload.units(), workload.unit());
    let peak_bytes = device.usage().peak_bytes;
    if options.json {
        let json = json!({
            "model": workload.name, "dtype": options.precision.name(), "parameters": model.parameter_count(),
            "median_step_s": median, "min_step_s": times.iter().copied().fold(f64::INFINITY, f64::min), "per_s": units / median, "unit": unit,
            "peak_bytes": peak_bytes, "first_step_s": to_first_step.as_secs_f64(), "first_loss": first_loss,
            "last_loss": loss, "graphs_per_step": (replays.graphs - before.graphs) as f64 / options.steps as f64,
            "graphs_refused": replays.refusal,
        });
        return Ok(json.to_string());
    }
    let mut lines = vec![format!(
        "{:8} {:9.2} ms/step {:10.0} {unit}/s  peak {}  first step after {:.1} s  loss {first_loss:.3} → {loss:.3}",
        workload.name,
        median * 1e3,
        units / median,
        text::bytes(peak_bytes),
        to_first_step.as_secs_f64(),
    )];
    if options.graph {
        lines.push(of_graphs(&before, &replays, options.steps, beside_bytes));
    }
    if options.breakdown {
        lines.push(breakdown(&device, step)?);
    }
    Ok(lines.join("\n"))
}

const LR: f64 = 1e-4;

/// A line about a step's graphs.
fn of_graphs(before: &Replays, after: &Replays, steps: usize, beside_bytes: u64) -> String {
    let a_step = |of: fn(&Replays) -> u64| ((of(after) - of(before)) as f64 / steps as f64).round();
    let line = format!(
        "         {} graphs a step of {} commands, {} of their kernels changed; {} graphs captured, {} beside the arena",
        a_step(|replays| replays.graphs),
        a_step(|replays| replays.commands_in_graphs),
        a_step(|replays| replays.changed),
        after.captured,
        text::bytes(beside_bytes),
    );
    match &after.refusal {
        Some(why) => format!("{line}; none any more: {why}"),
        None => line,
    }
}

/// One measured step by kernels, each beside the least time for its operations and bytes.
fn breakdown(device: &Device, mut step: impl FnMut() -> Result<(Duration, f64), Failure>) -> Result<String, Failure> {
    device.measure_kernels(true);
    let whole = step()?.0.as_secs_f64();
    device.measure_kernels(false);
    #[derive(Default)]
    struct Row {
        launches: usize,
        seconds: f64,
        floor: f64,
    }
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for KernelTime { kernel, duration } in device.take_kernel_times() {
        let row = rows.entry(describe(&kernel)).or_default();
        row.launches += 1;
        row.seconds += duration.as_secs_f64();
        let operation = kernel.operation();
        let by_flops = operation.flops() as f64 / PEAK_FLOPS_PER_S;
        row.floor += by_flops.max(operation.bytes() as f64 / PEAK_BYTES_PER_S);
    }
    let kernels: f64 = rows.values().map(|row| row.seconds).sum();
    let floor: f64 = rows.values().map(|row| row.floor).sum();
    let mut rows: Vec<(String, Row)> = rows.into_iter().collect();
    rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    let milliseconds = |seconds: f64| format!("{:.3} ms", seconds * 1e3);
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|(name, row)| {
            vec![
                name.clone(),
                row.launches.to_string(),
                milliseconds(row.seconds),
                text::percent(row.seconds / whole),
                milliseconds(row.floor),
                text::percent(row.floor / row.seconds),
            ]
        })
        .collect();
    Ok(format!(
        "{}\na measured step takes {}: kernels {}, between them {}; floor {}",
        text::table(&["kernel", "launches", "time", "of the step", "floor", "reached"], &lines),
        milliseconds(whole),
        milliseconds(kernels),
        milliseconds(whole - kernels),
        milliseconds(floor),
    ))
}

fn describe(kernel: &Kernel) -> String {
    let Kernel::Product(product) = kernel else { return kernel.name().to_owned() };
    let order = match product.order {
        Order::NN => "NN",
        Order::NT => "NT",
        Order::TN => "TN",
    };
    let [m, n, k] = product.dims();
    format!("Product {order} {m}×{n}×{k}{}", if product.accumulate { " +" } else { "" })
}
