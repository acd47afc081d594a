//! A job on some devices: its steps by any strategy from dry runs, and measured on a shortened model or the whole.

use std::borrow::Cow;
use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use evenkeel_model::{Cut, Model, ParamId, Parameters, Part, ZeroStage};
use evenkeel_plan::{Counted, EvenChain, Profile, Representatives, TaskKernels};
use evenkeel_step::simulate::median;
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Devices, Mesh, Strategy, Task, WorkFamily};
use evenkeel_train::{Cost, Ranks, Samples, TrainerOptions, costs_and_tasks, in_two_threads, program};

use super::sample::{Sample, SampledRank};
use crate::Failure;
use crate::launch::Launch;
use crate::memory::Beside;
use crate::traced_step::{TracedStep, measure};

/// A model, and the steps that train it.
pub struct Job<'a> {
    pub model: Cow<'a, Model>,
    pub options: TrainerOptions,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// The host's memory beside the ranks' tensors.
    pub beside: &'a dyn Fn(&Strategy) -> Beside,
    /// Parts of the model that every shard computes whole.
    pub uncut: BTreeSet<Part>,
    /// Whether a run of one rank may as well use all GPUs there are.
    pub may_use_all_gpus: bool,
    /// Places, replicas and shards, where only strategies with so many are wanted.
    pub axes: [Option<usize>; 3],
    pub seen: Seen<'a>,
}

/// Dry runs of earlier strategies, by what they depend on.
#[derive(Default)]
pub struct Seen<'a> {
    /// The same on models of fewer units.
    shortened: RefCell<HashMap<usize, Rc<Job<'a>>>>,
    shards: RefCell<HashMap<String, Option<Arc<Shards>>>>,
    pub(super) samples: RefCell<HashMap<String, Rc<Sample>>>,
    /// By sequences of a micro-batch.
    blank: RefCell<HashMap<usize, Arc<Samples>>>,
    period: OnceCell<usize>,
    trained_shares: OnceCell<Vec<f64>>,
    /// Strategies that a profile was measured with.
    learnt: RefCell<Vec<Strategy>>,
    /// The tasks of few strategies: programs are large.
    latest: RefCell<VecDeque<(OnChain, Rc<[Counted]>)>>,
}

/// A strategy, and a chain that stands for the model's.
type OnChain = (Strategy, Option<EvenChain>);

/// Tasks of few and of more micro-batches, on a chain and on a longer one, are those of a strategy.
const MOST_LATEST: usize = 4;

impl Seen<'_> {
    /// The tasks of a strategy, if they are not at hand.
    pub(super) fn latest_tasks(&self, of: OnChain, tasks: impl FnOnce() -> Vec<Counted>) -> Rc<[Counted]> {
        let mut latest = self.latest.borrow_mut();
        if let Some((_, found)) = latest.iter().find(|(other, _)| *other == of) {
            return found.clone();
        }
        if latest.len() == MOST_LATEST {
            latest.pop_front();
        }
        let tasks: Rc<[Counted]> = tasks().into();
        latest.push_back((of, tasks.clone()));
        tasks
    }
}

/// The shards of a cut.
pub(super) struct Shards {
    pub models: Vec<Model>,
    /// By shard: the first one that is like it.
    pub first_alike: Vec<usize>,
}

/// Whether shards have tensors of about the same sizes: tables may be cut a little unevenly.
fn are_alike(one: &Model, other: &Model) -> bool {
    const TOLERANCE: f64 = 0.01;
    let are_near = |(one, other): (usize, usize)| one.abs_diff(other) as f64 <= TOLERANCE * one.max(other) as f64;
    one.specs.iter().zip(&other.specs).all(|(one, other)| one.matrix.into_iter().zip(other.matrix).all(are_near))
}

