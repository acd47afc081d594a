//! `evenkeel bench plans`: predicted steps beside measured ones, of strategies that were not measured for the profile.

use std::collections::BTreeSet;

use evenkeel_device::cpu_report;
use evenkeel_plan::{NotKnown, Profile, Space};
use evenkeel_step::Strategy;
use serde_json::json;

use super::devices::DeviceArguments;
use super::llama::Llama;
use super::{between, median};
use crate::memory::Beside;
use crate::planning::{Job, describe, shared_cores};
use crate::{Failure, Mistake, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    llama: Llama,
    #[command(flatten)]
    devices: DeviceArguments,
    /// Strategies to measure, spread over all that there are.
    #[arg(long, default_value_t = 24, value_parser = between::<1, 100000>)]
    cases: usize,
    /// Rounds; every strategy runs once in each.
    #[arg(long, default_value_t = 3, value_parser = between::<1, 100000>)]
    rounds: usize,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

struct Case {
    strategy: Strategy,
    foretold_s: f64,
    measured_s: Vec<f64>,
}

impl Case {
    fn error(&self) -> f64 {
        self.foretold_s / median(self.measured_s.iter().copied()) - 1.0
    }
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let model = &arguments.llama.model()?.for_device(arguments.devices.device.into());
    let Llama { sequence, .. } = arguments.llama;
    let job = Job {
        model,
        options: arguments.llama.trainer_options(),
        sequence,
        beside: &|_| Beside::default(),
        uncut: BTreeSet::new(),
        may_use_all_gpus: false,
    };
    let all: Vec<Strategy> = arguments.space().strategies().into_iter().filter_map(|it| job.cut(it)).collect();
    let mut profile = Profile::default();
    let start = std::time::Instant::now();
    let mut learnt: Vec<&Strategy> = Vec::new();
    let mut learn = |profile: &mut Profile, strategy| {
        learnt.push(strategy);
        job.learn(profile, strategy)
    };
    all.iter().filter(|it| is_plain(it)).try_for_each(|strategy| learn(&mut profile, strategy))?;
    for strategy in &all {
        if let Err(NotKnown::NotMeasured(missing)) = job.foretell(&profile, strategy) {
            tracing::info!(%strategy, %missing, "measures what the profile lacks");
            learn(&mut profile, strategy)?;
        }
    }
    let profile_s = start.elapsed().as_secs_f64();
    let held: Vec<_> = all.iter().filter(|strategy| !learnt.contains(strategy)).collect();
    if held.is_empty() {
        let what = "every strategy was measured for the profile: there is none left to foretell".to_owned();
        return Err(Mistake { what, hint: Some("use a larger --batch or more --threads".to_owned()) }.into());
    }
    let apart = (held.len() as f64 / arguments.cases as f64).max(1.0);
    let chosen = (0..arguments.cases.min(held.len())).map(|place| held[(place as f64 * apart) as usize]);
    let case = |strategy: &Strategy| Case { strategy: strategy.clone(), foretold_s: f64::NAN, measured_s: Vec::new() };
    let mut cases: Vec<Case> = chosen.map(case).collect();
    for round in 0..arguments.rounds as u64 {
        if round > 0 {
            learnt.iter().try_for_each(|strategy| job.learn(&mut profile, strategy))?;
        }
        for case in &mut cases {
            let ranks = job.start_whole(&case.strategy)?;
            case.measured_s.push(job.step(&ranks, &case.strategy, round)?.untraced_s);
        }
    }
    for case in &mut cases {
        case.foretold_s = job.foretell(&profile, &case.strategy).map_err(Failure::fault)?.step_s;
    }
    let mut errors: Vec<f64> = cases.iter().map(|case| case.error().abs()).collect();
    errors.sort_by(f64::total_cmp);
    let (middle, worst) = (median(errors.iter().copied()), *errors.last().expect("there are cases"));
    if arguments.json {
        let case = |case: &Case| json!({ "strategy": case.strategy, "foretold_s": case.foretold_s, "measured_s": case.measured_s });
        let cases: Vec<_> = cases.iter().map(case).collect();
        return Ok(json!({ "strategies": all.len(), "learnt": learnt.len(), "profile_s": profile_s,
            "median_error": middle, "worst_error": worst, "cases": cases })
        .to_string());
    }
    let header = ["strategy", "micros", "step", "foretold", "error"];
    let cells = |case: &Case| {
        vec![
            describe(&case.strategy),
            format!("{} × {}", case.strategy.accumulate, case.strategy.micro_batch),
            format!("{:.1} ms", 1e3 * median(case.measured_s.iter().copied())),
            format!("{:.1} ms", 1e3 * case.foretold_s),
            format!("{:+.1} %", 100.0 * case.error()),
        ]
    };
    let table = text::table(&header, &cases.iter().map(cells).collect::<Vec<_>>());
    Ok(format!(
        "{} strategies, {} measured on a shortened model in {profile_s:.0} s\n\n{table}\n\nerror: {} in the median, {} at worst",
        all.len(),
        learnt.len(),
        text::percent(middle),
        text::percent(worst)
    ))
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
                let placed = |ranks: usize| {
                    let strategy = Strategy { dp: ranks, ..like.clone() };
                    (ranks, self.devices.place(strategy).devices)
                };
                vec![placed(parts.len().max(1))]
            }
            false => {
                let cores = self.devices.threads.unwrap_or_else(|| cpu_report().cores);
                shared_cores(cores)
            }
        };
        Space { devices, sequences: self.llama.batch, like, uncut: BTreeSet::new() }
    }
}
