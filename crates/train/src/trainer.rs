//! One rank's training state and its step: batches in, better parameters out.

mod layout;
mod micros;
mod programs;
mod pruning;
mod tail;

use std::borrow::Borrow;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_balance::Observation;
use evenkeel_comm::{Communicator, Group};
use evenkeel_device::kernel::IGNORE;
use evenkeel_device::{Counts, Device, Queue, Tensor};
use evenkeel_model::pass::{self, Findings};
use evenkeel_model::{
    Batch, ExpertLoad, Gradients, Held, LossOptions, Model, ParamId, Parameters, Pruning, ReadTallies, RotaryTables,
    Stretch,
};
use evenkeel_plan::Counted;
use evenkeel_step::schedule::{Arrangement, Chain, PartSize, evaluation};
use evenkeel_step::trace::{Recording, Span};
use evenkeel_step::{Executor, Mesh, Program, Strategy, join, measure_rows};

use crate::Error;
use crate::migration::Migrated;
use crate::observe::{observation, unit_seconds};
use crate::optimizer::{Optimizer, OptimizerOptions, Update};
use crate::prune::{Pruner, Remembered};
use crate::relocation::{Keeping, exchange_s_per_byte};
use crate::samples::Samples;
use crate::state_kind::StateKind;
pub use micros::Prepared;
use micros::Sizes;
pub(crate) use programs::Proofs;
pub use programs::program;
use programs::{Programs, Shape};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainerOptions {
    /// `None`: nothing is kept for training and no step can be made.
    pub optimizer: Option<OptimizerOptions>,
    pub label_smoothing: f32,
    /// The longest sequence to come.
    pub longest: usize,
    /// The seed of dropout, if the model's config asks for it.
    pub dropout_seed: u64,
}

/// Observations of a step beside its outcome.
#[derive(Clone, Copy, Debug)]
pub enum Observe {
    Nothing,
    /// How long this rank computed, by class of work.
    Work,
    /// When each task of the program ran, in seconds from `epoch` on.
    Tasks {
        epoch: Instant,
    },
}

/// A step's outcome, and its requested observations.
#[derive(Clone, Debug, Default)]
pub struct Step {
    pub outcome: StepOutcome,
    pub work: Observation,
    pub spans: Vec<Span>,
}

/// The outcome of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct StepOutcome {
    /// Mean over the labels of all micro-batches.
    pub loss: f64,
    /// The loss of balance among experts, if training has one: the mean over micro-batches, without its coefficient.
    pub balance_loss: Option<f64>,
    /// The mean over micro-batches and layers, if there are experts.
    pub expert_load: Option<ExpertLoad>,
    /// Norm of the gradients' mean, before clipping.
    pub grad_norm: f64,
    /// Tokens, or patches of images.
    pub tokens: usize,
    /// The fewest parts of any rank's micro-batches; fewer than asked for if one has as few documents or images.
    pub parts: usize,
    /// False if loss or gradients were not finite: the parameters are as before.
    pub updated: bool,
}

/// The result on held-out samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Evaluation {
    pub labels: usize,
    pub loss_sum: f64,
    /// Labels that got the highest logit.
    pub correct: usize,
}

impl Evaluation {
    pub fn add(&mut self, other: &Evaluation) {
        self.labels += other.labels;
        self.loss_sum += other.loss_sum;
        self.correct += other.correct;
    }

    pub fn loss(&self) -> f64 {
        self.loss_sum / self.labels as f64
    }

    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// The share of labels that got the highest logit.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.labels as f64
    }
}

/// One rank's shard of a model in training.
pub struct Trainer {
    pub model: Model,
    pub device: Device,
    pub parameters: Parameters,
    optimizer: Option<Optimizer>,
    gradients: Gradients,
    tables: RotaryTables,
    strategy: Strategy,
    rank: usize,
    /// All shards of the mesh, in order.
    shards: Vec<Model>,
    chain: Chain,
    /// By rank, once they are needed.
    all_chains: OnceCell<Vec<Chain>>,
    /// All ranks.
    everybody: Group,
    communicator: Communicator,
    /// The cut that steps are computed with, if it is not the one that ranks keep.
    migrated: Option<Migrated>,
    /// In the order of this rank's chain.
    groups: Vec<Group>,
    options: TrainerOptions,
    /// Updates of the parameters so far.
    pub updates: u32,
    programs: Programs,
    evaluations: Programs,
    pruner: Option<Pruner>,
    /// The checkpoint's columns, for a pruner that starts before the next step.
    remembered: Option<Remembered>,
}

