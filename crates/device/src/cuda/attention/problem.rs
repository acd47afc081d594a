//! An attention problem for cuDNN, which one plan serves.

use crate::kernel::{Attention, AttentionBackward, AttentionDropout, Mask, Operation, Segments};
use crate::{DType, Heads, View};

use super::parameters::are_aligned;

/// Operations below which no plan is made: finding one takes half a second, and our own kernels need some microseconds.
const LEAST_FLOPS: u64 = 1 << 32;
const WIDEST_HEAD: usize = 128;
const SHORTEST_SEGMENT: usize = 64;

/// An operand's strides in elements: from token to token, and from head to head.
pub(super) type Steps = [i64; 2];

/// Shapes, layouts and mask.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    /// Sequences, and the tokens of each.
    pub batch: i64,
    pub len: i64,
    pub heads: i64,
    pub key_heads: i64,
    pub dim: i64,
    pub causal: bool,
    /// Narrower than a sequence.
    pub window: Option<i64>,
    pub logsum_stride: i64,
    pub layouts: Layouts,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Layouts {
    Forward { q: Steps, k: Steps, v: Steps, out: Steps },
    Backward { q: Steps, k: Steps, v: Steps, out: Steps, dout: Steps, dq: Steps, dk: Steps, dv: Steps },
}

impl Problem {
    /// The problem, if cuDNN may be asked for it.
    pub fn forward(kernel: &Attention) -> Option<Problem> {
        let Attention { q, k, v, out, logsum, segments, mask, dropout, scores, .. } = kernel;
        let layouts = || Layouts::Forward { q: steps(q), k: steps(k), v: steps(v), out: steps(out) };
        let can = scores.is_default() && are_aligned(&[q, k, v, out]) && kernel.flops() >= LEAST_FLOPS;
        if can { problem(q, k, logsum, segments, *mask, dropout, layouts()) } else { None }
    }

    pub fn backward(kernel: &AttentionBackward) -> Option<Problem> {
        let AttentionBackward { q, k, v, out, logsum, dout, dq, dk, dv, segments, mask, dropout, scores, .. } = kernel;
        let layouts = || Layouts::Backward {
            q: steps(q),
            k: steps(k),
            v: steps(v),
            out: steps(out),
            dout: steps(dout),
            dq: steps(dq),
            dk: steps(dk),
            dv: steps(dv),
        };
        let can =
            scores.is_default() && are_aligned(&[q, k, v, out, dout, dq, dk, dv]) && kernel.flops() >= LEAST_FLOPS;
        if can { problem(q, k, logsum, segments, *mask, dropout, layouts()) } else { None }
    }
}

fn steps(heads: &Heads) -> Steps {
    [heads.view.stride as i64, heads.step as i64]
}

fn problem(
    q: &Heads,
    k: &Heads,
    logsum: &View,
    segments: &Segments,
    mask: Mask,
    dropout: &Option<AttentionDropout>,
    layouts: Layouts,
) -> Option<Problem> {
    let len = uniform_len(segments)?;
    let window = mask.window.filter(|&window| window < len);
    let drops = dropout.is_some_and(|dropout| dropout.probability > 0.0);
    let fits = q.view.dtype == DType::Bf16 && q.dim <= WIDEST_HEAD && len >= SHORTEST_SEGMENT;
    (fits && !drops && (mask.causal || window.is_none())).then(|| Problem {
        batch: (q.tokens() / len) as i64,
        len: len as i64,
        heads: q.count as i64,
        key_heads: k.count as i64,
        dim: q.dim as i64,
        causal: mask.causal,
        window: window.map(|window| window as i64),
        logsum_stride: logsum.stride as i64,
        layouts,
    })
}

/// The length of all segments, if they have the same.
fn uniform_len(segments: &Segments) -> Option<usize> {
    let mut lens = segments.iter().map(|segment| segment.len());
    let first = lens.next().filter(|&len| len > 0)?;
    lens.all(|len| len == first).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Extent;
    use crate::kernel::ScoreChanges;

    const MASK: Mask = Mask { causal: true, window: None };

    fn kernel(dtype: DType, heads: usize, dim: usize, segments: Segments, mask: Mask) -> Attention {
        let tokens = segments.tokens();
        let view = |cols: usize, dtype| View::new(256, Extent { rows: tokens, cols, stride: cols, dtype });
        let q = Heads::packed(view(heads * dim, dtype), heads);
        let logsum = view(heads, DType::F32);
        Attention {
            q,
            k: q,
            v: q,
            out: q,
            logsum,
            segments,
            mask,
            scale: 1.0,
            dropout: None,
            scores: ScoreChanges::default(),
        }
    }

    #[test]
    fn only_large_uniform_bf16_problems_without_dropout_or_changed_scores_are_cudnns() {
        let long = || Segments::uniform(2, 2048);
        let good = kernel(DType::Bf16, 16, 64, long(), MASK);
        let problem = Problem::forward(&good).expect("a problem for cuDNN");
        assert_eq!((problem.batch, problem.len, problem.heads, problem.dim), (2, 2048, 16, 64));
        let window = |window, causal| Mask { causal, window: Some(window) };
        let narrow = Problem::forward(&kernel(DType::Bf16, 32, 128, long(), window(500, true)));
        assert_eq!(narrow.and_then(|problem| problem.window), Some(500));
        let wide = Problem::forward(&kernel(DType::Bf16, 16, 64, long(), window(2048, true)));
        assert_eq!(wide.map(|problem| problem.window), Some(None));
        let dropout = AttentionDropout { probability: 0.1, seed: 0, first_head: 0, first_token: 0 };
        let mut shifted = kernel(DType::Bf16, 16, 64, long(), MASK);
        shifted.v.view = View::new(264, *shifted.v.view);
        for (why, kernel) in [
            ("f32", kernel(DType::F32, 16, 64, long(), MASK)),
            ("small", kernel(DType::Bf16, 1, 64, long(), MASK)),
            ("an odd dimension", kernel(DType::Bf16, 32, 60, long(), MASK)),
            ("wide heads", kernel(DType::Bf16, 16, 256, long(), MASK)),
            ("uneven segments", kernel(DType::Bf16, 16, 64, Segments::new(vec![0, 2000, 4096]), MASK)),
            ("a window on both sides", kernel(DType::Bf16, 32, 128, long(), window(1000, false))),
            ("dropout", Attention { dropout: Some(dropout), ..good.clone() }),
            (
                "a cap",
                Attention { scores: ScoreChanges { cap: Some(50.0), ..ScoreChanges::default() }, ..good.clone() },
            ),
            (
                "sinks",
                Attention {
                    scores: ScoreChanges { sinks: Some(good.logsum), ..ScoreChanges::default() },
                    ..good.clone()
                },
            ),
            ("an odd address", shifted),
        ] {
            assert!(Problem::forward(&kernel).is_none(), "{why} is not for cuDNN");
        }
    }
}
