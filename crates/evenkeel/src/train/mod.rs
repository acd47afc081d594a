//! `evenkeel train CONFIG`: from a configuration to a trained model.

mod attendant;
mod balance;
pub mod feed;
pub mod model;
mod output;
mod sample;

use std::hash::{Hash, Hasher};
use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::time::Duration;

use evenkeel_device::DeviceKind;
use evenkeel_model::{Input, Model};
use evenkeel_train::checkpoint::Saver;
use evenkeel_train::report::{ProgressLine, ProgressOptions, Style, Summary};
use evenkeel_train::{
    AdamWOptions, Cost, Decay, Kind, Limits, Plan, Progress, Rate, Samples, Stop, TrainerOptions, checkpoint,
};

use crate::bench::peak_flops_per_s;
use crate::config::{Dtype, LrDecay, Overrides, Settings, Straggler};
use crate::interruption::Interruption;
use crate::launch::{Launch, arrangement};
use crate::{Failure, Mistake, text, warn};
use attendant::{Attending, Records};
use feed::{Data, Primed, Text};
use model::{ModelInput, device_dtype};
use output::RunFolder;
pub use output::{RUN_CONFIG, RUN_MODEL, find_checkpoint};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    overrides: Overrides,
    /// Continues the run in the output folder from its newest checkpoint; begins one if there is none.
    #[arg(long)]
    resume: bool,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let interruption = Interruption::listen()?;
    let config = arguments.overrides.read()?;
    let settings = &config.settings;
    let text = Text::open(&config)?;
    let tokenizer_files = text.as_ref().and_then(|text| text.files.clone());
    let is_chat = sample::is_chat(settings, text.as_ref())?;
    let input = Arc::new(ModelInput::open(&config, text.as_ref().map(|text| &text.tokenizer))?);
    let (launch, options) = (Launch::of(settings, &input.model, &input.json)?, trainer_options(settings));
    let shards = input.model.cut(&launch.cut)?;
    let costs = costs(settings, &shards, &launch, options);
    // A checkpoint is written from a copy of weights and moments, and of earlier weights where their changes are watched.
    let watched_bytes = if balance::watches_changes(settings) { 8 } else { 0 };
    let snapshot_bytes = (12 + watched_bytes) * input.model.parameter_count();
    let memory_hint = how_to_use_less(settings, &input.model);
    launch.check_memory(&costs, snapshot_bytes, &memory_hint)?;
    launch.crowding().iter().for_each(|crowding| warn(crowding));
    let data = Data::open(&config, &input.model, text)?;
    let (folder, newest) = RunFolder::open(&config, arguments.resume)?;

    let (dtype, seed, weights) = (device_dtype(settings.train.dtype), settings.model.seed, input.clone());
    let ranks = launch
        .start(shards, options, move |shard, split, queue| Ok(weights.parameters(shard, seed, dtype, split, queue)?))?;
    let stragglers: Vec<Straggler> =
        settings.balance.stragglers.iter().map(|text| Straggler::parse(text).expect("checked")).collect();
    let (mut progress, mut from, mut widths) = (Progress::default(), None, None);
    let configuration = digest(&config.to_toml());
    if let Some(newest) = &newest {
        let state = checkpoint::load_from(newest, &ranks)?;
        progress = state.progress;
        widths = Some(state.widths);
        from = Some(serde_json::from_value(state.feed).map_err(|_| not_a_state(newest.path()))?);
        folder.say_what_changed(&config, state.configuration == configuration)?;
    }
    // Bad data show themselves before an earlier run is replaced.
    let mut feed = Primed::new(data.training(from)?)?;
    check_evaluation(&data)?;
    folder.claim(&config, newest.is_some())?;
    let title =
        format!("{}, {} parameters", input.model.config.family.class, text::count(input.model.parameter_count()));
    let slowed = Straggler::factors(&stragglers, launch.ranks(), progress.step + 1);
    ranks.throttle(slowed.clone())?;
    let peaks = ranks.each(move |trainer| peak_flops_per_s(&trainer.device, dtype))?;
    let capacities = ranks.each(|trainer| trainer.device.usage().capacity_bytes)?;
    let fits = |shards: &[Model]| {
        let costs = self::costs(settings, shards, &launch, options);
        match launch.kind {
            DeviceKind::Cpu => launch.check_memory(&costs, snapshot_bytes, &memory_hint).is_ok(),
            // Each rank has taken its share of the card by now.
            DeviceKind::Cuda => costs.iter().zip(&capacities).all(|(cost, &capacity)| cost.peak_bytes <= capacity),
        }
    };
    let (mut balance, divided) =
        balance::start(settings, &input.model, &launch, &ranks, widths.as_ref(), &peaks, &fits)?;
    let mut attending = Attending {
        folder: &folder,
        interruption: &interruption,
        data: &data,
        eval_batches: config.eval_batches(),
        progress: ProgressLine::new(stderr(), progress_options(settings)),
        records: Records::open(
            &folder,
            &format!("{}: {title}", folder.name()),
            progress.step,
            settings.output.tensorboard,
        )?,
        summary: Summary::default(),
        saver: Saver::default(),
        configuration,
        flops_per_token: costs.iter().map(|cost| cost.flops as f64).sum::<f64>()
            / tokens_of_step(settings, &input.model) as f64,
        peak_flops_per_s: peaks.iter().sum(),
        stragglers,
        slowed,
    };
    let begin = match &newest {
        Some(newest) => format!("resumes from `{}`", newest.path().display()),
        None => "begins".to_owned(),
    };
    attending.say(&format!(
        "{title}{}, {} of memory, {begin}",
        launch.describe(),
        text::bytes(peak_bytes(&costs) + snapshot_bytes)
    ))?;
    for line in [describe_batch(settings), describe_stragglers(&attending.stragglers), divided].into_iter().flatten() {
        attending.say(&line)?;
    }

    let stop = evenkeel_train::run(
        &ranks,
        &mut feed,
        &plan(settings),
        balance.as_mut(),
        &mut progress,
        interruption.is_asked(),
        &mut attending,
    )?;
    attending.progress.finish().map_err(evenkeel_train::Error::Report)?;
    if stop == Stop::Interrupted {
        let what = match progress.step {
            0 => "interrupted before the first step".to_owned(),
            step => format!("interrupted after step {step}, which is saved in `{}`", folder.root().display()),
        };
        let hint = Some("continue with the same command and --resume".to_owned());
        return Err(Failure::Interrupted { mistake: Mistake { what, hint }, code: interruption.exit_code() });
    }
    if settings.output.save_model {
        let is_text = data.tokenizer().is_some();
        input.save(
            &folder.model(),
            settings,
            is_text.then_some(tokenizer_files),
            ranks.specs(),
            |id, rows| ranks.read_rows(Kind::Weight, id, rows),
            true,
        )?;
    }
    drop(ranks);
    let samples = match settings.sample.prompts[..] {
        [] => Vec::new(),
        _ => sample::samples(&folder.model(), settings, is_chat)?,
    };
    Ok(conclusion(&attending, &folder, settings, stop, &samples, is_chat))
}

