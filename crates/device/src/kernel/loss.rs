//! Softmax cross-entropy over a vocabulary that may be split over ranks.
//!
//! Each rank reduces its own columns to [`LossStats`] (a maximum, a sum of exponentials, the label's logit, a sum of
//! logits); [`LossMerge`] joins the ranks' statistics; [`LossBackward`] turns logits and merged statistics into losses
//! and gradients. A single rank skips the merge.

use super::{Operation, assert_indices, optional_bytes};
use crate::{DType, View};

/// Maximum, sum of exp(logit - maximum), the label's logit (0 if another rank holds it), sum of logits.
pub const STATS_PER_TOKEN: usize = 4;

#[derive(Clone, Copy, Debug)]
pub struct LossStats {
    /// [T, V]
    pub logits: View,
    /// u32 [1, T], [`IGNORE`](super::IGNORE) where no loss is wanted.
    pub labels: View,
    /// The vocabulary index of the first column.
    pub first: u32,
    /// f32 [T, 4]
    pub stats: View,
}

impl Operation for LossStats {
    fn check(&self) {
        assert_indices("LossStats", &self.labels, self.logits.rows);
        assert_eq!(self.stats.shape(), [self.logits.rows, STATS_PER_TOKEN], "LossStats");
    }

    fn bytes(&self) -> u64 {
        self.logits.bytes() + self.stats.bytes()
    }
}

#[derive(Clone, Copy, Debug)]
pub struct LossMerge {
    /// f32 [R, 4 T]: the statistics of every rank.
    pub parts: View,
    /// f32 [T, 4]
    pub stats: View,
}

impl Operation for LossMerge {
    fn check(&self) {
        assert_eq!(self.parts.cols, self.stats.len(), "LossMerge: parts of another size");
        assert_eq!(self.stats.cols, STATS_PER_TOKEN, "LossMerge");
    }

    fn bytes(&self) -> u64 {
        self.parts.bytes() + self.stats.bytes()
    }
}

/// `loss = log Σ exp(z) - (1 - smoothing) · z[label] - smoothing · mean(z)`, and `dlogits = scale · ∂loss/∂z`.
/// Both are zero where the label is [`IGNORE`](super::IGNORE).
#[derive(Clone, Copy, Debug)]
pub struct LossBackward {
    /// [T, V]
    pub logits: View,
    pub labels: View,
    pub first: u32,
    /// f32 [T, 4], merged over the ranks.
    pub stats: View,
    /// Vocabulary size over all ranks.
    pub vocabulary: usize,
    pub smoothing: f32,
    pub scale: f32,
    /// The cap that [`SoftCap`](super::SoftCap) has put on the logits: then gradients are of what they were before.
    pub cap: Option<f32>,
    /// f32 [1, T], not scaled.
    pub losses: View,
    /// [T, V]; may be `logits` if the dtypes agree. Absent in evaluation.
    pub dlogits: Option<View>,
}

impl Operation for LossBackward {
    fn check(&self) {
        assert_indices("LossBackward", &self.labels, self.logits.rows);
        assert_eq!(self.stats.shape(), [self.logits.rows, STATS_PER_TOKEN], "LossBackward");
        assert_eq!((self.losses.shape(), self.losses.dtype), ([1, self.logits.rows], DType::F32), "LossBackward");
        assert!(self.dlogits.is_none_or(|dlogits| dlogits.shape() == self.logits.shape()), "LossBackward");
    }

    fn bytes(&self) -> u64 {
        let logits = if self.dlogits.is_some() { self.logits.bytes() } else { 0 };
        logits + optional_bytes(&self.dlogits) + self.stats.bytes() + self.losses.bytes()
    }
}
