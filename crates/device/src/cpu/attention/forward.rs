//! `out = softmax(scale · q·kᵀ) · v`, a block of queries at a time.

use std::ops::Range;

use super::super::math::exp;
use super::super::matrix::{Element, Matrix, matrix, with_element};
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::super::{Run, Team};
use super::tile::{Left, RescaleAdd, Right, Set, product};
use super::{Cutter, HeadRows, KEY_BLOCK, Shape, TILE, Tiles, Tokens, filled, keys_of, pack, rows_seen};
use crate::kernel::Attention;

/// The maximum before the first score. Finite, so that a query none of whose keys has come yet subtracts no infinities.
const LOWEST: f32 = -1e30;

impl Run for Attention {
    fn run(&self, team: &mut Team) {
        with_element!(self.q.view.dtype, E => run::<E>(self, team));
    }
}

fn run<E: Element>(kernel: &Attention, team: &mut Team) {
    let shape = Shape::new(&kernel.q, &kernel.k, kernel.mask);
    let mut blocks = Vec::new();
    for segment in filled(&kernel.segments) {
        // The last queries of a causal segment see the most keys: they go first, so that no long task ends alone.
        for start in (0..segment.len()).step_by(shape.query_block).rev() {
            let queries = start..segment.len().min(start + shape.query_block);
            blocks.extend((0..kernel.k.count).map(|key_head| (segment.clone(), queries.clone(), key_head)));
        }
    }
    let operands = Operands::<E> {
        q: HeadRows::of(&kernel.q),
        k: HeadRows::of(&kernel.k),
        v: HeadRows::of(&kernel.v),
        out: HeadRows::of(&kernel.out),
        logsum: matrix(&kernel.logsum),
        scale: kernel.scale,
        shape,
    };
    team.tasks(blocks.len(), |task, scratch| {
        let (segment, queries, key_head) = blocks[task].clone();
        let memory = Memory::cut(&shape, scratch.floats(Memory::floats(&shape)));
        vectorise(Block { operands, segment, queries, key_head, memory });
    });
}

#[derive(Clone, Copy)]
struct Operands<E> {
    q: HeadRows<E>,
    k: HeadRows<E>,
    v: HeadRows<E>,
    out: HeadRows<E>,
    logsum: Matrix<f32>,
    scale: f32,
    shape: Shape,
}

/// A thread's working memory.
#[derive(Clone, Copy)]
struct Memory {
    /// [KEY_BLOCK, W] each.
    keys: *mut f32,
    values: *mut f32,
    /// [TILE, W]: queries before they are transposed.
    rows: *mut f32,
    /// [KEY_BLOCK, TILE]: scores, then their exponentials.
    scores: *mut f32,
    /// [TILE]: what a larger maximum takes off the sums so far.
    factors: *mut f32,
    tiles: *mut f32,
    width: usize,
}

/// What a tile keeps from one key block to the next.
#[derive(Clone, Copy)]
struct TileMemory {
    /// [W, TILE], scaled.
    queries: *mut f32,
    /// [TILE, W]
    out: *mut f32,
    /// [2, TILE]
    bounds: *mut f32,
    /// [TILE] each.
    max: *mut f32,
    sum: *mut f32,
}

impl Memory {
    fn tile_floats(width: usize) -> usize {
        2 * TILE * width + 4 * TILE
    }

    fn floats(shape: &Shape) -> usize {
        let width = shape.width;
        let tiles = shape.tiles() * Memory::tile_floats(width);
        2 * KEY_BLOCK * width + TILE * width + KEY_BLOCK * TILE + TILE + tiles
    }

    fn cut(shape: &Shape, memory: &mut [f32]) -> Memory {
        let width = shape.width;
        let mut cutter = Cutter(memory);
        Memory {
            keys: cutter.cut(KEY_BLOCK * width),
            values: cutter.cut(KEY_BLOCK * width),
            rows: cutter.cut(TILE * width),
            scores: cutter.cut(KEY_BLOCK * TILE),
            factors: cutter.cut(TILE),
            tiles: cutter.cut(shape.tiles() * Memory::tile_floats(width)),
            width,
        }
    }

    #[inline(always)]
    fn tile(&self, tile: usize) -> TileMemory {
        let size = TILE * self.width;
        // SAFETY: `floats` counted as much for every tile of the block.
        unsafe {
            let queries = self.tiles.add(tile * Memory::tile_floats(self.width));
            let out = queries.add(size);
            let bounds = out.add(size);
            TileMemory { queries, out, bounds, max: bounds.add(2 * TILE), sum: bounds.add(3 * TILE) }
        }
    }
}

/// A block of queries, all heads of one group, against every key they see.
struct Block<E> {
    operands: Operands<E>,
    segment: Tokens,
    /// Counted from the segment's start.
    queries: Range<usize>,
    key_head: usize,
    memory: Memory,
}

impl<E: Element> Vectorised for Block<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.operands.shape;
        let (len, mask) = (self.segment.len(), shape.mask);
        // SAFETY of all below: tokens of the segment, heads of the group, and memory cut for this shape; only this task
        // writes the outputs of these queries.
        let tiles = Tiles::of(&shape, &self.queries, self.key_head);
        for tile in tiles.clone() {
            // SAFETY: above.
            unsafe { self.begin(s, self.memory.tile(tile.number), tile.head, tile.queries) };
        }
        let keys = keys_of(mask, &self.queries, len);
        for start in keys.clone().step_by(KEY_BLOCK) {
            let block = start..keys.end.min(start + KEY_BLOCK);
            let tokens = self.segment.start + block.start..self.segment.start + block.end;
            let size = [block.len().next_multiple_of(super::tile::ROWS), shape.width];
            // SAFETY: above.
            unsafe {
                pack::rows(s, self.operands.k, self.key_head, tokens.clone(), 1.0, self.memory.keys, size);
                pack::rows(s, self.operands.v, self.key_head, tokens, 1.0, self.memory.values, size);
            }
            for tile in tiles.clone() {
                if let Some((rows, all)) = rows_seen(mask, &tile.queries, len, &block) {
                    // SAFETY: above.
                    unsafe { self.attend(s, self.memory.tile(tile.number), block.start, rows, all) };
                }
            }
        }
        for tile in tiles {
            // SAFETY: above.
            unsafe { self.end(s, self.memory.tile(tile.number), tile.head, tile.queries) };
        }
    }
}

