//! Dropless mixtures of experts. T tokens, E experts, k of them chosen for each token, P = T·k pairs of a token and an expert.
//!
//! Pair (t, j), token t's slot j, has the number t·k + j. [`Route`] sorts the pairs by expert, so an expert's rows lie together.
//! Shapes never depend on the routing: every kernel's cost follows from them alone.
//!
//! Of a device with some of the experts, only those experts' pairs have rows, and the first of P rows at that: as many as a kernel's
//! `count` says when it runs. Other rows are not touched. Without a count all are there.

use super::{Operation, Order, assert_indices, assert_same_shape, optional_bytes};
use crate::{DType, View};

/// How many of a kernel's rows there are.
#[derive(Clone, Copy, Debug)]
pub struct RowCount {
    /// u32 [1, 1], read when the kernel runs.
    pub at: View,
    /// As many as are expected, for costs.
    pub expected: usize,
}

/// Of bytes or operations for so many rows, those that are expected.
pub(super) fn expected(all: u64, rows: usize, count: &Option<RowCount>) -> u64 {
    let share = |count: RowCount| all as u128 * count.expected.min(rows) as u128 / rows.max(1) as u128;
    count.map_or(all, |count| share(count) as u64)
}

/// Chooses k experts for each token and sorts the pairs.
///
/// p is the softmax of a row over all experts. Chosen are the k largest logits, of equal ones the lower index, in descending
/// order; NaN counts as the smallest. The weights are their p.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// f32 [T, E]
    pub logits: View,
    /// Divide the weights of a token by their sum.
    pub renormalise: bool,
    /// f32 [T, k]
    pub weights: View,
    /// u32 [T, k]
    pub chosen: View,
    /// The expert whose pairs come first. Those of the experts behind it follow, then those of the experts before it.
    pub first: usize,
    /// u32 [1, P]: the numbers of the pairs by expert, token and slot.
    pub pairs: View,
    /// u32 [1, P]: where each pair lies in `pairs`.
    pub places: View,
    /// u32 [1, E + 1]: where each expert's pairs begin in `pairs`, from the first expert on, and their end.
    pub offsets: View,
}

impl Operation for Route {
    fn check(&self) {
        let [tokens, experts] = self.logits.shape();
        assert_choice("Route", experts, &self.weights, &self.chosen);
        assert_eq!((self.logits.dtype, self.weights.rows), (DType::F32, tokens), "Route");
        assert!(self.first < experts, "Route: expert {} of {experts} comes first", self.first);
        assert!(u32::try_from(self.weights.len()).is_ok(), "Route: {} pairs", self.weights.len());
        assert_indices("Route", &self.pairs, self.weights.len());
        assert_indices("Route", &self.places, self.weights.len());
        assert_indices("Route", &self.offsets, experts + 1);
    }

    fn bytes(&self) -> u64 {
        let written = [self.weights, self.chosen, self.pairs, self.places, self.offsets];
        self.logits.bytes() + written.iter().map(|view| view.bytes()).sum::<u64>()
    }
}

fn assert_choice(name: &str, experts: usize, weights: &View, chosen: &View) {
    assert!((1..=experts).contains(&chosen.cols), "{name}: {} of {experts} experts chosen", chosen.cols);
    assert_eq!((weights.dtype, chosen.dtype), (DType::F32, DType::U32), "{name}");
    assert_same_shape(name, &[*weights, *chosen]);
}

/// The gradient of [`Route`]'s weights. Choosing has none.
///
/// Renormalised, a chosen expert's is `w · (dweight - Σ_chosen w·dweight)` and the others' zero. Otherwise every expert's is
/// `p · (dweight - Σ_chosen p·dweight)`, where `dweight` is zero for those that are not chosen.
#[derive(Clone, Copy, Debug)]
pub struct RouteBackward {
    /// f32 [T, E]
    pub logits: View,
    /// u32 [T, k]
    pub chosen: View,
    /// f32 [T, k]
    pub weights: View,
    pub renormalise: bool,
    /// f32 [T, k]
    pub dweights: View,
    /// [T, E], overwritten; its dtype may be any.
    pub dlogits: View,
}

impl Operation for RouteBackward {
    fn check(&self) {
        assert_choice("RouteBackward", self.logits.cols, &self.weights, &self.chosen);
        assert_choice("RouteBackward", self.logits.cols, &self.dweights, &self.chosen);
        assert_same_shape("RouteBackward", &[self.logits, self.dlogits]);
        assert_eq!((self.logits.dtype, self.weights.rows), (DType::F32, self.logits.rows), "RouteBackward");
    }

