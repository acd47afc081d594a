//! `evenkeel bench pipelines`: steps in stages, in every order and cut, beside one rank on the device of one place.
//!
//! Every round starts the ranks of each case anew, so cases neither share memory nor wait beside one another.

use std::path::{Path, PathBuf};

use evenkeel_device::{DeviceKind, cpu_report};
use evenkeel_model::{Model, Parameters};
use evenkeel_step::schedule::{Arrangement, Schedule};
use evenkeel_step::simulate::{Costs, Unforeseen, simulate};
use evenkeel_step::{Pipeline, PipelineOrder, Program, Strategy};
use evenkeel_store::write_file_atomically;
use evenkeel_train::{Cost, Ranks, Restage, Samples, costs};
use serde_json::json;

use super::devices::{DeviceArguments, describe};
use super::layers::{LayerArguments, frozen_count};
use super::llama::Llama;
use super::{between, median};
use crate::config::{StageCut, Straggler};
use crate::drawing::pipeline_svg;
use crate::launch::Launch;
use crate::memory::{Beside, Room, check_steps};
use crate::stages::{by_place, cuts_by_cost, cuts_by_parameters, cuts_of_layers, staging};
use crate::traced_step::{TracedStep, measure};
use crate::{Failure, Mistake, process, text};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    llama: Llama,
    #[command(flatten)]
    layers: LayerArguments,
    /// Places of the pipeline, each with its part of the cores, or with a GPU or part of one.
    #[arg(long, default_value_t = 2, value_parser = between::<2, 64>)]
    pp: usize,
    #[command(flatten)]
    devices: DeviceArguments,
    /// Orders to compare, such as gpipe,1f1b; all by default.
    #[arg(long, value_delimiter = ',', value_name = "NAME", value_parser = order)]
    orders: Vec<PipelineOrder>,
    /// Where to cut the model: "cost" as in a run, which measures before its first step, "uniform", or the layers of each
    /// stage, such as 1+3. Orders with another number of stages leave a list out.
    #[arg(long, value_delimiter = ',', default_value = "cost", value_parser = stage_cuts)]
    cuts: Vec<StageCuts>,
    /// Micro-batches of a step, which share its sequences, such as 2,4.
    #[arg(long, value_delimiter = ',', value_name = "COUNT", default_value = "4", value_parser = between::<1, 65536>)]
    micros: Vec<usize>,
    /// Tokens of a sequence, such as 256,1024, if they are to be compared; --sequence by default.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", value_parser = between::<2, 1048576>)]
    lengths: Vec<usize>,
    /// Places on cores whose kernels take so many times as long, such as 1:2. GPUs have --virtual-gpus of unequal sizes.
    #[arg(long, value_delimiter = ',', value_name = "PLACE:FACTOR", value_parser = Straggler::parse)]
    slow: Vec<Straggler>,
    /// Keep only the residual stream of the forward pass and recompute the rest.
    #[arg(long)]
    recompute: bool,
    /// Rounds; every case runs once in each.
    #[arg(long, default_value_t = 5, value_parser = between::<1, 100000>)]
    rounds: usize,
    /// Draw what ran when in the fastest pipeline to this file, SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum StageCuts {
    By(StageCut),
    Layers(Vec<usize>),
}

fn order(name: &str) -> Result<PipelineOrder, String> {
    let found = PipelineOrder::ALL.into_iter().find(|order| order.name() == name);
    found.ok_or_else(|| format!("there are {}", PipelineOrder::ALL.map(PipelineOrder::name).join(", ")))
}

fn stage_cuts(text: &str) -> Result<StageCuts, String> {
    let by = [StageCut::Cost, StageCut::Uniform].into_iter().find(|cut| cut.name() == text).map(StageCuts::By);
    let layers = || text.split('+').map(|count| count.parse().ok()).collect::<Option<_>>().map(StageCuts::Layers);
    by.or_else(layers).ok_or_else(|| "cost, uniform or layers such as 1+3 are needed".to_owned())
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let mut cases = arguments.cases()?;
    for case in &mut cases {
        case.cut_as_measured()?;
    }
    for round in 0..arguments.rounds as u64 {
        for case in &mut cases {
            case.measure(round)?;
        }
    }
    let rows = rows(&cases).map_err(Failure::fault)?;
    if let Some(file) = &arguments.svg {
        draw(file, &rows)?;
    }
    Ok(if arguments.json { in_json(arguments, &rows) } else { in_words(arguments, &rows) })
}

