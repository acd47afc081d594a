//! `out = drop(softmax(scale · q·kᵀ)) · v`, a block of queries at a time. ScoreChanges may be changed before the softmax.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::features::{Bf16Level, bf16_level};
use super::super::math::exp;
use super::super::matrix::{Element, Matrix, matrix};
use super::super::simd::{LANES, Simd, Vectorised};
use super::super::{Run, Team, WorkingMemory};
use super::dropout::{Dropping, KeepAll, TileNoise, active, kept_factor};
use super::level::{Level, Scored};
use super::mask::{hide, keys_of, rows_seen, tiles_seen, write_bounds};
use super::pack::{self, Rows};
use super::scores::Changes;
use super::{Cutter, HeadRows, KEY_BLOCK, QueryBlock, Shape, TILE, Tile, filled, with_level};
use crate::kernel::{Attention, AttentionDropout};

/// Rows of queries that share packed keys, which are packed again for every block.
const QUERY_ROWS: usize = 256;
/// How far a score may exceed the subtracted maximum before the maximum is raised and the sums so far are scaled down:
/// exponentials up to e⁸ are as exact as those below one, and most blocks of keys need no scaling.
const RISE: f32 = 8.0;

impl Run for Attention {
    fn run(&self, team: &mut Team) {
        run_at(self, bf16_level(), team);
    }

    fn working_memory(&self) -> WorkingMemory {
        with_level!(self.q.view.dtype, bf16_level(), working_memory(self))
    }
}

/// Computes bf16 at the given level, which this CPU must have.
pub(super) fn run_at(kernel: &Attention, level: Bf16Level, team: &mut Team) {
    with_level!(kernel.q.view.dtype, level, run(kernel, team));
}

fn shape<E: Element, L: Level<E>>(kernel: &Attention) -> Shape {
    Shape::new::<E, L>(&kernel.q, &kernel.k, kernel.mask, kernel.scale, QUERY_ROWS)
}

fn working_memory<E: Element, L: Level<E>>(kernel: &Attention) -> WorkingMemory {
    WorkingMemory::of_thread(Memory::<E, L>::floats(&shape::<E, L>(kernel)))
}

fn run<E: Element, L: Level<E>>(kernel: &Attention, team: &mut Team) {
    let shape = shape::<E, L>(kernel);
    let mut blocks = Vec::new();
    for segment in filled(&kernel.segments) {
        // The last queries of a causal segment see the most keys: they go first, so that no long task ends alone.
        for number in (0..shape.blocks(segment.len())).rev() {
            let queries = shape.block(number, segment.len());
            let block = |key_head| QueryBlock::new(&shape, &segment, queries.clone(), key_head);
            blocks.extend((0..kernel.k.count).map(|key_head| (block(key_head), key_head)));
        }
    }
    let operands = Operands::<E> {
        q: HeadRows::of(&kernel.q),
        k: HeadRows::of(&kernel.k),
        v: HeadRows::of(&kernel.v),
        out: HeadRows::of(&kernel.out),
        logsum: matrix(&kernel.logsum),
        shape,
        dropout: active(kernel.dropout),
        changes: Changes::new(&kernel.scores, kernel.scale),
    };
    team.tasks(blocks.len(), |task, scratch| {
        let (block, key_head) = &blocks[task];
        let memory = Memory::<E, L>::cut(&shape, scratch.floats(Memory::<E, L>::floats(&shape)));
        L::vectorise(Attend { operands, block, key_head: *key_head, memory });
    });
}

#[derive(Clone, Copy)]
struct Operands<E> {
    q: HeadRows<E>,
    k: HeadRows<E>,
    v: HeadRows<E>,
    out: HeadRows<E>,
    logsum: Matrix<f32>,
    shape: Shape,
    dropout: Option<AttentionDropout>,
    changes: Changes,
}

