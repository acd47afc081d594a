//! Gradients of attention. With `P = exp(scale · q·kᵀ - logsum)` and `δ = Σ dout · out` of each query,
//! `dv = Pᵀ·dout`, `dS = P ∘ (dout·vᵀ - δ)`, `dq = scale · dS·k`, `dk = scale · dSᵀ·q`.
//!
//! A task goes through blocks of queries of one segment and one key head, and sums the gradients of all the keys on
//! the way. Where segments and key heads are too few to occupy many cores, the query blocks are dealt out to several
//! tasks, each with sums of its own, which are then added in order: the only cost is that memory, while tasks that
//! each owned some keys or some queries would compute the scores twice.

use std::ops::Range;

use super::super::math::exp;
use super::super::matrix::{Element, Matrix, matrix, with_element};
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::super::team::Scratch;
use super::super::{Run, Team};
use super::forward::hide;
use super::tile::{Add, Left, ROWS, Right, Set, product};
use super::{Cutter, HeadRows, KEY_BLOCK, Shape, TILE, Tiles, Tokens, filled, keys_of, pack, rows_seen};
use crate::kernel::AttentionBackward;

/// Tasks wanted, where the shape has the work for them.
const TASKS: usize = 32;
/// Keys of a task that adds up the sums of others.
const SUMMED_KEYS: usize = 64;

impl Run for AttentionBackward {
    fn run(&self, team: &mut Team) {
        with_element!(self.q.view.dtype, E => run::<E>(self, team));
    }
}

/// A segment, a key head, and the share of its query blocks that one task has: each `shares`-th from `share`.
#[derive(Clone)]
struct Task {
    segment: Tokens,
    key_head: usize,
    share: usize,
    shares: usize,
    /// Where its sums begin in the common memory, if it shares the keys with others.
    sums: usize,
}

fn run<E: Element>(kernel: &AttentionBackward, team: &mut Team) {
    let shape = Shape::new(&kernel.q, &kernel.k, kernel.mask);
    let operands = Operands::<E> {
        q: HeadRows::of(&kernel.q),
        k: HeadRows::of(&kernel.k),
        v: HeadRows::of(&kernel.v),
        out: HeadRows::of(&kernel.out),
        dout: HeadRows::of(&kernel.dout),
        dq: HeadRows::of(&kernel.dq),
        dk: HeadRows::of(&kernel.dk),
        dv: HeadRows::of(&kernel.dv),
        logsum: matrix(&kernel.logsum),
        scale: kernel.scale,
        shape,
    };
    let (tasks, common_floats) = divide(&shape, &filled(&kernel.segments), kernel.k.count);
    let mut common = team.take_common();
    let sums = CommonSums(common.floats(common_floats).as_mut_ptr());
    team.tasks(tasks.len(), |task, scratch| operands.run_task(&tasks[task], sums, scratch));
    // Blocks of keys whose sums lie in several tasks' memory.
    let mut shared = Vec::new();
    for task in tasks.iter().filter(|task| task.shares > 1 && task.share == 0) {
        let keys = 0..task.segment.len();
        shared.extend(keys.clone().step_by(SUMMED_KEYS).map(|start| (task, start..keys.end.min(start + SUMMED_KEYS))));
    }
    team.tasks(shared.len(), |block, _| {
        let (task, keys) = &shared[block];
        vectorise(AddShares { operands, task, keys: keys.clone(), sums });
    });
    team.return_common(common);
}

/// The tasks, and the numbers of common memory that those need which share keys.
fn divide(shape: &Shape, segments: &[Tokens], key_heads: usize) -> (Vec<Task>, usize) {
    // Work grows with the square of the length, or with the window.
    let pairs = |segment: &Tokens| segment.len() * shape.mask.window.unwrap_or(usize::MAX).min(segment.len());
    let total: usize = segments.iter().map(pairs).sum::<usize>() * key_heads;
    let (mut tasks, mut floats) = (Vec::new(), 0);
    for segment in segments {
        let wanted = (pairs(segment) * TASKS).div_ceil(total.max(1));
        let shares = wanted.min(segment.len().div_ceil(shape.query_block)).max(1);
        for key_head in 0..key_heads {
            for share in 0..shares {
                tasks.push(Task { segment: segment.clone(), key_head, share, shares, sums: floats });
                floats += if shares > 1 { sums_floats(shape, segment.len()) } else { 0 };
            }
        }
    }
    // The longest first, so that none ends alone.
    tasks.sort_by_key(|task| std::cmp::Reverse(task.segment.len()));
    (tasks, floats)
}

