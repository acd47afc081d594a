//! Judges strategies of a job by this machine's profile, or by the published figures of a cluster.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use evenkeel_balance::{StagePlace, Staging, UnitCost};
use evenkeel_model::ZeroStage;
use evenkeel_plan::{
    Bounded, Cluster, ClusterDevice, Counted, EvenChain, Fit, ForetoldStep, Judge, Least, NotKnown, PlaceTime, Prices,
    Profile, Published, Timed, UnitTime, foretell, least_step_s, least_step_s_of_any_cut, unit_times,
};
use evenkeel_step::schedule::{Arrangement, NONE};
use evenkeel_step::trace::Timeline;
use evenkeel_step::{BucketIdx, Devices, Keeping, Pipeline, Strategy, Work};
use evenkeel_train::Cost;

use super::job::{Job, Seen};
use crate::Failure;
use crate::memory::Room;
use crate::stages::by_place;

/// Times of tasks come from here.
pub enum Source<'a> {
    /// This machine, measured where that is needed.
    Machine(&'a mut Profile),
    Cluster(&'a Cluster),
}

/// Of the bytes that units keep of a sequence, those that they keep of each of several, at least.
const ACTUALLY_KEPT: f64 = 0.95;

/// Units of a model at least, if those at its ends are a small share of it.
const LEAST_GATHERED_UNITS: usize = 24;

/// Parts of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepShares {
    /// In which some rank exchanges and does not compute.
    pub exposed: f64,
    /// In which ranks do not compute.
    pub idle: f64,
    /// Seconds of the programs, of which these are shares.
    pub program_s: f64,
}

