//! One rank's training state and its step: batches in, better parameters out.

use evenkeel_device::kernel::IGNORE;
use evenkeel_device::{DType, Device};
use evenkeel_model::pass;
use evenkeel_model::{Batch, Context, Gradients, LossOptions, Model, Parameters, RotaryTables};
use evenkeel_step::schedule::{Chain, sequential};
use evenkeel_step::{Executor, Program, verify};

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

pub struct Trainer<'a> {
    pub model: &'a Model,
    pub device: &'a Device,
    pub parameters: Parameters,
    pub optimizer: AdamW,
    gradients: Gradients,
    tables: RotaryTables,
    options: TrainerOptions,
    /// Updates of the parameters so far.
    pub updates: u32,
    /// The program for the last number of micro-batches.
    program: Program,
    micros: usize,
}

impl<'a> Trainer<'a> {
    pub fn new(model: &'a Model, device: &'a Device, parameters: Parameters, options: TrainerOptions) -> Trainer<'a> {
        let queue = device.compute();
        Trainer {
            optimizer: AdamW::new(options.optimizer, &model.specs, queue),
            gradients: Gradients::new(&model.specs, queue),
            tables: RotaryTables::new(&model.config, queue, options.longest),
            updates: 0,
            program: Program::default(),
            micros: 0,
            model,
            device,
            parameters,
            options,
        }
    }

    /// Computes the gradients of all micro-batches together and updates the parameters once.
    pub fn step(&mut self, micros: &[Samples], lr: f64) -> StepOutcome {
        self.schedule(micros.len());
        let queue = self.device.compute();
        let batches: Vec<Batch> = micros.iter().map(|samples| self.batch(samples)).collect();
        let targets: usize = batches.iter().map(|batch| batch.targets).sum();
        let loss_options = LossOptions { smoothing: self.options.label_smoothing, scale: 1.0 / targets.max(1) as f32 };
        self.gradients.clear();
        let executor = Executor {
            model: self.model,
            device: self.device,
            parameters: &self.parameters,
            tables: &self.tables,
            gradients: &self.gradients,
        };
        let losses = executor.run(&self.program, &batches, loss_options);
        let squared_norm = self.optimizer.measure_norm(queue, &self.parameters, &self.gradients);
        let grad_norm = (queue.read(squared_norm)[0] as f64).sqrt();
        let loss_sum: f64 = losses.iter().flat_map(|losses| queue.read(losses)).map(f64::from).sum();
        let loss = loss_sum / targets.max(1) as f64;
        let updated = loss.is_finite() && grad_norm.is_finite() && targets > 0;
        if updated {
            self.updates += 1;
            let update = Update { lr: lr as f32, step: self.updates };
            self.optimizer.update(queue, &self.parameters, &self.gradients, update);
        }
        let tokens = batches.iter().map(Batch::token_count).sum();
        StepOutcome { loss, grad_norm, tokens, updated }
    }

    /// Adds what one batch says to `so_far`. Parameters stay as they are.
    pub fn evaluate(&self, samples: &Samples, so_far: &mut Evaluation) {
        let queue = self.device.compute();
        let batch = self.batch(samples);
        let context = Context { queue, parameters: &self.parameters, tables: &self.tables, batch: &batch };
        let found = pass::evaluate(self.model, &context, 0.0);
        let (losses, stats) = (queue.read(&found.losses), queue.read(&found.stats));
        for ((&label, &loss), stats) in samples.labels().iter().zip(&losses).zip(stats.chunks_exact(pass::STATS)) {
            if label != IGNORE {
                so_far.labels += 1;
                so_far.loss_sum += loss as f64;
                so_far.correct += usize::from(pass::label_is_first(stats));
            }
        }
    }

    fn batch(&self, samples: &Samples) -> Batch {
        samples.batch(self.model, self.parameters.dtype(), self.device.compute())
    }

    fn schedule(&mut self, micros: usize) {
        if micros != self.micros {
            self.program = sequential(Chain::of(self.model), micros, self.options.recompute);
            verify(&self.program).expect("the schedule writes sound programs");
            self.micros = micros;
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
}

/// What steps on such micro-batches take, from a dry run.
pub fn cost(model: &Model, options: TrainerOptions, dtype: DType, micros: &[Samples]) -> Cost {
    let device = Device::dry();
    let parameters = Parameters::allocate(&model.specs, dtype, device.compute());
    let mut trainer = Trainer::new(model, &device, parameters, options);
    let (state_bytes, before) = (device.usage().live_bytes, device.counts().flops());
    trainer.step(micros, 0.0);
    Cost { state_bytes, peak_bytes: device.usage().peak_bytes, flops: device.counts().flops() - before }
}