/// dk, then dv: [keys, W] each.
fn sums_floats(shape: &Shape, keys: usize) -> usize {
    2 * keys.next_multiple_of(ROWS) * shape.width
}

/// Memory that tasks write disjoint parts of.
#[derive(Clone, Copy)]
struct CommonSums(*mut f32);

// SAFETY: tasks write disjoint parts of it.
unsafe impl Sync for CommonSums {}

#[derive(Clone, Copy)]
struct Operands<E> {
    q: HeadRows<E>,
    k: HeadRows<E>,
    v: HeadRows<E>,
    out: HeadRows<E>,
    dout: HeadRows<E>,
    dq: HeadRows<E>,
    dk: HeadRows<E>,
    dv: HeadRows<E>,
    logsum: Matrix<f32>,
    scale: f32,
    shape: Shape,
}

impl<E: Element> Operands<E> {
    fn run_task(&self, task: &Task, common: CommonSums, scratch: &mut Scratch) {
        let len = task.segment.len();
        let memory = Memory::cut(&self.shape, len, scratch.floats(Memory::floats(&self.shape, len)));
        let sums = if task.shares > 1 {
            // SAFETY: `divide` counted this task's sums.
            unsafe { common.0.add(task.sums) }
        } else {
            memory.sums
        };
        vectorise(KeyGradients { operands: *self, task, memory: Memory { sums, ..memory } });
    }
}

/// A thread's working memory. K is the segment's length in whole steps of the product's.
#[derive(Clone, Copy)]
struct Memory {
    /// [K, W] each.
    keys: *mut f32,
    values: *mut f32,
    /// dk, then dv: [K, W] each.
    sums: *mut f32,
    /// [KEY_BLOCK, TILE] each: P and dS, transposed.
    weights: *mut f32,
    gradients: *mut f32,
    tiles: *mut f32,
    width: usize,
}

/// What a tile keeps from one key block to the next.
#[derive(Clone, Copy)]
struct TileMemory {
    /// [TILE, W], scaled; and transposed.
    queries: *mut f32,
    queries_across: *mut f32,
    /// [TILE, W]; and transposed.
    dout: *mut f32,
    dout_across: *mut f32,
    /// [TILE, W]
    dq: *mut f32,
    /// [2, TILE]
    bounds: *mut f32,
    /// [TILE] each.
    logsum: *mut f32,
    delta: *mut f32,
}

impl Memory {
    fn tile_floats(width: usize) -> usize {
        5 * TILE * width + 4 * TILE
    }

    fn floats(shape: &Shape, len: usize) -> usize {
        2 * sums_floats(shape, len) + 2 * KEY_BLOCK * TILE + shape.tiles() * Memory::tile_floats(shape.width)
    }

    fn cut(shape: &Shape, len: usize, memory: &mut [f32]) -> Memory {
        let segment = sums_floats(shape, len);
        let mut cutter = Cutter(memory);
        Memory {
            keys: cutter.cut(segment / 2),
            values: cutter.cut(segment / 2),
            sums: cutter.cut(segment),
            weights: cutter.cut(KEY_BLOCK * TILE),
            gradients: cutter.cut(KEY_BLOCK * TILE),
            tiles: cutter.cut(shape.tiles() * Memory::tile_floats(shape.width)),
            width: shape.width,
        }
    }

    #[inline(always)]
    fn tile(&self, tile: usize) -> TileMemory {
        let size = TILE * self.width;
        // SAFETY: `floats` counted as much for every tile of a query block.
        unsafe {
            let first = self.tiles.add(tile * Memory::tile_floats(self.width));
            let bounds = first.add(5 * size);
            TileMemory {
                queries: first,
                queries_across: first.add(size),
                dout: first.add(2 * size),
                dout_across: first.add(3 * size),
                dq: first.add(4 * size),
                bounds,
                logsum: bounds.add(2 * TILE),
                delta: bounds.add(3 * TILE),
            }
        }
    }
}

