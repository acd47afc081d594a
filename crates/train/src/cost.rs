//! What training takes, from dry runs.

use evenkeel_comm::Communicator;
use evenkeel_device::{DType, Device};
use evenkeel_model::{Model, Parameters};

use crate::samples::Samples;
use crate::trainer::{Trainer, TrainerOptions};

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

/// What steps on such micro-batches take each rank with these shards of a model, from dry runs.
pub fn costs(shards: &[Model], options: TrainerOptions, dtype: DType, micros: &[Samples]) -> Vec<Cost> {
    (0..shards.len()).map(|rank| cost(shards, rank, options, dtype, micros)).collect()
}

fn cost(shards: &[Model], rank: usize, options: TrainerOptions, dtype: DType, micros: &[Samples]) -> Cost {
    let device = Device::dry();
    let communicator = Communicator::dry(rank, shards.len());
    let parameters = Parameters::allocate(&shards[rank].specs, dtype, device.compute());
    let mut trainer = Trainer::new(shards, &communicator, device, parameters, options);
    let (state_bytes, before) = (trainer.device.usage().live_bytes, trainer.device.counts().flops());
    trainer.step(micros, 0.0).expect("a dry rank has nobody to differ from");
    let (usage, counts) = (trainer.device.usage(), trainer.device.counts());
    let counted = communicator.counts();
    Cost { state_bytes, peak_bytes: usage.peak_bytes, flops: counts.flops() - before, exchanged_bytes: counted.bytes() }
}
