//! Kinds of work: one table of what each is called, where it runs, and what ranks must agree on.
//!
//! To add an exchange, add a variant to [`Work`] and a row to its table here, and execute it in `execute`.

/// A rank's in-order queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    Compute,
    Comm,
}

impl Lane {
    pub const ALL: [Lane; 2] = [Lane::Compute, Lane::Comm];

    pub fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::Comm => "comm",
        }
    }

    /// Whether what runs on it meets other ranks.
    pub fn exchanges(self) -> bool {
        self != Lane::Compute
    }
}

/// Some rows that the head treats at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Chunk(pub usize);

/// Parameters whose values and gradients are moved together, by the rank's own numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BucketIdx(pub usize);

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A unit's entry: the output of the unit before joins the stream, which is normalised.
    Enter,
    /// A unit's body.
    Forward,
    /// The entry's norms again, from the stream.
    Normalise,
    /// A unit's body again.
    Recompute,
    /// The head's logits of a chunk, and what they say of the softmax.
    Logits(Chunk),
    /// A chunk's losses, and their gradients down to the head's input.
    Loss(Chunk),
    /// A chunk's losses alone.
    Evaluate(Chunk),
    /// The gradients of a body's inputs.
    BackwardInput,
    /// The gradients of a body's weights.
    BackwardWeight,
    /// The gradients of a unit's entry.
    BackwardEnter,
    /// The squared norm of the gradients that a rank keeps.
    MeasureNorm,
    /// The optimizer's update. Rules that look at whole parameters exchange something in it.
    Update,
    /// The value that the task reads, summed over the tensor-parallel group.
    AllReduce,
    /// The same, but each rank gets its own rows of the sum.
    ReduceScatter,
    /// The rows of all ranks.
    AllGather,
    /// The gradients of parameters that several ranks hold, summed over those.
    SumGradients(BucketIdx),
    /// A bucket's gradients, summed over the data-parallel group; where they are split, each rank keeps its part.
    ReduceGradients(BucketIdx),
    /// A bucket's parameters, of which the ranks of the data-parallel group keep a part each.
    GatherParameters(BucketIdx),
    /// A unit's parameters, from the ranks of the tensor-parallel group that keep them to those that compute with them.
    Migrate,
    /// A unit's gradients, from the ranks that computed them to those that keep its parameters, who add them up.
    Return,
    /// The squared norm, summed over ranks that keep other gradients.
    SumNorm,
    /// A bucket's values behind an update, of which the ranks of the data-parallel group have computed a part each.
    GatherUpdated(BucketIdx),
}

/// What kinds of work have in common for a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
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
}

/// What a kind of work is done for.
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
pub struct Row {
    pub name: &'static str,
    pub lane: Lane,
    pub family: Family,
    pub scope: Scope,
    /// Whether the members of an exchange move as many bytes each. Otherwise whoever moves most says how long it takes.
    pub moves_alike: bool,
    /// Whether it belongs to the tail of a step: what follows the gradients of all micro-batches.
    pub is_of_tail: bool,
}

impl Row {
    const fn compute(name: &'static str, family: Family, scope: Scope) -> Row {
        Row { name, lane: Lane::Compute, family, scope, moves_alike: true, is_of_tail: false }
    }

    const fn exchange(name: &'static str, family: Family, scope: Scope) -> Row {
        Row { lane: Lane::Comm, ..Row::compute(name, family, scope) }
    }

    const fn of_tail(self) -> Row {
        Row { is_of_tail: true, ..self }
    }
}

impl Work {
    #[rustfmt::skip]
    pub fn row(self) -> Row {
        match self {
            Work::Enter               => Row::compute("enter",            Family::Entry,          Scope::Part),
            Work::Forward             => Row::compute("forward",          Family::Forward,        Scope::Part),
            Work::Normalise           => Row::compute("normalise again",  Family::Entry,          Scope::Part),
            Work::Recompute           => Row::compute("recompute",        Family::Recompute,      Scope::Part),
            Work::Logits(chunk)       => Row::compute("logits",           Family::Head,           Scope::Chunk(chunk)),
            Work::Loss(chunk)         => Row::compute("loss",             Family::Head,           Scope::Chunk(chunk)),
            Work::Evaluate(chunk)     => Row::compute("evaluate",         Family::Head,           Scope::Chunk(chunk)),
            Work::BackwardInput       => Row::compute("backward input",   Family::BackwardInput,  Scope::Part),
            Work::BackwardWeight      => Row::compute("backward weight",  Family::BackwardWeight, Scope::Part),
            Work::BackwardEnter       => Row::compute("backward enter",   Family::Entry,          Scope::Part),
            Work::MeasureNorm         => Row::compute("measure norm",     Family::Update,         Scope::Step).of_tail(),
            Work::Update              => Row::compute("update",           Family::Update,         Scope::Step).of_tail(),
            Work::AllReduce           => Row::exchange("all-reduce",      Family::Reduce,         Scope::Part),
            Work::ReduceScatter       => Row::exchange("reduce-scatter",  Family::Reduce,         Scope::Part),
            Work::AllGather           => Row::exchange("all-gather",      Family::Gather,         Scope::Part),
            Work::SumGradients(b)     => Row::exchange("sum gradients",   Family::Reduce,         Scope::Bucket(b)),
            Work::ReduceGradients(b)  => Row::exchange("reduce gradients", Family::Reduce,        Scope::Bucket(b)),
            Work::GatherParameters(b) => Row::exchange("gather parameters", Family::Gather,       Scope::Bucket(b)),
            Work::Migrate => Row { moves_alike: false, ..Row::exchange("migrate", Family::Migrate, Scope::Unit) },
            Work::Return => Row { moves_alike: false, ..Row::exchange("return", Family::Migrate,  Scope::Unit) },
            Work::SumNorm             => Row::exchange("sum norm",        Family::Reduce,         Scope::Step).of_tail(),
            Work::GatherUpdated(b)    => Row::exchange("gather updated",  Family::Gather,         Scope::Bucket(b)).of_tail(),
        }
    }

    pub fn lane(self) -> Lane {
        self.row().lane
    }

    pub fn is_of_tail(self) -> bool {
        self.row().is_of_tail
    }

    /// Whether an exchange can hide behind it: norms and additions are over at once.
    pub fn is_heavy(self) -> bool {
        self.lane() == Lane::Compute && self.row().family != Family::Entry
    }
}
