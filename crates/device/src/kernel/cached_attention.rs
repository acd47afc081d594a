use std::sync::Arc;

use super::{Mask, Operation, ScoreChanges, Segments};
use crate::Heads;

/// Attention of new tokens to everything their sequences hold: the new keys and values are appended to a cache of B
/// sequences, then `out = softmax(scale · q·kᵀ) · v` per head over what is cached. Query head h uses key head
/// `h / (q.count / k.count)`. For generation: nothing is kept for a backward.
#[derive(Clone, Debug)]
pub struct CachedAttention {
    /// T new tokens of all sequences.
    pub q: Heads,
    pub k: Heads,
    pub v: Heads,
    pub out: Heads,
    /// B · capacity rows: those of sequence b begin at row b · capacity.
    pub cached_k: Heads,
    pub cached_v: Heads,
    pub capacity: usize,
    /// Tokens of each sequence that are cached already.
    pub lengths: Arc<[usize]>,
    /// The new tokens of each sequence; it may have none.
    pub segments: Segments,
    /// Causal; positions are counted from the sequence's first cached token.
    pub mask: Mask,
    pub scale: f32,
    pub scores: ScoreChanges,
}

impl CachedAttention {
    /// Each sequence's number of cached tokens and its new ones.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + '_ {
        self.lengths.iter().copied().zip(self.segments.iter())
    }
}

impl Operation for CachedAttention {
    fn check(&self) {
        let (q, k) = (&self.q, &self.k);
        assert!(self.mask.causal, "CachedAttention: a new token cannot see those after it");
        assert_ne!(self.mask.window, Some(0), "CachedAttention: a window without the query's own token");
        assert_eq!(q.count % k.count, 0, "CachedAttention: {} query heads over {} key heads", q.count, k.count);
        self.scores.check(q.count);
        assert_eq!(self.segments.tokens(), q.tokens(), "CachedAttention: segments do not cover the tokens");
        let [sequences, rows] = [self.segments.iter().count(), self.lengths.len() * self.capacity];
        assert_eq!(self.lengths.len(), sequences, "CachedAttention: a length for each sequence");
        for (heads, count, tokens) in [
            (&self.out, q.count, q.tokens()),
            (k, k.count, q.tokens()),
            (&self.v, k.count, q.tokens()),
            (&self.cached_k, k.count, rows),
            (&self.cached_v, k.count, rows),
        ] {
            assert_eq!((heads.count, heads.tokens()), (count, tokens), "CachedAttention: heads or tokens differ");
            assert_eq!((heads.dim, heads.view.dtype), (q.dim, q.view.dtype), "CachedAttention: heads differ");
        }
        for (length, new) in self.sequences() {
            let new = new.len();
            let capacity = self.capacity;
            let fits = length.checked_add(new).is_some_and(|total| total <= capacity);
            assert!(fits, "CachedAttention: {length} + {new} tokens in a cache of {capacity}");
        }
    }

    fn flops(&self) -> u64 {
        let seen = |position| self.mask.keys(position, position + 1).len() as u64;
        let pairs: u64 =
            self.sequences().map(|(length, new)| (length..length + new.len()).map(seen).sum::<u64>()).sum();
        4 * pairs * (self.q.count * self.q.dim) as u64
    }

    fn bytes(&self) -> u64 {
        // New keys and values are read and written to the cache; older ones are read from there.
        let older = self.sequences().filter(|(_, new)| !new.is_empty());
        let older: usize = older.map(|(length, _)| length - self.mask.keys(length, length + 1).start).sum();
        let row = (self.k.count * self.k.dim * self.k.view.dtype.size_bytes()) as u64;
        2 * self.q.bytes() + 2 * (self.k.bytes() + self.v.bytes()) + 2 * older as u64 * row + self.scores.bytes()
    }
}
