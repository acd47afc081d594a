//! `evenkeel bench schedules`: the same steps arranged by every schedule, side by side.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use evenkeel_comm::Link;
use evenkeel_device::DType;
use evenkeel_model::{Cut, Model, Parameters};
use evenkeel_step::schedule::{
    Arrangement, CROSS_PASS, Chain, DEFAULT, NONE, OASES, REFERENCES, SAVED_COMM, SCHEDULES, Schedule,
};
use evenkeel_step::simulate::{Costs, Unforeseen, simulate};
use evenkeel_step::trace::{Shares, Span, Timeline};
use evenkeel_step::{Program, Strategy, Work};
use evenkeel_store::NewFolder;
use evenkeel_train::{Candidate, Foretold, costs, preferred};

use super::devices::{DeviceArguments, describe};
use super::llama::Llama;
use super::{between, median};
use crate::arrange::{parts_to_try, simulated};
use crate::drawing::{perfetto, svg};
use crate::launch::Launch;
use crate::memory::{Beside, check_steps};
use crate::strategy::zero_stage;
use crate::traced_step::{TracedStep, measure};
use crate::{Failure, Mistake, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    llama: Llama,
    /// Replicas (data parallelism), each on ranks of its own.
    #[arg(long, default_value_t = 1, value_parser = between::<1, 64>)]
    dp: usize,
    /// ZeRO stage, what replicas split: 1 optimizer state, 2 gradients too, 3 parameters too.
    #[arg(long, default_value_t = 0, value_parser = between::<0, 3>)]
    zero: usize,
    /// Ranks that share every layer (tensor parallelism).
    #[arg(long, default_value_t = 2, value_parser = between::<1, 64>)]
    tp: usize,
    #[command(flatten)]
    devices: DeviceArguments,
    /// In how many parts overlapped schedules cut a step's sequences; one, two and what a simulation of "oases" chooses by
    /// default.
    #[arg(long, value_delimiter = ',', value_parser = between::<1, 64>)]
    parts: Vec<usize>,
    /// Leave the residual stream whole on every rank; a simulation of "oases" chooses if neither this nor the next is given.
    #[arg(long, conflicts_with = "split_stream")]
    whole_stream: bool,
    /// Split the residual stream by tokens.
    #[arg(long)]
    split_stream: bool,
    /// Schedules to compare, such as default,oases; all by default.
    #[arg(long, value_delimiter = ',', value_name = "NAME", value_parser = schedule)]
    schedules: Vec<Schedule>,
    /// Compare "default" and "cross-pass" as they were published, too: with a useless reduction in each layer.
    #[arg(long)]
    references: bool,
    /// Gigabytes per second of an emulated link between the ranks; their own memory if not given.
    #[arg(long, value_name = "RATE", value_parser = above_zero)]
    link_gb_per_s: Option<f64>,
    /// Microseconds that every message takes on the emulated link.
    #[arg(long, value_name = "TIME", default_value_t = 0.0, requires = "link_gb_per_s", value_parser = not_negative)]
    link_latency_us: f64,
    /// Rounds; every schedule runs once in each.
    #[arg(long, default_value_t = 5, value_parser = between::<1, 100000>)]
    rounds: usize,
    /// Write what ran when to this folder: drawn as SVG, and for ui.perfetto.dev.
    #[arg(long, value_name = "FOLDER")]
    trace: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

fn schedule(name: &str) -> Result<Schedule, String> {
    Schedule::named(name).ok_or_else(|| {
        let names: Vec<&str> = SCHEDULES.iter().chain(&REFERENCES).map(|schedule| schedule.name).collect();
        format!("there are {}", names.join(", "))
    })
}

fn not_negative(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "a number from 0 is needed".to_owned())
}

