//! Judges strategies of a job by this machine's profile, or by the published figures of a cluster.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use evenkeel_balance::{StagePlace, Staging, UnitCost};
use evenkeel_device::CudaMemory;
use evenkeel_plan::{
    Bounded, Cluster, Counted, ForetoldStep, Judge, Judged, NotKnown, Prices, Profile, Published, UnitTime, foretell,
    least_step_s, least_step_s_of_any_cut, unit_times,
};
use evenkeel_step::trace::Timeline;
use evenkeel_step::{BucketIdx, Devices, Strategy, Work};
use evenkeel_train::Cost;

use super::job::{DryStep, Job, OneMicro, Seen};
use crate::Failure;
use crate::memory::Room;
use crate::stages::by_place;

/// What the times of tasks come from.
pub enum Source<'a> {
    /// This machine, measured where that is needed.
    Machine(&'a mut Profile),
    Cluster(&'a Cluster),
}

/// What is known about a strategy's step.
#[derive(Clone, Debug)]
pub struct Details {
    /// If it fits.
    pub shares: Option<StepShares>,
    /// By rank.
    pub costs: Vec<Cost>,
}

/// Parts of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepShares {
    /// In which some rank exchanges and does not compute.
    pub exposed: f64,
    /// In which ranks do not compute.
    pub idle: f64,
}

pub struct Judging<'a> {
    pub job: &'a Job<'a>,
    source: Source<'a>,
    times: RefCell<HashMap<String, Rc<[UnitTime]>>>,
    /// Whether the profile has grown.
    pub has_measured: bool,
    /// Told about every strategy that is looked at closely.
    pub progress: &'a dyn Fn(&Strategy),
}

