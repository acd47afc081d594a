//! `evenkeel train CONFIG`: from a configuration to a trained model.

mod balance;
mod observer;
mod records;
mod sample;

use std::borrow::Cow;
use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::time::Duration;

use evenkeel_device::DeviceKind;
use evenkeel_model::Model;
use evenkeel_report::{Begun, BestEvaluation, ProgressLine, ProgressOptions, Reads, RunEvent, Sink, Style, Summary};
use evenkeel_step::{Devices, Strategy};
use evenkeel_store::Digest;
use evenkeel_store::checkpoint::Checkpoint;
use evenkeel_train::checkpoint::{Opened, RunOrigin, Saver};
use evenkeel_train::{
    Balancing, Best, Cost, Decay, EarlyStop, Form, Limits, Progress, Rate, Restage, RunGoals, Samples, StateKind, Stop,
    TrainerOptions, checkpoint,
};

use crate::arrange::arrange;
use crate::config::{DecayForm, Dtype, LrDecay, Overrides, Settings, Straggler};
use crate::inputs::feed::{Data, Primed, Text, first_of};
use crate::inputs::model::{ModelInput, SavedTokenizer};
use crate::inputs::run_folder::{self, RunFolder};
use crate::interruption::Interruption;
use crate::launch::Launch;
use crate::memory::{Beside, Room, check_steps, samples_bytes};
use crate::planning::{Forecast, Job, Seen, choose};
use crate::strategy::{plan as tp_plan, strategy};
use crate::{Failure, Mistake, process, stages, text, warn};
use observer::{Observer, Told};

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
    let mut config = arguments.overrides.read()?;
    let text = Text::open(&config)?;
    let tokenizer = text.as_ref().map(|text| SavedTokenizer::of(text, &config.settings)).transpose()?;
    let is_chat = sample::is_chat(&config.settings, text.as_ref())?;
    let input = Arc::new(ModelInput::open(&mut config, text.as_ref().map(|text| &text.tokenizer))?);
    let before = if arguments.resume { run_folder::configured_before(&config) } else { None };
    let is_left_open = config.is_parallel_open;
    if is_left_open && has_several_gpus(&config.settings) {
        let has_as_many = |before: &&Settings| sequences_of_step(before) == sequences_of_step(&config.settings);
        match before.as_ref().filter(has_as_many) {
            Some(before) => as_before(&mut config.settings, before),
            None => config.settings.parallel.auto = true,
        }
    }
    if let Some(before) = before.as_ref().filter(|_| config.settings.parallel.auto && !is_left_open) {
        as_before(&mut config.settings, before);
    }
    let planned = config.settings.parallel.auto.then(|| planned(&mut config.settings, &input)).transpose()?;
    let (planned, forecast) = planned.unzip();
    let strategy = strategy(&config.settings, &input.model, &input.json)?;
    let mut launch = Launch::new(strategy, &config.settings.parallel);
    let arranged = arrange_steps(&mut config.settings, &input.model, &mut launch, before.as_ref())?;
    let (settings, strategy) = (&config.settings, &launch.strategy);
    let options = trainer_options(settings);
    let shards = input.model.cut(&strategy.cut)?;
    let costs = costs(settings, &shards, strategy);
    let (beside, memory_hint) = (beside(settings, &input.model, strategy), how_to_use_less(settings, &input.model));
    let peak = check_steps(strategy, &costs, beside, &memory_hint)?;
    launch.crowding().iter().for_each(|crowding| warn(crowding));
    let data = Data::open(&config, &input.model, text)?;
    let (folder, newest) = RunFolder::open(&config, arguments.resume)?;

    let (dtype, seed, weights) = (strategy.dtype, settings.model.seed, input.clone());
    let ranks = launch
        .start(shards, options, move |shard, split, queue| Ok(weights.parameters(shard, seed, dtype, split, queue)?))?;
    let stragglers: Vec<Straggler> =
        settings.balance.stragglers.iter().map(|text| Straggler::parse(text).expect("checked")).collect();
    let (mut progress, mut from, mut widths) = (Progress::default(), None, None);
    let configuration = Digest::of(config.to_toml().as_bytes()).to_string();
    let origin = RunOrigin { configuration, base: input.base_digest() };
    if let Some(newest) = &newest {
        let state = checkpoint::load_from(newest, &ranks)?;
        progress = state.progress;
        widths = Some(state.widths);
        from = Some(serde_json::from_value(state.feed).map_err(|_| not_a_state(newest.path()))?);
        if let (Some(before), Some(now)) = (&state.base, &origin.base)
            && before != now
        {
            return Err(other_base(newest.path()).into());
        }
        if state.configuration != origin.configuration {
            folder.say_what_changed(&config, before.as_ref())?;
        }
        folder.forget_lost_best(&mut progress);
    }
    // Bad data are found before an earlier run is replaced.
    let mut feed = Primed::new(data.training(from)?)
        .map_err(|error| ended_by_data(data.first_bad(error), &data, progress.step, &folder))?;
    check_evaluation(&data, |error| ended_by_data(error, &data, progress.step, &folder))?;
    folder.claim(&config, strategy, newest.is_some())?;
    let title = describe_model(&input.model);
    let slowed = Straggler::factors(&stragglers, strategy.ranks(), progress.step + 1);
    ranks.throttle(slowed.clone())?;
    let peaks = ranks.peak_flops_per_s()?;
    let memory = ranks.memory()?;
    // By now the ranks' tensors are in the process, or each rank has taken its share of a GPU.
    let of_gpus = || Room::Gpus(memory.iter().map(|memory| memory.capacity_bytes).collect());
    let room = peak.map_or_else(of_gpus, Room::Machine);
    let fullness =
        |shards: &[Model], strategy: &Strategy| room.fullness(strategy, &self::costs(settings, shards, strategy));
    let fits = |shards: &[Model]| evenkeel_balance::fits(&fullness(shards, strategy));
    let (mut balance, divided) =
        balance::start(settings, &input.model, &launch, &ranks, widths.as_ref(), &peaks, &fits)?;
    let mut stages = stages::may_change(settings, &input.model, &launch).then(|| {
        let staging = stages::staging(&input.model, &launch, settings.data.sequence);
        let shards = input.model.cut(&strategy.cut).expect("the run has this cut");
        Restage::new(strategy, staging, move |cuts| {
            stages::by_place(strategy, &fullness(&shards, &strategy.clone().cut_at(cuts)))
        })
    });
    let mut summary = Summary::default();
    let curve_title = format!("{}: {title}", folder.name());
    let mut sinks: Vec<Box<dyn Sink + '_>> = vec![Box::new(&mut summary)];
    sinks.extend(records::open(&folder, &curve_title, &progress, settings.output.tensorboard)?);
    sinks.push(Box::new(ProgressLine::new(stderr(), progress_options(settings))));
    let slow = describe_stragglers(&stragglers);
    let mut observer = Observer {
        folder: &folder,
        interruption: &interruption,
        data: &data,
        eval_batches: config.eval_batches(),
        sinks,
        saver: Saver::default(),
        origin,
        flops_per_token: costs.iter().map(|cost| cost.flops as f64).sum::<f64>()
            / tokens_of_step(settings, &input.model, strategy) as f64,
        peak_flops_per_s: peaks.iter().sum(),
        stragglers,
        slowed,
        parts: strategy.arrangement.parts,
        told: Told::default(),
        forecast,
        model: &input.model,
        strategy,
    };
    observer.emit(&RunEvent::Begun(Begun {
        title,
        ranks: launch.describe(),
        memory_bytes: peak.map_or_else(|| costs.iter().map(|cost| cost.arena_bytes).sum(), |peak| peak.bytes()),
        is_gpu_memory: peak.is_none(),
        step: progress.step,
        resumed_from: newest.as_ref().map(|newest| newest.path().display().to_string()),
        best: progress.best.map(|Best { step, loss }| BestEvaluation { step, loss }),
    }))?;
    let parts = peak.map(|peak| format!("peak memory: {}", peak.describe()));
    let prompt = data.describe_prompt().map(|prompt| format!("instructions use {prompt}"));
    let of_places = stages::describe_memory(strategy, &costs);
    let alone = describe_alone(strategy).filter(|_| is_left_open);
    let begun = [alone, of_places, parts, input.describe_continued(), prompt, describe_batch(strategy), slow, divided];
    planned.into_iter().chain(arranged).chain(begun.into_iter().flatten()).try_for_each(|line| observer.note(line))?;

    let stop = evenkeel_train::run(
        &ranks,
        &mut feed,
        &plan(settings, strategy),
        Balancing { widths: balance.as_mut(), stages: stages.as_mut() },
        &mut progress,
        interruption.is_asked(),
        &mut observer,
    );
    let stop = told_how_it_ended(stop, &mut observer, &progress)?;
    drop(observer);
    if stop == Stop::Interrupted {
        let what = match progress.step {
            0 => "interrupted before the first step".to_owned(),
            step => format!("interrupted after step {step}, which is saved in `{}`", folder.root().display()),
        };
        let hint = Some("continue with the same command and --resume".to_owned());
        return Err(Failure::Interrupted { mistake: Mistake { what, hint }, code: interruption.exit_code() });
    }
    let is_of_last = progress.best.is_some_and(|best| best.step == progress.step);
    let best = folder.best(&progress).filter(|_| settings.output.save_best && !is_of_last);
    if settings.output.save_model {
        let best = best.map(|path| Opened::new(&Checkpoint::open(path)?)).transpose()?;
        let specs = ranks.specs();
        input.save(
            &folder.model(),
            settings,
            tokenizer.as_ref(),
            specs,
            |id, rows| match &best {
                Some(best) => best.read_rows(&specs[id.0], rows),
                None => ranks.read_rows(StateKind::Weight, id, rows),
            },
            true,
        )?;
    }
    drop(ranks);
    interruption.release("interrupted when the model was saved, before all samples were made");
    let samples = match settings.sample.prompts[..] {
        [] => Vec::new(),
        _ => sample::samples(&folder.model(), settings, is_chat)?,
    };
    summary.memory(process::peak_bytes());
    let usage = Usage {
        generates_text: data.reads() == Reads::Tokens,
        is_chat,
        // A folder whose weights are in 4 bits says so itself.
        packs: settings.adapter.packs() && !input.is_saved_packed(),
    };
    Ok(conclusion(&summary, &folder, settings, &progress, &samples, &usage))
}

