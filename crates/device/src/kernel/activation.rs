use super::{Operation, assert_same_shape};
use crate::View;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    Silu,
    GeluErf,
    GeluTanh,
    Relu,
}

/// `out = activation(x)`; `out` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct Activate {
    pub activation: Activation,
    pub x: View,
    pub out: View,
}

impl Operation for Activate {
    fn check(&self) {
        assert_same_shape("Activate", &[self.x, self.out]);
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.out.bytes()
    }
}

/// `dx = activation'(x) · dout`; `dx` may be `dout` or `x`.
#[derive(Clone, Copy, Debug)]
pub struct ActivateBackward {
    pub activation: Activation,
    pub x: View,
    pub dout: View,
    pub dx: View,
}

impl Operation for ActivateBackward {
    fn check(&self) {
        assert_same_shape("ActivateBackward", &[self.x, self.dout, self.dx]);
    }

    fn bytes(&self) -> u64 {
        self.x.bytes() + self.dout.bytes() + self.dx.bytes()
    }
}

/// `out = activation(gate) · up`: SwiGLU, GeGLU.
#[derive(Clone, Copy, Debug)]
pub struct Gated {
    pub activation: Activation,
    pub gate: View,
    pub up: View,
    pub out: View,
}

impl Operation for Gated {
    fn check(&self) {
        assert_same_shape("Gated", &[self.gate, self.up, self.out]);
    }

    fn bytes(&self) -> u64 {
        self.gate.bytes() + self.up.bytes() + self.out.bytes()
    }
}

/// Gradients of [`Gated`]; `dgate` may be `gate`, `dup` may be `up`, either may be `dout`.
#[derive(Clone, Copy, Debug)]
pub struct GatedBackward {
    pub activation: Activation,
    pub gate: View,
    pub up: View,
    pub dout: View,
    pub dgate: View,
    pub dup: View,
}

impl Operation for GatedBackward {
    fn check(&self) {
        assert_same_shape("GatedBackward", &[self.gate, self.up, self.dout, self.dgate, self.dup]);
    }

    fn bytes(&self) -> u64 {
        self.gate.bytes() + self.up.bytes() + self.dout.bytes() + self.dgate.bytes() + self.dup.bytes()
    }
}