impl Arguments {
    fn cores_of_place(&self) -> usize {
        (self.devices.threads.unwrap_or_else(|| cpu_report().cores) / self.pp).max(1)
    }

    /// One rank on the device of a place, one on the cores of all places, and the pipelines, for every length and number of
    /// micro-batches.
    fn cases(&self) -> Result<Vec<Case>, Failure> {
        self.devices.check(self.pp)?;
        if self.devices.are_gpus() && !self.slow.is_empty() {
            let what = "--slow slows down the kernels of cores, not of GPUs".to_owned();
            return Err(Mistake { what, hint: Some("use --virtual-gpus of unequal sizes".to_owned()) }.into());
        }
        if let Some(straggler) = self.slow.iter().find(|straggler| straggler.rank >= self.pp) {
            let what = format!("--slow names place {}, the last is {}", straggler.rank, self.pp - 1);
            return Err(Mistake { what, hint: None }.into());
        }
        if self.slow.iter().any(|straggler| straggler.steps != Straggler::ALWAYS) {
            let what = "--slow names steps, but places of a benchmark are slow in all".to_owned();
            return Err(Mistake { what, hint: Some("give PLACE:FACTOR alone".to_owned()) }.into());
        }
        let lengths = if self.lengths.is_empty() { &[self.llama.sequence][..] } else { &self.lengths };
        let pipelines = self.pipelines()?;
        let mut cases = Vec::new();
        for &sequence in lengths {
            let llama = Llama { sequence, ..self.llama.clone() };
            let model = self.layers.model(&llama)?.for_device(self.devices.device.into());
            for &micros in &self.micros {
                llama.check_shares("--micros", micros)?;
                let one_rank = |cores: usize| {
                    self.devices.place(Strategy {
                        micro_batch: llama.batch.div_ceil(micros),
                        accumulate: micros,
                        arrangement: Arrangement::of(Schedule::usual(self.recompute, 1)),
                        ..llama.strategy(1, 1, Some(cores))
                    })
                };
                let one = one_rank(self.cores_of_place());
                cases.push(Case::new(&llama, &model, one.clone(), None, vec![1.0])?);
                if !self.devices.are_gpus() && self.slow.is_empty() {
                    let all = one_rank(self.pp * self.cores_of_place());
                    cases.push(Case::new(&llama, &model, all, None, vec![1.0])?);
                }
                for (order, cuts) in &pipelines {
                    let strategy = self.in_stages(&one, *order, cuts, &model, &llama)?;
                    let slow = Straggler::factors(&self.slow, self.pp, 1);
                    cases.push(Case::new(&llama, &model, strategy, Some(cuts.clone()), slow)?);
                }
            }
        }
        Ok(cases)
    }

    /// The orders and cuts that go together.
    fn pipelines(&self) -> Result<Vec<(PipelineOrder, StageCuts)>, Mistake> {
        let orders = if self.orders.is_empty() { &PipelineOrder::ALL[..] } else { &self.orders };
        let fits = |order: PipelineOrder, cuts: &StageCuts| match cuts {
            StageCuts::By(_) => true,
            StageCuts::Layers(layers) => layers.len() == self.pp * order.usual_chunks(),
        };
        if let Some(unfit) = self.cuts.iter().find(|cuts| !orders.iter().any(|&order| fits(order, cuts))) {
            let what = format!("--cuts has {}, but no order has as many stages on {} places", unfit.name(), self.pp);
            return Err(Mistake { what, hint: Some("give the layers of each stage".to_owned()) });
        }
        let of_order =
            |&order| self.cuts.iter().filter(move |cuts| fits(order, cuts)).map(move |it| (order, it.clone()));
        Ok(orders.iter().flat_map(of_order).collect())
    }

