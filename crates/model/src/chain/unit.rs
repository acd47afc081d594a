//! Units: the links of a chain.

use std::fmt;

use crate::chain::body::Body;
use crate::chain::entry::{Entry, Join};
use crate::chain::head::Head;
use crate::chain::op::Op;
use crate::parameters::ParamId;

/// One link of the chain.
#[derive(Clone, Debug)]
pub struct Unit {
    pub kind: UnitKind,
    /// How the output of the unit before reaches it. The first unit of a chain has none: it reads the batch.
    pub entry: Option<Entry>,
    pub sublayer: Sublayer,
    /// Whether shards each compute a summand: of a body's output, or of the head's softmax.
    pub is_partial: bool,
}

/// The part of a unit behind its entry.
#[derive(Clone, Debug)]
pub enum Sublayer {
    Body(Body),
    Head(Head),
}

/// The sublayers that a unit computes; layers by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitKind {
    Embedding,
    Attention(usize),
    Mlp(usize),
    /// A layer's numbers for the token itself.
    TokenInput(usize),
    /// Attention and MLP side by side.
    Layer(usize),
    Head,
}

impl fmt::Display for UnitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnitKind::Embedding => f.write_str("embedding"),
            UnitKind::Attention(layer) => write!(f, "attention {layer}"),
            UnitKind::Mlp(layer) => write!(f, "mlp {layer}"),
            UnitKind::TokenInput(layer) => write!(f, "token input {layer}"),
            UnitKind::Layer(layer) => write!(f, "layer {layer}"),
            UnitKind::Head => f.write_str("head"),
        }
    }
}

impl Unit {
    /// The body of a unit that is not the head.
    pub fn body(&self) -> &Body {
        match &self.sublayer {
            Sublayer::Body(body) => body,
            Sublayer::Head(_) => panic!("the head has no body"),
        }
    }

    /// Inputs that its entry makes of the stream.
    pub fn input_count(&self) -> usize {
        self.entry.as_ref().map_or(0, |entry| entry.norms.len())
    }

    /// How many times as wide as the stream its output is.
    pub fn output_count(&self) -> usize {
        let Sublayer::Body(body) = &self.sublayer else { return 1 };
        let is_halved = |op: &Op| matches!(op, Op::SideBySide { out, .. } if *out == body.output);
        if body.ops.iter().any(is_halved) { 2 } else { 1 }
    }

    /// Whether it puts something on the residual stream beside its output: the position embeddings do.
    pub fn starts_stream(&self) -> bool {
        matches!(&self.sublayer, Sublayer::Body(body) if body.stream.is_some())
    }

    pub fn join_parameters(&self) -> Vec<ParamId> {
        let join = self.entry.iter().filter_map(|entry| entry.join.as_ref());
        join.flat_map(Join::parameters).collect()
    }

    pub fn entry_parameters(&self) -> Vec<ParamId> {
        self.entry.iter().flat_map(Entry::parameters).collect()
    }

    /// The parameters that it computes with.
    pub fn parameters(&self) -> Vec<ParamId> {
        let sublayer = match &self.sublayer {
            Sublayer::Body(body) => body.parameters(),
            Sublayer::Head(head) => head.parameters(),
        };
        [self.entry_parameters(), sublayer].concat()
    }
}
