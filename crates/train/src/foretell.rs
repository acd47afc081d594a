//! Predicts how long a step would take in another arrangement, before anything is measured: simulates its programs with costs
//! estimated from counts of operations and bytes. Pure: the same input gives the same answer on every rank and in every run.

use std::time::Duration;

use evenkeel_balance::{StagePlace, Staging, UnitCost};
use evenkeel_comm::{Communicator, Link};
use evenkeel_device::{Counts, DType, Device};
use evenkeel_model::{Gradients, LossOptions, Model, ParamSpec, Parameters, RotaryTables, Unit, ZeroStage};
use evenkeel_step::schedule::{Chain, PartSize};
use evenkeel_step::simulate::{Contention, Costs, Unforeseen, simulate};
use evenkeel_step::{Executor, Pipeline, Program, Strategy, Task, Work, WorkFamily, join};

use crate::samples::Samples;

/// Approximate speeds of ranks and the links between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// By rank.
    pub flops_per_s: Vec<f64>,
    /// By rank: memory bandwidth.
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
/// Bytes that an element's norm and its update move: gradient; and weight and moments, too, both ways.
const NORM_BYTES: u64 = 4;
const UPDATE_BYTES: u64 = 28;
/// A candidate must be faster by more than this share than one that takes less memory or fewer parts.
const MARGIN: f64 = 0.01;

/// Simulates the step of one replica on such a micro-batch.
pub fn foretell(
    model: &Model,
    strategy: &Strategy,
    samples: &Samples,
    machine: &Machine,
) -> Result<Foretold, Unforeseen> {
    let (cut, arrangement) = (&strategy.cut, strategy.arrangement);
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
    let timeline = simulate(&programs, &estimate(&shards, &chains, &replica, &programs, &micros, machine))?;
    let candidate = Candidate { parts: arrangement.parts, split_sequence: cut.split_sequence };
    Ok(Foretold { candidate, step_s: timeline.duration_s(), exposed_share: timeline.exposed_share() })
}

/// Estimates the seconds of all tasks of all ranks' programs on these micro-batches. `shards` and `chains` are those of the strategy.
pub fn estimate(
    shards: &[Model],
    chains: &[Chain],
    strategy: &Strategy,
    programs: &[Program],
    micros: &[&Samples],
    machine: &Machine,
) -> Costs {
    let seconds = |(rank, program): (usize, &Program)| {
        let (shard, model) = (&shards[strategy.mesh().shard(rank)], strategy.model(shards, rank));
        let elements: usize = model.buckets.iter().map(|bucket| bucket.len).sum();
        let of_step = |bytes: u64| elements as f64 * bytes as f64 / machine.bytes_per_s[rank];
        let sizes: Vec<Vec<PartSize>> =
            micros.iter().map(|samples| samples.part_sizes(shard, strategy.arrangement.parts)).collect();
        let tasks = counts(&model, &chains[rank], rank, strategy, program, micros);
        let of_task = |(task, counted): (&Task, &TaskCounts)| match task.work {
            Work::MeasureNorm => of_step(NORM_BYTES),
            Work::Update => of_step(UPDATE_BYTES),
            _ => machine.compute_s(rank, &counted.counts, sizes[task.micro.index][task.micro.part].tokens),
        };
        program.tasks.iter().zip(&tasks).map(of_task).collect()
    };
    let seconds: Vec<Vec<f64>> = programs.iter().enumerate().map(seconds).collect();
    let mut costs = Costs::of_tasks(programs, |rank, index, task| match task.exchange {
        Some(exchange) => machine.exchange_s(task, chains[rank].groups[exchange.group.0].ranks.len()),
        None => seconds[rank][index],
    });
    costs.contention = machine.contention;
    costs
}