struct KeyGradients<'a, E> {
    operands: Operands<E>,
    task: &'a Task,
    memory: Memory,
}

impl<E: Element> Vectorised for KeyGradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Operands { k, v, dk, dv, shape, .. } = self.operands;
        let Task { segment, key_head, share, shares, .. } = self.task.clone();
        let Memory { keys, values, sums, width, .. } = self.memory;
        let padded = segment.len().next_multiple_of(ROWS);
        // SAFETY of all below: tokens of the segment, heads of the group, and memory cut for this shape; only this task
        // writes these sums and the gradients of these queries.
        // SAFETY: above.
        unsafe {
            pack::rows(s, k, key_head, segment.clone(), 1.0, keys, [padded, width]);
            pack::rows(s, v, key_head, segment.clone(), 1.0, values, [padded, width]);
            for i in (0..2 * padded * width).step_by(LANES) {
                s.store(sums.add(i), s.splat(0.0));
            }
        }
        for block in (share..segment.len().div_ceil(shape.query_block)).step_by(shares) {
            let start = block * shape.query_block;
            // SAFETY: above.
            unsafe { self.add_queries(s, start..segment.len().min(start + shape.query_block)) };
        }
        if shares == 1 {
            // SAFETY: above.
            unsafe {
                pack::unpack(s, sums, width, pack::Factor::One(1.0), dk, key_head, segment.clone());
                pack::unpack(s, sums.add(padded * width), width, pack::Factor::One(1.0), dv, key_head, segment);
            }
        }
    }
}

impl<E: Element> KeyGradients<'_, E> {
    #[inline(always)]
    unsafe fn add_queries<S: Simd>(&self, s: S, queries: Range<usize>) {
        let shape = self.operands.shape;
        let (len, mask) = (self.task.segment.len(), shape.mask);
        // SAFETY of all below: the caller's promise.
        let tiles = Tiles::of(&shape, &queries, self.task.key_head);
        for tile in tiles.clone() {
            // SAFETY: above.
            unsafe { self.begin(s, self.memory.tile(tile.number), tile.head, tile.queries) };
        }
        let keys = keys_of(mask, &queries, len);
        for start in (keys.start / ROWS * ROWS..keys.end).step_by(KEY_BLOCK) {
            let block = start..keys.end.min(start + KEY_BLOCK);
            for tile in tiles.clone() {
                if let Some((rows, all)) = rows_seen(mask, &tile.queries, len, &block) {
                    let keys = block.start + rows.start..block.start + rows.end;
                    // SAFETY: above.
                    unsafe { self.add_keys(s, self.memory.tile(tile.number), keys, tile.queries.len(), all) };
                }
            }
        }
        for tile in tiles {
            let (memory, scale) = (self.memory.tile(tile.number), pack::Factor::One(self.operands.scale));
            let tokens = self.tokens(&tile.queries);
            // SAFETY: above.
            unsafe { pack::unpack(s, memory.dq, shape.width, scale, self.operands.dq, tile.head, tokens) };
        }
    }

    #[inline(always)]
    fn tokens(&self, queries: &Range<usize>) -> Range<usize> {
        self.task.segment.start + queries.start..self.task.segment.start + queries.end
    }

    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, s: S, tile: TileMemory, head: usize, queries: Range<usize>) {
        let Operands { q, out, dout, logsum, scale, shape, .. } = self.operands;
        let (tokens, size) = (self.tokens(&queries), [TILE, shape.width]);
        // SAFETY: the caller's promise.
        unsafe {
            pack::rows(s, q, head, tokens.clone(), scale, tile.queries, size);
            pack::transposed(s, tile.queries, shape.width, tile.queries_across);
            pack::rows(s, dout, head, tokens.clone(), 1.0, tile.dout, size);
            pack::transposed(s, tile.dout, shape.width, tile.dout_across);
            pack::bounds(shape.mask, &queries, self.task.segment.len(), tile.bounds);
            for i in (0..TILE * shape.width).step_by(LANES) {
                s.store(tile.dq.add(i), s.splat(0.0));
            }
            // Lanes beyond the last query have zero queries and gradients, whatever their weights.
            for lanes in (0..TILE).step_by(LANES) {
                s.store(tile.logsum.add(lanes), s.splat(0.0));
                s.store(tile.delta.add(lanes), s.splat(0.0));
            }
            pack::row_products(s, dout, out, head, tokens.clone(), tile.delta);
            for (lane, token) in tokens.enumerate() {
                tile.logsum.add(lane).write(logsum.at(token, head).read());
            }
        }
    }

    /// What the tile's queries and these keys give each other's gradients.
    #[inline(always)]
    unsafe fn add_keys<S: Simd>(&self, s: S, tile: TileMemory, keys: Range<usize>, queries: usize, all: bool) {
        let Shape { dim, width, .. } = self.operands.shape;
        let Memory { weights, gradients, .. } = self.memory;
        let padded = self.task.segment.len().next_multiple_of(ROWS);
        let rows = keys.len();
        // SAFETY: the caller's promise.
        unsafe {
            let packed = |all_keys: *mut f32| all_keys.add(keys.start * width);
            let down = |first: *mut f32| Left { first, row: width, depth: 1 };
            let across = |first: *mut f32| Right { first, stride: TILE };
            let key_rows = packed(self.memory.keys);
            product(s, down(key_rows), across(tile.queries_across), dim, [rows, TILE], weights, TILE, Set);
            if !all {
                hide(s, weights, tile.bounds, keys.start, rows);
            }
            let value_rows = packed(self.memory.values);
            product(s, down(value_rows), across(tile.dout_across), dim, [rows, TILE], gradients, TILE, Set);
            differentiate(s, weights, gradients, rows, tile);
            let (dk, dv) = (packed(self.memory.sums), packed(self.memory.sums.add(padded * width)));
            let by_key = |first: *mut f32| Left { first, row: TILE, depth: 1 };
            let by_width = |first: *mut f32| Right { first, stride: width };
            product(s, by_key(weights), by_width(tile.dout), queries, [rows, width], dv, width, Add);
            product(s, by_key(gradients), by_width(tile.queries), queries, [rows, width], dk, width, Add);
            let by_query = Left { first: gradients, row: 1, depth: TILE };
            product(s, by_query, by_width(key_rows), rows, [TILE, width], tile.dq, width, Add);
        }
    }
}

