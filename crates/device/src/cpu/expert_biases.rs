//! The biases of experts.

use std::ops::Range;

use super::experts::Dot;
use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{each_vector, load, rows_per_task, store, tiles};
use super::selected_rows::checked_rows;
use super::simd::{Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::View;
use crate::kernel::{AddBiases, BiasDots, BiasSums};

/// Columns of a task that adds up rows.
const SUMMED_COLUMNS: usize = 256;
/// Rows that are added up by themselves, so that long sums stay exact.
const SUMMED_ROWS: usize = 64;

/// The first row of each expert, and the end of the last.
#[derive(Clone, Copy)]
struct Offsets(&'static [u32]);

impl Offsets {
    /// Those that ascend and end within `rows`.
    fn checked(view: &View, rows: usize) -> Offsets {
        // SAFETY: the kernel's operands live and keep their values until the kernel has run.
        let offsets = unsafe { indices(view).as_slice() };
        let ascend = offsets.is_sorted() && offsets.last().is_none_or(|&last| last as usize <= rows);
        assert!(ascend, "experts' rows end at {offsets:?}, of {rows} rows");
        Offsets(offsets)
    }

    /// The expert whose row it is.
    fn expert(self, row: usize) -> Option<usize> {
        let begun = self.0.partition_point(|&first| first as usize <= row);
        (begun < self.0.len()).then(|| begun.checked_sub(1)).flatten()
    }

    fn rows(self, expert: usize) -> Range<usize> {
        self.0[expert] as usize..self.0[expert + 1] as usize
    }
}

impl Run for AddBiases {
    fn run(&self, team: &mut Team) {
        let (offsets, biases) = (Offsets::checked(&self.offsets, self.x.rows), matrix::<f32>(&self.biases));
        with_element!(self.x.dtype, E => {
            let x = matrix::<E>(&self.x);
            tiles(team, self.x.shape(), |tile| {
                for row in tile.rows {
                    if let Some(expert) = offsets.expert(row) {
                        vectorise(AddRow { x, row, biases, expert, cols: tile.cols.clone() });
                    }
                }
            });
        });
    }
}

struct AddRow<E> {
    x: Matrix<E>,
    row: usize,
    biases: Matrix<f32>,
    expert: usize,
    cols: Range<usize>,
}

impl<E: Element> Vectorised for AddRow<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        each_vector!(self.cols.clone(), |col, count| {
            let to = self.x.at(self.row, col);
            // SAFETY: the row and the expert exist; this part of the row is this task's alone.
            unsafe {
                let bias = load(s, self.biases.at(self.expert, col), count);
                store(s, to, s.add(load(s, to, count), bias), count);
            }
        });
    }
}

impl Run for BiasSums {
    fn run(&self, team: &mut Team) {
        let offsets = Offsets::checked(&self.offsets, self.x.rows);
        let (out, across) = (matrix::<f32>(&self.out), self.x.cols.div_ceil(SUMMED_COLUMNS));
        with_element!(self.x.dtype, E => {
            let x = matrix::<E>(&self.x);
            team.tasks(self.out.rows * across, |task, _| {
                let (expert, first) = (task / across, task % across * SUMMED_COLUMNS);
                let cols = first..x.cols.min(first + SUMMED_COLUMNS);
                vectorise(AddRows { x, rows: offsets.rows(expert), out, expert, cols });
            });
        });
    }
}

/// `out[expert] += Σ x[rows]`
struct AddRows<E> {
    x: Matrix<E>,
    rows: Range<usize>,
    out: Matrix<f32>,
    expert: usize,
    cols: Range<usize>,
}

impl<E: Element> Vectorised for AddRows<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        each_vector!(self.cols.clone(), |col, count| {
            let to = self.out.at(self.expert, col);
            // SAFETY: the rows were checked; these columns of the expert are this task's alone.
            unsafe {
                let mut total = load(s, to, count);
                for first in self.rows.clone().step_by(SUMMED_ROWS) {
                    let mut sum = s.splat(0.0);
                    for row in first..self.rows.end.min(first + SUMMED_ROWS) {
                        sum = s.add(sum, load(s, self.x.at(row, col), count));
                    }
                    total = s.add(total, sum);
                }
                store(s, to, total, count);
            }
        });
    }
}

impl Run for BiasDots {
    fn run(&self, team: &mut Team) {
        let (offsets, pairs) =
            (Offsets::checked(&self.offsets, self.x.rows), checked_rows(&self.pairs, self.out.len()));
        let (biases, out, per_token) = (matrix::<f32>(&self.biases), matrix::<f32>(&self.out), self.out.cols);
        with_element!(self.x.dtype, E => {
            let x = matrix::<E>(&self.x);
            team.blocks(x.rows, rows_per_task(x.cols), |block, _| {
                for row in block {
                    let Some(expert) = offsets.expert(row) else { continue };
                    let pair = pairs[row] as usize;
                    let dot = vectorise(Dot { a: x.at(row, 0), b: biases.at(expert, 0), len: x.cols });
                    let to = out.at(pair / per_token, pair % per_token);
                    // SAFETY: the pair was checked, and it is in no other row.
                    unsafe { to.write(to.read() + dot) };
                }
            });
        });
    }
}
