//! A job on some devices: its steps by any strategy from dry runs, and measured on a shortened model or the whole.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use evenkeel_model::{Model, Parameters, Part, ZeroStage};
use evenkeel_plan::{Counted, Profile, Representatives};
use evenkeel_step::simulate::median;
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Pipeline, Strategy};
use evenkeel_train::{Cost, Ranks, Samples, TrainerOptions, costs_and_tasks};

use crate::Failure;
use crate::launch::Launch;
use crate::memory::Beside;
use crate::traced_step::{TracedStep, measure};

/// A model, and the steps that train it.
pub struct Job<'a> {
    pub model: &'a Model,
    pub options: TrainerOptions,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// The host's memory beside the ranks' tensors.
    pub beside: &'a dyn Fn(&Strategy) -> Beside,
    /// Parts of the model that every shard computes whole.
    pub uncut: BTreeSet<Part>,
    /// Whether a run of one rank may as well use all GPUs there are.
    pub may_use_all_gpus: bool,
    pub seen: Seen,
}

/// What dry runs of earlier strategies have shown, by what it depends on.
#[derive(Default)]
pub struct Seen {
    shards: RefCell<HashMap<String, Option<Rc<Shards>>>>,
    micros: RefCell<HashMap<String, Rc<Vec<OneMicro>>>>,
}

/// The shards of a cut.
struct Shards {
    models: Vec<Model>,
    /// By shard: the first one with tensors of the same sizes.
    first_alike: Vec<usize>,
}

/// One micro-batch in one place, on one shard.
pub struct OneMicro {
    pub shard: usize,
    pub counted: Counted,
    pub state_bytes: u64,
    /// Memory beside that.
    pub activation_bytes: u64,
}

/// A dry step of a strategy.
pub struct DryStep {
    /// By rank.
    pub costs: Vec<Cost>,
    /// Of the ranks that stand for all.
    pub counted: Vec<Counted>,
}

/// Times that a shortened model's steps are measured.
const TIMES: usize = 2;
/// Steps that are timed together: ranks do not begin and end one at the same time.
const STEPS_IN_A_ROW: u32 = 3;
/// Weights of a shortened model, at least, if the whole one has as many: fewer would stay in caches that the whole model exceeds.
const LEAST_WEIGHTS: usize = 64 << 20;

