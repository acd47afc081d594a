//! The selection of rows. Copies keep every bit.

use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{Tile, each_vector, load, store, tiles};
use super::simd::{Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::View;
use crate::kernel::{GatherRows, ScatterRows};

/// Row numbers that all lie in a matrix of `count` rows.
pub(super) fn checked_rows(view: &View, count: usize) -> &'static [u32] {
    // SAFETY: the kernel's operands live and keep their values until the kernel has run.
    let rows = unsafe { indices(view).as_slice() };
    if let Some(row) = rows.iter().find(|&&row| row as usize >= count) {
        panic!("row {row} of a matrix of {count} rows");
    }
    rows
}

/// # Safety
/// Both rows have these columns, nobody writes the one and nobody else accesses the other.
pub(super) unsafe fn copy_row<E: Element>(
    x: Matrix<E>,
    from: usize,
    out: Matrix<E>,
    to: usize,
    cols: std::ops::Range<usize>,
) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(x.at(from, cols.start), out.at(to, cols.start), cols.len()) };
}

impl Run for GatherRows {
    fn run(&self, team: &mut Team) {
        let selected = checked_rows(&self.rows, self.x.rows);
        with_element!(self.x.dtype, E => {
            let (x, out) = (matrix::<E>(&self.x), matrix::<E>(&self.out));
            tiles(team, self.out.shape(), |Tile { rows, cols }| {
                for row in rows {
                    // SAFETY: the row was checked; the tile of `out` is this task's alone.
                    unsafe { copy_row(x, selected[row] as usize, out, row, cols.clone()) };
                }
            });
        });
    }
}

impl Run for ScatterRows {
    fn run(&self, team: &mut Team) {
        let selected = checked_rows(&self.rows, self.out.rows);
        with_element!(self.x.dtype, E => {
            let (x, out) = (matrix::<E>(&self.x), matrix::<E>(&self.out));
            tiles(team, self.x.shape(), |tile| {
                if self.accumulate {
                    return vectorise(AddTile { x, out, selected, tile });
                }
                for row in tile.rows {
                    // SAFETY: the row was checked; rows are distinct, so no other task writes this one.
                    unsafe { copy_row(x, row, out, selected[row] as usize, tile.cols.clone()) };
                }
            });
        });
    }
}

struct AddTile<'a, E> {
    x: Matrix<E>,
    out: Matrix<E>,
    selected: &'a [u32],
    tile: Tile,
}

impl<E: Element> Vectorised for AddTile<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in self.tile.rows {
            let target = self.selected[row] as usize;
            each_vector!(self.tile.cols.clone(), |col, count| {
                let to = self.out.at(target, col);
                // SAFETY: rows are distinct, so this part of one is this task's alone; nobody writes x.
                unsafe { store(s, to, s.add(load(s, to, count), load(s, self.x.at(row, col), count)), count) };
            });
        }
    }
}
