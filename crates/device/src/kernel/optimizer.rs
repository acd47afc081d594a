use std::collections::BTreeSet;

use super::{Operation, assert_same_shape, assert_vector, optional_bytes};
use crate::{DType, View};

/// One AdamW update with decoupled weight decay, on f32 masters:
/// `m, v` are moved towards the gradient and its square, `weight -= lr · (m̂ / (√v̂ + epsilon) + decay · weight)`.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    pub weight: View,
    pub grad: View,
    pub mean: View,
    pub variance: View,
    /// The rounded copy of the new weight, if the compute dtype is bf16.
    pub copy: Option<View>,
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
    pub weight_decay: f32,
    /// The number of this update, from 1: corrects the bias of the moments.
    pub step: u32,
    /// f32 [1, 1] that every gradient is multiplied by: the clipping factor.
    pub grad_factor: Option<View>,
    /// See [`frozen_words`]: elements whose bit is set keep weight, mean and variance bit for bit.
    pub frozen: Option<View>,
}

/// The number of words of a mask of frozen elements: u32 [1, ⌈elements / 32⌉], a bit for each element, the lowest first.
pub fn frozen_words(elements: usize) -> usize {
    elements.div_ceil(32)
}

impl Operation for AdamW {
    fn check(&self) {
        let state = [self.weight, self.grad, self.mean, self.variance];
        check_update("AdamW", &state, &self.copy, &self.grad_factor, &self.frozen);
        assert!(self.step > 0, "AdamW steps count from 1");
    }

    fn bytes(&self) -> u64 {
        7 * self.weight.bytes() + optional_bytes(&self.copy) + optional_bytes(&self.frozen)
    }
}

/// One update of SGD, on f32 masters. The decay is a part of the gradient, `g = grad + decay · weight`; then
/// `momentum = beta · momentum + g` and `weight -= lr · momentum`, or `lr · (g + beta · momentum)` with `nesterov`, or `lr · g`
/// where there is no momentum.
#[derive(Clone, Copy, Debug)]
pub struct Sgd {
    pub weight: View,
    pub grad: View,
    pub momentum: Option<View>,
    /// As [`AdamW::copy`].
    pub copy: Option<View>,
    pub lr: f32,
    pub beta: f32,
    pub nesterov: bool,
    pub weight_decay: f32,
    /// As [`AdamW::grad_factor`].
    pub grad_factor: Option<View>,
    /// As [`AdamW::frozen`].
    pub frozen: Option<View>,
}

impl Operation for Sgd {
    fn check(&self) {
        let state = [Some(self.weight), Some(self.grad), self.momentum];
        let state: Vec<View> = state.into_iter().flatten().collect();
        check_update("Sgd", &state, &self.copy, &self.grad_factor, &self.frozen);
    }

    fn bytes(&self) -> u64 {
        3 * self.weight.bytes()
            + 2 * optional_bytes(&self.momentum)
            + optional_bytes(&self.copy)
            + optional_bytes(&self.frozen)
    }
}

/// One update of Lion with decoupled weight decay, on f32 masters:
/// `weight -= lr · (sign(beta1 · mean + (1 - beta1) · grad) + decay · weight)`, then
/// `mean = beta2 · mean + (1 - beta2) · grad`. The sign of zero is zero.
#[derive(Clone, Copy, Debug)]
pub struct Lion {
    pub weight: View,
    pub grad: View,
    pub mean: View,
    /// As [`AdamW::copy`].
    pub copy: Option<View>,
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub weight_decay: f32,
    /// As [`AdamW::grad_factor`].
    pub grad_factor: Option<View>,
    /// As [`AdamW::frozen`].
    pub frozen: Option<View>,
}

impl Operation for Lion {
    fn check(&self) {
        check_update("Lion", &[self.weight, self.grad, self.mean], &self.copy, &self.grad_factor, &self.frozen);
    }

    fn bytes(&self) -> u64 {
        5 * self.weight.bytes() + optional_bytes(&self.copy) + optional_bytes(&self.frozen)
    }
}

/// Checks the operands of an elementwise update.
fn check_update(name: &str, state: &[View], copy: &Option<View>, factor: &Option<View>, frozen: &Option<View>) {
    assert_same_shape(name, state);
    for view in state {
        assert_eq!(view.dtype, DType::F32, "{name} works on f32");
        assert!(view.is_contiguous(), "{name} works on whole parameters");
    }
    let weight = state[0];
    assert!(copy.is_none_or(|copy| copy.shape() == weight.shape() && copy.is_contiguous()), "{name} copy");
    if let Some(factor) = factor {
        assert_vector(name, factor, 1);
    }
    if let Some(frozen) = frozen {
        let expected = ([1, frozen_words(weight.len())], DType::U32);
        assert_eq!((frozen.shape(), frozen.dtype), expected, "{name} frozen elements");
    }
}

/// `out = Σ x²`, or `out += Σ x²`. The order of the sum depends on the shape alone.
#[derive(Clone, Copy, Debug)]
pub struct SquaredNorm {
    pub x: View,
    /// f32 [1, 1]
    pub out: View,
    pub accumulate: bool,
}

impl Operation for SquaredNorm {
    fn check(&self) {
        assert_eq!((self.out.shape(), self.out.dtype), ([1, 1], DType::F32), "SquaredNorm");
    }

    fn bytes(&self) -> u64 {
        self.x.bytes()
    }
}

/// Squared norms of numbers of one dtype, each with an `out` of its own, at most [`MOST_NORMS`], issued as one.
#[derive(Clone, Debug)]
pub struct SquaredNorms(pub Vec<SquaredNorm>);

pub const MOST_NORMS: usize = 64;

impl Operation for SquaredNorms {
    fn check(&self) {
        assert!((1..=MOST_NORMS).contains(&self.0.len()), "{} squared norms at once", self.0.len());
        self.0.iter().for_each(SquaredNorm::check);
        assert!(self.0.iter().all(|norm| norm.x.dtype == self.0[0].x.dtype), "SquaredNorms of several dtypes");
        let outs: BTreeSet<u64> = self.0.iter().map(|norm| norm.out.address).collect();
        assert_eq!(outs.len(), self.0.len(), "SquaredNorms with an output of several");
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(SquaredNorm::bytes).sum()
    }
}

/// `out = min(1, limit / (√squared_norm + 1e-6))`: the factor that clips gradients, kept on the device.
///
/// A norm that is NaN gives NaN, an infinite one gives 0: neither passes for a gradient that needs no clipping.
#[derive(Clone, Copy, Debug)]
pub struct ClipFactor {
    pub squared_norm: View,
    pub limit: f32,
    pub out: View,
}

impl Operation for ClipFactor {
    fn check(&self) {
        assert_same_shape("ClipFactor", &[self.squared_norm, self.out]);
        assert_eq!(self.out.shape(), [1, 1], "ClipFactor");
    }

    fn bytes(&self) -> u64 {
        8
    }
}
