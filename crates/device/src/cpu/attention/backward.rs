//! Gradients of attention. With `P = exp(scale · q·kᵀ - logsum)` and `δ = Σ dout · out` of each query,
//! `dv = Pᵀ·dout`, `dS = P ∘ (dout·vᵀ - δ)`, `dq = scale · dS·k`, `dk = scale · dSᵀ·q`.
//!
//! Dropout multiplies weights by M, which is 0 or 1 / (1 - p): `dv = (M ∘ P)ᵀ·dout`, `dS = P ∘ (M ∘ (dout·vᵀ) - δ)`. Its
//! divisor stays out of the loops: δ is multiplied by 1 - p, and all gradients are divided by it at the end.
//!
//! ScoreChanges changed before the softmax are changed again here. A cap multiplies dS by its derivative; a sink is in the logsum.
//!
//! A task has some query blocks and some keys of one segment and one key head, as [`division`](super::division) deals
//! them out. For each query block, key blocks stream past its tiles.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::features::{Bf16Level, bf16_level};
use super::super::matrix::{Element, Matrix, matrix};
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::super::{Run, Team, WorkingMemory};
use super::division::{Part, Plan, Task, divide, sums_floats};
use super::dropout::{Dropping, KeepAll, TileNoise, active, kept_factor};
use super::level::{Level, Scored, TileRun};
use super::mask::{Seen, hide, keys_of, rows_seen, tiles_seen, write_bounds};
use super::pack::{self, Rows};
use super::scores::Changes;
use super::sinks;
use super::sums::{AddShares, SharedSums};
use super::{Cutter, HeadRows, KEY_BLOCK, QueryBlock, Shape, TILE, Tile, filled, with_level};
use crate::kernel::{AttentionBackward, AttentionDropout};

/// Rows of queries whose tiles stay in the second cache while key blocks stream past.
const QUERY_ROWS: usize = 128;
/// Keys of a block whose scores are computed at once.
const SCORED: usize = 32;
const PARTS: usize = KEY_BLOCK / SCORED;
/// Keys of a task that adds up the sums of others.
const SUMMED_KEYS: usize = 64;

impl Run for AttentionBackward {
    fn run(&self, team: &mut Team) {
        run_at(self, bf16_level(), team);
    }

    fn working_memory(&self) -> WorkingMemory {
        with_level!(self.q.view.dtype, bf16_level(), working_memory(self))
    }
}

/// Computes bf16 at the given level, which this CPU must have.
pub(super) fn run_at(kernel: &AttentionBackward, level: Bf16Level, team: &mut Team) {
    with_level!(kernel.q.view.dtype, level, run(kernel, team));
}

fn shape<E: Element, L: Level<E>>(kernel: &AttentionBackward) -> Shape {
    Shape::new::<E, L>(&kernel.q, &kernel.k, kernel.mask, kernel.scale, QUERY_ROWS)
}

fn working_memory<E: Element, L: Level<E>>(kernel: &AttentionBackward) -> WorkingMemory {
    let shape = shape::<E, L>(kernel);
    let (tasks, shared_floats) = divide(&shape, &filled(&kernel.segments), kernel.k.count, L::KEYS);
    let keys = tasks.iter().map(|task| task.plan(&shape).keys_at_once).max();
    let of_task = keys.map_or(0, |keys| Memory::<E, L>::floats(&shape, keys));
    WorkingMemory {
        common_bytes: WorkingMemory::of_team(shared_floats.max(sinks::sums_floats(kernel))).common_bytes,
        ..WorkingMemory::of_thread(of_task)
    }
}