impl<'a> Judging<'a> {
    pub fn new(job: &'a Job<'a>, source: Source<'a>, progress: &'a dyn Fn(&Strategy)) -> Judging<'a> {
        Judging { job, source, times: RefCell::default(), has_measured: false, progress }
    }

    /// By rank.
    fn places(&self, strategy: &Strategy) -> Vec<String> {
        match self.source {
            Source::Machine(_) => self.job.places(strategy),
            Source::Cluster(cluster) => {
                let devices = cluster.places();
                numbers(strategy).iter().map(|&number| devices[number].device.to_owned()).collect()
            }
        }
    }

    fn prices<'b>(&'b self, strategy: &Strategy, places: &'b [String]) -> Box<dyn Prices + 'b> {
        match &self.source {
            Source::Machine(profile) => Box::new(profile.on(places)),
            Source::Cluster(cluster) => Box::new(Published::new(cluster, numbers(strategy), strategy)),
        }
    }

    fn room(&self, strategy: &Strategy) -> Room {
        match self.source {
            Source::Machine(_) => Room::of(strategy, (self.job.beside)(strategy)),
            Source::Cluster(cluster) => {
                let devices = cluster.places();
                let bytes = |number: &usize| {
                    let all = (1e9 * cluster.devices[devices[*number].device].memory_gb) as u64;
                    CudaMemory { name: String::new(), free_bytes: all, total_bytes: all }.arena_bytes_of(1)
                };
                Room::Gpus(numbers(strategy).iter().map(bytes).collect())
            }
        }
    }

    /// By place of the pipeline: what a micro-batch takes there, unit by unit, on the slowest rank of the first replica.
    fn times(&self, strategy: &Strategy, prices: &dyn Prices) -> Vec<Rc<[UnitTime]>> {
        let (mesh, micros) = (strategy.mesh(), self.job.one_micro(strategy));
        let arrangement = (&strategy.cut, strategy.micro_batch, strategy.arrangement);
        let at_place = |place: usize| {
            let members = mesh.tensor_ranks(mesh.rank(place, 0, 0));
            let link = prices.exchange_s(members[0], Work::AllReduce, 1 << 20, &members);
            let of_micro = |micro: &OneMicro, rank: usize| {
                let key = format!("{:?} {link:?} {arrangement:?} {}", prices.place(rank), micro.shard);
                if let Some(known) = self.times.borrow().get(&key) {
                    return known.clone();
                }
                let units = self.job.model.units.len();
                let times: Rc<[UnitTime]> = unit_times(prices, members[0], rank, &micro.counted, units).into();
                self.times.borrow_mut().insert(key, times.clone());
                times
            };
            let micro_of = |rank: &usize| {
                let first = self.job.first_alike(strategy, mesh.shard(*rank));
                micros.iter().find(|micro| micro.shard == first).expect("every kind of shard was counted")
            };
            // Ranks that are alike take as long.
            let mut ranks: Vec<(String, usize, usize)> =
                members.iter().map(|rank| (prices.place(*rank), micro_of(rank).shard, *rank)).collect();
            ranks.dedup_by(|one, other| (&one.0, one.1) == (&other.0, other.1));
            let times = ranks.iter().map(|(_, _, rank)| of_micro(micro_of(rank), *rank));
            times.max_by(|a, b| total_s(a).total_cmp(&total_s(b))).expect("there is a shard")
        };
        (0..strategy.pp).map(at_place).collect()
    }

    /// Seconds for which replicas exchange gradients at least: some place has its share of them. Times that were measured for other
    /// sizes bound nothing.
    fn gradients_s(&self, strategy: &Strategy, prices: &dyn Prices) -> f64 {
        const GRADIENT_BYTES: u64 = 4;
        let mesh = strategy.mesh();
        let bytes = GRADIENT_BYTES * self.job.model.trained_count() / (mesh.pp * mesh.tp) as u64;
        match self.source {
            Source::Cluster(_) if mesh.dp > 1 => {
                let work = Work::ReduceGradients(BucketIdx(0));
                let at_place = |place: usize| {
                    let rank = mesh.rank(place, 0, 0);
                    prices.exchange_s(rank, work, bytes, &mesh.data_ranks(rank)).unwrap_or(0.0)
                };
                (0..mesh.pp).map(at_place).fold(f64::INFINITY, f64::min)
            }
            _ => 0.0,
        }
    }

    /// What units take in the strategy's stages, and by place how much longer than at the first one.
    fn staging(&self, strategy: &Strategy, times: &[Rc<[UnitTime]>]) -> (Staging, Vec<f64>) {
        let (pipeline, micros) = (&strategy.pipeline, &self.job.one_micro(strategy)[0]);
        let mut units = vec![UnitCost { seconds: 0.0, state_bytes: 0.0, kept_bytes: 0.0 }; times[0].len()];
        let tasks = micros.counted.program.tasks.iter().zip(&micros.counted.counts);
        for (task, kernels) in tasks.filter(|(task, _)| !task.work.is_of_tail()) {
            units[task.unit.0].seconds += kernels.flops() as f64;
        }
        let first_s = total_s(&times[0]);
        let slowness = match first_s > 0.0 {
            true => {
                units.iter_mut().zip(times[0].iter()).for_each(|(unit, time)| unit.seconds = time.compute_s());
                times.iter().map(|times| total_s(times) / first_s).collect()
            }
            // Nothing is measured yet: operations say enough to begin with.
            false => vec![1.0; times.len()],
        };
        let kept_micros = vec![1; pipeline.stages()].into_iter().enumerate();
        let stages = kept_micros
            .map(|(stage, kept_micros)| StagePlace { place: pipeline.place(stage, strategy.pp), kept_micros });
        (Staging { stages: stages.collect(), units, micros: strategy.accumulate }, slowness)
    }

    /// By rank, at least.
    fn least_fullness(&self, strategy: &Strategy) -> f64 {
        let mesh = strategy.mesh();
        // Activations of a stage, or of unequal shards, are not known without a run. Half leaves room for what ZeRO changes.
        let activation_bytes = match &self.job.one_micro(strategy)[..] {
            [micro] if strategy.pp == 1 => micro.activation_bytes,
            _ => 0,
        };
        let state_bytes = self.job.least_state_bytes(strategy);
        let arena_bytes = |rank: usize| state_bytes[mesh.place(rank)] as u64 + activation_bytes / 2;
        let cost = |rank: usize| Cost { arena_bytes: arena_bytes(rank), ..Cost::default() };
        let costs: Vec<Cost> = (0..strategy.ranks()).map(cost).collect();
        self.fullness(strategy, &costs).into_iter().fold(0.0, f64::max)
    }

    /// By rank: ranks of the same kind compute on the same kind of place, and meet others over the same links.
    fn kinds(&self, strategy: &Strategy) -> Vec<String> {
        let mut kinds = self.places(strategy);
        if let Source::Cluster(_) = self.source {
            let (mesh, places) = (strategy.mesh(), kinds.clone());
            let prices = self.prices(strategy, &places);
            for (rank, kind) in kinds.iter_mut().enumerate() {
                for members in [mesh.tensor_ranks(rank), mesh.data_ranks(rank), mesh.place_ranks(rank)] {
                    let link = prices.exchange_s(rank, Work::AllReduce, 1 << 20, &members);
                    kind.push_str(&format!(" {link:?}"));
                }
            }
        }
        kinds
    }

    fn dry(&self, strategy: &Strategy) -> Extended {
        let places = self.kinds(strategy);
        let (numbers, often) = match extension(strategy, self.job.model.units.len()) {
            Some((numbers, often)) => (numbers.to_vec(), often),
            None => (vec![strategy.accumulate], 0.0),
        };
        let of_micros = |micros: &usize| Strategy { accumulate: *micros, ..strategy.clone() };
        let steps: Vec<(Strategy, DryStep)> =
            numbers.iter().map(of_micros).map(|it| (it.clone(), self.job.dry(&it, &places))).collect();
        let (first, last) = (&steps[0].1.costs, &steps[steps.len() - 1].1.costs);
        // The samples of further micro-batches wait in memory. Gaps between tensors do not grow with them.
        let cost = |(first, last): (&Cost, &Cost)| {
            let further_bytes = (often * last.peak_bytes.saturating_sub(first.peak_bytes) as f64) as u64;
            let (peak_bytes, arena_bytes) = (last.peak_bytes + further_bytes, last.arena_bytes + further_bytes);
            Cost { peak_bytes, arena_bytes, ..*last }
        };
        let costs = first.iter().zip(last).map(cost).collect();
        Extended { costs, steps: steps.into_iter().map(|(strategy, dry)| (strategy, dry.counted)).collect(), often }
    }

    /// By rank.
    fn fullness(&self, strategy: &Strategy, costs: &[Cost]) -> Vec<f64> {
        self.room(strategy).fullness(strategy, costs)
    }

    /// The strategy with stages that fit, if there are any: those that take equally long may need more than a place has.
    fn cut_to_fit(&self, strategy: &Strategy) -> Option<Strategy> {
        let places = self.places(strategy);
        let times = self.times(strategy, &*self.prices(strategy, &places));
        let (staging, slowness) = self.staging(strategy, &times);
        let fullness = |cuts: &[usize]| {
            let cut = strategy.clone().cut_at(cuts);
            by_place(strategy, &self.fullness(&cut, &self.dry(&cut).costs))
        };
        Some(strategy.clone().cut_at(&staging.best_cut(&slowness, &fullness)?))
    }

    /// The step by the times there are; measures those that are missing.
    fn foretell(&mut self, strategy: &Strategy, counted: &[Counted]) -> Result<ForetoldStep, Failure> {
        let places = self.places(strategy);
        let mut known = foretell(&*self.prices(strategy, &places), counted);
        for learn in [Job::learn, Job::learn_whole] {
            let (Err(NotKnown::NotMeasured(missing)), Source::Machine(profile)) = (&known, &mut self.source) else {
                break;
            };
            tracing::info!(%strategy, %missing, "measures what the profile lacks");
            learn(self.job, profile, strategy)?;
            self.has_measured = true;
            self.times.borrow_mut().clear();
            known = foretell(&*self.prices(strategy, &places), counted);
        }
        known.map_err(Failure::fault)
    }

    /// The same with the memory of the whole step, to the byte.
    pub fn settled(&self, judged: Judged<Details>) -> Judged<Details> {
        let costs = self.job.dry(&judged.strategy, &self.kinds(&judged.strategy)).costs;
        let fullness = self.fullness(&judged.strategy, &costs).into_iter().fold(0.0, f64::max);
        Judged { fullness, details: Details { costs, ..judged.details }, ..judged }
    }

    /// The whole step of a strategy, task by task.
    pub fn timeline(&mut self, strategy: &Strategy) -> Result<Timeline, Failure> {
        let dry = self.job.dry(strategy, &self.kinds(strategy));
        Ok(self.foretell(strategy, &dry.counted)?.timeline)
    }
}

