//! `evenkeel bench step`: forward, backward and AdamW of a random Llama on random tokens.

use std::time::{Duration, Instant};

use evenkeel_device::Device;
use evenkeel_device::kernel::IGNORE;
use evenkeel_model::{Model, Parameters};
use evenkeel_train::{AdamWOptions, Samples, Trainer, TrainerOptions, cost};

use super::{Precision, roofline};
use crate::{Mistake, device, process, text};

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
    #[arg(long, default_value_t = 4, value_parser = between::<1, 65536>)]
    batch: usize,
    /// Tokens of a sequence; every one but the last has a next one to predict.
    #[arg(long, default_value_t = 256, value_parser = between::<2, 1048576>)]
    sequence: usize,
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    dtype: Precision,
    /// Cores to compute on; all of them by default.
    #[arg(long, value_parser = between::<1, 1024>)]
    threads: Option<usize>,
    #[arg(long, default_value_t = 12, value_parser = between::<1, 1000000>)]
    steps: usize,
    /// Steps before those that are timed.
    #[arg(long, default_value_t = 3, value_parser = between::<0, 1000000>)]
    warmup: usize,
    /// Keep only the residual stream of the forward pass and compute the rest again.
    #[arg(long)]
    recompute: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Time every kernel and compare it with what this machine reaches on it alone.
    #[arg(long, conflicts_with = "json")]
    roofline: bool,
}

fn between<const LEAST: usize, const MOST: usize>(text: &str) -> Result<usize, String> {
    let value = text.parse().ok().filter(|value| (LEAST..=MOST).contains(value));
    value.ok_or_else(|| format!("a whole number from {LEAST} to {MOST} is needed"))
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
        Model::from_json(&config).map_err(|error| {
            let what = error.to_string().replace("config.json: ", "the options make no model: ");
            Mistake { what, hint: Some("`evenkeel bench step --help` lists the sizes".to_owned()) }
        })
    }

    fn trainer_options(&self) -> TrainerOptions {
        let optimizer = AdamWOptions { clip_norm: None, ..AdamWOptions::default() };
        TrainerOptions { optimizer, label_smoothing: 0.0, recompute: self.recompute, longest: self.sequence }
    }
}

pub fn run(arguments: &Arguments) -> Result<String, Mistake> {
    let model = arguments.model()?;
    let machine = evenkeel_device::cpu_report();
    check_memory(arguments, &model, machine.memory_bytes)?;
    let threads = arguments.threads.unwrap_or(machine.cores);
    let device = device::start(Some(threads))?;
    let mut run = Run::new(arguments, &model, &device);
    for _ in 0..arguments.warmup {
        run.step();
    }
    let steps: Vec<Step> = (0..arguments.steps).map(|_| run.step()).collect();
    let mut text = report(arguments, &model, &device, threads, &steps);
    if arguments.roofline {
        text = format!("{text}\n\n{}", roofline::table(&device, || run.step().duration));
    }
    Ok(text)
}

/// Refuses, after a dry run, what would not fit.
fn check_memory(arguments: &Arguments, model: &Model, machine_bytes: u64) -> Result<(), Mistake> {
    const MOST_TOKENS: usize = 1 << 26;
    let hint = Some("use a smaller --batch or --sequence, or --recompute".to_owned());
    if arguments.batch * arguments.sequence > MOST_TOKENS {
        return Err(Mistake { what: format!("a step has {MOST_TOKENS} tokens at most"), hint });
    }
    let blank = Samples::blank(model.config.input, arguments.batch, arguments.sequence);
    let needed = cost(model, arguments.trainer_options(), arguments.dtype.into(), &[blank]).peak_bytes;
    if needed > machine_bytes {
        let (needed, machine) = (text::bytes(needed), text::bytes(machine_bytes));
        return Err(Mistake { what: format!("a step needs {needed} of memory, this machine has {machine}"), hint });
    }
    Ok(())
}

const LR: f64 = 3e-4;

struct Step {
    duration: Duration,
    loss: f64,
}

/// A trainer and the random batches it is fed.
struct Run<'a> {
    arguments: &'a Arguments,
    trainer: Trainer<'a>,
    steps: u64,
}

impl<'a> Run<'a> {
    fn new(arguments: &'a Arguments, model: &'a Model, device: &'a Device) -> Run<'a> {
        let parameters = Parameters::random(&model.specs, arguments.dtype.into(), 0, device.compute());
        Run { trainer: Trainer::new(model, device, parameters, arguments.trainer_options()), arguments, steps: 0 }
    }

    fn step(&mut self) -> Step {
        let start = Instant::now();
        self.steps += 1;
        let outcome = self.trainer.step(&[samples(self.arguments, self.steps)], LR);
        // The update is still on its way when the loss is known.
        self.trainer.device.compute().finish();
        Step { duration: start.elapsed(), loss: outcome.loss }
    }
}

/// Random tokens, each to be predicted from those before it.
fn samples(arguments: &Arguments, step: u64) -> Samples {
    let &Arguments { batch, sequence, vocab, .. } = arguments;
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(1000 + step);
    let mut token = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 33) % vocab as u64) as u32
    };
    let ids: Vec<u32> = (0..batch * sequence).map(|_| token()).collect();
    let is_last = |t: usize| (t + 1).is_multiple_of(sequence);
    let labels: Vec<u32> = (0..ids.len()).map(|t| if is_last(t) { IGNORE } else { ids[t + 1] }).collect();
    Samples::Tokens { ids, labels, segment_lengths: vec![sequence; batch] }
}

fn report(arguments: &Arguments, model: &Model, device: &Device, threads: usize, steps: &[Step]) -> String {
    let mut seconds: Vec<f64> = steps.iter().map(|step| step.duration.as_secs_f64()).collect();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let tokens = (arguments.batch * arguments.sequence) as f64;
    let dtype = arguments.dtype.name();
    let (first, last) = (steps[0].loss, steps[steps.len() - 1].loss);
    let (peak_bytes, process_bytes) = (device.usage().peak_bytes, process::peak_bytes());
    if arguments.json {
        let json = serde_json::json!({
            "dtype": dtype, "threads": threads, "parameters": model.parameter_count(), "steps": steps.len(),
            "median_step_s": median, "min_step_s": seconds[0], "tokens_per_s": tokens / median,
            "peak_bytes": peak_bytes, "peak_process_bytes": process_bytes, "first_loss": first, "last_loss": last,
        });
        return json.to_string();
    }
    let lines = [
        format!(
            "{} parameters, {dtype}, {tokens} tokens a step, threads: {threads}",
            text::count(model.parameter_count())
        ),
        format!("step    {:.1} ms median, {:.1} ms best of {}", median * 1e3, seconds[0] * 1e3, steps.len()),
        format!("speed   {:.0} tokens/s", tokens / median),
        format!("memory  {} peak, {} of the process", text::bytes(peak_bytes), text::bytes(process_bytes)),
        format!("loss    {first:.4} → {last:.4}"),
    ];
    lines.join("\n")
}
