//! Which strategy to take: the fastest by this machine's profile.

use std::io::{IsTerminal, Write, stderr};

use evenkeel_device::MOST_PEERS;
use evenkeel_plan::{ForetoldStep, Found, Judged, NotKnown, Profile, Space, search};
use evenkeel_step::schedule::NONE;
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Strategy};

use super::forecast::Forecast;
use super::job::Job;
use super::profile_file::ProfileFile;
use crate::config::Settings;
use crate::memory::Room;
use crate::{Failure, Mistake, text};

/// A strategy, with the timeline of its step if it fits.
pub type JudgedStep = Judged<Option<Timeline>>;
pub type Plan = Found<Option<Timeline>>;

/// Fills in how a run shares its work, as the fastest strategy does. Returns a line that says so, and
/// what it foretells.
pub fn choose(job: &Job, like: &Strategy, settings: &mut Settings) -> Result<(String, Forecast), Failure> {
    let plan = measured_plan(job, like, 1, false)?;
    let best = &plan.fitting[0];
    let Strategy { pp, dp, micro_batch, accumulate, zero, ref cut, arrangement, ref pipeline, .. } = best.strategy;
    let (tp, train, parallel) = (cut.weights.len(), &mut settings.train, &mut settings.parallel);
    // An evaluation keeps its sequences.
    let before = train.batch;
    settings.eval.batches = settings.eval.batches.saturating_mul(before as u64).div_ceil(micro_batch as u64);
    (train.batch, train.accumulate) = (micro_batch, accumulate);
    train.recompute = arrangement.schedule != NONE;
    (parallel.auto, parallel.pp, parallel.dp, parallel.tp, parallel.zero) = (false, pp, dp, tp, zero.number().into());
    (parallel.order, parallel.schedule) = (pipeline.order, Some(arrangement.schedule));
    if tp > 1 {
        (parallel.parts, parallel.sequence_parallel) = (Some(arrangement.parts), Some(cut.split_sequence));
    }
    let compared = plan.fitting.len() + plan.too_large.len() + plan.left_out;
    let line = format!(
        "planned: {}, {accumulate} × {micro_batch} sequences for each replica; {:.1} ms a step foretold, the best of {compared} \
         strategies",
        describe(&best.strategy),
        1e3 * best.step_s
    );
    Ok((line, Forecast::of(best.step_s)))
}

/// A plan from this machine's profile, which keeps what was measured for it.
pub fn measured_plan(job: &Job, like: &Strategy, wanted: usize, fresh: bool) -> Result<Plan, Failure> {
    let kind = like.devices.kind();
    let mut file = if fresh { ProfileFile::fresh(kind) } else { ProfileFile::open(kind) };
    let plan = plan(job, like, wanted, &mut file.profile);
    // Also what was measured before something failed.
    file.keep(kind);
    let plan = plan?;
    if plan.fitting.is_empty() { Err(fits_nowhere(&plan).into()) } else { Ok(plan) }
}

/// Finds the fastest strategies. Measures what the profile lacks for them, and then looks again: the same profile gives the same
/// plan, whatever it was when the search began.
fn plan(job: &Job, like: &Strategy, wanted: usize, profile: &mut Profile) -> Result<Plan, Failure> {
    let sequences = like.micro_batch * like.micros_per_step();
    let space = Space { devices: devices(job, like), sequences, like: like.clone(), uncut: job.uncut.clone() };
    let strategies: Vec<Strategy> = space.strategies().into_iter().filter_map(|it| job.cut(it)).collect();
    let flops = job.flops_per_sequence() * sequences as f64;
    loop {
        let known = profile.clone();
        let bound_s = |strategy: &Strategy| {
            let rates: Option<Vec<f64>> = job.places(strategy).iter().map(|it| known.fastest_flops_per_s(it)).collect();
            rates.map_or(0.0, |rates| flops / rates.iter().sum::<f64>())
        };
        let (mut judged, mut measured) = (0, false);
        let found = search(strategies.clone(), wanted, bound_s, |strategy| {
            judged += 1;
            progress(&format!("{judged} of {}: {strategy}", strategies.len()));
            let (costs, counted) = job.dry(&strategy);
            let room = Room::of(&strategy, (job.beside)(&strategy));
            let fullness = room.fullness(&strategy, &costs).into_iter().fold(0.0, f64::max);
            if fullness > 1.0 {
                return Ok(Judged { step_s: f64::INFINITY, fullness, details: None, strategy });
            }
            let places = job.places(&strategy);
            let ForetoldStep { step_s, timeline } = match profile.foretell(&places, &counted) {
                Err(NotKnown::NotMeasured(missing)) => {
                    tracing::info!(%strategy, %missing, "measures what the profile lacks");
                    measured = true;
                    job.learn(profile, &strategy)?;
                    if let Err(NotKnown::NotMeasured(missing)) = profile.foretell(&places, &counted) {
                        tracing::info!(%strategy, %missing, "measures the whole model");
                        job.learn_whole(profile, &strategy)?;
                    }
                    profile.foretell(&places, &counted)
                }
                known => known,
            }
            .map_err(Failure::fault)?;
            Ok::<_, Failure>(Judged { step_s, fullness, details: Some(timeline), strategy })
        })?;
        progress("");
        if !measured {
            return Ok(found);
        }
    }
}