impl<E: Element> Block<E> {
    #[inline(always)]
    fn tokens(&self, queries: &Range<usize>) -> Range<usize> {
        self.segment.start + queries.start..self.segment.start + queries.end
    }

    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, s: S, tile: TileMemory, head: usize, queries: Range<usize>) {
        let Operands { q, scale, shape, .. } = self.operands;
        // SAFETY: the caller's promise.
        unsafe {
            pack::rows(s, q, head, self.tokens(&queries), scale, self.memory.rows, [TILE, shape.width]);
            pack::transposed(s, self.memory.rows, shape.width, tile.queries);
            pack::bounds(shape.mask, &queries, self.segment.len(), tile.bounds);
            for lane in 0..TILE {
                tile.max.add(lane).write(LOWEST);
                tile.sum.add(lane).write(0.0);
            }
            for i in (0..TILE * shape.width).step_by(LANES) {
                s.store(tile.out.add(i), s.splat(0.0));
            }
        }
    }

    /// Adds the keys in `rows` of the packed block that begins with key `first`.
    #[inline(always)]
    unsafe fn attend<S: Simd>(&self, s: S, tile: TileMemory, first: usize, rows: Range<usize>, all: bool) {
        let Shape { dim, width, .. } = self.operands.shape;
        let Memory { scores, factors, .. } = self.memory;
        // SAFETY: the caller's promise.
        unsafe {
            let keys = Left { first: self.memory.keys.add(rows.start * width), row: width, depth: 1 };
            let queries = Right { first: tile.queries, stride: TILE };
            product(s, keys, queries, dim, [rows.len(), TILE], scores, TILE, Set);
            if !all {
                hide(s, scores, tile.bounds, first + rows.start, rows.len());
            }
            exponentiate(s, scores, rows.len(), tile, factors);
            let weights = Left { first: scores, row: 1, depth: TILE };
            let values = Right { first: self.memory.values.add(rows.start * width), stride: width };
            product(s, weights, values, rows.len(), [TILE, width], tile.out, width, RescaleAdd(factors));
        }
    }

    #[inline(always)]
    unsafe fn end<S: Simd>(&self, s: S, tile: TileMemory, head: usize, queries: Range<usize>) {
        let tokens = self.tokens(&queries);
        // SAFETY: the caller's promise.
        unsafe {
            for (lane, token) in tokens.clone().enumerate() {
                let logsum = *tile.max.add(lane) + (*tile.sum.add(lane)).ln();
                self.operands.logsum.at(token, head).write(logsum);
            }
            for lanes in (0..TILE).step_by(LANES) {
                let inverse = s.div(s.splat(1.0), s.load(tile.sum.add(lanes)));
                s.store(tile.sum.add(lanes), inverse);
            }
            pack::unpack(s, tile.out, self.memory.width, pack::Factor::Each(tile.sum), self.operands.out, head, tokens);
        }
    }
}

/// Sets the scores of keys that a query does not see to minus infinity.
#[inline(always)]
pub(super) unsafe fn hide<S: Simd>(s: S, scores: *mut f32, bounds: *const f32, first_key: usize, rows: usize) {
    let hidden = s.splat(f32::NEG_INFINITY);
    for lanes in (0..TILE).step_by(LANES) {
        // SAFETY: the caller's promise: `scores` is [rows, TILE], `bounds` [2, TILE].
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

/// Turns scores into exponentials above the running maximum, and brings maximum and sum up to date.
#[inline(always)]
unsafe fn exponentiate<S: Simd>(s: S, scores: *mut f32, rows: usize, tile: TileMemory, factors: *mut f32) {
    /// Chains that run side by side, to hide the latency of a maximum.
    const CHAINS: usize = 4;
    for lanes in (0..TILE).step_by(LANES) {
        // SAFETY: the caller's promise: `scores` is [rows, TILE] and rows come in eights.
        unsafe {
            let before = s.load(tile.max.add(lanes));
            let mut chains = [before; CHAINS];
            for row in (0..rows).step_by(CHAINS) {
                for (i, max) in chains.iter_mut().enumerate() {
                    *max = s.max(s.load(scores.add((row + i) * TILE + lanes)), *max);
                }
            }
            let max = s.max(s.max(chains[0], chains[1]), s.max(chains[2], chains[3]));
            let factor = exp(s, s.sub(before, max));
            let mut sums = [s.splat(0.0); 2];
            for row in (0..rows).step_by(2) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let at = scores.add((row + i) * TILE + lanes);
                    let weight = exp(s, s.sub(s.load(at), max));
                    s.store(at, weight);
                    *sum = s.add(*sum, weight);
                }
            }
            let sum = s.mul_add(s.load(tile.sum.add(lanes)), factor, s.add(sums[0], sums[1]));
            s.store(tile.max.add(lanes), max);
            s.store(tile.sum.add(lanes), sum);
            s.store(factors.add(lanes), factor);
        }
    }
}