/// At least this share of a short chain's state is parameters: tables for all layers are in it, too.
const ACTUALLY_STATE: f64 = 0.98;
/// Times that a shortened model's steps are measured.
const TIMES: usize = 2;
/// Seconds of steps that are timed together: ranks do not begin and end one at the same time, and single steps vary.
const LEAST_S: f64 = 0.4;
/// Weights of a shortened model, at least, if the whole one has as many: fewer would stay in caches that the whole model exceeds.
const LEAST_WEIGHTS: usize = 64 << 20;

impl<'a> Job<'a> {
    /// Whether the model can be cut for this strategy, and every shard has heads: one without would wait for the others.
    pub fn can_be_cut(&self, strategy: &Strategy) -> bool {
        let (config, cut) = (&self.model.config, &strategy.cut);
        let keeps_heads_whole = cut.uncut.iter().any(|part| matches!(part, Part::Attention(_)));
        let have_heads = cut.weights.len() <= config.kv_heads.max(1) || keeps_heads_whole;
        have_heads && strategy.pipeline.stages() <= config.layers.len().max(1) && self.cached_shards(cut).is_some()
    }

    /// Whether the strategy has the axes that are wanted, and the model's loss allows its stages and parts.
    pub fn is_wanted(&self, strategy: &Strategy) -> bool {
        let Mesh { pp, dp, tp } = strategy.mesh();
        let config = &self.model.config;
        let may_be_pipeline = pp == 1 || config.can_be_in_stages();
        let may_have_parts = strategy.arrangement.parts == 1 || config.can_be_in_parts();
        let axes = self.axes.iter().zip([pp, dp, tp]);
        may_be_pipeline
            && may_have_parts
            && axes.into_iter().all(|(wanted, axis)| wanted.is_none_or(|wanted| wanted == axis))
    }

    /// By rank: the cost of a step, from dry runs, if ranks are alike that have the same kind of place.
    pub fn costs(&self, strategy: &Strategy, places: &[String]) -> Vec<Cost> {
        let representatives = self.representatives(strategy, places);
        let found = self.counted(strategy, &representatives.ranks);
        representatives.of.iter().map(|&place| found[place].0).collect()
    }

    /// The tasks of the ranks that stand for all others, from those of a short chain.
    pub fn tasks(&self, strategy: &Strategy, places: &[String]) -> Vec<Counted> {
        let (mesh, shards, sample) = (strategy.mesh(), self.shards(strategy), self.sample(strategy));
        let (shares, blank) = (self.trained_shares_of_places(strategy), self.blank(strategy));
        let (models, blank) = (&shards.models, &*blank);
        let representatives = self.representatives(strategy, places);
        let (shards, sample) = (&*shards, &*sample);
        in_two_threads(&representatives.ranks, |rank| {
            let sampled = sample.at(mesh.place(rank), shards.first_alike[mesh.shard(rank)]);
            let split = if strategy.zero == ZeroStage::Nothing { 1 } else { strategy.dp };
            let tail = shares[mesh.place(rank)] / sampled.trained_share.max(f64::MIN_POSITIVE) / split as f64;
            let program = program(models, strategy, rank, blank);
            TaskKernels::in_program(&[&sampled.kernels], &sampled.kernels, strategy, rank, program, &sample.alike, tail)
        })
    }

    /// A chain whose stages have so many periods; none if it is no shorter than the model.
    pub fn even_chain(&self, strategy: &Strategy, periods: usize) -> Option<EvenChain> {
        EvenChain::of(strategy, self.model.units.len(), self.period(), periods)
    }

