//! Programs: the tasks of a step in order, with the values that each reads, writes and frees.

use std::fmt;

use smallvec::SmallVec;

use crate::work::{BucketIdx, Chunk, Lane, Work};

/// A unit's place in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitIdx(pub usize);

/// Samples that run through the chain together: a part of a micro-batch, or all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Micro {
    pub index: usize,
    pub part: usize,
}

/// A group of ranks, by its place in [`Program::groups`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupIdx(pub usize);

/// The kind of a value, which belongs to one unit and one part of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueKind {
    /// The residual stream behind a unit's entry.
    Stream,
    /// This rank's rows of the normalised stream.
    Normalised,
    /// All rows of the normalised stream.
    NormalisedGathered,
    /// A body's output, or this rank's summand of it.
    Output,
    /// The sum of the ranks' outputs.
    OutputReduced,
    /// Values that a body's forward keeps for its backward.
    Saved,
    Logits(Chunk),
    /// Statistics of the softmax: of this rank's logits, and of all ranks'.
    Stats(Chunk),
    StatsGathered(Chunk),
    StreamGradient,
    StreamGradientGathered,
    /// The normalised stream's gradient: this rank's summand, or the sum.
    NormalisedGradient,
    NormalisedGradientReduced,
    OutputGradient,
    OutputGradientGathered,
    /// The stream before a stage's first unit with everything added: what leaves the stage below and arrives here. And its gradient.
    Passed,
    PassedGradient,
    /// Values that the addition behind a stage keeps for its backward.
    Joined,
    /// Values that the input half of backward keeps for the weight half.
    WeightInputs,
    /// Marks that the memory of a bucket's gradients is free again.
    GradientsReduced(BucketIdx),
    ParametersGathered(BucketIdx),
    /// A unit's parameters that this rank computes with and other ranks keep.
    Migrated,
    /// The sums of their gradients, until they are returned.
    MigratedGradients,
    /// The squared norm of the gradients that this rank keeps, summed over so many groups.
    SquaredNorm(usize),
    /// The squared norms of adapted weights' rows, or this rank's summands of them.
    SquaredRows,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Value {
    pub kind: ValueKind,
    pub unit: UnitIdx,
    pub micro: Micro,
}

impl Value {
    /// The pass that brings it from another stage, if one does.
    pub(crate) fn arrives_by(&self) -> Option<Work> {
        match self.kind {
            ValueKind::Passed => Some(Work::Pass),
            ValueKind::PassedGradient => Some(Work::PassGradient),
            _ => None,
        }
    }
}

/// Micro-batches whose streams, or their gradients, may have arrived from a stage and not been read yet.
pub const ROOMS: usize = 2;

/// An exchange in a group. All members name the same kind of work and, unless its row says otherwise, the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    pub group: GroupIdx,
    /// The size of the whole value that is reduced or gathered. For a migration, the bytes that this member sends or receives,
    /// whichever is more.
    pub bytes: u64,
}

/// The values of a task, mostly one or two. Long programs have millions of these.
pub type Values = SmallVec<[Value; 2]>;

/// One task. It frees the values that no later task reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    pub work: Work,
    pub unit: UnitIdx,
    pub micro: Micro,
    pub reads: Values,
    pub writes: Values,
    pub frees: Values,
    /// Present only on the lanes of exchanges.
    pub exchange: Option<Exchange>,
}

impl Task {
    /// A value of the task's unit and micro-batch.
    pub fn value(&self, kind: ValueKind) -> Value {
        Value { kind, unit: self.unit, micro: self.micro }
    }

    /// Whether it is the receiving side of a pass.
    pub(crate) fn receives(&self) -> bool {
        self.work.lane() == Lane::Pass && self.reads.is_empty()
    }

    /// The first value of these kinds that it reads, if any.
    pub fn read(&self, kinds: &[ValueKind]) -> Option<Value> {
        self.reads.iter().find(|value| kinds.contains(&value.kind)).copied()
    }
}

/// Ranks that exchange values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Members {
    pub name: String,
    pub ranks: Vec<usize>,
}

/// The tasks of one rank, in order. A compute task waits for the exchanges whose values it reads, an exchange for every
/// compute task before it. What arrives from another stage lies in one of [`ROOMS`] rooms, which micro-batches take in turn: it
/// waits only for the compute task that frees what was there before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    pub tasks: Vec<Task>,
    pub groups: Vec<Members>,
    /// Whether compute tasks wait for every exchange before them, so that nothing overlaps.
    pub blocking: bool,
}

/// A program's tasks, and the groups that they meet in: its own, or those of its members that are looked at.
#[derive(Clone, Copy, Debug)]
pub struct ProgramView<'a> {
    pub tasks: &'a [Task],
    pub groups: &'a [Members],
    pub blocking: bool,
}

impl Program {
    /// The place of the first task of the tail, which follows the gradients of all micro-batches. The end of the program if it
    /// has no tail.
    pub fn tail(&self) -> usize {
        self.tasks.iter().rposition(|task| !task.work.is_of_tail()).map_or(0, |last| last + 1)
    }

    pub fn view(&self) -> ProgramView<'_> {
        ProgramView { tasks: &self.tasks, groups: &self.groups, blocking: self.blocking }
    }

    /// The places of exchanges that a compute task waits for, each with whether a heavy task runs before that one.
    pub fn awaited(&self) -> Vec<(usize, bool)> {
        let exchanges = self.tasks.iter().enumerate().filter(|(_, task)| task.exchange.is_some());
        let awaited = exchanges.filter_map(|(index, exchange)| {
            let behind = &self.tasks[index + 1..];
            let waits = |task: &Task| {
                let reads = exchange.writes.iter().any(|value| task.reads.contains(value));
                task.exchange.is_none() && (reads || self.view().waits_for_all(task, exchange.work.lane()))
            };
            let first = behind.iter().position(waits)?;
            Some((index, behind[..first].iter().any(|task| task.work.is_heavy())))
        });
        awaited.collect()
    }
}

impl ProgramView<'_> {
    /// Whether a compute task waits for every exchange of this lane before it: all do in a blocking program, and the tail does. What
    /// another stage passes is awaited where it is read.
    pub(crate) fn waits_for_all(&self, task: &Task, lane: Lane) -> bool {
        task.work.is_of_tail() || self.blocking && lane != Lane::Pass
    }
}

impl fmt::Display for Micro {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.part)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({}, {})", self.kind, self.unit.0, self.micro)
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({}, {})", self.work, self.unit.0, self.micro)?;
        for (verb, values) in [("reads", &self.reads), ("writes", &self.writes), ("frees", &self.frees)] {
            if !values.is_empty() {
                let list: Vec<String> = values.iter().map(Value::to_string).collect();
                write!(f, "  {verb} {}", list.join(" "))?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tasks.iter().try_for_each(|task| writeln!(f, "{task}"))
    }
}
