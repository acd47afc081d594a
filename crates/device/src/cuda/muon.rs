//! Muon's elementwise kernels.

use super::modules::OPTIMIZER;
use super::optimizer::address;
use super::rows::{Matrix, Mixed, Walk};
use super::stream::arguments;
use super::{Run, Stream};
use crate::kernel::{Combine, MuonMomentum, Normalize};

impl Run for MuonMomentum {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::flat(&[self.grad, self.momentum]) else { return };
        let (grad, momentum) = (Matrix::of(&self.grad), Matrix::of(&self.momentum));
        let rest = (1.0 - self.beta as f64) as f32;
        let nesterov = self.nesterov as i32;
        let factor = address(&self.grad_factor);
        let arguments = arguments![walk.rows, walk.cols, grad, momentum, self.beta, rest, nesterov, factor];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, &walk.name("muon_momentum"), walk.shape(), arguments) };
    }
}

impl Run for Normalize {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::flat(&[self.x, self.out]) else { return };
        let x = Mixed::of(&self.x);
        let out = Mixed::of(&self.out);
        let norm = self.squared_norm.address;
        let arguments = arguments![walk.rows, walk.cols, x, norm, self.least, out];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, &walk.name("normalize"), walk.shape(), arguments) };
    }
}

impl Run for Combine {
    fn run(&self, stream: &mut Stream) {
        let views = [self.a, self.b, self.out];
        let Some(walk) = Walk::flat(&views) else { return };
        let [a, b, out] = views.map(|view| Mixed::of(&view));
        let arguments = arguments![walk.rows, walk.cols, a, b, self.alpha, self.beta, out];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&OPTIMIZER, &walk.name("combine"), walk.shape(), arguments) };
    }
}
