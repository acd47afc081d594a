//! One rank's training state and its step: batches in, better parameters out.

use std::time::Instant;

use evenkeel_comm::{Communicator, Group};
use evenkeel_device::kernel::IGNORE;
use evenkeel_device::{Device, Tensor};
use evenkeel_model::pass;
use evenkeel_model::{Batch, Gradients, LossOptions, Model, ParamId, Parameters, RotaryTables};
use evenkeel_step::schedule::{Arrangement, Chain, PartSize, evaluation};
use evenkeel_step::trace::{Recording, Span};
use evenkeel_step::{Executor, Program, join, verify};

use crate::Error;
use crate::optimizer::{AdamW, AdamWOptions, Update};
use crate::samples::Samples;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainerOptions {
    pub optimizer: AdamWOptions,
    pub label_smoothing: f32,
    pub arrangement: Arrangement,
    /// The longest sequence there will be.
    pub longest: usize,
}

/// What one step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean over the labels of all micro-batches.
    pub loss: f64,
    /// Of the gradients' mean, before clipping.
    pub grad_norm: f64,
    /// Tokens, or patches of images.
    pub tokens: usize,
    /// False where loss or gradients were not finite: the parameters are as before.
    pub updated: bool,
}

/// What held-out samples say.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    pub labels: usize,
    loss_sum: f64,
    correct: usize,
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

/// What is kept of each parameter from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Weight,
    Mean,
    Variance,
}

/// One rank's shard of a model in training.
pub struct Trainer {
    pub model: Model,
    pub device: Device,
    pub parameters: Parameters,
    pub optimizer: AdamW,
    gradients: Gradients,
    tables: RotaryTables,
    /// Of all ranks, in their order, and this one's place.
    chains: Vec<Chain>,
    rank: usize,
    groups: Vec<Group>,
    options: TrainerOptions,
    /// Updates of the parameters so far.
    pub updates: u32,
    /// The program for micro-batches in parts of such sizes.
    program: Program,
    sizes: Vec<Vec<PartSize>>,
}

impl Trainer {
    /// `shards` are those of all ranks of the communicator, in their order.
    pub fn new(
        shards: &[Model],
        communicator: &Communicator,
        device: Device,
        parameters: Parameters,
        options: TrainerOptions,
    ) -> Trainer {
        let (queue, rank) = (device.compute(), communicator.rank());
        let (model, chains) = (shards[rank].clone(), Chain::all(shards, parameters.dtype()));
        Trainer {
            optimizer: AdamW::new(options.optimizer, &model.specs, queue),
            gradients: Gradients::new(&model.specs, queue),
            tables: RotaryTables::new(&model.config, queue, options.longest),
            updates: 0,
            program: Program::default(),
            sizes: Vec::new(),
            groups: join(communicator, &chains[rank].groups),
            model,
            device,
            chains,
            rank,
            parameters,
            options,
        }
    }

    /// A whole model on one rank.
    pub fn alone(model: Model, device: Device, parameters: Parameters, options: TrainerOptions) -> Trainer {
        Trainer::new(&[model], &Communicator::dry(0, 1), device, parameters, options)
    }

    /// Computes the gradients of all micro-batches together and updates the parameters once. Ranks that compute one
    /// model's shards are given the same samples.
    pub fn step(&mut self, micros: &[Samples], lr: f64) -> Result<StepOutcome, Error> {
        self.recorded_step(micros, lr, None)
    }

    /// A step, and what of its program ran when, in seconds from `epoch` on.
    pub fn traced_step(
        &mut self,
        micros: &[Samples],
        lr: f64,
        epoch: Instant,
    ) -> Result<(StepOutcome, Vec<Span>), Error> {
        let mut recording = Recording::default();
        let outcome = self.recorded_step(micros, lr, Some(&mut recording))?;
        self.device.compute().finish();
        self.device.comm().finish();
        let spans = recording.read(&self.program, epoch).expect("the program has run");
        Ok((outcome, spans))
    }