/// Takes the fastest strategy for the sequences of a step, and says so.
fn planned(settings: &mut Settings, input: &ModelInput) -> Result<(String, Forecast), Failure> {
    let open = settings.clone();
    let beside = |strategy: &Strategy| beside(&open, &input.model, strategy);
    let like = strategy(&open, &input.model, &input.json)?;
    choose(&job(&open, input, &beside)?, &like, settings)
}

/// Shards of a model that is cut, at least.
const LEAST_SHARDS: usize = 2;

/// The job of a run, to be planned.
pub fn job<'a>(
    settings: &Settings,
    input: &'a ModelInput,
    beside: &'a dyn Fn(&Strategy) -> Beside,
) -> Result<Job<'a>, Failure> {
    Ok(Job {
        model: Cow::Borrowed(&input.model),
        options: trainer_options(settings),
        sequence: settings.data.sequence,
        beside,
        uncut: tp_plan(settings.parallel.tp_plan.as_deref(), &input.json)?.uncut(&input.model, LEAST_SHARDS)?,
        may_use_all_gpus: settings.device.cards.is_empty(),
        axes: [None; 3],
        seen: Seen::default(),
    })
}

/// Whether a run may use several GPUs and says nothing about which.
fn has_several_gpus(settings: &Settings) -> bool {
    let device = &settings.device;
    let is_open = device.kind == DeviceKind::Cuda && device.cards.is_empty() && device.virtual_gpus.is_empty();
    is_open && evenkeel_device::cuda_gpus().is_ok_and(|count| count > 1)
}

