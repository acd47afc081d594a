//! `evenkeel bench plans`: predicted steps beside measured ones, of strategies that were not measured for the profile.

use std::borrow::Cow;
use std::collections::BTreeSet;

use evenkeel_device::cpu_report;
use evenkeel_model::ZeroStage;
use evenkeel_plan::{Judge, NotKnown, Profile, RankDevices, Space, foretell, recomputing};
use evenkeel_step::schedule::{Arrangement, Schedule};
use evenkeel_step::{Mesh, Strategy};
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
    /// Measure all strategies.
    #[arg(long)]
    all: bool,
    /// Rounds; every strategy runs once in each.
    #[arg(long, default_value_t = 3, value_parser = between::<1, 100000>)]
    rounds: usize,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

struct Case {
    strategy: Strategy,
    /// Whether the profile was measured with it.
    is_learnt: bool,
    /// By rank: the arena's peak, by a dry run and as measured.
    peak_bytes: [Vec<u64>; 2],
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
        seen: Seen::default(),
    };
    let with_leaner = |strategy: Strategy| {
        let leaner = recomputing(&strategy, true);
        [strategy].into_iter().chain(leaner)
    };
    let all = arguments.space().strategies().into_iter().filter(|it| job.can_be_cut(it)).flat_map(with_leaner);
    // Stages are cut before anything is measured, so that their cuts are the same in all rounds.
    let mut nothing = Profile::default();
    let unmeasured = Judging::new(&job, Source::Machine(&mut nothing), &|_| ());
    let all: Vec<Strategy> = all.map(|it| unmeasured.cut(it).strategy).collect();
    let mut profile = Profile::default();
    let step_s = |profile: &Profile, strategy: &Strategy| {
        let places = job.places(strategy);
        foretell(&profile.on(&places), &job.tasks(strategy, &places)).map(|foretold| foretold.step_s)
    };
    let start = std::time::Instant::now();
    let mut learnt: Vec<&Strategy> = Vec::new();
    let mut learn = |profile: &mut Profile, strategy| {
        learnt.push(strategy);
        job.learn(profile, strategy)
    };
    all.iter().filter(|it| is_plain(it)).try_for_each(|strategy| learn(&mut profile, strategy))?;
    for strategy in &all {
        if let Err(NotKnown::NotMeasured(missing)) = step_s(&profile, strategy) {
            tracing::info!(%strategy, %missing, "measures what the profile lacks");
            learn(&mut profile, strategy)?;
        }
    }
    let profile_s = start.elapsed().as_secs_f64();
    let space = arguments.space();
    let plan = plan_by_profile(&job, &space.like, 1, &space.devices, &mut profile)?;
    let chosen = &plan.fitting[0].timed.strategy;
    let held: Vec<_> = all.iter().filter(|strategy| !learnt.contains(strategy)).collect();
    if held.is_empty() {
        let what = "every strategy was measured for the profile: there is none left to foretell".to_owned();
        return Err(Mistake { what, hint: Some("use a larger --batch or more --threads".to_owned()) }.into());
    }
    let apart = (held.len() as f64 / arguments.cases as f64).max(1.0);
    let spread = (0..arguments.cases.min(held.len())).map(|place| held[(place as f64 * apart) as usize]);
    let usual = all.iter().filter(|strategy| usual_name(strategy).is_some());
    let measured: Vec<&Strategy> =
        if arguments.all { all.iter().collect() } else { spread.chain([chosen]).chain(usual).collect() };
    let mut cases: Vec<Case> = Vec::new();
    for strategy in measured {
        if !cases.iter().any(|case| case.strategy == *strategy) {
            let is_learnt = learnt.contains(&strategy);
            let costs = job.costs(strategy, &job.places(strategy));
            let peak_bytes = [costs.iter().map(|cost| cost.peak_bytes).collect(), Vec::new()];
            let (strategy, foretold_s, measured_s) = (strategy.clone(), f64::NAN, Vec::new());
            cases.push(Case { strategy, is_learnt, peak_bytes, foretold_s, measured_s });
        }
    }
    for round in 0..arguments.rounds as u64 {
        if round > 0 {
            learnt.iter().try_for_each(|strategy| job.learn(&mut profile, strategy))?;
        }
        for case in &mut cases {
            let ranks = job.start_whole(&case.strategy)?;
            case.measured_s.push(job.step(&ranks, &case.strategy, round)?.untraced_s);
            case.peak_bytes[1] = ranks.with_trainers(|trainer| trainer.device.usage().peak_bytes)?;
        }
    }
    for case in &mut cases {
        case.foretold_s = step_s(&profile, &case.strategy).map_err(Failure::fault)?;
    }
    let mut errors: Vec<f64> = cases.iter().filter(|case| !case.is_learnt).map(|case| case.error().abs()).collect();
    errors.sort_by(f64::total_cmp);
    let (middle, worst) = (median(errors.iter().copied()), *errors.last().expect("there are cases"));
    if arguments.json {
        let case = |case: &Case| {
            json!({ "strategy": case.strategy, "is_learnt": case.is_learnt, "usual": usual_name(&case.strategy),
                "is_chosen": case.strategy == *chosen, "foretold_s": case.foretold_s, "measured_s": case.measured_s,
                "peak_bytes": case.peak_bytes })
        };
        let cases: Vec<_> = cases.iter().map(case).collect();
        return Ok(json!({ "strategies": all.len(), "learnt": learnt.len(), "profile_s": profile_s,
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
        "{} strategies, {} measured on a shortened model in {profile_s:.0} s\n\n{table}\n\nerror of those not in the profile: {} in \
         the median, {} at worst\n{}",
        all.len(),
        learnt.len(),
        text::percent(middle),
        text::percent(worst),
        choice(&cases, chosen),
    ))
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

/// The one strategy of its axes and stage of ZeRO that a profile begins with.
fn is_plain(strategy: &Strategy) -> bool {
    let arrangement = &strategy.arrangement;
    let least = if strategy.pp > 1 { 2 * strategy.pp } else { 2 };
    arrangement.parts == 1
        && (strategy.cut.weights.len() == 1 || strategy.cut.split_sequence)
        && arrangement.schedule.name == "none"
        && strategy.accumulate == least
        && (strategy.pp == 1 || strategy.pipeline.order.name() == "1f1b")
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