fn run<E: Element, L: Level<E>>(kernel: &AttentionBackward, team: &mut Team) {
    let shape = shape::<E, L>(kernel);
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
        shape,
        dropout: active(kernel.dropout),
        changes: Changes::new(&kernel.scores, kernel.scale),
    };
    let (tasks, shared_floats) = divide(&shape, &filled(&kernel.segments), kernel.k.count, L::KEYS);
    let mut common = team.take_common();
    let shared = SharedSums::new(common.floats(shared_floats));
    team.tasks(tasks.len(), |number, scratch| {
        let task = &tasks[number];
        let keys = task.plan(&shape).keys_at_once;
        let floats = Memory::<E, L>::floats(&shape, keys);
        let mut memory = Memory::<E, L>::cut(&shape, keys, scratch.floats(floats));
        if let Part::Both { shares: 2.., sums, .. } = task.part {
            memory.sums = shared.at(sums);
        }
        L::vectorise(Gradients { operands, task, memory });
    });
    // Blocks of keys whose sums lie in several tasks' memory.
    let mut blocks = Vec::new();
    for task in &tasks {
        if let Part::Both { share: 0, shares: shares @ 2.., sums } = task.part {
            let step = sums_floats(&shape, task.segment.len(), L::KEYS);
            for start in (0..task.segment.len()).step_by(SUMMED_KEYS) {
                let tokens = task.segment.start + start..task.segment.end.min(task.segment.start + start + SUMMED_KEYS);
                let rows = |of| Rows { of, head: task.key_head, tokens: tokens.clone() };
                let [key_factor, value_factor] = operands.factors();
                let to = [(rows(operands.dk), key_factor), (rows(operands.dv), value_factor)];
                let first = shared.at(sums + start * shape.width);
                blocks.push(AddShares { to, first, shares, step, width: shape.width });
            }
        }
    }
    team.tasks(blocks.len(), |block, _| vectorise(blocks[block].clone()));
    sinks::add::<E>(kernel, common.floats(sinks::sums_floats(kernel)), team);
    team.return_common(common);
}

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
    shape: Shape,
    dropout: Option<AttentionDropout>,
    changes: Changes,
}

impl<E> Operands<E> {
    /// The factors from sums to gradients: of queries and keys, and of values.
    fn factors(&self) -> [f32; 2] {
        let kept = kept_factor(self.dropout);
        [self.shape.scale * kept, kept]
    }
}

/// A thread's working memory. K is the number of keys packed at once, in whole steps of the level's.
struct Memory<E, L> {
    /// [K, W]; and transposed.
    keys: *mut f32,
    key_columns: *mut f32,
    /// [K, W]
    values: *mut f32,
    /// dk, then dv: [K, W] each.
    sums: *mut f32,
    /// [SCORED, TILE] each: scores and gradients of weights, transposed. Two in turns.
    scores: [*mut f32; 2],
    products: [*mut f32; 2],
    tiles: *mut f32,
    width: usize,
    level: PhantomData<(E, L)>,
}

/// A tile's memory from one key block to the next.
#[derive(Clone, Copy)]
struct TileMemory {
    /// [TILE, W]; and transposed.
    queries: *mut f32,
    queries_across: *mut f32,
    /// [TILE, W]; and transposed.
    dout: *mut f32,
    dout_across: *mut f32,
    /// [KEY_BLOCK, TILE] each: P and dS of the present key block, transposed; the latter as a right operand too.
    weights: *mut f32,
    gradients: *mut f32,
    right_gradients: *mut f32,
    /// [W, TILE]
    dq: *mut f32,
    /// [2, TILE]
    bounds: *mut f32,
    /// [TILE] each.
    logsum: *mut f32,
    delta: *mut f32,
    scale: *mut f32,
}

impl<E: Element, L: Level<E>> Memory<E, L> {
    fn tile_floats(width: usize) -> usize {
        (4 * TILE * width + 3 * KEY_BLOCK * TILE) / L::WORD + TILE * width + 5 * TILE
    }

    fn packed_keys_floats(shape: &Shape, keys: usize) -> usize {
        keys.next_multiple_of(L::KEYS) * shape.width / L::WORD
    }