/// A line about a rank that has several cores to itself, if nobody has asked for that.
fn describe_alone(strategy: &Strategy) -> Option<String> {
    let Devices::Cpu { cores_per_rank, .. } = strategy.devices else { return None };
    (strategy.ranks() == 1 && cores_per_rank > 1).then(|| {
        format!(
            "one rank on {}, since [parallel] is left open; `evenkeel plan` compares strategies",
            text::cores(cores_per_rank)
        )
    })
}

/// All replicas together.
fn sequences_of_step(settings: &Settings) -> usize {
    settings.train.batch * settings.train.accumulate * settings.parallel.dp
}

/// A resumed run goes on as it was planned.
fn as_before(settings: &mut Settings, before: &Settings) {
    let (now, then) = (&mut settings.train, &before.train);
    (now.batch, now.accumulate, now.recompute) = (then.batch, then.accumulate, then.recompute);
    settings.eval.batches = before.eval.batches;
    settings.parallel = before.parallel.clone();
}

fn describe_model(model: &Model) -> String {
    let (class, all, trained) = (model.config.family.class, model.parameter_count(), model.trained_count());
    let of_adapter = if all == trained { String::new() } else { format!(", {} of them trained", text::count(trained)) };
    format!("{class}, {} parameters{of_adapter}", text::count(all))
}

