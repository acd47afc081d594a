//! Adafactor: sums of squares along rows and columns, and updates divided by them.

use super::elementwise::{MOST_BLOCKS, add_partials};
use super::modules::OPTIMIZER;
use super::optimizer::{add_partial_sums, address, partial_sums, summing};
use super::rows::{Matrix, Mixed, Walk};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::kernel::{Adafactor, AdafactorNorm, Factored, SquareSums};

impl Run for SquareSums {
    fn run(&self, stream: &mut Stream) {
        /// Rows that a block of threads has a warp for, or sums side by side.
        const ROWS: usize = 8;
        const LEAST_ROWS: usize = 64;
        if self.x.is_empty() {
            return;
        }
        let [rows, cols] = self.x.shape();
        let x = Matrix::of(&self.x);
        let factor = address(&self.factor);
        if let Some(sums) = self.rows {
            let shape = Shape::linear(rows.div_ceil(ROWS) as u64, 32 * ROWS as u32);
            let arguments = arguments![rows as i64, cols as i64, x, factor, self.row_scale, sums.address];
            // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
            unsafe { stream.launch(&OPTIMIZER, "row_squares", shape, arguments) };
        }
        let rows_per_block = rows.div_ceil(MOST_BLOCKS).max(LEAST_ROWS);
        let blocks = rows.div_ceil(rows_per_block);
        let partials = stream.scratch((blocks * cols * size_of::<f32>()) as u64);
        let shape = Shape {
            blocks: [cols.div_ceil(32) as u32, blocks as u32, 1],
            threads: [32, ROWS as u32, 1],
            shared_bytes: 0,
        };
        let arguments = arguments![rows as i64, cols as i64, x, factor, rows_per_block as i64, partials];
        // SAFETY: the arguments are the kernel's, the queue's order keeps others away from the operands, and the partials were
        // issued before they are added up.
        unsafe {
            stream.launch(&OPTIMIZER, "column_squares", shape, arguments);
            add_partials(partials, blocks, cols, cols, [Some(self.cols), None], self.col_scale, stream);
        }
    }
}

/// The kernels' `Divided`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Divided {
    grad: Matrix,
    grad_factor: u64,
    rows: u64,
    cols: u64,
    row_sum: u64,
    row_count: f32,
    epsilon: f32,
}

impl Divided {
    fn of(factored: &Factored) -> Divided {
        Divided {
            grad: Matrix::of(&factored.grad),
            grad_factor: address(&factored.grad_factor),
            rows: address(&factored.rows),
            cols: factored.cols.address,
            row_sum: factored.row_sum.address,
            row_count: factored.row_count as f32,
            epsilon: factored.epsilon,
        }
    }
}

impl Run for AdafactorNorm {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.factored.grad]) else { return };
        let shape = summing(&walk);
        let partials = partial_sums(stream);
        let arguments = arguments![walk.rows, walk.cols, Divided::of(&self.factored), partials];
        // SAFETY: the arguments are the kernel's, the queue's order keeps others away from the operands, and the partials were
        // issued before they are added up.
        unsafe {
            stream.launch(&OPTIMIZER, &walk.name("adafactor_norm"), shape, arguments);
            add_partial_sums(shape.blocks[0], partials, self.out, stream);
        }
    }
}

impl Run for Adafactor {
    fn run(&self, stream: &mut Stream) {
        let views = [Some(self.factored.grad), Some(self.weight), self.copy];
        let Some(walk) = Walk::rows(&views.into_iter().flatten().collect::<Vec<_>>()) else { return };
        let (divided, weight, copy) =
            (Divided::of(&self.factored), Matrix::of(&self.weight), Mixed::optional(&self.copy));
        let (squared_weight, squared_update) = (self.squared_weight.address, self.squared_update.address);
        let keep = (1.0 - self.lr as f64 * self.weight_decay as f64) as f32;
        let arguments = arguments![
            walk.rows,
            walk.cols,
            divided,
            weight,
            copy,
            squared_weight,
            squared_update,
            self.count as f32,
            self.rate,
            keep,
            self.least_scale,
            self.most_rms
        ];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, &walk.name("adafactor"), walk.shape(), arguments) };
    }
}