/// What the units of a model take in the stages of a strategy, if its micro-batches are like these samples.
pub fn staging(model: &Model, strategy: &Strategy, samples: &Samples, machine: &Machine) -> Staging {
    let shards = model.cut(&strategy.cut).expect("a cut that the run has, too");
    let replica = strategy.clone().with_replicas(1, ZeroStage::Nothing).in_stages(1, Pipeline::default());
    let chain = Chain::of(&shards[0], &replica, 0);
    let arrangement = strategy.arrangement.in_parts(1);
    let sizes = samples.part_sizes(&shards[0], 1);
    let rows = sizes[0].tokens;
    let program = arrangement.write(&chain, &[sizes]);
    let tasks = counts(&shards[0], &chain, 0, &replica.arranged(arrangement), &program, &[samples]);
    let state_bytes =
        |unit: &Unit| unit.parameters().iter().map(|id| state_bytes(&shards[0].specs[id.0], strategy)).sum();
    let unit = |unit: &Unit| UnitCost { seconds: 0.0, state_bytes: state_bytes(unit), kept_bytes: 0.0 };
    let mut units: Vec<UnitCost> = shards[0].units.iter().map(unit).collect();
    let first_loss = program.tasks.iter().position(|task| task.work.row().family == WorkFamily::Head);
    for (index, (task, TaskCounts { counts, kept_bytes })) in program.tasks.iter().zip(&tasks).enumerate() {
        let unit = &mut units[task.unit.0];
        unit.seconds += machine.compute_s(0, counts, rows);
        if first_loss.is_none_or(|first| index < first) {
            unit.kept_bytes += *kept_bytes as f64;
        }
    }
    // A unit may free more of the one before it than it keeps.
    units.iter_mut().for_each(|unit| unit.kept_bytes = unit.kept_bytes.max(0.0));
    let (pipeline, micros) = (&strategy.pipeline, strategy.accumulate);
    let kept_micros = pipeline.kept_micros(strategy.pp, micros).into_iter().enumerate();
    let stages =
        kept_micros.map(|(stage, kept_micros)| StagePlace { place: pipeline.place(stage, strategy.pp), kept_micros });
    Staging { stages: stages.collect(), units, micros }
}

/// About what a rank holds of a parameter for a step: its values, and if it is trained, f32 masters, gradients and two moments.
fn state_bytes(spec: &ParamSpec, strategy: &Strategy) -> f64 {
    let values = strategy.dtype.size_bytes();
    let masters = if strategy.dtype == DType::F32 { 0 } else { 4 };
    let moments = 8.0 / if strategy.zero == ZeroStage::Nothing { 1.0 } else { strategy.dp as f64 };
    let of_trained = if spec.is_trained { (4 + masters) as f64 + moments } else { 0.0 };
    spec.shape.iter().product::<usize>() as f64 * (values as f64 + of_trained)
}

/// The first candidate that takes hardly longer than the fastest.
pub fn preferred(foretold: &[Foretold]) -> Option<Foretold> {
    let best_s = foretold.iter().map(|told| told.step_s).min_by(f64::total_cmp)?;
    foretold.iter().find(|told| told.step_s <= best_s * (1.0 + MARGIN)).copied()
}

impl Machine {
    /// Seconds that kernels with these counts take on so many rows.
    fn compute_s(&self, rank: usize, counts: &Counts, rows: usize) -> f64 {
        let slowness = 1.0 + self.half_speed_rows / rows.max(1) as f64;
        let of_kernels = counts.0.values().map(|count| {
            let work_s = slowness * count.flops as f64 / self.flops_per_s[rank];
            work_s.max(count.bytes as f64 / self.bytes_per_s[rank]) + count.launches as f64 * self.launch.as_secs_f64()
        });
        of_kernels.sum()
    }

    fn exchange_s(&self, task: &Task, members: usize) -> f64 {
        let bytes = task.exchange.map_or(0, |exchange| exchange.bytes);
        self.link.duration_of(task.work.exchange_kind(), bytes, members).as_secs_f64()
            + bytes as f64 / self.moved_bytes_per_s
    }
}

/// The counts of each task, from a dry run.
fn counts(
    shard: &Model,
    chain: &Chain,
    rank: usize,
    strategy: &Strategy,
    program: &Program,
    micros: &[&Samples],
) -> Vec<TaskCounts> {
    let (dtype, parts) = (strategy.dtype, strategy.arrangement.parts);
    let (device, communicator) = (Device::dry(), Communicator::dry(rank, strategy.ranks()));
    let queue = device.compute();
    let parameters = Parameters::allocate(shard, dtype, strategy.zero_sharding(rank), queue);
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
    device.take_counts();
    let mut live_bytes = device.usage().live_bytes;
    let mut tasks = vec![TaskCounts::default(); program.tasks.len()];
    let options = LossOptions { smoothing: 0.0, scale: 1.0 };
    executor.run_watched(program, &batches, options, None, |index| {
        let before = std::mem::replace(&mut live_bytes, device.usage().live_bytes);
        tasks[index] = TaskCounts { counts: device.take_counts(), kept_bytes: live_bytes as i64 - before as i64 };
    });
    tasks
}

/// A task's kernels, and by how much memory in use has grown behind it.
#[derive(Clone, Default)]
struct TaskCounts {
    counts: Counts,
    kept_bytes: i64,
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