fn above_zero(text: &str) -> Result<f64, String> {
    not_negative(text).ok().filter(|&value| value > 0.0).ok_or_else(|| "a number above 0 is needed".to_owned())
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let llama = &arguments.llama;
    llama.check_shares("--dp", arguments.dp)?;
    arguments.check_devices()?;
    let model = llama.model()?.for_device(arguments.devices.device.into());
    let dtype = DType::from(llama.dtype);
    let chosen = arguments.chosen(&model)?;
    let launch = arguments.launch(chosen.candidate.split_sequence);
    let shards = model.cut(&launch.strategy.cut)?;
    let mut cases = arguments.cases(&launch.strategy, &shards, chosen.candidate.parts);
    let largest = cases.iter().max_by_key(|case| case.peak_bytes).expect("there are schedules");
    let blank = llama.blank(&model, arguments.dp);
    let largest = launch.strategy.clone().arranged(largest.arrangement);
    let costs = costs(&shards, &largest, llama.trainer_options(), &blank);
    let hint = "use a smaller --batch or --sequence, or fewer --layers";
    check_steps(&largest, &costs, Beside::default(), hint)?;
    let ranks = launch.start(shards, llama.trainer_options(), move |shard, split, queue| {
        Ok(Parameters::random(shard, dtype, split, 0, queue))
    })?;
    for round in 0..arguments.rounds as u64 {
        for case in &mut cases {
            case.steps.push(measure(
                &ranks,
                case.arrangement,
                [2 * round, 2 * round + 1].map(|step| llama.samples(step, arguments.dp)),
                0.0,
            )?);
        }
    }
    let rows = rows(&cases).map_err(Failure::fault)?;
    if let Some(folder) = &arguments.trace {
        write_traces(folder, &cases, &model)?;
    }
    Ok(if arguments.json {
        in_json(arguments, &launch.strategy, &chosen, &rows)
    } else {
        in_words(arguments, &model, &launch.strategy, &chosen, &rows)
    })
}

impl Arguments {
    fn launch(&self, split_sequence: bool) -> Launch {
        let strategy = self.llama.strategy(self.dp, self.tp, self.devices.threads);
        let cut = Cut { split_sequence, ..strategy.cut };
        let strategy = Strategy { cut, zero: zero_stage(self.zero), ..strategy };
        let mut launch = Launch::from(self.devices.place(strategy));
        let latency = Duration::from_secs_f64(self.link_latency_us * 1e-6);
        launch.comm.link = self.link_gb_per_s.map(|rate| Link { latency, bytes_per_s: rate * 1e9 });
        launch
    }

    fn check_devices(&self) -> Result<(), Mistake> {
        if self.devices.are_gpus() && self.link_gb_per_s.is_some() {
            let what = "links between GPUs are not emulated".to_owned();
            return Err(Mistake { what, hint: Some("leave out --link-gb-per-s".to_owned()) });
        }
        self.devices.check(self.dp * self.tp)
    }

    /// The choice of a run with these sizes, this link and schedule "oases", as far as the options leave it open.
    fn chosen(&self, model: &Model) -> Result<Foretold, Failure> {
        let streams = match (self.tp > 1, self.whole_stream, self.split_stream) {
            (false, ..) | (_, true, _) => vec![false],
            (_, _, true) => vec![true],
            _ => vec![true, false],
        };
        let parts = match &self.parts[..] {
            [] => parts_to_try(Arrangement::of(OASES), self.sequences_of_share()),
            given => given.iter().map(|&parts| parts.min(self.sequences_of_share())).collect(),
        };
        let of_stream = |split_sequence| parts.iter().map(move |&parts| Candidate { parts, split_sequence });
        let candidates: Vec<Candidate> = streams.into_iter().flat_map(of_stream).collect();
        let blank = self.llama.blank(model, self.dp).swap_remove(0);
        let mut launch = self.launch(true);
        launch.strategy.arrangement = Arrangement::of(OASES);
        model.cut(&launch.strategy.cut)?;
        let foretold = simulated(&candidates, model, &launch, &blank).map_err(Failure::fault)?;
        Ok(preferred(&foretold).expect("there are candidates"))
    }

    fn sequences_of_share(&self) -> usize {
        (self.llama.batch / self.dp).max(1)
    }