/// Tells the sinks that no step follows, and why.
fn told_how_it_ended(
    stop: Result<Stop, evenkeel_train::Error>,
    observer: &mut Observer,
    progress: &Progress,
) -> Result<Stop, Failure> {
    match stop {
        Ok(stop) => {
            observer.emit(&RunEvent::Ended { step: progress.step, why: why(stop, progress) })?;
            Ok(stop)
        }
        Err(error) => {
            let failure = ended_by_data(error, observer.data, progress.step, observer.folder);
            for Mistake { what, hint } in failure.mistakes() {
                observer.emit(&RunEvent::Fault { what: what.clone(), hint: hint.clone() })?;
            }
            Err(failure)
        }
    }
}

fn why(stop: Stop, progress: &Progress) -> String {
    match stop {
        Stop::Done => "as planned".to_owned(),
        Stop::DataEnded => "the data are used up".to_owned(),
        Stop::NoGain => describe_no_gain(progress),
        Stop::Interrupted => "interrupted".to_owned(),
    }
}

pub fn trainer_options(settings: &Settings) -> TrainerOptions {
    let train = &settings.train;
    TrainerOptions {
        optimizer: Some(train.optimizer_options()),
        label_smoothing: train.label_smoothing as f32,
        longest: settings.data.sequence,
        dropout_seed: train.seed,
    }
}

fn plan(settings: &Settings, strategy: &Strategy) -> RunGoals {
    let train = &settings.train;
    let form = match train.lr_decay_form {
        None | Some(DecayForm::Cosine) => Form::Cosine,
        Some(DecayForm::Linear) => Form::Linear,
        Some(DecayForm::Sqrt) => Form::Sqrt,
    };
    let decay = match train.lr_decay {
        LrDecay::Cosine => Decay::Cosine,
        LrDecay::Linear => Decay::Linear,
        LrDecay::Constant => Decay::Constant,
        LrDecay::CosineRestarts => Decay::Restarts { cycles: train.lr_cycles.expect("resolved") },
        LrDecay::Polynomial => Decay::Polynomial { power: train.lr_power.expect("resolved") },
        LrDecay::Wsd => Decay::Stable { decay_share: train.lr_decay_share.expect("resolved"), form },
    };
    let min_delta = settings.eval.min_delta.unwrap_or(0.0);
    let every = |steps: u32| (steps > 0).then_some(u64::from(steps));
    RunGoals {
        rate: Rate { peak: train.lr, floor: train.min_lr, warmup_steps: train.warmup_steps.into(), decay },
        limits: Limits {
            steps: train.steps.map(u64::from),
            tokens: train.tokens,
            duration: train.minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes)),
        },
        micros_per_step: strategy.micros_per_step(),
        evaluate_every: settings.eval.every.map(u64::from),
        checkpoint_every: every(settings.output.checkpoint_every),
        nonfinite_limit: train.nonfinite_limit,
        keep_best: settings.output.keep_best,
        early_stop: settings.eval.patience.map(|patience| EarlyStop { patience, min_delta }),
    }
}

