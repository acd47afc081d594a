//! `evenkeel plan CONFIG`: the strategies for a run on this machine or a cluster, the fastest first.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use evenkeel_device::DeviceKind;
use evenkeel_model::Cut;
use evenkeel_plan::{Cluster, ClusterKind};
use evenkeel_step::schedule::NONE;
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Mesh, Strategy};
use evenkeel_store::{read_text, write_file_atomically};
use serde_json::json;

use crate::config::{Overrides, Parallel, RunConfig};
use crate::drawing::{pipeline_and_memory_svg, timeline_and_memory_svg};
use crate::inputs::feed::Text;
use crate::inputs::model::ModelInput;
use crate::planning::{
    Job, JudgedStep, Plan, TimedStep, describe, help, looked_at, measured_plan, memory_bars, published_plan, timeline,
};
use crate::strategy::strategy;
use crate::train::{beside, job};
use crate::{Failure, Mistake, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    overrides: Overrides,
    /// A model's folder, instead of the configuration's; its weights are not needed (model.path).
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Tokens of a step, instead of the configuration's micro-batches.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    tokens_per_step: Option<u64>,
    /// Devices to plan for, TOML, by their published or measured figures. Nothing is measured now.
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,
    /// Only the first of the cluster's devices.
    #[arg(long, value_name = "COUNT", requires = "cluster", value_parser = clap::value_parser!(u32).range(1..))]
    devices: Option<u32>,
    /// Strategies to show.
    #[arg(long, default_value_t = 5, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    show: u16,
    /// Measure anew what this machine's profile has already.
    #[arg(long)]
    fresh: bool,
    /// Draw the step of the first strategy and its memory.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let (overrides, axes) = arguments.overrides.split_axes()?;
    let mut config = overrides.read_to_plan(arguments.model.as_deref())?;
    let cluster = arguments.cluster.as_deref().map(|path| cluster(path, arguments.devices)).transpose()?;
    if let Some(cluster) = &cluster {
        config.settings.device.kind = device_kind(cluster);
    }
    let tokenizer = Text::open(&config)?;
    let input = ModelInput::read(&mut config, tokenizer.as_ref().map(|text| &text.tokenizer))?;
    let settings = &config.settings;
    refuse_what_a_plan_replaces(&settings.parallel)?;
    let beside = |strategy: &Strategy| beside(settings, &input.model, strategy);
    let job = Job { axes, ..job(settings, &input, &beside)? };
    let like = with_tokens(strategy(settings, &input.model, &input.json)?, arguments.tokens_per_step, &config)?;
    let wanted = usize::from(arguments.show);
    let plan = match &cluster {
        Some(cluster) => published_plan(&job, &like, wanted, cluster)?,
        None => measured_plan(&job, &like, wanted, arguments.fresh)?,
    };
    let best = &plan.fitting[0];
    if let Some(path) = &arguments.svg {
        let drawing = drawn(&job, best, &timeline(&job, &best.timed.strategy, cluster.as_ref())?, cluster.as_ref());
        write_file_atomically(path, |file| file.put(drawing.as_bytes()))?;
    }
    if arguments.json {
        return Ok(in_json(&job, &plan));
    }
    let rows: Vec<Vec<String>> = plan
        .fitting
        .iter()
        .take(wanted)
        .map(|judged| cells(&job, judged, best.timed.step_s, cluster.as_ref()))
        .collect();
    let header = ["strategy", "micros", "step", "tokens/s", "exposed", "idle", "memory", "of device", "slower by"];
    let others = others(&plan, wanted, cluster.as_ref());
    let others = if others.is_empty() { String::new() } else { format!("\n\nOf other kinds:\n{}", others.join("\n")) };
    let help = match &cluster {
        Some(cluster) => {
            let lines = help(&job, &plan, cluster)?.into_iter().map(|line| on_its_devices(line, Some(cluster)));
            format!("\n\nWhat would help:\n{}", lines.collect::<Vec<_>>().join("\n"))
        }
        None => String::new(),
    };
    let origin = match &cluster {
        Some(cluster) => format!(
            "Times are computed from the cluster's figures: no step was measured. The first strategy runs on {}.",
            kinds(cluster, &best.timed.strategy)
        ),
        None => format!("To run the first: {}", flags(&best.timed.strategy)),
    };
    Ok(format!(
        "{}{others}{help}\n\nexposed: time in which some rank exchanges and does not compute; idle: the share of time in which a rank \
         does not compute, in the mean; memory: what the fullest device needs. Of strategies within 1 % of the fastest, the one with \
         the fewest shards and micro-batches comes first.\nComputed in {}. Looked at {} strategies, left out {} that cannot be faster. \
         {origin}",
        text::table(&header, &rows),
        format!("{:?}", best.timed.strategy.dtype).to_lowercase(),
        looked_at(&plan),
        plan.left_out.len(),
    ))
}