    /// The cases to compare and, before them, those that costs are learnt from, for every number of parts.
    fn cases(&self, strategy: &Strategy, shards: &[Model], chosen: usize) -> Vec<Case> {
        let parts = if self.parts.is_empty() { vec![1, 2, chosen] } else { self.parts.clone() };
        let mut parts: Vec<usize> = parts.into_iter().map(|parts| parts.min(self.sequences_of_share())).collect();
        parts.sort_unstable();
        parts.dedup();
        let listed = if self.schedules.is_empty() { &ALL[..] } else { &self.schedules };
        let references = REFERENCES.iter().filter(|_| self.references);
        let mut arrangements = Vec::new();
        for &schedule in listed.iter().chain(references) {
            let parts = if schedule.overlaps { &parts[..] } else { &[1] };
            arrangements.extend(parts.iter().map(|&parts| Arrangement::of(schedule).in_parts(parts)));
        }
        let used: BTreeSet<usize> = arrangements.iter().map(|arrangement| arrangement.parts).collect();
        let mut unlisted: Vec<Arrangement> =
            used.into_iter().map(|parts| Arrangement::of(LEARNT_FROM).in_parts(parts)).collect();
        unlisted.retain(|arrangement| !arrangements.contains(arrangement));
        let case = |arrangement: Arrangement, is_listed| {
            let blank = self.llama.blank(&shards[0], self.dp);
            let strategy = strategy.clone().arranged(arrangement);
            let costs = costs(shards, &strategy, self.llama.trainer_options(), &blank);
            Case {
                arrangement,
                is_listed,
                programs: self.programs(&strategy, shards),
                peak_bytes: costs.iter().map(|cost| cost.peak_bytes).max().unwrap_or(0),
                steps: Vec::new(),
            }
        };
        let unlisted = unlisted.into_iter().map(|arrangement| case(arrangement, false));
        unlisted.chain(arrangements.into_iter().map(|arrangement| case(arrangement, true))).collect()
    }

    fn programs(&self, strategy: &Strategy, shards: &[Model]) -> Vec<Program> {
        let (samples, arrangement) = (self.llama.samples(0, self.dp), strategy.arrangement);
        let sizes = |replica: usize| [samples[replica].part_sizes(&shards[0], arrangement.parts)];
        let chains = Chain::all(shards, strategy);
        let write = |(rank, chain): (usize, &Chain)| arrangement.step(chain, &sizes(strategy.mesh().replica(rank)));
        chains.iter().enumerate().map(write).collect()
    }
}

/// The first is what the others' speed is compared with.
const ALL: [Schedule; 5] = [DEFAULT, SAVED_COMM, NONE, CROSS_PASS, OASES];

/// Overlaps nothing and has every task that others have.
const LEARNT_FROM: Schedule = SAVED_COMM;

/// A schedule with its choices and measurements.
struct Case {
    arrangement: Arrangement,
    is_listed: bool,
    programs: Vec<Program>,
    /// Peak of the rank that needs most.
    peak_bytes: u64,
    steps: Vec<TracedStep>,
}

impl TracedStep {
    /// The longer of a rank's computing and exchanging, and what nothing can hide: the first exchange, and the sums of gradients
    /// at the end.
    fn bound_s(&self) -> f64 {
        let of_rank = |rank: usize| {
            let Shares { compute_s, transfer_s, .. } = self.timeline.shares(rank);
            let exchanges = || self.timeline.ranks[rank].iter().filter(|span| span.lane.exchanges());
            let is_last = |span: &&Span| {
                matches!(span.work, Work::SumGradients(_) | Work::ReduceGradients(_)) || span.work.is_of_tail()
            };
            let sums = exchanges().rev().take_while(is_last);
            let fill_s: f64 = exchanges().take(1).chain(sums).map(|span| span.end_s - span.came_s).sum();
            compute_s.max(transfer_s) + fill_s
        };
        (0..self.timeline.ranks.len()).map(of_rank).fold(0.0, f64::max) + self.beside_s()
    }
}

/// A line of the table.
struct Row {
    schedule: &'static str,
    parts: usize,
    step_s: f64,
    simulated_s: f64,
    /// A bound that no schedule of these tasks can beat.
    bound_s: f64,
    /// The share that tracing adds to a step.
    trace_share: f64,
    exposed_share: f64,
    compute_s: f64,
    transfer_s: f64,
    peak_bytes: u64,
    layer: Layer,
    /// Exchanges that a task waits for and nothing hides, and all that a task waits for.
    bare: (usize, usize),
}

/// The exchanges of a layer.
#[derive(Default)]
struct Layer {
    reductions: usize,
    gathers: usize,
    /// Bytes that each rank sends, in a ring.
    traffic_bytes: u64,
}

