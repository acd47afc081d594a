//! Dropless mixtures of experts. A grouped product is a product for each expert, cut in parts that a thread computes alone. Only sums
//! over so many rows of one expert that others would wait are computed by the whole team.

use std::ops::Range;

use super::loss::{Exp, RowSums, Sums};
use super::math::exp;
use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::product::{even_parts, most_working_memory};
use super::rows::{PARTS, Tile, each_vector, load, rows_per_task, store, tiles, total};
use super::selected_rows::{checked_rows, copy_row};
use super::simd::{Simd, Vectorised, vectorise};
use super::team::{LEAST_TASKS, LEAST_TASKS_ALONE};
use super::{Run, Team, WorkingMemory};
use crate::View;
use crate::kernel::{
    CombinePairs, Fill, GatherPairs, GroupedProduct, Operation, Order, PairDots, Product, Route, RouteBackward,
    RowCount, ScalePairs,
};

/// Pairs are counted and sorted in at most this many blocks of tokens...
const MOST_BLOCKS: usize = 64;
/// ...of at least this many, so that the counts of all experts cost little beside the logits.
const LEAST_TOKENS: usize = 32;

fn tokens_per_block(tokens: usize) -> usize {
    tokens.div_ceil(MOST_BLOCKS).max(LEAST_TOKENS)
}

impl Run for Route {
    fn run(&self, team: &mut Team) {
        let [tokens, experts] = self.logits.shape();
        let mut common = team.take_common();
        // [blocks, E]: how many pairs of a block each expert has, later where its next pair goes.
        let counts = Counts(common.floats(self.count_words()).as_mut_ptr().cast(), experts);
        let (chosen, places, pairs) = (indices(&self.chosen), indices(&self.places), indices(&self.pairs));
        let height = tokens_per_block(tokens);
        team.blocks(tokens, height, |block, _| {
            // SAFETY: these counts are this task's alone.
            let counts = unsafe { counts.of_block(block.start / height) };
            counts.fill(0);
            let mut best = vec![0; self.chosen.cols];
            for token in block {
                // SAFETY: the token is this task's alone, here and below.
                unsafe { choose(self, token, &mut best) };
                for slot in 0..chosen.cols {
                    // SAFETY: above.
                    counts[self.place(unsafe { chosen.at(token, slot).read() })] += 1;
                }
            }
        });
        // SAFETY: no task runs now, and the kernel writes the offsets.
        unsafe { counts.add_up(tokens.div_ceil(height), indices(&self.offsets)) };
        team.blocks(tokens, height, |block, _| {
            // SAFETY: these counts are this task's alone; each pair has a place of its own, below their number.
            unsafe {
                let next = counts.of_block(block.start / height);
                for pair in block.start * chosen.cols..block.end * chosen.cols {
                    let next = &mut next[self.place(chosen.at(pair / chosen.cols, pair % chosen.cols).read())];
                    pairs.at(0, *next as usize).write(pair as u32);
                    places.at(0, pair).write(*next);
                    *next += 1;
                }
            }
        });
        team.return_common(common);
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(self.count_words())
    }
}

impl Route {
    /// The place of an expert among those that come one behind the other.
    fn place(&self, expert: u32) -> usize {
        let (expert, experts) = (expert as usize, self.logits.cols);
        if expert < self.first { expert + experts - self.first } else { expert - self.first }
    }

    fn count_words(&self) -> usize {
        let [tokens, experts] = self.logits.shape();
        tokens.div_ceil(tokens_per_block(tokens)) * experts
    }
}

/// A row of counts for each block of tokens, and the number of experts.
#[derive(Clone, Copy)]
struct Counts(*mut u32, usize);

// SAFETY: a description, as `Matrix` is.
unsafe impl Send for Counts {}
// SAFETY: as above.
unsafe impl Sync for Counts {}

impl Counts {
    /// # Safety
    /// Nobody else uses the block's counts.
    unsafe fn of_block<'a>(self, block: usize) -> &'a mut [u32] {
        // SAFETY: there is a row for each block, and the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(block * self.1), self.1) }
    }

