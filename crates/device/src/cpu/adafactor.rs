//! Adafactor: sums of squares along rows and columns, and updates divided by them.

use std::ops::Range;

use super::matrix::{Element, Matrix, matrix, with_element};
use super::optimizer::{Partials, factor};
use super::rows::{Tile, column_sums, column_sums_floats, each_vector, load, rows_per_task, store, tiles, total};
use super::simd::{Simd, Vectorised, vectorise};
use super::{Run, Team, WorkingMemory};
use crate::DType;
use crate::kernel::{Adafactor, AdafactorNorm, Factored, SquareSums};

impl Run for SquareSums {
    fn run(&self, team: &mut Team) {
        let x = matrix::<f32>(&self.x);
        let factor = factor(&self.factor);
        let row_scale = self.row_scale;
        let col_scale = self.col_scale;
        let row_sums = self.rows.map(|rows| matrix::<f32>(&rows));
        column_sums(team, x.rows, x.cols, &[Some(matrix(&self.cols))], |rows, col_sums| {
            vectorise(Squares { x, rows, factor, row_sums, col_sums, row_scale, col_scale });
        });
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(column_sums_floats(self.x.rows, self.x.cols, 1))
    }
}

struct Squares {
    x: Matrix<f32>,
    rows: Range<usize>,
    factor: f32,
    row_sums: Option<Matrix<f32>>,
    col_sums: Matrix<f32>,
    row_scale: f32,
    col_scale: f32,
}

impl Vectorised for Squares {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.rows {
            let mut sums = [s.splat(0.0); super::rows::PARTS];
            each_vector!(0..self.x.cols, |col, count, part| {
                let to = self.col_sums.at(0, col);
                // SAFETY: the sums are this task's alone; nobody writes x.
                unsafe {
                    let x = s.mul(load(s, self.x.at(row, col), count), s.splat(self.factor));
                    let square = s.mul(x, x);
                    sums[part] = s.add(sums[part], square);
                    store(s, to, s.mul_add(square, s.splat(self.col_scale), load(s, to, count)), count);
                }
            });
            if let Some(row_sums) = self.row_sums {
                let to = row_sums.at(0, row);
                // SAFETY: every row is one task's.
                unsafe { to.write(to.read() + total(s, sums) * self.row_scale) };
            }
        }
    }
}

/// The divisor of gradients, with its common factors computed once.
#[derive(Clone, Copy)]
struct Divided {
    grad: Matrix<f32>,
    factor: f32,
    rows: Option<Matrix<f32>>,
    cols: Matrix<f32>,
    /// One over the mean of all rows.
    row_factor: f32,
    /// The square of epsilon.
    least: f32,
}

impl Divided {
    fn of(factored: &Factored) -> Divided {
        let mean = factor(&Some(factored.row_sum)) / factored.row_count as f32;
        Divided {
            grad: matrix(&factored.grad),
            factor: factor(&factored.grad_factor),
            rows: factored.rows.map(|rows| matrix(&rows)),
            cols: matrix(&factored.cols),
            row_factor: 1.0 / mean.max(factored.epsilon),
            least: factored.epsilon * factored.epsilon,
        }
    }

    /// The factor of the columns' mean squares in this row.
    #[inline(always)]
    fn of_row(&self, row: usize) -> f32 {
        // SAFETY: the row lies in the matrix, and nobody writes the sums.
        self.rows.map_or(1.0, |rows| unsafe { rows.at(0, row).read() } * self.row_factor)
    }

    /// # Safety
    /// `count` elements from there on lie in the matrix, and nobody writes them.
    #[inline(always)]
    unsafe fn update<S: Simd>(&self, s: S, of_row: f32, row: usize, col: usize, count: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        let (grad, of_col) = unsafe { (load(s, self.grad.at(row, col), count), load(s, self.cols.at(0, col), count)) };
        let variance = s.max(s.mul(of_col, s.splat(of_row)), s.splat(self.least));
        s.div(s.mul(grad, s.splat(self.factor)), s.sqrt(variance))
    }
}

