//! Columns scaled by DoRA's magnitudes, and the gradient of these.

use super::elementwise::{LANES, LEAST_ROWS, MOST_BLOCKS, ROW_GROUPS, add_partials};
use super::modules::ELEMENTWISE;
use super::rows::{Matrix, dtype_name, vector};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::View;
use crate::kernel::{ColumnDot, ScaleColumns};

/// A grid has no more blocks one below another.
const MOST_BLOCKS_DOWN: usize = 1 << 15;

/// Blocks of so many rows, and of the columns that a block's threads take at once.
fn in_blocks(x: View, vector: usize, rows_per_block: usize) -> Shape {
    Shape {
        blocks: [x.cols.div_ceil(LANES * vector) as u32, x.rows.div_ceil(rows_per_block) as u32, 1],
        threads: [LANES as u32, ROW_GROUPS as u32, 1],
        shared_bytes: 0,
    }
}

impl Run for ScaleColumns {
    fn run(&self, stream: &mut Stream) {
        let vector = vector(self.x.dtype, &[self.x, self.out]);
        let rows_per_block = self.x.rows.div_ceil(MOST_BLOCKS_DOWN).max(LEAST_ROWS);
        let shape = in_blocks(self.x, vector, rows_per_block);
        let name = format!("scale_columns_{}_{vector}", dtype_name(self.x.dtype));
        let (rows, cols, rows_per_block) = (self.x.rows as i64, self.x.cols as i64, rows_per_block as i64);
        let [x, out] = [self.x, self.out].map(|view| Matrix::of(&view));
        let (scale, squares) = (self.scale.address, self.squares.address);
        let bias = self.bias.map_or(0, |bias| bias.address);
        let accumulate = self.accumulate as i32;
        let arguments = arguments![rows, cols, x, scale, squares, bias, out, rows_per_block, accumulate];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &name, shape, arguments) };
    }
}

impl Run for ColumnDot {
    fn run(&self, stream: &mut Stream) {
        if self.a.is_empty() {
            return;
        }
        let vector = vector(self.a.dtype, &[self.a, self.b]);
        let rows_per_block = self.a.rows.div_ceil(MOST_BLOCKS).max(LEAST_ROWS);
        let blocks = self.a.rows.div_ceil(rows_per_block);
        let shape = in_blocks(self.a, vector, rows_per_block);
        let partials = stream.scratch((blocks * self.a.cols * size_of::<f32>()) as u64);
        let name = format!("column_dot_{}_{vector}", dtype_name(self.a.dtype));
        let (rows, cols, rows_per_block) = (self.a.rows as i64, self.a.cols as i64, rows_per_block as i64);
        let [a, b] = [self.a, self.b].map(|view| Matrix::of(&view));
        let arguments = arguments![rows, cols, a, b, self.squares.address, rows_per_block, partials];
        // SAFETY: the arguments are the kernels', and the queue's order keeps others away from the operands.
        unsafe {
            stream.launch(&ELEMENTWISE, &name, shape, arguments);
            add_partials(partials, blocks, self.a.cols, self.a.cols, [Some(self.out), None], 1.0, stream);
        }
    }
}