    /// The tasks of such a chain, each for those of the whole that are like it.
    pub fn even_tasks(&self, strategy: &Strategy, chain: &EvenChain, places: &[String]) -> Vec<Counted> {
        let (own, sampled) = (chain.strategy(strategy), chain.sampled(strategy));
        let short = self.shortened(chain.units(), &strategy.cut);
        let sampled_job = self.shortened(chain.sampled_units(), &strategy.cut);
        let (sample, alike, mesh) = (sampled_job.sample(&sampled), chain.alike_sampled(), own.mesh());
        let (shards, blank) = (short.shards(strategy), self.blank(strategy));
        let shares = self.trained_shares_of_places(strategy);
        let split = if strategy.zero == ZeroStage::Nothing { 1 } else { strategy.dp };
        let [all_sampled, all] = [&*sampled_job, self].map(|job: &Job| job.model.trained_count() as f64);
        let representatives = short.representatives(&own, places);
        let (shards, sample, blank) = (&*shards, &*sample, &*blank);
        in_two_threads(&representatives.ranks, |rank| {
            let (place, shard) = (mesh.place(rank), shards.first_alike[mesh.shard(rank)]);
            let sampled_rank = sample.at(chain.sampled_stage(place), shard);
            let kept = (sampled_rank.trained_share * all_sampled).max(1.0);
            let tail = shares[place] * all / kept / split as f64;
            let program = program(&shards.models, &own, rank, blank);
            let kernels: Vec<&TaskKernels> = sample.of_shard(shard).map(|rank| &rank.kernels).collect();
            let tail_of = &sampled_rank.kernels;
            chain.stand_for(TaskKernels::in_program(&kernels, tail_of, &own, rank, program, &alike, tail))
        })
    }