/// A thread's working memory.
struct Memory<E, L> {
    /// [KEY_BLOCK, W]
    keys: *mut f32,
    /// [W, KEY_BLOCK]
    values: *mut f32,
    /// [KEY_BLOCK, TILE] each: scores; and their exponentials, packed. Two tiles' in turns.
    scores: [*mut f32; 2],
    weights: [*mut f32; 2],
    tiles: *mut f32,
    width: usize,
    level: PhantomData<(E, L)>,
}

/// A tile's memory from one key block to the next.
#[derive(Clone, Copy)]
struct TileMemory {
    /// [W, TILE]
    queries: *mut f32,
    /// [W, TILE]
    out: *mut f32,
    /// [2, TILE]
    bounds: *mut f32,
    /// [TILE] each: the maximum subtracted from scores, and the sum of their exponentials.
    max: *mut f32,
    sum: *mut f32,
}

impl<E: Element, L: Level<E>> Memory<E, L> {
    fn tile_floats(width: usize) -> usize {
        TILE * width / L::WORD + TILE * width + 4 * TILE
    }

    fn floats(shape: &Shape) -> usize {
        let block = 2 * (KEY_BLOCK * TILE + (KEY_BLOCK * TILE + KEY_BLOCK * shape.width) / L::WORD);
        block + shape.tiles_at_most() * Self::tile_floats(shape.width)
    }

    fn cut(shape: &Shape, memory: &mut [f32]) -> Memory<E, L> {
        let width = shape.width;
        let mut cutter = Cutter(memory);
        Memory {
            keys: cutter.cut(KEY_BLOCK * width / L::WORD),
            values: cutter.cut(KEY_BLOCK * width / L::WORD),
            scores: [cutter.cut(KEY_BLOCK * TILE), cutter.cut(KEY_BLOCK * TILE)],
            weights: [cutter.cut(KEY_BLOCK * TILE / L::WORD), cutter.cut(KEY_BLOCK * TILE / L::WORD)],
            tiles: cutter.cut(shape.tiles_at_most() * Self::tile_floats(width)),
            width,
            level: PhantomData,
        }
    }

    #[inline(always)]
    fn tile(&self, number: usize) -> TileMemory {
        // `floats` counted as much for every tile of the block; the one after the last is only fetched.
        let queries = self.tiles.wrapping_add(number * Self::tile_floats(self.width));
        let out = queries.wrapping_add(TILE * self.width / L::WORD);
        let bounds = out.wrapping_add(TILE * self.width);
        TileMemory { queries, out, bounds, max: bounds.wrapping_add(2 * TILE), sum: bounds.wrapping_add(3 * TILE) }
    }
}

/// A block of queries against every key they see.
struct Attend<'a, E, L> {
    operands: Operands<E>,
    block: &'a QueryBlock,
    key_head: usize,
    memory: Memory<E, L>,
}

impl<E: Element, L: Level<E>> Vectorised for Attend<'_, E, L> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Operands { k, v, shape, .. } = self.operands;
        let len = self.block.segment.len();
        let mask = shape.mask;
        let width = shape.width;
        // SAFETY of all below: tokens of the segment, heads of the group, and memory cut for this shape; only this task
        // writes the outputs of these queries.
        // SAFETY: above.
        unsafe { L::begin() };
        for number in 0..self.block.tiles() {
            // SAFETY: above.
            unsafe { self.begin(s, self.memory.tile(number), self.block.tile(number)) };
        }
        let keys = keys_of(mask, &self.block.queries, len);
        for start in keys.clone().step_by(KEY_BLOCK) {
            let block = start..keys.end.min(start + KEY_BLOCK);
            let tokens = self.block.segment.start + block.start..self.block.segment.start + block.end;
            let rows = |of| Rows { of, head: self.key_head, tokens: tokens.clone() };
            let (keys, values) = (rows(k), rows(v));
            let count = block.len().next_multiple_of(L::KEYS);
            // SAFETY: above.
            unsafe {
                pack::along::<S, E, L>(s, &keys, count, width, self.memory.keys);
                L::pack_columns(s, &values, count, width, self.memory.values);
            }
            // SAFETY: above.
            unsafe { self.attend(s, block) };
        }
        for number in 0..self.block.tiles() {
            // SAFETY: above.
            unsafe { self.end(s, self.memory.tile(number), self.block.tile(number)) };
        }
        // SAFETY: above.
        unsafe { L::end() };
    }
}

