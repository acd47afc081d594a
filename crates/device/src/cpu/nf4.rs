//! Matrices of 4-bit codes, expanded.

use super::matrix::{Element, Matrix, indices, matrix, with_element};
use super::rows::{Tile, store, tiles};
use super::simd::{LANES, Simd, Vectorised, vectorise};
use super::{Run, Team};
use crate::kernel::{ExpandNf4, NF4_BLOCK, NF4_CODES, NF4_PER_WORD};

impl Run for ExpandNf4 {
    fn run(&self, team: &mut Team) {
        with_element!(self.out.dtype, E => {
            let codes = indices(&self.codes);
            let absmax = matrix::<f32>(&self.absmax);
            let out = matrix::<E>(&self.out);
            tiles(team, self.out.shape(), |tile| vectorise(ExpandTile { codes, absmax, out, tile }));
        });
    }
}

struct ExpandTile<E> {
    codes: Matrix<u32>,
    absmax: Matrix<f32>,
    out: Matrix<E>,
    /// Begins with a block.
    tile: Tile,
}

impl<E: Element> Vectorised for ExpandTile<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Tile { rows, cols } = self.tile;
        debug_assert!(cols.start.is_multiple_of(NF4_BLOCK));
        // SAFETY: the table has as many numbers as a vector.
        let codes = unsafe { s.load(NF4_CODES.as_ptr()) };
        for row in rows {
            for first in cols.clone().step_by(NF4_BLOCK) {
                // SAFETY: every block has a factor, and nobody writes it.
                let scaled = s.mul(codes, s.splat(unsafe { self.absmax.at(row, first / NF4_BLOCK).read() }));
                let end = cols.end.min(first + NF4_BLOCK);
                for col in (first..end).step_by(LANES) {
                    let count = LANES.min(end - col);
                    let word = |i: usize| match count > i * NF4_PER_WORD {
                        // SAFETY: the row has a word for each eight codes, and nobody writes it.
                        true => unsafe { self.codes.at(row, col / NF4_PER_WORD + i).read() },
                        false => 0,
                    };
                    let nibbles = u64::from(word(0)) | u64::from(word(1)) << 32;
                    // SAFETY: tiles are disjoint, so only this task writes here.
                    unsafe { store(s, self.out.at(row, col), s.choose(scaled, nibbles), count) };
                }
            }
        }
    }
}
