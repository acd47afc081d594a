//! Attention that never holds a whole row of scores: key blocks stream past tiles of queries.
//!
//! A tile is [`TILE`] tokens of one query head. Its scores against a block of keys are kept transposed, keys down and
//! queries across, so that the softmax of sixteen queries is sixteen lanes that never meet, masks are comparisons of
//! lanes, and neither keys nor values are ever transposed. Operands are packed and widened to f32; every product of a
//! tile goes through [`tile::product`].
//!
//! Shapes in comments: W is the head dimension rounded up to whole vectors, the padding zero.

mod backward;
mod forward;
mod pack;
mod tile;

use std::ops::Range;

use super::matrix::{Element, Matrix, matrix};
use super::simd::LANES;
use crate::Heads;
use crate::kernel::{Mask, Segments};

/// Tokens of a tile: two vectors of scores.
const TILE: usize = 2 * LANES;
/// Keys that stream past the tiles together; packed keys and values of 64 numbers fill most of the first cache.
const KEY_BLOCK: usize = 64;
/// Rows of queries, all heads of a group together, that share packed keys.
const QUERY_ROWS: usize = 128;

/// One tensor's heads as pointers.
#[derive(Clone, Copy)]
struct HeadRows<E> {
    matrix: Matrix<E>,
    step: usize,
    dim: usize,
}

impl<E: Element> HeadRows<E> {
    fn of(heads: &Heads) -> HeadRows<E> {
        HeadRows { matrix: matrix(&heads.view), step: heads.step, dim: heads.dim }
    }

    #[inline(always)]
    fn at(&self, token: usize, head: usize) -> *mut E {
        self.matrix.at(token, head * self.step)
    }
}

/// How the work divides, by shape alone.
#[derive(Clone, Copy)]
struct Shape {
    /// Query heads to a key head.
    group: usize,
    dim: usize,
    /// `dim` in whole vectors.
    width: usize,
    mask: Mask,
    /// Tokens of a query block.
    query_block: usize,
}

impl Shape {
    fn new(q: &Heads, k: &Heads, mask: Mask) -> Shape {
        assert_ne!(mask.window, Some(0), "a window without the query's own token hides everything");
        let group = q.count / k.count;
        let query_block = (QUERY_ROWS / group / TILE * TILE).max(TILE);
        Shape { group, dim: q.dim, width: q.dim.next_multiple_of(LANES), mask, query_block }
    }

    /// Tiles of a whole query block: for each head of the group, its tokens.
    fn tiles(&self) -> usize {
        self.group * self.query_block / TILE
    }
}

/// A segment's tokens.
type Tokens = Range<usize>;

/// One tile of a block of queries.
#[derive(Clone)]
struct Tile {
    number: usize,
    /// The query head.
    head: usize,
    /// Counted from the segment's start.
    queries: Range<usize>,
}

/// The tiles of a block of queries. Not an iterator with closures: those are compiled apart, without the vector level.
#[derive(Clone)]
struct Tiles {
    next: Tile,
    block: Range<usize>,
    last_head: usize,
}

impl Tiles {
    #[inline(always)]
    fn of(shape: &Shape, block: &Range<usize>, key_head: usize) -> Tiles {
        let head = key_head * shape.group;
        let queries = block.start..block.end.min(block.start + TILE);
        Tiles { next: Tile { number: 0, head, queries }, block: block.clone(), last_head: head + shape.group - 1 }
    }
}

impl Iterator for Tiles {
    type Item = Tile;

    #[inline(always)]
    fn next(&mut self) -> Option<Tile> {
        if self.next.head > self.last_head {
            return None;
        }
        let tile = self.next.clone();
        let end = tile.queries.end == self.block.end;
        let start = if end { self.block.start } else { tile.queries.end };
        let queries = start..self.block.end.min(start + TILE);
        self.next = Tile { number: tile.number + 1, head: tile.head + usize::from(end), queries };
        Some(tile)
    }
}

/// The keys that any of the queries sees.
#[inline(always)]
fn keys_of(mask: Mask, queries: &Range<usize>, len: usize) -> Range<usize> {
    mask.keys(queries.start, len).start..mask.keys(queries.end - 1, len).end
}

/// The rows of a key block, in whole steps of the product's, that any of the queries sees; and whether all of them see
/// all of those.
#[inline(always)]
fn rows_seen(mask: Mask, queries: &Range<usize>, len: usize, block: &Range<usize>) -> Option<(Range<usize>, bool)> {
    let keys = keys_of(mask, queries, len);
    let (start, end) = (keys.start.max(block.start), keys.end.min(block.end));
    if start >= end {
        return None;
    }
    let rows = (start - block.start) / tile::ROWS * tile::ROWS..(end - block.start).next_multiple_of(tile::ROWS);
    let common = mask.keys(queries.end - 1, len).start..mask.keys(queries.start, len).end;
    let all = common.start <= block.start + rows.start && block.start + rows.end <= common.end;
    Some((rows, all))
}

/// Cuts memory in parts.
struct Cutter<'a>(&'a mut [f32]);

impl Cutter<'_> {
    fn cut(&mut self, len: usize) -> *mut f32 {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(len);
        self.0 = rest;
        part.as_mut_ptr()
    }
}

/// The segments that have tokens.
fn filled(segments: &Segments) -> Vec<Tokens> {
    segments.iter().filter(|segment| !segment.is_empty()).collect()
}
