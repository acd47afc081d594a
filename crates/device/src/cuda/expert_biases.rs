//! The biases of experts. Offsets stay on the GPU.

use super::modules::EXPERT_BIASES;
use super::rows::{Matrix, Mixed, Walk};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::kernel::{AddBiases, BiasDots, BiasSums};

const THREADS: u32 = 256;
const WARPS: u64 = 8;
/// Columns of a block that adds up rows, as kernels/expert_biases.cu has them.
const SUMMED_COLUMNS: usize = 32;

impl Run for AddBiases {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.x, self.biases]) else { return };
        let (x, biases, experts) = (Mixed::of(&self.x), Matrix::of(&self.biases), self.biases.rows as i32);
        let arguments = arguments![walk.rows, walk.cols, x, biases, self.offsets.address, experts, stream.defects()];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EXPERT_BIASES, &walk.name("add_biases"), walk.shape(), arguments) };
    }
}

impl Run for BiasSums {
    fn run(&self, stream: &mut Stream) {
        let [rows, cols] = self.x.shape();
        if self.out.is_empty() {
            return;
        }
        let (x, out, experts) = (Mixed::of(&self.x), Matrix::of(&self.out), self.out.rows as i32);
        let arguments = arguments![rows as i64, cols as i64, x, self.offsets.address, experts, out, stream.defects()];
        let blocks = [cols.div_ceil(SUMMED_COLUMNS) as u32, self.out.rows as u32, 1];
        let shape = Shape { blocks, threads: [THREADS, 1, 1], shared_bytes: 0 };
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EXPERT_BIASES, "bias_sums", shape, arguments) };
    }
}

impl Run for BiasDots {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.x, self.biases]) else { return };
        let (x, biases, experts) = (Mixed::of(&self.x), Matrix::of(&self.biases), self.biases.rows as i32);
        let (tokens, k) = (self.out.rows as i64, self.out.cols as i32);
        let (offsets, pairs) = (self.offsets.address, self.pairs.address);
        let (out, defects) = (Matrix::of(&self.out), stream.defects());
        let arguments = arguments![walk.rows, walk.cols, x, biases, offsets, experts, pairs, tokens, k, out, defects];
        let shape = Shape::linear((walk.rows as u64).div_ceil(WARPS), THREADS);
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EXPERT_BIASES, &walk.name("bias_dots"), shape, arguments) };
    }
}
