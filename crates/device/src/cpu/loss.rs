//! Softmax cross-entropy: statistics of each row in one pass over memory, then losses and gradients in another.

use super::math::exp;
use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{each_vector, load, place_of, store};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::kernel::{IGNORE, LossBackward, LossMerge, LossStats};

/// Logits of a task, some tens of microseconds; a task has whole rows.
const TASK_LOGITS: usize = 1 << 16;
/// Logits read twice in a row, once for the maximum and once for the sum: they stay in the first cache.
const CHUNK: usize = 4096;
/// Tokens of a task that only merges statistics.
const MERGED_TOKENS: usize = 1024;

fn rows_per_task(cols: usize) -> usize {
    (TASK_LOGITS / cols.max(1)).max(1)
}

impl Run for LossStats {
    fn run(&self, team: &mut Team) {
        with_element!(self.logits.dtype, E => {
            let (logits, labels) = (matrix::<E>(&self.logits), indices(&self.labels));
            let (stats, first) = (matrix::<f32>(&self.stats), self.first);
            team.blocks(logits.rows, rows_per_task(logits.cols), |rows, _| {
                for row in rows {
                    // SAFETY: the row's elements, which no other task writes.
                    unsafe {
                        let sums = vectorise(RowSums { logits: logits.at(row, 0), len: logits.cols });
                        let column = place_of(labels.at(0, row).read(), first, logits.cols);
                        let target = column.map_or(0.0, |column| logits.at(row, column).read().to_f32());
                        write_stats(stats, row, [sums.max, sums.exponentials, target, sums.logits]);
                    }
                }
            });
        });
    }
}

/// # Safety
/// No other thread uses the row.
unsafe fn read_stats(stats: Matrix<f32>, row: usize) -> [f32; 4] {
    // SAFETY: a row has four elements.
    std::array::from_fn(|i| unsafe { stats.at(row, i).read() })
}

/// # Safety
/// No other thread uses the row.
unsafe fn write_stats(stats: Matrix<f32>, row: usize, values: [f32; 4]) {
    for (i, value) in values.into_iter().enumerate() {
        // SAFETY: a row has four elements.
        unsafe { stats.at(row, i).write(value) };
    }
}

pub(super) struct RowSums<E> {
    pub logits: *const E,
    pub len: usize,
}

pub(super) struct Sums {
    pub max: f32,
    /// Σ exp(logit - max)
    pub exponentials: f32,
    /// Σ logit
    logits: f32,
}

impl<E: Element> Vectorised for RowSums<E> {
    type Output = Sums;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Sums {
        let mut sums = Sums { max: f32::NEG_INFINITY, exponentials: 0.0, logits: 0.0 };
        for start in (0..self.len).step_by(CHUNK) {
            let len = CHUNK.min(self.len - start);
            // SAFETY: the chunk lies in the row.
            unsafe { add_chunk(s, self.logits.add(start), len, &mut sums) };
        }
        sums
    }
}

