//! Kinds of work: one table of their names, their lanes, and what ranks must agree on.
//!
//! An exchange is a variant of [`Work`] and a row of the table here; `execute` runs it, or the trainer if it is of the tail.

use evenkeel_comm::ExchangeKind;

/// A rank's in-order queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    Compute,
    Comm,
    /// From stage to stage. A partner that is late holds up nothing else.
    Pass,
}

impl Lane {
    pub const ALL: [Lane; 3] = [Lane::Compute, Lane::Comm, Lane::Pass];

    pub fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::Comm => "comm",
            Lane::Pass => "pass",
        }
    }

    /// Whether its tasks meet other ranks.
    pub fn exchanges(self) -> bool {
        self != Lane::Compute
    }
}

/// Rows that the head treats at a time, by their place among the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Chunk(pub usize);

/// A bucket: parameters whose values and gradients are moved together. Each rank numbers its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BucketIdx(pub usize);

/// The work of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// A unit's entry: the output of the unit before joins the stream, which is normalised.
    Enter,
    /// The entry of a stage's first unit: the stream that has arrived is normalised.
    Arrive,
    /// The addition behind a stage's last unit, which is that of the next unit's entry.
    Join,
    /// A unit's body.
    Forward,
    /// The entry's norms again, from the stream.
    Normalise,
    /// A unit's body again.
    Recompute,
    /// The head's logits of a chunk, and their statistics of the softmax.
    Logits(Chunk),
    /// A chunk's losses, and their gradients down to the head's input.
    Loss(Chunk),
    /// Only a chunk's losses.
    Evaluate(Chunk),
    /// The gradients of a body's inputs.
    BackwardInput,
    /// The gradients of a body's weights.
    BackwardWeight,
    /// The gradients of a unit's entry.
    BackwardEnter,
    /// The gradients of the addition behind a stage.
    BackwardJoin,
    /// The squared norm of the gradients that a rank keeps.
    MeasureNorm,
    /// The optimizer's update. Rules that need whole parameters exchange within it.
    Update,
    /// The value that the task reads, summed over the tensor-parallel group.
    AllReduce,
    /// The same, but each rank gets its own rows of the sum.
    ReduceScatter,
    /// The rows of all ranks.
    AllGather,
    /// The statistics of a chunk's logits, from all ranks that have some of its columns.
    GatherStats(Chunk),
    /// The gradients of parameters that several ranks hold, summed over those ranks.
    SumGradients(BucketIdx),
    /// A bucket's gradients, summed over the data-parallel group; if they are split, each rank keeps its part.
    ReduceGradients(BucketIdx),
    /// A bucket's parameters, from the ranks of the data-parallel group, which each keep a part.
    GatherParameters(BucketIdx),
    /// The stream before a unit, from the stage below to the one that begins with the unit.
    Pass,
    /// Its gradient, back.
    PassGradient,
    /// A unit's parameters, from the ranks of the tensor-parallel group that keep them to those that compute with them.
    Migrate,
    /// A unit's gradients, from the ranks that computed them to those that keep its parameters and add them up.
    Return,
    /// The squared norm, summed over ranks that keep different gradients.
    SumNorm,
    /// A bucket's values after an update, from the ranks of the data-parallel group, which each updated a part: for the next step
    /// or, if values are split, to measure rows with them.
    GatherUpdated(BucketIdx),
    /// The squared norms of adapted weights' rows after an update, which DoRA divides by.
    MeasureRows,
    /// Those of which ranks have summands, summed: of layers whose inputs are cut over the tensor-parallel group and, if values are
    /// split, over the data-parallel group.
    SumRows(BucketIdx),
}

/// Groups of similar work, for readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkFamily {
    Entry,
    Forward,
    Recompute,
    Head,
    BackwardInput,
    BackwardWeight,
    Update,
    Reduce,
    Gather,
    Migrate,
    Pass,
}

/// The extent of a kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A unit and a part of a micro-batch.
    Part,
    /// The same, and a chunk of the head's rows.
    Chunk(Chunk),
    /// A bucket of parameters.
    Bucket(BucketIdx),
    /// A unit, for all micro-batches together.
    Unit,
    /// The whole step.
    Step,
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct WorkRow {
    pub name: &'static str,
    pub lane: Lane,
    pub family: WorkFamily,
    pub scope: Scope,
    /// Whether the members of an exchange each move the same bytes. Otherwise the member that moves most determines its time.
    pub moves_alike: bool,
    /// Whether it belongs to the tail of a step, which follows the gradients of all micro-batches.
    pub is_of_tail: bool,
}

impl WorkRow {
    const fn compute(name: &'static str, family: WorkFamily, scope: Scope) -> WorkRow {
        WorkRow { name, lane: Lane::Compute, family, scope, moves_alike: true, is_of_tail: false }
    }

    const fn exchange(name: &'static str, family: WorkFamily, scope: Scope) -> WorkRow {
        WorkRow { lane: Lane::Comm, ..WorkRow::compute(name, family, scope) }
    }