impl Trainer {
    /// `shards` are those of the strategy's cut, whose ranks are the communicator's.
    pub fn new(
        shards: &[Model],
        strategy: &Strategy,
        communicator: &Communicator,
        device: Device,
        parameters: Parameters,
        options: TrainerOptions,
    ) -> Trainer {
        let (queue, rank) = (device.compute(), communicator.rank());
        let kept = (parameters.dtype(), parameters.split);
        assert_eq!(kept, (strategy.dtype, strategy.zero_sharding(rank)), "parameters are kept as the strategy says");
        let (model, shard) = (strategy.model(shards, rank), &shards[strategy.mesh().shard(rank)]);
        let chain = Chain::of(shard, strategy, rank);
        let keeping = || Keeping::of_all(shards, strategy);
        let optimizer = |options| Optimizer::new(options, shard, &parameters, queue).among(&model, keeping, rank);
        let optimizer = options.optimizer.map(optimizer);
        let groups = join(communicator, &chain.groups);
        measure_rows(&model, &chain, &groups, &device, &parameters);
        Trainer {
            optimizer,
            gradients: gradients(options.optimizer.is_some(), &parameters, queue),
            tables: RotaryTables::new(&model.config, queue, options.longest),
            updates: 0,
            programs: Programs::default(),
            evaluations: Programs::default(),
            everybody: communicator.group("all", &(0..communicator.size()).collect::<Vec<_>>()),
            communicator: communicator.clone(),
            migrated: None,
            shards: shards.to_vec(),
            pruner: None,
            remembered: None,
            groups,
            model,
            device,
            strategy: strategy.clone(),
            rank,
            chain,
            all_chains: OnceCell::new(),
            parameters,
            options,
        }
    }

    /// Has the ranks of a process prove their programs for one another.
    pub(crate) fn share_proofs(&mut self, [of_steps, of_evaluations]: &[Arc<Proofs>; 2]) {
        self.programs = Programs::of(of_steps.clone());
        self.evaluations = Programs::of(of_evaluations.clone());
    }

    /// A whole model on one rank.
    pub fn alone(model: Model, device: Device, parameters: Parameters, options: TrainerOptions) -> Trainer {
        let strategy = Strategy::alone(parameters.dtype());
        Trainer::new(&[model], &strategy, &Communicator::dry(0, 1), device, parameters, options)
    }

    /// Computes the gradients of all micro-batches together and updates the parameters once. The micro-batches are those of all
    /// replicas, which take turns; all ranks get the same ones.
    pub fn step(&mut self, micros: &[Samples], lr: f64) -> Result<StepOutcome, Error> {
        Ok(self.step_on(&mut self.prepare(micros)?, lr, Observe::Nothing).outcome)
    }

    /// A step on prepared samples, with the requested observations; see [`Trainer::step`].
    pub fn step_on(&mut self, prepared: &mut Prepared, lr: f64, observe: Observe) -> Step {
        let (mut recording, start) = (Recording::default(), Instant::now());
        let outcome = self.run_step(prepared, lr, observe, &mut recording, |_| ());
        match observe {
            Observe::Nothing => Step { outcome, ..Step::default() },
            Observe::Work => {
                // The host has read the losses, which come after everything that the program did, save what it passed on.
                self.device.pass().finish();
                let spans = recording.read(self.program(), start).unwrap_or_default();
                let gamma = self.pruning().map_or(0.0, Pruning::left_out);
                let work = Observation { gamma, ..observation(&self.model, &spans) };
                Step { outcome, work, ..Step::default() }
            }
            Observe::Tasks { epoch } => {
                self.device.finish();
                let spans = recording.read(self.program(), epoch).expect("the program has run");
                Step { outcome, spans, ..Step::default() }
            }
        }
    }

