//! Elementwise updates, and the norm that clips gradients.

use std::collections::BTreeSet;

use super::modules::OPTIMIZER;
use super::rows::{Matrix, Mixed, Walk};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::View;
use crate::kernel::{AdamW, ClipFactor, Lion, MOST_NORMS, Sgd, SquaredNorm, SquaredNorms};

/// The factors of one AdamW update, computed once in f64; the kernel's `AdamWFactors`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AdamWFactors {
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

/// The address of an optional view; 0 if absent.
pub(super) fn address(view: &Option<View>) -> u64 {
    view.map_or(0, |view| view.address)
}

impl Run for AdamW {
    fn run(&self, stream: &mut Stream) {
        let operands = [Some(self.weight), Some(self.grad), Some(self.mean), Some(self.variance), self.copy];
        let Some(walk) = Walk::flat(&operands.into_iter().flatten().collect::<Vec<_>>()) else { return };
        let [weight, grad, mean, variance] =
            [self.weight, self.grad, self.mean, self.variance].map(|view| view.address);
        let (factor, frozen) = (address(&self.grad_factor), address(&self.frozen));
        let copy = Mixed::optional(&self.copy);
        let factors = AdamWFactors::of(self);
        let arguments = arguments![walk.cols, weight, grad, mean, variance, copy, factor, frozen, factors];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, &walk.name("adamw"), walk.shape(), arguments) };
    }
}

/// The kernel's `SgdFactors`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SgdFactors {
    lr: f32,
    beta: f32,
    decay: f32,
    nesterov: i32,
}

impl Run for Sgd {
    fn run(&self, stream: &mut Stream) {
        let operands = [Some(self.weight), Some(self.grad), self.momentum, self.copy];
        let Some(walk) = Walk::flat(&operands.into_iter().flatten().collect::<Vec<_>>()) else { return };
        let weight = self.weight.address;
        let grad = self.grad.address;
        let momentum = address(&self.momentum);
        let (factor, frozen) = (address(&self.grad_factor), address(&self.frozen));
        let copy = Mixed::optional(&self.copy);
        let factors =
            SgdFactors { lr: self.lr, beta: self.beta, decay: self.weight_decay, nesterov: self.nesterov as i32 };
        let arguments = arguments![walk.cols, weight, grad, momentum, copy, factor, frozen, factors];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, &walk.name("sgd"), walk.shape(), arguments) };
    }
}

/// The kernel's `LionFactors`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LionFactors {
    /// `1 - lr · decay`
    keep: f32,
    lr: f32,
    beta1: f32,
    beta1_rest: f32,
    beta2: f32,
    beta2_rest: f32,
}

impl Run for Lion {
    fn run(&self, stream: &mut Stream) {
        let operands = [Some(self.weight), Some(self.grad), Some(self.mean), self.copy];
        let Some(walk) = Walk::flat(&operands.into_iter().flatten().collect::<Vec<_>>()) else { return };
        let [weight, grad, mean] = [self.weight, self.grad, self.mean].map(|view| view.address);
        let (factor, frozen) = (address(&self.grad_factor), address(&self.frozen));
        let copy = Mixed::optional(&self.copy);
        let factors = LionFactors {
            keep: (1.0 - self.lr as f64 * self.weight_decay as f64) as f32,
            lr: self.lr,
            beta1: self.beta1,
            beta1_rest: (1.0 - self.beta1 as f64) as f32,
            beta2: self.beta2,
            beta2_rest: (1.0 - self.beta2 as f64) as f32,
        };
        let arguments = arguments![walk.cols, weight, grad, mean, copy, factor, frozen, factors];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, &walk.name("lion"), walk.shape(), arguments) };
    }
}

/// Enough to fill any GPU, and few enough for one block to add up.
const MOST_BLOCKS: u32 = 1024;

