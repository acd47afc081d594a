//! The cost of training, from dry runs.

use std::borrow::Borrow;
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
    /// Of the program of a step.
    pub tasks: u64,
    /// Per step.
    pub flops: u128,
    /// Per step: the sizes of everything reduced and gathered, summed.
    pub exchanged_bytes: u128,
}

impl Cost {
    /// The cost of something larger, each of whose numbers follows from those of something small and of something less small.
    pub fn extended(&self, smaller: &Cost, extended: impl Fn(f64, f64) -> f64) -> Cost {
        let number = |of: fn(&Cost) -> u64| extended(of(smaller) as f64, of(self) as f64) as u64;
        let count = |of: fn(&Cost) -> u128| extended(of(smaller) as f64, of(self) as f64) as u128;
        let peak_bytes = number(|cost| cost.peak_bytes);
        // Gaps come and go; their share is about the same.
        let gapped = self.arena_bytes as f64 / self.peak_bytes.max(1) as f64;
        Cost {
            state_bytes: number(|cost| cost.state_bytes),
            peak_bytes,
            arena_bytes: (gapped * peak_bytes as f64) as u64,
            working: self.working,
            tasks: number(|cost| cost.tasks),
            flops: count(|cost| cost.flops),
            exchanged_bytes: count(|cost| cost.exchanged_bytes),
        }
    }
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
            trainer.device.take_counts();
            trainer.step(micros, 0.0).expect(NOBODY_DIFFERS);
            trainer.device.take_counts().flops()
        })
    };
    (0..strategy.ranks()).map(cost).collect()
}

/// The same for these ranks, and the tasks of their programs.
pub fn costs_and_tasks(
    shards: &[Model],
    strategy: &Strategy,
    options: TrainerOptions,
    micros: &[impl Borrow<Samples> + Sync],
    ranks: &[usize],
) -> Vec<(Cost, Counted)> {
    in_two_threads(ranks, |rank| {
        let mut counted = None;
        let cost = cost(dry(shards, strategy, options, rank), |trainer| {
            let counted = counted.insert(trainer.count_tasks(micros));
            counted.counts.iter().map(|counts| counts.flops()).sum()
        });
        (cost, counted.expect("the step was made"))
    })
}

/// By rank, in their order, for what ranks have nothing to do with one another in. They take about as long, so every second one is
/// computed beside the others.
pub fn in_two_threads<T: Send>(ranks: &[usize], of_rank: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if ranks.len() < 2 {
        return ranks.iter().map(|&rank| of_rank(rank)).collect();
    }
    let every_second = |first: usize| ranks[first..].iter().step_by(2).map(|&rank| of_rank(rank)).collect::<Vec<T>>();
    let (even, odd) = std::thread::scope(|scope| {
        let odd = std::thread::Builder::new().name("dry ranks".to_owned()).spawn_scoped(scope, || every_second(1));
        let even = every_second(0);
        (even, odd.expect("a thread can be started").join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let (mut even, mut odd) = (even.into_iter(), odd.into_iter());
    (0..ranks.len()).map(|index| if index % 2 == 0 { even.next() } else { odd.next() }.expect("one each")).collect()
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

/// `step` makes a step and returns its operations.
fn cost(mut trainer: Trainer, step: impl FnOnce(&mut Trainer) -> u128) -> Cost {
    let state_bytes = trainer.device.usage().live_bytes;
    let exchanged_before = trainer.communicator().counts().bytes();
    let flops = step(&mut trainer);
    let usage = trainer.device.usage();
    Cost {
        state_bytes,
        peak_bytes: usage.peak_bytes,
        arena_bytes: usage.extent_bytes,
        working: trainer.device.working_memory(),
        tasks: trainer.program().tasks.len() as u64,
        flops,
        exchanged_bytes: trainer.communicator().counts().bytes() - exchanged_before,
    }
}