    /// By unit: the seconds that this rank computes for it in such a step. Nothing is updated. All ranks do it together.
    pub fn unit_seconds(&mut self, micros: &[Samples]) -> Result<Vec<f64>, Error> {
        /// The first run includes start-up work.
        const RUNS: usize = 4;
        let mut prepared = self.prepare(micros)?;
        self.set_noise(&mut prepared.batches);
        self.schedule(&prepared.shape, &prepared.sizes);
        let mut least = vec![f64::INFINITY; self.shard().units.len()];
        for run in 0..RUNS {
            let (mut recording, start) = (Recording::default(), Instant::now());
            self.gradients.clear();
            let losses = LossOptions { smoothing: self.options.label_smoothing, scale: 1.0 };
            drop(self.step_executor().run(self.program(), &prepared.batches, losses, Some(&mut recording)));
            self.device.finish();
            let spans = recording.read(self.program(), start).expect("the program has run");
            let seconds = unit_seconds(least.len(), &spans);
            if run > 0 {
                least.iter_mut().zip(seconds).for_each(|(least, seconds)| *least = least.min(seconds));
            }
        }
        Ok(least)
    }

    /// The program of such a step and what its tasks do, by making it on a dry device.
    pub(crate) fn count_tasks(&mut self, micros: &[impl Borrow<Samples>]) -> Counted {
        let mut prepared = self.prepare_uncompared(micros);
        let device = self.device.clone();
        device.take_counts();
        let mut live_bytes = device.usage().live_bytes;
        // Tasks without rows are not issued.
        let mut found: BTreeMap<usize, (Counts, i64)> = BTreeMap::new();
        self.run_step(&mut prepared, 0.0, Observe::Nothing, &mut Recording::default(), |task| {
            let before = std::mem::replace(&mut live_bytes, device.usage().live_bytes);
            found.insert(task, (device.take_counts(), live_bytes as i64 - before as i64));
        });
        let tasks = 0..self.program().tasks.len();
        let of_task = |task| found.remove(&task).map(|(counts, kept)| (Arc::new(counts), kept)).unwrap_or_default();
        let (counts, kept_bytes) = tasks.map(of_task).unzip();
        Counted { rank: self.rank, program: self.program().clone(), counts, stands_for: Vec::new(), kept_bytes }
    }

    fn run_step(
        &mut self,
        prepared: &mut Prepared,
        lr: f64,
        observe: Observe,
        recording: &mut Recording,
        mut issued: impl FnMut(usize),
    ) -> StepOutcome {
        self.remembered = None;
        self.set_noise(&mut prepared.batches);
        let Prepared { ref batches, ref shape, ref sizes, parts, targets, tokens } = *prepared;
        self.schedule(shape, sizes);
        let loss_options = LossOptions { smoothing: self.options.label_smoothing, scale: 1.0 / targets.max(1) as f32 };
        self.gradients.clear();
        if let Some(mut pruner) = self.pruner.take() {
            pruner.begin_step(&self.place());
            self.pruner = Some(pruner);
        }
        let mut recording = (!matches!(observe, Observe::Nothing)).then_some(recording);
        let pruning = self.pruning();
        let executor = Executor { pruning, ..self.step_executor() };
        let found = executor.run_watched(self.program(), batches, loss_options, recording.as_deref_mut(), &mut issued);
        let mut of_tail = recording.filter(|_| matches!(observe, Observe::Tasks { .. }));
        let grad_norm = self.measure_norm(of_tail.as_deref_mut(), &mut issued);
        let queue = self.device.compute();
        let loss_sum: f64 = found.iter().map(|found| queue.read_sum(&found.losses)).sum();
        let loss = self.sum_over_ranks(loss_sum) / targets.max(1) as f64;
        let (balance_loss, expert_load) = self.routing(batches);
        let updated = loss.is_finite() && grad_norm.is_finite() && targets > 0;
        if updated {
            self.updates += 1;
            self.update(Update { lr: lr as f32, step: self.updates }, of_tail, issued);
            // Submit now: the next step may be long in coming.
            self.device.compute().submit();
        }
        if let Some(pruner) = &mut self.pruner {
            pruner.end_step(updated);
        }
        StepOutcome { loss, balance_loss, expert_load, grad_norm, tokens, parts, updated }
    }

