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
        let (x, out, x_rows) = (Matrix::of(&self.x), Matrix::of(&self.out), self.x.rows as i64);
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
        let (x, out, out_rows) = (Matrix::of(&self.x), Matrix::of(&self.out), self.out.rows as i64);
        let (accumulate, defects) = (self.accumulate as i32, stream.defects());
        let arguments = arguments![walk.rows, walk.cols, x, self.rows.address, out, out_rows, accumulate, defects];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ELEMENTWISE, &name, walk.shape(), arguments) };
    }
}
