//! RMS and layer norms, and their gradients.

use super::elementwise::add_partials;
use super::modules::NORM;
use super::rows::{Matrix, dtype_name, vector};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::View;
use crate::kernel::{Norm, NormBackward, NormKind};

const WARP: usize = 32;
const MOST_THREADS: usize = 1024;
/// Rows side by side in a block, if a warp is enough for one.
const ROWS_AT_ONCE: usize = 8;
/// Threads that share the rows in backward: as many as a GPU runs at once. Each block keeps partial sums of every column.
const BACKWARD_THREADS: usize = 1 << 17;

/// The width of vectors, threads for a row, and rows at once.
fn division(views: &[View]) -> (usize, [u32; 3]) {
    let vector = vector(views[0].dtype, views);
    let threads = views[0].cols.div_ceil(vector).next_multiple_of(WARP).clamp(WARP, MOST_THREADS);
    let rows = if threads == WARP { ROWS_AT_ONCE } else { 1 };
    (vector, [threads as u32, rows as u32, 1])
}

/// The address of the weight, and what is added to it. Kernels take a missing weight for zeros.
fn factor(weight: &Option<View>, offset: f32) -> (u64, f32) {
    weight.map_or((0, 1.0), |weight| (weight.address, offset))
}

impl Run for Norm {
    fn run(&self, stream: &mut Stream) {
        if self.x.rows == 0 {
            return;
        }
        let operands = [Some(self.x), self.add, self.sum, Some(self.out), self.weight, self.bias];
        let (vector, threads) = division(&operands.into_iter().flatten().collect::<Vec<_>>());
        let blocks = (self.x.rows as u64).div_ceil(threads[1] as u64);
        let shape = Shape { threads, ..Shape::linear(blocks, 1) };
        let length = if self.x.cols.div_ceil(vector) <= threads[0] as usize { "short" } else { "long" };
        let kind = if self.kind == NormKind::Layer { "layer" } else { "rms" };
        let name = format!("norm_{length}_{kind}_{}_{vector}", dtype_name(self.x.dtype));
        let (rows, cols) = (self.x.rows as i64, self.x.cols as i64);
        let [x, out, stats] = [self.x, self.out, self.stats].map(|view| Matrix::of(&view));
        let [add, sum] = [self.add, self.sum].map(|view| Matrix::optional(&view));
        let bias = self.bias.map_or(0, |bias| bias.address);
        let (weight, offset) = factor(&self.weight, self.weight_offset);
        let epsilon = self.epsilon;
        let arguments = arguments![rows, cols, x, add, sum, weight, offset, bias, epsilon, out, stats];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&NORM, &name, shape, arguments) };
    }
}

impl Run for NormBackward {
    fn run(&self, stream: &mut Stream) {
        if self.x.is_empty() {
            return;
        }
        let operands = [Some(self.x), Some(self.dout), Some(self.dx), self.residual, self.weight];
        let (vector, threads) = division(&operands.into_iter().flatten().collect::<Vec<_>>());
        if self.x.cols.div_ceil(vector) <= threads[0] as usize {
            in_one_pass(self, vector, threads, stream);
        } else {
            columns_then_rows(self, stream);
        }
    }
}

/// Rows of a block, and blocks. The first is a multiple of the rows that are walked side by side.
fn cut(rows: usize, threads: usize, at_once: usize) -> (usize, usize) {
    let rows_per_block = rows.div_ceil(BACKWARD_THREADS / threads).next_multiple_of(at_once);
    (rows_per_block, rows.div_ceil(rows_per_block))
}

fn in_one_pass(kernel: &NormBackward, vector: usize, threads: [u32; 3], stream: &mut Stream) {
    let (rows_per_block, blocks) = cut(kernel.x.rows, (threads[0] * threads[1]) as usize, threads[1] as usize);
    let partials = stream.scratch((blocks * 2 * kernel.x.cols * size_of::<f32>()) as u64);
    let shape = Shape { threads, ..Shape::linear(blocks as u64, 1) };
    let kind = if kernel.kind == NormKind::Layer { "layer" } else { "rms" };
    let name = format!("norm_backward_{kind}_{}_{vector}", dtype_name(kernel.x.dtype));
    let rows = kernel.x.rows as i64;
    let cols = kernel.x.cols as i32;
    let rows_per_block = rows_per_block as i64;
    let [x, stats, dout, dx] = [kernel.x, kernel.stats, kernel.dout, kernel.dx].map(|view| Matrix::of(&view));
    let (weight, offset) = factor(&kernel.weight, kernel.weight_offset);
    let residual = Matrix::optional(&kernel.residual);
    let arguments = arguments![rows, cols, x, weight, offset, stats, dout, residual, dx, rows_per_block, partials];
    // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
    unsafe { stream.launch(&NORM, &name, shape, arguments) };
    add_to_vectors(kernel, partials, blocks, stream);
}

fn columns_then_rows(kernel: &NormBackward, stream: &mut Stream) {
    const THREADS: u32 = 128;
    let (rows_per_block, blocks) = cut(kernel.x.rows, MOST_THREADS / 2, 1);
    let partials = stream.scratch((blocks * 2 * kernel.x.cols * size_of::<f32>()) as u64);
    let dtype = dtype_name(kernel.x.dtype);
    let across = kernel.x.cols.div_ceil(THREADS as usize) as u32;
    let of_columns = Shape { blocks: [across, blocks as u32, 1], threads: [THREADS, 1, 1], shared_bytes: 0 };
    let of_rows = Shape::linear(kernel.x.rows as u64, MOST_THREADS as u32);
    let layer = (kernel.kind == NormKind::Layer) as i32;
    let rows = kernel.x.rows as i64;
    let cols = kernel.x.cols as i64;
    let rows_per_block = rows_per_block as i64;
    let [x, stats, dout, dx] = [kernel.x, kernel.stats, kernel.dout, kernel.dx].map(|view| Matrix::of(&view));
    let (weight, offset) = factor(&kernel.weight, kernel.weight_offset);
    let residual = Matrix::optional(&kernel.residual);
    let columns = arguments![rows, cols, x, stats, dout, rows_per_block, partials];
    let rows = arguments![layer, cols, x, weight, offset, stats, dout, residual, dx];
    // SAFETY: the arguments are the kernels', and the queue's order keeps others away from the operands. The columns come
    // first, since the rows may overwrite `dout`.
    unsafe {
        stream.launch(&NORM, &format!("norm_backward_columns_{dtype}"), of_columns, columns);
        stream.launch(&NORM, &format!("norm_backward_rows_{dtype}"), of_rows, rows);
    }
    add_to_vectors(kernel, partials, blocks, stream);
}

/// Rows 2b and 2b + 1 of the partial sums are those of block b.
fn add_to_vectors(kernel: &NormBackward, partials: u64, blocks: usize, stream: &mut Stream) {
    let cols = kernel.x.cols;
    // SAFETY: the partial sums were issued before.
    unsafe { add_partials(partials, blocks, 2 * cols, cols, [kernel.dweight, kernel.dbias], 1.0, stream) };
}
