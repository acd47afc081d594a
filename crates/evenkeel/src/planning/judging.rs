//! Judges strategies of a job by this machine's profile, or by the published figures of a cluster.

mod bounds;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use evenkeel_plan::{
    Bounded, Cluster, ClusterDevice, Counted, EvenChain, Fit, ForetoldStep, Judge, Least, NotKnown, PlaceTime, Prices,
    Profile, Published, Timed, UnitTime, foretell, least_step_s, least_step_s_of_any_cut, recomputing,
};
use evenkeel_step::schedule::{Arrangement, NONE, Units};
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Keeping, Strategy, Work};
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
    known_costs: RefCell<Vec<(Strategy, Vec<Cost>)>>,
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
            known_costs: RefCell::default(),
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
        // A search for stages that fit ends with costs that are asked for again.
        if let Some((_, known)) = self.known_costs.borrow().iter().find(|(other, _)| other == strategy) {
            return known.clone();
        }
        let costs = self.costs_of(self.job, strategy);
        self.known_costs.borrow_mut().push((strategy.clone(), costs.clone()));
        costs
    }

    fn costs_of(&self, job: &Job, strategy: &Strategy) -> Vec<Cost> {
        let kinds = self.kinds(strategy);
        let of_micros = |accumulate: usize| job.costs(&Strategy { accumulate, ..strategy.clone() }, &kinds);
        let Some(([few, more], often)) = extension(strategy, ROUNDS_OF_MEMORY) else {
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

    /// Two short chains from whose steps that of a pipeline follows, and how often their difference does: its programs are large, since
    /// every place has its own, for many micro-batches.
    fn shorter(&self, strategy: &Strategy) -> Option<([EvenChain; 2], f64)> {
        let even_chain = |periods: usize| self.job.even_chain(strategy, periods).filter(|_| strategy.pp > 1);
        let (shorter, chain) = even_chain(2).zip(even_chain(3))?;
        let often = chain.often_from(&shorter);
        Some(([shorter, chain], often))
    }

    /// A step of a strategy on a chain or, if none is given, on the model's, by what steps of few micro-batches take if there are many.
    fn total(&mut self, chain: Option<&EvenChain>, strategy: &Strategy, kinds: &[String]) -> Result<Totals, Failure> {
        let mut of_micros = |accumulate: usize| {
            let few = Strategy { accumulate, ..strategy.clone() };
            let tasks = || match chain {
                None => self.job.tasks(&few, kinds),
                Some(chain) => self.job.even_tasks(&few, chain, kinds),
            };
            let tasks = self.job.seen.latest_tasks((few.clone(), chain.cloned()), tasks);
            self.foretell(&few, &tasks).map(|foretold| Totals::of(&foretold))
        };
        match extension(strategy, ROUNDS_OF_TIME) {
            Some(([few, more], often)) => {
                let (few, more) = (of_micros(few)?, of_micros(more)?);
                Ok(more.grown(&few, &more, often))
            }
            None => of_micros(strategy.accumulate),
        }
    }

    /// The memory of the whole step, to the byte: by rank, and of the fullest one over what there is.
    pub fn memory(&self, strategy: &Strategy) -> (Vec<Cost>, f64) {
        self.with_fullness(strategy, self.job.costs(strategy, &self.kinds(strategy)))
    }

    /// The same, if there are many micro-batches about.
    pub fn about_memory(&self, strategy: &Strategy) -> (Vec<Cost>, f64) {
        self.with_fullness(strategy, self.costs(strategy))
    }

    fn with_fullness(&self, strategy: &Strategy, costs: Vec<Cost>) -> (Vec<Cost>, f64) {
        let fullness = self.fullness(strategy, &costs).into_iter().fold(0.0, f64::max);
        (costs, fullness)
    }

    /// The whole step of a strategy, task by task.
    pub fn timeline(&mut self, strategy: &Strategy) -> Result<Timeline, Failure> {
        let tasks = self.job.tasks(strategy, &self.kinds(strategy));
        Ok(self.foretell(strategy, &tasks)?.timeline)
    }
}

/// Rounds of micro-batches after which further ones take as long as one another.
const ROUNDS_OF_TIME: usize = 2;
/// The same for what places keep.
const ROUNDS_OF_MEMORY: usize = 4;

/// Two smaller numbers of micro-batches from which those of a strategy follow, and how often their difference does: in a pipeline
/// that is full, further ones take turns at its places. None if there are too few to be worth it, or if places keep more of them
/// the more there are, as with gpipe.
fn extension(strategy: &Strategy, rounds: usize) -> Option<([usize; 2], f64)> {
    let (micros, period) = (strategy.accumulate, strategy.pp);
    let few = least_micros(strategy, rounds);
    let more = few + period;
    let keeps_more = period > 1 && strategy.pipeline.order.keeps_all();
    (!keeps_more && micros > more + period).then(|| ([few, more], (micros - more) as f64 / period as f64))
}

/// So many rounds of micro-batches through a pipeline, and those that are no whole round.
fn least_micros(strategy: &Strategy, rounds: usize) -> usize {
    let (micros, period) = (strategy.accumulate, strategy.pp);
    let least = if period == 1 { 2 } else { rounds * period };
    micros.min(least + micros % period)
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

/// The strategy that bounds are taken of: steps that compute nothing again are sampled already, or are worth it.
fn plain(strategy: &Strategy) -> Strategy {
    strategy.clone().arranged(Arrangement { schedule: NONE, recompute: Units::All, ..strategy.arrangement })
}

impl Judging<'_, '_> {
    /// Takes the samples that all their bounds need.
    pub fn sample(&self, strategies: &[Strategy]) {
        let leanest = |strategy: &Strategy| self.leaner(strategy).pop().unwrap_or_else(|| strategy.clone());
        let may_fit = |strategy: &&Strategy| self.least_fullness_of_any_cut(&leanest(strategy)) <= 1.0;
        self.job.sample_all_in_one_place(strategies.iter().filter(may_fit));
    }

    /// The step of a strategy at least, wherever its stages are cut.
    pub fn least_step_s_of_any_cut(&self, strategy: &Strategy) -> f64 {
        /// Recomputation repeats at least this share of a forward.
        const REPEATED: f64 = 0.5;
        let (arrangement, plain) = (strategy.arrangement, plain(strategy));
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
                let units = &self.job.model.units;
                let again = |times: &mut Vec<UnitTime>| {
                    let again =
                        times.iter_mut().zip(units).filter(|(_, unit)| arrangement.recompute.contains(unit.kind));
                    again.for_each(|(time, _)| {
                        time.input_s += REPEATED * time.forward_s;
                        time.again_s += time.forward_s;
                    });
                };
                times.iter_mut().for_each(again);
            }
            least_step_s_of_any_cut(strategy, &times, &state)
        };
        let step_s = self.replicas(strategy).iter().map(of_replica).fold(0.0, f64::max);
        prices.least_step_s(0, step_s)
    }
}