    const fn pass(name: &'static str) -> WorkRow {
        WorkRow { lane: Lane::Pass, ..WorkRow::compute(name, WorkFamily::Pass, Scope::Part) }
    }

    const fn of_tail(self) -> WorkRow {
        WorkRow { is_of_tail: true, ..self }
    }
}

impl Work {
    #[rustfmt::skip]
    pub fn row(self) -> WorkRow {
        match self {
            Work::Enter               => WorkRow::compute("enter",            WorkFamily::Entry,          Scope::Part),
            Work::Arrive              => WorkRow::compute("arrive",           WorkFamily::Entry,          Scope::Part),
            Work::Join                => WorkRow::compute("join",             WorkFamily::Entry,          Scope::Part),
            Work::Forward             => WorkRow::compute("forward",          WorkFamily::Forward,        Scope::Part),
            Work::Normalise           => WorkRow::compute("normalise again",  WorkFamily::Entry,          Scope::Part),
            Work::Recompute           => WorkRow::compute("recompute",        WorkFamily::Recompute,      Scope::Part),
            Work::Logits(chunk)       => WorkRow::compute("logits",           WorkFamily::Head,           Scope::Chunk(chunk)),
            Work::Loss(chunk)         => WorkRow::compute("loss",             WorkFamily::Head,           Scope::Chunk(chunk)),
            Work::Evaluate(chunk)     => WorkRow::compute("evaluate",         WorkFamily::Head,           Scope::Chunk(chunk)),
            Work::BackwardInput       => WorkRow::compute("backward input",   WorkFamily::BackwardInput,  Scope::Part),
            Work::BackwardWeight      => WorkRow::compute("backward weight",  WorkFamily::BackwardWeight, Scope::Part),
            Work::BackwardEnter       => WorkRow::compute("backward enter",   WorkFamily::Entry,          Scope::Part),
            Work::BackwardJoin        => WorkRow::compute("backward join",    WorkFamily::Entry,          Scope::Part),
            Work::MeasureNorm         => WorkRow::compute("measure norm",     WorkFamily::Update,         Scope::Step).of_tail(),
            Work::Update              => WorkRow::compute("update",           WorkFamily::Update,         Scope::Step).of_tail(),
            Work::AllReduce           => WorkRow::exchange("all-reduce",      WorkFamily::Reduce,         Scope::Part),
            Work::ReduceScatter       => WorkRow::exchange("reduce-scatter",  WorkFamily::Reduce,         Scope::Part),
            Work::AllGather           => WorkRow::exchange("all-gather",      WorkFamily::Gather,         Scope::Part),
            Work::GatherStats(chunk)  => WorkRow::exchange("gather stats",    WorkFamily::Gather,         Scope::Chunk(chunk)),
            Work::SumGradients(b)     => WorkRow::exchange("sum gradients",   WorkFamily::Reduce,         Scope::Bucket(b)),
            Work::ReduceGradients(b)  => WorkRow::exchange("reduce gradients", WorkFamily::Reduce,        Scope::Bucket(b)),
            Work::GatherParameters(b) => WorkRow::exchange("gather parameters", WorkFamily::Gather,       Scope::Bucket(b)),
            Work::Pass                => WorkRow::pass("pass"),
            Work::PassGradient        => WorkRow::pass("pass gradient"),
            Work::Migrate => WorkRow { moves_alike: false, ..WorkRow::exchange("migrate", WorkFamily::Migrate, Scope::Unit) },
            Work::Return => WorkRow { moves_alike: false, ..WorkRow::exchange("return", WorkFamily::Migrate,  Scope::Unit) },
            Work::SumNorm             => WorkRow::exchange("sum norm",        WorkFamily::Reduce,         Scope::Step).of_tail(),
            Work::GatherUpdated(b)    => WorkRow::exchange("gather updated",  WorkFamily::Gather,         Scope::Bucket(b)).of_tail(),
            Work::MeasureRows         => WorkRow::compute("measure rows",     WorkFamily::Update,         Scope::Step).of_tail(),
            Work::SumRows(b)          => WorkRow::exchange("sum rows",        WorkFamily::Reduce,         Scope::Bucket(b)).of_tail(),
        }
    }

    pub fn lane(self) -> Lane {
        self.row().lane
    }

    pub fn is_of_tail(self) -> bool {
        self.row().is_of_tail
    }

    /// How its bytes move, if it is an exchange.
    pub fn exchange_kind(self) -> ExchangeKind {
        match self {
            Work::ReduceScatter => ExchangeKind::ReduceScatter,
            Work::Pass | Work::PassGradient => ExchangeKind::Send,
            Work::Migrate | Work::Return => ExchangeKind::Redistribute,
            work if work.row().family == WorkFamily::Gather => ExchangeKind::AllGather,
            _ => ExchangeKind::AllReduce,
        }
    }

    /// Whether an exchange can hide behind it: norms and additions are over at once.
    pub fn is_heavy(self) -> bool {
        self.lane() == Lane::Compute && self.row().family != WorkFamily::Entry
    }
}