    /// The same steps in stages.
    fn in_stages(
        &self,
        one: &Strategy,
        order: PipelineOrder,
        cuts: &StageCuts,
        model: &Model,
        llama: &Llama,
    ) -> Result<Strategy, Mistake> {
        let found = match cuts {
            StageCuts::By(_) => cuts_by_parameters(self.pp * order.usual_chunks(), model, one.accumulate),
            StageCuts::Layers(layers) => cuts_of_layers(layers, model),
        };
        let found = found.map_err(|Mistake { what, hint }| Mistake {
            what: what.replace("`parallel.stage_layers`", "--cuts"),
            hint: hint.map(|hint| hint.replace("parallel.pp or parallel.chunks", "--pp")),
        })?;
        let cut_at = |cuts| self.devices.place(one.clone().in_stages(self.pp, Pipeline { cuts, order }));
        let strategy = cut_at(found);
        if *cuts != StageCuts::By(StageCut::Cost) {
            return Ok(strategy);
        }
        let room = Room::of(&strategy, Beside::default());
        let fullness = |strategy: &Strategy| room.fullness(strategy, &step_costs(llama, model, strategy));
        let cuts = cuts_by_cost(model, &Launch::from(strategy.clone()), llama.sequence, fullness);
        Ok(strategy.cut_at(&cuts))
    }
}

impl StageCuts {
    fn name(&self) -> String {
        match self {
            StageCuts::By(cut) => cut.name().to_owned(),
            StageCuts::Layers(layers) => joined(layers),
        }
    }
}

fn joined(counts: &[usize]) -> String {
    counts.iter().map(usize::to_string).collect::<Vec<_>>().join("+")
}

fn step_costs(llama: &Llama, model: &Model, strategy: &Strategy) -> Vec<Cost> {
    let blank = llama.blank(model, strategy.accumulate);
    costs(std::slice::from_ref(model), strategy, llama.trainer_options(), &blank)
}

/// A way to make steps, and its measurements.
struct Case {
    llama: Llama,
    model: Model,
    launch: Launch,
    /// None for one rank.
    cuts: Option<StageCuts>,
    /// By place: how many times as long its kernels take.
    slow: Vec<f64>,
    steps: Vec<TracedStep>,
    programs: Vec<Program>,
    /// By place.
    peak_bytes: Vec<u64>,
}

impl Case {
    /// Refuses one that does not fit in memory.
    fn new(
        llama: &Llama,
        model: &Model,
        strategy: Strategy,
        cuts: Option<StageCuts>,
        slow: Vec<f64>,
    ) -> Result<Case, Failure> {
        let hint = "use a smaller --batch or --sequence, or fewer --layers";
        check_steps(&strategy, &step_costs(llama, model, &strategy), Beside::default(), hint)?;
        Ok(Case {
            llama: llama.clone(),
            model: model.clone(),
            launch: Launch::from(strategy),
            cuts,
            slow,
            steps: Vec::new(),
            programs: Vec::new(),
            peak_bytes: Vec::new(),
        })
    }

    fn start(&self) -> Result<Ranks, Failure> {
        let (shards, options) = (vec![self.model.clone()], self.llama.trainer_options());
        let dtype = self.launch.strategy.dtype;
        let random = move |part: &Model, split, queue: &_| Ok(Parameters::random(part, dtype, split, 0, queue));
        let ranks = self.launch.start(shards, options, random)?;
        ranks.throttle(self.slow.clone())?;
        Ok(ranks)
    }

    fn samples(&self, step: u64) -> Vec<Samples> {
        self.llama.samples(step, self.launch.strategy.accumulate)
    }

    /// Cuts by measured costs, as a run does before its first step.
    fn cut_as_measured(&mut self) -> Result<(), Failure> {
        let is_by_cost = self.cuts == Some(StageCuts::By(StageCut::Cost));
        if !is_by_cost || !self.model.units_can_move() || !self.launch.keeps_ranks_apart() {
            return Ok(());
        }
        let Case { llama, model, launch, .. } = &*self;
        let strategy = &launch.strategy;
        let room = Room::of(strategy, Beside::default());
        let mut restage = Restage::new(strategy, staging(model, launch, llama.sequence), |cuts| {
            let strategy = strategy.clone().cut_at(cuts);
            by_place(&strategy, &room.fullness(&strategy, &step_costs(llama, model, &strategy)))
        });
        let restaged = restage.before_step(&self.start()?, 0, &self.samples(0))?;
        drop(restage);
        if let Some(restaged) = restaged {
            self.launch.strategy.pipeline.cuts = restaged.recut.cuts;
        }
        Ok(())
    }

