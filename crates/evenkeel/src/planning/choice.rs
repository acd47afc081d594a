//! Which strategy to take: the fastest by this machine's profile, or by a cluster's figures.

use std::cell::Cell;
use std::io::{IsTerminal, Write, stderr};

use evenkeel_device::{DType, MOST_PEERS};
use evenkeel_plan::{Cluster, Found, Judge, Judged, Profile, RankDevices, Space, Timed, search};
use evenkeel_step::schedule::{NONE, Units};
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Strategy};
use evenkeel_train::Cost;

use super::finals;
use super::forecast::Forecast;
use super::job::Job;
use super::judging::{Judging, Source, StepShares};
use super::profile_file::ProfileFile;
use crate::arrange::this_machine;
use crate::config::Settings;
use crate::launch::Launch;
use crate::{Failure, Mistake, text};

pub type TimedStep = Timed<StepShares>;
pub type JudgedStep = Judged<StepShares, Vec<Cost>>;
pub type Plan = Found<StepShares, Vec<Cost>>;

/// Fills in how a run shares its work, as the fastest strategy does. Returns a line that says so, and
/// what it foretells.
pub fn choose(job: &Job, like: &Strategy, settings: &mut Settings) -> Result<(String, Forecast), Failure> {
    let plan = measured_plan(job, like, 1, false)?;
    let best = &plan.fitting[0].timed;
    let Strategy { pp, dp, micro_batch, accumulate, zero, ref cut, arrangement, ref pipeline, .. } = best.strategy;
    let (tp, train, parallel) = (cut.weights.len(), &mut settings.train, &mut settings.parallel);
    // An evaluation keeps its sequences.
    let before = train.batch;
    settings.eval.batches = settings.eval.batches.saturating_mul(before as u64).div_ceil(micro_batch as u64);
    (train.batch, train.accumulate) = (micro_batch, accumulate);
    train.recompute = arrangement.schedule != NONE;
    (parallel.auto, parallel.pp, parallel.dp, parallel.tp, parallel.zero) = (false, pp, dp, tp, zero.number().into());
    (parallel.order, parallel.schedule) = (pipeline.order, Some(arrangement.schedule));
    parallel.recompute_units = arrangement.recompute;
    if cut.weights.iter().any(|weight| *weight != cut.weights[0]) {
        parallel.tp_weights = cut.weights.clone();
    }
    if tp > 1 {
        (parallel.parts, parallel.sequence_parallel) = (Some(arrangement.parts), Some(cut.split_sequence));
    }
    let compared = looked_at(&plan) + plan.left_out.len();
    let line = format!(
        "planned: {}, {accumulate} × {micro_batch} sequences for each replica; {:.1} ms a step foretold, the best of {compared} \
         strategies",
        describe(&best.strategy),
        1e3 * best.step_s
    );
    Ok((line, Forecast::of(best)))
}

/// Strategies that were not left out.
pub fn looked_at(plan: &Plan) -> usize {
    plan.fitting.len() + plan.too_large.len() + plan.surely_too_large.len() + plan.too_slow.len()
}

/// A plan from this machine's profile, which keeps what was measured for it.
pub fn measured_plan(job: &Job, like: &Strategy, wanted: usize, fresh: bool) -> Result<Plan, Failure> {
    let kind = like.devices.kind();
    let mut file = if fresh { ProfileFile::fresh(kind) } else { ProfileFile::open(kind) };
    let plan = plan_by_profile(job, like, wanted, &devices(job, like), &mut file.profile);
    // Also what was measured before something failed.
    file.keep(kind);
    plan
}

/// Finds the fastest strategies on these devices. Measures what the profile lacks for them, runs the finals, and then looks again:
/// the same profile gives the same plan, whatever it was when the search began.
pub fn plan_by_profile(
    job: &Job,
    like: &Strategy,
    wanted: usize,
    devices: &[RankDevices],
    profile: &mut Profile,
) -> Result<Plan, Failure> {
    loop {
        // Finals need some to choose from.
        let wanted = wanted.max(finals::FINALISTS);
        let (plan, has_measured) = plan_of(job, like, wanted, devices.to_vec(), Source::Machine(profile))?;
        if has_measured {
            continue;
        }
        let mut finalists = finals::finalists(job, &plan, profile);
        finalists.truncate(finals::MOST_RUNS.saturating_sub(profile.runs(&job.name_of_all(like))));
        if finalists.is_empty() {
            return Ok(plan);
        }
        progress(&format!("runs {}", finalists.len()));
        finals::run(job, &finalists, profile)?;
    }
}

