//! The measurements that ranks report of a step, and the widths of work that they refer to.

use evenkeel_widths::{Dim, Widths};
use serde::{Deserialize, Serialize};

/// A kind of work with a dim of its own to divide it by. A reduction follows each, so each is balanced by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    Attention,
    Mlp,
    /// Attention and MLP side by side: both dims by the same shares.
    Layer,
    /// Logits over the vocabulary, their loss, and the embedding.
    Head,
    /// Norms and residual sums.
    Stream,
}

/// One value for each class.
pub(crate) type ByClass<T> = [T; Class::ALL.len()];

impl Class {
    pub const ALL: [Class; 5] = [Class::Attention, Class::Mlp, Class::Layer, Class::Head, Class::Stream];

    pub fn name(self) -> &'static str {
        match self {
            Class::Attention => "attention",
            Class::Mlp => "mlp",
            Class::Layer => "layer",
            Class::Head => "head",
            Class::Stream => "stream",
        }
    }

    /// Whether a rank can prune its products.
    pub fn is_prunable(self) -> bool {
        matches!(self, Class::Attention | Class::Mlp | Class::Layer)
    }

    /// The dim that divides its work.
    pub fn dim(self) -> Dim {
        match self {
            Class::Attention => Dim::Heads,
            Class::Mlp | Class::Layer => Dim::Columns,
            Class::Head => Dim::Classes,
            Class::Stream => Dim::Tokens,
        }
    }
}

/// The classes whose work a dim divides.
pub(crate) fn classes(dim: Dim) -> impl Iterator<Item = Class> {
    Class::ALL.into_iter().filter(move |class| class.dim() == dim)
}

/// The width of each rank if all had the same.
pub(crate) fn even_width(widths: &Widths, class: Class) -> f64 {
    widths.total(class.dim()) as f64 / widths.shards() as f64
}

/// The width that a rank computes with, after pruning.
pub(crate) fn worked_width(widths: &Widths, class: Class, gammas: &[f64], rank: usize) -> f64 {
    let width = widths.of(class.dim())[rank] as f64;
    if class.is_prunable() { width * (1.0 - gammas[rank]) } else { width }
}

/// How a rank works on a class besides the width that is left.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Manner {
    /// Whether its work differs from its home.
    pub migrates: bool,
    /// The width that it prunes some of; 0 if it prunes nothing.
    pub pruned_of: f64,
}

/// One rank's step. Compute times exclude waits for other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// By class.
    pub compute_s: [f64; Class::ALL.len()],
    /// Seconds in which a task could have run, no exchange was under way, and nothing ran.
    pub late_s: f64,
    /// Seconds in which the compute queue was empty before the step's last task ended.
    pub wait_s: f64,
    /// The share of its products that it pruned.
    pub gamma: f64,
    /// Bytes exchanged for migration.
    pub migrated_bytes: u64,
    /// Seconds of the comm queue for them.
    pub migration_s: f64,
    /// Those of them in which the compute queue had nothing to do.
    #[serde(default)]
    pub exposed_s: f64,
}

impl Observation {
    pub fn of(&self, class: Class) -> f64 {
        self.compute_s[class as usize]
    }

    pub fn total_s(&self) -> f64 {
        self.compute_s.iter().sum()
    }

    /// The slower of two replicas with the same share of the work.
    pub fn slower(&self, other: &Observation) -> Observation {
        let compute_s: [f64; _] = std::array::from_fn(|class| self.compute_s[class].max(other.compute_s[class]));
        let busy_s = (self.total_s() + self.late_s).max(other.total_s() + other.late_s);
        Observation {
            compute_s,
            late_s: (busy_s - compute_s.iter().sum::<f64>()).max(0.0),
            wait_s: self.wait_s.min(other.wait_s),
            gamma: self.gamma.min(other.gamma),
            migrated_bytes: self.migrated_bytes.max(other.migrated_bytes),
            migration_s: self.migration_s.max(other.migration_s),
            exposed_s: self.exposed_s.max(other.exposed_s),
        }
    }
}
