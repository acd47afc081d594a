use super::{Activation, Operation, assert_same_shape, assert_vector, optional_bytes};
use crate::View;

/// The operands that are read transposed. `out` is always [M, N].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// a [M, K] · b [K, N]
    NN,
    /// a [M, K] · bᵀ, b [N, K]
    NT,
    /// aᵀ · b, a [K, M], b [K, N]
    TN,
}

/// `out = activation(a·b + bias)`, or `out += a·b` with `accumulate`.
///
/// `a` and `b` have the same dtype; sums are f32; `out` may be f32 whatever the operands are.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub order: Order,
    pub a: View,
    pub b: View,
    pub out: View,
    /// Add to `out`; excludes bias and activation.
    pub accumulate: bool,
    /// f32 [1, N], added to every row.
    pub bias: Option<View>,
    pub activation: Option<Activation>,
    /// Receives `a·b + bias` if an activation follows and backward needs it. [M, N], dtype of `out`.
    pub preactivation: Option<View>,
}

impl Product {
    pub fn new(order: Order, a: impl Into<View>, b: impl Into<View>, out: impl Into<View>) -> Product {
        let a = a.into();
        let b = b.into();
        let out = out.into();
        Product { order, a, b, out, accumulate: false, bias: None, activation: None, preactivation: None }
    }

    pub fn accumulating(self) -> Product {
        Product { accumulate: true, ..self }
    }

    pub fn with_bias(self, bias: Option<View>) -> Product {
        Product { bias, ..self }
    }

    /// M, N, K.
    pub fn dims(&self) -> [usize; 3] {
        let depth = if self.order == Order::TN { self.a.rows } else { self.a.cols };
        [self.out.rows, self.out.cols, depth]
    }
}

impl Operation for Product {
    fn check(&self) {
        let [m, n, k] = self.dims();
        let (a, b) = match self.order {
            Order::NN => ([m, k], [k, n]),
            Order::NT => ([m, k], [n, k]),
            Order::TN => ([k, m], [k, n]),
        };
        assert_eq!((self.a.shape(), self.b.shape()), (a, b), "Product {:?} into {:?}", self.order, [m, n]);
        assert_eq!(self.a.dtype, self.b.dtype, "Product: operands of different dtypes");
        let bare = self.bias.is_none() && self.activation.is_none() && self.preactivation.is_none();
        assert!(bare || !self.accumulate, "Product: accumulate excludes bias and activation");
        if let Some(bias) = &self.bias {
            assert_vector("Product", bias, n);
        }
        if let Some(preactivation) = self.preactivation {
            assert_same_shape("Product", &[self.out, preactivation]);
            assert_eq!(preactivation.dtype, self.out.dtype);
        }
    }

    fn flops(&self) -> u64 {
        2 * self.dims().iter().map(|&dim| dim as u64).product::<u64>()
    }

    fn bytes(&self) -> u64 {
        let out = self.out.bytes() * if self.accumulate { 2 } else { 1 };
        self.a.bytes() + self.b.bytes() + out + optional_bytes(&self.bias) + optional_bytes(&self.preactivation)
    }
}