/// A plan for the devices of a cluster by their published figures: for all of them, all of a kind, or all but the slowest kind; and
/// for the first half, quarter or eighth of them.
pub fn published_plan(job: &Job, like: &Strategy, wanted: usize, cluster: &Cluster) -> Result<Plan, Failure> {
    const MOST_HALVES: usize = 3;
    let places = cluster.places();
    let speed = |number: &usize| {
        let rates = &cluster.devices[places[*number].device];
        rates.efficiency * if like.dtype == DType::F32 { rates.f32_tflops } else { rates.bf16_tflops }
    };
    let on = |numbers: Vec<usize>| {
        let speeds = numbers.iter().map(speed).collect();
        RankDevices { devices: Devices::Cuda { gpus: numbers, multiprocessors: Vec::new(), graph: true }, speeds }
    };
    let of_kind = |kind: &String| (0..places.len()).filter(|&number| places[number].device == kind).collect::<Vec<_>>();
    let kinds: Vec<Vec<usize>> = cluster.devices.keys().map(of_kind).filter(|numbers| !numbers.is_empty()).collect();
    let slowest = kinds.iter().min_by(|a, b| speed(&a[0]).total_cmp(&speed(&b[0]))).cloned().unwrap_or_default();
    let all: Vec<usize> = (0..places.len()).collect();
    let mut sets = vec![all.clone(), all.iter().copied().filter(|number| !slowest.contains(number)).collect()];
    sets.extend(kinds);
    // More devices than sequences may cost more in exchanges than they bring.
    let sequences = like.micro_batch * like.micros_per_step();
    let halves = std::iter::successors(Some(all.len()), |count| Some(count / 2)).skip(1).take(MOST_HALVES);
    sets.extend(halves.filter(|count| *count > 0 && sequences < all.len()).map(|count| all[..count].to_vec()));
    let mut devices: Vec<RankDevices> = Vec::new();
    for devices_of_set in sets.into_iter().filter(|set| !set.is_empty()).map(on) {
        if !devices.contains(&devices_of_set) {
            devices.push(devices_of_set);
        }
    }
    Ok(plan_of(job, like, wanted.max(finals::FINALISTS), devices, Source::Cluster(cluster))?.0)
}

/// The whole step of a strategy on the cluster or, if there is none, by this machine's profile.
pub fn timeline(job: &Job, strategy: &Strategy, cluster: Option<&Cluster>) -> Result<Timeline, Failure> {
    let mut profile = ProfileFile::open(strategy.devices.kind()).profile;
    let source = cluster.map_or(Source::Machine(&mut profile), Source::Cluster);
    Judging::new(job, source, &|_| ()).timeline(strategy)
}