impl Run for AdafactorNorm {
    fn run(&self, team: &mut Team) {
        let divided = Divided::of(&self.factored);
        let [rows, cols] = self.factored.grad.shape();
        let height = rows_per_task(cols);
        let mut common = team.take_common();
        let partials = Partials::in_floats(&mut common, rows.div_ceil(height));
        team.blocks(rows, height, |rows, _| {
            let block = rows.start / height;
            let sum = vectorise(SquaredUpdates { divided, rows, cols });
            // SAFETY: each task writes the partial of its own rows.
            unsafe { partials.at(block).write(sum) };
        });
        // SAFETY: every task has written its partial and ended.
        let sum: f64 = (0..rows.div_ceil(height)).map(|block| unsafe { partials.at(block).read() }).sum();
        team.return_common(common);
        let out = matrix::<f32>(&self.out).at(0, 0);
        // SAFETY: one element, and the queue's order keeps others away.
        unsafe { out.write((out.read() as f64 + sum) as f32) };
    }

    fn working_memory(&self) -> WorkingMemory {
        let [rows, cols] = self.factored.grad.shape();
        WorkingMemory::of_team(Partials::floats(rows.div_ceil(rows_per_task(cols))))
    }
}

struct SquaredUpdates {
    divided: Divided,
    rows: Range<usize>,
    cols: usize,
}

impl Vectorised for SquaredUpdates {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let mut sum = 0.0;
        for row in self.rows {
            let of_row = self.divided.of_row(row);
            let mut sums = [s.splat(0.0); super::rows::PARTS];
            each_vector!(0..self.cols, |col, count, part| {
                // SAFETY: the elements lie in the matrix, and nobody writes them. Lanes behind the last gradient are zero.
                let update = unsafe { self.divided.update(s, of_row, row, col, count) };
                sums[part] = s.mul_add(update, update, sums[part]);
            });
            sum += total(s, sums) as f64;
        }
        sum
    }
}

impl Run for Adafactor {
    fn run(&self, team: &mut Team) {
        let copy_dtype = self.copy.map_or(DType::Bf16, |copy| copy.dtype);
        with_element!(copy_dtype, E => apply::<E>(self, team));
    }
}

fn apply<E: Element>(kernel: &Adafactor, team: &mut Team) {
    let rms = |squares| (factor(&Some(squares)) as f64 / kernel.count as f64).sqrt();
    let scale = (kernel.least_scale as f64).max(rms(kernel.squared_weight));
    let excess = (rms(kernel.squared_update) / kernel.most_rms as f64).max(1.0);
    let rate = -(kernel.rate as f64 * scale / excess) as f32;
    let keep = (1.0 - kernel.lr as f64 * kernel.weight_decay as f64) as f32;
    let (divided, weight) = (Divided::of(&kernel.factored), matrix::<f32>(&kernel.weight));
    let copy = kernel.copy.map(|copy| matrix::<E>(&copy));
    tiles(team, kernel.weight.shape(), |tile| vectorise(Apply { divided, weight, copy, rate, keep, tile }));
}

struct Apply<E> {
    divided: Divided,
    weight: Matrix<f32>,
    copy: Option<Matrix<E>>,
    rate: f32,
    keep: f32,
    tile: Tile,
}

impl<E: Element> Vectorised for Apply<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.tile.rows.clone() {
            let of_row = self.divided.of_row(row);
            each_vector!(self.tile.cols.clone(), |col, count| {
                // SAFETY: tiles are disjoint and lie in every matrix.
                unsafe {
                    let change = s.mul(self.divided.update(s, of_row, row, col, count), s.splat(self.rate));
                    let weight = load(s, self.weight.at(row, col), count);
                    let weight = s.mul_add(weight, s.splat(self.keep), change);
                    store(s, self.weight.at(row, col), weight, count);
                    if let Some(copy) = self.copy {
                        store(s, copy.at(row, col), weight, count);
                    }
                }
            });
        }
    }
}