/// Room for the partial sum of every block, f64.
pub(super) fn partial_sums(stream: &mut Stream) -> u64 {
    stream.scratch(MOST_BLOCKS as u64 * size_of::<f64>() as u64)
}

/// A walk's blocks, at most as many as there is room for partial sums.
pub(super) fn summing(walk: &Walk) -> Shape {
    let mut shape = walk.shape();
    shape.blocks[0] = shape.blocks[0].min(MOST_BLOCKS);
    shape
}

/// Threads that add up partial sums.
const TOTAL_THREADS: u32 = 256;

/// `out += Σ partials`.
///
/// # Safety
/// The partials are written when the stream reaches this.
pub(super) unsafe fn add_partial_sums(blocks: u32, partials: u64, out: View, stream: &mut Stream) {
    let arguments = arguments![blocks as i64, partials, out.address];
    // SAFETY: the arguments are the kernel's, and the caller's promise.
    unsafe { stream.launch(&OPTIMIZER, "partial_sums_total", Shape::linear(1, TOTAL_THREADS), arguments) };
}

/// The argument of the kernels for several squared norms, as in kernels/optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct NormList {
    rows: [i64; MOST_NORMS],
    cols: [i64; MOST_NORMS],
    blocks: [i64; MOST_NORMS],
    x: [Matrix; MOST_NORMS],
    out: [u64; MOST_NORMS],
    accumulate: [i64; MOST_NORMS],
    partials: u64,
}

impl Run for SquaredNorm {
    fn run(&self, stream: &mut Stream) {
        squared_norms(&[*self], stream);
    }
}

impl Run for SquaredNorms {
    fn run(&self, stream: &mut Stream) {
        squared_norms(&self.0, stream);
    }
}

fn squared_norms(norms: &[SquaredNorm], stream: &mut Stream) {
    let partials = stream.scratch((MOST_NORMS * MOST_BLOCKS as usize * size_of::<f64>()) as u64);
    let walks: Vec<Option<Walk>> = norms.iter().map(|norm| Walk::flat(&[norm.x])).collect();
    let widths: BTreeSet<usize> = walks.iter().flatten().map(|walk| walk.vector).collect();
    if widths.len() > 1 {
        // In a common width some would be summed in another order.
        return norms.iter().for_each(|norm| squared_norms(&[*norm], stream));
    }
    let walk = |place: usize| walks.get(place).copied().flatten();
    let blocks = |place: usize| walk(place).map_or(0, |walk| summing(&walk).blocks[0]);
    let norm = |place: usize| norms.get(place).unwrap_or(&norms[0]);
    let list = NormList {
        rows: std::array::from_fn(|place| walk(place).map_or(0, |walk| walk.rows)),
        cols: std::array::from_fn(|place| walk(place).map_or(0, |walk| walk.cols)),
        blocks: std::array::from_fn(|place| blocks(place).into()),
        x: std::array::from_fn(|place| Matrix::of(&norm(place).x)),
        out: std::array::from_fn(|place| norm(place).out.address),
        accumulate: std::array::from_fn(|place| norm(place).accumulate.into()),
        partials,
    };
    let count = norms.len();
    // SAFETY: the arguments are the kernels', and the queue's order keeps others away from the operands and the partial sums.
    unsafe {
        if let Some(any) = (0..count).find_map(walk) {
            let most = (0..count).map(blocks).max().unwrap_or(0);
            let shape = Shape { blocks: [most, 1, 1], ..any.shape() }.of_rows(count);
            stream.launch_with(&OPTIMIZER, &any.typed("squared_norms", norms[0].x.dtype), shape, &list);
        }
        stream.launch_with(&OPTIMIZER, "squared_norm_totals", Shape::linear(count as u64, TOTAL_THREADS), &list);
    }
}

impl Run for ClipFactor {
    fn run(&self, stream: &mut Stream) {
        let arguments = arguments![self.squared_norm.address, self.limit, self.out.address];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, "clip_factor", Shape::linear(1, 1), arguments) };
    }
}
