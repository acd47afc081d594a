//! `evenkeel plan CONFIG`: the strategies for a run on this machine, the fastest first, from measurements.

use std::io::{IsTerminal, Write, stderr};

use evenkeel_model::Model;
use evenkeel_plan::{Foretold, Found, Judged, NotKnown, Profile, Space, search};
use evenkeel_step::schedule::NONE;
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Mesh, Strategy};
use serde_json::{Value, json};

use super::job::{Job, places};
use super::profile_file::ProfileFile;
use crate::config::{Overrides, Settings};
use crate::inputs::feed::Text;
use crate::inputs::model::ModelInput;
use crate::memory::Room;
use crate::strategy::strategy;
use crate::train::beside;
use crate::{Failure, Mistake, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    overrides: Overrides,
    /// Strategies to show.
    #[arg(long, default_value_t = 5, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    show: u16,
    /// Measure anew what this machine's profile has already.
    #[arg(long)]
    fresh: bool,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// Timelines of what fits.
type Plan = Found<Option<Timeline>>;

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let mut config = arguments.overrides.read()?;
    let tokenizer = Text::open(&config)?;
    let input = ModelInput::read(&mut config, tokenizer.as_ref().map(|text| &text.tokenizer))?;
    let job = Job::of(&config.settings, &input.model);
    let like = strategy(&config.settings, &input.model, &input.json)?;
    let plan = measured_plan(&job, &config.settings, &like, usize::from(arguments.show), arguments.fresh)?;
    let Some(best) = plan.fitting.first() else { return Err(fits_nowhere(&plan).into()) };
    if arguments.json {
        return Ok(in_json(&job, &plan));
    }
    let rows: Vec<Vec<String>> =
        plan.fitting.iter().take(usize::from(arguments.show)).map(|judged| cells(&job, judged, best.step_s)).collect();
    let header = ["strategy", "micros", "step", "tokens/s", "exposed", "idle", "memory", "slower by"];
    let others = others(&plan, usize::from(arguments.show));
    let others = if others.is_empty() { String::new() } else { format!("\n\nOf other kinds:\n{}", others.join("\n")) };
    Ok(format!(
        "{}{others}\n\nexposed: time in which a rank exchanges and does not compute; idle: time in which ranks do not compute; \
         memory: what the fullest device needs of what it has.\nTo run the first: {}",
        text::table(&header, &rows),
        flags(&best.strategy),
    ))
}

/// Fills in how a run shares its work, as the fastest strategy does. Returns a line that says so.
pub fn choose(settings: &mut Settings, model: &Model, config: &Value) -> Result<String, Failure> {
    let like = strategy(settings, model, config)?;
    let job = Job::of(settings, model);
    let plan = measured_plan(&job, settings, &like, 1, false)?;
    let Some(best) = plan.fitting.first() else { return Err(fits_nowhere(&plan).into()) };
    let Strategy { pp, dp, micro_batch, accumulate, zero, ref cut, arrangement, ref pipeline, .. } = best.strategy;
    let (tp, train, parallel) = (cut.weights.len(), &mut settings.train, &mut settings.parallel);
    (train.batch, train.accumulate) = (micro_batch, accumulate);
    train.recompute = arrangement.schedule != NONE;
    (parallel.auto, parallel.pp, parallel.dp, parallel.tp, parallel.zero) = (false, pp, dp, tp, zero.number().into());
    (parallel.order, parallel.schedule) = (pipeline.order, Some(arrangement.schedule));
    if tp > 1 {
        (parallel.parts, parallel.sequence_parallel) = (Some(arrangement.parts), Some(cut.split_sequence));
    }
    let compared = plan.fitting.len() + plan.too_large.len() + plan.left_out;
    Ok(format!(
        "planned: {}, {accumulate} × {micro_batch} sequences for each replica; {:.1} ms a step foretold, the best of {compared} \
         strategies",
        describe(&best.strategy),
        1e3 * best.step_s
    ))
}

