//! Predicts how long a step would take in another arrangement, before anything is measured: simulates its programs with costs
//! estimated from counts of operations and bytes. Pure: the same input gives the same answer on every rank and in every run.

use std::time::Duration;

use evenkeel_comm::{Communicator, ExchangeKind, Link};
use evenkeel_device::{Counts, DType, Device};
use evenkeel_model::{Gradients, LossOptions, Model, Parameters, RotaryTables, ZeroSharding, ZeroStage};
use evenkeel_step::schedule::{Chain, PartSize};
use evenkeel_step::simulate::{Contention, Costs, Unforeseen, simulate};
use evenkeel_step::{Executor, Pipeline, Program, Strategy, Task, Work, join};

use crate::samples::Samples;

/// Approximate speeds of ranks and the links between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// By shard.
    pub flops_per_s: Vec<f64>,
    /// By shard: memory bandwidth.
    pub bytes_per_s: Vec<f64>,
    /// Overhead per kernel launch.
    pub launch: Duration,
    /// Products of so many rows take twice as long per row as large ones.
    pub half_speed_rows: f64,
    pub link: Link,
    /// Bytes that ranks move per second for an exchange, in addition to the link's own time.
    pub moved_bytes_per_s: f64,
    pub contention: Contention,
}

/// An arrangement of steps: the number of parts of a micro-batch, and whether the stream is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub parts: usize,
    pub split_sequence: bool,
}

/// The simulation's result for a candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Foretold {
    pub candidate: Candidate,
    pub step_s: f64,
    /// The largest share of the step in which a rank exchanges and does not compute.
    pub exposed_share: f64,
}

/// Units of a model that are simulated, beside the head: layers are alike, and this many show how they overlap.
const MOST_UNITS: usize = 17;
/// A candidate must be faster by more than this share than one that takes less memory or fewer parts.
const MARGIN: f64 = 0.01;

/// Simulates the step of one replica on such a micro-batch.
pub fn foretell(
    model: &Model,
    strategy: &Strategy,
    samples: &Samples,
    machine: &Machine,
) -> Result<Foretold, Unforeseen> {
    let (cut, dtype, arrangement) = (&strategy.cut, strategy.dtype, strategy.arrangement);
    let shards = model.cut(cut).expect("a cut that the run has, too");
    // A shortened model may have lost its trained units, so everything counts as trained.
    let shortened = |shard: &Model| shard.shortened(MOST_UNITS).training(|_, _| true);
    let shards: Vec<Model> = shards.iter().map(shortened).collect();
    let replica = strategy.clone().with_replicas(1, ZeroStage::Nothing).in_stages(1, Pipeline::default());
    let chains = Chain::all(&shards, &replica);
    // An arrangement that begins the next micro-batch early needs a next one.
    let micros = vec![samples; if arrangement.ahead { 2 } else { 1 }];
    let sizes: Vec<Vec<PartSize>> =
        micros.iter().map(|samples| samples.part_sizes(&shards[0], arrangement.parts)).collect();
    // The tail after the gradients takes as long for every candidate.
    let programs: Vec<Program> = chains.iter().map(|chain| arrangement.write(chain, &sizes)).collect();
    let mut seconds = Vec::new();
    for (rank, program) in programs.iter().enumerate() {
        let counts = counts(&shards[rank], &chains[rank], rank, program, arrangement.parts, &micros, dtype);
        let of_task = |(task, counts): (&Task, &Counts)| {
            let rows = sizes[task.micro.index][task.micro.part].tokens;
            machine.compute_s(rank, counts, rows)
        };
        seconds.push(program.tasks.iter().zip(&counts).map(of_task).collect::<Vec<f64>>());
    }
    let mut costs = Costs::of_tasks(&programs, |rank, index, task| match task.exchange {
        Some(_) => machine.exchange_s(task, shards.len()),
        None => seconds[rank][index],
    });
    costs.contention = machine.contention;
    let timeline = simulate(&programs, &costs)?;
    let candidate = Candidate { parts: arrangement.parts, split_sequence: cut.split_sequence };
    Ok(Foretold { candidate, step_s: timeline.duration_s(), exposed_share: timeline.exposed_share() })
}

