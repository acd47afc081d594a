//! Divides the gradients of attention into tasks, by shape alone, and computes the memory that takes.
//!
//! A key's gradient sums over queries and a query's over keys, so computing the scores once requires sums for one of the two. A
//! short segment is computed so, with its keys' sums in the memory of a task; if segments and key heads are too few to occupy
//! many cores, several tasks share its query blocks, each with its own sums, which are added in order at the end. Longer
//! segments, whose sums would grow without bound, are computed twice: once for the gradients of some keys, once for those of
//! some queries. That takes seven products instead of five.

use std::ops::Range;

use super::mask::keys_of;
use super::{KEY_BLOCK, Shape};

/// Tasks wanted, if the shape has enough work.
const TASKS: usize = 32;
/// Keys times W of a segment whose scores are computed once.
const SEGMENT_NUMBERS: usize = if cfg!(test) { 1 << 12 } else { 1 << 19 };
/// The largest sums of all tasks together: as much as the packed operands of a product.
const SHARED_NUMBERS: usize = if cfg!(test) { 1 << 16 } else { 32 << 20 };
/// Keys that a task packs at once in a longer segment.
pub(super) const CHUNK: usize = if cfg!(test) { 2 * KEY_BLOCK } else { 8 * KEY_BLOCK };

#[derive(Clone, Debug)]
pub(super) struct Task {
    pub segment: Range<usize>,
    pub key_head: usize,
    pub part: Part,
}

/// A task's part of its segment and key head. Tokens are counted from the segment's start.
#[derive(Clone, Debug)]
pub(super) enum Part {
    /// Everything, for each `shares`-th query block from `share` on. The keys' sums begin at `sums` of the shared memory
    /// if there are several shares.
    Both { share: usize, shares: usize, sums: usize },
    /// The gradients of these keys.
    Keys(Range<usize>),
    /// The gradients of the queries of a block.
    Queries(usize),
}

/// A task's loop: its query blocks, for each part of its keys.
pub(super) struct Plan {
    pub keys: Range<usize>,
    pub keys_at_once: usize,
    pub blocks: Range<usize>,
    pub block_step: usize,
    pub for_keys: bool,
    pub for_queries: bool,
    /// Whether the keys' sums are added to other tasks'.
    pub shared: bool,
}

impl Task {
    pub fn plan(&self, shape: &Shape) -> Plan {
        let len = self.segment.len();
        let chunk = CHUNK.min(len);
        match &self.part {
            Part::Both { share, shares, .. } => Plan {
                keys: 0..len,
                keys_at_once: len,
                blocks: *share..shape.blocks(len),
                block_step: *shares,
                for_keys: true,
                for_queries: true,
                shared: *shares > 1,
            },
            Part::Keys(keys) => Plan {
                keys: keys.clone(),
                keys_at_once: chunk,
                blocks: 0..shape.blocks(len),
                block_step: 1,
                for_keys: true,
                for_queries: false,
                shared: false,
            },
            Part::Queries(block) => Plan {
                keys: keys_of(shape.mask, &shape.block(*block, len), len),
                keys_at_once: chunk,
                blocks: *block..block + 1,
                block_step: 1,
                for_keys: false,
                for_queries: true,
                shared: false,
            },
        }
    }

    /// Roughly, the pairs of a query and a key.
    fn pairs(&self, shape: &Shape) -> usize {
        let len = self.segment.len();
        let seen = |tokens: usize| shape.mask.window.map_or(tokens, |window| tokens.min(2 * window));
        match &self.part {
            Part::Both { shares, .. } => len * seen(len) / shares,
            Part::Keys(keys) => keys.len() * seen(if shape.mask.causal { len - keys.start } else { len }),
            Part::Queries(block) => {
                let queries = shape.block(*block, len);
                queries.len() * seen(if shape.mask.causal { queries.end } else { len })
            }
        }
    }
}