/// Scores become weights P, gradients of weights become gradients of scores.
#[inline(always)]
unsafe fn differentiate<S: Simd>(s: S, weights: *mut f32, gradients: *mut f32, rows: usize, tile: TileMemory) {
    for lanes in (0..TILE).step_by(LANES) {
        // SAFETY: the caller's promise: both are [rows, TILE].
        unsafe {
            let (logsum, delta) = (s.load(tile.logsum.add(lanes)), s.load(tile.delta.add(lanes)));
            for row in 0..rows {
                let at = row * TILE + lanes;
                let weight = exp(s, s.sub(s.load(weights.add(at)), logsum));
                let gradient = s.mul(weight, s.sub(s.load(gradients.add(at)), delta));
                s.store(weights.add(at), weight);
                s.store(gradients.add(at), gradient);
            }
        }
    }
}

/// Adds the shares' sums for some keys of a segment, in order, into the first's, and rounds them.
struct AddShares<'a, E> {
    operands: Operands<E>,
    task: &'a Task,
    keys: Range<usize>,
    sums: CommonSums,
}

impl<E: Element> Vectorised for AddShares<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Operands { dk, dv, shape, .. } = self.operands;
        let Task { segment, key_head, shares, .. } = self.task;
        let (width, size) = (shape.width, sums_floats(&shape, segment.len()));
        let tokens = segment.start + self.keys.start..segment.start + self.keys.end;
        for (half, to) in [dk, dv].into_iter().enumerate() {
            let from = self.task.sums + half * size / 2 + self.keys.start * width;
            // SAFETY: the shares' sums follow one another, and these keys are this task's.
            unsafe {
                let first = self.sums.0.add(from);
                for i in (0..self.keys.len() * width).step_by(LANES) {
                    let mut sum = s.load(first.add(i));
                    for share in 1..*shares {
                        sum = s.add(sum, s.load(first.add(share * size + i)));
                    }
                    s.store(first.add(i), sum);
                }
                pack::unpack(s, first, width, pack::Factor::One(1.0), to, *key_head, tokens.clone());
            }
        }
    }
}