    fn measure(&mut self, round: u64) -> Result<(), Failure> {
        /// A GPU captures work as graphs when it comes the second time, and replays it from the third time on.
        const TIMES_ON_GPU: usize = 3;
        let ranks = self.start()?;
        let Strategy { arrangement, devices, .. } = &self.launch.strategy;
        let samples = || [2 * round, 2 * round + 1].map(|step| self.samples(step));
        if devices.kind() == DeviceKind::Cuda {
            for _ in 1..TIMES_ON_GPU {
                measure(&ranks, *arrangement, samples(), 0.0)?;
            }
        }
        self.steps.push(measure(&ranks, *arrangement, samples(), 0.0)?);
        self.peak_bytes = ranks.memory()?.iter().map(|memory| memory.peak_bytes).collect();
        self.programs = ranks.with_trainers(|trainer| trainer.program().clone())?;
        Ok(())
    }

    fn order(&self) -> Option<&'static str> {
        self.cuts.as_ref().map(|_| self.launch.strategy.pipeline.order.name())
    }

    /// By stage.
    fn units(&self) -> Vec<usize> {
        let (pipeline, units) = (&self.launch.strategy.pipeline, self.model.units.len());
        (0..pipeline.stages()).map(|stage| pipeline.units(stage, units).len()).collect()
    }
}

/// A line of the table.
struct Row<'a> {
    case: &'a Case,
    step_s: f64,
    min_step_s: f64,
    /// The time of one rank over this one.
    speed: f64,
    idle_share: f64,
    simulated_idle_share: f64,
}

fn rows(cases: &[Case]) -> Result<Vec<Row<'_>>, Unforeseen> {
    let mut one_rank_s = f64::NAN;
    let mut rows: Vec<Row> = Vec::new();
    for case in cases {
        let seconds = || case.steps.iter().map(|step| step.untraced_s);
        let step_s = median(seconds());
        let follows_one_rank = rows.last().is_some_and(|before| before.case.cuts.is_none());
        if case.cuts.is_none() && !follows_one_rank {
            one_rank_s = step_s;
        }
        let simulated = case.steps.iter().map(|step| {
            let costs = Costs::measured(std::slice::from_ref(&step.timeline));
            Ok(simulate(&case.programs, &costs)?.idle_share())
        });
        rows.push(Row {
            case,
            step_s,
            min_step_s: seconds().fold(f64::INFINITY, f64::min),
            speed: one_rank_s / step_s,
            idle_share: median(case.steps.iter().map(|step| step.timeline.idle_share())),
            simulated_idle_share: median(simulated.collect::<Result<Vec<f64>, Unforeseen>>()?),
        });
    }
    Ok(rows)
}

impl Row<'_> {
    fn tokens_per_s(&self) -> f64 {
        self.case.llama.tokens() as f64 / self.step_s
    }
}

fn draw(file: &Path, rows: &[Row]) -> Result<(), Failure> {
    let pipelines = rows.iter().filter(|row| row.case.cuts.is_some());
    let fastest = pipelines.max_by(|a, b| a.speed.total_cmp(&b.speed)).expect("there are pipelines");
    let Case { model, launch, llama, steps, .. } = fastest.case;
    let Strategy { pp, accumulate, pipeline, .. } = &launch.strategy;
    let (order, batch, sequence) = (pipeline.order.name(), llama.batch, llama.sequence);
    let title = format!("{order} on {pp} places, {batch} × {sequence} tokens in {accumulate} micro-batches");
    let timeline = &steps.last().expect("there are rounds").timeline;
    let drawing = pipeline_svg(timeline, &launch.strategy, model.units.len(), &title);
    Ok(write_file_atomically(file, |out| out.put(drawing.as_bytes()))?)
}