    /// Makes of each count the place of the block's first pair, and writes where each expert begins.
    ///
    /// # Safety
    /// Nobody else uses the counts or the offsets.
    unsafe fn add_up(self, blocks: usize, offsets: Matrix<u32>) {
        let mut place = 0;
        for expert in 0..self.1 {
            // SAFETY: the caller's promise.
            unsafe {
                offsets.at(0, expert).write(place);
                for block in 0..blocks {
                    let count = &mut self.of_block(block)[expert];
                    place += std::mem::replace(count, place);
                }
            }
        }
        // SAFETY: as above.
        unsafe { offsets.at(0, self.1).write(place) };
    }
}

/// Larger for larger logits, zero for NaN. Both zeros are equal.
fn rank(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits();
    match logit.is_nan() {
        true => 0,
        false => bits ^ if bits >> 31 == 1 { u32::MAX } else { 1 << 31 },
    }
}

/// Writes a token's experts and their weights. `best` has a place for each.
///
/// # Safety
/// Nobody else uses the token's rows.
unsafe fn choose(kernel: &Route, token: usize, best: &mut [u64]) {
    let (logits, weights) = (matrix::<f32>(&kernel.logits), matrix::<f32>(&kernel.weights));
    let chosen = indices(&kernel.chosen);
    // SAFETY: the row's elements, and the caller's promise.
    let row = unsafe { std::slice::from_raw_parts(logits.at(token, 0), logits.cols) };
    best.fill(0);
    for (expert, &logit) in row.iter().enumerate() {
        // A lower index is larger among equal ranks. Each is larger than zero.
        let key = (rank(logit) as u64) << 32 | !(expert as u32) as u64;
        if key > best[best.len() - 1] {
            let place = best.partition_point(|&other| other > key);
            best[place..].rotate_right(1);
            best[place] = key;
        }
    }
    let Sums { max, exponentials, .. } = vectorise(RowSums { logits: row.as_ptr(), len: row.len() });
    let share = |key: u64| vectorise(Exp(row[!(key as u32) as usize] - max)) / exponentials;
    let divisor = if kernel.renormalise { best.iter().map(|&key| share(key)).sum() } else { 1.0 };
    for (slot, &key) in best.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            chosen.at(token, slot).write(!(key as u32));
            weights.at(token, slot).write(share(key) / divisor);
        }
    }
}

impl Run for RouteBackward {
    fn run(&self, team: &mut Team) {
        let (logits, chosen) = (matrix::<f32>(&self.logits), indices(&self.chosen));
        let (weights, dweights) = (matrix::<f32>(&self.weights), matrix::<f32>(&self.dweights));
        with_element!(self.dlogits.dtype, D => {
            let dlogits = matrix::<D>(&self.dlogits);
            team.blocks(logits.rows, rows_per_task(logits.cols), |block, _| {
                for token in block {
                    let slots = 0..chosen.cols;
                    // SAFETY: nobody writes these, and the row of `dlogits` is this task's alone.
                    unsafe {
                        let pair = |slot| (weights.at(token, slot).read(), dweights.at(token, slot).read());
                        let dot: f32 = slots.clone().map(pair).map(|(weight, dweight)| weight * dweight).sum();
                        let factor = if self.renormalise { None } else { Some(-dot) };
                        vectorise(Others { logits: logits.at(token, 0), out: dlogits.at(token, 0), len: logits.cols, factor });
                        for slot in slots {
                            let expert = chosen.at(token, slot).read() as usize;
                            assert!(expert < logits.cols, "expert {expert} of {}", logits.cols);
                            let (weight, dweight) = pair(slot);
                            dlogits.at(token, expert).write(D::from_f32(weight * (dweight - dot)));
                        }
                    }
                }
            });
        });
    }
}

/// `out = factor · softmax(logits)`, or zeros.
struct Others<D> {
    logits: *const f32,
    out: *mut D,
    len: usize,
    factor: Option<f32>,
}