/// Says how much better links, faster devices or more memory would make the steps of a plan.
pub fn help(job: &Job, plan: &Plan, cluster: &Cluster) -> Result<Vec<String>, Failure> {
    /// Faster strategies than these are unlikely to come from behind.
    const CANDIDATES: usize = 3;
    /// Strategies with the least bounds that may fit into more memory.
    const LARGER_CANDIDATES: usize = 32;
    const MORE_MEMORY: f64 = 1.25;
    let best = &plan.fitting[0].timed;
    let [mut faster_links, mut faster_devices] = [cluster.clone(), cluster.clone()];
    faster_links.links.values_mut().for_each(|link| link.gb_per_s *= 2.0);
    for device in faster_devices.devices.values_mut() {
        device.bf16_tflops *= 1.25;
        device.f32_tflops *= 1.25;
        device.memory_gb_per_s *= 1.25;
    }
    let better = [&faster_links, &faster_devices];
    let mut judgings = better.map(|cluster| Judging::new(job, Source::Cluster(cluster), &|_| ()));
    let mut fastest: [Option<TimedStep>; 2] = Default::default();
    for judged in plan.fitting.iter().take(CANDIDATES) {
        for (judging, fastest) in judgings.iter_mut().zip(&mut fastest) {
            let timed = judging.time(judged.timed.strategy.clone())?;
            if fastest.as_ref().is_none_or(|fastest| timed.step_s < fastest.step_s) {
                *fastest = Some(timed);
            }
        }
    }
    let [links, devices] = fastest.map(|fastest| fastest.expect("something fits"));
    // Whatever may be faster was looked at, and some of it did not fit.
    let mut judging = Judging::new(job, Source::Cluster(cluster), &|_| ());
    let surely = plan.surely_too_large.iter().take_while(|(_, least)| least.fullness <= MORE_MEMORY);
    let surely = surely.map(|(strategy, _)| (judging.least_step_s_of_any_cut(strategy), strategy));
    let mut surely: Vec<(f64, &Strategy)> = surely.filter(|(least_s, _)| *least_s < best.step_s).collect();
    surely.sort_by(|a, b| a.0.total_cmp(&b.0));
    surely.truncate(LARGER_CANDIDATES);
    let surely = surely.into_iter().map(|(_, strategy)| judging.cut(strategy.clone())).collect::<Vec<_>>().into_iter();
    let surely = surely.filter(|it| it.fullness <= MORE_MEMORY && it.step_s < best.step_s);
    let surely = surely.map(|it| judging.time(it.strategy.clone())).collect::<Result<Vec<_>, Failure>>()?;
    let larger = plan.too_large.iter().filter(|it| it.fullness <= MORE_MEMORY).map(|it| &it.timed);
    let larger = larger.chain(&surely).chain([best]);
    let memory = larger.min_by(|a, b| a.step_s.total_cmp(&b.step_s)).expect("the best is among them");
    let line = |(what, found): (&str, &TimedStep)| {
        let gain = 1.0 - found.step_s / best.step_s;
        let by =
            if found.strategy == best.strategy { String::new() } else { format!(", by {}", describe(&found.strategy)) };
        match gain > 0.005 {
            true => format!("  {what}: {} less time{by}", text::percent(gain)),
            false => format!("  {what}: nothing"),
        }
    };
    let all =
        [("links twice as fast", &links), ("devices a quarter faster", &devices), ("a quarter more memory", memory)];
    Ok(all.into_iter().map(line).collect())
}

/// The fastest strategies on any of these devices, and whether something was measured for them.
fn plan_of(
    job: &Job,
    like: &Strategy,
    wanted: usize,
    devices: Vec<RankDevices>,
    source: Source,
) -> Result<(Plan, bool), Failure> {
    let sequences = like.micro_batch * like.micros_per_step();
    let space = Space { devices, sequences, like: like.clone(), uncut: job.uncut.clone() };
    let strategies: Vec<Strategy> =
        space.strategies().into_iter().filter(|it| job.is_wanted(it) && job.can_be_cut(it)).collect();
    let judged = Cell::new(0);
    let told = |strategy: &Strategy| {
        judged.set(judged.get() + 1);
        progress(&format!("{} looked at: {strategy}", judged.get()));
    };
    let exact = if let Source::Cluster(_) = source { 1 } else { wanted };
    let mut judging = Judging::new(job, source, &told);
    judging.sample(&strategies);
    let mut plan = search(strategies, wanted, &mut judging)?;
    // The memory of what is taken, or may be, is known to the byte.
    let (mut settled, mut behind) = (Vec::new(), std::mem::take(&mut plan.fitting).into_iter());
    while settled.len() < exact {
        let Some(judged) = behind.next() else { break };
        let (memory, fullness) = judging.memory(&judged.timed.strategy);
        let judged = JudgedStep { memory, fullness, ..judged };
        if fullness <= 1.0 { settled.push(judged) } else { plan.too_large.push(judged) }
    }
    plan.fitting = settled.into_iter().chain(behind).collect();
    if plan.fitting.is_empty() {
        let nowhere = fits_nowhere(&plan, &judging);
        progress("");
        return Err(nowhere.into());
    }
    progress("");
    Ok((plan, judging.has_measured))
}

