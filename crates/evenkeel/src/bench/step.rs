//! `evenkeel bench step`: forward, backward and AdamW of a random model on random tokens.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use evenkeel_model::{Cut, Input, Model, Parameters, check_description};
use evenkeel_step::Strategy;
use evenkeel_step::schedule::{Arrangement, Schedule};
use evenkeel_store::read_config;
use evenkeel_train::{Cost, Ranks, Samples, Trainer, costs};
use serde_json::Value;

use super::devices::DeviceArguments;
use super::llama::Llama;
use super::{between, cuda, roofline};
use crate::launch::Launch;
use crate::memory::{Beside, check_steps};
use crate::traced_step::LR;
use crate::{Failure, Mistake, process, strategy, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    llama: Llama,
    #[command(flatten)]
    devices: DeviceArguments,
    /// Train the model of this config.json instead of a Llama or of those on a GPU.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "model"],
    )]
    config: Option<PathBuf>,
    #[arg(long, default_value_t = 12, value_parser = between::<1, 1000000>)]
    steps: usize,
    /// Steps before those that are timed.
    #[arg(long, default_value_t = 3, value_parser = between::<0, 1000000>)]
    warmup: usize,
    /// Replicas (data parallelism), each on ranks of its own.
    #[arg(long, default_value_t = 1, value_parser = between::<1, 64>)]
    dp: usize,
    /// ZeRO stage, what replicas split: 1 optimizer state, 2 gradients too, 3 parameters too.
    #[arg(long, default_value_t = 0, value_parser = between::<0, 3>)]
    zero: usize,
    /// Ranks that share every layer (tensor parallelism), each with its part of the threads.
    #[arg(long, default_value_t = 1, value_parser = between::<1, 64>)]
    tp: usize,
    /// Relative share of the work of each tensor-parallel rank, such as 2,1; equal by default.
    #[arg(long, value_delimiter = ',', value_name = "WEIGHT")]
    tp_weights: Vec<f64>,
    /// Leave the residual stream whole on every rank instead of splitting it by tokens.
    #[arg(long)]
    whole_stream: bool,
    /// Keep only the residual stream of the forward pass and recompute the rest.
    #[arg(long)]
    recompute: bool,
    /// Compute nothing; print the largest memory, work and traffic of any rank, as JSON.
    #[arg(long)]
    dry: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Time every kernel and compare it with what this machine reaches on it alone.
    #[arg(long, conflicts_with = "json")]
    roofline: bool,
    /// With --device cuda: which models to train, in the precision of --dtype; all of them by default.
    #[arg(long, value_enum)]
    model: Vec<cuda::Preset>,
    /// With --device cuda: sequences or images of a step; by default the model's own number.
    #[arg(long, value_parser = between::<1, 65536>)]
    sequences: Option<usize>,
    /// With --device cuda: tokens of a sequence; by default the model's own number.
    #[arg(long, value_parser = between::<2, 1048576>)]
    length: Option<usize>,
    /// With --device cuda: issue every kernel by itself instead of replaying work as CUDA graphs.
    #[arg(long)]
    no_graph: bool,
}

impl Arguments {
    fn cut(&self) -> Cut {
        strategy::cut(self.tp, &self.tp_weights, BTreeSet::new(), Some(self.tp > 1 && !self.whole_stream))
    }

    fn strategy(&self) -> Strategy {
        let arrangement = Arrangement::of(Schedule::usual(self.recompute, self.tp));
        let (cut, zero) = (self.cut(), strategy::zero_stage(self.zero));
        Strategy { cut, zero, arrangement, ..self.llama.strategy(self.dp, self.tp, self.devices.threads) }
    }

    /// The model, and the options with its vocabulary.
    fn model(&self) -> Result<(Model, Llama), Failure> {
        let Some(path) = &self.config else { return Ok((self.llama.model()?, self.llama.clone())) };
        let model = self.llama.adapted(model_of_file(path)?.0)?;
        let vocab = model.config.classes;
        Ok((model, Llama { vocab, ..self.llama.clone() }))
    }

