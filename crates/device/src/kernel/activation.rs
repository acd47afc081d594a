use super::experts::{RowCount, assert_count, expected};
use super::{Operation, assert_same_shape};
use crate::View;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    Silu,
    GeluErf,
    GeluTanh,
    Relu,
    Sigmoid,
    Tanh,
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
    /// How many rows there are when it runs, as for [pairs](super::GatherPairs); all without it.
    pub count: Option<RowCount>,
}

impl Operation for Gated {
    fn check(&self) {
        assert_same_shape("Gated", &[self.gate, self.up, self.out]);
        assert_count("Gated", &self.count);
    }

    fn bytes(&self) -> u64 {
        expected(self.gate.bytes() + self.up.bytes() + self.out.bytes(), self.out.rows, &self.count)
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
    /// How many rows there are when it runs, as for [pairs](super::GatherPairs); all without it.
    pub count: Option<RowCount>,
}

impl Operation for GatedBackward {
    fn check(&self) {
        assert_same_shape("GatedBackward", &[self.gate, self.up, self.dout, self.dgate, self.dup]);
        assert_count("GatedBackward", &self.count);
    }

    fn bytes(&self) -> u64 {
        let all = [self.gate, self.up, self.dout, self.dgate, self.dup];
        expected(all.iter().map(|view| view.bytes()).sum(), self.dout.rows, &self.count)
    }
}

/// The factor of the sigmoid's argument in [`ClampedGate`].
pub const CLAMPED_GATE_SLOPE: f32 = 1.702;

/// `out[i] = (up + 1) · gate · sigmoid(1.702 · gate)`, where gate is `x[2i]`, `limit` at most, and up is `x[2i + 1]`, between
/// `-limit` and `limit`.
#[derive(Clone, Copy, Debug)]
pub struct ClampedGate {
    /// [T, 2·I]
    pub x: View,
    pub limit: f32,
    /// [T, I], dtype of `x`.
    pub out: View,
    /// How many rows there are when it runs, as for [pairs](super::GatherPairs); all without it.
    pub count: Option<RowCount>,
}

impl Operation for ClampedGate {
    fn check(&self) {
        assert_pairs("ClampedGate", &self.x, &self.out);
        assert_count("ClampedGate", &self.count);
    }

    fn bytes(&self) -> u64 {
        expected(self.x.bytes() + self.out.bytes(), self.out.rows, &self.count)
    }
}

/// The gradient of [`ClampedGate`]; `dx` may be `x`.
#[derive(Clone, Copy, Debug)]
pub struct ClampedGateBackward {
    /// [T, 2·I]
    pub x: View,
    pub limit: f32,
    /// [T, I]
    pub dout: View,
    /// [T, 2·I]
    pub dx: View,
    /// How many rows there are when it runs, as for [pairs](super::GatherPairs); all without it.
    pub count: Option<RowCount>,
}

impl Operation for ClampedGateBackward {
    fn check(&self) {
        assert_pairs("ClampedGateBackward", &self.x, &self.dout);
        assert_pairs("ClampedGateBackward", &self.dx, &self.dout);
        assert_count("ClampedGateBackward", &self.count);
    }

    fn bytes(&self) -> u64 {
        expected(self.x.bytes() + self.dout.bytes() + self.dx.bytes(), self.dout.rows, &self.count)
    }
}

fn assert_pairs(name: &str, pairs: &View, halves: &View) {
    let expected = (halves.rows, 2 * halves.cols, halves.dtype);
    assert_eq!((pairs.rows, pairs.cols, pairs.dtype), expected, "{name}: not two columns for each");
}
