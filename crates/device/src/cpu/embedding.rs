//! Rows of a table by index, and the gradient of that.

use std::ops::Range;

use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{Tile, each_vector, load, place_of, store, tiles};
use super::simd::{Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::kernel::{Embed, EmbedBackward};

impl Run for Embed {
    fn run(&self, team: &mut Team) {
        // SAFETY: the kernel's operands live and keep their values until the kernel has run.
        let tokens: &[u32] = unsafe { indices(&self.indices).as_slice() };
        with_element!(self.out.dtype, E => with_element!(self.table.dtype, T => {
            let (table, out) = (matrix::<T>(&self.table), matrix::<E>(&self.out));
            tiles(team, self.out.shape(), |tile| {
                vectorise(EmbedTile { kernel: self, tokens, table, out, tile });
            });
        }));
    }
}

struct EmbedTile<'a, T, E> {
    kernel: &'a Embed,
    tokens: &'a [u32],
    table: Matrix<T>,
    out: Matrix<E>,
    tile: Tile,
}

impl<T: Element, E: Element> Vectorised for EmbedTile<'_, T, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let EmbedTile { kernel, table, out, .. } = self;
        for token in self.tile.rows {
            let row = place_of(self.tokens[token], kernel.first, table.rows);
            if row.is_none() && kernel.accumulate {
                continue;
            }
            // A factor of zero would turn an infinite weight into NaN, so a missing row is written as zeros.
            each_vector!(self.tile.cols.clone(), |col, count| {
                let to = out.at(token, col);
                // SAFETY: the tile of `out` is this task's alone; nobody writes the table.
                unsafe {
                    let mut value = s.splat(0.0);
                    if let Some(row) = row {
                        value = s.mul(load(s, table.at(row, col), count), s.splat(kernel.scale));
                    }
                    if kernel.accumulate {
                        value = s.add(load(s, to, count), value);
                    }
                    store(s, to, value, count);
                }
            });
        }
    }
}

/// Columns per task: each task walks all tokens in order, since several may add to the same row. A few cache lines, so
/// that even a narrow model keeps many cores busy.
const BACKWARD_COLUMNS: usize = 64;

impl Run for EmbedBackward {
    fn run(&self, team: &mut Team) {
        // SAFETY: the kernel's operands live and keep their values until the kernel has run.
        let tokens: &[u32] = unsafe { indices(&self.indices).as_slice() };
        with_element!(self.dout.dtype, E => {
            let (dtable, dout) = (matrix::<f32>(&self.dtable), matrix::<E>(&self.dout));
            team.blocks(dout.cols, BACKWARD_COLUMNS, |cols, _| {
                vectorise(AddToTable { kernel: self, tokens, dtable, dout, cols });
            });
        });
    }
}

struct AddToTable<'a, E> {
    kernel: &'a EmbedBackward,
    tokens: &'a [u32],
    dtable: Matrix<f32>,
    dout: Matrix<E>,
    cols: Range<usize>,
}

impl<E: Element> Vectorised for AddToTable<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let scale = s.splat(self.kernel.scale);
        for (token, &index) in self.tokens.iter().enumerate() {
            let Some(row) = place_of(index, self.kernel.first, self.dtable.rows) else { continue };
            each_vector!(self.cols.clone(), |col, count| {
                let to = self.dtable.at(row, col);
                // SAFETY: these columns of the table are this task's alone; nobody writes `dout`.
                unsafe {
                    let dout = load(s, self.dout.at(token, col), count);
                    store(s, to, s.mul_add(dout, scale, load(s, to, count)), count);
                }
            });
        }
    }
}