    /// The same on a model of fewer units.
    pub(super) fn shortened(&self, units: usize, cut: &Cut) -> Rc<Job<'a>> {
        let shortened = || {
            let seen = Seen { period: OnceCell::from(self.period()), ..Seen::default() };
            let model = Cow::Owned(self.model.shortened(units - 1));
            Rc::new(Job { model, uncut: self.uncut.clone(), seen, ..*self })
        };
        let job = self.seen.shortened.borrow_mut().entry(units).or_insert_with(shortened).clone();
        let shards = || {
            let Shards { models, first_alike } = &*self.cached_shards(cut).expect("it was cut before");
            let models = models.iter().map(|shard| shard.shortened(units - 1)).collect();
            Some(Arc::new(Shards { models, first_alike: first_alike.clone() }))
        };
        job.seen.shards.borrow_mut().entry(key_of(cut)).or_insert_with(shards);
        job
    }

    /// After so many units they are alike again.
    pub fn period(&self) -> usize {
        *self.seen.period.get_or_init(|| self.model.period())
    }

    /// By shard: the first one that is like it.
    pub fn first_alike(&self, strategy: &Strategy) -> Vec<usize> {
        self.shards(strategy).first_alike.clone()
    }

    fn representatives(&self, strategy: &Strategy, places: &[String]) -> Representatives {
        let (mesh, shards) = (strategy.mesh(), self.shards(strategy));
        let first_alike = |rank: usize| shards.first_alike[mesh.shard(rank)];
        Representatives::new(mesh, |one, other| places[one] == places[other] && first_alike(one) == first_alike(other))
    }

    /// The costs and tasks of these ranks, from dry runs.
    pub fn counted(&self, strategy: &Strategy, ranks: &[usize]) -> Vec<(Cost, Counted)> {
        self.counted_on(&self.shards(strategy).models, strategy, ranks)
    }

    fn counted_on(&self, shards: &[Model], strategy: &Strategy, ranks: &[usize]) -> Vec<(Cost, Counted)> {
        let blank = self.blank(strategy);
        costs_and_tasks(shards, strategy, self.options, &vec![&*blank; strategy.micros_per_step()], ranks)
    }

    /// Of a micro-batch.
    pub fn tokens(&self, strategy: &Strategy) -> usize {
        self.blank(strategy).tokens(self.model.config.input)
    }

    /// The samples of a micro-batch, which say nothing.
    pub(super) fn blank(&self, strategy: &Strategy) -> Arc<Samples> {
        let blank = || Arc::new(Samples::blank(self.model.config.input, strategy.micro_batch, self.sequence));
        self.seen.blank.borrow_mut().entry(strategy.micro_batch).or_insert_with(blank).clone()
    }

    /// By place of the pipeline: bytes that a rank's weights and the optimizer's state take at least, on the narrowest shard. Where
    /// units have unequal bytes for an element, that is not known.
    pub fn least_state_bytes(&self, strategy: &Strategy) -> Vec<f64> {
        let (model, sample) = (&self.model, self.sample_in_one_place(strategy));
        let is_all_trained = model.trained_count() == model.parameter_count() && model.packed_count() == 0;
        let narrowest = sample.shards().min_by_key(|shard| shard.state_bytes);
        let Some(sampled) = narrowest.filter(|_| is_all_trained) else { return vec![0.0; strategy.pp] };
        let weights = &strategy.cut.weights;
        let narrow = weights.iter().copied().fold(f64::INFINITY, f64::min) / weights.iter().sum::<f64>();
        let values = match strategy.zero {
            ZeroStage::Values => 0.0,
            _ => narrow * (model.trained_count() * strategy.dtype.size_bytes() as u64) as f64,
        };
        let others = sampled.state_bytes as f64 / sampled.trained_share - values;
        let split = if strategy.zero == ZeroStage::Nothing { 1 } else { strategy.dp };
        let bytes = ACTUALLY_STATE * (values + others.max(0.0) / split as f64);
        self.trained_shares_of_places(strategy).into_iter().map(|share| share * bytes).collect()
    }

    /// By unit: bytes that it keeps of a micro-batch until its backward, at least, on any shard.
    pub fn kept_bytes(&self, strategy: &Strategy) -> Vec<f64> {
        let sample = self.sample_in_one_place(strategy);
        let before_losses = |task: &&Task| task.work.row().family != WorkFamily::Head;
        let of_shard = |SampledRank { counted, .. }: &SampledRank| {
            let Counted { program, kept_bytes, .. } = counted;
            let mut by_unit = vec![0.0; sample.alike.len()];
            for (task, &kept) in program.tasks.iter().take_while(before_losses).zip(kept_bytes) {
                by_unit[task.unit.0] += kept as f64;
            }
            by_unit
        };
        let least =
            |one: Vec<f64>, other: Vec<f64>| one.iter().zip(&other).map(|(one, other)| one.min(*other)).collect();
        let by_unit = sample.shards().map(of_shard).reduce(least).expect("there is a shard");
        // A unit may free more of the one before it than it keeps.
        sample.alike.iter().map(|&unit| by_unit[unit].max(0.0)).collect()
    }

    /// By unit: its share in all parameters that are trained. A table that is tied counts with the embedding.
    pub fn trained_shares(&self) -> &[f64] {
        let of_unit = |unit: usize| {
            let ids = self.model.units[unit].parameters();
            let is_counted = |id: &&ParamId| unit == 0 || !self.model.config.tied || **id != self.model.table();
            let specs = ids.iter().filter(is_counted).map(|id| &self.model.specs[id.0]);
            let trained = specs.filter(|spec| spec.is_trained).map(|spec| spec.whole.iter().product::<usize>());
            trained.sum::<usize>() as f64 / self.model.trained_count() as f64
        };
        self.seen.trained_shares.get_or_init(|| (0..self.model.units.len()).map(of_unit).collect())
    }

    /// By place of the pipeline: the share of its units.
    pub fn trained_shares_of_places(&self, strategy: &Strategy) -> Vec<f64> {
        let shares = self.trained_shares();
        let of_place = |place: usize| {
            let runs = strategy.units(strategy.mesh().rank(place, 0, 0), shares.len());
            runs.into_iter().flatten().map(|unit| shares[unit]).sum()
        };
        (0..strategy.pp).map(of_place).collect()
    }

    /// Measures the tasks of a strategy on a shortened model, with all ranks at work.
    pub fn learn(&self, profile: &mut Profile, strategy: &Strategy) -> Result<(), Failure> {
        self.seen.learnt.borrow_mut().push(strategy.clone());
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
        let ranks: Vec<usize> = (0..strategy.ranks()).collect();
        let counted: Vec<Counted> =
            self.counted_on(&shards, strategy, &ranks).into_iter().map(|(_, counted)| counted).collect();
        let step_s = median(measured.iter().map(|it| it.untraced_s));
        let timelines: Vec<Timeline> = measured.into_iter().map(|it| it.timeline).collect();
        profile.learn(&self.places(strategy), &counted, &timelines, step_s).map_err(Failure::fault)
    }

    /// Strategies that a profile was measured with.
    pub fn learnt(&self) -> Vec<Strategy> {
        self.seen.learnt.borrow().clone()
    }

    /// By rank: its kind of place on this machine, with as many busy ranks beside it. Measurements of other models say little
    /// about this one.
    pub fn places(&self, strategy: &Strategy) -> Vec<String> {
        let (ranks, model) = (strategy.ranks(), self.model_in_words(strategy));
        let device = |rank: usize| match &strategy.devices {
            Devices::Cpu { cores_per_rank, comm_cores } => format!("{cores_per_rank}+{comm_cores} cores"),
            Devices::Cuda { multiprocessors, .. } => match multiprocessors.get(rank) {
                Some(count) => format!("{count} multiprocessors"),
                None if strategy.devices.are_separate_gpus() => "a GPU each".to_owned(),
                None => "a GPU".to_owned(),
            },
        };
        (0..ranks).map(|rank| format!("{ranks} ranks, {}, {model}", device(rank))).collect()
    }

    /// All that the kernels of a model's units depend on, but for how it is cut.
    fn model_in_words(&self, strategy: &Strategy) -> String {
        let config = &self.model.config;
        format!(
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
        )
    }

    /// A strategy of this job by a name that the profile knows it by.
    pub fn name(&self, strategy: &Strategy) -> String {
        format!("{}{}", self.name_of_all(strategy), serde_json::json!(strategy))
    }

    /// The beginning of the names of all strategies with as many sequences on the same devices.
    pub fn name_of_all(&self, like: &Strategy) -> String {
        let devices = match &like.devices {
            Devices::Cpu { cores_per_rank, .. } => format!("{} cores", like.ranks() * cores_per_rank),
            Devices::Cuda { multiprocessors, .. } => format!("GPUs {multiprocessors:?}"),
        };
        let sequences = like.micro_batch * like.micros_per_step();
        format!("{sequences} sequences a step on {devices}, {}: ", self.model_in_words(like))
    }

    /// Starts ranks that train the whole model.
    pub fn start_whole(&self, strategy: &Strategy) -> Result<Ranks, Failure> {
        self.start(strategy, self.shards(strategy).models.clone())
    }

    /// Measures steps behind one that warms up.
    pub fn step(&self, ranks: &Ranks, strategy: &Strategy, number: u64) -> Result<TracedStep, Failure> {
        let samples = [2 * number, 2 * number + 1].map(|seed| self.micros(strategy, seed));
        measure(ranks, strategy.arrangement, samples, LEAST_S)
    }

    fn start(&self, strategy: &Strategy, shards: Vec<Model>) -> Result<Ranks, Failure> {
        let dtype = strategy.dtype;
        let random = move |part: &Model, split, queue: &_| Ok(Parameters::random(part, dtype, split, 0, queue));
        Launch::from(strategy.clone()).start(shards, self.options, random)
    }

    pub(super) fn shards(&self, strategy: &Strategy) -> Arc<Shards> {
        self.cached_shards(&strategy.cut).expect("a strategy that the model can be cut for")
    }

    fn cached_shards(&self, cut: &Cut) -> Option<Arc<Shards>> {
        let shards = || {
            let models = self.model.cut(cut).ok()?;
            let first_alike = |of| models.iter().position(|first| are_alike(first, of)).expect("it is like itself");
            Some(Arc::new(Shards { first_alike: models.iter().map(first_alike).collect(), models }))
        };
        self.seen.shards.borrow_mut().entry(key_of(cut)).or_insert_with(shards).clone()
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

fn key_of(cut: &Cut) -> String {
    format!("{cut:?}")
}

/// Cuts into stages of about as many units.
fn even_cuts(strategy: &Strategy, units: usize) -> Vec<usize> {
    let stages = strategy.pipeline.stages();
    (1..stages).map(|stage| stage * units / stages).collect()
}
