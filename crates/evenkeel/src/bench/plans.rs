//! `evenkeel bench plans`: predicted steps beside measured ones, of strategies that were not measured for the profile.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use evenkeel_device::cpu_report;
use evenkeel_model::ZeroStage;
use evenkeel_plan::{Judge, NotKnown, Profile, RankDevices, Space, foretell, recomputing};
use evenkeel_step::schedule::{Arrangement, Schedule};
use evenkeel_step::{Mesh, Strategy};
use evenkeel_store::{read_json, write_file_atomically};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::devices::DeviceArguments;
use super::llama::Llama;
use super::{between, median};
use crate::memory::Beside;
use crate::planning::{Job, Judging, Seen, Source, describe, plan_by_profile, shared_cores, speeds};
use crate::{Failure, Mistake, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    llama: Llama,
    #[command(flatten)]
    devices: DeviceArguments,
    /// Strategies to measure, spread over all that there are. The one that a plan takes and usual ones are measured, too.
    #[arg(long, default_value_t = 24, value_parser = between::<1, 100000>)]
    cases: usize,
    /// Measure all strategies that a plan compares where everything fits.
    #[arg(long)]
    all: bool,
    /// Rounds; every strategy runs once in each.
    #[arg(long, default_value_t = 3, value_parser = between::<1, 100000>)]
    rounds: usize,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Keep what was measured in this file.
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
    /// Measure nothing: foretell again what this file of --keep has, with the same options.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["keep", "cases", "all", "rounds"])]
    again: Option<PathBuf>,
}

/// The cases' measured steps, the profile, and the strategy that the plan took.
#[derive(Serialize, Deserialize)]
struct Measurements {
    strategies: usize,
    /// Strategies that the profile was measured with.
    learnt: usize,
    /// Strategies left out, since a few like them say too little about them.
    unknown: usize,
    profile_s: f64,
    profile: Profile,
    chosen: Strategy,
    cases: Vec<Case>,
}

/// Strategies that are measured, at most, to foretell one like them.
const MOST_ALIKE: usize = 3;

#[derive(Serialize, Deserialize)]
struct Case {
    strategy: Strategy,
    /// Whether the profile was measured with it.
    is_learnt: bool,
    /// By rank: the arena's peak, by a dry run and as measured.
    peak_bytes: [Vec<u64>; 2],
    #[serde(skip)]
    foretold_s: f64,
    measured_s: Vec<f64>,
}

impl Case {
    fn error(&self) -> f64 {
        self.foretold_s / self.step_s() - 1.0
    }

    fn step_s(&self) -> f64 {
        median(self.measured_s.iter().copied())
    }

