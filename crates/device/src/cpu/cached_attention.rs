//! Attention of new tokens to cached keys and values.
//!
//! A row is one query token of one head; the rows of a key head are ordered by token, then by query head. A few rows together
//! pass over the keys they see, so that a key or value is widened once for all of them. With grouped heads, a single new token
//! already has several rows.

use std::ops::Range;

use super::math::{exp, tanh};
use super::matrix::{Element, Matrix, matrix, with_element};
use super::rows::{each_vector, load, rows_per_task, store};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::Heads;
use crate::kernel::{CachedAttention, ScoreChanges};

/// The most rows that pass over the keys together.
const MOST_ROWS: usize = 4;
/// Rows of a task: enough tasks for a long prompt of a single sequence with a single key head.
const TASK_ROWS: usize = 32;
/// Values that are added to the sums of all rows before the next ones are fetched: they fit the first cache.
const VALUE_BLOCK: usize = 64;

impl Run for CachedAttention {
    fn run(&self, team: &mut Team) {
        with_element!(self.q.view.dtype, E => {
            append::<E>(self, team);
            attend::<E>(self, team);
        });
    }
}

#[derive(Clone, Copy)]
struct HeadRows<E> {
    matrix: Matrix<E>,
    step: usize,
}

impl<E: Element> HeadRows<E> {
    fn of(heads: &Heads) -> HeadRows<E> {
        HeadRows { matrix: matrix(&heads.view), step: heads.step }
    }

    #[inline(always)]
    fn at(&self, row: usize, head: usize, i: usize) -> *mut E {
        self.matrix.at(row, head * self.step + i)
    }
}

/// Copies the new keys and values behind the older ones.
fn append<E: Element>(kernel: &CachedAttention, team: &mut Team) {
    let pairs = [(&kernel.k, &kernel.cached_k), (&kernel.v, &kernel.cached_v)];
    let pairs = pairs.map(|(new, cached)| (HeadRows::<E>::of(new), HeadRows::<E>::of(cached)));
    let sequences = kernel.sequences().enumerate();
    let places: Vec<usize> = sequences
        .flat_map(|(sequence, (length, new))| {
            let first = sequence * kernel.capacity + length;
            first..first + new.len()
        })
        .collect();
    let (heads, dim) = (kernel.k.count, kernel.k.dim);
    team.blocks(places.len(), rows_per_task(2 * heads * dim), |tokens, _| {
        for (token, head) in tokens.flat_map(|token| (0..heads).map(move |head| (token, head))) {
            for (new, cached) in pairs {
                let from = new.at(token, head, 0);
                let to = cached.at(places[token], head, 0);
                // SAFETY: `dim` elements of a head each; this token's place in the cache is this task's alone.
                unsafe { std::ptr::copy_nonoverlapping(from, to, dim) };
            }
        }
    });
}

fn attend<E: Element>(kernel: &CachedAttention, team: &mut Team) {
    let group = kernel.q.count / kernel.k.count;
    let mut tasks = Vec::new();
    for (sequence, (length, tokens)) in kernel.sequences().enumerate() {
        let rows = tokens.len() * group;
        // The last rows see the most keys: they go first, so that no long task ends alone.
        for start in (0..rows).step_by(TASK_ROWS).rev() {
            for key_head in 0..kernel.k.count {
                let rows = start..rows.min(start + TASK_ROWS);
                tasks.push(Task { sequence, length, first_token: tokens.start, key_head, rows });
            }
        }
    }
    let operands = Operands::<E> {
        q: HeadRows::of(&kernel.q),
        k: HeadRows::of(&kernel.cached_k),
        v: HeadRows::of(&kernel.cached_v),
        out: HeadRows::of(&kernel.out),
        group,
        dim: kernel.q.dim,
        width: kernel.q.dim.next_multiple_of(LANES),
    };
    team.tasks(tasks.len(), |task, scratch| {
        let task = &tasks[task];
        let last = task.length + (task.rows.end - 1) / group;
        let keys = last + 1 - kernel.mask.keys(task.length + task.rows.start / group, last + 1).start;
        let stride = keys.next_multiple_of(LANES);
        let floats = scratch.floats(MOST_ROWS * (2 * operands.width + stride));
        let (queries, rest) = floats.split_at_mut(MOST_ROWS * operands.width);
        let (sums, weights) = rest.split_at_mut(MOST_ROWS * operands.width);
        let memory =
            Memory { queries: queries.as_mut_ptr(), sums: sums.as_mut_ptr(), weights: weights.as_mut_ptr(), stride };
        vectorise(Attend { kernel, operands, task, memory });
    });
}

struct Task {
    sequence: usize,
    /// Tokens cached before the new ones.
    length: usize,
    /// The sequence's first new token.
    first_token: usize,
    key_head: usize,
    rows: Range<usize>,
}