impl Attending<'_> {
    fn say(&mut self, line: &str) -> Result<(), evenkeel_train::Error> {
        self.progress.note(line).map_err(evenkeel_train::Error::Report)
    }
}

pub fn trainer_options(settings: &Settings) -> TrainerOptions {
    let train = &settings.train;
    let optimizer = AdamWOptions {
        beta1: train.beta1 as f32,
        beta2: train.beta2 as f32,
        epsilon: train.epsilon as f32,
        weight_decay: train.weight_decay as f32,
        decay_vectors: false,
        clip_norm: Some(train.clip_norm as f32).filter(|&norm| norm > 0.0),
    };
    TrainerOptions {
        optimizer: Some(optimizer),
        label_smoothing: train.label_smoothing as f32,
        arrangement: arrangement(&settings.parallel),
        longest: settings.data.sequence,
        dropout_seed: train.seed,
    }
}

fn plan(settings: &Settings) -> Plan {
    let train = &settings.train;
    let decay = match train.lr_decay {
        LrDecay::Cosine => Decay::Cosine,
        LrDecay::Linear => Decay::Linear,
        LrDecay::Constant => Decay::Constant,
    };
    let every = |steps: u32| (steps > 0).then_some(u64::from(steps));
    Plan {
        rate: Rate { peak: train.lr, floor: train.min_lr, warmup_steps: train.warmup_steps.into(), decay },
        limits: Limits {
            steps: train.steps.map(u64::from),
            tokens: train.tokens,
            duration: train.minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes)),
        },
        micros_per_step: micros_of_step(settings),
        evaluate_every: settings.eval.every.map(u64::from),
        checkpoint_every: every(settings.output.checkpoint_every),
        nonfinite_limit: train.nonfinite_limit,
    }
}

fn check_evaluation(data: &Data) -> Result<(), Failure> {
    let nothing = || Mistake {
        what: "no record is held out to evaluate on".to_owned(),
        hint: Some("lower data.holdout, give data.eval_paths, or set data.holdout = 0".to_owned()),
    };
    match data.evaluation()? {
        Some(mut feed) => Ok(feed.next()?.map(drop).ok_or_else(nothing)?),
        None => Ok(()),
    }
}

fn tokens_of_step(settings: &Settings, model: &Model) -> usize {
    let micro = blank(settings, model);
    micros_of_step(settings) * micro.tokens(model.config.input)
}