/// # Safety
/// `logits` is readable for `len` elements.
#[inline(always)]
unsafe fn add_chunk<S: Simd, E: Element>(s: S, logits: *const E, len: usize, sums: &mut Sums) {
    /// Sums that run side by side, to hide the latency of an addition.
    const SUMS: usize = 4;
    let (lowest, zero) = (s.splat(f32::NEG_INFINITY), s.splat(0.0));
    let (mut max, mut total) = ([lowest; SUMS], [zero; SUMS]);
    let unrolled = len / (SUMS * LANES) * (SUMS * LANES);
    // SAFETY of the loads below: they end at or before `len`.
    for i in (0..unrolled).step_by(SUMS * LANES) {
        for k in 0..SUMS {
            // SAFETY: above.
            let x = unsafe { E::load(s, logits.add(i + k * LANES)) };
            max[k] = s.max(x, max[k]);
            total[k] = s.add(total[k], x);
        }
    }
    for i in (unrolled..len).step_by(LANES) {
        let count = LANES.min(len - i);
        // SAFETY: above.
        let x = unsafe { E::load_partial(s, logits.add(i), count) };
        max[0] = s.max(keep_first(s, x, count, lowest), max[0]);
        total[0] = s.add(total[0], x);
    }
    let chunk_max = s.max_lane(s.max(s.max(max[0], max[1]), s.max(max[2], max[3])));
    sums.logits += s.sum(s.add(s.add(total[0], total[1]), s.add(total[2], total[3])));
    let new_max = if chunk_max > sums.max { chunk_max } else { sums.max };
    // While every logit so far is minus infinity the sum is zero; a difference of infinities would make it NaN.
    let base = s.splat(if new_max == f32::NEG_INFINITY { 0.0 } else { new_max });
    let mut exponentials = [zero; SUMS];
    for i in (0..unrolled).step_by(SUMS * LANES) {
        for (k, sum) in exponentials.iter_mut().enumerate() {
            // SAFETY: above.
            let x = unsafe { E::load(s, logits.add(i + k * LANES)) };
            *sum = s.add(*sum, exp(s, s.sub(x, base)));
        }
    }
    for i in (unrolled..len).step_by(LANES) {
        let count = LANES.min(len - i);
        // SAFETY: above.
        let x = unsafe { E::load_partial(s, logits.add(i), count) };
        let e = exp(s, s.sub(keep_first(s, x, count, lowest), base));
        exponentials[0] = s.add(exponentials[0], e);
    }
    let [a, b, c, d] = exponentials;
    let before = s.max_lane(exp(s, s.sub(s.splat(sums.max), base)));
    sums.exponentials = sums.exponentials * before + s.sum(s.add(s.add(a, b), s.add(c, d)));
    sums.max = new_max;
}

/// The first `count` lanes of `x`, and `rest` in the others.
#[inline(always)]
fn keep_first<S: Simd>(s: S, x: S::Vector, count: usize, rest: S::Vector) -> S::Vector {
    const LANE_NUMBERS: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
    // SAFETY: LANES numbers.
    let lanes = unsafe { s.load(LANE_NUMBERS.as_ptr()) };
    s.select_less(lanes, s.splat(count as f32), x, rest)
}

/// eˣ of one number, with the bits that a vector of them would have.
pub(super) struct Exp(pub f32);

impl Vectorised for Exp {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        s.max_lane(exp(s, s.splat(self.0)))
    }
}

impl Run for LossMerge {
    fn run(&self, team: &mut Team) {
        let (parts, stats) = (matrix::<f32>(&self.parts), matrix::<f32>(&self.stats));
        team.blocks(stats.rows, MERGED_TOKENS, |rows, _| {
            for row in rows {
                let part = |rank: usize| -> [f32; 4] {
                    // SAFETY: four elements of each part belong to the row.
                    std::array::from_fn(|i| unsafe { parts.at(rank, 4 * row + i).read() })
                };
                let max = (0..parts.rows).map(|rank| part(rank)[0]).fold(f32::NEG_INFINITY, f32::max);
                let mut merged = [max, 0.0, 0.0, 0.0];
                for rank in 0..parts.rows {
                    let [own_max, exponentials, target, logits] = part(rank);
                    // A rank without columns, or with only minus infinities, adds zero, or NaN, which must stay.
                    let finite = own_max != f32::NEG_INFINITY;
                    merged[1] += if finite { exponentials * vectorise(Exp(own_max - max)) } else { exponentials };
                    merged[2] += target;
                    merged[3] += logits;
                }
                // SAFETY: the row is this task's.
                unsafe { write_stats(stats, row, merged) };
            }
        });
    }
}

impl Run for LossBackward {
    fn run(&self, team: &mut Team) {
        let dlogits_dtype = self.dlogits.map_or(self.logits.dtype, |dlogits| dlogits.dtype);
        with_element!(self.logits.dtype, E => with_element!(dlogits_dtype, D => backward::<E, D>(self, team)));
    }
}

