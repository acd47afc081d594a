use super::{Operation, assert_indices, assert_same_shape, assert_vector};
use crate::{DType, View};

/// `out = a + b`; `out` may be either. The dtypes may differ.
#[derive(Clone, Copy, Debug)]
pub struct Add {
    pub a: View,
    pub b: View,
    pub out: View,
}

impl Operation for Add {
    fn check(&self) {
        assert_same_shape("Add", &[self.a, self.b, self.out]);
    }

    fn bytes(&self) -> u64 {
        self.a.bytes() + self.b.bytes() + self.out.bytes()
    }
}

/// `out = factor · by · x`; `out` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Multiply {
    pub x: View,
    pub factor: f32,
    /// f32 [1, 1]; 1 without it.
    pub by: Option<View>,
    pub out: View,
}

impl Operation for Multiply {
    fn check(&self) {
        assert_same_shape("Multiply", &[self.x, self.out]);
        self.by.iter().for_each(|by| assert_vector("Multiply by", by, 1));
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.out.bytes()
    }
}

/// `out = cap · tanh(x / cap)`; `out` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct SoftCap {
    pub x: View,
    pub cap: f32,
    pub out: View,
}

impl Operation for SoftCap {
    fn check(&self) {
        assert_same_shape("SoftCap", &[self.x, self.out]);
        assert!(self.cap > 0.0, "SoftCap: {}", self.cap);
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.out.bytes()
    }
}

/// `out = x`, rounded or widened to the dtype of `out`.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    pub x: View,
    pub out: View,
}

impl Operation for Copy {
    fn check(&self) {
        assert_same_shape("Copy", &[self.x, self.out]);
        assert_eq!(self.x.dtype == DType::U32, self.out.dtype == DType::U32, "Copy: indices are not numbers");
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.out.bytes()
    }
}

/// Copies that do not depend on one another, at most [`MOST_COPIES`], issued as one.
#[derive(Clone, Debug)]
pub struct Copies(pub Vec<Copy>);

pub const MOST_COPIES: usize = 32;

impl Operation for Copies {
    fn check(&self) {
        assert!(self.0.len() <= MOST_COPIES, "{} copies at once", self.0.len());
        self.0.iter().for_each(Copy::check);
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(Copy::bytes).sum()
    }
}

/// `out = value`.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub out: View,
    pub value: f32,
}

impl Operation for Fill {
    fn check(&self) {
        assert_ne!(self.out.dtype, DType::U32, "Fill: indices are not numbers");
    }

    fn bytes(&self) -> u64 {
        self.out.bytes()
    }
}

/// `out[c] += Σ_t x[t, c]`: the gradient of a bias.
#[derive(Clone, Copy, Debug)]
pub struct ColumnSum {
    /// [T, H]
    pub x: View,
    /// f32 [1, H], added to.
    pub out: View,
}

impl Operation for ColumnSum {
    fn check(&self) {
        assert_eq!((self.out.shape(), self.out.dtype), ([1, self.x.cols], DType::F32), "ColumnSum");
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + 2 * self.out.bytes()
    }
}

/// `out[t, i] = x[t, columns[i]]`. An index outside `x` is a bug in the caller and ends the queue.
#[derive(Clone, Copy, Debug)]
pub struct GatherColumns {
    /// [T, H]
    pub x: View,
    /// u32 [1, C]
    pub columns: View,
    /// [T, C]
    pub out: View,
}

impl Operation for GatherColumns {
    fn check(&self) {
        assert_indices("GatherColumns", &self.columns, self.out.cols);
        assert_eq!((self.x.rows, self.x.dtype), (self.out.rows, self.out.dtype), "GatherColumns");
    }

    fn bytes(&self) -> u64 {
        2 * self.out.bytes() + self.columns.bytes()
    }
}

/// `out[t, columns[i]] = x[t, i]`, or `+=`; the columns are distinct.
#[derive(Clone, Copy, Debug)]
pub struct ScatterColumns {
    /// [T, C]
    pub x: View,
    /// u32 [1, C]
    pub columns: View,
    /// [T, H]
    pub out: View,
    pub accumulate: bool,
}

impl Operation for ScatterColumns {
    fn check(&self) {
        assert_indices("ScatterColumns", &self.columns, self.x.cols);
        assert_eq!((self.x.rows, self.x.dtype), (self.out.rows, self.out.dtype), "ScatterColumns");
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() * if self.accumulate { 3 } else { 2 } + self.columns.bytes()
    }
}
