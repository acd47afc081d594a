//! The cost of training, from dry runs.

use std::convert::Infallible;

use evenkeel_comm::Communicator;
use evenkeel_device::{Device, WorkingMemory};
use evenkeel_model::{Model, Parameters, Widths};
use evenkeel_plan::Counted;
use evenkeel_step::Strategy;

use crate::samples::Samples;
use crate::trainer::{Trainer, TrainerOptions};

/// The cost of training to one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Parameters, gradients and moments.
    pub state_bytes: u64,
    /// The largest part of the arena that is in use at a time.
    pub peak_bytes: u64,
    /// Size of the arena for that, gaps included.
    pub arena_bytes: u64,
    /// Working memory of kernels outside the arena, on a CPU.
    pub working: WorkingMemory,
    /// Per step.
    pub flops: u128,
    /// Per step: the sizes of everything reduced and gathered, summed.
    pub exchanged_bytes: u128,
}

/// Each rank's cost of steps on such micro-batches, from dry runs. `shards` are those of the strategy's cut.
pub fn costs(shards: &[Model], strategy: &Strategy, options: TrainerOptions, micros: &[Samples]) -> Vec<Cost> {
    costs_migrated(shards, strategy, options, micros, None)
}

/// The same, if ranks compute with `work` and keep their shards.
pub fn costs_migrated(
    shards: &[Model],
    strategy: &Strategy,
    options: TrainerOptions,
    micros: &[Samples],
    work: Option<&Widths>,
) -> Vec<Cost> {
    let cost = |rank: usize| {
        let mut trainer = dry(shards, strategy, options, rank);
        trainer.migrate(work.cloned());
        cost(trainer, |trainer| {
            trainer.step(micros, 0.0).expect(NOBODY_DIFFERS);
        })
    };
    (0..strategy.ranks()).map(cost).collect()
}

/// The same for these ranks, and the tasks of their programs.
pub fn costs_and_tasks(
    shards: &[Model],
    strategy: &Strategy,
    options: TrainerOptions,
    micros: &[Samples],
    ranks: &[usize],
) -> Vec<(Cost, Counted)> {
    let of_rank = |&rank: &usize| {
        let mut counted = None;
        let cost = cost(dry(shards, strategy, options, rank), |trainer| counted = Some(trainer.count_tasks(micros)));
        (cost, counted.expect("the step was made"))
    };
    ranks.iter().map(of_rank).collect()
}

/// A rank on a dry device, as it is before its first step.
fn dry(shards: &[Model], strategy: &Strategy, options: TrainerOptions, rank: usize) -> Trainer {
    let (device, communicator) = (Device::dry(), Communicator::dry(rank, strategy.ranks()));
    let shard = strategy.model(shards, rank);
    let parameters = Parameters::allocate(&shard, strategy.dtype, strategy.zero_sharding(rank), device.compute());
    // Filled as in loading, since that decides where later tensors lie.
    let filled: Result<(), Infallible> = parameters.fill(device.compute(), |_, _, _| Ok(()));
    filled.expect("nothing is read");
    shard.measure_filled_rows(&parameters, device.compute());
    let mut trainer = Trainer::new(shards, strategy, &communicator, device, parameters, options);
    trainer.prove_nothing();
    trainer
}

const NOBODY_DIFFERS: &str = "a dry rank has nobody to differ from";

fn cost(mut trainer: Trainer, step: impl FnOnce(&mut Trainer)) -> Cost {
    let (state_bytes, before) = (trainer.device.usage().live_bytes, trainer.device.counts().flops());
    let exchanged_before = trainer.communicator().counts().bytes();
    step(&mut trainer);
    let (usage, counts) = (trainer.device.usage(), trainer.device.counts());
    Cost {
        state_bytes,
        peak_bytes: usage.peak_bytes,
        arena_bytes: usage.extent_bytes,
        working: trainer.device.working_memory(),
        flops: counts.flops() - before,
        exchanged_bytes: trainer.communicator().counts().bytes() - exchanged_before,
    }
}
