//! How long segments are cut in stretches. A block goes through chunks one after the other, so few heads over long segments would leave
//! most of a GPU idle.
//!
//! What a stretch does to states is affine. All stretches but the last run ahead side by side, from no state for the constant part and
//! from the unit matrix for the linear part. Then states are handed on from stretch to stretch, and all stretches run side by side from
//! the states they really begin with. Backward does the same with gradients of states, whose linear part is the same, transposed.

use crate::kernel::{DELTA_CHUNK, Segments};

/// Columns of states to a warp.
pub(super) const WARP_COLUMNS: usize = 16;
/// Columns that GPUs of some 130 multiprocessors take at once. All GPUs cut alike, so that working memory and results are the same.
const COLUMNS_AT_ONCE: usize = 1024 * WARP_COLUMNS;
/// Chunks of the shortest stretch.
const LEAST_CHUNKS: usize = 4;
/// Stretches of the longest segment, at least: two would take as long ahead and then again as one.
const LEAST_STRETCHES: usize = 3;
/// Chunks of a stretch where segments are whole.
const WHOLE: usize = (1 << 31) / DELTA_CHUNK - 1;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stretches {
    /// Chunks of each, but the last of a segment may have fewer.
    chunks: usize,
    /// Segments of up to so many tokens are left to others.
    few: usize,
}

impl Stretches {
    /// The shortest stretches that all run ahead at once, each with so many columns of all heads' states.
    pub fn new(columns: usize, segments: &Segments, few: usize) -> Stretches {
        let longest = segments.iter().map(|tokens| tokens.len().div_ceil(DELTA_CHUNK)).max().unwrap_or(0);
        let fits = |chunks: usize| Stretches { chunks, few }.count(segments, true) * columns <= COLUMNS_AT_ONCE;
        let (mut chunks, mut enough) = (LEAST_CHUNKS, longest.max(LEAST_CHUNKS));
        while chunks < enough {
            let middle = chunks.midpoint(enough);
            if fits(middle) {
                enough = middle;
            } else {
                chunks = middle + 1;
            }
        }
        let pays = longest.div_ceil(chunks) >= LEAST_STRETCHES;
        Stretches { chunks: if pays { chunks } else { WHOLE }, few }
    }

    /// Whether any segment may have several.
    pub fn are_several(&self) -> bool {
        self.chunks < WHOLE
    }

    pub fn tokens(&self) -> usize {
        self.chunks * DELTA_CHUNK
    }

    /// Stretches of all segments; of each all but the last if they run `ahead`.
    pub fn count(&self, segments: &Segments, ahead: bool) -> usize {
        let filled = segments.iter().map(|tokens| tokens.len()).filter(|&tokens| tokens > self.few);
        filled.map(|tokens| tokens.div_ceil(self.tokens()) - ahead as usize).sum()
    }

    /// The borders of so many tokens' stretches, as `border_at` in kernels/delta/tiles.cuh numbers them.
    pub fn borders(&self, tokens: usize) -> usize {
        if self.are_several() { 2 * tokens / self.tokens() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(heads: usize, columns: usize, lengths: &[usize]) -> Option<usize> {
        let ends = lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        let segments = Segments::new(std::iter::once(0).chain(ends).collect());
        let stretches = Stretches::new(heads * columns, &segments, 0);
        stretches.are_several().then_some(stretches.chunks)
    }

    #[test]
    fn long_segments_of_few_heads_are_cut() {
        // Jet-Nemotron-2B: 96 of 192, four stretches ahead of 216 warps each.
        assert_eq!(chunks(12, 288, &[4096]), Some(13));
        assert_eq!(chunks(8, 256, &[8192]), Some(15));
        assert_eq!(chunks(8, 256, &[4096, 4096]), Some(13));
        // No shorter than four chunks.
        assert_eq!(chunks(2, 288, &[1100]), Some(4));
        assert_eq!(chunks(2, 288, &[700, 333]), Some(4));
        // Others are there, too.
        assert_eq!(chunks(12, 288, &[4096, 100, 1, 60]), Some(13));
    }

    #[test]
    fn whatever_fills_a_gpu_stays_whole() {
        assert_eq!(chunks(16, 256, &[2048; 8]), None);
        assert_eq!(chunks(48, 256, &[4096; 2]), None);
        assert_eq!(chunks(8, 512, &[2048; 8]), None);
        assert_eq!(chunks(2000, 64, &[100_000]), None);
    }

    #[test]
    fn short_segments_stay_whole() {
        for lengths in [&[][..], &[0], &[1], &[512], &[64, 500, 0, 3]] {
            assert_eq!(chunks(1, 48, lengths), None, "{lengths:?}");
        }
        assert_eq!(chunks(1, 48, &[513]), Some(4));
    }
}
