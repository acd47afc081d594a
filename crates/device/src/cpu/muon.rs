//! Muon's elementwise kernels.

use super::optimizer::factor;
use super::rows::{Map, map, map_mixed};
use super::simd::Simd;
use super::{Run, Team};
use crate::kernel::{Combine, MuonMomentum, Normalize};

#[derive(Clone, Copy)]
struct Momentum {
    grad: f32,
    beta: f32,
    rest: f32,
    nesterov: bool,
}

impl Map<2, 2> for Momentum {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [grad, momentum]: [S::Vector; 2]) -> [S::Vector; 2] {
        let share = s.mul(s.mul(grad, s.splat(self.grad)), s.splat(self.rest));
        let momentum = s.mul_add(momentum, s.splat(self.beta), share);
        let direction = if self.nesterov { s.mul_add(momentum, s.splat(self.beta), share) } else { momentum };
        [direction, momentum]
    }
}

impl Run for MuonMomentum {
    fn run(&self, team: &mut Team) {
        let grad = factor(&self.grad_factor);
        let rest = (1.0 - self.beta as f64) as f32;
        let momentum = Momentum { grad, beta: self.beta, rest, nesterov: self.nesterov };
        map(team, momentum, [self.grad, self.momentum], [self.grad, self.momentum]);
    }
}

#[derive(Clone, Copy)]
struct Scaled(f32);

impl Map<1, 1> for Scaled {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [x]: [S::Vector; 1]) -> [S::Vector; 1] {
        [s.mul(x, s.splat(self.0))]
    }
}

impl Run for Normalize {
    fn run(&self, team: &mut Team) {
        let norm = factor(&Some(self.squared_norm)).sqrt();
        map_mixed(team, Scaled(1.0 / norm.max(self.least)), [self.x], [self.out]);
    }
}

#[derive(Clone, Copy)]
struct Combination {
    alpha: f32,
    beta: f32,
}

impl Map<2, 1> for Combination {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [a, b]: [S::Vector; 2]) -> [S::Vector; 1] {
        [s.mul_add(a, s.splat(self.alpha), s.mul(b, s.splat(self.beta)))]
    }
}

impl Run for Combine {
    fn run(&self, team: &mut Team) {
        map_mixed(team, Combination { alpha: self.alpha, beta: self.beta }, [self.a, self.b], [self.out]);
    }
}
