//! RMS norms gated by a SiLU, and their gradients. With x̂ the normalised row, `out = w·x̂·silu(z)`; with g = dout·silu(z)·w,
//! `dx = scale · (g - x̂·mean(g·x̂))`, `dz = dout·w·x̂·silu'(z)`.

use std::ops::Range;

use super::super::activation::{activate, activate_derivative};
use super::super::matrix::{Element, Matrix, matrix, with_element};
use super::super::rows::{PARTS, column_sums, column_sums_floats, each_vector, load, rows_per_task, store, total};
use super::super::simd::{Simd, Vectorised, vectorise};
use super::super::{Run, Team, WorkingMemory};
use crate::kernel::{Activation, GatedNorm, GatedNormBackward};

impl Run for GatedNorm {
    fn run(&self, team: &mut Team) {
        with_element!(self.x.dtype, E => {
            let rows = Forward {
                x: matrix::<E>(&self.x),
                gate: matrix(&self.gate),
                weight: matrix(&self.weight),
                out: matrix(&self.out),
                epsilon: self.epsilon,
                rows: 0..0,
            };
            team.blocks(self.x.rows, rows_per_task(self.x.cols), |block, _| {
                vectorise(Forward { rows: block, ..rows.clone() });
            });
        });
    }
}

#[derive(Clone)]
struct Forward<E> {
    x: Matrix<E>,
    gate: Matrix<E>,
    weight: Matrix<f32>,
    out: Matrix<E>,
    epsilon: f32,
    rows: Range<usize>,
}

impl<E: Element> Vectorised for Forward<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows.clone() {
            let scale = s.splat(inverse_root(s, self.x, row, self.epsilon));
            each_vector!(0..self.x.cols, |col, count| {
                // SAFETY: rows are this task's alone, and each element is read before it is written; nobody writes the weight.
                unsafe {
                    let normal = s.mul(load(s, self.x.at(row, col), count), scale);
                    let gate = activate(Activation::Silu, s, load(s, self.gate.at(row, col), count));
                    let weighted = s.mul(normal, load(s, self.weight.at(0, col), count));
                    store(s, self.out.at(row, col), s.mul(weighted, gate), count);
                }
            });
        }
    }
}

/// 1 / √(mean(x²) + ε)
#[inline(always)]
fn inverse_root<S: Simd, E: Element>(s: S, x: Matrix<E>, row: usize, epsilon: f32) -> f32 {
    let mut squares = [s.splat(0.0); PARTS];
    each_vector!(0..x.cols, |col, count, part| {
        // SAFETY: nobody writes the row meanwhile.
        let x = unsafe { load(s, x.at(row, col), count) };
        squares[part] = s.mul_add(x, x, squares[part]);
    });
    1.0 / (total(s, squares) / x.cols as f32 + epsilon).sqrt()
}

impl Run for GatedNormBackward {
    fn run(&self, team: &mut Team) {
        with_element!(self.x.dtype, E => {
            let rows = Backward {
                x: matrix::<E>(&self.x),
                gate: matrix(&self.gate),
                weight: matrix(&self.weight),
                dout: matrix(&self.dout),
                dx: matrix(&self.dx),
                dgate: matrix(&self.dgate),
                epsilon: self.epsilon,
                sums: matrix(&self.weight),
                rows: 0..0,
            };
            let outs = [self.dweight.map(|dweight| matrix(&dweight))];
            column_sums(team, self.x.rows, self.x.cols, &outs, |block, sums| {
                vectorise(Backward { rows: block, sums, ..rows.clone() });
            });
        });
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(column_sums_floats(self.x.rows, self.x.cols, 1))
    }
}

#[derive(Clone)]
struct Backward<E> {
    x: Matrix<E>,
    gate: Matrix<E>,
    weight: Matrix<f32>,
    dout: Matrix<E>,
    dx: Matrix<E>,
    dgate: Matrix<E>,
    epsilon: f32,
    /// f32 [1, D]: this block's share of `dweight`.
    sums: Matrix<f32>,
    rows: Range<usize>,
}

impl<E: Element> Vectorised for Backward<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows.clone() {
            let scale = s.splat(inverse_root(s, self.x, row, self.epsilon));
            let mut products = [s.splat(0.0); PARTS];
            each_vector!(0..self.x.cols, |col, count, part| {
                let [x, gate, dout, weight] = self.load(s, row, col, count);
                let g = s.mul(s.mul(dout, activate(Activation::Silu, s, gate)), weight);
                products[part] = s.mul_add(g, s.mul(x, scale), products[part]);
            });
            let mean = s.splat(total(s, products) / self.x.cols as f32);
            each_vector!(0..self.x.cols, |col, count| {
                let [x, gate, dout, weight] = self.load(s, row, col, count);
                let normal = s.mul(x, scale);
                let dweighted = s.mul(dout, activate(Activation::Silu, s, gate));
                let dx = s.mul(scale, s.sub(s.mul(dweighted, weight), s.mul(normal, mean)));
                let slope = activate_derivative(Activation::Silu, s, gate);
                let dgate = s.mul(s.mul(dout, s.mul(weight, normal)), slope);
                let sum = self.sums.at(0, col);
                // SAFETY: rows and sums are this task's alone, and each element was read above.
                unsafe {
                    store(s, self.dx.at(row, col), dx, count);
                    store(s, self.dgate.at(row, col), dgate, count);
                    store(s, sum, s.mul_add(dweighted, normal, load(s, sum.cast_const(), count)), count);
                }
            });
        }
    }
}

impl<E: Element> Backward<E> {
    /// x, gate, dout and weight.
    #[inline(always)]
    fn load<S: Simd>(&self, s: S, row: usize, col: usize, count: usize) -> [S::Vector; 4] {
        // SAFETY: rows are this task's alone; nobody writes the weight.
        unsafe {
            [
                load(s, self.x.at(row, col), count),
                load(s, self.gate.at(row, col), count),
                load(s, self.dout.at(row, col), count),
                load(s, self.weight.at(0, col), count),
            ]
        }
    }
}