    /// The largest share by which a rank's peak is off.
    fn memory_error(&self) -> f64 {
        let [foretold, measured] = &self.peak_bytes;
        let off = foretold.iter().zip(measured).map(|(foretold, measured)| *foretold as f64 / *measured as f64 - 1.0);
        off.max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0)
    }
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let model = &arguments.llama.model()?.for_device(arguments.devices.device.into());
    let Llama { sequence, .. } = arguments.llama;
    let job = Job {
        model: Cow::Borrowed(model),
        options: arguments.llama.trainer_options(),
        sequence,
        beside: &|_| Beside::default(),
        uncut: BTreeSet::new(),
        may_use_all_gpus: false,
        axes: [None; 3],
        seen: Seen::default(),
    };
    let mut measurements = match &arguments.again {
        Some(file) => read(file, &job)?,
        None => measure(arguments, &job)?,
    };
    if let Some(path) = &arguments.keep {
        let json = serde_json::to_string(&measurements).expect("numbers and names");
        let written: Result<(), evenkeel_store::Error> = write_file_atomically(path, |file| file.put(json.as_bytes()));
        written.map_err(Failure::fault)?;
    }
    let Measurements { profile, cases, .. } = &mut measurements;
    for case in &mut *cases {
        case.foretold_s = step_s(&job, profile, &case.strategy).map_err(Failure::fault)?;
    }
    let mut errors: Vec<f64> = cases.iter().filter(|case| !case.is_learnt).map(|case| case.error().abs()).collect();
    errors.sort_by(f64::total_cmp);
    let (middle, worst) = (median(errors.iter().copied()), *errors.last().expect("there are cases"));
    let Measurements { strategies, learnt, unknown, profile_s, chosen, cases, .. } = &measurements;
    if arguments.json {
        let case = |case: &Case| {
            json!({ "strategy": case.strategy, "is_learnt": case.is_learnt, "usual": usual_name(&case.strategy),
                "is_chosen": case.strategy == *chosen, "foretold_s": case.foretold_s, "measured_s": case.measured_s,
                "peak_bytes": case.peak_bytes })
        };
        let cases: Vec<_> = cases.iter().map(case).collect();
        return Ok(json!({ "strategies": strategies, "learnt": learnt, "unknown": unknown, "profile_s": profile_s,
            "median_error": middle, "worst_error": worst, "cases": cases })
        .to_string());
    }
    let header = ["strategy", "micros", "step", "foretold", "error", "memory", ""];
    let cells = |case: &Case| {
        vec![
            describe(&case.strategy),
            format!("{} × {}", case.strategy.accumulate, case.strategy.micro_batch),
            format!("{:.1} ms", 1e3 * median(case.measured_s.iter().copied())),
            format!("{:.1} ms", 1e3 * case.foretold_s),
            format!("{:+.1} %", 100.0 * case.error()),
            if case.memory_error() == 0.0 {
                "exact".to_owned()
            } else {
                format!("{:+.2} %", 100.0 * case.memory_error())
            },
            if case.is_learnt { "in the profile".to_owned() } else { String::new() },
        ]
    };
    let table = text::table(&header, &cases.iter().map(cells).collect::<Vec<_>>());
    Ok(format!(
        "{strategies} strategies; a plan in {profile_s:.0} s; {learnt} measured on a shortened model; {unknown} left out that they say \
         too little about\n\n{table}\n\nerror of those not in the profile: {} in \
         the median, {} at worst\n{}",
        text::percent(middle),
        text::percent(worst),
        choice(cases, chosen),
    ))
}

fn read(file: &Path, job: &Job) -> Result<Measurements, Failure> {
    const MOST_BYTES: u64 = 256 << 20;
    let mistake = |what: String, hint: &str| Failure::from(Mistake { what, hint: Some(hint.to_owned()) });
    let found: Measurements =
        read_json(file, MOST_BYTES).map_err(|error| mistake(error.to_string(), "--again takes a file of --keep"))?;
    let is_of_job = |case: &Case| {
        job.can_be_cut(&case.strategy)
            && !case.measured_s.is_empty()
            && step_s(job, &found.profile, &case.strategy).is_ok()
    };
    let has = |is_so: &dyn Fn(&Case) -> bool| found.cases.iter().any(is_so);
    let has_all = has(&|case| !case.is_learnt) && has(&|case| case.strategy == found.chosen);
    if !(found.profile.is_sound() && has_all && found.cases.iter().all(is_of_job)) {
        let what = format!("{} has no measurements of this model and these devices", file.display());
        return Err(mistake(what, "give the options of the command that kept it"));
    }
    Ok(found)
}

fn step_s(job: &Job, profile: &Profile, strategy: &Strategy) -> Result<f64, NotKnown> {
    let places = job.places(strategy);
    foretell(&profile.on(&places), &job.tasks(strategy, &places)).map(|foretold| foretold.step_s)
}