#[derive(Clone, Copy)]
struct Operands<E> {
    q: HeadRows<E>,
    k: HeadRows<E>,
    v: HeadRows<E>,
    out: HeadRows<E>,
    /// Query heads to a key head.
    group: usize,
    dim: usize,
    /// `dim` in whole vectors.
    width: usize,
}

/// A thread's working memory, for as many rows as pass over the keys together.
#[derive(Clone, Copy)]
struct Memory {
    /// [rows, width]: scaled.
    queries: *mut f32,
    /// [rows, width]: weighted values.
    sums: *mut f32,
    /// [rows, stride]: a score for each key, then its exponential.
    weights: *mut f32,
    stride: usize,
}

struct Attend<'a, E> {
    kernel: &'a CachedAttention,
    operands: Operands<E>,
    task: &'a Task,
    memory: Memory,
}

impl<E: Element> Vectorised for Attend<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Range { start: mut row, end } = self.task.rows;
        while row < end {
            // SAFETY: rows of the task, whose outputs only this task writes; memory for MOST_ROWS rows and the keys of
            // the whole task; nobody writes the operands, and the cache is complete.
            unsafe {
                row += match end - row {
                    1 => self.pass::<S, 1>(s, row),
                    2 | 3 => self.pass::<S, 2>(s, row),
                    _ => self.pass::<S, MOST_ROWS>(s, row),
                };
            }
        }
    }
}