    fn bytes(&self) -> u64 {
        let read = [self.chosen, self.weights, self.dweights];
        let logits = if self.renormalise { 0 } else { self.logits.bytes() };
        logits + self.dlogits.bytes() + read.iter().map(|view| view.bytes()).sum::<u64>()
    }
}

/// A product for each expert, of the rows `offsets[e]..offsets[e + 1]`.
///
/// | order | a | b | out | |
/// | --- | --- | --- | --- | --- |
/// | NT | [P, K] | [E·N, K] | [P, N] | `out[r] = a[r] · b_eᵀ` |
/// | NN | [P, K] | [E·K, N] | [P, N] | `out[r] = a[r] · b_e` |
/// | TN | [P, M] | [P, N] | [E·M, N] | `out_e = Σ_r a[r]ᵀ · b[r]`, zeros for an expert without rows |
///
/// `a` and `b` have the same dtype; sums are f32; `out` may be f32 whatever the operands are. Offsets that do not ascend or that
/// exceed P are a bug in the caller and end the queue. Rows of no expert are left as they are.
#[derive(Clone, Copy, Debug)]
pub struct GroupedProduct {
    pub order: Order,
    pub a: View,
    pub b: View,
    pub out: View,
    /// u32 [1, E + 1]
    pub offsets: View,
    /// Add to `out`.
    pub accumulate: bool,
    /// The rows that are expected to be some expert's, for costs; all without it.
    pub expected_rows: Option<usize>,
}

impl GroupedProduct {
    pub fn experts(&self) -> usize {
        self.offsets.cols - 1
    }
}

impl Operation for GroupedProduct {
    fn check(&self) {
        assert!(self.offsets.cols > 0, "GroupedProduct: no offsets");
        assert_indices("GroupedProduct", &self.offsets, self.offsets.cols);
        let (experts, rows) = (self.experts(), self.a.rows);
        let (b, out) = match self.order {
            Order::NT => ([experts * self.out.cols, self.a.cols], [rows, self.out.cols]),
            Order::NN => ([experts * self.a.cols, self.out.cols], [rows, self.out.cols]),
            Order::TN => ([rows, self.out.cols], [experts * self.a.cols, self.out.cols]),
        };
        let found = (self.b.shape(), self.out.shape());
        assert_eq!(found, (b, out), "GroupedProduct {:?} of {experts} experts", self.order);
        assert_eq!(self.a.dtype, self.b.dtype, "GroupedProduct: operands of different dtypes");
    }

    fn flops(&self) -> u64 {
        2 * (self.expected_rows.unwrap_or(self.a.rows) * self.a.cols) as u64 * self.out.cols as u64
    }

    fn bytes(&self) -> u64 {
        let out = self.out.bytes() * if self.accumulate { 2 } else { 1 };
        // Of the operands, all but the experts' matrices have a row for each pair.
        let (of_pairs, of_experts) = match self.order {
            Order::NT | Order::NN => (self.a.bytes() + out, self.b.bytes()),
            Order::TN => (self.a.bytes() + self.b.bytes(), out),
        };
        let rows = self.expected_rows.unwrap_or(self.a.rows) as u128;
        let of_pairs = of_pairs as u128 * rows / self.a.rows.max(1) as u128;
        of_pairs as u64 + of_experts + self.offsets.bytes()
    }
}

/// `out[i] = w[pairs[i]] · x[pairs[i] / k]`: each pair's token, in the order of `pairs`. w is 1 without weights.
///
/// A pair outside the tokens is a bug in the caller and ends the queue, here and below.
#[derive(Clone, Copy, Debug)]
pub struct GatherPairs {
    /// [T, H]
    pub x: View,
    /// u32 [1, P]
    pub pairs: View,
    /// k
    pub chosen_per_token: usize,
    /// f32 [T, k]
    pub weights: Option<View>,
    pub count: Option<RowCount>,
    /// [P, H], dtype of `x`.
    pub out: View,
}

impl Operation for GatherPairs {
    fn check(&self) {
        assert!(self.chosen_per_token > 0, "GatherPairs: no expert is chosen");
        assert_indices("GatherPairs", &self.pairs, self.out.rows);
        assert_eq!((self.x.cols, self.x.dtype), (self.out.cols, self.out.dtype), "GatherPairs");
        assert_count("GatherPairs", &self.count);
        if let Some(weights) = &self.weights {
            assert_weights("GatherPairs", weights, [self.x.rows, self.chosen_per_token]);
        }
    }

    fn bytes(&self) -> u64 {
        expected(2 * self.out.bytes(), self.out.rows, &self.count) + self.pairs.bytes() + optional_bytes(&self.weights)
    }
}

/// Checks that it is one number.
pub(super) fn assert_count(name: &str, count: &Option<RowCount>) {
    if let Some(count) = count {
        assert_indices(name, &count.at, 1);
    }
}