    /// The loss of balance among experts, if there is one, and their load, over all replicas and layers.
    fn routing(&self, batches: &[Vec<Batch>]) -> (Option<f64>, Option<ExpertLoad>) {
        if self.model.config.experts.is_none() {
            return (None, None);
        }
        let [mut loss, mut largest, mut idle, mut count] = [0.0; 4];
        for micro_batch in batches {
            let tallies = micro_batch.iter().filter_map(|part| part.tallies.as_ref());
            let parts: Vec<ReadTallies> = tallies.map(|tallies| tallies.read(self.device.compute())).collect();
            loss += parts.iter().map(ReadTallies::loss).sum::<f64>();
            for load in self.model.expert_layers().filter_map(|layer| ExpertLoad::of_layer(layer, &parts)) {
                (largest, idle, count) = (largest + load.largest, idle + load.idle, count + 1.0);
            }
        }
        let loss = self.model.config.has_balance_loss().then(|| self.sum_over_ranks(loss));
        let [largest, idle, count] = [largest, idle, count].map(|sum| self.sum_over_ranks(sum));
        (loss, (count > 0.0).then(|| ExpertLoad { largest: largest / count, idle: idle / count }))
    }

    /// Seconds per byte sent to the next rank while all ranks send.
    pub fn exchange_s_per_byte(&self) -> f64 {
        exchange_s_per_byte(&self.everybody, &self.device)
    }

    /// Arranges the steps from here on differently.
    pub fn rearrange(&mut self, arrangement: Arrangement) {
        self.strategy.arrangement = arrangement;
        self.programs.clear();
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How the model is run now.
    pub fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    fn mesh(&self) -> Mesh {
        self.strategy.mesh()
    }

    /// Its place among the ranks of the run.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// The program of the last step.
    pub fn program(&self) -> &Program {
        self.programs.last().expect("a step was made")
    }

    /// Number of programs of steps and evaluations written and proved sound so far.
    pub fn programs_written(&self) -> usize {
        self.programs.written() + self.evaluations.written()
    }

    fn optimizer(&self) -> &Optimizer {
        self.optimizer.as_ref().expect("who trains has an optimizer")
    }

    fn data_group(&self) -> Option<&Group> {
        self.chain.data_group.map(|group| &self.groups[group.0])
    }

    fn pipeline_group(&self) -> Option<&Group> {
        self.chain.pipeline_group.map(|group| &self.groups[group.0])
    }

    /// This rank's shard of all stages.
    fn shard(&self) -> &Model {
        &self.shards[self.model.shard.index]
    }

    /// The sum of all replicas' losses, which their last stages know. The same bits on all ranks.
    fn sum_over_ranks(&self, value: f64) -> f64 {
        let groups = [self.data_group(), self.pipeline_group()].into_iter().flatten();
        groups.fold(value, |value, group| group.exchange(value.to_bits()).into_iter().map(f64::from_bits).sum())
    }

    /// Evaluates one batch. Parameters stay as they are.
    pub fn evaluate(&mut self, samples: &Samples) -> Evaluation {
        let batch = self.batch(samples);
        let (shape, size) = Shape::of_evaluation(PartSize::of(self.shard(), &batch));
        let sizes = [vec![size]];
        let mut programs = std::mem::take(&mut self.evaluations);
        let write = |_, chain: &Chain| evaluation(chain, &sizes[0][0]);
        let program = programs.take(shape, &self.chain, || self.chains(), self.rank, &sizes, write);
        let options = LossOptions { smoothing: 0.0, scale: 1.0 };
        let found = self.executor().run(program, &[vec![batch]], options, None);
        self.evaluations = programs;
        let evaluation = found.first().map(|found| self.read_findings(samples, found)).unwrap_or_default();
        self.told_by_last_stage(evaluation)
    }

    fn read_findings(&self, samples: &Samples, found: &Findings) -> Evaluation {
        let queue = self.device.compute();
        let (losses, stats) = (queue.read(&found.losses), queue.read(&found.stats));
        let mut evaluation = Evaluation::default();
        for ((&label, &loss), stats) in samples.labels().iter().zip(&losses).zip(stats.chunks_exact(pass::STATS)) {
            if label != IGNORE {
                evaluation.labels += 1;
                evaluation.loss_sum += loss as f64;
                evaluation.correct += usize::from(pass::label_is_first(stats));
            }
        }
        evaluation
    }

    /// The evaluation of the last stage, on all ranks of the pipeline; the others have found nothing.
    fn told_by_last_stage(&self, own: Evaluation) -> Evaluation {
        let Some(group) = self.pipeline_group() else { return own };
        let count = |own: usize| group.exchange(own as u64).into_iter().sum::<u64>() as usize;
        let loss_sum = group.exchange(own.loss_sum.to_bits()).into_iter().map(f64::from_bits).sum();
        Evaluation { labels: count(own.labels), loss_sum, correct: count(own.correct) }
    }

    /// The elements of a parameter's slice that this rank keeps, and where they lie, [1, n]; in f32 unless it is frozen. Of
    /// weights that lie in no bucket it is a copy.
    pub fn kept(&self, kind: StateKind, id: ParamId) -> Option<(Held, Tensor)> {
        if kind != StateKind::Weight {
            return self.optimizer.as_ref()?.kept(kind, id, &self.parameters);
        }
        let held = self.held(id)?;
        if let Some(copy) = self.parameters.copy_of_apart(id, self.device.compute()) {
            return Some((held, copy));
        }
        let masters = self.parameters.masters(self.parameters.bucket_of(id));
        Some((held, masters.col_range(self.parameters.own_stretch(id)?.place)))
    }

    /// The elements of a weight's slice that this rank keeps.
    pub(crate) fn held(&self, id: ParamId) -> Option<Held> {
        let Stretch { elements, .. } = self.parameters.own_stretch(id)?;
        Some(Held { slice: self.model.specs[id.0].slice.clone(), range: elements })
    }

    /// The name of the rule whose state is kept, if any is.
    pub(crate) fn rule_name(&self) -> Option<&'static str> {
        self.optimizer.as_ref().map(|optimizer| optimizer.rule().name())
    }

