use super::{Operation, assert_same_shape, assert_vector, optional_bytes};
use crate::View;

/// `out[t, c] = x[t, c] · scale[c] / √squares[c] + bias[c]`, or `out += …` with `accumulate`: DoRA's magnitudes. A column whose
/// square is zero gets the factor zero.
#[derive(Clone, Copy, Debug)]
pub struct ScaleColumns {
    /// [T, H]
    pub x: View,
    /// f32 [1, H]
    pub scale: View,
    /// f32 [1, H]
    pub squares: View,
    /// f32 [1, H]
    pub bias: Option<View>,
    /// [T, H], dtype of `x`; may be `x` itself.
    pub out: View,
    /// Add to `out`; excludes a bias.
    pub accumulate: bool,
}

impl Operation for ScaleColumns {
    fn check(&self) {
        assert_same_shape("ScaleColumns", &[self.x, self.out]);
        assert_eq!(self.x.dtype, self.out.dtype, "ScaleColumns: operands of different dtypes");
        assert!(self.bias.is_none() || !self.accumulate, "ScaleColumns: a sum has its bias already");
        for vector in [Some(self.scale), Some(self.squares), self.bias].iter().flatten() {
            assert_vector("ScaleColumns", vector, self.x.cols);
        }
    }

    fn bytes(&self) -> u64 {
        let vectors = self.scale.bytes() + self.squares.bytes() + optional_bytes(&self.bias);
        self.x.bytes() + self.out.bytes() * if self.accumulate { 2 } else { 1 } + vectors
    }
}

/// `out[c] += Σ_t a[t, c] · b[t, c] / √squares[c]`: the gradient of DoRA's magnitudes. A column whose square is zero adds nothing.
#[derive(Clone, Copy, Debug)]
pub struct ColumnDot {
    /// [T, H]
    pub a: View,
    /// [T, H], dtype of `a`
    pub b: View,
    /// f32 [1, H]
    pub squares: View,
    /// f32 [1, H], added to.
    pub out: View,
}

impl Operation for ColumnDot {
    fn check(&self) {
        assert_same_shape("ColumnDot", &[self.a, self.b]);
        assert_eq!(self.a.dtype, self.b.dtype, "ColumnDot: operands of different dtypes");
        assert_vector("ColumnDot squares", &self.squares, self.a.cols);
        assert_vector("ColumnDot", &self.out, self.a.cols);
    }

    fn bytes(&self) -> u64 {
        self.a.bytes() + self.b.bytes() + self.squares.bytes() + 2 * self.out.bytes()
    }
}
