use super::{Operation, assert_same_shape, assert_vector};
use crate::{DType, View};

/// Muon's momentum, f32: `momentum = beta · momentum + (1 - beta) · grad`. The gradient becomes the matrix to orthogonalise:
/// the momentum, or, with `nesterov`, `(1 - beta) · grad + beta · momentum`.
#[derive(Clone, Copy, Debug)]
pub struct MuonMomentum {
    pub grad: View,
    pub momentum: View,
    pub beta: f32,
    pub nesterov: bool,
    /// f32 [1, 1] that every gradient is multiplied by: the clipping factor.
    pub grad_factor: Option<View>,
}

impl Operation for MuonMomentum {
    fn check(&self) {
        assert_same_shape("MuonMomentum", &[self.grad, self.momentum]);
        assert_eq!([self.grad.dtype, self.momentum.dtype], [DType::F32; 2], "MuonMomentum works on f32");
        if let Some(factor) = &self.grad_factor {
            assert_vector("MuonMomentum factor", factor, 1);
        }
    }

    fn bytes(&self) -> u64 {
        4 * self.grad.bytes()
    }
}

/// `out = x / max(√squared_norm, least)`, the norm being on the device. The dtypes may differ.
#[derive(Clone, Copy, Debug)]
pub struct Normalize {
    pub x: View,
    /// f32 [1, 1]
    pub squared_norm: View,
    pub least: f32,
    pub out: View,
}

impl Operation for Normalize {
    fn check(&self) {
        assert_same_shape("Normalize", &[self.x, self.out]);
        assert_vector("Normalize", &self.squared_norm, 1);
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.out.bytes()
    }
}

/// `out = alpha · a + beta · b`; `out` may be either. The dtypes may differ.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    pub a: View,
    pub b: View,
    pub alpha: f32,
    pub beta: f32,
    pub out: View,
}

impl Operation for Combine {
    fn check(&self) {
        assert_same_shape("Combine", &[self.a, self.b, self.out]);
    }

    fn bytes(&self) -> u64 {
        self.a.bytes() + self.b.bytes() + self.out.bytes()
    }
}
