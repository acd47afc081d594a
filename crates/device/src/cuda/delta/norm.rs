//! RMS norms gated by a SiLU.

use super::super::elementwise::add_partials;
use super::super::rows::{Matrix, dtype_name, vector};
use super::super::stream::{Shape, arguments};
use super::sources::GATED_NORM;
use super::{Run, Stream};
use crate::View;
use crate::kernel::{GatedNorm, GatedNormBackward};

const WARP: usize = 32;
const THREADS: usize = 256;
/// Threads that share the rows, about as many as a GPU runs at once. In backward each block keeps partial sums of every column.
const SHARING_THREADS: usize = 1 << 18;

/// How rows are given to threads.
struct Division {
    vector: usize,
    /// Threads of a row, a power of two, and rows side by side.
    threads: [usize; 2],
    /// Whether a row is a warp's at most: then it is read once.
    is_short: bool,
}

impl Division {
    fn new(views: &[View]) -> Division {
        let (cols, wanted) = (views[0].cols, vector(views[0].dtype, views));
        // Rows of a warp have whole vectors.
        let vector = if cols > WARP * wanted || cols.is_multiple_of(wanted) { wanted } else { 1 };
        let threads = cols.div_ceil(vector).next_power_of_two();
        let is_short = threads <= WARP;
        let threads = if is_short { [threads, THREADS / threads] } else { [THREADS, 1] };
        Division { vector, threads, is_short }
    }

    /// Rows of a block that walks them.
    fn rows_per_block(&self, rows: usize) -> usize {
        rows.div_ceil(SHARING_THREADS / THREADS).next_multiple_of(self.threads[1])
    }

    fn name(&self, kernel: &str, x: &View) -> String {
        let length = if self.is_short { "short" } else { "long" };
        format!("{kernel}_{length}_{}_{}", dtype_name(x.dtype), self.vector)
    }

    fn shape(&self, blocks: usize, shared_bytes: usize) -> Shape {
        let [across, down] = self.threads.map(|threads| threads as u32);
        let threads = [across, down, 1];
        Shape { threads, shared_bytes: shared_bytes as u32, ..Shape::linear(blocks as u64, 1) }
    }
}

impl Run for GatedNorm {
    fn run(&self, stream: &mut Stream) {
        let division = Division::new(&[self.x, self.gate, self.out, self.weight]);
        let (rows, cols) = (self.x.rows as i64, self.x.cols as i64);
        let [x, gate, out] = [self.x, self.gate, self.out].map(|view| Matrix::of(&view));
        let rows_per_block = if division.is_short { division.rows_per_block(self.x.rows) } else { 1 };
        let shape = division.shape(self.x.rows.div_ceil(rows_per_block), 0);
        let (weight, epsilon) = (self.weight.address, self.epsilon);
        let arguments = arguments![rows, cols, x, gate, weight, epsilon, out, rows_per_block as i64];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&GATED_NORM, &division.name("gated_norm", &self.x), shape, arguments) };
    }
}

impl Run for GatedNormBackward {
    fn run(&self, stream: &mut Stream) {
        let operands = [self.x, self.gate, self.dout, self.dx, self.dgate, self.weight];
        let division = Division::new(&operands);
        let [across, down] = division.threads;
        let rows_per_block = division.rows_per_block(self.x.rows);
        let blocks = self.x.rows.div_ceil(rows_per_block);
        let wants_weight = self.dweight.is_some();
        let partials = if wants_weight { stream.scratch((blocks * self.x.cols * size_of::<f32>()) as u64) } else { 0 };
        // Sums of the rows that are walked side by side.
        let shared_bytes = if division.is_short { across * down * division.vector * size_of::<f32>() } else { 0 };
        let (rows, cols) = (self.x.rows as i64, self.x.cols as i64);
        let [x, gate, dout, dx, dgate] =
            [self.x, self.gate, self.dout, self.dx, self.dgate].map(|view| Matrix::of(&view));
        let (weight, epsilon) = (self.weight.address, self.epsilon);
        let arguments =
            arguments![rows, cols, x, gate, weight, epsilon, dout, dx, dgate, rows_per_block as i64, partials];
        let name = division.name("gated_norm_backward", &self.x);
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe {
            stream.launch(&GATED_NORM, &name, division.shape(blocks, shared_bytes), arguments);
            add_partials(partials, blocks, self.x.cols, self.x.cols, [self.dweight, None], 1.0, stream);
        }
    }
}