    fn floats(shape: &Shape, keys: usize) -> usize {
        3 * Self::packed_keys_floats(shape, keys)
            + sums_floats(shape, keys, L::KEYS)
            + 4 * SCORED * TILE
            + shape.tiles_at_most() * Self::tile_floats(shape.width)
    }

    fn cut(shape: &Shape, keys: usize, memory: &mut [f32]) -> Memory<E, L> {
        let packed = Self::packed_keys_floats(shape, keys);
        let mut cutter = Cutter(memory);
        let keys_memory = cutter.cut(packed);
        Memory {
            keys: keys_memory,
            key_columns: if L::ROWS_ARE_COLUMNS { keys_memory } else { cutter.cut(packed) },
            values: cutter.cut(packed),
            sums: cutter.cut(sums_floats(shape, keys, L::KEYS)),
            scores: [cutter.cut(SCORED * TILE), cutter.cut(SCORED * TILE)],
            products: [cutter.cut(SCORED * TILE), cutter.cut(SCORED * TILE)],
            tiles: cutter.cut(shape.tiles_at_most() * Self::tile_floats(shape.width)),
            width: shape.width,
            level: PhantomData,
        }
    }

    #[inline(always)]
    fn tile(&self, number: usize) -> TileMemory {
        let rows = TILE * self.width / L::WORD;
        let block = KEY_BLOCK * TILE / L::WORD;
        // `floats` counted as much for every tile of a query block; the one after the last is only fetched.
        let first = self.tiles.wrapping_add(number * Self::tile_floats(self.width));
        let weights = first.wrapping_add(4 * rows);
        let dq = weights.wrapping_add(3 * block);
        let bounds = dq.wrapping_add(TILE * self.width);
        TileMemory {
            queries: first,
            queries_across: first.wrapping_add(rows),
            dout: first.wrapping_add(2 * rows),
            dout_across: first.wrapping_add(3 * rows),
            weights,
            gradients: weights.wrapping_add(block),
            right_gradients: weights.wrapping_add(2 * block),
            dq,
            bounds,
            logsum: bounds.wrapping_add(2 * TILE),
            delta: bounds.wrapping_add(3 * TILE),
            scale: bounds.wrapping_add(4 * TILE),
        }
    }
}

struct Gradients<'a, E, L> {
    operands: Operands<E>,
    task: &'a Task,
    memory: Memory<E, L>,
}

impl<E: Element, L: Level<E>> Vectorised for Gradients<'_, E, L> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.operands.shape;
        let len = self.task.segment.len();
        let plan = self.task.plan(&shape);
        // SAFETY of all below: tokens of the segment, heads of the group, and memory cut for this task; only this task
        // writes these sums and the gradients of these queries or keys.
        // SAFETY: above.
        unsafe {
            L::begin();
            for start in plan.keys.clone().step_by(plan.keys_at_once) {
                let keys = start..plan.keys.end.min(start + plan.keys_at_once);
                self.pack_keys(s, keys.clone());
                if plan.for_keys {
                    let floats = sums_floats(&shape, keys.len(), L::KEYS);
                    pack::fill(s, self.memory.sums, floats, 0.0);
                }
                for number in plan.blocks.clone().step_by(plan.block_step) {
                    let block =
                        QueryBlock::new(&shape, &self.task.segment, shape.block(number, len), self.task.key_head);
                    let seen = keys_of(shape.mask, &block.queries, len);
                    if seen.end <= keys.start || keys.end <= seen.start {
                        continue;
                    }
                    // Keys come in several parts only where there is but one block.
                    if keys.start == plan.keys.start {
                        self.begin(s, &block);
                    }
                    self.add_keys(s, &block, &keys, &plan);
                    if plan.for_queries && keys.end == plan.keys.end {
                        self.end(s, &block);
                    }
                }
                if plan.for_keys && !plan.shared {
                    self.write_keys(s, keys);
                }
            }
            L::end();
        }
    }
}