fn check_evaluation(data: &Data, ended: impl Fn(evenkeel_train::Error) -> Failure) -> Result<(), Failure> {
    let nothing = || Mistake {
        what: "no record is held out to evaluate on".to_owned(),
        hint: Some("lower data.holdout, give data.eval_paths, or set data.holdout = 0".to_owned()),
    };
    match data.evaluation()? {
        Some(mut feed) => Ok(first_of(&mut *feed).map_err(ended)?.map(drop).ok_or_else(nothing)?),
        None => Ok(()),
    }
}

fn tokens_of_step(settings: &Settings, model: &Model, strategy: &Strategy) -> usize {
    strategy.micros_per_step() * blank(settings, model).tokens(model.config.input)
}

/// `None` unless a step's batch is made of several.
fn describe_batch(strategy: &Strategy) -> Option<String> {
    let Strategy { micro_batch: batch, accumulate, dp, .. } = *strategy;
    let whole = batch * strategy.micros_per_step();
    (whole > batch).then(|| format!("a step's batch: {batch} × {accumulate} accumulated × dp {dp} = {whole}"))
}

/// Says that the stragglers are emulated.
fn describe_stragglers(stragglers: &[Straggler]) -> Option<String> {
    let slow = |Straggler { rank, factor, steps }: &Straggler| match *steps.end() {
        u64::MAX => format!("rank {rank} {factor}×"),
        last => format!("rank {rank} {factor}× in steps {} to {last}", steps.start()),
    };
    let slow: Vec<String> = stragglers.iter().map(slow).collect();
    (!slow.is_empty()).then(|| format!("emulated slow ranks: {}", slow.join(", ")))
}

fn blank(settings: &Settings, model: &Model) -> Samples {
    Samples::blank(model.config.input, settings.train.batch, settings.data.sequence)
}

/// Decides how the steps of a run are arranged, if its configuration leaves that open; see [`arrange`].
pub fn arrange_steps(
    settings: &mut Settings,
    model: &Model,
    launch: &mut Launch,
    before: Option<&Settings>,
) -> Result<Vec<String>, Failure> {
    let room = Room::of(&launch.strategy, beside(settings, model, &launch.strategy));
    arrange(settings, model, launch, before, |settings, strategy| {
        let shards = model.cut(&strategy.cut).expect("a cut that the model allows");
        room.fullness(strategy, &costs(settings, &shards, strategy))
    })
}