/// Two smaller numbers of micro-batches from which those of a strategy follow, and how often their difference does: in a pipeline
/// that is full, further ones take turns at its places. None if there are too few to be worth it, or if places keep more of them
/// the more there are, as with gpipe.
fn extension(strategy: &Strategy, units: usize) -> Option<([usize; 2], f64)> {
    let (micros, period) = (strategy.accumulate, strategy.pp);
    let kept = |micros: usize| strategy.pipeline.kept_micros(period, micros, units);
    let is_full = |few: &usize| period == 1 || kept(*few) == kept(micros);
    let least = if period == 1 { 2 } else { 4 * period };
    let few = (least + micros % period..micros).step_by(period).find(is_full)?;
    let more = few + period;
    (micros > more + period).then(|| ([few, more], (micros - more) as f64 / period as f64))
}

impl Judging<'_> {
    /// What to change for a strategy that does not fit: the longest sequences that would, if any.
    pub fn nearest_that_fits(&self, strategy: &Strategy) -> Option<String> {
        let mut sequence = self.job.sequence;
        while sequence > 1 {
            sequence /= 2;
            let job = Job { sequence, uncut: self.job.uncut.clone(), seen: Seen::default(), ..*self.job };
            let costs = job.dry(strategy, &self.places(strategy)).costs;
            if evenkeel_balance::fits(&self.room(strategy).fullness(strategy, &costs)) {
                return Some(format!("data.sequence = {sequence} would fit; or use a smaller model, or an adapter"));
            }
        }
        None
    }
}