impl<D: Element> Vectorised for Others<D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Some(factor) = self.factor else {
            // SAFETY: `count` elements from `i` on lie before `len`, here and below.
            each_vector!(0..self.len, |i, count| unsafe { store(s, self.out.add(i), s.splat(0.0), count) });
            return;
        };
        let sums = RowSums { logits: self.logits, len: self.len }.run(s);
        let (max, factor) = (s.splat(sums.max), s.splat(factor / sums.exponentials));
        each_vector!(0..self.len, |i, count| {
            // SAFETY: as above.
            unsafe {
                let e = exp(s, s.sub(load(s, self.logits.add(i), count), max));
                store(s, self.out.add(i), s.mul(e, factor), count);
            }
        });
    }
}

impl Run for GroupedProduct {
    fn run(&self, team: &mut Team) {
        // SAFETY: the kernel's operands live and keep their values until the kernel has run.
        let offsets = unsafe { indices(&self.offsets).as_slice() };
        let ascend = offsets.is_sorted() && offsets.last().is_none_or(|&last| last as usize <= self.a.rows);
        assert!(ascend, "experts' rows end at {offsets:?}, of {} rows", self.a.rows);
        let rows_of = |expert: usize| offsets[expert] as usize..offsets[expert + 1] as usize;
        let all = offsets.last().map_or(0, |&last| last as usize);
        let (empty, filled): (Vec<usize>, Vec<usize>) =
            (0..self.experts()).partition(|&expert| rows_of(expert).is_empty());
        let is_alone = |expert: &usize| self.order != Order::TN || rows_of(*expert).len() <= most_summands_alone(all);
        let (alone, together): (Vec<usize>, Vec<usize>) = filled.into_iter().partition(is_alone);
        let cols = self.cols_alone();
        let most_rows = (all * self.out.cols.div_ceil(cols) / PARTS_WANTED).clamp(TILE, ROWS_ALONE);
        let mut products = Vec::new();
        for expert in alone {
            let rows = rows_of(expert);
            let height = if self.order == Order::TN { rows.len() } else { even_parts(rows.len(), most_rows, TILE) };
            for part in parts(rows, height) {
                products.extend(parts(0..self.out.cols, cols).map(|cols| self.of_expert(expert, part.clone(), cols)));
            }
        }
        // The longest first, so that none ends alone.
        products.sort_by_key(|product| std::cmp::Reverse(product.flops()));
        team.forget_operands();
        team.tasks_alone(products.len(), |i, team| products[i].run(team));
        let whole = |expert: usize| self.of_expert(expert, rows_of(expert), 0..self.out.cols);
        together.into_iter().for_each(|expert| whole(expert).run(team));
        if self.order == Order::TN && !self.accumulate {
            empty.into_iter().for_each(|expert| Fill { out: whole(expert).out, value: 0.0 }.run(team));
        }
    }

    fn working_memory(&self) -> WorkingMemory {
        let all = self.a.rows;
        let width = self.out.cols;
        if all == 0 || width == 0 || self.experts() == 0 {
            return WorkingMemory::default();
        }
        let alone = |rows: usize| {
            // All parts have the width of the first but the last.
            let all_widths = || parts(0..width, self.cols_alone()).map(|cols| cols.len());
            let widths = [all_widths().next(), all_widths().last()].into_iter().flatten();
            let of_width = |cols: usize| {
                most_working_memory(&|rows| self.of_expert(0, 0..rows, 0..cols), rows, LEAST_TASKS_ALONE).alone()
            };
            widths.map(of_width).reduce(WorkingMemory::max).expect("there is a column")
        };
        if self.order != Order::TN {
            return alone(all.min(ROWS_ALONE));
        }
        let together = most_working_memory(&|rows| self.of_expert(0, 0..rows, 0..width), all, LEAST_TASKS);
        match most_summands_alone(all) {
            0 => together,
            rows => together.max(alone(rows)),
        }
    }
}

/// The most rows that a thread computes alone, and bytes of its right operand: most second caches keep so many.
const ROWS_ALONE: usize = 512;
const RIGHT_BYTES: usize = 1 << 20;
/// Fewer columns are not worth reading the left operand again.
const LEAST_COLS: usize = 256;

/// Parts of all rows, so many that threads finish together, however many they are.
const PARTS_WANTED: usize = 16;

/// The most rows of an expert that a thread adds up alone.
fn most_summands_alone(all: usize) -> usize {
    all / PARTS_WANTED
}

/// Rows and columns come in multiples of this, the side of the largest tile.
const TILE: usize = 32;