    /// Whether this rank speaks for its elements of a parameter if others keep the same.
    pub(crate) fn speaks_for(&self, kind: StateKind, id: ParamId) -> bool {
        if kind.is_kept_by_all() {
            return self.rank == 0;
        }
        if self.model.specs[id.0].is_empty() {
            return false;
        }
        let bucket = &self.parameters.buckets[self.parameters.bucket_of(id)];
        let is_first = self.parameters.split.splits_state_of(bucket) || self.mesh().replica(self.rank) == 0;
        is_first && self.counts(id)
    }

    /// Whether this rank counts its elements of a parameter, if shards or stages hold the same ones.
    fn counts(&self, id: ParamId) -> bool {
        let is_of_first_stage = self.model.stages[0].units.start == 0;
        let is_first = id != self.model.table() || is_of_first_stage || !self.model.config.tied;
        is_first && self.model.specs[id.0].is_counted_by(self.model.shard.index)
    }

    fn executor(&self) -> Executor<'_> {
        Executor {
            model: &self.model,
            device: &self.device,
            parameters: &self.parameters,
            tables: &self.tables,
            gradients: &self.gradients,
            groups: &self.groups,
            migration: None,
            pruning: None,
        }
    }

    /// Uses the cut that steps are computed with.
    fn step_executor(&self) -> Executor<'_> {
        match &self.migrated {
            Some(migrated) => {
                Executor { model: migrated.model(), migration: Some(&migrated.migration), ..self.executor() }
            }
            None => self.executor(),
        }
    }

    fn batch(&self, samples: &Samples) -> Batch {
        samples.batch(&self.model, self.parameters.dtype(), self.device.compute())
    }

    fn schedule(&mut self, shape: &Shape, sizes: &Sizes) {
        let (arrangement, mesh) = (self.strategy.arrangement, self.mesh());
        let write = |rank, chain: &Chain| arrangement.step(chain, &sizes[mesh.replica(rank)]);
        let mut programs = std::mem::take(&mut self.programs);
        let migrated = self.migrated.as_ref().map(|migrated| &migrated.chains[..]);
        let own = migrated.map_or(&self.chain, |chains| &chains[self.rank]);
        let all = || migrated.unwrap_or_else(|| self.chains());
        programs.take(shape.clone(), own, all, self.rank, &sizes[mesh.replica(self.rank)], write);
        programs.note_last(shape.clone());
        self.programs = programs;
    }

    /// By rank.
    fn chains(&self) -> &[Chain] {
        self.all_chains.get_or_init(|| Chain::all(&self.shards, &self.strategy))
    }

    /// Writes programs for this rank alone, without a proof that all ranks' fit together: a dry rank never meets the others.
    pub(crate) fn prove_nothing(&mut self) {
        self.programs = Programs::unproved();
    }
}

/// None for a trainer that does not train.
fn gradients(trains: bool, parameters: &Parameters, queue: &Queue) -> Gradients {
    if trains { Gradients::new(parameters, queue) } else { Gradients::none() }
}