/// Ways in which a run that does not fit in memory can use less.
fn how_to_use_less(settings: &Settings, model: &Model) -> String {
    let is_of_tokens = model.config.input.is_text();
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

/// The costs of a step to each rank, from dry runs.
pub fn costs(settings: &Settings, shards: &[Model], strategy: &Strategy) -> Vec<Cost> {
    let micros = vec![blank(settings, &shards[0]); strategy.micros_per_step()];
    evenkeel_train::costs(shards, strategy, trainer_options(settings), &micros)
}

/// The host's memory beside the ranks' tensors.
pub fn beside(settings: &Settings, model: &Model, strategy: &Strategy) -> Beside {
    let every = settings.output.checkpoint_every;
    // The last checkpoint is written directly from the ranks' state.
    let copies = settings.output.keep_best || (every > 0 && settings.train.steps.is_none_or(|steps| steps > every));
    // If changes are watched, earlier weights are kept, and a checkpoint has them, too.
    let watched_bytes = if balance::watches_changes(settings) { 8 * model.parameter_count() } else { 0 };
    let state_bytes = settings.train.optimizer_options().rule.state_bytes(model);
    let copy_bytes = watched_bytes + if copies { state_bytes } else { 0 };
    Beside { copy_bytes, data_bytes: samples_bytes(&blank(settings, model), strategy) }
}

fn progress_options(settings: &Settings) -> ProgressOptions {
    let style = match terminal_size::terminal_size_of(stderr()) {
        Some((width, _)) if stderr().is_terminal() => Style::Terminal { columns: width.0.into() },
        _ => Style::Plain,
    };
    let total_steps = settings.train.steps.map(u64::from);
    ProgressOptions { style, total_steps, log_every: settings.output.log_every.into() }
}

fn other_base(checkpoint: &std::path::Path) -> Mistake {
    Mistake {
        what: format!("model.path has other weights than those whose adapter `{}` holds", checkpoint.display()),
        hint: Some("give the model that the run began with, or begin another run with --output".to_owned()),
    }
}

fn not_a_state(path: &std::path::Path) -> Mistake {
    Mistake {
        what: format!("`{}` has no dataset position", path.display()),
        hint: Some("the checkpoint was written by another version, or changed".to_owned()),
    }
}

/// If data end a run: what is saved of it, and how to continue it.
fn ended_by_data(error: evenkeel_train::Error, data: &Data, step: u64, folder: &RunFolder) -> Failure {
    let evenkeel_train::Error::Data(error) = error else { return error.into() };
    let saved = match step {
        0 => "the run ends before its first step".to_owned(),
        step => format!("the run ends after step {step}, which is saved in `{}`", folder.root().display()),
    };
    let go_on = match (error.is_of_record(), step) {
        (true, 0) => Some("to skip such records, add --set data.on_bad_record=skip"),
        (true, _) => {
            Some("to skip such records and go on, give the same command with --resume --set data.on_bad_record=skip")
        }
        (false, _) => None,
    };
    let hints: Vec<String> = data.hint(&error).into_iter().chain(go_on.map(str::to_owned)).collect();
    let hint = (!hints.is_empty()).then(|| hints.join("; "));
    Failure::new(error.is_fault(), format!("{error}; {saved}"), hint)
}

/// Quoted for a shell.
fn quoted(text: &str) -> String {
    if !text.contains(['\n', '"', '$', '`', '\\', '!']) {
        return format!("\"{text}\"");
    }
    format!("$'{}'", text.replace('\\', "\\\\").replace('\'', "\\'").replace('\n', "\\n"))
}

fn describe_no_gain(progress: &Progress) -> String {
    let count = progress.evaluations_without_gain;
    let evaluations =
        if count == 1 { "the last evaluation was".to_owned() } else { format!("the last {count} evaluations were") };
    match progress.best {
        Some(Best { step, loss }) => format!("early: {evaluations} no better than that of step {step}, loss {loss:.4}"),
        None => format!("early: {evaluations} not finite"),
    }
}

/// How a trained model is used.
struct Usage {
    generates_text: bool,
    is_chat: bool,
    /// Whether its base is to be held in 4 bits.
    packs: bool,
}

/// The text at the end of a run.
fn conclusion(
    summary: &Summary,
    folder: &RunFolder,
    settings: &Settings,
    progress: &Progress,
    samples: &[String],
    usage: &Usage,
) -> String {
    let mut files =
        vec![("metrics", folder.metrics().display().to_string()), ("curve", folder.curve().display().to_string())];
    if let (Some(path), Some(best)) = (folder.best(progress), progress.best) {
        files.push(("best", format!("{}, evaluation loss {:.4}", path.display(), best.loss)));
    }
    if settings.output.save_model {
        let of_best = progress.best.filter(|_| settings.output.save_best);
        let of_step = of_best.map_or_else(String::new, |best| format!(", of step {}", best.step));
        files.push(("model", format!("{}{of_step}", folder.model().display())));
    }
    let mut out = Vec::new();
    summary.write(&mut out, &files).expect("memory takes all bytes");
    let mut lines = vec![String::from_utf8_lossy(&out).trim_end().to_owned()];
    if !samples.is_empty() {
        let how = if usage.is_chat { "answers through its chat template" } else { "writes" };
        lines.push(format!("\nWhat it {how}:"));
        lines.extend(samples.iter().map(|sample| format!("  {}", sample.trim_end().replace('\n', "\n  "))));
    }
    if settings.output.save_model {
        let model = folder.model().display().to_string();
        lines.push("\nWhat to try next:".to_owned());
        let base = if usage.packs { " --base nf4" } else { "" };
        if usage.generates_text {
            let prompt = settings.sample.prompts.first().map_or("Hello", String::as_str);
            let chat = if usage.is_chat { " --chat" } else { "" };
            lines.push(format!("  evenkeel generate {model}{base}{chat} --prompt {}", quoted(prompt)));
        }
        lines.push(format!("  evenkeel inspect {model}{base}"));
    }
    lines.join("\n")
}
