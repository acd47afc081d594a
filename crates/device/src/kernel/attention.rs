use std::sync::Arc;

use super::Operation;
use crate::{DType, Heads, View};

/// The bounds of a batch's sequences or packed documents: ascending offsets from 0 to T. A token attends only inside its own
/// segment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Segments(Arc<[usize]>);

impl Segments {
    pub fn new(offsets: Vec<usize>) -> Segments {
        assert!(offsets.first() == Some(&0) && offsets.is_sorted(), "segments begin at 0 and rise: {offsets:?}");
        Segments(offsets.into())
    }

    /// `count` sequences of `len` tokens.
    pub fn uniform(count: usize, len: usize) -> Segments {
        Segments::new((0..=count).map(|i| i * len).collect())
    }

    pub fn tokens(&self) -> usize {
        self.0[self.0.len() - 1]
    }

    pub fn iter(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.0.windows(2).map(|pair| pair[0]..pair[1])
    }
}

/// The keys that a query sees inside its segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mask {
    pub causal: bool,
    /// Only keys less than this many tokens behind the query (causal), or away from it on either side.
    pub window: Option<usize>,
}

impl Mask {
    /// The keys, counted from the segment's start, that the query at `query` of a segment of `len` tokens sees.
    pub fn keys(&self, query: usize, len: usize) -> std::ops::Range<usize> {
        let start = self.window.map_or(0, |window| (query + 1).saturating_sub(window));
        let end = match (self.causal, self.window) {
            (true, _) => query + 1,
            (false, Some(window)) => (query + window).min(len),
            (false, None) => len,
        };
        start..end
    }

    /// Query-key pairs in a segment of `len` tokens.
    fn pairs(&self, len: usize) -> u64 {
        (0..len).map(|query| self.keys(query, len).len() as u64).sum()
    }
}

/// Drops weights after the softmax and divides the others by `1 - probability`, which keeps their expected sum.
///
/// A weight's random number depends on the seed, the query head, the query's token and the key's place in its segment, so a
/// share of the heads or of the segments drops the same weights as the whole.
#[derive(Clone, Copy, Debug)]
pub struct AttentionDropout {
    pub probability: f32,
    pub seed: u64,
    /// The number of the first query head among all there are.
    pub first_head: u64,
    /// The place of the first token among all there are.
    pub first_token: u64,
}

/// Changes attention makes to its scores between the product and the softmax: the cap first, then the slopes. The default
/// changes nothing.
#[derive(Clone, Debug, Default)]
pub struct ScoreChanges {
    /// ScoreChanges s, already multiplied by `scale`, become `cap · tanh(s / cap)`.
    pub cap: Option<f32>,
    /// f32 [1, N]: `slope · (the key's position - the query's)` is added to each score of the head. Positions count within the
    /// segment or, in a cache, within the whole sequence. The slopes have no gradient.
    pub slopes: Option<View>,
    /// f32 [1, N]: a logit of each query head that joins the softmax's sum and has no value.
    pub sinks: Option<View>,
}

impl ScoreChanges {
    /// Whether attention is as without it.
    pub fn is_default(&self) -> bool {
        self.cap.is_none() && self.slopes.is_none() && self.sinks.is_none()
    }

