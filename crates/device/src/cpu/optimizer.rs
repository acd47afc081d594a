//! Elementwise updates, and the norm that clips gradients: each a single pass over memory, which is their whole cost.

use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{each_vector, load, store};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::team::Scratch;
use super::{Run, Team, WorkingMemory};
use crate::kernel::{AdamW, ClipFactor, Lion, Sgd, SquaredNorm, SquaredNorms};
use crate::{DType, View};

/// Elements of a task: some tens of microseconds of memory traffic.
const CHUNK: usize = 1 << 15;

/// One element's update.
trait Rule<const STATES: usize>: Copy + Sync {
    /// The new weight and the new state.
    fn step<S: Simd>(
        &self,
        s: S,
        weight: S::Vector,
        grad: S::Vector,
        state: [S::Vector; STATES],
    ) -> (S::Vector, [S::Vector; STATES]);
}

impl Run for AdamW {
    fn run(&self, team: &mut Team) {
        let operands = Operands::of(self.weight, self.grad, [self.mean, self.variance], self.copy, self.frozen);
        operands.update(AdamWFactors::of(self), team);
    }
}

/// The factors of one AdamW update, computed once in f64.
#[derive(Clone, Copy)]
struct AdamWFactors {
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

impl AdamWFactors {
    fn of(kernel: &AdamW) -> AdamWFactors {
        let (lr, beta1, beta2) = (kernel.lr as f64, kernel.beta1 as f64, kernel.beta2 as f64);
        let correction = |beta: f64| 1.0 - beta.powf(kernel.step as f64);
        AdamWFactors {
            grad: factor(&kernel.grad_factor),
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

impl Rule<2> for AdamWFactors {
    #[inline(always)]
    fn step<S: Simd>(
        &self,
        s: S,
        weight: S::Vector,
        grad: S::Vector,
        [mean, variance]: [S::Vector; 2],
    ) -> (S::Vector, [S::Vector; 2]) {
        let grad = s.mul(grad, s.splat(self.grad));
        let mean = s.mul_add(mean, s.splat(self.beta1), s.mul(grad, s.splat(self.beta1_rest)));
        let square = s.mul(s.mul(grad, grad), s.splat(self.beta2_rest));
        let variance = s.mul_add(variance, s.splat(self.beta2), square);
        let divisor = s.mul_add(s.sqrt(variance), s.splat(self.deviation), s.splat(self.epsilon));
        let change = s.div(s.mul(mean, s.splat(-self.rate)), divisor);
        (s.mul_add(weight, s.splat(self.keep), change), [mean, variance])
    }
}

impl Run for Sgd {
    fn run(&self, team: &mut Team) {
        let factors = SgdFactors {
            grad: factor(&self.grad_factor),
            rate: -self.lr,
            beta: self.beta,
            ahead: if self.nesterov { self.beta } else { 1.0 },
            gradient_counts: self.nesterov,
            decay: self.weight_decay,
        };
        match self.momentum {
            Some(momentum) => {
                Operands::of(self.weight, self.grad, [momentum], self.copy, self.frozen).update(factors, team);
            }
            None => Operands::of(self.weight, self.grad, [], self.copy, self.frozen).update(factors, team),
        }
    }
}

#[derive(Clone, Copy)]
struct SgdFactors {
    grad: f32,
    /// `-lr`
    rate: f32,
    beta: f32,
    /// The share of the momentum in the change, and whether the gradient is added to it.
    ahead: f32,
    gradient_counts: bool,
    decay: f32,
}

impl SgdFactors {
    #[inline(always)]
    fn decayed<S: Simd>(&self, s: S, weight: S::Vector, grad: S::Vector) -> S::Vector {
        s.mul_add(weight, s.splat(self.decay), s.mul(grad, s.splat(self.grad)))
    }
}

impl Rule<0> for SgdFactors {
    #[inline(always)]
    fn step<S: Simd>(
        &self,
        s: S,
        weight: S::Vector,
        grad: S::Vector,
        _: [S::Vector; 0],
    ) -> (S::Vector, [S::Vector; 0]) {
        let grad = self.decayed(s, weight, grad);
        (s.mul_add(grad, s.splat(self.rate), weight), [])
    }
}

impl Rule<1> for SgdFactors {
    #[inline(always)]
    fn step<S: Simd>(
        &self,
        s: S,
        weight: S::Vector,
        grad: S::Vector,
        [momentum]: [S::Vector; 1],
    ) -> (S::Vector, [S::Vector; 1]) {
        let grad = self.decayed(s, weight, grad);
        let momentum = s.mul_add(momentum, s.splat(self.beta), grad);
        let beside = if self.gradient_counts { grad } else { s.splat(0.0) };
        let change = s.mul_add(momentum, s.splat(self.ahead), beside);
        (s.mul_add(change, s.splat(self.rate), weight), [momentum])
    }
}

impl Run for Lion {
    fn run(&self, team: &mut Team) {
        let (lr, beta1, beta2) = (self.lr as f64, self.beta1 as f64, self.beta2 as f64);
        let factors = LionFactors {
            grad: factor(&self.grad_factor),
            keep: (1.0 - lr * self.weight_decay as f64) as f32,
            lr: self.lr,
            beta1: self.beta1,
            beta1_rest: (1.0 - beta1) as f32,
            beta2: self.beta2,
            beta2_rest: (1.0 - beta2) as f32,
        };
        Operands::of(self.weight, self.grad, [self.mean], self.copy, self.frozen).update(factors, team);
    }
}

#[derive(Clone, Copy)]
struct LionFactors {
    grad: f32,
    /// `1 - lr · decay`
    keep: f32,
    lr: f32,
    beta1: f32,
    beta1_rest: f32,
    beta2: f32,
    beta2_rest: f32,
}

impl Rule<1> for LionFactors {
    #[inline(always)]
    fn step<S: Simd>(
        &self,
        s: S,
        weight: S::Vector,
        grad: S::Vector,
        [mean]: [S::Vector; 1],
    ) -> (S::Vector, [S::Vector; 1]) {
        let grad = s.mul(grad, s.splat(self.grad));
        let direction = s.mul_add(mean, s.splat(self.beta1), s.mul(grad, s.splat(self.beta1_rest)));
        let zero = s.splat(0.0);
        let change = s.select_less(zero, s.abs(direction), s.copysign(s.splat(self.lr), direction), zero);
        let mean = s.mul_add(mean, s.splat(self.beta2), s.mul(grad, s.splat(self.beta2_rest)));
        (s.sub(s.mul(weight, s.splat(self.keep)), change), [mean])
    }
}

/// The clipping factor, or one.
pub(super) fn factor(view: &Option<View>) -> f32 {
    // SAFETY: one element, and the queue's order keeps its writer away.
    view.map_or(1.0, |factor| unsafe { matrix::<f32>(&factor).at(0, 0).read() })
}

/// The operands of an update, each as one row.
struct Operands<const STATES: usize> {
    weight: Matrix<f32>,
    grad: Matrix<f32>,
    state: [Matrix<f32>; STATES],
    copy: Option<View>,
    frozen: Option<Matrix<u32>>,
}

impl<const STATES: usize> Operands<STATES> {
    fn of(weight: View, grad: View, state: [View; STATES], copy: Option<View>, frozen: Option<View>) -> Self {
        let row = |view: View| matrix::<f32>(&flat(view));
        let frozen = frozen.map(|frozen| indices(&frozen));
        Operands { weight: row(weight), grad: row(grad), state: state.map(row), copy: copy.map(flat), frozen }
    }

    fn update(self, rule: impl Rule<STATES>, team: &mut Team) {
        let copy_dtype = self.copy.map_or(DType::Bf16, |copy| copy.dtype);
        with_element!(copy_dtype, E => self.update_with::<E>(rule, team));
    }

    fn update_with<E: Element>(self, rule: impl Rule<STATES>, team: &mut Team) {
        if self.weight.cols == 0 {
            return;
        }
        let Operands { weight, grad, state, .. } = self;
        let copy = self.copy.map(|copy| matrix::<E>(&copy));
        let frozen = self.frozen;
        team.blocks(weight.cols, CHUNK, |range, _| {
            let at = |matrix: Matrix<f32>| matrix.at(0, range.start);
            vectorise(Update {
                len: range.len(),
                weight: at(weight),
                grad: at(grad),
                state: state.map(at),
                copy: copy.map(|copy| copy.at(0, range.start)),
                // Tasks begin at whole words.
                frozen: frozen.map(|frozen| frozen.at(0, range.start / WORD)),
                rule,
            });
        });
    }
}

/// Elements of a mask word; a vector is a half or the whole of it.
const WORD: usize = u32::BITS as usize;
const _: () = assert!(CHUNK.is_multiple_of(WORD) && WORD.is_multiple_of(LANES));

/// A contiguous tensor as one row.
fn flat(view: View) -> View {
    view.reshaped(1, view.len())
}

struct Update<E, R, const STATES: usize> {
    len: usize,
    weight: *mut f32,
    grad: *mut f32,
    state: [*mut f32; STATES],
    copy: Option<*mut E>,
    frozen: Option<*mut u32>,
    rule: R,
}

impl<E: Element, R: Rule<STATES>, const STATES: usize> Vectorised for Update<E, R, STATES> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        each_vector!(0..self.len, |i, count| {
            // SAFETY: `count` elements from `i` on lie inside every operand, and their bits inside the word.
            unsafe {
                let frozen = self.frozen.map_or(0, |words| (words.add(i / WORD).read() >> (i % WORD)) as u16);
                if frozen != u16::MAX {
                    let weight = load(s, self.weight.add(i), count);
                    let grad = load(s, self.grad.add(i), count);
                    let mut state = [s.splat(0.0); STATES];
                    for (state, from) in state.iter_mut().zip(self.state) {
                        *state = load(s, from.add(i), count);
                    }
                    let (new_weight, new_state) = self.rule.step(s, weight, grad, state);
                    let new_weight = s.select_bits(frozen, weight, new_weight);
                    store(s, self.weight.add(i), new_weight, count);
                    for (slot, to) in self.state.into_iter().enumerate() {
                        store(s, to.add(i), s.select_bits(frozen, state[slot], new_state[slot]), count);
                    }
                    if let Some(copy) = self.copy {
                        store(s, copy.add(i), new_weight, count);
                    }
                }
            }
        });
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
        WorkingMemory::of_team(Partials::floats((self.x.rows * self.x.cols).div_ceil(CHUNK)))
    }
}

impl Run for SquaredNorms {
    fn run(&self, team: &mut Team) {
        self.0.iter().for_each(|norm| norm.run(team));
    }

    fn working_memory(&self) -> WorkingMemory {
        self.0.iter().map(Run::working_memory).fold(WorkingMemory::default(), WorkingMemory::max)
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
    let partials = Partials::in_floats(&mut common, chunks);
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

/// The chunks' sums: f64 in memory aligned for vectors.
#[derive(Clone, Copy)]
pub(super) struct Partials(*mut f64);

// SAFETY: tasks write disjoint elements.
unsafe impl Sync for Partials {}

impl Partials {
    pub fn in_floats(scratch: &mut Scratch, chunks: usize) -> Partials {
        Partials(scratch.floats(Partials::floats(chunks)).as_mut_ptr().cast::<f64>())
    }

    /// An f64 for each chunk.
    pub fn floats(chunks: usize) -> usize {
        2 * chunks
    }

    pub fn at(&self, chunk: usize) -> *mut f64 {
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