/// Makes a plan, and measures the cases in turns with what its profile was measured with.
fn measure(arguments: &Arguments, job: &Job) -> Result<Measurements, Failure> {
    let start = Instant::now();
    let (space, mut profile) = (arguments.space(), Profile::default());
    let plan = plan_by_profile(job, &space.like, 1, &space.devices, &mut profile)?;
    let profile_s = start.elapsed().as_secs_f64();
    let chosen = plan.fitting[0].timed.strategy.clone();
    let all: Vec<Strategy> = space.strategies().into_iter().filter(|it| job.can_be_cut(it)).collect();
    let leaner = |strategy: &Strategy| recomputing(strategy, true);
    // Stages are cut once, so that their cuts are the same in all rounds.
    let cut = |all: Vec<Strategy>, profile: &mut Profile| -> Vec<Strategy> {
        let judging = Judging::new(job, Source::Machine(profile), &|_| ());
        all.into_iter().map(|it| judging.cut(it).strategy).collect()
    };
    let with_leaner = all.iter().flat_map(|it| [it.clone()].into_iter().chain(leaner(it))).collect();
    let (all, with_leaner) = (cut(all, &mut profile), cut(with_leaner, &mut profile));
    let held: Vec<&Strategy> = with_leaner.iter().filter(|it| !is_learnt(job, it)).collect();
    let apart = (held.len() as f64 / arguments.cases as f64).max(1.0);
    let spread = (0..arguments.cases.min(held.len())).map(|place| held[(place as f64 * apart) as usize]);
    let spread: Vec<&Strategy> = if arguments.all { all.iter().collect() } else { spread.collect() };
    for strategy in &spread {
        // Strategies like it tell what the profile lacks.
        let mut others: Vec<&&Strategy> = held.iter().filter(|other| !spread.contains(other)).collect();
        others.sort_by_key(|other| Reverse(likeness(strategy, other)));
        for other in others.into_iter().take(MOST_ALIKE) {
            if step_s(job, &profile, strategy).is_ok() {
                break;
            }
            job.learn(&mut profile, other)?;
        }
    }
    let is_known = |strategy: &&Strategy| step_s(job, &profile, strategy).is_ok();
    let unknown = spread.iter().filter(|strategy| !is_known(strategy)).count();
    let usual = all.iter().filter(|strategy| usual_name(strategy).is_some());
    let mut cases: Vec<Case> = Vec::new();
    for strategy in spread.into_iter().chain([&chosen]).chain(usual).filter(is_known) {
        if !cases.iter().any(|case| case.strategy == *strategy) {
            let is_learnt = is_learnt(job, strategy);
            let costs = job.costs(strategy, &job.places(strategy));
            let peak_bytes = [costs.iter().map(|cost| cost.peak_bytes).collect(), Vec::new()];
            let (strategy, foretold_s, measured_s) = (strategy.clone(), 0.0, Vec::new());
            cases.push(Case { strategy, is_learnt, peak_bytes, foretold_s, measured_s });
        }
    }
    if cases.iter().all(|case| case.is_learnt) {
        let what = "every strategy was measured for the profile: there is none left to foretell".to_owned();
        return Err(Mistake { what, hint: Some("use a larger --batch or more --threads".to_owned()) }.into());
    }
    let learnt = job.learnt();
    for round in 0..arguments.rounds {
        if round > 0 {
            // Half of what the profile was measured with, over all rounds.
            let turn = learnt.iter().skip(round - 1).step_by(2 * (arguments.rounds - 1));
            turn.into_iter().try_for_each(|strategy| job.learn(&mut profile, strategy))?;
        }
        for case in &mut cases {
            let ranks = job.start_whole(&case.strategy)?;
            case.measured_s.push(job.step(&ranks, &case.strategy, round as u64)?.untraced_s);
            case.peak_bytes[1] = ranks.with_trainers(|trainer| trainer.device.usage().peak_bytes)?;
        }
    }
    let (strategies, learnt) = (with_leaner.len(), learnt.len());
    Ok(Measurements { strategies, learnt, unknown, profile_s, profile, chosen, cases })
}

