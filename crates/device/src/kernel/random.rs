//! Counter-based randomness: a number depends on the seed and on the element's place in the whole matrix, never on how
//! the matrix is cut, so every layout draws the same numbers and recomputation repeats them.

use super::{Operation, assert_same_shape};
use crate::View;

/// 2⁶⁴ over the golden ratio: its multiples lie far apart.
pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A bijection of 64-bit numbers, in which every bit of a number changes all of the result: two rounds of multiply and
/// shift.
#[inline(always)]
pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The seed of the `number`th random sequence.
#[inline(always)]
pub fn seed_of(seed: u64, number: u64) -> u64 {
    mix(seed.wrapping_add(GOLDEN.wrapping_mul(number.wrapping_add(1))))
}

/// The place of a view's first element in the whole matrix.
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
}

impl Operation for Dropout {
    fn check(&self) {
        assert_same_shape("Dropout", &[self.x, self.out]);
        assert!((0.0..1.0).contains(&self.probability), "Dropout: probability {}", self.probability);
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.out.bytes()
    }
}
