//! The parameters of our own kernels, field by field as `kernels/attention/shared.cuh` declares them.

use crate::kernel::{AttentionDropout, Mask, ScoreChanges};
use crate::{DType, View};

/// Segments of one launch: its parameters, 4 KiB at most, hold their offsets. More of them take more launches.
pub(super) const MOST_SEGMENTS: usize = 384;

/// One tensor's heads.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Heads {
    pub address: u64,
    pub stride: i64,
    pub step: i64,
}

impl Heads {
    pub fn of(heads: &crate::Heads) -> Heads {
        Heads { address: heads.view.address(), stride: heads.view.stride as i64, step: heads.step as i64 }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Parameters {
    pub q: Heads,
    pub k: Heads,
    pub v: Heads,
    pub out: Heads,
    pub dout: Heads,
    pub dq: Heads,
    pub dk: Heads,
    pub dv: Heads,
    pub logsum: u64,
    pub logsum_stride: i64,
    pub delta: u64,
    pub dq_sums: u64,
    pub seed: u64,
    pub first_head: u64,
    pub first_token: u64,
    pub tokens: u32,
    pub dim: u32,
    pub group: u32,
    pub head_start: u32,
    pub capacity: u32,
    pub causal: u32,
    pub window: u32,
    pub aligned: u32,
    pub scale: f32,
    pub dropped_below: u32,
    pub kept: f32,
    pub segments: u32,
    pub offsets: [u32; MOST_SEGMENTS + 1],
    pub cached: [u32; MOST_SEGMENTS],
    pub cap: f32,
    pub inverse_cap: f32,
    /// Arguments are compared word by word, so there are no gaps.
    pub unused: u32,
    pub slopes: u64,
    pub sinks: u64,
    pub dsinks: u64,
}

const _: () = assert!(size_of::<Parameters>() <= 4096, "a kernel takes 4 KiB of parameters everywhere");

/// What kernels are compiled for.
#[derive(Clone, Copy)]
pub(super) struct Options {
    /// Weights are dropped.
    pub drops: bool,
    /// ScoreChanges are changed before the softmax.
    pub changes: bool,
}

/// Windows as wide as any segment, so that positions and windows add up in 32 bits.
const WIDEST_WINDOW: usize = 1 << 30;

impl Parameters {
    /// Parameters without a gradient, a cache, dropout, changes of scores or segments.
    pub fn new(q: &crate::Heads, k: &crate::Heads, v: &crate::Heads, mask: Mask, scale: f32) -> Parameters {
        assert_ne!(mask.window, Some(0), "a window without the query's own token hides everything");
        // The largest score is then also the largest before it is scaled.
        assert!(scale > 0.0, "scores are multiplied by {scale}, not by a positive number");
        Parameters {
            q: Heads::of(q),
            k: Heads::of(k),
            v: Heads::of(v),
            out: Heads::default(),
            dout: Heads::default(),
            dq: Heads::default(),
            dk: Heads::default(),
            dv: Heads::default(),
            logsum: 0,
            logsum_stride: 0,
            delta: 0,
            dq_sums: 0,
            seed: 0,
            first_head: 0,
            first_token: 0,
            tokens: number(q.tokens()),
            dim: number(q.dim),
            group: number(q.count / k.count),
            head_start: 0,
            capacity: 0,
            causal: mask.causal as u32,
            window: mask.window.map_or(0, |window| window.min(WIDEST_WINDOW) as u32),
            aligned: 0,
            scale,
            dropped_below: 0,
            kept: 1.0,
            segments: 0,
            offsets: [0; MOST_SEGMENTS + 1],
            cached: [0; MOST_SEGMENTS],
            cap: 0.0,
            inverse_cap: 0.0,
            unused: 0,
            slopes: 0,
            sinks: 0,
            dsinks: 0,
        }
    }

    pub fn set_logsum(&mut self, logsum: &View) {
        self.logsum = logsum.address();
        self.logsum_stride = logsum.stride as i64;
    }

    pub fn set_dropout(&mut self, dropout: Option<AttentionDropout>) {
        let Some(dropout) = dropout.filter(|dropout| dropout.probability > 0.0) else { return };
        self.dropped_below = dropped_below(dropout.probability);
        self.kept = 1.0 / (1.0 - dropout.probability);
        self.seed = dropout.seed;
        self.first_head = dropout.first_head;
        self.first_token = dropout.first_token;
    }

    pub fn set_scores(&mut self, scores: &ScoreChanges) {
        if let Some(cap) = scores.cap {
            self.cap = cap;
            self.inverse_cap = 1.0 / cap;
        }
        self.slopes = scores.slopes.map_or(0, |slopes| slopes.address());
        self.sinks = scores.sinks.map_or(0, |sinks| sinks.address());
    }

    /// Parameters for the heads from this one on.
    pub fn starting_at(&self, head: usize) -> Parameters {
        let delta = self.delta + head as u64 * self.tokens as u64 * size_of::<f32>() as u64;
        Parameters { head_start: number(head), delta, ..*self }
    }

    pub fn forward_options(&self) -> Options {
        let Options { drops, changes } = self.backward_options();
        Options { drops, changes: changes || self.sinks != 0 }
    }

    /// The logsum that gradients are computed from includes the sinks.
    pub fn backward_options(&self) -> Options {
        Options { drops: self.dropped_below > 0, changes: self.cap > 0.0 || self.slopes != 0 }
    }
}

/// A weight is dropped if its sixteen bits are below this. They are the upper half of the word that the kernels compare,
/// whatever the lower half is.
fn dropped_below(probability: f32) -> u32 {
    const STEPS: f32 = (1 << 16) as f32;
    ((probability * STEPS).ceil().min(STEPS - 1.0) as u32) << 16
}

/// Tokens, heads and their like fit 31 bits.
pub(super) fn number(value: usize) -> u32 {
    assert!(value < 1 << 31, "attention over {value} tokens or rows at once");
    value as u32
}

/// Whether every head begins at a multiple of 16 bytes and fills some.
pub(super) fn are_aligned(heads: &[&crate::Heads]) -> bool {
    heads.iter().all(|heads| {
        let elements = 16 / heads.view.dtype.size_bytes();
        let whole = [heads.dim, heads.step, heads.view.stride].iter().all(|len| len % elements == 0);
        heads.view.dtype == DType::Bf16 && whole && heads.view.address().is_multiple_of(16)
    })
}
