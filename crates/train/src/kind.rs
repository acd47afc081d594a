//! What is kept of each parameter from step to step.

use evenkeel_model::Slice;

/// A kind of state. Which of them there are besides the weight is for the optimizer's rule to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Weight,
    Mean,
    Variance,
    Momentum,
    /// Mean squares of a matrix's rows.
    RowVariance,
    /// Mean squares of a matrix's columns, or of a vector's elements.
    ColumnVariance,
}

impl Kind {
    pub const ALL: [Kind; 6] =
        [Kind::Weight, Kind::Mean, Kind::Variance, Kind::Momentum, Kind::RowVariance, Kind::ColumnVariance];

    /// Its name in checkpoints.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Weight => "weight",
            Kind::Mean => "mean",
            Kind::Variance => "variance",
            Kind::Momentum => "momentum",
            Kind::RowVariance => "row_variance",
            Kind::ColumnVariance => "column_variance",
        }
    }

    /// The elements of a whole parameter that it has a number for. Numbers for all of them are kept where the elements are;
    /// others are few, and every rank keeps them all.
    pub(crate) fn extent(self, [rows, cols]: [usize; 2]) -> Slice {
        match self {
            Kind::RowVariance => Slice::whole([rows, 1]),
            Kind::ColumnVariance => Slice::whole([1, cols]),
            _ => Slice::whole([rows, cols]),
        }
    }

    /// Whether every rank keeps the numbers of whole parameters.
    pub fn is_kept_by_all(self) -> bool {
        matches!(self, Kind::RowVariance | Kind::ColumnVariance)
    }
}