impl Judge for Judging<'_> {
    type Details = Details;
    type Error = Failure;

    fn least_step_s(&self, strategy: &Strategy) -> f64 {
        let places = self.places(strategy);
        let prices = self.prices(strategy, &places);
        let computing_s = least_step_s_of_any_cut(strategy, &self.times(strategy, &*prices));
        prices.least_step_s(0, computing_s.max(self.gradients_s(strategy, &*prices)))
    }

    fn cut(&self, strategy: Strategy) -> Option<Bounded> {
        let places = self.places(&strategy);
        let prices = self.prices(&strategy, &places);
        let times = self.times(&strategy, &*prices);
        let strategy = match strategy.pp {
            1 => strategy,
            pp => {
                let (staging, slowness) = self.staging(&strategy, &times);
                let cuts = staging.best_cut(&slowness, &|_| vec![0.0; pp]).expect("everything fits");
                strategy.cut_at(&cuts)
            }
        };
        let step_s = prices.least_step_s(0, least_step_s(&strategy, &times));
        Some(Bounded { step_s, fullness: self.least_fullness(&strategy), strategy })
    }

    fn judge(&mut self, strategy: Strategy) -> Result<Judged<Details>, Failure> {
        (self.progress)(&strategy);
        let mut strategy = strategy;
        let mut dry = self.dry(&strategy);
        let mut fullness = self.fullness(&strategy, &dry.costs);
        let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
        if strategy.pp > 1
            && !evenkeel_balance::fits(&fullness)
            && mean(&fullness) <= 1.0
            && let Some(fitting) = self.cut_to_fit(&strategy)
        {
            dry = self.dry(&fitting);
            fullness = self.fullness(&fitting, &dry.costs);
            strategy = fitting;
        }
        let Extended { costs, steps, often } = dry;
        let fullness = fullness.into_iter().fold(0.0, f64::max);
        if fullness > 1.0 {
            return Ok(Judged { step_s: f64::INFINITY, fullness, details: Details { shares: None, costs }, strategy });
        }
        let totals = steps.iter().map(|(strategy, counted)| Ok(Totals::of(&self.foretell(strategy, counted)?)));
        let totals = totals.collect::<Result<Vec<_>, Failure>>()?;
        let total = totals[totals.len() - 1].extended(&totals[0], often);
        let shares =
            Some(StepShares { exposed: total.exposed_s / total.program_s, idle: total.idle_s / total.program_s });
        Ok(Judged { step_s: total.step_s, fullness, details: Details { shares, costs }, strategy })
    }
}

/// Dry steps of a strategy with fewer micro-batches: the first, and the last, which its own follows from.
struct Extended {
    /// By rank, with all micro-batches.
    costs: Vec<Cost>,
    steps: Vec<(Strategy, Vec<Counted>)>,
    /// How often the steps' difference is added to the last.
    often: f64,
}

/// Seconds of a foretold step.
#[derive(Clone, Copy)]
struct Totals {
    step_s: f64,
    program_s: f64,
    exposed_s: f64,
    idle_s: f64,
}

impl Totals {
    fn of(ForetoldStep { step_s, timeline }: &ForetoldStep) -> Totals {
        let program_s = timeline.duration_s();
        let (exposed_s, idle_s) = (timeline.exposed_share() * program_s, timeline.idle_share() * program_s);
        Totals { step_s: *step_s, program_s, exposed_s, idle_s }
    }

