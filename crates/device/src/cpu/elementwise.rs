//! Sums, copies, fills, and the selection of columns.

use super::math::sigmoid;
use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{Map, Tile, column_sums, column_sums_floats, each_vector, load, map, map_mixed, store, tiles};
use super::simd::{Simd, Vectorised, vectorise};
use super::{Run, Team, WorkingMemory};
use crate::kernel::{Add, ColumnSum, Copies, Copy, Fill, GatherColumns, Multiply, ScatterColumns, SoftCap};
use crate::{DType, Extent, View};

#[derive(Clone, std::marker::Copy)]
struct Sum;

impl Map<2, 1> for Sum {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [a, b]: [S::Vector; 2]) -> [S::Vector; 1] {
        [s.add(a, b)]
    }
}

impl Run for Add {
    fn run(&self, team: &mut Team) {
        map_mixed(team, Sum, [self.a, self.b], [self.out]);
    }
}

#[derive(Clone, std::marker::Copy)]
struct Times(f32);

impl Map<1, 1> for Times {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [x]: [S::Vector; 1]) -> [S::Vector; 1] {
        [s.mul(x, s.splat(self.0))]
    }
}

impl Run for Multiply {
    fn run(&self, team: &mut Team) {
        // SAFETY: nobody writes the factor while this kernel runs.
        let by = self.by.map_or(1.0, |by| unsafe { *matrix::<f32>(&by).at(0, 0) });
        map_mixed(team, Times(self.factor * by), [self.x], [self.out]);
    }
}

#[derive(Clone, std::marker::Copy)]
struct Capped(f32);

impl Map<1, 1> for Capped {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, [x]: [S::Vector; 1]) -> [S::Vector; 1] {
        // tanh y = 2σ(2y) - 1
        let share = sigmoid(s, s.mul(x, s.splat(2.0 / self.0)));
        [s.mul_add(share, s.splat(2.0 * self.0), s.splat(-self.0))]
    }
}

impl Run for SoftCap {
    fn run(&self, team: &mut Team) {
        map_mixed(team, Capped(self.cap), [self.x], [self.out]);
    }
}

#[derive(Clone, std::marker::Copy)]
struct Identity;

impl Map<1, 1> for Identity {
    #[inline(always)]
    fn map<S: Simd>(self, _: S, _: usize, _: usize, inputs: [S::Vector; 1]) -> [S::Vector; 1] {
        inputs
    }
}

impl Run for Copy {
    fn run(&self, team: &mut Team) {
        // Indices are as wide as f32, and moving an f32 keeps its bits.
        let as_numbers = |view: View| match view.dtype {
            DType::U32 => View::new(view.address, Extent { dtype: DType::F32, ..*view }),
            _ => view,
        };
        map_mixed(team, Identity, [as_numbers(self.x)], [as_numbers(self.out)]);
    }
}

impl Run for Copies {
    fn run(&self, team: &mut Team) {
        self.0.iter().for_each(|copy| copy.run(team));
    }
}

#[derive(Clone, std::marker::Copy)]
struct Constant(f32);

impl Map<0, 1> for Constant {
    #[inline(always)]
    fn map<S: Simd>(self, s: S, _: usize, _: usize, []: [S::Vector; 0]) -> [S::Vector; 1] {
        [s.splat(self.0)]
    }
}

impl Run for Fill {
    fn run(&self, team: &mut Team) {
        map(team, Constant(self.value), [], [self.out]);
    }
}

impl Run for ColumnSum {
    fn run(&self, team: &mut Team) {
        with_element!(self.x.dtype, E => {
            let x = matrix::<E>(&self.x);
            column_sums(team, x.rows, x.cols, &[Some(matrix(&self.out))], |rows, sums| {
                vectorise(SumRows { x, rows, sums });
            });
        });
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_team(column_sums_floats(self.x.rows, self.x.cols, 1))
    }
}

/// `sums += Σ_rows x`
struct SumRows<E> {
    x: Matrix<E>,
    rows: std::ops::Range<usize>,
    sums: Matrix<f32>,
}

impl<E: Element> Vectorised for SumRows<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Several rows per visit of the sums, which would otherwise be moved as often as the rows.
        const ROWS: usize = 8;
        for first in self.rows.clone().step_by(ROWS) {
            let last = self.rows.end.min(first + ROWS);
            each_vector!(0..self.x.cols, |col, count| {
                let to = self.sums.at(0, col);
                // SAFETY: the sums are this task's alone; nobody writes x.
                unsafe {
                    let mut sum = load(s, to, count);
                    for row in first..last {
                        sum = s.add(sum, load(s, self.x.at(row, col), count));
                    }
                    store(s, to, sum, count);
                }
            });
        }
    }
}

/// Column numbers that all lie in a matrix of `cols` columns.
fn checked_columns(view: &View, cols: usize) -> &'static [u32] {
    // SAFETY: the kernel's operands live and keep their values until the kernel has run.
    let columns = unsafe { indices(view).as_slice() };
    if let Some(column) = columns.iter().find(|&&column| column as usize >= cols) {
        panic!("column {column} of a matrix of {cols} columns");
    }
    columns
}

impl Run for GatherColumns {
    fn run(&self, team: &mut Team) {
        let columns = checked_columns(&self.columns, self.x.cols);
        with_element!(self.x.dtype, E => {
            let (x, out) = (matrix::<E>(&self.x), matrix::<E>(&self.out));
            tiles(team, self.out.shape(), |Tile { rows, cols }| {
                for row in rows {
                    // One address for each row: worked out for each element, they took longer than the loads and stores.
                    let from = x.at(row, 0);
                    let to = out.at(row, cols.start);
                    for (i, &column) in columns[cols.clone()].iter().enumerate() {
                        // SAFETY: the column was checked; the tile of `out` is this task's alone.
                        unsafe { to.add(i).write(from.add(column as usize).read()) };
                    }
                }
            });
        });
    }
}

impl Run for ScatterColumns {
    fn run(&self, team: &mut Team) {
        let columns = checked_columns(&self.columns, self.out.cols);
        let accumulate = self.accumulate;
        with_element!(self.x.dtype, E => {
            let (x, out) = (matrix::<E>(&self.x), matrix::<E>(&self.out));
            tiles(team, self.x.shape(), |Tile { rows, cols }| {
                for row in rows {
                    let from = x.at(row, cols.start);
                    let to = out.at(row, 0);
                    for (i, &column) in columns[cols.clone()].iter().enumerate() {
                        // SAFETY: the column was checked; columns are distinct, so no other task writes this one.
                        unsafe {
                            let value = from.add(i).read();
                            let to = to.add(column as usize);
                            to.write(if accumulate { E::from_f32(to.read().to_f32() + value.to_f32()) } else { value });
                        }
                    }
                }
            });
        });
    }
}