impl<E: Element, L: Level<E>> Gradients<'_, E, L> {
    /// Some keys of the segment, or their values or gradients.
    #[inline(always)]
    fn key_rows(&self, of: HeadRows<E>, keys: &Range<usize>) -> Rows<E> {
        let start = self.task.segment.start;
        Rows { of, head: self.task.key_head, tokens: start + keys.start..start + keys.end }
    }

    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, s: S, keys: Range<usize>) {
        let Operands { k, v, shape, .. } = self.operands;
        let count = keys.len().next_multiple_of(L::KEYS);
        // SAFETY of both: the caller's promise.
        for (of, to) in [(k, self.memory.keys), (v, self.memory.values)] {
            // SAFETY: above.
            unsafe { pack::along::<S, E, L>(s, &self.key_rows(of, &keys), count, shape.width, to) };
        }
        if !L::ROWS_ARE_COLUMNS {
            // SAFETY: above.
            unsafe { L::pack_columns(s, &self.key_rows(k, &keys), count, shape.width, self.memory.key_columns) };
        }
    }

    #[inline(always)]
    unsafe fn write_keys<S: Simd>(&self, s: S, keys: Range<usize>) {
        let Operands { dk, dv, shape, .. } = self.operands;
        let half = sums_floats(&shape, keys.len(), L::KEYS) / 2;
        let [key_factor, value_factor] = self.operands.factors();
        for (of, from, factor) in [(dk, 0, key_factor), (dv, half, value_factor)] {
            // SAFETY: the caller's promise.
            unsafe { pack::unpack(s, self.memory.sums.add(from), shape.width, factor, &self.key_rows(of, &keys)) };
        }
    }

    #[inline(always)]
    unsafe fn begin<S: Simd>(&self, s: S, block: &QueryBlock) {
        for number in 0..block.tiles() {
            // SAFETY: the caller's promise.
            unsafe { self.begin_tile(s, self.memory.tile(number), block.tile(number)) };
        }
    }

    #[inline(always)]
    unsafe fn begin_tile<S: Simd>(&self, s: S, memory: TileMemory, tile: Tile) {
        let Operands { q, out, dout, logsum, shape, .. } = self.operands;
        let Tile { head, queries, tokens } = tile;
        let dout_rows = Rows { of: dout, head, tokens: tokens.clone() };
        let out_rows = Rows { of: out, ..dout_rows.clone() };
        for (of, rows, across) in [(q, memory.queries, memory.queries_across), (dout, memory.dout, memory.dout_across)]
        {
            let from = Rows { of, ..dout_rows.clone() };
            // SAFETY: the caller's promise.
            unsafe {
                pack::down::<S, E, L>(s, &from, shape.width, rows);
                pack::across::<S, E, L>(s, &from, shape.width, across);
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            write_bounds(shape.mask, &queries, self.task.segment.len(), memory.bounds);
            pack::fill(s, memory.dq, TILE * shape.width, 0.0);
            // Lanes beyond the last query have zero queries and gradients, whatever their weights.
            pack::fill(s, memory.logsum, TILE, 0.0);
            pack::fill(s, memory.delta, TILE, 0.0);
            pack::fill(s, memory.scale, TILE, self.operands.factors()[0]);
            pack::row_products(s, &dout_rows, &out_rows, memory.delta);
            if let Some(dropout) = &self.operands.dropout {
                for lane in 0..TILE {
                    *memory.delta.add(lane) *= 1.0 - dropout.probability;
                }
            }
            for (lane, token) in tokens.enumerate() {
                memory.logsum.add(lane).write(logsum.at(token, head).read());
            }
        }
    }

    #[inline(always)]
    unsafe fn end<S: Simd>(&self, s: S, block: &QueryBlock) {
        for number in 0..block.tiles() {
            let memory = self.memory.tile(number);
            let tile = block.tile(number);
            let rows = Rows { of: self.operands.dq, head: tile.head, tokens: tile.tokens };
            // SAFETY: the caller's promise.
            unsafe { pack::unpack_columns(s, memory.dq, memory.scale, &rows) };
        }
    }

    /// Adds the gradients that the block's queries and the packed keys give each other, as far as the plan wants them.
    #[inline(always)]
    unsafe fn add_keys<S: Simd>(&self, s: S, block: &QueryBlock, packed: &Range<usize>, plan: &Plan) {
        let shape = self.operands.shape;
        let len = block.segment.len();
        let mask = shape.mask;
        let seen = keys_of(mask, &block.queries, len);
        let (start, end) = (seen.start.max(packed.start), seen.end.min(packed.end));
        let first = packed.start + (start - packed.start) / L::KEYS * L::KEYS;
        for start in (first..end).step_by(KEY_BLOCK) {
            let keys = start..end.min(start + KEY_BLOCK);
            let all_rows = rows_seen(mask, &block.queries, len, &keys, L::KEYS).rows;
            let tiles = tiles_seen(mask, block, &keys);
            let at = Place { block, packed: start - packed.start, keys, all_rows };
            // Parts are the scored keys of one tile after another. Each stage reads the results of the one before after a
            // delay.
            let parts = tiles.len() * PARTS;
            for step in 0..parts + 2 * L::DELAY {
                let [second, third] = [step.wrapping_sub(L::DELAY), step.wrapping_sub(2 * L::DELAY)];
                // SAFETY of all: the caller's promise.
                if step < parts {
                    // SAFETY: above.
                    unsafe { self.score(s, &tiles, step, &at) };
                }
                if second < parts {
                    // SAFETY: above.
                    unsafe { self.differentiate(s, &tiles, second, &at) };
                }
                if plan.for_queries && third < parts && third % PARTS == PARTS - 1 {
                    // SAFETY: above.
                    unsafe { self.add_to_queries(s, tiles.start + third / PARTS, &at) };
                }
            }
            if plan.for_keys && !tiles.is_empty() {
                // SAFETY: the caller's promise.
                unsafe { self.add_to_keys(s, packed.len(), tiles, &at) };
            }
        }
    }

    /// The rows of a key block that a tile sees.
    #[inline(always)]
    fn seen(&self, number: usize, at: &Place) -> Seen {
        let queries = at.block.tile(number).queries;
        let len = at.block.segment.len();
        rows_seen(self.operands.shape.mask, &queries, len, &at.keys, L::KEYS)
    }

    /// The tile of a part, and the keys it scores.
    #[inline(always)]
    fn part(&self, tiles: &Range<usize>, part: usize, at: &Place) -> (usize, Seen) {
        let number = tiles.start + part / PARTS;
        let first = part % PARTS * SCORED;
        let Seen { rows, all } = self.seen(number, at);
        let start = rows.start.max(first);
        (number, Seen { rows: start..rows.end.min(first + SCORED).max(start), all })
    }

    /// ScoreChanges and the gradients of weights.
    #[inline(always)]
    unsafe fn score<S: Simd>(&self, s: S, tiles: &Range<usize>, part: usize, at: &Place) {
        let (shape, (number, Seen { rows, .. })) = (&self.operands.shape, self.part(tiles, part, at));
        let (next_number, Seen { rows: next_rows, .. }) = self.part(tiles, part + 1, at);
        let (tile, next_tile) = (self.memory.tile(number), self.memory.tile(next_number));
        let Memory { keys, values, .. } = self.memory;
        let buffer = part % (1 + L::DELAY);
        let packed = (at.packed + rows.start) * shape.width / L::WORD;
        let next_packed = (at.packed + next_rows.start) * shape.width / L::WORD;
        let scores = Scored { rows: keys.wrapping_add(packed), queries: tile.queries_across };
        let products = Scored { rows: values.wrapping_add(packed), queries: tile.dout_across };
        let next = Scored { rows: keys.wrapping_add(next_packed), queries: next_tile.queries_across };
        for (now, next, to) in
            [(scores, products, self.memory.scores[buffer]), (products, next, self.memory.products[buffer])]
        {
            // SAFETY: the caller's promise.
            unsafe { L::scores(s, shape, now, next, rows.len(), to) };
        }
    }

    /// ScoreChanges become weights P, gradients of weights become gradients of scores dS.
    #[inline(always)]
    unsafe fn differentiate<S: Simd>(&self, s: S, tiles: &Range<usize>, part: usize, at: &Place) {
        let changes = &self.operands.changes;
        if !changes.any() {
            // SAFETY: the caller's promise.
            return unsafe { self.differentiate_dropping(s, tiles, part, at, Unchanged) };
        }
        let (number, Seen { rows, .. }) = self.part(tiles, part, at);
        let scores = self.memory.scores[part % (1 + L::DELAY)];
        let first = at.keys.start + rows.start;
        let tile = at.block.tile(number);
        let mut derivatives = [0.0; SCORED * TILE];
        // SAFETY of all: the caller's promise: scores are [rows, TILE], of SCORED keys at most.
        // SAFETY: above.
        unsafe { changes.apply(s, &tile, first, rows.len(), scores, derivatives.as_mut_ptr()) };
        if changes.caps() {
            // SAFETY: above.
            unsafe { self.differentiate_dropping(s, tiles, part, at, Derivatives(&derivatives)) };
        } else {
            // SAFETY: above.
            unsafe { self.differentiate_dropping(s, tiles, part, at, Unchanged) };
        }
    }

    #[inline(always)]
    unsafe fn differentiate_dropping<S: Simd, C: Capping>(
        &self,
        s: S,
        tiles: &Range<usize>,
        part: usize,
        at: &Place,
        capping: C,
    ) {
        // SAFETY of both: the caller's promise.
        match &self.operands.dropout {
            // SAFETY: above.
            None => unsafe { self.differentiate_kept(s, tiles, part, at, KeepAll, capping) },
            Some(dropout) => {
                let noise = &TileNoise::of(dropout, &at.block.tile(tiles.start + part / PARTS));
                // SAFETY: above.
                unsafe { self.differentiate_kept(s, tiles, part, at, noise, capping) };
            }
        }
    }

    #[inline(always)]
    unsafe fn differentiate_kept<S: Simd, D: Dropping, C: Capping>(
        &self,
        s: S,
        tiles: &Range<usize>,
        part: usize,
        at: &Place,
        dropping: D,
        capping: C,
    ) {
        let (number, Seen { rows, all }) = self.part(tiles, part, at);
        let tile = self.memory.tile(number);
        let buffer = part % (1 + L::DELAY);
        let (scores, products) = (self.memory.scores[buffer], self.memory.products[buffer]);
        let scale = s.splat(self.operands.changes.scale_after() * L::LOG_E);
        // SAFETY: the caller's promise: both are [rows, TILE].
        unsafe {
            if !all {
                hide(s, scores, tile.bounds, at.keys.start + rows.start, rows.len());
            }
            let (mut below, mut delta) = ([s.splat(0.0); 2], [s.splat(0.0); 2]);
            for v in 0..2 {
                below[v] = s.mul(s.splat(-L::LOG_E), s.load(tile.logsum.add(v * LANES)));
                delta[v] = s.load(tile.delta.add(v * LANES));
            }
            for row in (0..rows.len()).step_by(2) {
                let (mut weights, mut differences) = ([[s.splat(0.0); 2]; 2], [[s.splat(0.0); 2]; 2]);
                for i in 0..2 {
                    for v in 0..2 {
                        let from = (row + i) * TILE + v * LANES;
                        let key = at.keys.start + rows.start + row + i;
                        let weight = L::power(s, s.mul_add(s.load(scores.add(from)), scale, below[v]));
                        let numbers = [weight, s.load(products.add(from))];
                        let [kept, product] = dropping.keep(s, key, v * LANES, numbers);
                        weights[i][v] = kept;
                        let difference = s.mul(weight, s.sub(product, delta[v]));
                        differences[i][v] = capping.multiply(s, from, difference);
                    }
                }
                L::store_left(s, weights, rows.start + row, tile.weights);
                L::store_both(s, differences, rows.start + row, tile.gradients, tile.right_gradients);
            }
            // Keys that this tile does not see, but others of its block do.
            let scored = part % PARTS * SCORED..(part % PARTS + 1) * SCORED;
            let wanted = at.all_rows.start.max(scored.start)..at.all_rows.end.min(scored.end);
            for unseen in [wanted.start..rows.start.min(wanted.end), rows.end.max(wanted.start)..wanted.end] {
                for of in [tile.weights, tile.gradients] {
                    let (first, words) = (unseen.start * TILE / L::WORD, unseen.len() * TILE / L::WORD);
                    pack::fill(s, of.add(first), words, 0.0);
                }
            }
        }
    }

    /// Adds a tile's dS to the gradients of its queries.
    #[inline(always)]
    unsafe fn add_to_queries<S: Simd>(&self, s: S, number: usize, at: &Place) {
        let shape = &self.operands.shape;
        let tile = self.memory.tile(number);
        let rows = self.seen(number, at).rows;
        let packed = (at.packed + rows.start) * shape.width / L::WORD;
        // SAFETY: the caller's promise.
        unsafe {
            let columns = self.memory.key_columns.add(packed);
            let gradients = tile.right_gradients.add(rows.start * TILE / L::WORD);
            L::add_columns(s, shape, columns, gradients, rows.len(), tile.dq);
        }
    }

    /// Adds the queries of these tiles to the sums of the keys.
    #[inline(always)]
    unsafe fn add_to_keys<S: Simd>(&self, s: S, packed_keys: usize, tiles: Range<usize>, at: &Place) {
        let shape = &self.operands.shape;
        let tile = self.memory.tile(tiles.start);
        let rows = &at.all_rows;
        let run = TileRun { count: tiles.len(), step: Memory::<E, L>::tile_floats(shape.width) };
        let from = rows.start * TILE / L::WORD;
        let keys = rows.len();
        // SAFETY: the caller's promise.
        unsafe {
            let dk = self.memory.sums.add((at.packed + rows.start) * shape.width);
            let dv = dk.add(sums_floats(shape, packed_keys, L::KEYS) / 2);
            for (left, right, sums) in [(tile.weights, tile.dout, dv), (tile.gradients, tile.queries, dk)] {
                L::add_rows(s, shape, left.add(from), right, run, keys, sums);
            }
        }
    }
}