    fn recorded_step(
        &mut self,
        micros: &[Samples],
        lr: f64,
        recording: Option<&mut Recording>,
    ) -> Result<StepOutcome, Error> {
        self.compare_samples(micros)?;
        let parts = self.options.arrangement.parts;
        let batches = |samples: &Samples| samples.parts(parts).iter().map(|part| self.batch(part)).collect();
        let batches: Vec<Vec<Batch>> = micros.iter().map(batches).collect();
        self.schedule(&batches);
        let targets: usize = batches.iter().flatten().map(|batch| batch.targets).sum();
        let loss_options = LossOptions { smoothing: self.options.label_smoothing, scale: 1.0 / targets.max(1) as f32 };
        self.gradients.clear();
        let found = self.executor().run(&self.program, &batches, loss_options, recording);
        let squared_norm = self.measure_norm();
        let queue = self.device.compute();
        let grad_norm = (queue.read(squared_norm)[0] as f64).sqrt();
        let loss_sum: f64 = found.iter().flat_map(|found| queue.read(&found.losses)).map(f64::from).sum();
        let loss = loss_sum / targets.max(1) as f64;
        let updated = loss.is_finite() && grad_norm.is_finite() && targets > 0;
        if updated {
            self.updates += 1;
            let update = Update { lr: lr as f32, step: self.updates };
            self.optimizer.update(queue, &self.parameters, &self.gradients, update);
        }
        let tokens = batches.iter().flatten().map(Batch::token_count).sum();
        Ok(StepOutcome { loss, grad_norm, tokens, updated })
    }

    /// Arranges the steps from here on in another way.
    pub fn rearrange(&mut self, arrangement: Arrangement) {
        self.options.arrangement = arrangement;
        self.sizes.clear();
    }

    /// The program of the last step.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Ranks that compute on different samples would train nonsense without any other sign of it.
    fn compare_samples(&self, micros: &[Samples]) -> Result<(), Error> {
        let group = &self.groups[0];
        if group.size() == 1 {
            return Ok(());
        }
        let hashes = group.exchange(Samples::hash(micros));
        match hashes.iter().position(|&hash| hash != hashes[0]) {
            None => Ok(()),
            Some(member) => Err(Error::DifferentSamples { ranks: [group.ranks()[0], group.ranks()[member]] }),
        }
    }

    /// The squared norm of the whole gradient, every parameter counted once, on all ranks the same.
    fn measure_norm(&self) -> &Tensor {
        let (compute, comm) = (self.device.compute(), self.device.comm());
        let is_counted = |id: ParamId| self.model.specs[id.0].is_counted_by(self.model.shard.index);
        let squared_norm = self.optimizer.measure_norm(compute, &self.parameters, &self.gradients, is_counted);
        let group = &self.groups[0];
        if group.size() > 1 {
            comm.wait(&compute.record());
            group.all_reduce(comm, squared_norm);
            compute.wait(&comm.record());
        }
        squared_norm
    }

    /// What one batch says. Parameters stay as they are.
    pub fn evaluate(&self, samples: &Samples) -> Evaluation {
        let queue = self.device.compute();
        let batch = self.batch(samples);
        let size = PartSize::of(&self.model, &batch);
        let program = self.verified(|chain| evaluation(chain, &size));
        let options = LossOptions { smoothing: 0.0, scale: 1.0 };
        let found = self.executor().run(&program, &[vec![batch]], options, None).remove(0);
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

    /// What this rank keeps of a parameter.
    pub fn tensor(&self, kind: Kind, id: ParamId) -> &Tensor {
        match kind {
            Kind::Weight => self.parameters.master(id),
            Kind::Mean => self.optimizer.mean(id),
            Kind::Variance => self.optimizer.variance(id),
        }
    }

    fn executor(&self) -> Executor<'_> {
        Executor {
            model: &self.model,
            device: &self.device,
            parameters: &self.parameters,
            tables: &self.tables,
            gradients: &self.gradients,
            groups: &self.groups,
        }
    }

    fn batch(&self, samples: &Samples) -> Batch {
        samples.batch(&self.model, self.parameters.dtype(), self.device.compute())
    }

    fn schedule(&mut self, batches: &[Vec<Batch>]) {
        let size = |batch: &Batch| PartSize::of(&self.model, batch);
        let sizes: Vec<Vec<PartSize>> = batches.iter().map(|parts| parts.iter().map(size).collect()).collect();
        if sizes != self.sizes {
            self.program = self.verified(|chain| self.options.arrangement.write(chain, &sizes));
            self.sizes = sizes;
        }
    }

    /// This rank's program, once those of all ranks are proved sound together.
    fn verified(&self, write: impl Fn(&Chain) -> Program) -> Program {
        let mut programs: Vec<Program> = self.chains.iter().map(write).collect();
        verify(&programs).expect("schedules write sound programs");
        programs.swap_remove(self.rank)
    }
}
