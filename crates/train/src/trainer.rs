//! One rank's training state and its step: batches in, better parameters out.

use evenkeel_comm::Communicator;
use evenkeel_device::kernel::IGNORE;
use evenkeel_device::{DType, Device, Tensor};
use evenkeel_model::pass;
use evenkeel_model::{Batch, Gradients, LossOptions, Model, ParamId, Parameters, RotaryTables};
use evenkeel_step::schedule::{Chain, evaluation, sequential};
use evenkeel_step::{Executor, Program, TensorGroups, verify};

use crate::Error;
use crate::optimizer::{AdamW, AdamWOptions, Update};
use crate::samples::Samples;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainerOptions {
    pub optimizer: AdamWOptions,
    pub label_smoothing: f32,
    /// Keep only the stream for backward, and compute the rest again.
    pub recompute: bool,
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
    groups: TensorGroups,
    options: TrainerOptions,
    /// Updates of the parameters so far.
    pub updates: u32,
    /// The program for micro-batches whose heads have so many chunks.
    program: Program,
    chunks: Vec<usize>,
}

impl Trainer {
    pub fn new(
        model: Model,
        device: Device,
        groups: TensorGroups,
        parameters: Parameters,
        options: TrainerOptions,
    ) -> Trainer {
        let queue = device.compute();
        Trainer {
            optimizer: AdamW::new(options.optimizer, &model.specs, queue),
            gradients: Gradients::new(&model.specs, queue),
            tables: RotaryTables::new(&model.config, queue, options.longest),
            updates: 0,
            program: Program::default(),
            chunks: Vec::new(),
            model,
            device,
            groups,
            parameters,
            options,
        }
    }

    /// A whole model on one rank.
    pub fn alone(model: Model, device: Device, parameters: Parameters, options: TrainerOptions) -> Trainer {
        let groups = TensorGroups::of_world(&Communicator::dry(0, 1), &model.shard);
        Trainer::new(model, device, groups, parameters, options)
    }

    /// Computes the gradients of all micro-batches together and updates the parameters once. Ranks that compute one
    /// model's shards are given the same samples.
    pub fn step(&mut self, micros: &[Samples], lr: f64) -> Result<StepOutcome, Error> {
        self.compare_samples(micros)?;
        let batches: Vec<Batch> = micros.iter().map(|samples| self.batch(samples)).collect();
        self.schedule(&batches);
        let targets: usize = batches.iter().map(|batch| batch.targets).sum();
        let loss_options = LossOptions { smoothing: self.options.label_smoothing, scale: 1.0 / targets.max(1) as f32 };
        self.gradients.clear();
        let found = self.executor().run(&self.program, &batches, loss_options);
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
        let tokens = batches.iter().map(Batch::token_count).sum();
        Ok(StepOutcome { loss, grad_norm, tokens, updated })
    }

    /// Ranks that compute on different samples would train nonsense without any other sign of it.
    fn compare_samples(&self, micros: &[Samples]) -> Result<(), Error> {
        let group = &self.groups.all;
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
        if self.groups.all.size() > 1 {
            comm.wait(&compute.record());
            self.groups.all.all_reduce(comm, squared_norm);
            compute.wait(&comm.record());
        }
        squared_norm
    }

    /// What one batch says. Parameters stay as they are.
    pub fn evaluate(&self, samples: &Samples) -> Evaluation {
        let queue = self.device.compute();
        let batch = self.batch(samples);
        let program = evaluation(&Chain::of(&self.model), self.chunks_of(&batch));
        verify(&program).expect("the schedule writes sound programs");
        let options = LossOptions { smoothing: 0.0, scale: 1.0 };
        let found = self.executor().run(&program, std::slice::from_ref(&batch), options).remove(0);
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

    fn chunks_of(&self, batch: &Batch) -> usize {
        let head = &self.model.head;
        head.chunks(head.rows(batch)).count()
    }

    fn schedule(&mut self, batches: &[Batch]) {
        let chunks: Vec<usize> = batches.iter().map(|batch| self.chunks_of(batch)).collect();
        if chunks != self.chunks {
            self.program = sequential(&Chain::of(&self.model), &chunks, self.options.recompute);
            verify(&self.program).expect("the schedule writes sound programs");
            self.chunks = chunks;
        }
    }
}

/// What training takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Parameters, gradients and moments.
    pub state_bytes: u64,
    pub peak_bytes: u64,
    /// Of one step.
    pub flops: u128,
    /// Of one step: the sizes of what is reduced and gathered, summed.
    pub exchanged_bytes: u128,
}

/// What steps on such micro-batches take a rank with this model or shard of one, from a dry run.
pub fn cost(model: &Model, options: TrainerOptions, dtype: DType, micros: &[Samples]) -> Cost {
    let (device, shard) = (Device::dry(), &model.shard);
    let communicator = Communicator::dry(shard.index, shard.count);
    let groups = TensorGroups::of_world(&communicator, shard);
    let parameters = Parameters::allocate(&model.specs, dtype, device.compute());
    let mut trainer = Trainer::new(model.clone(), device, groups, parameters, options);
    let (state_bytes, before) = (trainer.device.usage().live_bytes, trainer.device.counts().flops());
    trainer.step(micros, 0.0).expect("a dry rank has nobody to differ from");
    let (usage, counts) = (trainer.device.usage(), trainer.device.counts());
    let counted = communicator.counts();
    Cost { state_bytes, peak_bytes: usage.peak_bytes, flops: counts.flops() - before, exchanged_bytes: counted.bytes() }
}
