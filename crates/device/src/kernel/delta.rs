//! Linear attention by the gated delta rule, and what stands around it: short convolutions before, gated norms behind.
//!
//! Nothing passes from one segment to the next. Shapes: nk key heads of K elements, nv value heads of V; value head h reads query
//! and key of key head `h / (nv / nk)`.

use super::{Operation, Segments, assert_same_shape, assert_vector, optional_bytes};
use crate::{DType, Heads, View};

/// Tokens that the delta rule takes at once.
pub const DELTA_CHUNK: usize = 64;

/// `out = silu(u)`, where `u[t, c] = Σ_j weight[c, j] · x[t - (W - 1) + j, c]` over the tokens of t's segment: a causal convolution
/// of each column by itself. `out` is not `x`.
#[derive(Clone, Debug)]
pub struct ShortConv {
    /// [T, C]
    pub x: View,
    /// [C, W] for all tokens, dtype of `x`.
    pub weight: View,
    pub segments: Segments,
    /// [T, C]
    pub out: View,
    /// [segments · (W - 1), C], dtype of `x`: the rows before each segment, the oldest first; overwritten with its last ones. Zeros
    /// without it. Segments without tokens keep theirs.
    pub past: Option<View>,
}

impl Operation for ShortConv {
    fn check(&self) {
        check_convolution("ShortConv", &self.x, &self.weight, &self.segments);
        assert_same_shape("ShortConv", &[self.x, self.out]);
        assert_eq!(self.x.dtype, self.out.dtype, "ShortConv");
        if let Some(past) = &self.past {
            let rows = self.segments.iter().count() * (self.weight.cols - 1);
            assert_eq!((past.shape(), past.dtype), ([rows, self.x.cols], self.x.dtype), "ShortConv: past");
        }
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.weight.bytes() + self.out.bytes() + 2 * optional_bytes(&self.past)
    }
}

fn check_convolution(name: &str, x: &View, weight: &View, segments: &Segments) {
    assert_eq!(segments.tokens(), x.rows, "{name}: segments do not cover the tokens");
    assert!((1..=16).contains(&weight.cols), "{name}: {} taps", weight.cols);
    assert_eq!((weight.rows, weight.dtype), (x.cols, x.dtype), "{name}: weight");
}

/// Gradients of [`ShortConv`] without a past.
#[derive(Clone, Debug)]
pub struct ShortConvBackward {
    pub x: View,
    pub weight: View,
    pub segments: Segments,
    pub dout: View,
    /// Overwritten; neither `x` nor `dout`.
    pub dx: View,
    /// f32 [C, W], added to, if wanted.
    pub dweight: Option<View>,
}

impl Operation for ShortConvBackward {
    fn check(&self) {
        check_convolution("ShortConvBackward", &self.x, &self.weight, &self.segments);
        assert_same_shape("ShortConvBackward", &[self.x, self.dout, self.dx]);
        assert_eq!([self.dout.dtype, self.dx.dtype], [self.x.dtype; 2], "ShortConvBackward");
        if let Some(dweight) = &self.dweight {
            assert_same_shape("ShortConvBackward", &[self.weight, *dweight]);
            assert_eq!(dweight.dtype, DType::F32, "ShortConvBackward: dweight");
        }
    }

    fn bytes(&self) -> u64 {
        let rows = self.x.bytes() + self.dout.bytes() + self.dx.bytes();
        rows + self.weight.bytes() + 2 * optional_bytes(&self.dweight)
    }
}

/// The same convolution with weights of each token's own: `u[t, c] = Σ_j weights[t, c·W + j] · x[t - (W - 1) + j, c]`.
#[derive(Clone, Debug)]
pub struct DynamicConv {
    /// [T, C]
    pub x: View,
    /// [T, C·W], dtype of `x`.
    pub weights: View,
    pub segments: Segments,
    /// [T, C]; not `x`.
    pub out: View,
    /// As in [`ShortConv`].
    pub past: Option<View>,
}

impl DynamicConv {
    /// W
    pub fn taps(&self) -> usize {
        taps(&self.x, &self.weights)
    }
}

fn taps(x: &View, weights: &View) -> usize {
    weights.cols.checked_div(x.cols).unwrap_or(1)
}

impl Operation for DynamicConv {
    fn check(&self) {
        check_dynamic("DynamicConv", &self.x, &self.weights, &self.segments);
        assert_same_shape("DynamicConv", &[self.x, self.out]);
        assert_eq!(self.x.dtype, self.out.dtype, "DynamicConv");
        if let Some(past) = &self.past {
            let rows = self.segments.iter().count() * (self.taps() - 1);
            assert_eq!((past.shape(), past.dtype), ([rows, self.x.cols], self.x.dtype), "DynamicConv: past");
        }
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.weights.bytes() + self.out.bytes() + 2 * optional_bytes(&self.past)
    }
}

