//! A job on this machine: its steps by any strategy foretold from a profile, and measured on a shortened model or the whole.

use std::collections::BTreeSet;

use evenkeel_model::{Model, Parameters, Part};
use evenkeel_plan::{Counted, ForetoldStep, NotKnown, Profile};
use evenkeel_step::simulate::median;
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Strategy};
use evenkeel_train::{Cost, Ranks, Samples, TrainerOptions, costs_and_tasks};

use crate::Failure;
use crate::launch::Launch;
use crate::memory::Beside;
use crate::stages::cuts_by_cost;
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
}

/// Steps that are measured of a shortened model, behind one that warms up.
const STEPS: usize = 3;
/// Weights of a shortened model, at least, if the whole one has as many: fewer would stay in caches that the whole model exceeds.
const LEAST_WEIGHTS: usize = 64 << 20;

impl Job<'_> {
    /// The strategy with its stages cut, if the model can be cut so.
    pub fn cut(&self, strategy: Strategy) -> Option<Strategy> {
        self.model.cut(&strategy.cut).ok()?;
        if strategy.pp == 1 {
            return Some(strategy);
        }
        if strategy.pipeline.stages() > self.model.config.layers.len() {
            return None;
        }
        let launch = Launch::from(strategy.clone().cut_at(&even_cuts(&strategy, self.model.units.len())));
        let cuts = cuts_by_cost(self.model, &launch, self.sequence, |it| vec![0.0; it.ranks()]);
        Some(launch.strategy.cut_at(&cuts))
    }

    /// Each rank's cost of a step and its tasks, from dry runs.
    pub fn dry(&self, strategy: &Strategy) -> (Vec<Cost>, Vec<Counted>) {
        self.dry_of(&self.shards(strategy), strategy)
    }

    fn dry_of(&self, shards: &[Model], strategy: &Strategy) -> (Vec<Cost>, Vec<Counted>) {
        costs_and_tasks(shards, strategy, self.options, &self.micros(strategy, 0)).into_iter().unzip()
    }

    pub fn foretell(&self, profile: &Profile, strategy: &Strategy) -> Result<ForetoldStep, NotKnown> {
        profile.foretell(&self.places(strategy), &self.dry(strategy).1)
    }

    /// Operations for a sequence in a step that computes nothing again.
    pub fn flops_per_sequence(&self) -> f64 {
        let alone = Strategy::alone(evenkeel_device::DType::F32);
        self.dry(&alone).0[0].flops as f64
    }

    /// Measures the tasks of a strategy on a shortened model, with all ranks at work.
    pub fn learn(&self, profile: &mut Profile, strategy: &Strategy) -> Result<(), Failure> {
        let stages = strategy.pipeline.stages();
        let units = self.short_units(stages);
        let shards: Vec<Model> = self.shards(strategy).iter().map(|shard| shard.shortened(units)).collect();
        let strategy = Strategy { accumulate: strategy.accumulate.min(2 * stages), ..strategy.clone() };
        let strategy = match strategy.pp {
            1 => strategy,
            _ => strategy.clone().cut_at(&even_cuts(&strategy, shards[0].units.len())),
        };
        self.learn_of(profile, &strategy, shards)
    }

    /// The same on the whole model, whose later layers may be unlike its first ones.
    pub fn learn_whole(&self, profile: &mut Profile, strategy: &Strategy) -> Result<(), Failure> {
        self.learn_of(profile, strategy, self.shards(strategy))
    }

    fn learn_of(&self, profile: &mut Profile, strategy: &Strategy, shards: Vec<Model>) -> Result<(), Failure> {
        let ranks = self.start(strategy, shards.clone())?;
        let measured =
            (0..STEPS).map(|step| self.step(&ranks, strategy, step as u64)).collect::<Result<Vec<_>, _>>()?;
        let (_, counted) = self.dry_of(&shards, strategy);
        let step_s = median(measured.iter().map(|it| it.untraced_s));
        let host_s = median(measured.iter().map(|it| it.beside_s().max(0.0)));
        let timelines: Vec<Timeline> = measured.into_iter().map(|it| it.timeline).collect();
        profile.learn(&self.places(strategy), &counted, &timelines, [step_s, host_s]).map_err(Failure::fault)
    }

    /// By rank: its kind of place, with as many busy ranks beside it. Measurements of other models say little about this one.
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
        self.start(strategy, self.shards(strategy))
    }

    /// Measures a step behind one that warms up.
    pub fn step(&self, ranks: &Ranks, strategy: &Strategy, number: u64) -> Result<TracedStep, Failure> {
        let samples = [2 * number, 2 * number + 1].map(|seed| self.micros(strategy, seed));
        measure(ranks, strategy.arrangement, samples)
    }

    fn start(&self, strategy: &Strategy, shards: Vec<Model>) -> Result<Ranks, Failure> {
        let dtype = strategy.dtype;
        let random = move |part: &Model, split, queue: &_| Ok(Parameters::random(part, dtype, split, 0, queue));
        Launch::from(strategy.clone()).start(shards, self.options, random)
    }

    fn shards(&self, strategy: &Strategy) -> Vec<Model> {
        self.model.cut(&strategy.cut).expect("a strategy that the model can be cut for")
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
