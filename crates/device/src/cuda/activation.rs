//! Activations and gated activations.

use super::modules::ACTIVATION;
use super::product::activation_number;
use super::rows::{Matrix, RowCount, Walk};
use super::stream::arguments;
use super::{Run, Stream};
use crate::kernel::{
    Activate, ActivateBackward, CLAMPED_GATE_SLOPE, ClampedGate, ClampedGateBackward, Gated, GatedBackward,
};

impl Run for Activate {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::flat(&[self.x, self.out]) else { return };
        let [x, out] = [self.x, self.out].map(|view| Matrix::of(&view));
        let name = walk.typed("activate", self.out.dtype);
        let activation = activation_number(Some(self.activation));
        let arguments = arguments![walk.rows, walk.cols, x, out, activation];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ACTIVATION, &name, walk.shape_by_rows(), arguments) };
    }
}

impl Run for ActivateBackward {
    fn run(&self, stream: &mut Stream) {
        let views = [self.x, self.dout, self.dx];
        let Some(walk) = Walk::flat(&views) else { return };
        let [x, dout, dx] = views.map(|view| Matrix::of(&view));
        let name = walk.typed("activate_backward", self.dx.dtype);
        let arguments = arguments![walk.rows, walk.cols, x, dout, dx, activation_number(Some(self.activation))];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ACTIVATION, &name, walk.shape_by_rows(), arguments) };
    }
}

impl Run for Gated {
    fn run(&self, stream: &mut Stream) {
        let views = [self.gate, self.up, self.out];
        let Some((walk, rows)) = Walk::counted(&views, &self.count) else { return };
        let [gate, up, out] = views.map(|view| Matrix::of(&view));
        let name = walk.typed("gated", self.out.dtype);
        let arguments = arguments![rows, walk.cols, gate, up, out, activation_number(Some(self.activation))];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ACTIVATION, &name, walk.shape_by_rows(), arguments) };
    }
}

impl Run for GatedBackward {
    fn run(&self, stream: &mut Stream) {
        let views = [self.gate, self.up, self.dout, self.dgate, self.dup];
        let Some((walk, rows)) = Walk::counted(&views, &self.count) else { return };
        let [gate, up, dout, dgate, dup] = views.map(|view| Matrix::of(&view));
        let (name, activation) =
            (walk.typed("gated_backward", self.dup.dtype), activation_number(Some(self.activation)));
        let arguments = arguments![rows, walk.cols, gate, up, dout, dgate, dup, activation];
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ACTIVATION, &name, walk.shape_by_rows(), arguments) };
    }
}

impl Run for ClampedGate {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.out, self.x]) else { return };
        let rows = RowCount::of(walk.rows, &self.count);
        let [x, out] = [self.x, self.out].map(|view| Matrix::of(&view));
        let arguments = arguments![rows, walk.cols, x, out, self.limit, CLAMPED_GATE_SLOPE];
        let name = walk.typed("clamped_gate", self.out.dtype);
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ACTIVATION, &name, walk.shape_by_rows(), arguments) };
    }
}

impl Run for ClampedGateBackward {
    fn run(&self, stream: &mut Stream) {
        let Some(walk) = Walk::rows(&[self.dout, self.x, self.dx]) else { return };
        let rows = RowCount::of(walk.rows, &self.count);
        let [x, dout, dx] = [self.x, self.dout, self.dx].map(|view| Matrix::of(&view));
        let arguments = arguments![rows, walk.cols, x, dout, dx, self.limit, CLAMPED_GATE_SLOPE];
        let name = walk.typed("clamped_gate_backward", self.dout.dtype);
        // SAFETY: the arguments are the kernel's, and the queue's order keeps others away from the operands.
        unsafe { stream.launch(&ACTIVATION, &name, walk.shape_by_rows(), arguments) };
    }
}