fn check_dynamic(name: &str, x: &View, weights: &View, segments: &Segments) {
    let taps = taps(x, weights);
    assert_eq!(segments.tokens(), x.rows, "{name}: segments do not cover the tokens");
    assert!((1..=16).contains(&taps), "{name}: {taps} taps");
    assert_eq!((weights.shape(), weights.dtype), ([x.rows, x.cols * taps], x.dtype), "{name}: weights");
}

/// Gradients of [`DynamicConv`] without a past, overwritten.
#[derive(Clone, Debug)]
pub struct DynamicConvBackward {
    pub x: View,
    pub weights: View,
    pub segments: Segments,
    pub dout: View,
    /// Neither `x` nor `dout`.
    pub dx: View,
    /// [T, C·W]; not `weights`.
    pub dweights: View,
}

impl DynamicConvBackward {
    /// W
    pub fn taps(&self) -> usize {
        taps(&self.x, &self.weights)
    }
}

impl Operation for DynamicConvBackward {
    fn check(&self) {
        check_dynamic("DynamicConvBackward", &self.x, &self.weights, &self.segments);
        assert_same_shape("DynamicConvBackward", &[self.x, self.dout, self.dx]);
        assert_same_shape("DynamicConvBackward", &[self.weights, self.dweights]);
        let dtypes = [self.dout.dtype, self.dx.dtype, self.dweights.dtype];
        assert_eq!(dtypes, [self.x.dtype; 3], "DynamicConvBackward");
    }

    fn bytes(&self) -> u64 {
        let rows = self.x.bytes() + self.dout.bytes() + self.dx.bytes();
        rows + self.weights.bytes() + self.dweights.bytes()
    }
}

/// How fast the states of value heads fade and how much of each token they take in: the decay is
/// `e^g`, `g = -e^log_rate · softplus(fade + bias)`, the share taken in `β = sigmoid(take)`.
#[derive(Clone, Copy, Debug)]
pub struct DeltaGates {
    /// [T, nv], dtype of the heads.
    pub fade: View,
    /// [T, nv], dtype of the heads.
    pub take: View,
    /// f32 [1, nv]
    pub log_rate: View,
    /// f32 [1, nv]
    pub bias: View,
}

impl DeltaGates {
    fn check(&self, name: &str, v: &Heads) {
        for gate in [self.fade, self.take] {
            assert_eq!((gate.shape(), gate.dtype), ([v.tokens(), v.count], v.view.dtype), "{name}: gates");
        }
        assert_vector(name, &self.log_rate, v.count);
        assert_vector(name, &self.bias, v.count);
    }

    fn bytes(&self) -> u64 {
        [self.fade, self.take, self.log_rate, self.bias].iter().map(|view| view.bytes()).sum()
    }
}

/// The gated delta rule. For each value head with a state S [K, V], zero at a segment's beginning, and for each token in turn:
///
/// `S ← e^g·S; S ← S + k̂·(β·(v - Sᵀk̂))ᵀ; out = Sᵀq̂`
///
/// where `k̂ = k / √(Σk² + 1e-6)`, and q̂ likewise, divided by √K.
#[derive(Clone, Debug)]
pub struct DeltaRule {
    /// nk heads of K elements.
    pub q: Heads,
    pub k: Heads,
    /// nv heads of V elements.
    pub v: Heads,
    pub gates: DeltaGates,
    pub segments: Segments,
    pub out: Heads,
    /// f32 [segments · nv · K, V]: the states before each segment; overwritten with those behind it.
    pub states: Option<View>,
    /// f32 [1, [`DeltaRule::work_len`]], for GPUs; CPUs leave it alone.
    pub work: Option<View>,
}

impl DeltaRule {
    /// The numbers of working memory that a GPU needs.
    pub fn work_len(&self) -> usize {
        crate::cuda::delta_work_len(&self.k, &self.v, &self.segments)
    }
}

/// What is added to a sum of squares before its root divides queries or keys.
pub const DELTA_EPSILON: f32 = 1e-6;

impl Operation for DeltaRule {
    fn check(&self) {
        check_rule("DeltaRule", &self.q, &self.k, &self.v, &[&self.out], &self.gates, &self.segments);
        if let Some(states) = &self.states {
            let rows = self.segments.iter().count() * self.v.count * self.k.dim;
            assert_eq!((states.shape(), states.dtype), ([rows, self.v.dim], DType::F32), "DeltaRule: states");
        }
    }

    fn flops(&self) -> u64 {
        rule_flops(&self.k, &self.v)
    }

    fn bytes(&self) -> u64 {
        let heads = [self.q, self.k, self.v, self.out].iter().map(Heads::bytes).sum::<u64>();
        heads + self.gates.bytes() + 2 * optional_bytes(&self.states)
    }
}

