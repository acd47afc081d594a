//! Matrices of 4-bit codes, expanded.

use super::modules::NF4;
use super::rows::{Matrix, Walk};
use super::stream::arguments;
use super::{Run, Stream};
use crate::kernel::ExpandNf4;

impl Run for ExpandNf4 {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows_of(self.out.dtype, &[self.out]) else { return };
        let name = walk.typed("expand_nf4", self.out.dtype);
        let codes = Matrix::of(&self.codes);
        let absmax = Matrix::of(&self.absmax);
        let out = Matrix::of(&self.out);
        let arguments = arguments![walk.rows, walk.cols, codes, absmax, out];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&NF4, &name, walk.shape(), arguments) };
    }
}