/// A cluster's description, or the first of its devices.
fn cluster(path: &Path, devices: Option<u32>) -> Result<Cluster, Failure> {
    const MOST_BYTES: u64 = 1 << 20;
    let wrong = |what: String| {
        let hint = Some("see examples/clusters for descriptions that can be read".to_owned());
        Mistake { what: format!("`{}`: {what}", path.display()), hint }
    };
    let cluster = Cluster::parse(&read_text(path, MOST_BYTES)?).map_err(|error| wrong(error.to_string()))?;
    let Some(wanted) = devices.map(|count| count as usize) else { return Ok(cluster) };
    let there = cluster.places().len();
    cluster.first(wanted).ok_or_else(|| wrong(format!("it has {there} devices, not {wanted}")).into())
}

/// Its devices are planned as GPUs, unless all are cores.
fn device_kind(cluster: &Cluster) -> DeviceKind {
    let are_cores = cluster.devices.values().all(|rates| rates.kind == ClusterKind::Cpu);
    if are_cores { DeviceKind::Cpu } else { DeviceKind::Cuda }
}

/// A strategy in a few words.
fn named(strategy: &Strategy, cluster: Option<&Cluster>) -> String {
    on_its_devices(describe(strategy), cluster)
}

/// A line about strategies, whose words for devices are those of GPUs, as suits a cluster of cores.
fn on_its_devices(line: String, cluster: Option<&Cluster>) -> String {
    match cluster.map(device_kind) {
        Some(DeviceKind::Cpu) => line.replace(", each rank on a GPU", "").replace("on a GPU", "1 rank"),
        _ => line,
    }
}

/// The devices of a strategy: `2 h200 and 4 a100`.
fn kinds(cluster: &Cluster, strategy: &Strategy) -> String {
    let Devices::Cuda { gpus, .. } = &strategy.devices else { return String::new() };
    let places = cluster.places();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    gpus.iter().for_each(|&number| *counts.entry(places[number].device).or_default() += 1);
    counts.iter().map(|(kind, count)| format!("{count} {kind}")).collect::<Vec<_>>().join(" and ")
}

/// The same with as many sequences as have these tokens.
fn with_tokens(like: Strategy, tokens: Option<u64>, config: &RunConfig) -> Result<Strategy, Mistake> {
    let (Some(tokens), sequence) = (tokens, config.settings.data.sequence as u64) else { return Ok(like) };
    /// Plans go through all ways to share them.
    const MOST_SEQUENCES: u64 = 1 << 20;
    if tokens > MOST_SEQUENCES * sequence {
        let what = format!("{tokens} tokens a step are more than {MOST_SEQUENCES} sequences of {sequence}");
        return Err(Mistake { what, hint: None });
    }
    if !tokens.is_multiple_of(sequence) {
        let what = format!("{tokens} tokens a step are no whole sequences of {sequence}");
        return Err(Mistake {
            what,
            hint: Some(format!("try --tokens-per-step {}", tokens.div_ceil(sequence) * sequence)),
        });
    }
    let sequences = (tokens / sequence) as usize;
    Ok(Strategy { micro_batch: 1, accumulate: sequences, dp: 1, ..like })
}

