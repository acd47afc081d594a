//! The balance of experts over a model's layers: L layers with experts, E experts, T tokens, k experts chosen for each.
//!
//! With F_e, the share of pairs that go to expert e, and P_e, the mean of its p, over all tokens of all layers, the loss of balance is
//! `coefficient · E · Σ F_e·P_e`. F has no gradient.

use super::{Operation, assert_indices, assert_same_shape};
use crate::{DType, View};

/// What a layer adds to the balance: in row 0 the pairs of each expert, in row 1 the sums of their p, the softmax of the logits over
/// all experts.
#[derive(Clone, Copy, Debug)]
pub struct BalanceTally {
    /// f32 [T, E]
    pub logits: View,
    /// u32 [T, k]
    pub chosen: View,
    /// u32 [1, T]: 0 for tokens that are left out.
    pub counted: View,
    /// f32 [2, E], overwritten.
    pub out: View,
}

impl Operation for BalanceTally {
    fn check(&self) {
        let [tokens, experts] = self.logits.shape();
        assert_indices("BalanceTally", &self.counted, tokens);
        assert_eq!((self.chosen.rows, self.chosen.dtype), (tokens, DType::U32), "BalanceTally");
        assert_eq!((self.out.shape(), self.out.dtype), ([2, experts], DType::F32), "BalanceTally");
        assert_eq!(self.logits.dtype, DType::F32, "BalanceTally");
    }

    fn bytes(&self) -> u64 {
        [self.logits, self.chosen, self.counted, self.out].iter().map(|view| view.bytes()).sum()
    }
}

/// Adds the gradient of the loss of balance to that of a layer's logits: `p · (s - Σ p·s)` with `s_e = factor · Σ pairs of e` over all
/// layers.
#[derive(Clone, Copy, Debug)]
pub struct BalanceBackward {
    /// f32 [T, E]
    pub logits: View,
    /// f32 [2·L, E]: two rows of each layer, as [`BalanceTally`] writes them.
    pub tallies: View,
    /// u32 [1, T]
    pub counted: View,
    pub factor: f32,
    /// [T, E], added to; its dtype may be any.
    pub dlogits: View,
}

impl Operation for BalanceBackward {
    fn check(&self) {
        assert_same_shape("BalanceBackward", &[self.logits, self.dlogits]);
        assert_indices("BalanceBackward", &self.counted, self.logits.rows);
        assert_eq!((self.tallies.cols, self.tallies.dtype), (self.logits.cols, DType::F32), "BalanceBackward");
        assert!(self.tallies.rows.is_multiple_of(2), "BalanceBackward: two rows of each layer");
        assert_eq!(self.logits.dtype, DType::F32, "BalanceBackward");
    }

    fn bytes(&self) -> u64 {
        let read = [self.logits, self.tallies, self.counted];
        read.iter().map(|view| view.bytes()).sum::<u64>() + 2 * self.dlogits.bytes()
    }
}