/// An order, and the number of stages, places and micro-batches.
type PipelineShape = (&'static str, usize, usize, usize);
/// Places, replicas and shards, and the devices' numbers.
type AxesAndDevices = ([usize; 3], Vec<usize>);

pub struct Judging<'a, 'j> {
    pub job: &'a Job<'j>,
    source: Source<'a>,
    /// Those of the cluster, if there is one.
    devices: Vec<ClusterDevice<'a>>,
    times: RefCell<HashMap<String, Rc<[UnitTime]>>>,
    cuts: RefCell<HashMap<String, Vec<usize>>>,
    keeping: RefCell<HashMap<PipelineShape, Rc<Keeping>>>,
    kinds: RefCell<HashMap<AxesAndDevices, Rc<[String]>>>,
    replicas: RefCell<HashMap<AxesAndDevices, Rc<[usize]>>>,
    /// Whether the profile has grown.
    pub has_measured: bool,
    /// Told about every strategy that is looked at closely.
    pub progress: &'a dyn Fn(&Strategy),
}

impl<'a, 'j> Judging<'a, 'j> {
    pub fn new(job: &'a Job<'j>, source: Source<'a>, progress: &'a dyn Fn(&Strategy)) -> Judging<'a, 'j> {
        let devices = if let Source::Cluster(cluster) = source { cluster.places() } else { Vec::new() };
        Judging {
            job,
            source,
            devices,
            times: RefCell::default(),
            cuts: RefCell::default(),
            keeping: RefCell::default(),
            kinds: RefCell::default(),
            replicas: RefCell::default(),
            has_measured: false,
            progress,
        }
    }

    /// By rank; none are needed for the prices of a cluster.
    fn places(&self, strategy: &Strategy) -> Vec<String> {
        match self.source {
            Source::Machine(_) => self.job.places(strategy),
            Source::Cluster(_) => Vec::new(),
        }
    }

    fn prices<'b>(&'b self, strategy: &Strategy, places: &'b [String]) -> Box<dyn Prices + 'b> {
        match &self.source {
            Source::Machine(profile) => Box::new(profile.on(places)),
            Source::Cluster(cluster) => Box::new(Published::new(cluster, &self.devices, numbers(strategy), strategy)),
        }
    }

    fn room(&self, strategy: &Strategy) -> Room {
        match self.source {
            Source::Machine(_) => Room::of(strategy, (self.job.beside)(strategy)),
            Source::Cluster(cluster) => {
                let bytes = |number: &usize| cluster.devices[self.devices[*number].device].arena_bytes();
                Room::Gpus(numbers(strategy).iter().map(bytes).collect())
            }
        }
    }

    /// By place of the pipeline: what a micro-batch takes there, unit by unit, on the slowest rank of a replica.
    fn times(&self, strategy: &Strategy, prices: &dyn Prices, replica: usize) -> Vec<Rc<[UnitTime]>> {
        let (mesh, sample) = (strategy.mesh(), self.job.sample_in_one_place(strategy));
        let first_alike = self.job.first_alike(strategy);
        let arrangement = (&strategy.cut, strategy.micro_batch, strategy.arrangement, strategy.accumulate.min(2));
        let at_place = |place: usize| {
            let members = mesh.tensor_ranks(mesh.rank(place, replica, 0));
            let link = prices.exchange_s(members[0], Work::AllReduce, 1 << 20, &members);
            let of_shard = |shard: usize, rank: usize| {
                let key = format!("{:?} {link:?} {arrangement:?} {shard}", prices.place(rank));
                if let Some(known) = self.times.borrow().get(&key) {
                    return known.clone();
                }
                let counted = &sample.at(0, shard).counted;
                let short = unit_times(prices, members[0], rank, counted, self.job.model.units.len());
                let times: Rc<[UnitTime]> = sample.alike.iter().map(|&unit| short[unit]).collect();
                self.times.borrow_mut().insert(key, times.clone());
                times
            };
            // Ranks that are alike take as long.
            let kind = |&rank: &usize| (prices.place(rank), first_alike[mesh.shard(rank)], rank);
            let mut ranks: Vec<(String, usize, usize)> = members.iter().map(kind).collect();
            ranks.dedup_by(|one, other| (&one.0, one.1) == (&other.0, other.1));
            let times = ranks.iter().map(|&(_, shard, rank)| of_shard(shard, rank));
            times.max_by(|a, b| total_s(a).total_cmp(&total_s(b))).expect("there is a shard")
        };
        (0..strategy.pp).map(at_place).collect()
    }

    /// By place: what its parameters take at least, if it has this share of those that are trained, and the first place has the
    /// embedding. Times that were measured for other sizes bound nothing.
    fn states(&self, strategy: &Strategy, prices: &dyn Prices, replica: usize, shares: &[f64]) -> Vec<PlaceTime> {
        const GRADIENT_BYTES: f64 = 4.0;
        let (model, mesh) = (&self.job.model, strategy.mesh());
        let Source::Cluster(_) = self.source else { return vec![PlaceTime::default(); shares.len()] };
        let passes = self.passes(strategy, prices, replica);
        let elements = model.trained_count() as f64 / mesh.tp as f64;
        let embedding = if model.config.tied { 0.0 } else { self.job.trained_shares()[0] };
        let sample = self.job.sample_in_one_place(strategy);
        let sampled = sample.at(0, 0);
        let of_place = |(place, &share): (usize, &f64)| {
            let rank = mesh.rank(place, replica, 0);
            let exchange_s = |work: Work, bytes: f64| {
                let members = mesh.data_ranks(rank);
                if mesh.dp == 1 { 0.0 } else { prices.exchange_s(rank, work, bytes as u64, &members).unwrap_or(0.0) }
            };
            let reduce_s =
                |share: f64| exchange_s(Work::ReduceGradients(BucketIdx(0)), GRADIENT_BYTES * elements * share);
            let tasks = sampled.counted.program.tasks.iter().zip(&sampled.counted.counts);
            let tail = tasks.filter(|(task, _)| task.work.is_of_tail());
            let update_s: f64 = tail.filter_map(|(task, kernels)| prices.task_s(rank, task, kernels)).sum();
            let (split, gathered) = match strategy.zero {
                ZeroStage::Nothing => (1, 0.0),
                ZeroStage::State | ZeroStage::Gradients => (mesh.dp, strategy.dtype.size_bytes() as f64 * elements),
                ZeroStage::Values => (mesh.dp, 0.0),
            };
            let gather_s = exchange_s(Work::GatherUpdated(BucketIdx(0)), gathered * share);
            // What a chain's end has gathered for one pass may stay for the next one, but that is much less than a whole chain.
            let is_gathered =
                strategy.zero == ZeroStage::Values && strategy.pp == 1 && model.units.len() > LEAST_GATHERED_UNITS;
            let gathered = if is_gathered { strategy.dtype.size_bytes() as f64 * elements * share } else { 0.0 };
            PlaceTime {
                gathers_s: exchange_s(Work::GatherParameters(BucketIdx(0)), gathered),
                reduce_s: reduce_s(share),
                last_reduce_s: if place == 0 { reduce_s(embedding) } else { 0.0 },
                tail_s: update_s * share / sampled.trained_share / split as f64 + gather_s,
                ..passes[place]
            }
        };
        shares.iter().enumerate().map(of_place).collect()
    }

    /// By place of a replica: its passes, wherever stages are cut. Where not all is trained, some gradients may not be passed.
    fn passes(&self, strategy: &Strategy, prices: &dyn Prices, replica: usize) -> Vec<PlaceTime> {
        let (model, mesh, pipeline) = (&self.job.model, strategy.mesh(), &strategy.pipeline);
        let mut times = vec![PlaceTime::default(); strategy.pp];
        let parts = strategy.arrangement.parts.min(strategy.micro_batch);
        let bytes = self.job.tokens(strategy) * model.config.hidden * strategy.dtype.size_bytes() / parts;
        let is_all_trained = model.trained_count() == model.parameter_count();
        for stage in 1..pipeline.stages() {
            let [from, to] = [stage - 1, stage].map(|stage| pipeline.place(stage, strategy.pp));
            if from == to {
                continue;
            }
            let members = [from, to].map(|place| mesh.rank(place, replica, 0));
            let pass_s = |work: Work| prices.exchange_s(members[0], work, bytes as u64, &members).unwrap_or(0.0);
            let forward_s = pass_s(Work::Pass);
            let gradient_s = if is_all_trained { pass_s(Work::PassGradient) } else { 0.0 };
            [from, to].into_iter().for_each(|place| times[place].passes_s += parts as f64 * (forward_s + gradient_s));
            if stage < strategy.pp {
                times[stage].passes_before_s = times[stage - 1].passes_before_s + forward_s;
                times[stage].passes_behind_s = times[stage - 1].passes_behind_s + gradient_s;
            }
        }
        times
    }

    /// Stages of units that take so long and need so much, and by place how much longer than at the first one.
    fn staging(&self, strategy: &Strategy, times: &[Rc<[UnitTime]>]) -> (Staging, Vec<f64>) {
        let (pipeline, sample) = (&strategy.pipeline, self.job.sample_in_one_place(strategy));
        let (counted, units) = (&sample.at(0, 0).counted, times[0].len());
        let mut flops = vec![0.0; units];
        let tasks = counted.program.tasks.iter().zip(&counted.counts);
        for (task, kernels) in tasks.filter(|(task, _)| !task.work.is_of_tail()) {
            flops[task.unit.0] += kernels.flops() as f64;
        }
        let first_s = total_s(&times[0]);
        let state_bytes = self.job.least_state_bytes(&strategy.clone().in_stages(1, Pipeline::default()))[0];
        let (kept_bytes, shares) = (self.job.kept_bytes(strategy), self.job.trained_shares());
        let unit = |unit: usize| UnitCost {
            // Nothing may be measured yet: operations say enough to begin with.
            seconds: if first_s > 0.0 { times[0][unit].compute_s() } else { flops[sample.alike[unit]] },
            state_bytes: state_bytes * shares[unit],
            kept_bytes: kept_bytes[unit],
        };
        let slowness = |times: &Rc<[UnitTime]>| if first_s > 0.0 { total_s(times) / first_s } else { 1.0 };
        let kept_micros = self.keeping(strategy).most_micros.clone().into_iter().enumerate();
        let stages = kept_micros
            .map(|(stage, kept_micros)| StagePlace { place: pipeline.place(stage, strategy.pp), kept_micros });
        let units = (0..units).map(unit).collect();
        let staging = Staging { stages: stages.collect(), units, micros: strategy.accumulate };
        (staging, times.iter().map(slowness).collect())
    }

    /// Cuts for the shortest step, if memory is no matter. Stages of ZeRO, parts and the stream change nothing about them, since units
    /// and places compare as before.
    fn best_cuts(&self, strategy: &Strategy, times: &[Rc<[UnitTime]>], first_place: &str) -> Vec<usize> {
        let Strategy { pp, micro_batch, accumulate, arrangement, cut, pipeline, .. } = strategy;
        let slowness = times.iter().map(|place| format!("{:.3}", total_s(place) / total_s(&times[0])));
        let slowness = slowness.collect::<Vec<_>>().join(" ");
        let computed = (micro_batch, arrangement.schedule.name, &cut.weights, &cut.uncut, first_place, slowness);
        let key = format!("{:?}", (pp, accumulate, pipeline.order, computed));
        let found = || {
            let (staging, slowness) = self.staging(strategy, times);
            staging.best_cut(&slowness, &|_| vec![0.0; *pp]).expect("everything fits")
        };
        self.cuts.borrow_mut().entry(key).or_insert_with(found).clone()
    }

    /// Of the fullest rank, at least.
    fn least_fullness(&self, strategy: &Strategy) -> f64 {
        let (mesh, pipeline) = (strategy.mesh(), &strategy.pipeline);
        let (state_bytes, kept_bytes) = (self.job.least_state_bytes(strategy), self.job.kept_bytes(strategy));
        let of_stage = |stage: usize| kept_bytes[pipeline.units(stage, kept_bytes.len())].iter().sum();
        let of_stages: Vec<f64> = (0..pipeline.stages()).map(of_stage).collect();
        let kept = self.keeping(strategy).least_bytes(&of_stages);
        let bytes: Vec<f64> = state_bytes.iter().zip(&kept).map(|(state, kept)| state + kept).collect();
        let cost = |rank: usize| Cost { arena_bytes: bytes[mesh.place(rank)] as u64, ..Cost::default() };
        let costs: Vec<Cost> = (0..strategy.ranks()).map(cost).collect();
        self.fullness(strategy, &costs).into_iter().fold(0.0, f64::max)
    }

    /// The same wherever stages are cut: all ranks together have no less than all need. Units keep in proportion to the sequences.
    fn least_fullness_of_any_cut(&self, strategy: &Strategy) -> f64 {
        let of_sequence = Strategy { micro_batch: 1, accumulate: strategy.accumulate.min(2), ..strategy.clone() };
        let of_sequence = of_sequence.in_stages(1, Pipeline::default());
        let one_part = of_sequence.clone().arranged(of_sequence.arrangement.in_parts(1));
        let kept_micros = self.keeping(strategy).most_micros.iter().copied().min().unwrap_or(1);
        let kept_bytes: f64 = self.job.kept_bytes(&one_part).iter().sum();
        let kept_bytes = ACTUALLY_KEPT * kept_bytes * (kept_micros * strategy.micro_batch) as f64;
        let bytes = (self.job.least_state_bytes(&one_part)[0] + kept_bytes) / strategy.pp as f64;
        let cost = Cost { arena_bytes: bytes as u64, ..Cost::default() };
        let fullness = self.fullness(strategy, &vec![cost; strategy.ranks()]);
        fullness.len() as f64 / fullness.iter().map(|fullness| 1.0 / fullness).sum::<f64>()
    }

    fn keeping(&self, strategy: &Strategy) -> Rc<Keeping> {
        let Strategy { pp, accumulate, ref pipeline, .. } = *strategy;
        let found = || Rc::new(pipeline.keeping(pp, accumulate));
        let key = (pipeline.order.name(), pipeline.stages(), pp, accumulate);
        self.keeping.borrow_mut().entry(key).or_insert_with(found).clone()
    }

    /// By rank: ranks of the same kind compute on the same kind of place, and meet others over the same links.
    fn kinds(&self, strategy: &Strategy) -> Rc<[String]> {
        let Source::Cluster(_) = self.source else { return self.places(strategy).into() };
        let mesh = strategy.mesh();
        let kinds = || {
            let prices = self.prices(strategy, &[]);
            let of_rank = |rank: usize| {
                let groups = [mesh.tensor_ranks(rank), mesh.data_ranks(rank), mesh.place_ranks(rank)];
                let link = |members: Vec<usize>| prices.exchange_s(rank, Work::AllReduce, 1 << 20, &members);
                format!("{} {:?}", prices.place(rank), groups.map(link))
            };
            (0..mesh.ranks()).map(of_rank).collect()
        };
        self.kinds.borrow_mut().entry(axes_and_devices(strategy)).or_insert_with(kinds).clone()
    }

    /// The first one of each kind: all are waited for.
    fn replicas(&self, strategy: &Strategy) -> Rc<[usize]> {
        let Source::Cluster(_) = self.source else { return [0].into() };
        let found = || {
            let (mesh, kinds) = (strategy.mesh(), self.kinds(strategy));
            let of_replica = |replica: usize| {
                let places = (0..mesh.pp).flat_map(move |place| (0..mesh.tp).map(move |shard| (place, shard)));
                places.map(|(place, shard)| kinds[mesh.rank(place, replica, shard)].as_str()).collect::<Vec<_>>()
            };
            let mut seen = HashSet::new();
            (0..mesh.dp).filter(|&replica| seen.insert(of_replica(replica))).collect()
        };
        self.replicas.borrow_mut().entry(axes_and_devices(strategy)).or_insert_with(found).clone()
    }

    /// By rank. If there are many micro-batches, about.
    fn costs(&self, strategy: &Strategy) -> Vec<Cost> {
        self.costs_of(self.job, strategy)
    }

    fn costs_of(&self, job: &Job, strategy: &Strategy) -> Vec<Cost> {
        let kinds = self.kinds(strategy);
        let of_micros = |accumulate: usize| job.costs(&Strategy { accumulate, ..strategy.clone() }, &kinds);
        let Some(([few, more], often)) = extension(strategy) else {
            return of_micros(strategy.accumulate);
        };
        // The samples of further micro-batches wait in memory. Gaps between tensors do not grow with them.
        let cost = |(few, more): (Cost, Cost)| {
            let further_bytes = (often * more.peak_bytes.saturating_sub(few.peak_bytes) as f64) as u64;
            let (peak_bytes, arena_bytes) = (more.peak_bytes + further_bytes, more.arena_bytes + further_bytes);
            Cost { peak_bytes, arena_bytes, ..more }
        };
        of_micros(few).into_iter().zip(of_micros(more)).map(cost).collect()
    }

    /// By rank.
    fn fullness(&self, strategy: &Strategy, costs: &[Cost]) -> Vec<f64> {
        self.room(strategy).fullness(strategy, costs)
    }

    /// The strategy with stages that fit, if there are any: those that take equally long may need more than a place has.
    fn cut_to_fit(&self, strategy: &Strategy) -> Option<Strategy> {
        let places = self.places(strategy);
        let times = self.times(strategy, &*self.prices(strategy, &places), 0);
        let (staging, slowness) = self.staging(strategy, &times);
        let fullness = |cuts: &[usize]| {
            let cut = strategy.clone().cut_at(cuts);
            by_place(strategy, &self.fullness(&cut, &self.costs(&cut)))
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
            self.cuts.borrow_mut().clear();
            known = foretell(&*self.prices(strategy, &places), counted);
        }
        known.map_err(Failure::fault)
    }

    /// A step of a strategy, by what steps of few micro-batches take if there are many; by those of a short chain, if one is given.
    fn total(&mut self, chain: Option<&EvenChain>, strategy: &Strategy, kinds: &[String]) -> Result<Totals, Failure> {
        let mut of_micros = |accumulate: usize| {
            let few = Strategy { accumulate, ..strategy.clone() };
            let tasks = match chain {
                Some(chain) => self.job.even_tasks(&few, chain, kinds),
                None => self.job.tasks(&few, kinds),
            };
            self.foretell(&few, &tasks).map(|foretold| Totals::of(&foretold))
        };
        match extension(strategy) {
            Some(([few, more], often)) => Ok(of_micros(few)?.extended(&of_micros(more)?, often)),
            None => of_micros(strategy.accumulate),
        }
    }

    /// The memory of the whole step, to the byte: by rank, and of the fullest one over what there is.
    pub fn memory(&self, strategy: &Strategy) -> (Vec<Cost>, f64) {
        let costs = self.job.costs(strategy, &self.kinds(strategy));
        let fullness = self.fullness(strategy, &costs).into_iter().fold(0.0, f64::max);
        (costs, fullness)
    }

    /// The same, if there are many micro-batches about.
    pub fn about_memory(&self, strategy: &Strategy) -> (Vec<Cost>, f64) {
        let costs = self.costs(strategy);
        let fullness = self.fullness(strategy, &costs).into_iter().fold(0.0, f64::max);
        (costs, fullness)
    }

    /// The whole step of a strategy, task by task.
    pub fn timeline(&mut self, strategy: &Strategy) -> Result<Timeline, Failure> {
        let tasks = self.job.tasks(strategy, &self.kinds(strategy));
        Ok(self.foretell(strategy, &tasks)?.timeline)
    }
}

/// Two smaller numbers of micro-batches from which those of a strategy follow, and how often their difference does: in a pipeline
/// that is full, further ones take turns at its places. None if there are too few to be worth it, or if places keep more of them
/// the more there are, as with gpipe.
fn extension(strategy: &Strategy) -> Option<([usize; 2], f64)> {
    let (micros, period) = (strategy.accumulate, strategy.pp);
    let kept = |micros: usize| strategy.pipeline.kept_micros(period, micros);
    let is_full = |few: &usize| period == 1 || kept(*few) == kept(micros);
    let least = if period == 1 { 2 } else { 4 * period };
    let few = (least + micros % period..micros).step_by(period).find(is_full)?;
    let more = few + period;
    (micros > more + period).then(|| ([few, more], (micros - more) as f64 / period as f64))
}

impl Judging<'_, '_> {
    /// What to change for a strategy that does not fit: the longest sequences that would, if any.
    pub fn nearest_that_fits(&self, strategy: &Strategy) -> Option<String> {
        let mut sequence = self.job.sequence;
        while sequence > 1 {
            sequence /= 2;
            let Job { model, uncut, .. } = self.job;
            let (model, uncut) = (model.clone(), uncut.clone());
            let job = Job { sequence, model, uncut, seen: Seen::default(), ..*self.job };
            let costs = self.costs_of(&job, strategy);
            if evenkeel_balance::fits(&self.fullness(strategy, &costs)) {
                return Some(format!("data.sequence = {sequence} would fit; or use a smaller model, or an adapter"));
            }
        }
        None
    }
}

impl Judge for Judging<'_, '_> {
    type Timing = StepShares;
    /// By rank.
    type Memory = Vec<Cost>;
    type Error = Failure;

    fn least(&self, strategy: &Strategy) -> Least {
        let fullness = self.least_fullness_of_any_cut(strategy);
        if fullness > 1.0 {
            return Least { step_s: 0.0, fullness };
        }
        /// Of a forward, what recomputation repeats at least.
        const REPEATED: f64 = 0.5;
        let arrangement = strategy.arrangement;
        // Steps that compute nothing again are sampled already, or are worth it.
        let plain = strategy.clone().arranged(Arrangement { schedule: NONE, ..arrangement });
        let places = self.places(strategy);
        let prices = self.prices(strategy, &places);
        let of_replica = |&replica: &usize| {
            // Places with fast links may have more of the parameters.
            let shares = vec![1.0 / strategy.pp as f64; strategy.pp];
            let states = self.states(&plain, &*prices, replica, &shares);
            let least = |of: fn(&PlaceTime) -> f64| states.iter().map(of).fold(f64::INFINITY, f64::min);
            let state = PlaceTime {
                reduce_s: least(|state| state.reduce_s),
                tail_s: least(|state| state.tail_s),
                gathers_s: least(|state| state.gathers_s),
                passes_s: states.iter().map(|state| state.passes_s).fold(0.0, f64::max),
                ..PlaceTime::default()
            };
            let times = self.times(&plain, &*prices, replica);
            let mut times: Vec<Vec<UnitTime>> = times.iter().map(|times| times.to_vec()).collect();
            if arrangement.schedule != NONE {
                times.iter_mut().flatten().for_each(|unit| unit.input_s += REPEATED * unit.forward_s);
            }
            least_step_s_of_any_cut(strategy, &times, &state)
        };
        let step_s = self.replicas(strategy).iter().map(of_replica).fold(0.0, f64::max);
        Least { step_s: prices.least_step_s(0, step_s), fullness }
    }

    fn cut(&self, strategy: Strategy) -> Bounded {
        let places = self.places(&strategy);
        let prices = self.prices(&strategy, &places);
        let times = self.times(&strategy, &*prices, 0);
        let strategy = match strategy.pp {
            1 => strategy,
            _ => {
                let cuts = self.best_cuts(&strategy, &times, &prices.place(0));
                strategy.cut_at(&cuts)
            }
        };
        let shares = self.job.trained_shares_of_places(&strategy);
        let of_replica = |&replica: &usize| {
            let times = self.times(&strategy, &*prices, replica);
            least_step_s(&strategy, &times, &self.states(&strategy, &*prices, replica, &shares))
        };
        let step_s = self.replicas(&strategy).iter().map(of_replica).fold(0.0, f64::max);
        let step_s = prices.least_step_s(0, step_s);
        Bounded { step_s, fullness: self.least_fullness(&strategy), strategy }
    }

    fn time(&mut self, strategy: Strategy) -> Result<Timed<StepShares>, Failure> {
        (self.progress)(&strategy);
        let kinds = self.kinds(&strategy);
        // Programs of pipelines are large: every place has its own, for many micro-batches.
        let even_chain = |periods: usize| self.job.even_chain(&strategy, periods).filter(|_| strategy.pp > 1);
        let total = match [2, 3].map(even_chain) {
            // Where units exchange nothing, all of them do the same.
            [Some(chain), _] if strategy.cut.weights.len() == 1 => self.total(Some(&chain), &strategy, &kinds)?,
            [Some(shorter), Some(chain)] => {
                let few = self.total(Some(&shorter), &strategy, &kinds)?;
                few.extended(&self.total(Some(&chain), &strategy, &kinds)?, chain.often_from(&shorter))
            }
            _ => self.total(None, &strategy, &kinds)?,
        };
        let [exposed, idle] = [total.exposed_s, total.idle_s].map(|seconds| seconds / total.program_s);
        let timing = StepShares { exposed, idle, program_s: total.program_s };
        let was_run = match &self.source {
            Source::Machine(profile) => profile.run_s(&self.job.name(&strategy)),
            Source::Cluster(_) => None,
        };
        Ok(Timed { step_s: was_run.unwrap_or(total.step_s), strategy, timing })
    }

    fn fit(&mut self, strategy: &Strategy) -> Result<Fit<Vec<Cost>>, Failure> {
        let costs = self.costs(strategy);
        let fullness = self.fullness(strategy, &costs);
        let mean = fullness.iter().sum::<f64>() / fullness.len() as f64;
        let may_be_recut = strategy.pp > 1 && mean <= 1.0 && !evenkeel_balance::fits(&fullness);
        if let Some(recut) = may_be_recut.then(|| self.cut_to_fit(strategy)).flatten() {
            return Ok(Fit::Recut(Box::new(recut)));
        }
        Ok(Fit::Known { fullness: fullness.into_iter().fold(0.0, f64::max), memory: costs })
    }
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

    /// What follows `more` after growing so often as much as from these to those.
    fn extended(&self, more: &Totals, often: f64) -> Totals {
        let grown = |of: fn(&Totals) -> f64| of(more) + often * (of(more) - of(self));
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

fn axes_and_devices(strategy: &Strategy) -> AxesAndDevices {
    let mesh = strategy.mesh();
    ([mesh.pp, mesh.dp, mesh.tp], numbers(strategy).to_vec())
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
    use std::borrow::Cow;
    use std::collections::BTreeSet;

    use evenkeel_model::{Cut, ZeroStage};
    use evenkeel_step::schedule::Schedule;
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
        assert_eq!(extension(&staged(PipelineOrder::OneForwardOneBackward, 64)), Some(([16, 20], 11.0)));
        assert_eq!(extension(&staged(PipelineOrder::OneForwardOneBackward, 24)), None);
        assert_eq!(extension(&staged(PipelineOrder::Gpipe, 64)), None);
        assert_eq!(extension(&Strategy { accumulate: 9, ..Strategy::of(Cut::even(1)) }), Some(([2, 3], 6.0)));
        for order in PipelineOrder::ALL {
            if let Some(([few, more], often)) = extension(&staged(order, 61)) {
                assert_eq!((more - few, more as f64 + often * 4.0), (4, 61.0), "{order:?}");
            }
        }
    }

    fn model(layers: usize) -> evenkeel_model::Model {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 256, "num_hidden_layers": layers, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512, "tie_word_embeddings": false,
        });
        evenkeel_model::Model::from_json(&config).unwrap()
    }

    fn job(model: &evenkeel_model::Model) -> Job<'_> {
        let options = TrainerOptions {
            optimizer: Some(OptimizerOptions::default()),
            label_smoothing: 0.0,
            longest: 128,
            dropout_seed: 0,
        };
        Job {
            model: Cow::Borrowed(model),
            options,
            sequence: 128,
            beside: &|_| Beside::default(),
            uncut: BTreeSet::new(),
            may_use_all_gpus: false,
            seen: Seen::default(),
        }
    }

    fn cluster() -> Cluster {
        Cluster::parse(include_str!("../../../../examples/clusters/8-h200.toml")).unwrap()
    }

    /// So many micro-batches of four sequences on one device, on two shards, on four replicas, and in two places in all orders.
    fn strategies(accumulate: usize, units: usize) -> Vec<Strategy> {
        let on = |count: usize| Devices::Cuda { gpus: (0..count).collect(), multiprocessors: Vec::new(), graph: true };
        let of = |cut: Cut, count: usize| {
            let strategy = Strategy::of(Cut { split_sequence: count > 1, ..cut });
            Strategy { accumulate, micro_batch: 4, devices: on(count), ..strategy }
        };
        let alone = of(Cut::even(1), 1);
        let recomputed = |tp: usize| Arrangement::of(Schedule::usual(true, tp));
        let mut strategies = vec![
            alone.clone(),
            alone.clone().arranged(recomputed(1)),
            of(Cut::even(2), 2),
            of(Cut::even(2), 2).arranged(alone.arrangement.in_parts(2)),
            of(Cut::even(2), 2).arranged(recomputed(2).in_parts(2)),
        ];
        for zero in ZeroStage::ALL {
            strategies.push(Strategy { devices: on(4), ..alone.clone() }.with_replicas(4, zero));
        }
        for order in PipelineOrder::ALL {
            let stages = 2 * order.usual_chunks();
            let cuts = (1..stages).map(|stage| 1 + stage * (units - 2) / stages).collect();
            let pipeline = Pipeline { cuts, order };
            strategies.push(Strategy { devices: on(2), ..alone.clone() }.in_stages(2, pipeline.clone()));
            for parts in [1, 2] {
                let sharded = of(Cut::even(2), 8).with_replicas(2, ZeroStage::State).in_stages(2, pipeline.clone());
                strategies.push(sharded.clone().arranged(sharded.arrangement.in_parts(parts)));
            }
        }
        strategies
    }

    #[test]
    fn tasks_follow_from_those_of_a_short_chain() {
        let model = model(14);
        let job = job(&model);
        for strategy in strategies(3, model.units.len()) {
            let places = vec![String::new(); strategy.ranks()];
            let tasks = job.tasks(&strategy, &places);
            let ranks: Vec<usize> = tasks.iter().map(|counted| counted.rank).collect();
            for (one, (_, other)) in tasks.iter().zip(&job.counted(&strategy, &ranks)) {
                assert_eq!((one.rank, &one.program), (other.rank, &other.program), "{strategy}");
                for (index, task) in one.program.tasks.iter().enumerate().filter(|(_, task)| task.exchange.is_none()) {
                    let [one, other] = [one, other].map(|it| &it.counts[index]);
                    match task.work.is_of_tail() {
                        false => assert_eq!(one, other, "{strategy}: {task}"),
                        true => {
                            let off = one.bytes() as f64 / other.bytes() as f64 - 1.0;
                            assert!(off.abs() < 0.02, "{strategy}, {:?}: {task}: {off}", strategy.pipeline.order);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn unequal_places_are_foretold_from_even_chains() {
        let cluster = Cluster::parse(include_str!("../../../../examples/clusters/mixed.toml")).unwrap();
        let model = model(40);
        let job = job(&model);
        let mut judging = Judging::new(&job, Source::Cluster(&cluster), &|_| ());
        for order in PipelineOrder::ALL {
            for gpus in [vec![0, 1, 2, 3], vec![0, 2, 4, 6]] {
                let cuts = vec![0; 4 * order.usual_chunks() - 1];
                let devices = Devices::Cuda { gpus: gpus.clone(), multiprocessors: Vec::new(), graph: true };
                let strategy = Strategy { accumulate: 64, micro_batch: 4, devices, ..Strategy::of(Cut::even(1)) };
                let Bounded { strategy, step_s, .. } = judging.cut(strategy.in_stages(4, Pipeline { cuts, order }));
                let timed = judging.time(strategy.clone()).unwrap();
                let whole_s = judging.timeline(&strategy).unwrap().duration_s();
                let off = timed.step_s / whole_s - 1.0;
                assert!(off.abs() < 0.001, "{order:?}, {:?}: off by {off}", strategy.pipeline.cuts);
                assert!(step_s <= whole_s, "{order:?}: {step_s} and {whole_s}");
            }
        }
    }

    #[test]
    fn steps_of_many_micro_batches_follow_from_steps_of_few_and_take_no_less_than_their_bounds() {
        let (model, cluster) = (model(30), cluster());
        let job = job(&model);
        let mut judging = Judging::new(&job, Source::Cluster(&cluster), &|_| ());
        for strategy in strategies(40, model.units.len()) {
            let Bounded { strategy, step_s, fullness } = judging.cut(strategy);
            let timed = judging.time(strategy.clone()).unwrap();
            let whole_s = judging.timeline(&strategy).unwrap().duration_s();
            assert!(step_s <= whole_s, "{strategy:?}: {step_s} and {whole_s}");
            let least = judging.least(&strategy);
            assert!(least.step_s <= whole_s && least.fullness <= fullness, "{strategy}: {least:?} and {fullness}");
            let off = timed.step_s / whole_s - 1.0;
            assert!(off.abs() < 0.02, "{strategy}, {:?}: off by {off}", strategy.pipeline.order);
            let (about, (exact, exact_fullness)) = (judging.costs(&strategy), judging.memory(&strategy));
            assert!(fullness <= exact_fullness, "{strategy}: {fullness} and {exact_fullness}");
            let off = about[0].arena_bytes as f64 / exact[0].arena_bytes as f64 - 1.0;
            // Gaps between tensors differ.
            assert!((-0.02..0.15).contains(&off), "{strategy}, {:?}: bytes are off by {off}", strategy.pipeline.order);
        }
    }
}