    /// The same after growing so often as it has grown since `before`.
    fn extended(self, before: &Totals, often: f64) -> Totals {
        let grown = |of: fn(&Totals) -> f64| of(&self) + often * (of(&self) - of(before));
        Totals {
            step_s: grown(|it| it.step_s),
            program_s: grown(|it| it.program_s),
            exposed_s: grown(|it| it.exposed_s),
            idle_s: grown(|it| it.idle_s),
        }
    }
}

fn total_s(times: &Rc<[UnitTime]>) -> f64 {
    times.iter().map(UnitTime::compute_s).sum()
}

/// By rank: the number of its device among those of a cluster.
fn numbers(strategy: &Strategy) -> &[usize] {
    match &strategy.devices {
        Devices::Cuda { gpus, .. } => gpus,
        Devices::Cpu { .. } => panic!("a cluster's devices have numbers"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use evenkeel_model::{Cut, ZeroStage};
    use evenkeel_step::{Pipeline, PipelineOrder};
    use evenkeel_train::{OptimizerOptions, TrainerOptions};

    use super::*;
    use crate::memory::Beside;

    #[test]
    fn few_micro_batches_stand_for_many_where_further_ones_need_no_memory() {
        let staged = |order: PipelineOrder, accumulate: usize| {
            let cuts = (1..4 * order.usual_chunks()).map(|stage| 2 * stage).collect();
            Strategy { accumulate, ..Strategy::of(Cut::even(1)) }.in_stages(4, Pipeline { cuts, order })
        };
        assert_eq!(extension(&staged(PipelineOrder::OneForwardOneBackward, 64), 34), Some(([16, 20], 11.0)));
        assert_eq!(extension(&staged(PipelineOrder::OneForwardOneBackward, 24), 34), None);
        assert_eq!(extension(&staged(PipelineOrder::Gpipe, 64), 34), None);
        assert_eq!(extension(&Strategy { accumulate: 9, ..Strategy::of(Cut::even(1)) }, 34), Some(([2, 3], 6.0)));
        for order in PipelineOrder::ALL {
            if let Some(([few, more], often)) = extension(&staged(order, 61), 34) {
                assert_eq!((more - few, more as f64 + often * 4.0), (4, 61.0), "{order:?}");
            }
        }
    }

    #[test]
    fn steps_of_many_micro_batches_follow_from_steps_of_few() {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512, "tie_word_embeddings": false,
        });
        let model = evenkeel_model::Model::from_json(&config).unwrap();
        let cluster = Cluster::parse(include_str!("../../../../examples/clusters/8-h200.toml")).unwrap();
        let options = TrainerOptions {
            optimizer: Some(OptimizerOptions::default()),
            label_smoothing: 0.0,
            longest: 128,
            dropout_seed: 0,
        };
        let job = Job {
            model: &model,
            options,
            sequence: 128,
            beside: &|_| Beside::default(),
            uncut: BTreeSet::new(),
            may_use_all_gpus: false,
            seen: Seen::default(),
        };
        let mut judging = Judging::new(&job, Source::Cluster(&cluster), &|_| ());
        let on = |count: usize| Devices::Cuda { gpus: (0..count).collect(), multiprocessors: Vec::new(), graph: true };
        let alone = Strategy { accumulate: 40, devices: on(1), ..Strategy::of(Cut::even(1)) };
        let mut strategies =
            vec![alone.clone(), Strategy { devices: on(4), ..alone.clone() }.with_replicas(4, ZeroStage::Values)];
        for order in PipelineOrder::ALL {
            let cuts = (1..2 * order.usual_chunks()).map(|stage| 1 + stage * 16 / (2 * order.usual_chunks())).collect();
            strategies.push(Strategy { devices: on(2), ..alone.clone() }.in_stages(2, Pipeline { cuts, order }));
        }
        for strategy in strategies {
            let judged = judging.judge(strategy.clone()).unwrap();
            let whole_s = judging.timeline(&strategy).unwrap().duration_s();
            let off = judged.step_s / whole_s - 1.0;
            assert!(off.abs() < 0.005, "{strategy}, {:?}: off by {off}", strategy.pipeline.order);
            let whole = job.dry(&strategy, &judging.places(&strategy));
            let off = judged.details.costs[0].arena_bytes as f64 / whole.costs[0].arena_bytes as f64 - 1.0;
            // Gaps between tensors differ a little.
            assert!(off.abs() < 0.01, "{strategy}, {:?}: bytes are off by {off}", strategy.pipeline.order);
            assert_eq!(judging.settled(judged).details.costs, whole.costs);
        }
    }
}
