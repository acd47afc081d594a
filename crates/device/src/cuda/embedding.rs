//! Rows of a table by index, and the gradient of that.

use super::elementwise::column_sum;
use super::modules::EMBEDDING;
use super::rows::{Matrix, Mixed, Walk, dtype_name, vector};
use super::stream::{Shape, arguments};
use super::{Run, Stream};
use crate::kernel::{Embed, EmbedBackward, IGNORE};

impl Run for Embed {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.out, self.table]) else { return };
        let table = Mixed::of(&self.table);
        let out = Mixed::of(&self.out);
        let table_rows = self.table.rows as i64;
        let indices = self.indices.address;
        let accumulate = self.accumulate as i32;
        let arguments =
            arguments![walk.rows, walk.cols, table, table_rows, indices, self.first, self.scale, out, accumulate];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&EMBEDDING, &walk.name("embed"), walk.shape(), arguments) };
    }
}

/// A table of at most this many rows has so many tokens for each that they are summed like columns.
const FEW_ROWS: usize = 16;

impl Run for EmbedBackward {
    fn run(&self, stream: &mut Stream) {
        if self.dout.is_empty() || self.dtable.is_empty() {
            return;
        }
        if self.dtable.rows <= FEW_ROWS {
            for row in 0..self.dtable.rows {
                // No index reaches a row that would have the number of `IGNORE`, or none.
                let Some(index) = self.first.checked_add(row as u32).filter(|&index| index != IGNORE) else { break };
                let out = self.dtable.row_range(row..row + 1);
                column_sum(self.dout, Some((self.indices, index)), out, self.scale, stream);
            }
        } else {
            row_by_row(self, stream);
        }
    }
}

fn row_by_row(kernel: &EmbedBackward, stream: &mut Stream) {
    const THREADS: usize = 256;
    let EmbedBackward { dtable, indices, first, scale, dout } = *kernel;
    let tokens = dout.rows as i64;
    let cols = dout.cols as i64;
    let table_rows = dtable.rows as i64;
    let range_bytes = (dtable.rows * size_of::<u32>()) as u64;
    let firsts = stream.scratch(2 * range_bytes);
    let lasts = firsts + range_bytes;
    let vector = vector(dout.dtype, &[dtable, dout]);
    let threads = dout.cols.div_ceil(vector).next_multiple_of(32).min(THREADS) as u32;
    let name = format!("embed_backward_{}_{vector}", dtype_name(dout.dtype));
    let of_tokens = Shape::linear(dout.rows.div_ceil(THREADS) as u64, THREADS as u32);
    let ranges = arguments![tokens, indices.address, first, table_rows, firsts, lasts];
    let (dout_matrix, dtable) = (Matrix::of(&dout), Matrix::of(&dtable));
    let arguments = arguments![cols, indices.address, first, table_rows, firsts, lasts, dout_matrix, dtable, scale];
    // SAFETY: the arguments are the kernels', and the queue's order keeps others away from the operands.
    unsafe {
        stream.set_bytes(firsts, 0xff, range_bytes);
        stream.set_bytes(lasts, 0, range_bytes);
        stream.launch(&EMBEDDING, "token_ranges", of_tokens, ranges);
        stream.launch(&EMBEDDING, &name, Shape::linear(dout.rows as u64, threads), arguments);
    }
}
