//! Counter-based randomness: a number depends on the seed and on the element's place in the whole matrix, never on how
//! the matrix is cut, so every layout draws the same numbers and recomputation repeats them.

use super::{Operation, assert_indices, assert_same_shape};
use crate::View;

pub use evenkeel_random::seed_of;

/// Where a view's first element lies in the whole matrix.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    pub first_row: u64,
    pub first_col: u64,
    /// Columns of the whole matrix.
    pub cols: u64,
}

impl Placement {
    /// The whole of a matrix of `cols` columns.
    pub fn whole(cols: usize) -> Placement {
        Placement { first_row: 0, first_col: 0, cols: cols as u64 }
    }
}

/// `out = mean + deviation · normal(seed, place)`.
#[derive(Clone, Copy, Debug)]
pub struct RandomNormal {
    pub out: View,
    pub mean: f32,
    pub deviation: f32,
    pub seed: u64,
    pub placement: Placement,
}

impl Operation for RandomNormal {
    fn check(&self) {}

    fn bytes(&self) -> u64 {
        self.out.bytes()
    }
}

/// `out = x / (1 - probability)` where `uniform(seed, place) >= probability`, else 0. Its own gradient: run it on `dout`.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    pub x: View,
    /// May be `x`.
    pub out: View,
    pub probability: f32,
    pub seed: u64,
    pub placement: Placement,
    /// u32 [1, rows]: each row's place behind the placement's first row, if they do not follow one another.
    pub rows: Option<View>,
}

impl Operation for Dropout {
    fn check(&self) {
        assert_same_shape("Dropout", &[self.x, self.out]);
        assert!((0.0..1.0).contains(&self.probability), "Dropout: probability {}", self.probability);
        self.rows.iter().for_each(|rows| assert_indices("Dropout", rows, self.x.rows));
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.out.bytes()
    }
}