/// Multiplies gradients of scores by the cap's derivatives. Chosen outside the loops over them, so that having no cap costs
/// nothing.
trait Capping: Copy {
    /// Sixteen gradients from number `from` of a part on.
    fn multiply<S: Simd>(self, s: S, from: usize, gradients: S::Vector) -> S::Vector;
}

#[derive(Clone, Copy)]
struct Unchanged;

impl Capping for Unchanged {
    #[inline(always)]
    fn multiply<S: Simd>(self, _: S, _: usize, gradients: S::Vector) -> S::Vector {
        gradients
    }
}

/// The derivative of the cap, for each score of a part.
#[derive(Clone, Copy)]
struct Derivatives<'a>(&'a [f32; SCORED * TILE]);

impl Capping for Derivatives<'_> {
    #[inline(always)]
    fn multiply<S: Simd>(self, s: S, from: usize, gradients: S::Vector) -> S::Vector {
        let of_these: &[f32] = &self.0[from..from + LANES];
        // SAFETY: the slice has LANES numbers.
        s.mul(gradients, unsafe { s.load(of_these.as_ptr()) })
    }
}

/// A block of queries and a block of keys.
struct Place<'a> {
    block: &'a QueryBlock,
    /// Counted from the segment's start.
    keys: Range<usize>,
    /// The offset of the keys among the packed ones.
    packed: usize,
    /// The rows of the key block that any of the queries sees.
    all_rows: Range<usize>,
}
