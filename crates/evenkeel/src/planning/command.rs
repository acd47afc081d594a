//! `evenkeel plan CONFIG`: the strategies for a run on this machine, the fastest first, from measurements.

use std::io::{IsTerminal, Write, stderr};

use evenkeel_device::cpu_report;
use evenkeel_plan::{Foretold, Found, Judged, NotKnown, Profile, Space, search};
use evenkeel_step::{Devices, Mesh, Strategy};
use serde_json::json;

use super::job::{Job, places};
use super::profile_file::ProfileFile;
use crate::config::{Overrides, Settings};
use crate::inputs::feed::Text;
use crate::inputs::model::ModelInput;
use crate::memory::Room;
use crate::strategy::strategy;
use crate::train::{beside, trainer_options};
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

type Plan = Found<Foretold>;

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let mut config = arguments.overrides.read()?;
    let tokenizer = Text::open(&config)?;
    let input = ModelInput::read(&mut config, tokenizer.as_ref().map(|text| &text.tokenizer))?;
    let settings = &config.settings;
    let like = strategy(settings, &input.model, &input.json)?;
    let job = Job { model: input.model, options: trainer_options(settings), sequence: settings.data.sequence };
    let kind = settings.device.kind;
    let mut file = if arguments.fresh { ProfileFile::fresh(kind) } else { ProfileFile::open(kind) };
    let plan = plan(&job, settings, &like, usize::from(arguments.show), &mut file.profile)?;
    file.keep(kind);
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

/// Looks for the fastest strategies; measures what the profile lacks for them.
fn plan(
    job: &Job,
    settings: &Settings,
    like: &Strategy,
    wanted: usize,
    profile: &mut Profile,
) -> Result<Plan, Failure> {
    let space = Space { devices: devices(like), sequences: like.micro_batch * like.micros_per_step(), like: like.clone() };
    let strategies: Vec<Strategy> = space.strategies().into_iter().filter_map(|it| job.cut(it)).collect();
    let count = strategies.len();
    let flops = job.flops_per_sequence() * space.sequences as f64;
    let known = profile.clone();
    let bound_s = |strategy: &Strategy| {
        let rates: Option<Vec<f64>> = places(strategy).iter().map(|it| known.fastest_flops_per_s(it)).collect();
        rates.map_or(0.0, |rates| flops / rates.iter().sum::<f64>())
    };
    let mut judged = 0;
    search(strategies, wanted, bound_s, |strategy| {
        judged += 1;
        progress(&format!("{judged} of {count}: {strategy}"));
        let known = match job.foretell(profile, &strategy) {
            Err(NotKnown::NotMeasured(missing)) => {
                tracing::info!(%strategy, %missing, "measures what the profile lacks");
                progress(&format!("{judged} of {count}: measures {strategy}"));
                job.learn(profile, &strategy)?;
                job.foretell(profile, &strategy)
            }
            known => known,
        };
        let (foretold, costs) = known.map_err(|error| Failure::Fault(Mistake { what: error.to_string(), hint: None }))?;
        let room = Room::of(&strategy, beside(settings, &job.model, &strategy));
        let fullness = room.fullness(&strategy, &costs).into_iter().fold(0.0, f64::max);
        Ok(Judged { step_s: foretold.step_s, fullness, details: foretold, strategy })
    })
    .inspect(|_| progress(""))
}

/// Numbers of ranks, and what they compute on: cores in equal shares, or the GPUs that the configuration names.
fn devices(like: &Strategy) -> Vec<(usize, Devices)> {
    match &like.devices {
        Devices::Cpu { cores_per_rank, .. } => {
            let cores = (like.ranks() * cores_per_rank).max(cpu_report().cores);
            let shared = |ranks: usize| (ranks, Devices::Cpu { cores_per_rank: cores / ranks, comm_cores: 0 });
            (1..=cores).filter(|ranks| cores.is_multiple_of(*ranks)).map(shared).collect()
        }
        gpus => vec![(like.ranks(), gpus.clone())],
    }
}

fn cells(job: &Job, judged: &Judged<Foretold>, best_s: f64) -> Vec<String> {
    let Judged { strategy, step_s, fullness, details } = judged;
    let tokens = (strategy.micro_batch * strategy.micros_per_step() * job.sequence) as f64;
    vec![
        describe(strategy),
        format!("{} × {}", strategy.accumulate, strategy.micro_batch),
        format!("{:.1} ms", 1e3 * step_s),
        format!("{:.0}", tokens / step_s),
        text::percent(details.timeline.exposed_share()),
        text::percent(details.timeline.idle_share()),
        text::percent(*fullness),
        if *step_s == best_s { String::new() } else { text::percent(step_s / best_s - 1.0) },
    ]
}

/// The best strategies of axes that are not among those shown, and why they lose.
fn others(plan: &Plan, shown: usize) -> Vec<String> {
    let axes = |judged: &Judged<Foretold>| {
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
        let timeline = &judged.details.timeline;
        lines.push(format!(
            "  {}: {} slower, {} exposed, {} idle",
            describe(&judged.strategy),
            text::percent(judged.step_s / best.step_s - 1.0),
            text::percent(timeline.exposed_share()),
            text::percent(timeline.idle_share())
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
    let recomputes = arrangement.schedule.name != "none";
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
    let judged = |judged: &Judged<Foretold>| {
        let Judged { strategy, step_s, fullness, details } = judged;
        let tokens = (strategy.micro_batch * strategy.micros_per_step() * job.sequence) as f64;
        json!({
            "strategy": strategy, "step_s": step_s, "tokens_per_s": tokens / step_s, "fullness": fullness,
            "exposed_share": details.timeline.exposed_share(), "idle_share": details.timeline.idle_share(),
            "flags": flags(strategy),
        })
    };
    let all = |list: &[Judged<Foretold>]| list.iter().map(judged).collect::<Vec<_>>();
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
    let schedule = (arrangement.schedule.name != "none").then(|| "recomputed".to_owned());
    [Some(axes), order, schedule, parts, whole].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// A line that the next one replaces; nothing if nobody looks.
fn progress(line: &str) {
    if stderr().is_terminal() {
        let _ = write!(stderr(), "\r\x1b[2K{line}");
    }
}
