//! What ranks report of a step.

use serde::{Deserialize, Serialize};

/// Kinds of work that are divided among ranks by dims of their own. A reduction separates them, so each is balanced by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    Attention,
    Mlp,
    /// Attention and MLP side by side: both dims by the same shares.
    Layer,
    /// The vocabulary's logits and their loss, and the embedding.
    Head,
    /// Norms and residual sums.
    Stream,
}

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

    /// Whether a rank can leave out a part of its products.
    pub fn is_resizable(self) -> bool {
        matches!(self, Class::Attention | Class::Mlp | Class::Layer)
    }

    /// The dim by whose widths its work is divided.
    pub fn dim(self) -> Dim {
        match self {
            Class::Attention => Dim::Heads,
            Class::Mlp | Class::Layer => Dim::Columns,
            Class::Head => Dim::Classes,
            Class::Stream => Dim::Tokens,
        }
    }
}

/// What can be divided unevenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dim {
    Heads,
    Columns,
    Classes,
    Tokens,
}

impl Dim {
    pub const ALL: [Dim; 4] = [Dim::Heads, Dim::Columns, Dim::Classes, Dim::Tokens];

    /// Those whose work it divides.
    pub(crate) fn classes(self) -> impl Iterator<Item = Class> {
        Class::ALL.into_iter().filter(move |class| class.dim() == self)
    }
}

/// How much of every dim each rank of a tensor-parallel group has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Division {
    widths: [Vec<usize>; Dim::ALL.len()],
}

impl Division {
    pub fn new(of: impl Fn(Dim) -> Vec<usize>) -> Division {
        let division = Division { widths: Dim::ALL.map(of) };
        let ranks = division.ranks();
        assert!(division.widths.iter().all(|widths| widths.len() == ranks), "{division:?}");
        division
    }

    pub fn of(&self, dim: Dim) -> &[usize] {
        &self.widths[dim as usize]
    }

    pub fn set(&mut self, dim: Dim, widths: Vec<usize>) {
        assert_eq!(widths.len(), self.ranks(), "a width for each rank");
        self.widths[dim as usize] = widths;
    }

    pub fn total(&self, dim: Dim) -> usize {
        self.of(dim).iter().sum()
    }

    /// What ranks have of a dim that they did not have before.
    pub fn gained(&self, before: &Division, dim: Dim) -> usize {
        self.of(dim).iter().zip(before.of(dim)).map(|(now, before)| now.saturating_sub(*before)).sum()
    }

    pub fn ranks(&self) -> usize {
        self.widths[0].len()
    }
}

/// What one rank did in a step, in seconds. Waits for others are not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// By class.
    pub compute_s: [f64; Class::ALL.len()],
    /// There was something to compute, and nothing ran.
    pub late_s: f64,
    /// The compute queue had nothing to do before the step's last task ended.
    pub wait_s: f64,
    /// The share of its products that it left out.
    pub gamma: f64,
    /// What travelled for migration, and how long the comm queue was at it.
    pub migrated_bytes: u64,
    pub migration_s: f64,
}

impl Observation {
    pub fn of(&self, class: Class) -> f64 {
        self.compute_s[class as usize]
    }

    pub fn total_s(&self) -> f64 {
        self.compute_s.iter().sum()
    }

    /// The slower of two that did the same share of the work on other data.
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
        }
    }
}
