use super::{Operation, assert_same_shape, assert_vector, optional_bytes};
use crate::View;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    Rms,
    Layer,
}

/// `sum = x + add; out = normalise(sum) · (weight_offset + weight) + bias`, row by row.
///
/// Without `add`, the sum is `x` itself and `sum` stays empty. Without `weight`, nothing is multiplied behind the norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    pub kind: NormKind,
    /// [T, H]
    pub x: View,
    /// [T, H]; given together with `sum`.
    pub add: Option<View>,
    /// [T, H]; may be `x` itself.
    pub sum: Option<View>,
    /// f32 [1, H]
    pub weight: Option<View>,
    /// 1 for the norms whose stored weight is an offset from one (Gemma).
    pub weight_offset: f32,
    pub bias: Option<View>,
    pub epsilon: f32,
    /// [T, H]
    pub out: View,
    /// f32 [T, 2]: the mean (0 for RMS) and the reciprocal deviation of each row, for backward.
    pub stats: View,
}

impl Operation for Norm {
    fn check(&self) {
        assert_same_shape("Norm", &[self.x, self.out]);
        assert_eq!(self.add.is_some(), self.sum.is_some(), "Norm: add and sum go together");
        for view in [self.add, self.sum].into_iter().flatten() {
            assert_same_shape("Norm", &[self.x, view]);
        }
        for (what, vector) in [("Norm weight", &self.weight), ("Norm bias", &self.bias)] {
            vector.iter().for_each(|vector| assert_vector(what, vector, self.x.cols));
        }
        assert_eq!(self.stats.shape(), [self.x.rows, 2], "Norm stats");
    }

    fn bytes(&self) -> u64 {
        let sums = optional_bytes(&self.add) + optional_bytes(&self.sum);
        self.x.bytes() + sums + self.out.bytes() + self.stats.bytes() + optional_bytes(&self.weight)
    }
}

/// Gradients of [`Norm`]: `dx = residual + ∂out/∂sum · dout`, and those of weight and bias.
#[derive(Clone, Copy, Debug)]
pub struct NormBackward {
    pub kind: NormKind,
    /// The input of the normalisation: `sum`, or `x` if nothing was added. [T, H]
    pub x: View,
    pub weight: Option<View>,
    pub weight_offset: f32,
    pub stats: View,
    /// [T, H]
    pub dout: View,
    /// The gradient that reaches the residual stream past this norm. [T, H]
    pub residual: Option<View>,
    /// [T, H]; may be `dout` or `residual` itself.
    pub dx: View,
    /// f32 [1, H], added to. A gradient that nobody wants is not computed.
    pub dweight: Option<View>,
    /// f32 [1, H], added to.
    pub dbias: Option<View>,
}

impl Operation for NormBackward {
    fn check(&self) {
        assert_same_shape("NormBackward", &[self.x, self.dout, self.dx]);
        if let Some(residual) = self.residual {
            assert_same_shape("NormBackward", &[self.x, residual]);
        }
        assert!(self.weight.is_some() || self.dweight.is_none(), "NormBackward: dweight without weight");
        let weight = ("NormBackward weight", &self.weight);
        for (what, vector) in [weight, ("NormBackward dweight", &self.dweight), ("NormBackward dbias", &self.dbias)] {
            vector.iter().for_each(|vector| assert_vector(what, vector, self.x.cols));
        }
        assert_eq!(self.stats.shape(), [self.x.rows, 2], "NormBackward stats");
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.dout.bytes() + optional_bytes(&self.residual) + self.dx.bytes() + self.stats.bytes()
    }
}
