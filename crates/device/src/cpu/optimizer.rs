//! AdamW and the norm that clips its gradients: each a single pass over memory, which is all they cost.

use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{each_vector, load, store};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::{Run, Team, WorkingMemory};
use crate::kernel::{AdamW, ClipFactor, SquaredNorm};
use crate::{DType, View};

/// Elements of a task: some tens of microseconds of memory traffic.
const CHUNK: usize = 1 << 15;

impl Run for AdamW {
    fn run(&self, team: &mut Team) {
        let copy_dtype = self.copy.map_or(DType::Bf16, |copy| copy.dtype);
        with_element!(copy_dtype, E => update::<E>(self, team));
    }
}

/// What one update multiplies by, worked out once in f64.
#[derive(Clone, Copy)]
struct Factors {
    grad: f32,
    /// `1 - lr · decay`
    keep: f32,
    beta1: f32,
    beta1_rest: f32,
    beta2: f32,
    beta2_rest: f32,
    /// `lr / (1 - beta1ᵗ)`
    rate: f32,
    /// `1 / √(1 - beta2ᵗ)`
    deviation: f32,
    epsilon: f32,
}

impl Factors {
    fn of(kernel: &AdamW) -> Factors {
        let (lr, beta1, beta2) = (kernel.lr as f64, kernel.beta1 as f64, kernel.beta2 as f64);
        let correction = |beta: f64| 1.0 - beta.powf(kernel.step as f64);
        // SAFETY: one element, and the queue's order keeps its writer away.
        let grad = kernel.grad_factor.map_or(1.0, |factor| unsafe { matrix::<f32>(&factor).at(0, 0).read() });
        Factors {
            grad,
            keep: (1.0 - lr * kernel.weight_decay as f64) as f32,
            beta1: kernel.beta1,
            beta1_rest: (1.0 - beta1) as f32,
            beta2: kernel.beta2,
            beta2_rest: (1.0 - beta2) as f32,
            rate: (lr / correction(beta1)) as f32,
            deviation: (1.0 / correction(beta2).sqrt()) as f32,
            epsilon: kernel.epsilon,
        }
    }
}

fn update<E: Element>(kernel: &AdamW, team: &mut Team) {
    if kernel.weight.is_empty() {
        return;
    }
    let factors = Factors::of(kernel);
    let [weight, grad, mean, variance] =
        [kernel.weight, kernel.grad, kernel.mean, kernel.variance].map(|view| matrix::<f32>(&flat(view)));
    let copy = kernel.copy.map(|copy| matrix::<E>(&flat(copy)));
    let frozen = kernel.frozen.map(|frozen| indices(&frozen));
    team.blocks(weight.cols, CHUNK, |range, _| {
        let at = |matrix: Matrix<f32>| matrix.at(0, range.start);
        vectorise(Update {
            len: range.len(),
            weight: at(weight),
            grad: at(grad),
            mean: at(mean),
            variance: at(variance),
            copy: copy.map(|copy| copy.at(0, range.start)),
            // Tasks begin at whole words.
            frozen: frozen.map(|frozen| frozen.at(0, range.start / WORD)),
            factors,
        });
    });
}

/// Elements whose bits are a word, and vectors are a half or the whole of it.
const WORD: usize = u32::BITS as usize;
const _: () = assert!(CHUNK.is_multiple_of(WORD) && WORD.is_multiple_of(LANES));

/// A contiguous tensor as one row.
fn flat(view: View) -> View {
    view.reshaped(1, view.len())
}

struct Update<E> {
    len: usize,
    weight: *mut f32,
    grad: *mut f32,
    mean: *mut f32,
    variance: *mut f32,
    copy: Option<*mut E>,
    frozen: Option<*mut u32>,
    factors: Factors,
}

impl<E: Element> Vectorised for Update<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        each_vector!(0..self.len, |i, count| {
            // SAFETY: `count` elements from `i` on lie inside every operand, and their bits inside the word.
            unsafe {
                let frozen = self.frozen.map_or(0, |words| (words.add(i / WORD).read() >> (i % WORD)) as u16);
                if frozen != u16::MAX {
                    let at = [self.weight, self.grad, self.mean, self.variance].map(|from| load(s, from.add(i), count));
                    let [weight, mean, variance] = self.step(s, at);
                    let weight = s.select_bits(frozen, at[0], weight);
                    store(s, self.weight.add(i), weight, count);
                    store(s, self.mean.add(i), s.select_bits(frozen, at[2], mean), count);
                    store(s, self.variance.add(i), s.select_bits(frozen, at[3], variance), count);
                    if let Some(copy) = self.copy {
                        store(s, copy.add(i), weight, count);
                    }
                }
            }
        });
    }
}

