use super::{Operation, assert_same_shape, assert_vector, optional_bytes};
use crate::{DType, View};

/// Sums of squares along the rows and the columns of a part of a gradient, scaled and added to what is there:
/// `rows[i] += row_scale · Σ_j x[i, j]²`, `cols[j] += col_scale · Σ_i x[i, j]²`.
#[derive(Clone, Copy, Debug)]
pub struct SquareSums {
    /// f32 [R, C]
    pub x: View,
    /// f32 [1, 1] that every element is multiplied by: the clipping factor.
    pub factor: Option<View>,
    /// f32 [1, R]; a vector has none.
    pub rows: Option<View>,
    /// f32 [1, C]
    pub cols: View,
    pub row_scale: f32,
    pub col_scale: f32,
}

impl Operation for SquareSums {
    fn check(&self) {
        assert_eq!(self.x.dtype, DType::F32, "SquareSums works on f32");
        check_sums("SquareSums", &self.x, &self.rows, &self.cols);
        if let Some(factor) = &self.factor {
            assert_vector("SquareSums factor", factor, 1);
        }
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + 2 * (optional_bytes(&self.rows) + self.cols.bytes())
    }
}

/// Adafactor's divisor of a part of a gradient, element by element: the square root of `rows[i] · cols[j] / max(row_sum /
/// row_count, epsilon)`, for a vector of `cols[j]`, and at least `epsilon`.
#[derive(Clone, Copy, Debug)]
pub struct Factored {
    /// f32 [R, C]
    pub grad: View,
    /// f32 [1, 1] that every gradient is multiplied by: the clipping factor.
    pub grad_factor: Option<View>,
    /// The rows' mean squares, f32 [1, R]; a vector has none.
    pub rows: Option<View>,
    /// The columns' mean squares, f32 [1, C].
    pub cols: View,
    /// The sum of `rows` over the whole parameter, f32 [1, 1].
    pub row_sum: View,
    /// Rows of the whole parameter.
    pub row_count: usize,
    pub epsilon: f32,
}

impl Factored {
    fn check(&self, name: &str) {
        assert_eq!(self.grad.dtype, DType::F32, "{name} works on f32");
        check_sums(name, &self.grad, &self.rows, &self.cols);
        assert_vector(name, &self.row_sum, 1);
        if let Some(factor) = &self.grad_factor {
            assert_vector(name, factor, 1);
        }
    }

    fn bytes(&self) -> u64 {
        self.grad.bytes() + optional_bytes(&self.rows) + self.cols.bytes()
    }
}

/// `out += Σ u²` of Adafactor's update `u`: gradients divided as [`Factored`] says.
#[derive(Clone, Copy, Debug)]
pub struct AdafactorNorm {
    pub factored: Factored,
    /// f32 [1, 1]
    pub out: View,
}

impl Operation for AdafactorNorm {
    fn check(&self) {
        self.factored.check("AdafactorNorm");
        assert_vector("AdafactorNorm", &self.out, 1);
    }

    fn bytes(&self) -> u64 {
        self.factored.bytes()
    }
}

/// One update of Adafactor on a part of a parameter, f32, as PyTorch makes it. With the root mean squares of the whole
/// parameter and of its whole update `u`:
/// `weight = (1 - lr · decay) · weight - rate · max(least_scale, rms(weight)) / max(1, rms(u) / most_rms) · u`.
#[derive(Clone, Copy, Debug)]
pub struct Adafactor {
    pub factored: Factored,
    /// f32 [R, C]
    pub weight: View,
    /// The rounded copy of the new weight, if the compute dtype is bf16.
    pub copy: Option<View>,
    /// Sums over the whole parameter, before its update: f32 [1, 1] each.
    pub squared_weight: View,
    pub squared_update: View,
    /// Elements of the whole parameter.
    pub count: usize,
    pub lr: f32,
    /// `min(lr, 1 / √step)`
    pub rate: f32,
    pub weight_decay: f32,
    pub least_scale: f32,
    pub most_rms: f32,
}

impl Operation for Adafactor {
    fn check(&self) {
        self.factored.check("Adafactor");
        assert_eq!(self.weight.dtype, DType::F32, "Adafactor works on f32");
        let views = [Some(self.factored.grad), Some(self.weight), self.copy];
        assert_same_shape("Adafactor", &views.into_iter().flatten().collect::<Vec<_>>());
        [self.squared_weight, self.squared_update].iter().for_each(|sum| assert_vector("Adafactor", sum, 1));
    }

    fn bytes(&self) -> u64 {
        self.factored.bytes() + 2 * self.weight.bytes() + optional_bytes(&self.copy)
    }
}

fn check_sums(name: &str, x: &View, rows: &Option<View>, cols: &View) {
    if let Some(rows) = rows {
        assert_vector(name, rows, x.rows);
    }
    assert_vector(name, cols, x.cols);
}