    /// What a GPU trains.
    fn workloads(&self) -> Result<Vec<cuda::Workload>, Failure> {
        let sizes = cuda::Sizes { sequences: self.sequences, length: self.length };
        let Some(path) = &self.config else {
            let presets = if self.model.is_empty() { &cuda::Preset::ALL[..] } else { &self.model };
            return Ok(presets.iter().map(|preset| preset.workload(sizes)).collect());
        };
        Ok(vec![cuda::Workload::of_config(path.display().to_string(), model_of_file(path)?.1, sizes)])
    }

    /// Refuses options that do not suit the ranks or the device.
    fn check_ranks(&self) -> Result<(), Mistake> {
        let mistake = |what: String, hint: &str| Err(Mistake { what, hint: Some(hint.to_owned()) });
        let on_card = self.devices.are_gpus();
        let weights = self.tp_weights.len();
        if weights > 0 && weights != self.tp {
            let what = format!("--tp-weights has {weights} numbers, --tp is {}", self.tp);
            return mistake(what, "give one for each rank");
        }
        if self.tp_weights.iter().any(|weight| !weight.is_finite() || *weight <= 0.0) {
            return mistake(format!("--tp-weights are {:?}", self.tp_weights), "use numbers above 0");
        }
        let of_cards = [
            ("--model", !self.model.is_empty()),
            ("--sequences", self.sequences.is_some()),
            ("--length", self.length.is_some()),
            ("--no-graph", self.no_graph),
        ];
        if let Some((name, _)) = of_cards.into_iter().find(|(_, is_given)| *is_given && !on_card) {
            return mistake(
                format!("{name} is for a GPU"),
                "use --device cuda, too; cores have --batch and --sequence",
            );
        }
        if on_card && (self.dp > 1 || self.zero > 0) {
            return mistake("--dp and --zero are measured on cores only".to_owned(), "use --tp, or --device cpu");
        }
        if on_card && self.recompute && self.tp > 1 {
            return mistake("--recompute is measured on a GPU with one rank".to_owned(), "leave out --tp");
        }
        if on_card && self.roofline && (self.tp > 1 || !self.devices.virtual_gpus.is_empty()) {
            return mistake("--roofline measures a GPU with one rank".to_owned(), "leave out --tp and --virtual-gpus");
        }
        self.devices.check(self.dp * self.tp)
    }
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    arguments.check_ranks()?;
    if arguments.devices.are_gpus() {
        return cuda::run(&cuda::Options {
            workloads: arguments.workloads()?,
            precision: arguments.llama.dtype,
            warmup: arguments.warmup,
            steps: arguments.steps,
            breakdown: arguments.roofline,
            json: arguments.json,
            cut: arguments.cut(),
            virtual_gpus: arguments.devices.virtual_gpus.clone(),
            graph: !arguments.no_graph,
            adapters: arguments.llama.adapters.clone(),
            recompute: arguments.recompute,
        });
    }
    arguments.llama.check_shares("--dp", arguments.dp)?;
    let (model, llama) = arguments.model()?;
    let (strategy, options) = (arguments.strategy(), llama.trainer_options());
    let shards = model.cut(&strategy.cut)?;
    let blank = llama.blank(&model, arguments.dp);
    let costs = costs(&shards, &strategy, options, &blank);
    if arguments.dry {
        return Ok(most(&costs));
    }
    check_steps(&strategy, &costs, Beside::default(), HINT)?;
    let (dtype, cores_per_rank) = (strategy.dtype, strategy.devices.cores_per_rank());
    let ranks = Launch::from(strategy)
        .start(shards, options, move |shard, split, queue| Ok(Parameters::random(shard, dtype, split, 0, queue)))?;
    let mut run = Run { llama, dp: arguments.dp, ranks, steps: 0 };
    for _ in 0..arguments.warmup {
        run.step()?;
    }
    let steps = (0..arguments.steps).map(|_| run.step()).collect::<Result<Vec<Step>, Failure>>()?;
    let mut text = report(arguments, &model, &run.ranks, cores_per_rank, &steps)?;
    if arguments.roofline {
        let first = run.steps;
        let (llama, dp) = (run.llama.clone(), run.dp);
        let table = run.ranks.with_trainers(move |trainer| {
            let mut number = first;
            let device = trainer.device.clone();
            roofline::table(&device, || {
                number += 1;
                timed_step(trainer, &llama.samples(number, dp)).expect("the steps before were no different").duration
            })
        })?;
        text = format!("{text}\n\n{}", table[0]);
    }
    Ok(text)
}