fn assert_weights(name: &str, weights: &View, shape: [usize; 2]) {
    assert_eq!((weights.shape(), weights.dtype), (shape, DType::F32), "{name}: weights");
}

/// `out[t] = Σ_j w[t, j] · x[places[t·k + j]]` in the order of the slots, rounded once; with `accumulate`, the old value is the first
/// summand. w is 1 without weights. Pairs whose rows are not there are left out. The dtypes of `x` and `out` may differ.
#[derive(Clone, Copy, Debug)]
pub struct CombinePairs {
    /// [P, H], in the order of `pairs`; with a count, it may have fewer rows.
    pub x: View,
    pub count: Option<RowCount>,
    /// u32 [1, P]
    pub places: View,
    /// f32 [T, k]
    pub weights: Option<View>,
    /// [T, H]
    pub out: View,
    pub accumulate: bool,
}

impl CombinePairs {
    /// k
    pub fn chosen_per_token(&self) -> usize {
        self.places.cols.checked_div(self.out.rows).unwrap_or(0)
    }
}

impl Operation for CombinePairs {
    fn check(&self) {
        assert_indices("CombinePairs", &self.places, self.out.rows * self.chosen_per_token());
        assert_count("CombinePairs", &self.count);
        assert_eq!(self.x.cols, self.out.cols, "CombinePairs");
        assert!(self.x.rows == self.places.cols || self.count.is_some(), "CombinePairs: {} rows", self.x.rows);
        if let Some(weights) = &self.weights
            && self.out.rows > 0
        {
            assert_weights("CombinePairs", weights, [self.out.rows, self.chosen_per_token()]);
        }
    }

    fn bytes(&self) -> u64 {
        let out = self.out.bytes() * if self.accumulate { 2 } else { 1 };
        let x = expected(self.x.bytes(), self.x.rows, &self.count);
        x + self.places.bytes() + optional_bytes(&self.weights) + out
    }
}

fn assert_pairs(name: &str, pairs: &Option<View>, count: usize) {
    if let Some(pairs) = pairs {
        assert_indices(name, pairs, count);
    }
}

/// Checks that there is a number for each pair, of which rows may be fewer if they are counted.
fn assert_of_pairs(name: &str, numbers: &View, rows: usize, count: &Option<RowCount>) {
    assert_count(name, count);
    assert_eq!(numbers.dtype, DType::F32, "{name}");
    assert!(numbers.len() == rows || count.is_some(), "{name}: {} numbers for {rows} rows", numbers.len());
}

/// `out[p] = ⟨a[i], b[i]⟩` for the pair p = `pairs[i]`: the gradient of its weight. The dtypes of `a` and `b` may differ. Of pairs
/// whose rows are not there `out` is left as it is.
#[derive(Clone, Copy, Debug)]
pub struct PairDots {
    /// [P, I]
    pub a: View,
    /// [P, I]
    pub b: View,
    /// u32 [1, P], each pair once; in their own order without it.
    pub pairs: Option<View>,
    pub count: Option<RowCount>,
    /// f32 [T, k], overwritten.
    pub out: View,
}

impl Operation for PairDots {
    fn check(&self) {
        assert_same_shape("PairDots", &[self.a, self.b]);
        assert_pairs("PairDots", &self.pairs, self.a.rows);
        assert_of_pairs("PairDots", &self.out, self.a.rows, &self.count);
    }

    fn bytes(&self) -> u64 {
        let rows = expected(self.a.bytes() + self.b.bytes(), self.a.rows, &self.count);
        rows + optional_bytes(&self.pairs) + self.out.bytes()
    }
}

/// `out[i] = w[pairs[i]] · x[i]`; `out` may be `x`. The dtypes of `x` and `out` may differ.
#[derive(Clone, Copy, Debug)]
pub struct ScalePairs {
    /// [P, I]
    pub x: View,
    /// As in [`PairDots`].
    pub pairs: Option<View>,
    pub count: Option<RowCount>,
    /// f32 [T, k]
    pub weights: View,
    /// [P, I]
    pub out: View,
}

impl Operation for ScalePairs {
    fn check(&self) {
        assert_same_shape("ScalePairs", &[self.x, self.out]);
        assert_pairs("ScalePairs", &self.pairs, self.x.rows);
        assert_of_pairs("ScalePairs", &self.weights, self.x.rows, &self.count);
    }

    fn bytes(&self) -> u64 {
        let rows = expected(self.x.bytes() + self.out.bytes(), self.x.rows, &self.count);
        rows + optional_bytes(&self.pairs) + self.weights.bytes()
    }
}