/// Numbers of ranks, and what they compute on: cores in equal shares; the GPUs of the configuration's ranks or, if it has one rank,
/// that GPU alone or all there are.
fn devices(job: &Job, like: &Strategy) -> Vec<RankDevices> {
    /// More ranks of fewer cores each are many more strategies.
    const MOST_RANKS_ON_CORES: usize = 8;
    match &like.devices {
        Devices::Cpu { cores_per_rank, .. } => {
            let cores = like.ranks() * cores_per_rank;
            shared_cores(cores).into_iter().filter(|shared| shared.speeds.len() <= MOST_RANKS_ON_CORES).collect()
        }
        Devices::Cuda { gpus, multiprocessors, graph }
            if gpus.len() == 1 && multiprocessors.is_empty() && job.may_use_all_gpus =>
        {
            let all = evenkeel_device::cuda_gpus().unwrap_or(1).min(MOST_PEERS);
            let first = |count: usize| {
                let devices = Devices::Cuda { gpus: (0..count).collect(), multiprocessors: Vec::new(), graph: *graph };
                RankDevices { devices, speeds: vec![1.0; count] }
            };
            let alone = RankDevices { devices: like.devices.clone(), speeds: vec![1.0] };
            if all > 1 { vec![alone, first(all)] } else { vec![alone] }
        }
        gpus => vec![RankDevices { devices: gpus.clone(), speeds: speeds(like) }],
    }
}

/// By rank, about.
pub fn speeds(strategy: &Strategy) -> Vec<f64> {
    this_machine(&Launch::from(strategy.clone())).flops_per_s
}

/// Ranks that share so many cores equally.
pub fn shared_cores(cores: usize) -> Vec<RankDevices> {
    let shared = |ranks: usize| RankDevices {
        devices: Devices::Cpu { cores_per_rank: cores / ranks, comm_cores: 0 },
        speeds: vec![1.0; ranks],
    };
    (1..=cores).filter(|ranks| cores.is_multiple_of(*ranks)).map(shared).collect()
}

/// Says what is missing for the strategy that needs least.
fn fits_nowhere(plan: &Plan, judging: &Judging) -> Mistake {
    /// Bounds are no exact order.
    const CANDIDATES: usize = 8;
    let surely =
        plan.surely_too_large.iter().take(CANDIDATES).map(|(strategy, _)| judging.cut(strategy.clone()).strategy);
    let candidates = surely.chain(plan.too_large.first().map(|judged| judged.timed.strategy.clone()));
    let known = candidates.map(|strategy| {
        let (costs, fullness) = judging.about_memory(&strategy);
        (strategy, costs, fullness)
    });
    let Some((leanest, costs, fullness)) = known.min_by(|(.., a), (.., b)| a.total_cmp(b)) else {
        let hint =
            "leave out what is wanted of a plan (--pp, --dp, --tp), or change the sequences of a step".to_owned();
        return Mistake { what: "there is no such strategy for these devices".to_owned(), hint: Some(hint) };
    };
    let needed = costs.iter().map(|cost| cost.arena_bytes).max().unwrap_or(0) as f64;
    if !fullness.is_finite() {
        let what = "no strategy fits: a device has no memory left for tensors beside what its driver and kernels need"
            .to_owned();
        return Mistake { what, hint: Some("use devices with more memory".to_owned()) };
    }
    let missing = needed - needed / fullness;
    let what = format!(
        "no strategy fits: the leanest, {}, needs {} of the memory there is: {} on its fullest device, {} more than that has",
        describe(&leanest),
        text::percent(fullness),
        text::bytes(needed as u64),
        text::bytes(missing as u64),
    );
    let more_devices = || {
        let devices = (leanest.ranks() as f64 * fullness).ceil();
        format!(
            "about {devices} such devices would hold it; or train an adapter (adapter.kind = \"lora\"), or a smaller model"
        )
    };
    let hint = judging.nearest_that_fits(&leanest).unwrap_or_else(more_devices);
    Mistake { what, hint: Some(hint) }
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
    let recomputed = match arrangement.recompute {
        _ if arrangement.schedule == NONE => None,
        Units::All => Some("recomputed".to_owned()),
        units => Some(format!("{} recomputed", units.name())),
    };
    [Some(axes), order, recomputed, parts, whole].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// A line that the next one replaces; nothing if nobody looks.
fn progress(line: &str) {
    if stderr().is_terminal() {
        let _ = write!(stderr(), "\r\x1b[2K{line}");
    }
}