impl<E> Update<E> {
    #[inline(always)]
    fn step<S: Simd>(&self, s: S, [weight, grad, mean, variance]: [S::Vector; 4]) -> [S::Vector; 3] {
        let factors = &self.factors;
        let grad = s.mul(grad, s.splat(factors.grad));
        let mean = s.mul_add(mean, s.splat(factors.beta1), s.mul(grad, s.splat(factors.beta1_rest)));
        let square = s.mul(s.mul(grad, grad), s.splat(factors.beta2_rest));
        let variance = s.mul_add(variance, s.splat(factors.beta2), square);
        let divisor = s.mul_add(s.sqrt(variance), s.splat(factors.deviation), s.splat(factors.epsilon));
        let change = s.div(s.mul(mean, s.splat(-factors.rate)), divisor);
        [s.mul_add(weight, s.splat(factors.keep), change), mean, variance]
    }
}

impl Run for SquaredNorm {
    fn run(&self, team: &mut Team) {
        let out = matrix::<f32>(&self.out).at(0, 0);
        let total = with_element!(self.x.dtype, E => squared_norm(matrix::<E>(&self.x), team));
        // SAFETY: one element, and the queue's order keeps others away.
        unsafe {
            let before = if self.accumulate { out.read() as f64 } else { 0.0 };
            out.write((before + total) as f32);
        }
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(partials_floats(self.x.rows * self.x.cols))
    }
}

/// Elements summed in f32 before they join the sum in f64.
const RUN: usize = 4096;

/// The matrix, read row after row whether or not there are gaps, is cut in chunks; each has a partial sum in f64, and
/// the partials are added in order.
fn squared_norm<E: Element>(x: Matrix<E>, team: &mut Team) -> f64 {
    let len = x.rows * x.cols;
    let chunks = len.div_ceil(CHUNK);
    let mut common = team.take_common();
    let partials = Partials(common.floats(partials_floats(len)).as_mut_ptr().cast::<f64>());
    team.blocks(len, CHUNK, |range, _| {
        let mut sum = 0.0;
        let mut start = range.start;
        while start < range.end {
            let (row, col) = (start / x.cols, start % x.cols);
            let count = RUN.min(x.cols - col).min(range.end - start);
            sum += vectorise(SumOfSquares { from: x.at(row, col), len: count });
            start += count;
        }
        // SAFETY: each task writes the partial of its own chunk.
        unsafe { partials.at(range.start / CHUNK).write(sum) };
    });
    // SAFETY: every task has written its partial and ended.
    let total = (0..chunks).map(|chunk| unsafe { partials.at(chunk).read() }).sum();
    team.return_common(common);
    total
}

/// An f64 for each chunk.
fn partials_floats(len: usize) -> usize {
    2 * len.div_ceil(CHUNK)
}

/// The chunks' sums: f64 in memory aligned for vectors.
#[derive(Clone, Copy)]
struct Partials(*mut f64);

// SAFETY: tasks write disjoint elements.
unsafe impl Sync for Partials {}

impl Partials {
    fn at(&self, chunk: usize) -> *mut f64 {
        // SAFETY: `chunk` is below the number that the memory was made for.
        unsafe { self.0.add(chunk) }
    }
}

struct SumOfSquares<E> {
    from: *const E,
    len: usize,
}

impl<E: Element> Vectorised for SumOfSquares<E> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        /// Sums that run side by side, to hide the latency of an addition.
        const SUMS: usize = 8;
        let mut sums = [s.splat(0.0); SUMS];
        let mut i = 0;
        while i + SUMS * LANES <= self.len {
            for (lane, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the loop's condition.
                let x = unsafe { E::load(s, self.from.add(i + lane * LANES)) };
                *sum = s.mul_add(x, x, *sum);
            }
            i += SUMS * LANES;
        }
        while i < self.len {
            let count = LANES.min(self.len - i);
            // SAFETY: `count` elements are left.
            let x = unsafe { E::load_partial(s, self.from.add(i), count) };
            sums[0] = s.mul_add(x, x, sums[0]);
            i += count;
        }
        sums.iter().map(|&sum| s.sum(sum) as f64).sum()
    }
}

impl Run for ClipFactor {
    fn run(&self, _team: &mut Team) {
        let (squared_norm, out) = (matrix::<f32>(&self.squared_norm).at(0, 0), matrix::<f32>(&self.out).at(0, 0));
        // SAFETY: one element each, and the queue's order keeps others away.
        unsafe {
            let factor = self.limit / (squared_norm.read().sqrt() + 1e-6);
            // Not `min`, which would turn the factor of a NaN into one.
            out.write(if factor > 1.0 { 1.0 } else { factor });
        }
    }
}
