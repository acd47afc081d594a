//! Groups of heads that shards share by samples.
//!
//! Attention's work is a line: each group of query heads with its key and value head, and for each group all samples of a batch.
//! A shard has a stretch of that line. If a stretch ends inside a group, two or more shards compute that group, each for its own
//! samples: a stretch is made of strips. The cut inside a group depends on the batch's segments alone, so shards agree on it
//! without asking one another, and every head of every token is computed once.

use std::ops::Range;

use evenkeel_device::kernel::Segments;
use evenkeel_widths::SHARES;

use crate::sharding::shard::Shard;

/// Some groups of heads for some of a batch's samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strip {
    /// One for each group.
    pub kv_heads: Range<usize>,
    /// Its samples, as parts of the batch, of which there are [`SHARES`].
    pub shares: Range<usize>,
}

impl Strip {
    /// Whether it has the samples of every batch.
    pub fn is_of_all_samples(&self) -> bool {
        self.shares == (0..SHARES)
    }

    /// The rows of a batch with these segments. There may be none: a sample is never cut.
    pub fn rows(&self, segments: &Segments) -> Range<usize> {
        nearest_boundary(segments, self.shares.start)..nearest_boundary(segments, self.shares.end)
    }
}

impl Shard {
    /// Whether groups of heads are cut by samples in this layout. Then a shard holds every group that it computes for any sample.
    /// Its gradient of a group that others hold too is a summand, which no [`Sharing`](crate::Sharing) records: such a shard
    /// computes for a layout of whole groups, with parameters that migrate to it, and returns the gradients.
    pub fn is_shared_by_samples(&self) -> bool {
        self.shared_line.is_some()
    }

    /// The strips that attention computes here: the whole groups first, then those that other shards compute for other samples.
    pub fn strips(&self) -> Vec<Strip> {
        match &self.shared_line {
            Some(line) => strips(line),
            None => vec![Strip { kv_heads: self.kv_heads.clone(), shares: 0..SHARES }],
        }
    }
}

/// The groups that a stretch of the line touches.
pub(crate) fn groups_of(line: &Range<usize>) -> Range<usize> {
    let first = line.start / SHARES;
    first..if line.is_empty() { first } else { line.end.div_ceil(SHARES) }
}

fn strips(line: &Range<usize>) -> Vec<Strip> {
    let shares_of = |group: usize| {
        let start = line.start.max(group * SHARES) - group * SHARES;
        start..line.end.min((group + 1) * SHARES) - group * SHARES
    };
    let whole = line.start.div_ceil(SHARES)..line.end / SHARES;
    let partial = groups_of(line).filter(|group| !whole.contains(group));
    let some_samples = partial.map(|group| Strip { kv_heads: group..group + 1, shares: shares_of(group) });
    let all_samples = (!whole.is_empty()).then(|| Strip { kv_heads: whole.clone(), shares: 0..SHARES });
    all_samples.into_iter().chain(some_samples).collect()
}

/// The boundary of segments nearest to `share` parts of all tokens; the first if two are as near.
fn nearest_boundary(segments: &Segments, share: usize) -> usize {
    let wanted = share as u128 * segments.tokens() as u128;
    let miss = |&boundary: &usize| (SHARES as u128 * boundary as u128).abs_diff(wanted);
    let ends = segments.iter().map(|segment| segment.end);
    [0].into_iter().chain(ends).min_by_key(miss).expect("0 is one")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_is_whole_groups_and_what_is_left_of_the_groups_at_its_ends() {
        let strip = |kv_heads, shares| Strip { kv_heads, shares };
        for (line, expected) in [
            (0..64, vec![strip(0..1, 0..64)]),
            (64..256, vec![strip(1..4, 0..64)]),
            (40..200, vec![strip(1..3, 0..64), strip(0..1, 40..64), strip(3..4, 0..8)]),
            (40..100, vec![strip(0..1, 40..64), strip(1..2, 0..36)]),
            (40..128, vec![strip(1..2, 0..64), strip(0..1, 40..64)]),
            (64..140, vec![strip(1..2, 0..64), strip(2..3, 0..12)]),
            (74..114, vec![strip(1..2, 10..50)]),
            (64..70, vec![strip(1..2, 0..6)]),
            (120..128, vec![strip(1..2, 56..64)]),
            (70..70, vec![]),
            (128..128, vec![]),
        ] {
            assert_eq!(strips(&line), expected, "{line:?}");
        }
    }

    #[test]
    fn cuts_lie_at_the_nearest_boundary_of_samples() {
        for (offsets, cuts) in [
            (vec![0, 8, 16, 24, 32], vec![(0, 0), (7, 0), (8, 0), (9, 8), (16, 8), (25, 16), (63, 32), (64, 32)]),
            (vec![0, 30, 32], vec![(29, 0), (30, 0), (31, 30), (60, 30), (62, 30), (63, 32), (64, 32)]),
            (vec![0, 7], vec![(0, 0), (32, 0), (33, 7), (64, 7)]),
            (vec![0, 0, 4, 4, 8, 8], vec![(0, 0), (32, 4), (64, 8)]),
        ] {
            let segments = Segments::new(offsets);
            for (share, expected) in cuts {
                assert_eq!(nearest_boundary(&segments, share), expected, "{share} of {segments:?}");
            }
        }
    }
}
