//! A job on this machine: its steps by any strategy foretold from a profile, and measured on a shortened model or the whole.

use std::collections::BTreeSet;

use evenkeel_device::kernel::IGNORE;
use evenkeel_model::{Model, Parameters, Part};
use evenkeel_plan::{Counted, ForetoldStep, NotKnown, Profile};
use evenkeel_step::simulate::median;
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Strategy};
use evenkeel_train::{Cost, Observe, Ranks, Samples, Trainer, TrainerOptions, costs_and_tasks};

use crate::launch::Launch;
use crate::memory::Beside;
use crate::stages::cuts_by_cost;
use crate::{Failure, Mistake};

/// What is to be trained in a step.
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

/// A measured step, and the same step task by task.
pub struct Measured {
    pub step_s: f64,
    pub traced_s: f64,
    pub timeline: Timeline,
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

    /// What a step takes of each rank, and its tasks, from dry runs.
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
        let step_s = median(measured.iter().map(|it| it.step_s));
        let host_s = median(measured.iter().map(|it| (it.traced_s - it.timeline.duration_s()).max(0.0)));
        let timelines: Vec<Timeline> = measured.into_iter().map(|it| it.timeline).collect();
        profile.learn(&self.places(strategy), &counted, &timelines, [step_s, host_s]).map_err(fault)
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

    /// Makes three steps: one warms up, one is timed, and one is timed task by task.
    pub fn step(&self, ranks: &Ranks, strategy: &Strategy, number: u64) -> Result<Measured, Failure> {
        const RATE: f64 = 1e-4;
        let samples = [2 * number, 2 * number + 1].map(|seed| self.micros(strategy, seed));
        let epoch = std::time::Instant::now();
        let steps = move |trainer: &mut Trainer| {
            trainer.step(&samples[0], RATE)?;
            trainer.device.compute().finish();
            let start = std::time::Instant::now();
            trainer.step(&samples[1], RATE)?;
            trainer.device.compute().finish();
            let step_s = start.elapsed().as_secs_f64();
            let start = std::time::Instant::now();
            let mut prepared = trainer.prepare(&samples[1])?;
            let spans = trainer.step_on(&mut prepared, RATE, Observe::Tasks { epoch }).spans;
            Ok((step_s, start.elapsed().as_secs_f64(), spans))
        };
        let of_ranks: Result<Vec<_>, evenkeel_train::Error> = ranks.with_trainers(steps)?.into_iter().collect();
        let of_ranks = of_ranks?;
        let longest = |seconds: &dyn Fn(usize) -> f64| (0..of_ranks.len()).map(seconds).fold(0.0, f64::max);
        let (step_s, traced_s) = (longest(&|rank| of_ranks[rank].0), longest(&|rank| of_ranks[rank].1));
        let timeline = Timeline { ranks: of_ranks.into_iter().map(|(.., spans)| spans).collect() };
        Ok(Measured { step_s, traced_s, timeline })
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
        let micro = |index: usize| self.random(strategy.micro_batch, step * count as u64 + index as u64);
        (0..count).map(micro).collect()
    }

    fn random(&self, count: usize, seed: u64) -> Samples {
        let (input, vocabulary) = (self.model.config.input, self.model.config.classes);
        let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(1000 + seed);
        let mut token = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 33) % vocabulary as u64) as u32
        };
        match Samples::blank(input, count, self.sequence) {
            Samples::Tokens { segment_lengths, .. } => {
                let ids: Vec<u32> = (0..count * self.sequence).map(|_| token()).collect();
                let is_last = |place: usize| (place + 1).is_multiple_of(self.sequence);
                let label = |place: usize| if is_last(place) { IGNORE } else { ids[place + 1] };
                let labels = (0..ids.len()).map(label).collect();
                Samples::Tokens { ids, labels, segment_lengths }
            }
            images => images,
        }
    }
}

/// Cuts into stages of about as many units.
fn even_cuts(strategy: &Strategy, units: usize) -> Vec<usize> {
    let stages = strategy.pipeline.stages();
    (1..stages).map(|stage| stage * units / stages).collect()
}

fn fault(error: impl std::fmt::Display) -> Failure {
    Failure::Fault(Mistake { what: error.to_string(), hint: None })
}