/// Of all shares of the data.
fn micros_of_step(settings: &Settings) -> usize {
    settings.train.accumulate * settings.parallel.dp
}

/// Where a step's batch is made of several.
fn describe_batch(settings: &Settings) -> Option<String> {
    let (batch, accumulate, dp) = (settings.train.batch, settings.train.accumulate, settings.parallel.dp);
    let whole = batch * accumulate * dp;
    (whole > batch).then(|| format!("a step's batch: {batch} × {accumulate} accumulated × dp {dp} = {whole}"))
}

/// What is emulated says so.
fn describe_stragglers(stragglers: &[Straggler]) -> Option<String> {
    let slow = |Straggler { rank, factor, steps }: &Straggler| match *steps.end() {
        u64::MAX => format!("rank {rank} {factor}×"),
        last => format!("rank {rank} {factor}× in steps {} to {last}", steps.start()),
    };
    let slow: Vec<String> = stragglers.iter().map(slow).collect();
    (!slow.is_empty()).then(|| format!("emulated slow ranks: {}", slow.join(", ")))
}

/// A few digits that another text hardly has.
fn digest(text: &str) -> String {
    let mut hasher = std::hash::DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

fn blank(settings: &Settings, model: &Model) -> Samples {
    Samples::blank(model.config.input, settings.train.batch, settings.data.sequence)
}

/// What a run that does not fit in memory can still do without.
fn how_to_use_less(settings: &Settings, model: &Model) -> String {
    let is_of_tokens = matches!(model.config.input, Input::Tokens { .. });
    let ways = [
        (true, "a smaller train.batch"),
        (is_of_tokens, "a smaller data.sequence"),
        (!settings.train.recompute, "train.recompute = true"),
        (settings.train.dtype == Dtype::F32, "train.dtype = \"bf16\""),
        (true, "a smaller model"),
    ];
    let ways: Vec<&str> = ways.into_iter().filter(|(helps, _)| *helps).map(|(_, way)| way).collect();
    format!("use {}", ways.join(" or "))
}

/// What each rank's steps take, from dry runs.
fn costs(settings: &Settings, shards: &[Model], launch: &Launch, options: TrainerOptions) -> Vec<Cost> {
    let micros = vec![blank(settings, &shards[0]); micros_of_step(settings)];
    evenkeel_train::costs(shards, launch.mesh(), launch.zero, options, device_dtype(settings.train.dtype), &micros)
}

fn peak_bytes(costs: &[Cost]) -> u64 {
    costs.iter().map(|cost| cost.peak_bytes).sum()
}

fn progress_options(settings: &Settings) -> ProgressOptions {
    let style = match terminal_size::terminal_size_of(stderr()) {
        Some((width, _)) if stderr().is_terminal() => Style::Terminal { columns: width.0.into() },
        _ => Style::Plain,
    };
    let total_steps = settings.train.steps.map(u64::from);
    ProgressOptions { style, total_steps, log_every: settings.output.log_every.into() }
}

fn not_a_state(path: &std::path::Path) -> Mistake {
    Mistake {
        what: format!("`{}` says nothing of the data's place", path.display()),
        hint: Some("the checkpoint was written by another version, or changed".to_owned()),
    }
}

/// What is said at the end.
fn conclusion(
    attending: &Attending,
    folder: &RunFolder,
    settings: &Settings,
    stop: Stop,
    samples: &[String],
    is_chat: bool,
) -> String {
    let ended = match stop {
        Stop::Done => "as planned",
        Stop::DataEnded => "the data are used up",
        Stop::Interrupted => unreachable!("an interrupted run has no conclusion"),
    };
    let mut files =
        vec![("metrics", folder.metrics().display().to_string()), ("curve", folder.curve().display().to_string())];
    if settings.output.save_model {
        files.push(("model", folder.model().display().to_string()));
    }
    let mut out = Vec::new();
    attending.summary.write(&mut out, ended, &files).expect("memory takes all bytes");
    let mut lines = vec![String::from_utf8_lossy(&out).trim_end().to_owned()];
    if !samples.is_empty() {
        let how = if is_chat { "answers, asked by its chat template" } else { "writes" };
        lines.push(format!("\nWhat it {how}:"));
        lines.extend(samples.iter().map(|sample| format!("  {}", sample.trim_end().replace('\n', "\n  "))));
    }
    if settings.output.save_model {
        let model = folder.model().display().to_string();
        lines.push("\nWhat to try next:".to_owned());
        if attending.data.tokenizer().is_some() {
            let prompt = settings.sample.prompts.first().map_or("Hello", String::as_str);
            let chat = if is_chat { " --chat" } else { "" };
            lines.push(format!("  evenkeel generate {model}{chat} --prompt {prompt:?}"));
        }
        lines.push(format!("  evenkeel inspect {model}"));
    }
    lines.join("\n")
}
