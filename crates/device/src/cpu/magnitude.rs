//! Columns scaled by DoRA's magnitudes, and the gradient of these.

use std::ops::Range;

use super::matrix::{Element, Matrix, matrix, with_element};
use super::rows::{Map, column_sums, column_sums_floats, each_vector, load, map, store};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::{Run, Team, WorkingMemory};
use crate::kernel::{ColumnDot, ScaleColumns};

impl Run for ScaleColumns {
    fn run(&self, team: &mut Team) {
        let mut common = team.take_common();
        let floats = common.floats(scaled_floats(self.x.cols));
        let (factors, biases) = floats.split_at_mut(floats.len() / 2);
        let (factors, biases) = (factors.as_mut_ptr(), biases.as_mut_ptr());
        let bias = self.bias.map(|bias| matrix(&bias));
        let (scale, squares) = (matrix(&self.scale), matrix(&self.squares));
        vectorise(Factors { scale, squares, bias, factors, biases });
        let scaled = Scaled { factors, biases };
        match self.accumulate {
            true => map(team, AddScaled(scaled), [self.x, self.out], [self.out]),
            false => map(team, scaled, [self.x], [self.out]),
        }
        team.return_common(common);
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(scaled_floats(self.x.cols))
    }
}

/// Whole vectors of factors, and of biases behind them.
fn scaled_floats(cols: usize) -> usize {
    2 * cols.next_multiple_of(LANES)
}

/// `factors = scale / √squares` and `biases = bias`, or zeros. Both have whole vectors.
struct Factors {
    scale: Matrix<f32>,
    squares: Matrix<f32>,
    bias: Option<Matrix<f32>>,
    factors: *mut f32,
    biases: *mut f32,
}

impl Vectorised for Factors {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        each_vector!(0..self.scale.cols, |col, count| {
            // SAFETY: the operands have these columns; the working memory has whole vectors and is this thread's alone.
            unsafe {
                let scale = load(s, self.scale.at(0, col), count);
                let factor = over_root(s, scale, load(s, self.squares.at(0, col), count));
                s.store(self.factors.add(col), factor);
                let bias = match self.bias {
                    Some(bias) => load(s, bias.at(0, col), count),
                    None => s.splat(0.0),
                };
                s.store(self.biases.add(col), bias);
            }
        });
    }
}

/// `value / √square`, zero where the square is zero.
#[inline(always)]
fn over_root<S: Simd>(s: S, value: S::Vector, square: S::Vector) -> S::Vector {
    let zero = s.splat(0.0);
    s.select_less(zero, square, s.div(value, s.sqrt(square)), zero)
}

#[derive(Clone, Copy)]
struct Scaled {
    factors: *const f32,
    biases: *const f32,
}

// SAFETY: tasks only read what they point to.
unsafe impl Send for Scaled {}
// SAFETY: as above.
unsafe impl Sync for Scaled {}

impl Map<1, 1> for Scaled {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, col: usize, [x]: [S::Vector; 1]) -> [S::Vector; 1] {
        // SAFETY: there are whole vectors of factors and biases, and nobody writes them now.
        let (factor, bias) = unsafe { (s.load(self.factors.add(col)), s.load(self.biases.add(col))) };
        [s.mul_add(x, factor, bias)]
    }
}

#[derive(Clone, Copy)]
struct AddScaled(Scaled);

impl Map<2, 1> for AddScaled {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, col: usize, [x, out]: [S::Vector; 2]) -> [S::Vector; 1] {
        // SAFETY: there are whole vectors of factors, and nobody writes them now.
        let factor = unsafe { s.load(self.0.factors.add(col)) };
        [s.mul_add(x, factor, out)]
    }
}

impl Run for ColumnDot {
    fn run(&self, team: &mut Team) {
        let squares = matrix::<f32>(&self.squares);
        with_element!(self.a.dtype, E => {
            let (a, b) = (matrix::<E>(&self.a), matrix::<E>(&self.b));
            column_sums(team, a.rows, a.cols, &[Some(matrix(&self.out))], |rows, sums| {
                vectorise(Dots { a, b, squares, rows, sums });
            });
        });
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(column_sums_floats(self.a.rows, self.a.cols, 1))
    }
}

/// `sums = Σ_rows a · b / √squares`, where `sums` is zero before.
struct Dots<E> {
    a: Matrix<E>,
    b: Matrix<E>,
    squares: Matrix<f32>,
    rows: Range<usize>,
    sums: Matrix<f32>,
}

impl<E: Element> Vectorised for Dots<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Several rows per visit of the sums, as in a column sum.
        const ROWS: usize = 8;
        for first in self.rows.clone().step_by(ROWS) {
            let last = self.rows.end.min(first + ROWS);
            each_vector!(0..self.a.cols, |col, count| {
                let to = self.sums.at(0, col);
                // SAFETY: the sums are this task's alone; nobody writes the operands.
                unsafe {
                    let mut sum = load(s, to, count);
                    for row in first..last {
                        let (a, b) = (load(s, self.a.at(row, col), count), load(s, self.b.at(row, col), count));
                        sum = s.mul_add(a, b, sum);
                    }
                    store(s, to, sum, count);
                }
            });
        }
        each_vector!(0..self.a.cols, |col, count| {
            let to = self.sums.at(0, col);
            // SAFETY: as above.
            unsafe {
                let square = load(s, self.squares.at(0, col), count);
                store(s, to, over_root(s, load(s, to, count), square), count);
            }
        });
    }
}