/// The step of a strategy and its memory as a picture. Replicas and shards that are alike are drawn once.
fn drawn(job: &Job, judged: &JudgedStep, timeline: &Timeline, cluster: Option<&Cluster>) -> String {
    let TimedStep { strategy, step_s, .. } = &judged.timed;
    let most = text::bytes(most_bytes(judged));
    let title = format!("{}: {:.1} ms a step, {most} on the fullest device", named(strategy, cluster), 1e3 * step_s);
    let (units, bars) = (&job.model.units, memory_bars(job, judged, cluster));
    if strategy.pp > 1 && timeline.ranks.len() == strategy.pp {
        let one_of_each = Strategy { dp: 1, cut: Cut::even(1), ..strategy.clone() };
        return pipeline_and_memory_svg(timeline, &one_of_each, units.len(), &title, &bars);
    }
    let names: Vec<String> = units.iter().map(|unit| unit.kind.to_string()).collect();
    timeline_and_memory_svg(timeline, &names, &title, &bars)
}

/// Keys that the flags of a plan do not undo.
fn refuse_what_a_plan_replaces(parallel: &Parallel) -> Result<(), Mistake> {
    let keys = [
        ("tp_weights", !parallel.tp_weights.is_empty()),
        ("whole_experts", parallel.whole_experts),
        ("stage_layers", !parallel.stage_layers.is_empty()),
        ("chunks", parallel.chunks.is_some()),
        ("ahead", parallel.ahead),
        ("comm_cores", parallel.comm_cores > 0),
        ("link_gb_per_s", parallel.link_gb_per_s.is_some()),
    ];
    let set = keys.into_iter().find(|(_, is_set)| *is_set);
    set.map_or(Ok(()), |(key, _)| {
        let what = format!("`parallel.{key}` is set, but plans have no strategies with it");
        Err(Mistake { what, hint: Some("leave it out of what is planned".to_owned()) })
    })
}

fn cells(job: &Job, judged: &JudgedStep, best_s: f64, cluster: Option<&Cluster>) -> Vec<String> {
    let TimedStep { strategy, step_s, timing } = &judged.timed;
    vec![
        named(strategy, cluster),
        format!("{} × {}", strategy.accumulate, strategy.micro_batch),
        format!("{:.1} ms", 1e3 * step_s),
        format!("{:.0}", tokens_per_s(job, &judged.timed)),
        text::percent(timing.exposed),
        text::percent(timing.idle),
        text::bytes(most_bytes(judged)),
        text::percent(judged.fullness),
        if *step_s > best_s { text::percent(step_s / best_s - 1.0) } else { String::new() },
    ]
}

fn tokens_per_s(job: &Job, TimedStep { strategy, step_s, .. }: &TimedStep) -> f64 {
    (strategy.micro_batch * strategy.micros_per_step() * job.sequence) as f64 / step_s
}

/// Of the fullest device.
fn most_bytes(judged: &JudgedStep) -> u64 {
    judged.memory.iter().map(|cost| cost.arena_bytes).max().unwrap_or(0)
}

