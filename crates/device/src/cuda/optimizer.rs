//! AdamW and the norm that clips its gradients.

use super::modules::OPTIMIZER;
use super::rows::{Matrix, Mixed, Walk};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::kernel::{AdamW, ClipFactor, SquaredNorm};

/// What one update multiplies by, worked out once in f64; the kernel's `Factors`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Factors {
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
        Factors {
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

impl Run for AdamW {
    fn run(&self, stream: &mut Stream) {
        let operands = [Some(self.weight), Some(self.grad), Some(self.mean), Some(self.variance), self.copy];
        let Some(walk) = Walk::flat(&operands.into_iter().flatten().collect::<Vec<_>>()) else { return };
        let [weight, grad, mean, variance] =
            [self.weight, self.grad, self.mean, self.variance].map(|view| view.address);
        let factor = self.grad_factor.map_or(0, |factor| factor.address);
        let copy = Mixed::optional(&self.copy);
        let frozen = self.frozen.map_or(0, |frozen| frozen.address);
        let arguments = arguments![walk.cols, weight, grad, mean, variance, copy, factor, frozen, Factors::of(self)];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, &walk.name("adamw"), walk.shape(), arguments) };
    }
}

impl Run for SquaredNorm {
    fn run(&self, stream: &mut Stream) {
        // Enough to fill any card, and few enough for one block to add up.
        const MOST_BLOCKS: u32 = 1024;
        const THREADS: u32 = 256;
        let accumulate = self.accumulate as i32;
        let partials = stream.scratch(MOST_BLOCKS as u64 * size_of::<f64>() as u64);
        let mut blocks = 0i64;
        if let Some(walk) = Walk::flat(&[self.x]) {
            let mut shape = walk.shape();
            shape.blocks[0] = shape.blocks[0].min(MOST_BLOCKS);
            blocks = shape.blocks[0] as i64;
            let name = walk.typed("squared_norm", self.x.dtype);
            let arguments = arguments![walk.rows, walk.cols, Matrix::of(&self.x), partials];
            // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
            unsafe { stream.launch(&OPTIMIZER, &name, shape, arguments) };
        }
        let arguments = arguments![blocks, partials, self.out.address, accumulate];
        // SAFETY: as above.
        unsafe { stream.launch(&OPTIMIZER, "squared_norm_total", Shape::linear(1, THREADS), arguments) };
    }
}

impl Run for ClipFactor {
    fn run(&self, stream: &mut Stream) {
        let arguments = arguments![self.squared_norm.address, self.limit, self.out.address];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, "clip_factor", Shape::linear(1, 1), arguments) };
    }
}
