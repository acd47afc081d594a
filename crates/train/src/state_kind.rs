//! What is kept of each parameter from step to step.

use evenkeel_model::Slice;
use serde::{Deserialize, Serialize};

/// A kind of state. Which of them there are besides the weight is for the optimizer's rule to say.
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

    /// The elements of a whole parameter that it has a number for. Numbers for all of them are kept where the elements are;
    /// others are few, and every rank keeps them all.
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