    pub(super) fn check(&self, heads: usize) {
        assert!(self.cap.is_none_or(|cap| cap > 0.0 && cap.is_finite()), "Attention: a cap of {:?}", self.cap);
        for (what, view) in [("slopes", self.slopes), ("sinks", self.sinks)] {
            check_numbers(what, view, heads);
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        [self.slopes, self.sinks].into_iter().flatten().map(|view| view.bytes()).sum()
    }
}

/// Asserts that there is a number for each query head, if any.
fn check_numbers(what: &str, view: Option<View>, heads: usize) {
    if let Some(view) = view {
        assert_eq!((view.shape(), view.dtype), ([1, heads], DType::F32), "Attention {what}");
    }
}

/// `out = drop(softmax(scale · q·kᵀ)) · v` per head; query head h uses key head `h / (q.count / k.count)`.
#[derive(Clone, Debug)]
pub struct Attention {
    pub q: Heads,
    pub k: Heads,
    pub v: Heads,
    pub out: Heads,
    /// f32 [T, N]: log of each row's sum of exponentials, the sink's among them, for backward.
    pub logsum: View,
    pub segments: Segments,
    pub mask: Mask,
    pub scale: f32,
    pub dropout: Option<AttentionDropout>,
    pub scores: ScoreChanges,
}

fn check_dropout(dropout: &Option<AttentionDropout>) {
    let probability = dropout.map_or(0.0, |dropout| dropout.probability);
    assert!((0.0..1.0).contains(&probability), "Attention: dropout probability {probability}");
}

fn check_heads(q: &Heads, k: &Heads, v: &Heads, others: &[&Heads], logsum: &View, segments: &Segments) {
    assert_eq!(segments.tokens(), q.tokens(), "Attention: segments do not cover the tokens");
    assert!(q.count.is_multiple_of(k.count), "Attention: {} query heads over {} key heads", q.count, k.count);
    assert_eq!((k.count, k.tokens()), (v.count, v.tokens()), "Attention: keys and values differ");
    for heads in [k, v].into_iter().chain(others.iter().copied()) {
        assert!(heads.dim == q.dim || q.count == 0, "Attention: heads of {} and of {}", heads.dim, q.dim);
        assert_eq!(heads.tokens(), q.tokens(), "Attention: heads differ");
        assert_eq!(heads.view.dtype, q.view.dtype, "Attention: dtypes differ");
    }
    assert_eq!((logsum.shape(), logsum.dtype), ([q.tokens(), q.count], DType::F32), "Attention logsum");
}

fn pair_flops(q: &Heads, segments: &Segments, mask: Mask, products: u64) -> u64 {
    let pairs: u64 = segments.iter().map(|segment| mask.pairs(segment.len())).sum();
    2 * products * pairs * (q.count * q.dim) as u64
}

impl Operation for Attention {
    fn check(&self) {
        check_heads(&self.q, &self.k, &self.v, &[&self.out], &self.logsum, &self.segments);
        check_dropout(&self.dropout);
        self.scores.check(self.q.count);
    }

    fn flops(&self) -> u64 {
        pair_flops(&self.q, &self.segments, self.mask, 2)
    }

    fn bytes(&self) -> u64 {
        [self.q, self.k, self.v, self.out].iter().map(Heads::bytes).sum::<u64>()
            + self.logsum.bytes()
            + self.scores.bytes()
    }
}

/// Gradients of [`Attention`] with the same dropout and scores. `dk` and `dv` are overwritten, not added to.
#[derive(Clone, Debug)]
pub struct AttentionBackward {
    pub q: Heads,
    pub k: Heads,
    pub v: Heads,
    pub out: Heads,
    pub logsum: View,
    pub dout: Heads,
    pub dq: Heads,
    pub dk: Heads,
    pub dv: Heads,
    pub segments: Segments,
    pub mask: Mask,
    pub scale: f32,
    pub dropout: Option<AttentionDropout>,
    pub scores: ScoreChanges,
    /// f32 [1, N]: the gradients of the sinks are added to it.
    pub dsinks: Option<View>,
}

impl Operation for AttentionBackward {
    fn check(&self) {
        let others = [&self.out, &self.dout, &self.dq, &self.dk, &self.dv];
        check_heads(&self.q, &self.k, &self.v, &others, &self.logsum, &self.segments);
        check_dropout(&self.dropout);
        self.scores.check(self.q.count);
        check_numbers("dsinks", self.dsinks, self.q.count);
        assert!(self.dsinks.is_none() || self.scores.sinks.is_some(), "Attention: gradients of sinks without sinks");
    }

    fn flops(&self) -> u64 {
        pair_flops(&self.q, &self.segments, self.mask, 5)
    }

    fn bytes(&self) -> u64 {
        let heads = [self.q, self.k, self.v, self.out, self.dout, self.dq, self.dk, self.dv];
        // Gradients of sinks are read and written.
        let dsinks = self.dsinks.map_or(0, |dsinks| 2 * dsinks.bytes());
        heads.iter().map(Heads::bytes).sum::<u64>() + self.logsum.bytes() + self.scores.bytes() + dsinks
    }
}