fn rows(cases: &[Case]) -> Result<Vec<Row>, Unforeseen> {
    let mut rows = Vec::new();
    for case in cases.iter().filter(|case| case.is_listed) {
        let parts = case.arrangement.parts;
        let with = |schedule| cases.iter().find(|case| case.arrangement == Arrangement::of(schedule).in_parts(parts));
        let plain = with(LEARNT_FROM).expect("costs are learnt for every number of parts");
        let overlapped = with(OASES).map_or(Vec::new(), Case::timelines);
        let costs = Costs::measured(&plain.timelines()).with_contention(&overlapped)?;
        // The machine's speed changes from minute to minute, so every step is predicted from the costs of its own round.
        let told = case.steps.iter().zip(&plain.steps).map(|(step, plain)| {
            let mut of_round = Costs::measured(std::slice::from_ref(&plain.timeline));
            of_round.contention = costs.contention;
            let simulated = simulate(&case.programs, &of_round)?;
            Ok((simulated.duration_s() + plain.beside_s()) / step.duration_s)
        });
        let told = median(told.collect::<Result<Vec<f64>, Unforeseen>>()?);
        let awaited = case.programs[0].awaited();
        let step_s = median(case.steps.iter().map(|step| step.duration_s));
        let share = |of: fn(&Timeline) -> f64| median(case.steps.iter().map(|step| of(&step.timeline)));
        rows.push(Row {
            schedule: case.arrangement.schedule.name,
            parts,
            step_s,
            simulated_s: told * step_s,
            bound_s: step_s * median(case.steps.iter().map(|step| step.bound_s() / step.duration_s)),
            trace_share: median(case.steps.iter().map(|step| step.duration_s / step.untraced_s)) - 1.0,
            exposed_share: share(Timeline::exposed_share),
            compute_s: share(|timeline| timeline.shares(0).compute_s),
            transfer_s: share(|timeline| timeline.shares(0).transfer_s),
            peak_bytes: case.peak_bytes,
            layer: Layer::of(&case.programs[0]),
            bare: (awaited.iter().filter(|(_, is_hidden)| !is_hidden).count(), awaited.len()),
        });
    }
    Ok(rows)
}

impl Case {
    fn timelines(&self) -> Vec<Timeline> {
        self.steps.iter().map(|step| step.timeline.clone()).collect()
    }

    fn name(&self) -> String {
        format!("{}-{}", self.arrangement.schedule.name, self.arrangement.parts)
    }
}

impl Layer {
    fn of(program: &Program) -> Layer {
        let head = program.tasks.iter().map(|task| task.unit.0).max().unwrap_or(0);
        let mut all = Layer::default();
        for task in program.tasks.iter().filter(|task| (1..head).contains(&task.unit.0)) {
            let (kind, count) = match task.work {
                Work::AllReduce => (evenkeel_comm::ExchangeKind::AllReduce, &mut all.reductions),
                Work::ReduceScatter => (evenkeel_comm::ExchangeKind::ReduceScatter, &mut all.reductions),
                Work::AllGather => (evenkeel_comm::ExchangeKind::AllGather, &mut all.gathers),
                _ => continue,
            };
            *count += 1;
            let exchange = task.exchange.expect("an exchange moves something");
            let (_, share) = kind.on_a_ring(program.groups[exchange.group.0].ranks.len());
            all.traffic_bytes += (share * exchange.bytes as f64) as u64;
        }
        let layers = (head.saturating_sub(1) / 2).max(1);
        let Layer { reductions, gathers, traffic_bytes } = all;
        Layer {
            reductions: reductions / layers,
            gathers: gathers / layers,
            traffic_bytes: traffic_bytes / layers as u64,
        }
    }
}

fn write_traces(folder: &Path, cases: &[Case], model: &Model) -> Result<(), Failure> {
    let units: Vec<String> = model.units.iter().map(|unit| unit.kind.to_string()).collect();
    let new = NewFolder::create(folder)?;
    for case in cases.iter().filter(|case| case.is_listed) {
        let Some(step) = case.steps.last() else { continue };
        let timeline = step.timeline.from_zero();
        let title = format!("schedule {}, {} parts", case.arrangement.schedule.name, case.arrangement.parts);
        new.write(&format!("{}.svg", case.name()), svg(&timeline, &units, &title).as_bytes())?;
        new.write(&format!("{}.json", case.name()), perfetto(&timeline, &units).as_bytes())?;
    }
    Ok(new.commit(false)?)
}

