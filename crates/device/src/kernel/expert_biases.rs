//! The biases of experts. Of P pairs' rows, those from `offsets[e]` to `offsets[e + 1]` are of expert e.
//!
//! Offsets that do not ascend or that exceed P are a bug in the caller and end the queue. Rows of no expert are left as they are.

use super::{Operation, assert_indices};
use crate::{DType, View};

/// `x[r] += biases[e]` in the rows of each expert.
#[derive(Clone, Copy, Debug)]
pub struct AddBiases {
    /// [P, N]
    pub x: View,
    /// f32 [E, N]
    pub biases: View,
    /// u32 [1, E + 1]
    pub offsets: View,
}

impl Operation for AddBiases {
    fn check(&self) {
        assert_biases("AddBiases", &self.x, &self.biases, &self.offsets);
    }

    fn bytes(&self) -> u64 {
        2 * self.x.bytes() + self.biases.bytes() + self.offsets.bytes()
    }
}

/// `out[e] += Σ_r x[r]` over the rows of each expert: the gradients of their biases.
#[derive(Clone, Copy, Debug)]
pub struct BiasSums {
    /// [P, N]
    pub x: View,
    /// u32 [1, E + 1]
    pub offsets: View,
    /// f32 [E, N]
    pub out: View,
}

impl Operation for BiasSums {
    fn check(&self) {
        assert_biases("BiasSums", &self.x, &self.out, &self.offsets);
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + 2 * self.out.bytes() + self.offsets.bytes()
    }
}

/// `out[p] += ⟨x[r], biases[e]⟩` for the pair p = `pairs[r]`: the biases' part in the gradients of the pairs' weights.
#[derive(Clone, Copy, Debug)]
pub struct BiasDots {
    /// [P, N]
    pub x: View,
    /// f32 [E, N]
    pub biases: View,
    /// u32 [1, E + 1]
    pub offsets: View,
    /// u32 [1, P], each pair once.
    pub pairs: View,
    /// f32 [T, k]
    pub out: View,
}

impl Operation for BiasDots {
    fn check(&self) {
        assert_biases("BiasDots", &self.x, &self.biases, &self.offsets);
        assert_indices("BiasDots", &self.pairs, self.x.rows);
        assert!(self.out.len() >= self.pairs.cols && self.out.dtype == DType::F32, "BiasDots: {:?}", self.out.shape());
    }

    fn bytes(&self) -> u64 {
        let read = [self.x, self.biases, self.offsets, self.pairs];
        read.iter().map(|view| view.bytes()).sum::<u64>() + 2 * self.out.bytes()
    }
}

fn assert_biases(name: &str, x: &View, biases: &View, offsets: &View) {
    assert!(offsets.cols > 0, "{name}: no offsets");
    assert_indices(name, offsets, offsets.cols);
    let expected = ([offsets.cols - 1, x.cols], DType::F32);
    assert_eq!((biases.shape(), biases.dtype), expected, "{name}: not a bias for each expert");
}