/// Whether the profile was measured with it, however its stages were cut, or with as many of its micro-batches as say the same.
fn is_learnt(job: &Job, strategy: &Strategy) -> bool {
    let anyhow = |it: &Strategy| {
        let accumulate = it.accumulate.min(2 * it.pipeline.stages());
        Strategy { accumulate, ..it.clone() }.cut_at(&vec![0; it.pipeline.cuts.len()])
    };
    job.learnt().iter().any(|learnt| anyhow(learnt) == anyhow(strategy))
}

/// How much two strategies have in common.
fn likeness(one: &Strategy, other: &Strategy) -> usize {
    let (of_one, of_other) = (one.arrangement, other.arrangement);
    let has = |is_alike: bool, weight: usize| if is_alike { weight } else { 0 };
    has(one.mesh() == other.mesh() && one.cut.weights == other.cut.weights, 32)
        + has(one.micro_batch == other.micro_batch, 16)
        + has(of_one.parts == of_other.parts && one.cut.split_sequence == other.cut.split_sequence, 8)
        + has(of_one.schedule == of_other.schedule && of_one.recompute == of_other.recompute, 4)
        + has(one.zero == other.zero, 2)
        + has(one.pipeline == other.pipeline, 1)
}

/// The chosen strategy beside the fastest and the usual ones, by what they were measured to take.
fn choice(cases: &[Case], chosen: &Strategy) -> String {
    let chosen = cases.iter().find(|case| case.strategy == *chosen).expect("it was measured");
    let fastest = cases.iter().min_by(|a, b| a.step_s().total_cmp(&b.step_s())).expect("it was measured");
    let slower = |case: &Case| text::percent(case.step_s() / chosen.step_s() - 1.0);
    let mut usual: Vec<&Case> = cases.iter().filter(|case| usual_name(&case.strategy).is_some()).collect();
    usual.sort_by(|a, b| a.step_s().total_cmp(&b.step_s()));
    let told = |case: &&Case| format!("{} {}", usual_name(&case.strategy).expect("it is usual"), slower(case));
    let usual = usual.iter().map(told).collect::<Vec<_>>().join(", ");
    format!(
        "chosen: {}, {:.1} ms; the fastest that was measured, {}, takes {} of that\nmore than the chosen one: {usual}",
        describe(&chosen.strategy),
        1e3 * chosen.step_s(),
        describe(&fastest.strategy),
        text::percent(fastest.step_s() / chosen.step_s()),
    )
}

/// People take these without a plan: one micro-batch, and all ranks for one thing.
fn usual_name(strategy: &Strategy) -> Option<&'static str> {
    let Mesh { pp, dp, tp } = strategy.mesh();
    let is_plain = strategy.accumulate == 1
        && strategy.arrangement == Arrangement::of(Schedule::usual(false, tp))
        && (tp == 1 || strategy.cut.split_sequence)
        && strategy.cut.weights.iter().all(|weight| *weight == strategy.cut.weights[0]);
    match (pp, dp, tp, strategy.zero) {
        _ if !is_plain => None,
        (1, 2.., 1, ZeroStage::Nothing) => Some("DDP"),
        (1, 2.., 1, ZeroStage::Values) => Some("ZeRO 3"),
        (1, 1, 2.., _) => Some("tp"),
        _ => None,
    }
}

impl Arguments {
    fn space(&self) -> Space {
        let like = self.llama.strategy(1, 1, Some(1));
        let devices = match self.devices.are_gpus() {
            true => {
                let parts = &self.devices.virtual_gpus;
                let placed = self.devices.place(Strategy { dp: parts.len().max(1), ..like.clone() });
                vec![RankDevices { speeds: speeds(&placed), devices: placed.devices }]
            }
            false => {
                let cores = self.devices.threads.unwrap_or_else(|| cpu_report().cores);
                shared_cores(cores)
            }
        };
        Space { devices, sequences: self.llama.batch, like, uncut: BTreeSet::new() }
    }
}