fn check_rule(name: &str, q: &Heads, k: &Heads, v: &Heads, like_v: &[&Heads], gates: &DeltaGates, segments: &Segments) {
    assert_eq!(segments.tokens(), v.tokens(), "{name}: segments do not cover the tokens");
    assert_eq!((q.count, q.dim), (k.count, k.dim), "{name}: queries and keys differ");
    assert!(v.count.is_multiple_of(k.count), "{name}: {} value heads over {} key heads", v.count, k.count);
    for heads in [q, k].into_iter().chain(like_v.iter().copied()) {
        assert_eq!((heads.tokens(), heads.view.dtype), (v.tokens(), v.view.dtype), "{name}: heads differ");
    }
    assert!(like_v.iter().all(|heads| (heads.count, heads.dim) == (v.count, v.dim)), "{name}: value heads differ");
    gates.check(name, v);
}

/// Multiply-adds of the chunked forms, counted twice.
fn rule_flops(k: &Heads, v: &Heads) -> u64 {
    let (key, value) = (k.dim as u64, v.dim as u64);
    let per_token = 2 * DELTA_CHUNK as u64 * (3 * key + 2 * value) + 6 * key * value;
    (v.tokens() * v.count) as u64 * per_token
}

/// Gradients of [`DeltaRule`] without states. `dq`, `dk`, `dv`, `dfade` and `dtake` are overwritten.
#[derive(Clone, Debug)]
pub struct DeltaRuleBackward {
    pub q: Heads,
    pub k: Heads,
    pub v: Heads,
    pub gates: DeltaGates,
    pub segments: Segments,
    pub dout: Heads,
    pub dq: Heads,
    pub dk: Heads,
    pub dv: Heads,
    /// [T, nv]
    pub dfade: View,
    /// [T, nv]
    pub dtake: View,
    /// f32 [1, nv], added to, if wanted.
    pub dlog_rate: Option<View>,
    pub dbias: Option<View>,
    /// As in [`DeltaRule`], of [`DeltaRuleBackward::work_len`].
    pub work: Option<View>,
}

impl DeltaRuleBackward {
    pub fn work_len(&self) -> usize {
        crate::cuda::delta_backward_work_len(&self.k, &self.v, &self.segments)
    }
}

impl Operation for DeltaRuleBackward {
    fn check(&self) {
        const NAME: &str = "DeltaRuleBackward";
        check_rule(NAME, &self.q, &self.k, &self.v, &[&self.dout, &self.dv], &self.gates, &self.segments);
        for heads in [&self.dq, &self.dk] {
            assert_eq!((heads.count, heads.dim, heads.tokens()), (self.k.count, self.k.dim, self.k.tokens()), "{NAME}");
        }
        assert_same_shape(NAME, &[self.gates.fade, self.dfade, self.dtake]);
        for vector in [self.dlog_rate, self.dbias].iter().flatten() {
            assert_vector(NAME, vector, self.v.count);
        }
    }

    fn flops(&self) -> u64 {
        3 * rule_flops(&self.k, &self.v)
    }

    fn bytes(&self) -> u64 {
        let heads = [self.q, self.k, self.v, self.dout, self.dq, self.dk, self.dv];
        let vectors = optional_bytes(&self.dlog_rate) + optional_bytes(&self.dbias);
        let gates = self.gates.bytes() + self.dfade.bytes() + self.dtake.bytes();
        heads.iter().map(Heads::bytes).sum::<u64>() + gates + 2 * vectors
    }
}

/// `out = weight · x / √(mean(x²) + epsilon) · silu(gate)`, row by row.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm {
    /// [R, D]
    pub x: View,
    /// [R, D]
    pub gate: View,
    /// f32 [1, D]
    pub weight: View,
    pub epsilon: f32,
    /// [R, D]; may be `x` or `gate`.
    pub out: View,
}

impl Operation for GatedNorm {
    fn check(&self) {
        assert_same_shape("GatedNorm", &[self.x, self.gate, self.out]);
        assert_eq!([self.gate.dtype, self.out.dtype], [self.x.dtype; 2], "GatedNorm");
        assert_vector("GatedNorm", &self.weight, self.x.cols);
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.gate.bytes() + self.weight.bytes() + self.out.bytes()
    }
}

/// Gradients of [`GatedNorm`]; `dx` may be `x` or `dout`, `dgate` may be `gate`.
#[derive(Clone, Copy, Debug)]
pub struct GatedNormBackward {
    pub x: View,
    pub gate: View,
    pub weight: View,
    pub epsilon: f32,
    pub dout: View,
    pub dx: View,
    pub dgate: View,
    /// f32 [1, D], added to, if wanted.
    pub dweight: Option<View>,
}

impl Operation for GatedNormBackward {
    fn check(&self) {
        let views = [self.x, self.gate, self.dout, self.dx, self.dgate];
        assert_same_shape("GatedNormBackward", &views);
        assert!(views.iter().all(|view| view.dtype == self.x.dtype), "GatedNormBackward");
        for vector in [Some(self.weight), self.dweight].iter().flatten() {
            assert_vector("GatedNormBackward", vector, self.x.cols);
        }
    }

    fn bytes(&self) -> u64 {
        let rows = [self.x, self.gate, self.dout, self.dx, self.dgate];
        rows.iter().map(|view| view.bytes()).sum::<u64>() + self.weight.bytes() + 2 * optional_bytes(&self.dweight)
    }
}
