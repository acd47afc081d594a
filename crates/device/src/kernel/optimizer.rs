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
    /// Where the compute dtype is bf16: the rounded copy of the new weight.
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
    /// u32 [1, ⌈elements / 32⌉], a bit for each element, the lowest first: where it is set, weight, mean and variance stay as
    /// they are, bit for bit.
    pub frozen: Option<View>,
}

impl AdamW {
    /// Words for the bits of so many elements.
    pub fn frozen_words(elements: usize) -> usize {
        elements.div_ceil(32)
    }
}

impl Operation for AdamW {
    fn check(&self) {
        assert_same_shape("AdamW", &[self.weight, self.grad, self.mean, self.variance]);
        for view in [self.weight, self.grad, self.mean, self.variance] {
            assert_eq!(view.dtype, DType::F32, "AdamW works on f32");
            assert!(view.is_contiguous(), "AdamW works on whole parameters");
        }
        assert!(self.copy.is_none_or(|copy| copy.shape() == self.weight.shape() && copy.is_contiguous()), "AdamW copy");
        if let Some(factor) = &self.grad_factor {
            assert_vector("AdamW factor", factor, 1);
        }
        if let Some(frozen) = &self.frozen {
            let expected = ([1, AdamW::frozen_words(self.weight.len())], DType::U32);
            assert_eq!((frozen.shape(), frozen.dtype), expected, "AdamW frozen elements");
        }
        assert!(self.step > 0, "AdamW steps count from 1");
    }

    fn bytes(&self) -> u64 {
        7 * self.weight.bytes() + optional_bytes(&self.copy) + optional_bytes(&self.frozen)
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