/// By unit: the seconds that a rank of one tensor-parallel group takes for it in a step on such a micro-batch.
pub fn unit_seconds(model: &Model, strategy: &Strategy, samples: &Samples, machine: &Machine) -> Vec<f64> {
    let shards = model.cut(&strategy.cut).expect("a cut that the run has, too");
    let replica = strategy.clone().with_replicas(1, ZeroStage::Nothing).in_stages(1, Pipeline::default());
    let chain = Chain::of(&shards[0], &replica, 0);
    let arrangement = strategy.arrangement.in_parts(1);
    let sizes = samples.part_sizes(&shards[0], 1);
    let rows = sizes[0].tokens;
    let program = arrangement.write(&chain, &[sizes]);
    let counts = counts(&shards[0], &chain, 0, &program, 1, &[samples], strategy.dtype);
    let mut seconds = vec![0.0; model.units.len()];
    for (task, counts) in program.tasks.iter().zip(&counts) {
        seconds[task.unit.0] += machine.compute_s(0, counts, rows);
    }
    seconds
}

/// The first candidate that takes hardly longer than the fastest.
pub fn preferred(foretold: &[Foretold]) -> Option<Foretold> {
    let best_s = foretold.iter().map(|told| told.step_s).min_by(f64::total_cmp)?;
    foretold.iter().find(|told| told.step_s <= best_s * (1.0 + MARGIN)).copied()
}

impl Machine {
    /// Seconds that kernels with these counts take on so many rows.
    fn compute_s(&self, shard: usize, counts: &Counts, rows: usize) -> f64 {
        let slowness = 1.0 + self.half_speed_rows / rows.max(1) as f64;
        let of_kernels = counts.0.values().map(|count| {
            let work_s = slowness * count.flops as f64 / self.flops_per_s[shard];
            work_s.max(count.bytes as f64 / self.bytes_per_s[shard]) + count.launches as f64 * self.launch.as_secs_f64()
        });
        of_kernels.sum()
    }

    fn exchange_s(&self, task: &Task, members: usize) -> f64 {
        let kind = match task.work {
            Work::ReduceScatter => ExchangeKind::ReduceScatter,
            Work::AllGather => ExchangeKind::AllGather,
            Work::AllReduce | Work::SumGradients(_) => ExchangeKind::AllReduce,
            other => unreachable!("a lone replica without ZeRO does not {other:?}"),
        };
        let bytes = task.exchange.map_or(0, |exchange| exchange.bytes);
        self.link.duration_of(kind, bytes, members).as_secs_f64() + bytes as f64 / self.moved_bytes_per_s
    }
}

/// The counts of each task, from a dry run.
fn counts(
    shard: &Model,
    chain: &Chain,
    rank: usize,
    program: &Program,
    parts: usize,
    micros: &[&Samples],
    dtype: DType,
) -> Vec<Counts> {
    let (device, communicator) = (Device::dry(), Communicator::dry(rank, chain.groups[0].ranks.len()));
    let queue = device.compute();
    let parameters = Parameters::allocate(shard, dtype, ZeroSharding::NONE, queue);
    let gradients = Gradients::new(&parameters, queue);
    let longest = micros.iter().map(|samples| samples.tokens(shard.config.input)).max().unwrap_or(1);
    let tables = RotaryTables::new(&shard.config, queue, longest);
    let batches = |samples: &&Samples| samples.parts(parts).iter().map(|it| it.batch(shard, dtype, queue)).collect();
    let batches: Vec<Vec<_>> = micros.iter().map(batches).collect();
    let groups = join(&communicator, &chain.groups);
    let executor = Executor {
        model: shard,
        device: &device,
        parameters: &parameters,
        tables: &tables,
        gradients: &gradients,
        groups: &groups,
        migration: None,
        pruning: None,
    };
    let mut before = device.counts();
    let mut counts = vec![Counts::default(); program.tasks.len()];
    let options = LossOptions { smoothing: 0.0, scale: 1.0 };
    executor.run_watched(program, &batches, options, None, |index| {
        let now = device.counts();
        counts[index] = difference(&now, &before);
        before = now;
    });
    counts
}

fn difference(now: &Counts, before: &Counts) -> Counts {
    let mut counts = now.clone();
    for (name, count) in &mut counts.0 {
        if let Some(before) = before.0.get(name) {
            count.launches -= before.launches;
            count.flops -= before.flops;
            count.bytes -= before.bytes;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_is_hardly_slower_than_the_fastest_is_preferred() {
        let told = |parts: usize, step_s: f64| Foretold {
            candidate: Candidate { parts, split_sequence: true },
            step_s,
            exposed_share: 0.0,
        };
        let preferred = |steps: &[f64]| {
            let all: Vec<Foretold> = steps.iter().enumerate().map(|(index, &step_s)| told(index + 1, step_s)).collect();
            preferred(&all).map(|told| told.candidate.parts)
        };
        assert_eq!(preferred(&[1.0, 1.0, 0.5]), Some(3));
        assert_eq!(preferred(&[1.0, 0.995, 0.992]), Some(1));
        assert_eq!(preferred(&[1.0, 0.9, 0.895]), Some(2));
        assert_eq!(preferred(&[]), None);
    }
}
