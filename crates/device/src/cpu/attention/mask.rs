//! The keys that the queries of a tile see.

use std::ops::Range;

use super::super::simd::{LANES, Simd};
use super::{QueryBlock, TILE};
use crate::kernel::Mask;

/// The keys that any of the queries sees.
#[inline(always)]
pub(super) fn keys_of(mask: Mask, queries: &Range<usize>, len: usize) -> Range<usize> {
    mask.keys(queries.start, len).start..mask.keys(queries.end - 1, len).end
}

/// Rows of a key block.
#[derive(Clone)]
pub(super) struct Seen {
    /// In whole steps of the level's.
    pub rows: Range<usize>,
    /// Whether all queries see all of them.
    pub all: bool,
}

/// The rows of a key block that any of the queries sees; none if they see none.
#[inline(always)]
pub(super) fn rows_seen(mask: Mask, queries: &Range<usize>, len: usize, block: &Range<usize>, step: usize) -> Seen {
    let keys = keys_of(mask, queries, len);
    let (start, end) = (keys.start.max(block.start), keys.end.min(block.end));
    if start >= end {
        return Seen { rows: 0..0, all: true };
    }
    let rows = (start - block.start) / step * step..(end - block.start).next_multiple_of(step);
    let common = mask.keys(queries.end - 1, len).start..mask.keys(queries.start, len).end;
    let all = common.start <= block.start + rows.start && block.start + rows.end <= common.end;
    Seen { rows, all }
}

/// The tiles of a query block that see keys of a key block. They are consecutive, since the keys of a later query neither begin
/// nor end earlier.
#[inline(always)]
pub(super) fn tiles_seen(mask: Mask, queries: &QueryBlock, keys: &Range<usize>) -> Range<usize> {
    let mut tiles = 0..0;
    for number in 0..queries.tiles() {
        let seen = keys_of(mask, &queries.tile(number).queries, queries.segment.len());
        if seen.start < keys.end && keys.start < seen.end {
            tiles = if tiles.is_empty() { number..number + 1 } else { tiles.start..number + 1 };
        }
    }
    tiles
}

/// The first key that each query of a tile sees, then the end of its keys: [2, TILE]. Positions are exact in f32, since
/// no segment has 2²⁴ tokens. Lanes beyond the last query see what it sees.
///
/// # Safety
/// `to` holds that many numbers.
#[inline(always)]
pub(super) unsafe fn write_bounds(mask: Mask, queries: &Range<usize>, len: usize, to: *mut f32) {
    for lane in 0..TILE {
        let keys = mask.keys((queries.start + lane).min(queries.end - 1), len);
        // SAFETY: the caller's promise.
        unsafe {
            to.add(lane).write(keys.start as f32);
            to.add(TILE + lane).write(keys.end as f32);
        }
    }
}

/// Sets the scores of keys that a query does not see to minus infinity.
///
/// # Safety
/// `scores` is [rows, TILE], `bounds` [2, TILE].
#[inline(always)]
pub(super) unsafe fn hide<S: Simd>(s: S, scores: *mut f32, bounds: *const f32, first_key: usize, rows: usize) {
    let hidden = s.splat(f32::NEG_INFINITY);
    for lanes in (0..TILE).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let (start, end) = (s.load(bounds.add(lanes)), s.load(bounds.add(TILE + lanes)));
            for row in 0..rows {
                let key = s.splat((first_key + row) as f32);
                let at = scores.add(row * TILE + lanes);
                let before_end = s.select_less(key, end, s.load(at), hidden);
                s.store(at, s.select_less(key, start, hidden, before_end));
            }
        }
    }
}