fn parts(all: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    all.clone().step_by(len).map(move |start| start..all.end.min(start + len))
}

impl GroupedProduct {
    /// The columns that a thread computes alone, as if an expert had `ROWS_ALONE` summands if it sums over rows.
    fn cols_alone(&self) -> usize {
        let summands = if self.order == Order::TN { ROWS_ALONE } else { self.a.cols };
        let most = RIGHT_BYTES / (summands.max(1) * self.a.dtype.size_bytes());
        even_parts(self.out.cols, most.max(LEAST_COLS), TILE)
    }

    /// Columns of the product of an expert's rows.
    fn of_expert(&self, expert: usize, rows: Range<usize>, cols: Range<usize>) -> Product {
        let part = |view: View| {
            let height = view.rows / self.experts();
            view.row_range(expert * height..(expert + 1) * height)
        };
        let (b, out) = match self.order {
            Order::TN => (self.b.row_range(rows.clone()).col_range(cols.clone()), part(self.out)),
            Order::NN => (part(self.b).col_range(cols.clone()), self.out.row_range(rows.clone())),
            Order::NT => (part(self.b).row_range(cols.clone()), self.out.row_range(rows.clone())),
        };
        let a = self.a.row_range(rows);
        Product { accumulate: self.accumulate, ..Product::new(self.order, a, b, out.col_range(cols)) }
    }
}

/// A number for each pair; 1 without them.
#[derive(Clone, Copy)]
struct Weights {
    of: Option<Matrix<f32>>,
    per_token: usize,
}

impl Weights {
    fn new(view: Option<View>, per_token: usize) -> Weights {
        Weights { of: view.map(|view| matrix(&view)), per_token }
    }

    /// # Safety
    /// There is such a pair, and nobody writes the weights.
    #[inline(always)]
    unsafe fn at(self, pair: u32) -> f32 {
        let (token, slot) = (pair as usize / self.per_token, pair as usize % self.per_token);
        // SAFETY: the caller's promise.
        self.of.map_or(1.0, |weights| unsafe { weights.at(token, slot).read() })
    }
}

/// How many of so many rows there are.
pub(super) fn counted(count: &Option<RowCount>, rows: usize) -> usize {
    // SAFETY: the kernel's operands live and keep their values until the kernel has run.
    count.map_or(rows, |count| rows.min(unsafe { indices(&count.at).at(0, 0).read() } as usize))
}

/// The rows that there are.
pub(super) fn counted_rows(count: &Option<RowCount>, view: View) -> View {
    view.row_range(0..counted(count, view.rows))
}

impl Run for GatherPairs {
    fn run(&self, team: &mut Team) {
        let per_token = self.chosen_per_token;
        let pairs = checked_rows(&self.pairs, self.x.rows * per_token);
        let weights = Weights::new(self.weights, per_token);
        with_element!(self.x.dtype, E => {
            let (x, out) = (matrix::<E>(&self.x), matrix::<E>(&self.out));
            tiles(team, counted_rows(&self.count, self.out).shape(), |Tile { rows, cols }| {
                for row in rows {
                    let from = pairs[row] as usize / per_token;
                    // SAFETY: the pair was checked; the tile of `out` is this task's alone.
                    unsafe {
                        match self.weights {
                            None => copy_row(x, from, out, row, cols.clone()),
                            Some(_) => vectorise(ScaleRow { x, from, out, to: row, cols: cols.clone(), factor: weights.at(pairs[row]) }),
                        }
                    }
                }
            });
        });
    }
}

impl Run for ScalePairs {
    fn run(&self, team: &mut Team) {
        let pairs = self.pairs.as_ref().map(|pairs| checked_rows(pairs, self.weights.len()));
        let weights = Weights::new(Some(self.weights), self.weights.cols.max(1));
        with_element!(self.x.dtype, E => with_element!(self.out.dtype, O => {
            let (x, out) = (matrix::<E>(&self.x), matrix::<O>(&self.out));
            tiles(team, counted_rows(&self.count, self.out).shape(), |Tile { rows, cols }| {
                for row in rows {
                    // SAFETY: the pair was checked, or it is a row.
                    let factor = unsafe { weights.at(pairs.map_or(row as u32, |pairs| pairs[row])) };
                    vectorise(ScaleRow { x, from: row, out, to: row, cols: cols.clone(), factor });
                }
            });
        }));
    }
}

