//! `evenkeel plan CONFIG`: the strategies for a run on this machine, the fastest first, from measurements.

use evenkeel_step::schedule::NONE;
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Mesh, Strategy};
use serde_json::json;

use crate::config::{Overrides, Parallel};
use crate::inputs::feed::Text;
use crate::inputs::model::ModelInput;
use crate::planning::{Job, JudgedStep, Plan, describe, measured_plan};
use crate::strategy::strategy;
use crate::train::{beside, job};
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

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let mut config = arguments.overrides.read()?;
    let tokenizer = Text::open(&config)?;
    let input = ModelInput::read(&mut config, tokenizer.as_ref().map(|text| &text.tokenizer))?;
    let settings = &config.settings;
    refuse_what_a_plan_replaces(&settings.parallel)?;
    let beside = |strategy: &Strategy| beside(settings, &input.model, strategy);
    let job = job(settings, &input, &beside)?;
    let like = strategy(settings, &input.model, &input.json)?;
    let plan = measured_plan(&job, &like, usize::from(arguments.show), arguments.fresh)?;
    let best = &plan.fitting[0];
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

/// Keys that the flags of a plan do not undo.
fn refuse_what_a_plan_replaces(parallel: &Parallel) -> Result<(), Mistake> {
    let keys = [
        ("tp_weights", !parallel.tp_weights.is_empty()),
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

fn cells(job: &Job, judged: &JudgedStep, best_s: f64) -> Vec<String> {
    let JudgedStep { strategy, step_s, fullness, details } = judged;
    vec![
        describe(strategy),
        format!("{} × {}", strategy.accumulate, strategy.micro_batch),
        format!("{:.1} ms", 1e3 * step_s),
        format!("{:.0}", tokens_per_s(job, judged)),
        share(details, Timeline::exposed_share),
        share(details, Timeline::idle_share),
        text::percent(*fullness),
        if *step_s > best_s { text::percent(step_s / best_s - 1.0) } else { String::new() },
    ]
}

fn tokens_per_s(job: &Job, JudgedStep { strategy, step_s, .. }: &JudgedStep) -> f64 {
    (strategy.micro_batch * strategy.micros_per_step() * job.sequence) as f64 / step_s
}

fn share(timeline: &Option<Timeline>, of: fn(&Timeline) -> f64) -> String {
    timeline.as_ref().map_or(String::new(), |timeline| text::percent(of(timeline)))
}

/// The best strategies of axes that are not among those shown, and why they lose.
fn others(plan: &Plan, shown: usize) -> Vec<String> {
    let axes = |judged: &JudgedStep| {
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
    }
    if let Devices::Cpu { cores_per_rank, .. } = strategy.devices {
        flags.push(format!("--set parallel.cores_per_rank={cores_per_rank}"));
    }
    flags.push(format!("--set train.recompute={}", arrangement.schedule != NONE));
    flags.push(format!("--set parallel.schedule={}", arrangement.schedule.name));
    flags.join(" ")
}

fn in_json(job: &Job, plan: &Plan) -> String {
    let judged = |judged: &JudgedStep| {
        let JudgedStep { strategy, step_s, fullness, details } = judged;
        json!({
            "strategy": strategy, "step_s": step_s, "tokens_per_s": details.as_ref().map(|_| tokens_per_s(job, judged)), "fullness": fullness,
            "exposed_share": details.as_ref().map(Timeline::exposed_share),
            "idle_share": details.as_ref().map(Timeline::idle_share),
            "flags": flags(strategy),
        })
    };
    let all = |list: &[JudgedStep]| list.iter().map(judged).collect::<Vec<_>>();
    json!({ "fitting": all(&plan.fitting), "too_large": all(&plan.too_large), "left_out": plan.left_out }).to_string()
}