fn in_words(arguments: &Arguments, rows: &[Row]) -> String {
    let llama = &arguments.llama;
    let Case { model, launch, .. } = rows.last().expect("there are pipelines").case;
    let slow = |it: &Straggler| format!(", place {} slowed down {} times by a throttle", it.rank, it.factor);
    let first = format!(
        "{} parameters{}, {}, {} sequences a step, pp {}{}{}{}",
        text::count(model.parameter_count()),
        arguments.layers.describe(model),
        llama.dtype.name(),
        llama.batch,
        arguments.pp,
        describe(&launch.strategy.devices),
        if arguments.recompute { ", recomputed" } else { "" },
        arguments.slow.iter().map(slow).collect::<String>(),
    );
    let crowding = rows.iter().find_map(|row| row.case.launch.crowding());
    let crowding = crowding.map_or(String::new(), |crowding| format!("\n{crowding}"));
    let cells = |row: &Row| {
        let case = row.case;
        let peaks: Vec<String> = case.peak_bytes.iter().map(|bytes| text::bytes(*bytes)).collect();
        vec![
            case.order().map_or_else(|| format!("one rank{}", describe(&case.launch.strategy.devices)), str::to_owned),
            case.cuts.as_ref().map_or(String::new(), StageCuts::name),
            joined(&case.units()),
            case.launch.strategy.accumulate.to_string(),
            case.llama.sequence.to_string(),
            format!("{:.1} ms", 1e3 * row.step_s),
            format!("{:.0}", row.tokens_per_s()),
            format!("{:.2}×", row.speed),
            text::percent(row.idle_share),
            text::percent(row.simulated_idle_share),
            peaks.join(" | "),
        ]
    };
    let header =
        ["order", "cut", "units", "micros", "length", "step", "tokens/s", "speed", "idle", "simulated", "memory"];
    let table = text::table(&header, &rows.iter().map(cells).collect::<Vec<_>>());
    let legend = "Medians. units: embedding, sublayers and head of each stage; speed: against one rank on the device of the \
                  first place, never slowed down; idle: share of the places' time in which they did not compute; simulated: the same, from \
                  the costs of single tasks in the same step; memory: the tensors of each place at their peak.";
    format!("{first}{crowding}\n\n{table}\n\n{legend}")
}

fn in_json(arguments: &Arguments, rows: &[Row]) -> String {
    let cores = |launch: &Launch| {
        let devices = &launch.strategy.devices;
        (devices.kind() == DeviceKind::Cpu).then(|| devices.cores_per_rank())
    };
    let row = |row: &Row| {
        let Case { llama, launch, cuts, peak_bytes, .. } = row.case;
        json!({
            "order": row.case.order(), "cut": cuts.as_ref().map(StageCuts::name), "units": row.case.units(),
            "cores": cores(launch), "micros": launch.strategy.accumulate, "sequence": llama.sequence, "median_step_s": row.step_s,
            "min_step_s": row.min_step_s, "tokens_per_s": row.tokens_per_s(), "speed": row.speed,
            "idle_share": row.idle_share, "simulated_idle_share": row.simulated_idle_share, "peak_bytes": peak_bytes,
        })
    };
    let cores = (!arguments.devices.are_gpus()).then(|| arguments.cores_of_place());
    let model = &rows[0].case.model;
    let slow: Vec<f64> = Straggler::factors(&arguments.slow, arguments.pp, 1);
    let json = json!({
        "pp": arguments.pp, "cores_per_place": cores, "virtual_gpus": arguments.devices.virtual_gpus,
        "dtype": arguments.llama.dtype.name(), "parameters": model.parameter_count(),
        "frozen_parameters": frozen_count(model), "window": arguments.layers.window, "dense_layers": arguments.layers.dense,
        "recompute": arguments.recompute, "batch": arguments.llama.batch, "slow": slow, "rounds": arguments.rounds, "peak_process_bytes": process::peak_bytes(),
        "cases": rows.iter().map(row).collect::<Vec<_>>(),
    });
    json.to_string()
}