impl Judge for Judging<'_, '_> {
    type Timing = StepShares;
    /// By rank.
    type Memory = Vec<Cost>;
    type Error = Failure;

    fn least(&self, strategy: &Strategy) -> Least {
        let fullness = self.least_fullness_of_any_cut(strategy);
        let step_s = if fullness > 1.0 { 0.0 } else { self.least_step_s_of_any_cut(strategy) };
        Least { step_s, fullness }
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
        let total = match (self.shorter(&strategy), strategy.cut.weights.len()) {
            (None, _) => self.total(None, &strategy, &kinds)?,
            // Where units exchange nothing, all of them do the same.
            (Some(([_, chain], _)), 1) => self.total(Some(&chain), &strategy, &kinds)?,
            (Some(([shorter, chain], often)), _) => {
                let total = self.total(Some(&chain), &strategy, &kinds)?;
                // Steps of few micro-batches say as well what further units take.
                let few = Strategy { accumulate: least_micros(&strategy, ROUNDS_OF_TIME), ..strategy.clone() };
                let [shorter, chain] = [shorter, chain].map(|chain| self.total(Some(&chain), &few, &kinds));
                total.grown(&shorter?, &chain?, often)
            }
        };
        let [exposed, idle] = [total.exposed_s, total.idle_s].map(|seconds| seconds.max(0.0) / total.program_s);
        let timing = StepShares { exposed, idle, program_s: total.program_s };
        let was_run = match &self.source {
            Source::Machine(profile) => profile.run_s(&self.job.name(&strategy)),
            Source::Cluster(_) => None,
        };
        Ok(Timed { step_s: was_run.unwrap_or(total.step_s), strategy, timing })
    }

    fn leaner(&self, strategy: &Strategy) -> Vec<Strategy> {
        recomputing(strategy, !self.job.model.has_whole_layers())
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

    /// These after growing so often as much as from `few` to `more`, in proportion to the step's length.
    fn grown(&self, few: &Totals, more: &Totals, often: f64) -> Totals {
        let share = often * self.program_s / more.program_s;
        let grown = |of: fn(&Totals) -> f64| of(self) + share * (of(more) - of(few));
        Totals {
            step_s: grown(|it| it.step_s),
            program_s: grown(|it| it.program_s),
            exposed_s: grown(|it| it.exposed_s),
            idle_s: grown(|it| it.idle_s),
        }
    }
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
mod tests;