/// `out[to] = factor · x[from]`
struct ScaleRow<E, O> {
    x: Matrix<E>,
    from: usize,
    out: Matrix<O>,
    to: usize,
    cols: Range<usize>,
    factor: f32,
}

impl<E: Element, O: Element> Vectorised for ScaleRow<E, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(self.factor);
        each_vector!(self.cols.clone(), |col, count| {
            // SAFETY: both rows exist, and this part of `out` is this task's alone. A vector is read before it is overwritten.
            unsafe {
                let x = load(s, self.x.at(self.from, col), count);
                store(s, self.out.at(self.to, col), s.mul(x, factor), count);
            }
        });
    }
}

impl Run for CombinePairs {
    fn run(&self, team: &mut Team) {
        let places = checked_rows(&self.places, self.places.cols);
        let (rows, per_token) = (counted(&self.count, self.x.rows), self.chosen_per_token());
        let weights = Weights::new(self.weights, per_token);
        with_element!(self.x.dtype, E => with_element!(self.out.dtype, O => {
            let (x, out) = (matrix::<E>(&self.x), matrix::<O>(&self.out));
            tiles(team, self.out.shape(), |tile| {
                vectorise(Combine { x, rows, places, per_token, weights, out, accumulate: self.accumulate, tile });
            });
        }));
    }
}

struct Combine<'a, E, O> {
    x: Matrix<E>,
    /// Rows of `x` that are there.
    rows: usize,
    places: &'a [u32],
    per_token: usize,
    weights: Weights,
    out: Matrix<O>,
    accumulate: bool,
    tile: Tile,
}

impl<E: Element, O: Element> Vectorised for Combine<'_, E, O> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for token in self.tile.rows {
            let first = token * self.per_token;
            each_vector!(self.tile.cols.clone(), |col, count| {
                let to = self.out.at(token, col);
                // SAFETY: these rows are there; this part of `out` is this task's alone.
                unsafe {
                    let mut sum = if self.accumulate { load(s, to, count) } else { s.splat(0.0) };
                    for (slot, &place) in self.places[first..][..self.per_token].iter().enumerate() {
                        if place as usize >= self.rows {
                            continue;
                        }
                        let weight = s.splat(self.weights.at((first + slot) as u32));
                        sum = s.mul_add(load(s, self.x.at(place as usize, col), count), weight, sum);
                    }
                    store(s, to, sum, count);
                }
            });
        }
    }
}

impl Run for PairDots {
    fn run(&self, team: &mut Team) {
        let pairs = self.pairs.as_ref().map(|pairs| checked_rows(pairs, self.out.len()));
        let (out, per_token) = (matrix::<f32>(&self.out), self.out.cols);
        with_element!(self.a.dtype, A => with_element!(self.b.dtype, B => {
            let (a, b) = (matrix::<A>(&self.a), matrix::<B>(&self.b));
            team.blocks(counted(&self.count, a.rows), rows_per_task(a.cols), |block, _| {
                for row in block {
                    let pair = pairs.map_or(row, |pairs| pairs[row] as usize);
                    let dot = vectorise(Dot { a: a.at(row, 0), b: b.at(row, 0), len: a.cols });
                    // SAFETY: the pair was checked or is a row, and it is in no other row.
                    unsafe { out.at(pair / per_token, pair % per_token).write(dot) };
                }
            });
        }));
    }
}

/// `⟨a, b⟩` of as many elements.
pub(super) struct Dot<A, B> {
    pub a: *const A,
    pub b: *const B,
    pub len: usize,
}

impl<A: Element, B: Element> Vectorised for Dot<A, B> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = [s.splat(0.0); PARTS];
        each_vector!(0..self.len, |i, count, part| {
            // SAFETY: `count` elements from `i` on lie before `len`.
            let (a, b) = unsafe { (load(s, self.a.add(i), count), load(s, self.b.add(i), count)) };
            sums[part] = s.mul_add(a, b, sums[part]);
        });
        total(s, sums)
    }
}