/// The stages of a tile and a block of keys, in order.
#[derive(Clone, Copy)]
enum Stage {
    ScoreChanges,
    Weights,
    Values,
}

impl<E: Element, L: Level<E>> Attend<'_, E, L> {
    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, s: S, memory: TileMemory, tile: Tile) {
        let Operands { q, shape, changes, .. } = self.operands;
        let [max, sum] = changes.begin(tile.head);
        let rows = Rows { of: q, head: tile.head, tokens: tile.tokens };
        // SAFETY: the caller's promise.
        unsafe {
            pack::across::<S, E, L>(s, &rows, shape.width, memory.queries);
            write_bounds(shape.mask, &tile.queries, self.block.segment.len(), memory.bounds);
            pack::fill(s, memory.max, TILE, max);
            pack::fill(s, memory.sum, TILE, sum);
            pack::fill(s, memory.out, TILE * shape.width, 0.0);
        }
    }

    /// Adds the packed keys of a block and their values. Each of a tile's scores, exponentials and product with the values is
    /// computed while another tile's wait to be stored: reading back a tile's stores is slow.
    #[inline(always)]
    unsafe fn attend<S: Simd>(&self, s: S, block: Range<usize>) {
        let Operands { shape, changes, .. } = &self.operands;
        let len = self.block.segment.len();
        let scale = changes.scale_after();
        let Memory { scores, weights, .. } = self.memory;
        let tiles = tiles_seen(shape.mask, self.block, &block);
        for step in tiles.start..tiles.end + 2 * L::DELAY {
            for (delay, stage) in [Stage::ScoreChanges, Stage::Weights, Stage::Values].into_iter().enumerate() {
                let number = step.wrapping_sub(delay * L::DELAY);
                if !tiles.contains(&number) {
                    continue;
                }
                let tile = self.memory.tile(number);
                let seen = rows_seen(shape.mask, &self.block.tile(number).queries, len, &block, L::KEYS);
                let packed = seen.rows.start * shape.width / L::WORD;
                let keys = seen.rows.len();
                let (scores, weights) = (scores[number % (1 + L::DELAY)], weights[number % (1 + L::DELAY)]);
                // SAFETY: the caller's promise.
                unsafe {
                    match stage {
                        Stage::ScoreChanges => {
                            let rows = self.memory.keys.add(packed);
                            let now = Scored { rows, queries: tile.queries };
                            let next = Scored { queries: self.memory.tile(number + 1).queries, ..now };
                            L::scores(s, shape, now, next, keys, scores);
                        }
                        Stage::Weights => {
                            if changes.any() {
                                let first = block.start + seen.rows.start;
                                let none = std::ptr::null_mut();
                                changes.apply(s, &self.block.tile(number), first, keys, scores, none);
                            }
                            if !seen.all {
                                hide(s, scores, tile.bounds, block.start + seen.rows.start, keys);
                            }
                            raise(s, scores, keys, tile, shape.width, scale);
                            let scored = block.start + seen.rows.start..block.start + seen.rows.end;
                            match &self.operands.dropout {
                                None => {
                                    exponentiate::<S, E, L, _>(s, scores, scored, tile, scale, KeepAll, weights);
                                }
                                Some(dropout) => {
                                    let noise = &TileNoise::of(dropout, &self.block.tile(number));
                                    exponentiate::<S, E, L, _>(s, scores, scored, tile, scale, noise, weights);
                                }
                            }
                        }
                        Stage::Values => {
                            L::add_columns(s, shape, self.memory.values.add(packed), weights, keys, tile.out);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn end<S: Simd>(&self, s: S, memory: TileMemory, tile: Tile) {
        let kept = kept_factor(self.operands.dropout);
        // SAFETY: the caller's promise.
        unsafe {
            for (lane, token) in tile.tokens.clone().enumerate() {
                let logsum = *memory.max.add(lane) + (*memory.sum.add(lane)).ln();
                self.operands.logsum.at(token, tile.head).write(logsum);
            }
            for lanes in (0..TILE).step_by(LANES) {
                let inverse = s.div(s.splat(kept), s.load(memory.sum.add(lanes)));
                s.store(memory.sum.add(lanes), inverse);
            }
            let rows = Rows { of: self.operands.out, head: tile.head, tokens: tile.tokens };
            pack::unpack_columns(s, memory.out, memory.sum, &rows);
        }
    }
}

/// Raises the subtracted maximum where a score exceeds it too far, and scales down the sums so far.
///
/// # Safety
/// `scores` is [keys, TILE] and keys come in eights.
#[inline(always)]
unsafe fn raise<S: Simd>(s: S, scores: *const f32, keys: usize, tile: TileMemory, width: usize, scale: f32) {
    /// Chains that run side by side, to hide the latency of a maximum.
    const CHAINS: usize = 4;
    for lanes in (0..TILE).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut chains = [s.splat(f32::NEG_INFINITY); CHAINS];
            for key in (0..keys).step_by(CHAINS) {
                for (i, max) in chains.iter_mut().enumerate() {
                    *max = s.max(s.load(scores.add((key + i) * TILE + lanes)), *max);
                }
            }
            let highest = s.max(s.max(chains[0], chains[1]), s.max(chains[2], chains[3]));
            let highest = s.mul(highest, s.splat(scale));
            let before = s.load(tile.max.add(lanes));
            if s.max_lane(s.sub(highest, before)) > RISE {
                let max = s.max(highest, before);
                let factor = exp(s, s.sub(before, max));
                s.store(tile.max.add(lanes), max);
                s.store(tile.sum.add(lanes), s.mul(s.load(tile.sum.add(lanes)), factor));
                for row in 0..width {
                    let at = tile.out.add(row * TILE + lanes);
                    s.store(at, s.mul(s.load(at), factor));
                }
            }
        }
    }
}

/// Turns scores into exponentials, adds these up, and packs those that are not dropped.
///
/// # Safety
/// Both are [keys, TILE].
#[inline(always)]
unsafe fn exponentiate<S: Simd, E: Element, L: Level<E>, D: Dropping>(
    s: S,
    scores: *const f32,
    keys: Range<usize>,
    tile: TileMemory,
    scale: f32,
    dropping: D,
    weights: *mut f32,
) {
    let scale = s.splat(scale * L::LOG_E);
    // SAFETY: the caller's promise.
    unsafe {
        let mut below = [s.splat(0.0); 2];
        for (v, below) in below.iter_mut().enumerate() {
            *below = s.mul(s.splat(-L::LOG_E), s.load(tile.max.add(v * LANES)));
        }
        let mut sums = [[s.splat(0.0); 2]; 2];
        for key in (0..keys.len()).step_by(2) {
            let mut rows = [[s.splat(0.0); 2]; 2];
            for (i, row) in rows.iter_mut().enumerate() {
                for (v, weight) in row.iter_mut().enumerate() {
                    let score = s.load(scores.add((key + i) * TILE + v * LANES));
                    *weight = L::power(s, s.mul_add(score, scale, below[v]));
                    sums[i][v] = s.add(sums[i][v], *weight);
                    [*weight] = dropping.keep(s, keys.start + key + i, v * LANES, [*weight]);
                }
            }
            L::store_right(s, rows, key, weights);
        }
        let [first, second] = sums;
        for (v, (first, second)) in first.into_iter().zip(second).enumerate() {
            let at = tile.sum.add(v * LANES);
            s.store(at, s.add(s.load(at), s.add(first, second)));
        }
    }
}
