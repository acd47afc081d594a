//! The state kept for each parameter from step to step.

use evenkeel_model::Slice;
use serde::{Deserialize, Serialize};

/// A kind of state. The optimizer's rule decides which kinds exist besides the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateKind {
    Weight,
    Mean,
    Variance,
    Momentum,
    /// Mean squares of a matrix's rows.
    RowVariance,
    /// Mean squares of a matrix's columns, or of a vector's elements.
    ColumnVariance,
}

impl StateKind {
    pub const ALL: [StateKind; 6] = [
        StateKind::Weight,
        StateKind::Mean,
        StateKind::Variance,
        StateKind::Momentum,
        StateKind::RowVariance,
        StateKind::ColumnVariance,
    ];

    /// Its name in checkpoints.
    pub(crate) fn name(self) -> &'static str {
        match self {
            StateKind::Weight => "weight",
            StateKind::Mean => "mean",
            StateKind::Variance => "variance",
            StateKind::Momentum => "momentum",
            StateKind::RowVariance => "row_variance",
            StateKind::ColumnVariance => "column_variance",
        }
    }

    /// The elements of a whole parameter that it has a number for. A kind with a number for every element is kept where the
    /// elements are; the other kinds are small, and every rank keeps them whole.
    pub(crate) fn extent(self, [rows, cols]: [usize; 2]) -> Slice {
        match self {
            StateKind::RowVariance => Slice::whole([rows, 1]),
            StateKind::ColumnVariance => Slice::whole([1, cols]),
            _ => Slice::whole([rows, cols]),
        }
    }

    /// Whether every rank keeps the numbers of whole parameters.
    pub fn is_kept_by_all(self) -> bool {
        matches!(self, StateKind::RowVariance | StateKind::ColumnVariance)
    }
}
