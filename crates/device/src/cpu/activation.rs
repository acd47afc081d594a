//! Activations and gated activations.
//!
//! The match on the activation is made once per kernel: each function is a type, so that loops are compiled for it.

use super::experts::counted_rows;
use super::math::{erf, exp, sigmoid, tanh};
use super::rows::{Map, map};
use super::simd::Simd;
use super::{Run, Team};
use crate::kernel::{Activate, ActivateBackward, Activation, Gated, GatedBackward};

/// √(2/π)
const TANH_SCALE: f32 = 0.797_884_6;
const TANH_CUBIC: f32 = 0.044_715;

/// `activation(x)`
#[inline(always)]
pub(crate) fn activate<S: Simd>(activation: Activation, s: S, x: S::Vector) -> S::Vector {
    match activation {
        Activation::Silu => s.mul(x, sigmoid(s, x)),
        Activation::GeluErf => s.mul(x, normal_distribution(s, x)),
        Activation::GeluTanh => s.mul(x, sigmoid(s, tanh_argument(s, x))),
        // The maximum is its second operand where one of them is NaN, so NaN stays.
        Activation::Relu => s.max(s.splat(0.0), x),
        Activation::Sigmoid => sigmoid(s, x),
        Activation::Tanh => tanh(s, x),
    }
}

/// `activation'(x)`
#[inline(always)]
pub(crate) fn activate_derivative<S: Simd>(activation: Activation, s: S, x: S::Vector) -> S::Vector {
    let one = s.splat(1.0);
    match activation {
        // σ + x·σ·(1-σ)
        Activation::Silu => {
            let sigma = sigmoid(s, x);
            let slope = s.mul(sigma, s.sub(one, sigma));
            s.mul_add(x, slope, sigma)
        }
        // Φ + x·φ, with the exponential written as `erf` writes it, so that one serves both.
        Activation::GeluErf => {
            let magnitude = s.abs(s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2)));
            let bell = exp(s, s.mul(s.sub(s.splat(0.0), magnitude), magnitude));
            let density = s.mul(bell, s.splat(0.398_942_3));
            s.mul_add(x, density, normal_distribution(s, x))
        }
        // σ(2u) + x·σ·(1-σ)·2u', u' = √(2/π)·(1 + 3·0.044715·x²)
        Activation::GeluTanh => {
            let sigma = sigmoid(s, tanh_argument(s, x));
            let slope = s.mul(sigma, s.sub(one, sigma));
            let cubic = s.splat(6.0 * TANH_SCALE * TANH_CUBIC);
            let inner = s.mul_add(s.mul(x, x), cubic, s.splat(2.0 * TANH_SCALE));
            s.mul_add(s.mul(x, slope), inner, sigma)
        }
        Activation::Relu => s.select_less(s.splat(0.0), x, one, s.splat(0.0)),
        Activation::Sigmoid => {
            let sigma = sigmoid(s, x);
            s.mul(sigma, s.sub(one, sigma))
        }
        Activation::Tanh => {
            let share = tanh(s, x);
            s.mul(s.sub(one, share), s.add(one, share))
        }
    }
}

/// The normal distribution's Φ(x).
#[inline(always)]
fn normal_distribution<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let half = s.splat(0.5);
    s.mul_add(half, erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2))), half)
}

/// 2u for u = √(2/π)·(x + 0.044715·x³): (1 + tanh u) / 2 is the sigmoid of 2u.
#[inline(always)]
fn tanh_argument<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    let cubic = s.splat(2.0 * TANH_SCALE * TANH_CUBIC);
    s.mul(x, s.mul_add(s.mul(x, x), cubic, s.splat(2.0 * TANH_SCALE)))
}

/// An activation as a type.
trait Function: Copy + Sync {
    const ACTIVATION: Activation;
}

macro_rules! functions {
    ($($name:ident),*) => {
        $(#[derive(Clone, Copy)]
        struct $name;
        impl Function for $name {
            const ACTIVATION: Activation = Activation::$name;
        })*

        /// Evaluates an expression with the type that an activation stands for.
        macro_rules! with_function {
            ($activation:expr, $f:ident => $body:expr) => {
                match $activation { $(Activation::$name => { let $f = $name; $body })* }
            };
        }
    };
}
functions!(Silu, GeluErf, GeluTanh, Relu, Sigmoid, Tanh);

#[derive(Clone, Copy)]
struct Forward<F>(F);

impl<F: Function> Map<1, 1> for Forward<F> {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [x]: [S::Vector; 1]) -> [S::Vector; 1] {
        [activate(F::ACTIVATION, s, x)]
    }
}

/// With two inputs: multiplied by the second.
impl<F: Function> Map<2, 1> for Forward<F> {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [gate, up]: [S::Vector; 2]) -> [S::Vector; 1] {
        [s.mul(activate(F::ACTIVATION, s, gate), up)]
    }
}

#[derive(Clone, Copy)]
struct Backward<F>(F);

impl<F: Function> Map<2, 1> for Backward<F> {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [x, dout]: [S::Vector; 2]) -> [S::Vector; 1] {
        [s.mul(activate_derivative(F::ACTIVATION, s, x), dout)]
    }
}

impl<F: Function> Map<3, 2> for Backward<F> {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [gate, up, dout]: [S::Vector; 3]) -> [S::Vector; 2] {
        let dgate = s.mul(activate_derivative(F::ACTIVATION, s, gate), s.mul(dout, up));
        [dgate, s.mul(activate(F::ACTIVATION, s, gate), dout)]
    }
}

impl Run for Activate {
    fn run(&self, team: &mut Team) {
        with_function!(self.activation, f => map(team, Forward(f), [self.x], [self.out]));
    }
}

impl Run for ActivateBackward {
    fn run(&self, team: &mut Team) {
        with_function!(self.activation, f => map(team, Backward(f), [self.x, self.dout], [self.dx]));
    }
}

impl Run for Gated {
    fn run(&self, team: &mut Team) {
        let [out, inputs @ ..] = [self.out, self.gate, self.up].map(|view| counted_rows(&self.count, view));
        with_function!(self.activation, f => map(team, Forward(f), inputs, [out]));
    }
}

impl Run for GatedBackward {
    fn run(&self, team: &mut Team) {
        let inputs = [self.gate, self.up, self.dout].map(|view| counted_rows(&self.count, view));
        let outputs = [self.dgate, self.dup].map(|view| counted_rows(&self.count, view));
        with_function!(self.activation, f => map(team, Backward(f), inputs, outputs));
    }
}