impl Job<'_> {
    /// Whether the model can be cut for this strategy.
    pub fn can_be_cut(&self, strategy: &Strategy) -> bool {
        strategy.pipeline.stages() <= self.model.config.layers.len().max(1) && self.cached_shards(strategy).is_some()
    }

    /// A dry step, if ranks are alike that have the same kind of place.
    pub fn dry(&self, strategy: &Strategy, places: &[String]) -> DryStep {
        let shards = self.shards(strategy);
        self.dry_of(&shards.models, &self.representatives(strategy, places), strategy)
    }

    /// The first shard with tensors of the same sizes.
    pub fn first_alike(&self, strategy: &Strategy, shard: usize) -> usize {
        self.shards(strategy).first_alike[shard]
    }

    fn representatives(&self, strategy: &Strategy, places: &[String]) -> Representatives {
        let (mesh, shards) = (strategy.mesh(), self.shards(strategy));
        let first_alike = |rank: usize| shards.first_alike[mesh.shard(rank)];
        Representatives::new(mesh, |one, other| places[one] == places[other] && first_alike(one) == first_alike(other))
    }

    fn dry_of(&self, shards: &[Model], representatives: &Representatives, strategy: &Strategy) -> DryStep {
        let blank = Samples::blank(self.model.config.input, strategy.micro_batch, self.sequence);
        let micros = vec![blank; strategy.micros_per_step()];
        let found = costs_and_tasks(shards, strategy, self.options, &micros, &representatives.ranks);
        let (costs, counted): (Vec<Cost>, Vec<Counted>) = found.into_iter().unzip();
        DryStep { costs: representatives.of.iter().map(|&place| costs[place]).collect(), counted }
    }

    /// By place of the pipeline: bytes that a rank's weights and the optimizer's state take at least. Where shards are unequal, or
    /// units have unequal bytes for an element, that is not known.
    pub fn least_state_bytes(&self, strategy: &Strategy) -> Vec<f64> {
        let (model, micros) = (self.model, self.one_micro(strategy));
        let are_units_alike = model.trained_count() == model.parameter_count() && model.packed_count() == 0;
        let [micro] = &micros[..] else { return vec![0.0; strategy.pp] };
        if strategy.pp > 1 && !are_units_alike {
            return vec![0.0; strategy.pp];
        }
        let elements = |unit: usize| -> f64 {
            let ids = model.units[unit].parameters();
            ids.iter().map(|id| model.specs[id.0].whole.iter().product::<usize>() as f64).sum()
        };
        let all: f64 = (0..model.units.len()).map(elements).sum();
        let values = match strategy.zero {
            ZeroStage::Values => 0.0,
            _ => {
                (model.trained_count() * strategy.dtype.size_bytes() as u64) as f64 / strategy.cut.weights.len() as f64
            }
        };
        let others = micro.state_bytes as f64 - values;
        let split = if strategy.zero == ZeroStage::Nothing { 1 } else { strategy.dp };
        let of_place = |place: usize| {
            let runs = strategy.units(strategy.mesh().rank(place, 0, 0), model.units.len());
            let share = runs.into_iter().flatten().map(elements).sum::<f64>() / all;
            share * (values + others.max(0.0) / split as f64)
        };
        (0..strategy.pp).map(of_place).collect()
    }

    /// A micro-batch of the strategy in one place, on every kind of shard.
    pub fn one_micro(&self, strategy: &Strategy) -> Rc<Vec<OneMicro>> {
        let key = format!("{:?}", (&strategy.cut, strategy.micro_batch, strategy.arrangement, strategy.dtype));
        if let Some(seen) = self.seen.micros.borrow().get(&key) {
            return seen.clone();
        }
        let shards = self.shards(strategy);
        let alone = Strategy { accumulate: 1, ..strategy.clone() }
            .with_replicas(1, ZeroStage::Nothing)
            .in_stages(1, Pipeline::default());
        let blank = [Samples::blank(self.model.config.input, strategy.micro_batch, self.sequence)];
        let firsts = (0..shards.models.len()).filter(|&shard| shards.first_alike[shard] == shard);
        let of_shard = |shard: usize| {
            let mut found = costs_and_tasks(&shards.models, &alone, self.options, &blank, &[shard]);
            let (cost, counted) = found.remove(0);
            let activation_bytes = cost.peak_bytes - cost.state_bytes;
            OneMicro { shard, counted, state_bytes: cost.state_bytes, activation_bytes }
        };
        let found = Rc::new(firsts.map(of_shard).collect::<Vec<_>>());
        self.seen.micros.borrow_mut().insert(key, found.clone());
        found
    }

    /// Measures the tasks of a strategy on a shortened model, with all ranks at work.
    pub fn learn(&self, profile: &mut Profile, strategy: &Strategy) -> Result<(), Failure> {
        let stages = strategy.pipeline.stages();
        let units = self.short_units(stages);
        let shards: Vec<Model> = self.shards(strategy).models.iter().map(|shard| shard.shortened(units)).collect();
        let strategy = Strategy { accumulate: strategy.accumulate.min(2 * stages), ..strategy.clone() };
        let strategy = match strategy.pp {
            1 => strategy,
            _ => strategy.clone().cut_at(&even_cuts(&strategy, shards[0].units.len())),
        };
        self.learn_of(profile, &strategy, shards)
    }

    /// The same on the whole model, whose later layers may be unlike its first ones.
    pub fn learn_whole(&self, profile: &mut Profile, strategy: &Strategy) -> Result<(), Failure> {
        self.learn_of(profile, strategy, self.shards(strategy).models.clone())
    }

    fn learn_of(&self, profile: &mut Profile, strategy: &Strategy, shards: Vec<Model>) -> Result<(), Failure> {
        let ranks = self.start(strategy, shards.clone())?;
        let measured =
            (0..TIMES).map(|step| self.step(&ranks, strategy, step as u64)).collect::<Result<Vec<_>, _>>()?;
        let all = Representatives::new(strategy.mesh(), |one, other| one == other);
        let counted = self.dry_of(&shards, &all, strategy).counted;
        let step_s = median(measured.iter().map(|it| it.untraced_s));
        let host_s = median(measured.iter().map(|it| it.beside_s().max(0.0)));
        let timelines: Vec<Timeline> = measured.into_iter().map(|it| it.timeline).collect();
        profile.learn(&self.places(strategy), &counted, &timelines, [step_s, host_s]).map_err(Failure::fault)
    }

    /// By rank: its kind of place on this machine, with as many busy ranks beside it. Measurements of other models say little
    /// about this one.
    pub fn places(&self, strategy: &Strategy) -> Vec<String> {
        let (config, ranks) = (&self.model.config, strategy.ranks());
        let job = format!(
            "{} {:?}: hidden {}, ffn {}, heads {}/{}, classes {}, sequence {}, {} of {} trained, {} in 4 bits",
            config.family.class,
            strategy.dtype,
            config.hidden,
            config.ffn,
            config.heads,
            config.kv_heads,
            config.classes,
            self.sequence,
            self.model.trained_count(),
            self.model.parameter_count(),
            self.model.packed_count(),
        );
        let device = |rank: usize| match &strategy.devices {
            Devices::Cpu { cores_per_rank, comm_cores } => format!("{cores_per_rank}+{comm_cores} cores"),
            Devices::Cuda { multiprocessors, .. } => match multiprocessors.get(rank) {
                Some(count) => format!("{count} multiprocessors"),
                None if strategy.devices.are_separate_gpus() => "a GPU each".to_owned(),
                None => "a GPU".to_owned(),
            },
        };
        (0..ranks).map(|rank| format!("{ranks} ranks, {}, {job}", device(rank))).collect()
    }

    /// Starts ranks that train the whole model.
    pub fn start_whole(&self, strategy: &Strategy) -> Result<Ranks, Failure> {
        self.start(strategy, self.shards(strategy).models.clone())
    }

    /// Measures steps behind one that warms up.
    pub fn step(&self, ranks: &Ranks, strategy: &Strategy, number: u64) -> Result<TracedStep, Failure> {
        let samples = [2 * number, 2 * number + 1].map(|seed| self.micros(strategy, seed));
        measure(ranks, strategy.arrangement, samples, STEPS_IN_A_ROW)
    }

    fn start(&self, strategy: &Strategy, shards: Vec<Model>) -> Result<Ranks, Failure> {
        let dtype = strategy.dtype;
        let random = move |part: &Model, split, queue: &_| Ok(Parameters::random(part, dtype, split, 0, queue));
        Launch::from(strategy.clone()).start(shards, self.options, random)
    }

    fn shards(&self, strategy: &Strategy) -> Rc<Shards> {
        self.cached_shards(strategy).expect("a strategy that the model can be cut for")
    }

    fn cached_shards(&self, strategy: &Strategy) -> Option<Rc<Shards>> {
        let cut = || {
            let models = self.model.cut(&strategy.cut).ok()?;
            let sizes = |model: &Model| model.specs.iter().map(|spec| spec.shape.clone()).collect::<Vec<_>>();
            let sizes: Vec<_> = models.iter().map(sizes).collect();
            let first = |of| sizes.iter().position(|other| other == of).expect("it is like itself");
            Some(Rc::new(Shards { first_alike: sizes.iter().map(first).collect(), models }))
        };
        let key = format!("{:?}", strategy.cut);
        self.seen.shards.borrow_mut().entry(key).or_insert_with(cut).clone()
    }

    /// Units of the shortened model before its head, whole layers of them.
    fn short_units(&self, stages: usize) -> usize {
        let layers = self.model.config.layers.len();
        let (first, head) = (1, self.model.units.len() - 1);
        let per_layer = (head - first) / layers.max(1);
        let weights = |unit: usize| -> usize {
            let ids = self.model.units[unit].parameters();
            ids.iter().map(|id| self.model.specs[id.0].whole.iter().product::<usize>()).sum()
        };
        let of_layer: usize = (first..first + per_layer).map(weights).sum();
        let enough = LEAST_WEIGHTS.div_ceil(2 * of_layer.max(1));
        first + per_layer * enough.max(2).max(stages).min(layers)
    }

    /// The micro-batches of a step, random and the same for the same number.
    fn micros(&self, strategy: &Strategy, step: u64) -> Vec<Samples> {
        let count = strategy.micros_per_step();
        let (input, classes) = (self.model.config.input, self.model.config.classes);
        let seed = |index: usize| step * count as u64 + index as u64;
        let micro = |index| Samples::random(input, classes, strategy.micro_batch, self.sequence, seed(index));
        (0..count).map(micro).collect()
    }
}

/// Cuts into stages of about as many units.
fn even_cuts(strategy: &Strategy, units: usize) -> Vec<usize> {
    let stages = strategy.pipeline.stages();
    (1..stages).map(|stage| stage * units / stages).collect()
}