fn backward<E: Element, D: Element>(kernel: &LossBackward, team: &mut Team) {
    let (logits, labels) = (matrix::<E>(&kernel.logits), indices(&kernel.labels));
    let (stats, losses) = (matrix::<f32>(&kernel.stats), matrix::<f32>(&kernel.losses));
    let dlogits = kernel.dlogits.map(|dlogits| matrix::<D>(&dlogits));
    let rest = kernel.smoothing / kernel.vocabulary as f32;
    let cols = if dlogits.is_some() { logits.cols } else { 1 };
    team.blocks(logits.rows, rows_per_task(cols), |rows, _| {
        for row in rows {
            // SAFETY: this task alone reads and writes the row's elements. The label's logit is taken from the
            // statistics, so gradients may overwrite the logits.
            unsafe {
                let label = labels.at(0, row).read();
                let [max, sum, target, total] = read_stats(stats, row);
                // The sum of logits is infinite if one is masked; without smoothing it does not count.
                let spread = if rest == 0.0 { 0.0 } else { rest * total };
                let loss = (max + sum.ln()) - (1.0 - kernel.smoothing) * target - spread;
                losses.at(0, row).write(if label == IGNORE { 0.0 } else { loss });
                let Some(dlogits) = dlogits else { continue };
                let factor = kernel.scale / sum;
                let row_gradient = RowGradient {
                    logits: logits.at(row, 0),
                    dlogits: dlogits.at(row, 0),
                    len: logits.cols,
                    ignored: label == IGNORE,
                    max,
                    factor,
                    rest: kernel.scale * rest,
                    cap: kernel.cap,
                };
                vectorise(row_gradient);
                if let Some(column) = place_of(label, kernel.first, logits.cols) {
                    let certain = kernel.scale * (1.0 - kernel.smoothing + rest);
                    let gradient = factor.mul_add(vectorise(Exp(target - max)), -certain);
                    let gradient = kernel.cap.map_or(gradient, |cap| gradient * (1.0 - (target / cap).powi(2)));
                    dlogits.at(row, column).write(D::from_f32(gradient));
                }
            }
        }
    });
}

/// `dlogits = factor · exp(logits - max) - rest`, or zero.
struct RowGradient<E, D> {
    logits: *const E,
    dlogits: *mut D,
    len: usize,
    ignored: bool,
    max: f32,
    factor: f32,
    rest: f32,
    cap: Option<f32>,
}

impl<E: Element, D: Element> Vectorised for RowGradient<E, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.cap.is_some() { self.write::<S, true>(s) } else { self.write::<S, false>(s) }
    }
}

impl<E: Element, D: Element> RowGradient<E, D> {
    #[inline(always)]
    fn write<S: Simd, const IS_CAPPED: bool>(&self, s: S) {
        let share_of_cap = s.splat(self.cap.map_or(0.0, |cap| 1.0 / cap));
        each_vector!(0..self.len, |i, count| {
            // SAFETY: `count` elements from `i` on lie before `len`. A vector is read before it is overwritten.
            unsafe {
                let x = load(s, self.logits.add(i), count);
                let mut gradient = if self.ignored { s.splat(0.0) } else { self.at(s, x) };
                if IS_CAPPED {
                    let share = s.mul(x, share_of_cap);
                    gradient = s.mul(gradient, s.sub(s.splat(1.0), s.mul(share, share)));
                }
                store(s, self.dlogits.add(i), gradient, count);
            }
        });
    }
}

impl<E, D> RowGradient<E, D> {
    #[inline(always)]
    fn at<S: Simd>(&self, s: S, logits: S::Vector) -> S::Vector {
        let e = exp(s, s.sub(logits, s.splat(self.max)));
        s.mul_add(e, s.splat(self.factor), s.splat(-self.rest))
    }
}