/// Numbers of ranks, and what they compute on: cores in equal shares; the GPUs of the configuration's ranks or, if it has one rank,
/// that GPU alone or all there are.
fn devices(job: &Job, like: &Strategy) -> Vec<(usize, Devices)> {
    /// More ranks of fewer cores each are many more strategies.
    const MOST_RANKS_ON_CORES: usize = 8;
    match &like.devices {
        Devices::Cpu { cores_per_rank, .. } => {
            let cores = like.ranks() * cores_per_rank;
            shared_cores(cores).into_iter().filter(|(ranks, _)| *ranks <= MOST_RANKS_ON_CORES).collect()
        }
        Devices::Cuda { gpus, multiprocessors, graph }
            if gpus.len() == 1 && multiprocessors.is_empty() && job.may_use_all_gpus =>
        {
            let all = evenkeel_device::cuda_gpus().unwrap_or(1).min(MOST_PEERS);
            let first = |count: usize| {
                (count, Devices::Cuda { gpus: (0..count).collect(), multiprocessors: Vec::new(), graph: *graph })
            };
            let alone = (1, like.devices.clone());
            if all > 1 { vec![alone, first(all)] } else { vec![alone] }
        }
        gpus => vec![(like.ranks(), gpus.clone())],
    }
}

/// Ranks that share so many cores equally.
pub fn shared_cores(cores: usize) -> Vec<(usize, Devices)> {
    let shared = |ranks: usize| (ranks, Devices::Cpu { cores_per_rank: cores / ranks, comm_cores: 0 });
    (1..=cores).filter(|ranks| cores.is_multiple_of(*ranks)).map(shared).collect()
}

fn fits_nowhere(plan: &Plan) -> Mistake {
    let hint = "use fewer sequences a step, a smaller data.sequence, or a smaller model";
    match plan.too_large.first() {
        Some(leanest) => Mistake {
            what: format!(
                "no strategy fits: the leanest, {}, needs {} of the memory there is",
                describe(&leanest.strategy),
                text::percent(leanest.fullness)
            ),
            hint: Some(hint.to_owned()),
        },
        None => Mistake { what: "there is no strategy for these devices".to_owned(), hint: None },
    }
}

/// A strategy in a few words.
pub fn describe(strategy: &Strategy) -> String {
    let arrangement = &strategy.arrangement;
    let axes = strategy.to_string();
    let axes =
        if axes.is_empty() { format!("1 rank × {}", text::cores(strategy.devices.cores_per_rank())) } else { axes };
    let order = (strategy.pp > 1).then(|| strategy.pipeline.order.name().to_owned());
    let parts = (arrangement.parts > 1).then(|| format!("{} parts", arrangement.parts));
    let whole = (strategy.cut.weights.len() > 1 && !strategy.cut.split_sequence).then(|| "whole stream".to_owned());
    let schedule = (arrangement.schedule != NONE).then(|| "recomputed".to_owned());
    [Some(axes), order, schedule, parts, whole].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// A line that the next one replaces; nothing if nobody looks.
fn progress(line: &str) {
    if stderr().is_terminal() {
        let _ = write!(stderr(), "\r\x1b[2K{line}");
    }
}