/// The tasks, and the numbers of shared memory that they need.
pub(super) fn divide(shape: &Shape, segments: &[Range<usize>], key_heads: usize, step: usize) -> (Vec<Task>, usize) {
    // Work grows with the square of the length, or with the window.
    let pairs = |segment: &Range<usize>| segment.len() * shape.mask.window.unwrap_or(usize::MAX).min(segment.len());
    let total: usize = segments.iter().map(pairs).sum::<usize>() * key_heads;
    let mut tasks = Vec::new();
    let mut shared = 0;
    for segment in segments {
        let len = segment.len();
        let wanted = (pairs(segment) * TASKS).div_ceil(total.max(1));
        let shares = wanted.min(shape.blocks(len)).max(1);
        let sums = if shares > 1 { sums_floats(shape, len, step) } else { 0 };
        let once = len * shape.width <= SEGMENT_NUMBERS && shared + key_heads * shares * sums <= SHARED_NUMBERS;
        for key_head in 0..key_heads {
            let mut push = |part| tasks.push(Task { segment: segment.clone(), key_head, part });
            if once {
                for share in 0..shares {
                    push(Part::Both { share, shares, sums: shared });
                    shared += sums;
                }
            } else {
                (0..len).step_by(CHUNK).for_each(|start| push(Part::Keys(start..len.min(start + CHUNK))));
                (0..shape.blocks(len)).for_each(|block| push(Part::Queries(block)));
            }
        }
    }
    // The longest first, so that none ends alone.
    tasks.sort_by_key(|task| std::cmp::Reverse(task.pairs(shape)));
    (tasks, shared)
}

/// dk, then dv: [keys in whole steps, W] each.
pub(super) fn sums_floats(shape: &Shape, keys: usize, step: usize) -> usize {
    2 * keys.next_multiple_of(step) * shape.width
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Mask;

    #[test]
    fn working_memory_is_bounded_whatever_the_segments() {
        let shape = Shape {
            group: 2,
            dim: 64,
            width: 64,
            mask: Mask { causal: true, window: None },
            scale: 1.0,
            query_block: 64,
        };
        for lengths in [vec![1], vec![64], vec![65, 3], vec![1 << 15], vec![1 << 15, 64, 64, 1 << 20], vec![40; 300]] {
            let mut segments = Vec::new();
            for len in lengths {
                let start = segments.last().map_or(0, |segment: &Range<usize>| segment.end);
                segments.push(start..start + len);
            }
            for key_heads in [1, 8] {
                let (tasks, shared) = divide(&shape, &segments, key_heads, 8);
                assert!(shared <= SHARED_NUMBERS, "{segments:?}: {shared} shared numbers");
                let largest = tasks.iter().map(|task| task.plan(&shape).keys_at_once).max().unwrap_or(0);
                assert!(largest * shape.width <= SEGMENT_NUMBERS.max(CHUNK * shape.width), "{segments:?}: {largest}");
            }
        }
    }

    #[test]
    fn every_query_and_every_key_belongs_to_one_task_of_its_kind() {
        let mask = Mask { causal: false, window: Some(9) };
        let shape = Shape { group: 1, dim: 16, width: 16, mask, scale: 1.0, query_block: 128 };
        let segments = [0..50, 50..350, 350..3000, 3000..3001];
        let (tasks, _) = divide(&shape, &segments, 2, 8);
        for segment in &segments {
            for key_head in 0..2 {
                let (mut queries, mut keys) = (vec![0; segment.len()], vec![0; segment.len()]);
                for task in tasks.iter().filter(|task| task.segment == *segment && task.key_head == key_head) {
                    match &task.part {
                        Part::Both { share, shares, .. } => {
                            if *share == 0 {
                                keys.iter_mut().for_each(|count| *count += 1);
                            }
                            for block in (*share..shape.blocks(segment.len())).step_by(*shares) {
                                queries[shape.block(block, segment.len())].iter_mut().for_each(|count| *count += 1);
                            }
                        }
                        Part::Keys(range) => keys[range.clone()].iter_mut().for_each(|count| *count += 1),
                        Part::Queries(block) => {
                            queries[shape.block(*block, segment.len())].iter_mut().for_each(|count| *count += 1);
                        }
                    }
                }
                assert!(queries.iter().chain(&keys).all(|&count| count == 1), "{segment:?}: {queries:?} {keys:?}");
            }
        }
    }
}