impl<E: Element> Attend<'_, E> {
    /// Computes `ROWS` rows from `first` on; returns their number.
    #[inline(always)]
    unsafe fn pass<S: Simd, const ROWS: usize>(&self, s: S, first: usize) -> usize {
        let mut seen = [(0, 0); ROWS];
        for (row, seen) in seen.iter_mut().enumerate() {
            let position = self.task.length + (first + row) / self.operands.group;
            let keys = self.kernel.mask.keys(position, position + 1);
            *seen = (keys.start, keys.end);
        }
        // Later rows see no earlier keys.
        let keys = seen[0].0..seen[ROWS - 1].1;
        // SAFETY: the caller's promise.
        unsafe {
            self.fetch_queries::<S, ROWS>(s, first);
            self.score::<S, ROWS>(s, keys.clone(), seen);
            let mut factors = [0.0; ROWS];
            for (row, factor) in factors.iter_mut().enumerate() {
                let scores = self.memory.weights.add(row * self.memory.stride);
                self.change(s, first + row, keys.clone(), scores);
                *factor = 1.0 / exponentiate(s, scores, keys.len(), self.sink(first + row));
            }
            self.weigh::<S, ROWS>(s, keys);
            self.write::<S, ROWS>(s, first, factors);
        }
        ROWS
    }

    /// The token and the query head of a row.
    #[inline(always)]
    fn place(&self, row: usize) -> (usize, usize) {
        let group = self.operands.group;
        (self.task.first_token + row / group, self.task.key_head * group + row % group)
    }

    /// The cache's row for a key of this sequence.
    #[inline(always)]
    fn cached(&self, key: usize) -> usize {
        self.task.sequence * self.kernel.capacity + key
    }

    #[inline(always)]
    unsafe fn fetch_queries<S: Simd, const ROWS: usize>(&self, s: S, first: usize) {
        let Operands { q, dim, width, .. } = self.operands;
        let scale = s.splat(self.kernel.scale);
        for row in 0..ROWS {
            let (token, head) = self.place(first + row);
            each_vector!(0..dim, |i, count| {
                // SAFETY: the caller's promise. Lanes beyond the head are zero.
                unsafe {
                    let query = s.mul(load(s, q.at(token, head, i), count), scale);
                    s.store(self.memory.queries.add(row * width + i), query);
                }
            });
        }
    }

    /// The products of queries and keys, minus infinity where a row does not see the key.
    #[inline(always)]
    unsafe fn score<S: Simd, const ROWS: usize>(&self, s: S, keys: Range<usize>, seen: [(usize, usize); ROWS]) {
        let (Operands { k, dim, width, .. }, Memory { queries, weights, stride, .. }) = (self.operands, self.memory);
        for key in keys.clone() {
            let mut sums = [s.splat(0.0); ROWS];
            each_vector!(0..dim, |i, count| {
                // SAFETY: the caller's promise.
                unsafe {
                    let vector = load(s, k.at(self.cached(key), self.task.key_head, i), count);
                    for (row, sum) in sums.iter_mut().enumerate() {
                        *sum = s.mul_add(s.load(queries.add(row * width + i)), vector, *sum);
                    }
                }
            });
            for row in 0..ROWS {
                let visible = seen[row].0 <= key && key < seen[row].1;
                let score = if visible { s.sum(sums[row]) } else { f32::NEG_INFINITY };
                // SAFETY: the caller's promise.
                unsafe { weights.add(row * stride + key - keys.start).write(score) };
            }
        }
        for row in 0..ROWS {
            for i in keys.len()..keys.len().next_multiple_of(LANES) {
                // SAFETY: `stride` is in whole vectors.
                unsafe { weights.add(row * stride + i).write(f32::NEG_INFINITY) };
            }
        }
    }

    /// Caps a row's scores and adds its head's slope times the distance of each key; hidden ones stay at minus infinity.
    #[inline(always)]
    unsafe fn change<S: Simd>(&self, s: S, row: usize, keys: Range<usize>, scores: *mut f32) {
        let ScoreChanges { cap, slopes, .. } = &self.kernel.scores;
        if cap.is_none() && slopes.is_none() {
            return;
        }
        let position = (self.task.length + row / self.operands.group) as f32;
        let (_, head) = self.place(row);
        // SAFETY: the kernel's check: a slope for each head.
        let slope = slopes.map_or(0.0, |slopes| unsafe { matrix::<f32>(&slopes).at(0, head).read() });
        let mut lanes = [0.0; LANES];
        for (lane, number) in lanes.iter_mut().enumerate() {
            *number = lane as f32;
        }
        for i in (0..keys.len()).step_by(LANES) {
            // SAFETY: the caller's promise: whole vectors of scores.
            unsafe {
                let before = s.load(scores.add(i));
                let mut score = before;
                if let Some(cap) = *cap {
                    score = s.mul(tanh(s, s.mul(score, s.splat(1.0 / cap))), s.splat(cap));
                }
                let distance = s.add(s.load(lanes.as_ptr()), s.splat((keys.start + i) as f32 - position));
                score = s.mul_add(s.splat(slope), distance, score);
                s.store(scores.add(i), s.select_less(before, s.splat(f32::MIN), before, score));
            }
        }
    }

    /// The sink of a row's head.
    #[inline(always)]
    fn sink(&self, row: usize) -> Option<f32> {
        let (_, head) = self.place(row);
        // SAFETY: the kernel's check: a sink for each head.
        self.kernel.scores.sinks.map(|sinks| unsafe { matrix::<f32>(&sinks).at(0, head).read() })
    }

    /// The sum of the values, each times its weight.
    #[inline(always)]
    unsafe fn weigh<S: Simd, const ROWS: usize>(&self, s: S, keys: Range<usize>) {
        let (Operands { v, dim, width, .. }, Memory { sums, weights, stride, .. }) = (self.operands, self.memory);
        for i in (0..ROWS * width).step_by(LANES) {
            // SAFETY: the caller's promise.
            unsafe { s.store(sums.add(i), s.splat(0.0)) };
        }
        for block in keys.clone().step_by(VALUE_BLOCK) {
            let end = keys.end.min(block + VALUE_BLOCK);
            each_vector!(0..dim, |i, count| {
                // SAFETY: the caller's promise.
                unsafe {
                    let mut totals = [s.splat(0.0); ROWS];
                    for key in block..end {
                        let value = load(s, v.at(self.cached(key), self.task.key_head, i), count);
                        for (row, total) in totals.iter_mut().enumerate() {
                            let weight = *weights.add(row * stride + key - keys.start);
                            *total = s.mul_add(s.splat(weight), value, *total);
                        }
                    }
                    for (row, total) in totals.into_iter().enumerate() {
                        let sum = sums.add(row * width + i);
                        s.store(sum, s.add(s.load(sum), total));
                    }
                }
            });
        }
    }

    #[inline(always)]
    unsafe fn write<S: Simd, const ROWS: usize>(&self, s: S, first: usize, factors: [f32; ROWS]) {
        let Operands { out, dim, width, .. } = self.operands;
        for (row, factor) in factors.into_iter().enumerate() {
            let (token, head) = self.place(first + row);
            each_vector!(0..dim, |i, count| {
                // SAFETY: the caller's promise.
                unsafe {
                    let sum = s.load(self.memory.sums.add(row * width + i));
                    store(s, out.at(token, head, i), s.mul(sum, s.splat(factor)), count);
                }
            });
        }
    }
}

/// Turns `len` scores, and what fills their last vector, into exponentials above the maximum of them and of the sink; returns
/// the sum of them all.
///
/// # Safety
/// `scores` holds `len` numbers in whole vectors, and one of them is finite.
#[inline(always)]
unsafe fn exponentiate<S: Simd>(s: S, scores: *mut f32, len: usize, sink: Option<f32>) -> f32 {
    let mut lanes = s.splat(f32::NEG_INFINITY);
    for i in (0..len).step_by(LANES) {
        // SAFETY: the caller's promise.
        lanes = s.max(unsafe { s.load(scores.add(i)) }, lanes);
    }
    let highest = s.max_lane(lanes).max(sink.unwrap_or(f32::NEG_INFINITY));
    let max = s.splat(highest);
    let mut sum = s.splat(0.0);
    for i in (0..len).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let weight = exp(s, s.sub(s.load(scores.add(i)), max));
            s.store(scores.add(i), weight);
            sum = s.add(sum, weight);
        }
    }
    s.sum(sum) + sink.map_or(0.0, |sink| (sink - highest).exp())
}
