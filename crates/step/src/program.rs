//! Programs: what is computed in a step, in which order, from which values, and when each is let go.

use std::fmt;

/// A unit's place in the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitIdx(pub usize);

/// A micro-batch of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Micro(pub usize);

/// What a task computes. The chain's first unit has no entry, and its last link is the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A unit's entry: the output of the unit before joins the stream, which is normalised.
    Enter,
    /// A unit's body.
    Forward,
    /// The entry's norms and the body again, from the stream.
    Recompute,
    /// The head: losses, and their gradients down to the last unit's output.
    Loss,
    /// The gradients of a body's inputs.
    BackwardInput,
    /// The gradients of a body's weights.
    BackwardWeight,
    /// The gradients of a unit's entry.
    BackwardEnter,
}

/// What a value is, of one unit and one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueKind {
    /// The residual stream behind a unit's entry.
    Stream,
    /// The normalised stream, which a body reads.
    Normalised,
    /// A body's output.
    Output,
    /// What a body's forward leaves for its backward.
    Saved,
    /// Gradients of the above.
    StreamGradient,
    NormalisedGradient,
    OutputGradient,
    /// What the input half of backward leaves for the weight half.
    WeightInputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Value {
    pub kind: ValueKind,
    pub unit: UnitIdx,
    pub micro: Micro,
}

/// One task. It frees what nothing after it reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    pub work: Work,
    pub unit: UnitIdx,
    pub micro: Micro,
    pub reads: Vec<Value>,
    pub writes: Vec<Value>,
    pub frees: Vec<Value>,
}

/// The tasks of one rank, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    pub tasks: Vec<Task>,
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({}, {})", self.kind, self.unit.0, self.micro.0)
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({}, {})", self.work, self.unit.0, self.micro.0)?;
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
