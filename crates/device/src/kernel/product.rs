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

/// `out = activation(scale·(a·b + also) + bias)`, or `out += scale·(a·b + also)` with `accumulate`.
///
/// All operands have the same dtype; sums are f32; `out` may be f32 whatever the operands are.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub order: Order,
    pub a: View,
    pub b: View,
    pub scale: f32,
    /// Another product of the same rows and columns, such as an adapter's. A CPU adds both in the same f32 sums.
    pub also: Option<Term>,
    pub out: View,
    /// Add to `out`; excludes bias and activation.
    pub accumulate: bool,
    /// f32 [1, N], added to every row.
    pub bias: Option<View>,
    pub activation: Option<Activation>,
    /// Receives `a·b + bias` if an activation follows and backward needs it. [M, N], dtype of `out`.
    pub preactivation: Option<View>,
}

/// The operands of a product.
#[derive(Clone, Copy, Debug)]
pub struct Term {
    pub order: Order,
    pub a: View,
    pub b: View,
}

impl Term {
    pub fn new(order: Order, a: impl Into<View>, b: impl Into<View>) -> Term {
        Term { order, a: a.into(), b: b.into() }
    }
}

impl Product {
    pub fn new(order: Order, a: impl Into<View>, b: impl Into<View>, out: impl Into<View>) -> Product {
        Product {
            order,
            a: a.into(),
            b: b.into(),
            scale: 1.0,
            also: None,
            out: out.into(),
            accumulate: false,
            bias: None,
            activation: None,
            preactivation: None,
        }
    }

    /// The second product alone, into the same output.
    pub fn second(&self) -> Option<Product> {
        self.also.map(|Term { order, a, b }| Product::new(order, a, b, self.out))
    }

    pub fn accumulating(self) -> Product {
        Product { accumulate: true, ..self }
    }

    pub fn with_bias(self, bias: Option<View>) -> Product {
        Product { bias, ..self }
    }

    /// M, N, K.
    pub fn dims(&self) -> [usize; 3] {
        let (a, b) = (self.a, self.b);
        match self.order {
            Order::NN => [a.rows, b.cols, a.cols],
            Order::NT => [a.rows, b.rows, a.cols],
            Order::TN => [a.cols, b.cols, a.rows],
        }
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
        let shapes = [self.a, self.b, self.out].map(|view| view.shape());
        assert_eq!(shapes, [a, b, [m, n]], "Product {:?}", self.order);
        assert_eq!(self.a.dtype, self.b.dtype, "Product: operands of different dtypes");
        if let Some(second) = self.second() {
            assert_eq!(second.a.dtype, self.a.dtype, "Product: operands of different dtypes");
            second.check();
        }
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
        let own = 2 * self.dims().iter().map(|&dim| dim as u64).product::<u64>();
        own + self.second().map_or(0, |second| second.flops())
    }

    fn bytes(&self) -> u64 {
        let out = self.out.bytes() * if self.accumulate { 2 } else { 1 };
        let second = self.also.map_or(0, |term| term.a.bytes() + term.b.bytes());
        self.a.bytes()
            + self.b.bytes()
            + second
            + out
            + optional_bytes(&self.bias)
            + optional_bytes(&self.preactivation)
    }
}