/// A plan from this machine's profile, which keeps what was measured for it.
fn measured_plan(job: &Job, settings: &Settings, like: &Strategy, wanted: usize, fresh: bool) -> Result<Plan, Failure> {
    let kind = settings.device.kind;
    let mut file = if fresh { ProfileFile::fresh(kind) } else { ProfileFile::open(kind) };
    let plan = plan(job, settings, like, wanted, &mut file.profile)?;
    file.keep(kind);
    Ok(plan)
}

/// Finds the fastest strategies. Measures what the profile lacks for them, and then looks again: the same profile gives the same
/// plan, whatever it was when the search began.
fn plan(
    job: &Job,
    settings: &Settings,
    like: &Strategy,
    wanted: usize,
    profile: &mut Profile,
) -> Result<Plan, Failure> {
    let sequences = like.micro_batch * like.micros_per_step();
    let space = Space { devices: devices(like), sequences, like: like.clone() };
    let strategies: Vec<Strategy> = space.strategies().into_iter().filter_map(|it| job.cut(it)).collect();
    let flops = job.flops_per_sequence() * sequences as f64;
    loop {
        let known = profile.clone();
        let bound_s = |strategy: &Strategy| {
            let rates: Option<Vec<f64>> = places(strategy).iter().map(|it| known.fastest_flops_per_s(it)).collect();
            rates.map_or(0.0, |rates| flops / rates.iter().sum::<f64>())
        };
        let (mut judged, mut measured) = (0, false);
        let found = search(strategies.clone(), wanted, bound_s, |strategy| {
            judged += 1;
            progress(&format!("{judged} of {}: {strategy}", strategies.len()));
            let (costs, counted) = job.dry(&strategy);
            let room = Room::of(&strategy, beside(settings, &job.model, &strategy));
            let fullness = room.fullness(&strategy, &costs).into_iter().fold(0.0, f64::max);
            if fullness > 1.0 {
                return Ok(Judged { step_s: f64::INFINITY, fullness, details: None, strategy });
            }
            let places = places(&strategy);
            let Foretold { step_s, timeline } = match profile.foretell(&places, &counted) {
                Err(NotKnown::NotMeasured(missing)) => {
                    tracing::info!(%strategy, %missing, "measures what the profile lacks");
                    measured = true;
                    job.learn(profile, &strategy)?;
                    profile.foretell(&places, &counted)
                }
                known => known,
            }
            .map_err(|error| Failure::Fault(Mistake { what: error.to_string(), hint: None }))?;
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
fn devices(like: &Strategy) -> Vec<(usize, Devices)> {
    match &like.devices {
        Devices::Cpu { cores_per_rank, .. } => {
            let cores = like.ranks() * cores_per_rank;
            let shared = |ranks: usize| (ranks, Devices::Cpu { cores_per_rank: cores / ranks, comm_cores: 0 });
            (1..=cores).filter(|ranks| cores.is_multiple_of(*ranks)).map(shared).collect()
        }
        Devices::Cuda { gpus, multiprocessors, graph } if gpus.len() == 1 && multiprocessors.is_empty() => {
            let all = evenkeel_device::cuda_gpus().unwrap_or(1);
            let first = |count: usize| (count, Devices::Cuda { gpus: (0..count).collect(), multiprocessors: Vec::new(), graph: *graph });
            let alone = (1, like.devices.clone());
            if all > 1 { vec![alone, first(all)] } else { vec![alone] }
        }
        gpus => vec![(like.ranks(), gpus.clone())],
    }
}

fn cells(job: &Job, judged: &Judged<Option<Timeline>>, best_s: f64) -> Vec<String> {
    let Judged { strategy, step_s, fullness, details } = judged;
    let tokens = (strategy.micro_batch * strategy.micros_per_step() * job.sequence) as f64;
    vec![
        describe(strategy),
        format!("{} × {}", strategy.accumulate, strategy.micro_batch),
        format!("{:.1} ms", 1e3 * step_s),
        format!("{:.0}", tokens / step_s),
        share(details, Timeline::exposed_share),
        share(details, Timeline::idle_share),
        text::percent(*fullness),
        if *step_s == best_s { String::new() } else { text::percent(step_s / best_s - 1.0) },
    ]
}

fn share(timeline: &Option<Timeline>, of: fn(&Timeline) -> f64) -> String {
    timeline.as_ref().map_or(String::new(), |timeline| text::percent(of(timeline)))
}

/// The best strategies of axes that are not among those shown, and why they lose.
fn others(plan: &Plan, shown: usize) -> Vec<String> {
    let axes = |judged: &Judged<Option<Timeline>>| {
        let Mesh { pp, dp, tp } = judged.strategy.mesh();
        [pp, dp, tp]
    };
    let best = &plan.fitting[0];
    let mut seen: Vec<[usize; 3]> = plan.fitting.iter().take(shown).map(axes).collect();
    let mut lines = Vec::new();
    for judged in plan.fitting.iter().skip(shown) {
        if seen.contains(&axes(judged)) {
            continue;
        }
        seen.push(axes(judged));
        lines.push(format!(
            "  {}: {} slower, {} exposed, {} idle",
            describe(&judged.strategy),
            text::percent(judged.step_s / best.step_s - 1.0),
            share(&judged.details, Timeline::exposed_share),
            share(&judged.details, Timeline::idle_share)
        ));
    }
    for judged in &plan.too_large {
        if !seen.contains(&axes(judged)) {
            seen.push(axes(judged));
            let fullness = text::percent(judged.fullness);
            lines.push(format!("  {}: needs {fullness} of the memory there is", describe(&judged.strategy)));
        }
    }
    lines
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

/// What to add to a configuration's command to run it so.
fn flags(strategy: &Strategy) -> String {
    let Mesh { pp, dp, tp } = strategy.mesh();
    let arrangement = &strategy.arrangement;
    let recomputes = arrangement.schedule != NONE;
    let mut flags = vec![
        format!("--set train.batch={}", strategy.micro_batch),
        format!("--set train.accumulate={}", strategy.accumulate),
        format!("--pp {pp} --dp {dp} --tp {tp}"),
    ];
    if dp > 1 {
        flags.push(format!("--set parallel.zero={}", strategy.zero.number()));
    }
    if pp > 1 {
        flags.push(format!("--set parallel.order={}", strategy.pipeline.order.name()));
    }
    if tp > 1 {
        flags.push(format!("--set parallel.parts={}", arrangement.parts));
        flags.push(format!("--set parallel.sequence_parallel={}", strategy.cut.split_sequence));
    }
    flags.push(format!("--set train.recompute={recomputes}"));
    flags.join(" ")
}

fn in_json(job: &Job, plan: &Plan) -> String {
    let judged = |judged: &Judged<Option<Timeline>>| {
        let Judged { strategy, step_s, fullness, details } = judged;
        let tokens = (strategy.micro_batch * strategy.micros_per_step() * job.sequence) as f64;
        json!({
            "strategy": strategy, "step_s": step_s, "tokens_per_s": tokens / step_s, "fullness": fullness,
            "exposed_share": details.as_ref().map(Timeline::exposed_share),
            "idle_share": details.as_ref().map(Timeline::idle_share),
            "flags": flags(strategy),
        })
    };
    let all = |list: &[Judged<Option<Timeline>>]| list.iter().map(judged).collect::<Vec<_>>();
    json!({ "fitting": all(&plan.fitting), "too_large": all(&plan.too_large), "left_out": plan.left_out }).to_string()
}

/// A strategy in a few words.
pub fn describe(strategy: &Strategy) -> String {
    let arrangement = &strategy.arrangement;
    let axes = strategy.to_string();
    let axes = if axes.is_empty() { format!("1 rank × {}", text::cores(strategy.devices.cores_per_rank())) } else { axes };
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
