//! `evenkeel bench step`: forward, backward and AdamW of a random Llama on random tokens.

use std::time::{Duration, Instant};

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{CpuOptions, DType, Device, KernelTime};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{Batch, Context, Gradients, LossOptions, Model, Parameters, RotaryTables};
use evenkeel_train::{AdamW, AdamWOptions, Update};

use super::roofline;
use crate::{Mistake, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[arg(long, default_value_t = 512)]
    hidden: usize,
    #[arg(long, default_value_t = 4)]
    layers: usize,
    #[arg(long, default_value_t = 8)]
    heads: usize,
    #[arg(long, default_value_t = 4)]
    kv_heads: usize,
    #[arg(long, default_value_t = 1408)]
    ffn: usize,
    #[arg(long, default_value_t = 4096)]
    vocab: usize,
    /// Sequences of a step.
    #[arg(long, default_value_t = 4, value_parser = positive)]
    batch: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    sequence: usize,
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    dtype: Precision,
    /// Cores to compute on; all of them by default.
    #[arg(long)]
    threads: Option<usize>,
    #[arg(long, default_value_t = 12, value_parser = positive)]
    steps: usize,
    /// Steps before those that are timed.
    #[arg(long, default_value_t = 3)]
    warmup: usize,
    /// Keep only the residual stream of the forward pass and compute the rest again.
    #[arg(long)]
    recompute: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Time every kernel and compare it with what this machine reaches on it alone.
    #[arg(long)]
    roofline: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Precision {
    F32,
    Bf16,
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&value| value > 0).ok_or_else(|| "a whole number above 0 is needed".to_owned())
}

impl Arguments {
    fn model(&self) -> Result<Model, Mistake> {
        let config = serde_json::json!({
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "tie_word_embeddings": false,
        });
        Ok(Model::from_json(&config)?)
    }

    fn dtype(&self) -> DType {
        match self.dtype {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        }
    }
}

pub fn run(arguments: &Arguments) -> Result<(), Mistake> {
    let model = arguments.model()?;
    let cores = evenkeel_device::cpu_report().cores;
    let threads = arguments.threads.unwrap_or(cores).max(1);
    let device = Device::cpu(&CpuOptions::with_threads(threads))
        .map_err(|error| Mistake { what: format!("no memory for the device: {error}"), hint: None })?;
    let mut trainer = Trainer::new(arguments, &model, &device);
    for _ in 0..arguments.warmup {
        trainer.step();
    }
    let steps: Vec<Step> = (0..arguments.steps).map(|_| trainer.step()).collect();
    report(arguments, &model, &device, threads, &steps);
    if arguments.roofline {
        let (steps, kernels) = trainer.measured_steps();
        println!("\n{}", roofline::table(&device, &kernels, &steps));
    }
    Ok(())
}

/// Steps whose kernels are timed one by one.
const MEASURED_STEPS: usize = 5;

struct Step {
    duration: Duration,
    loss: f64,
}

struct Trainer<'a> {
    arguments: &'a Arguments,
    model: &'a Model,
    device: &'a Device,
    parameters: Parameters,
    gradients: Gradients,
    optimizer: AdamW,
    tables: RotaryTables,
    steps: u32,
}

impl<'a> Trainer<'a> {
    fn new(arguments: &'a Arguments, model: &'a Model, device: &'a Device) -> Trainer<'a> {
        let queue = device.compute();
        let options = AdamWOptions { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.01, clip_norm: None };
        Trainer {
            parameters: Parameters::random(&model.specs, arguments.dtype(), 0, queue),
            gradients: Gradients::new(&model.specs, queue),
            optimizer: AdamW::new(options, &model.specs, queue),
            tables: RotaryTables::new(&model.config, queue, arguments.sequence),
            steps: 0,
            arguments,
            model,
            device,
        }
    }

    fn step(&mut self) -> Step {
        let start = Instant::now();
        self.steps += 1;
        let queue = self.device.compute();
        let batch = self.batch();
        let context = Context { queue, parameters: &self.parameters, tables: &self.tables, batch: &batch };
        let options = LossOptions { smoothing: 0.0, scale: 1.0 / batch.targets as f32 };
        let keep = if self.arguments.recompute { Keep::Stream } else { Keep::Everything };
        self.gradients.clear();
        let losses = pass::losses_and_gradients(self.model, &context, &self.gradients, options, keep);
        self.optimizer.update(queue, &self.parameters, &self.gradients, Update { lr: 3e-4, step: self.steps });
        let loss = queue.read(&losses).iter().map(|&loss| loss as f64).sum::<f64>() / batch.targets as f64;
        Step { duration: start.elapsed(), loss }
    }

    /// Random tokens, each to be predicted from those before it.
    fn batch(&self) -> Batch {
        let Arguments { batch, sequence, vocab, .. } = *self.arguments;
        let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(1000 + self.steps as u64);
        let mut token = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 33) % vocab as u64) as u32
        };
        let ids: Vec<u32> = (0..batch * sequence).map(|_| token()).collect();
        let is_last = |t: usize| (t + 1).is_multiple_of(sequence);
        let labels: Vec<u32> = (0..ids.len()).map(|t| if is_last(t) { IGNORE } else { ids[t + 1] }).collect();
        Batch::tokens(self.device.compute(), &ids, &labels, Segments::uniform(batch, sequence))
    }

    /// The durations of some steps, and every kernel they ran.
    fn measured_steps(&mut self) -> (Vec<Duration>, Vec<KernelTime>) {
        self.device.measure_kernels(true);
        let steps = (0..MEASURED_STEPS).map(|_| self.step().duration).collect();
        self.device.measure_kernels(false);
        (steps, self.device.take_kernel_times())
    }
}

fn report(arguments: &Arguments, model: &Model, device: &Device, threads: usize, steps: &[Step]) {
    let mut seconds: Vec<f64> = steps.iter().map(|step| step.duration.as_secs_f64()).collect();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let tokens = (arguments.batch * arguments.sequence) as f64;
    let dtype = if arguments.dtype == Precision::F32 { "f32" } else { "bf16" };
    let (first, last) = (steps[0].loss, steps[steps.len() - 1].loss);
    let (peak_bytes, process_bytes) = (device.usage().peak_bytes, peak_process_bytes());
    if arguments.json {
        let json = serde_json::json!({
            "dtype": dtype, "threads": threads, "parameters": model.parameter_count(), "steps": steps.len(),
            "median_step_s": median, "min_step_s": seconds[0], "tokens_per_s": tokens / median,
            "peak_bytes": peak_bytes, "peak_process_bytes": process_bytes, "first_loss": first, "last_loss": last,
        });
        println!("{json}");
        return;
    }
    println!("{} parameters, {dtype}, {threads} threads, {tokens} tokens a step", text::count(model.parameter_count()));
    println!("step    {:.1} ms median, {:.1} ms best of {}", median * 1e3, seconds[0] * 1e3, steps.len());
    println!("speed   {:.0} tokens/s", tokens / median);
    println!("memory  {} peak, {} of the process", text::bytes(peak_bytes), text::bytes(process_bytes));
    println!("loss    {first:.4} → {last:.4}");
}

/// The most memory this process ever had resident; 0 where the system does not say.
fn peak_process_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