/// The best strategies of axes that are not among those shown, and why they lose.
fn others(plan: &Plan, shown: usize, cluster: Option<&Cluster>) -> Vec<String> {
    let axes = |strategy: &Strategy| {
        let Mesh { pp, dp, tp } = strategy.mesh();
        [pp, dp, tp]
    };
    let best = &plan.fitting[0].timed;
    let mut seen: Vec<[usize; 3]> =
        plan.fitting.iter().take(shown).map(|judged| axes(&judged.timed.strategy)).collect();
    let mut lines = Vec::new();
    for timed in plan.fitting.iter().skip(shown).map(|judged| &judged.timed).chain(&plan.too_slow) {
        if seen.contains(&axes(&timed.strategy)) {
            continue;
        }
        seen.push(axes(&timed.strategy));
        lines.push(format!(
            "  {}: {} slower, {} exposed, {} idle",
            named(&timed.strategy, cluster),
            text::percent(timed.step_s / best.step_s - 1.0),
            text::percent(timed.timing.exposed),
            text::percent(timed.timing.idle)
        ));
    }
    for (strategy, least_s) in &plan.left_out {
        if !seen.contains(&axes(strategy)) {
            seen.push(axes(strategy));
            let slower = text::percent((least_s / best.step_s - 1.0).max(0.0));
            lines.push(format!("  {}: at least {slower} slower", named(strategy, cluster)));
        }
    }
    let too_large = plan.too_large.iter().map(|judged| (&judged.timed.strategy, judged.fullness, ""));
    let surely = plan.surely_too_large.iter().map(|(strategy, least)| (strategy, least.fullness, "at least "));
    for (strategy, fullness, least) in too_large.chain(surely) {
        if !seen.contains(&axes(strategy)) {
            seen.push(axes(strategy));
            let fullness = text::percent(fullness);
            lines.push(format!("  {}: needs {least}{fullness} of the memory there is", named(strategy, cluster)));
        }
    }
    /// More say little.
    const MOST_LINES: usize = 8;
    if lines.len() > MOST_LINES {
        let more = lines.len() - MOST_LINES;
        lines.truncate(MOST_LINES);
        lines.push(format!("  and {more} more, see --json"));
    }
    lines
}

/// Flags that make `train` run this strategy.
fn flags(strategy: &Strategy) -> String {
    let Mesh { pp, dp, tp } = strategy.mesh();
    let arrangement = &strategy.arrangement;
    let mut flags = vec![
        "--set parallel.auto=false".to_owned(),
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
        let weights = strategy.cut.weights.iter().map(|weight| format!("{weight:.4}")).collect::<Vec<_>>();
        if weights.iter().any(|weight| *weight != weights[0]) {
            flags.push(format!("--set parallel.tp_weights=[{}]", weights.join(",")));
        }
    }
    if let Devices::Cpu { cores_per_rank, .. } = strategy.devices {
        flags.push(format!("--set parallel.cores_per_rank={cores_per_rank}"));
    }
    flags.push(format!("--set train.recompute={}", arrangement.schedule != NONE));
    flags.push(format!("--set parallel.schedule={}", arrangement.schedule.name));
    flags.push(format!("--set parallel.recompute_units={}", arrangement.recompute.name()));
    flags.join(" ")
}

fn in_json(job: &Job, plan: &Plan) -> String {
    let timed = |timed: &TimedStep| {
        let TimedStep { strategy, step_s, timing } = timed;
        json!({
            "strategy": strategy, "step_s": step_s, "tokens_per_s": tokens_per_s(job, timed),
            "exposed_share": timing.exposed, "idle_share": timing.idle, "flags": flags(strategy),
        })
    };
    let judged = |judged: &JudgedStep| {
        let mut found = timed(&judged.timed);
        found["fullness"] = json!(judged.fullness);
        found["bytes"] = json!(most_bytes(judged));
        found
    };
    let all = |list: &[JudgedStep]| list.iter().map(judged).collect::<Vec<_>>();
    let surely: Vec<_> = { plan.surely_too_large.iter() }
        .map(|(strategy, least)| json!({ "strategy": strategy, "fullness_at_least": least.fullness }))
        .collect();
    json!({ "fitting": all(&plan.fitting), "too_large": all(&plan.too_large), "surely_too_large": surely,
        "too_slow": plan.too_slow.iter().map(timed).collect::<Vec<_>>(), "left_out": plan.left_out.len() })
    .to_string()
}