/// The model of a config.json, and that.
fn model_of_file(path: &Path) -> Result<(Model, Value), Failure> {
    let (config, folder) = (read_config(path)?, path.parent().unwrap_or(Path::new("")));
    check_description(&config, folder)?;
    let model = Model::from_json(&config).map_err(|error| error.with_line(folder))?;
    if matches!(model.config.input, Input::Tokens { .. }) {
        return Ok((model, config));
    }
    let hint = Some("give the config.json of a language model".to_owned());
    Err(Mistake { what: format!("the model of {path:?} reads no running text"), hint }.into())
}

const HINT: &str = "use a smaller --batch or --sequence, or --recompute";

fn most(costs: &[Cost]) -> String {
    let most = |of: fn(&Cost) -> u128| costs.iter().map(of).max().unwrap_or(0) as u64;
    let json = serde_json::json!({
        "tp": costs.len(),
        "state_bytes": most(|cost| cost.state_bytes.into()),
        "peak_bytes": most(|cost| cost.peak_bytes.into()),
        "flops": most(|cost| cost.flops),
        "exchanged_bytes": most(|cost| cost.exchanged_bytes),
    });
    json.to_string()
}

struct Step {
    duration: Duration,
    loss: f64,
}

/// The ranks and the random batches they are fed.
struct Run {
    llama: Llama,
    dp: usize,
    ranks: Ranks,
    steps: u64,
}

impl Run {
    /// A step of all ranks, timed by the slowest.
    fn step(&mut self) -> Result<Step, Failure> {
        self.steps += 1;
        let micros = self.llama.samples(self.steps, self.dp);
        let steps = self.ranks.with_trainers(move |trainer| timed_step(trainer, &micros))?;
        let steps = steps.into_iter().collect::<Result<Vec<Step>, _>>()?;
        Ok(steps.into_iter().max_by_key(|step| step.duration).expect("there is a rank"))
    }
}

fn timed_step(trainer: &mut Trainer, micros: &[Samples]) -> Result<Step, evenkeel_train::Error> {
    let start = Instant::now();
    let outcome = trainer.step(micros, LR)?;
    // The update is still on its way when the loss is known.
    trainer.device.compute().finish();
    Ok(Step { duration: start.elapsed(), loss: outcome.loss })
}

fn report(
    arguments: &Arguments,
    model: &Model,
    ranks: &Ranks,
    cores_per_rank: usize,
    steps: &[Step],
) -> Result<String, Failure> {
    let mut seconds: Vec<f64> = steps.iter().map(|step| step.duration.as_secs_f64()).collect();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let tokens = arguments.llama.tokens() as f64;
    let dtype = arguments.llama.dtype.name();
    let (first, last) = (steps[0].loss, steps[steps.len() - 1].loss);
    let peaks = ranks.with_trainers(|trainer| trainer.device.usage().peak_bytes)?;
    let (peak_bytes, process_bytes) = (peaks.iter().sum(), process::peak_bytes());
    let (tp, threads) = (ranks.count(), ranks.count() * cores_per_rank);
    if arguments.json {
        let json = serde_json::json!({
            "dtype": dtype, "tp": tp, "threads": threads, "parameters": model.parameter_count(), "steps": steps.len(),
            "median_step_s": median, "min_step_s": seconds[0], "tokens_per_s": tokens / median,
            "peak_bytes": peak_bytes, "peak_process_bytes": process_bytes, "first_loss": first, "last_loss": last,
        });
        return Ok(json.to_string());
    }
    let lines = [
        format!(
            "{} parameters, {dtype}, {tokens} tokens a step, tp: {tp}, threads: {threads}",
            text::count(model.parameter_count())
        ),
        format!("step    {:.1} ms median, {:.1} ms best of {}", median * 1e3, seconds[0] * 1e3, steps.len()),
        format!("speed   {:.0} tokens/s", tokens / median),
        format!("memory  {} peak, {} of the process", text::bytes(peak_bytes), text::bytes(process_bytes)),
        format!("loss    {first:.4} → {last:.4}"),
    ];
    Ok(lines.join("\n"))
}
