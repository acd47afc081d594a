//! The selection of rows.

use super::modules::ELEMENTWISE;
use super::rows::{Matrix, Walk};
use super::stream::arguments;
use super::{Run, Stream};
use crate::kernel::{GatherRows, ScatterRows};

impl Run for GatherRows {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.out, self.x]) else { return };
        let name = walk.typed("gather_rows", self.x.dtype);
        let x = Matrix::of(&self.x);
        let out = Matrix::of(&self.out);
        let x_rows = self.x.rows as i64;
        let defects = stream.defects();
        let arguments = arguments![walk.rows, walk.cols, x, x_rows, self.rows.address, out, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &name, walk.shape(), arguments) };
    }
}

impl Run for ScatterRows {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.x, self.out]) else { return };
        let name = walk.typed("scatter_rows", self.x.dtype);
        let x = Matrix::of(&self.x);
        let out = Matrix::of(&self.out);
        let out_rows = self.out.rows as i64;
        let accumulate = self.accumulate as i32;
        let defects = stream.defects();
        let arguments = arguments![walk.rows, walk.cols, x, self.rows.address, out, out_rows, accumulate, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &name, walk.shape(), arguments) };
    }
}