fn in_words(arguments: &Arguments, model: &Model, strategy: &Strategy, chosen: &Foretold, rows: &[Row]) -> String {
    let llama = &arguments.llama;
    let link = match arguments.link_gb_per_s {
        Some(rate) => format!(", emulated link of {rate} GB/s and {} µs", arguments.link_latency_us),
        None => String::new(),
    };
    let stream = if strategy.cut.split_sequence { "split" } else { "whole" };
    let devices = describe(&strategy.devices);
    let first = format!(
        "{} parameters, {}, {} × {} tokens a step, dp {}, ZeRO {}, tp {}{devices}, stream {stream}{link}",
        text::count(model.parameter_count()),
        llama.dtype.name(),
        llama.batch,
        llama.sequence,
        arguments.dp,
        arguments.zero,
        arguments.tp,
    );
    let first_s = rows[0].step_s;
    let cells = |row: &Row| {
        vec![
            row.schedule.to_owned(),
            row.parts.to_string(),
            format!("{:.1} ms", 1e3 * row.step_s),
            format!("{:.0}", llama.tokens() as f64 / row.step_s),
            format!("{:.2}×", first_s / row.step_s),
            text::percent(row.exposed_share),
            format!("{:.1} ms", 1e3 * row.simulated_s),
            format!("{:+.1}%", 100.0 * (row.simulated_s / row.step_s - 1.0)),
            format!("{:.1} ms", 1e3 * row.bound_s),
            text::bytes(row.peak_bytes),
            row.layer.reductions.to_string(),
            row.layer.gathers.to_string(),
            text::bytes(row.layer.traffic_bytes),
            format!("{} of {}", row.bare.0, row.bare.1),
        ]
    };
    let header = [
        "schedule",
        "parts",
        "step",
        "tokens/s",
        "speed",
        "exposed",
        "simulated",
        "error",
        "bound",
        "memory",
        "reductions",
        "gathers",
        "traffic",
        "bare",
    ];
    let table = text::table(&header, &rows.iter().map(cells).collect::<Vec<_>>());
    let legend = "Medians. speed: against the first row; exposed: share of the step in which a rank exchanged and did not \
                  compute; simulated: from the costs of single tasks in the same round; bound: the longer of computing and \
                  exchanging, and what nothing can hide; memory: of the rank that needs most; reductions, gathers and the traffic that \
                  each rank sends: per layer; bare: exchanges of a step that overlap no \
                  computation before a task waits for them.";
    let Candidate { parts, .. } = chosen.candidate;
    let share = text::percent(chosen.exposed_share);
    let chosen = format!(
        "A run with schedule oases would take {parts} parts and a {stream} stream, of what the options leave open: by a \
         simulation on estimated costs, which exposes {share}."
    );
    format!("{first}\n\n{table}\n\n{chosen}\n{legend}")
}

fn in_json(arguments: &Arguments, strategy: &Strategy, chosen: &Foretold, rows: &[Row]) -> String {
    let row = |row: &Row| {
        serde_json::json!({
            "schedule": row.schedule, "parts": row.parts, "step_s": row.step_s, "simulated_s": row.simulated_s,
            "tokens_per_s": arguments.llama.tokens() as f64 / row.step_s, "exposed_share": row.exposed_share,
            "bound_s": row.bound_s, "trace_share": row.trace_share, "compute_s": row.compute_s, "transfer_s": row.transfer_s, "peak_bytes": row.peak_bytes,
            "reductions_per_layer": row.layer.reductions, "gathers_per_layer": row.layer.gathers,
            "traffic_bytes_per_layer": row.layer.traffic_bytes, "bare_exchanges": row.bare.0, "awaited_exchanges": row.bare.1,
        })
    };
    let is_emulated = arguments.link_gb_per_s.is_some();
    let rows: Vec<_> = rows.iter().map(row).collect();
    serde_json::json!({ "dp": arguments.dp, "zero": arguments.zero, "tp": arguments.tp, "link_is_emulated": is_emulated, "stream_is_split": strategy.cut.split_sequence, "chosen_parts": chosen.candidate.parts, "schedules": rows }).to_string()
}
