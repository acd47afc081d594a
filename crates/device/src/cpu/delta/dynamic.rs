//! Convolutions with weights of each token's own. Weights of a column lie side by side, so the sums are plain loops; SiLU and its
//! derivative are vectors.

use std::ops::Range;

use super::super::activation::{activate, activate_derivative};
use super::super::matrix::{Element, Matrix, matrix, with_element};
use super::super::rows::{load, store};
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::super::{Run, Team, WorkingMemory};
use super::block::Block;
use super::convolution::{Input, ROWS_AT_ONCE, TILE_COLS, TILE_ROWS, pieces, tile_cols};
use crate::kernel::{Activation, DynamicConv, DynamicConvBackward};

impl Run for DynamicConv {
    fn run(&self, team: &mut Team) {
        let segments: Vec<Range<usize>> = self.segments.iter().collect();
        let (cols, taps) = (self.x.cols, self.taps());
        let tiles = self.x.rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLS);
        with_element!(self.x.dtype, E => {
            team.tasks(tiles, |tile, _| {
                let first = tile / cols.div_ceil(TILE_COLS) * TILE_ROWS;
                let tokens = first..self.x.rows.min(first + TILE_ROWS);
                for (segment, rows) in pieces(&segments, tokens) {
                    let input = Input::<E>::new(&self.x, self.past.as_ref(), taps, &segments, segment);
                    let sums = Sums { input, weights: matrix(&self.weights), cols: tile_cols(tile, cols) };
                    vectorise(Convolve { sums, rows, out: matrix(&self.out) });
                }
            });
            if let Some(past) = self.past {
                team.tasks(segments.len(), |segment, _| {
                    let input = Input::<E>::new(&self.x, Some(&past), taps, &segments, segment);
                    input.leave_last_rows(matrix(&past));
                });
            }
        });
    }
}

/// What SiLU is applied to, in some columns.
struct Sums<E> {
    input: Input<E>,
    weights: Matrix<E>,
    cols: Range<usize>,
}

impl<E: Element> Sums<E> {
    /// Writes a token's sums, from the first of the columns on.
    ///
    /// # Safety
    /// Nobody writes the operands.
    #[inline(always)]
    unsafe fn of(&self, token: usize, sums: &mut [f32; TILE_COLS]) {
        let sums = &mut sums[..self.cols.len()];
        sums.fill(0.0);
        for tap in 0..self.input.taps {
            let Some(row) = self.input.row(token, tap) else { continue };
            for (col, sum) in self.cols.clone().zip(sums.iter_mut()) {
                // SAFETY: the caller's promise.
                unsafe { *sum += self.weight(token, col, tap) * row.add(col).read().to_f32() };
            }
        }
    }

    /// # Safety
    /// Nobody writes the weights.
    #[inline(always)]
    unsafe fn weight(&self, token: usize, col: usize, tap: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.weights.at(token, col * self.input.taps + tap).read().to_f32() }
    }
}

struct Convolve<E> {
    sums: Sums<E>,
    rows: Range<usize>,
    out: Matrix<E>,
}

impl<E: Element> Vectorised for Convolve<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [0.0; TILE_COLS];
        let cols = self.sums.cols.clone();
        for token in self.rows.clone() {
            // SAFETY: this tile of the output is this task's; nobody writes the input.
            unsafe { self.sums.of(token, &mut sums) };
            for col in cols.clone().step_by(LANES) {
                let count = (cols.end - col).min(LANES);
                // SAFETY: as above; the sums fill whole vectors.
                unsafe {
                    let sum = s.load(sums[col - cols.start..].as_ptr());
                    store(s, self.out.at(token, col), activate(Activation::Silu, s, sum), count);
                }
            }
        }
    }
}

/// The most tokens whose sums' gradients a task holds: those of its own, and of the later ones that read them.
const MOST_READERS: usize = ROWS_AT_ONCE + 15;

impl Run for DynamicConvBackward {
    fn run(&self, team: &mut Team) {
        let segments: Vec<Range<usize>> = self.segments.iter().collect();
        let (cols, taps) = (self.x.cols, self.taps());
        let tiles = self.x.rows.div_ceil(ROWS_AT_ONCE) * cols.div_ceil(TILE_COLS);
        with_element!(self.x.dtype, E => {
            team.tasks(tiles, |tile, scratch| {
                let first = tile / cols.div_ceil(TILE_COLS) * ROWS_AT_ONCE;
                let tokens = first..self.x.rows.min(first + ROWS_AT_ONCE);
                let slopes = Block::new(scratch.floats(slopes_floats()).as_mut_ptr(), SLOPES);
                for (segment, rows) in pieces(&segments, tokens) {
                    let input = Input::<E>::new(&self.x, None, taps, &segments, segment);
                    let sums = Sums { input, weights: matrix(&self.weights), cols: tile_cols(tile, cols) };
                    let (dout, dx, dweights) = (matrix(&self.dout), matrix(&self.dx), matrix(&self.dweights));
                    vectorise(Gradients { sums, rows, slopes, dout, dx, dweights });
                }
            });
        });
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_thread(slopes_floats())
    }
}

const SLOPES: [usize; 2] = [MOST_READERS, TILE_COLS];

fn slopes_floats() -> usize {
    Block::floats(SLOPES)
}

/// A tile's gradients of some tokens of a segment.
struct Gradients<E> {
    sums: Sums<E>,
    rows: Range<usize>,
    /// The gradients of the tokens' sums and of those that read them.
    slopes: Block,
    dout: Matrix<E>,
    dx: Matrix<E>,
    dweights: Matrix<E>,
}

impl<E: Element> Vectorised for Gradients<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let input = &self.sums.input;
        let readers = self.rows.start..input.segment.end.min(self.rows.end + input.taps - 1);
        // SAFETY: this tile of the gradients is this task's; nobody writes the operands.
        unsafe {
            readers.clone().for_each(|token| self.slopes(s, token));
            for token in self.rows.clone() {
                self.inputs(token, &readers);
                self.weights(token);
            }
        }
    }
}

impl<E: Element> Gradients<E> {
    #[inline(always)]
    fn slope(&self, token: usize, col: usize) -> *mut f32 {
        self.slopes.at(token - self.rows.start, col - self.sums.cols.start)
    }

    #[inline(always)]
    unsafe fn slopes<S: Simd>(&self, s: S, token: usize) {
        let (mut sums, cols) = ([0.0; TILE_COLS], self.sums.cols.clone());
        // SAFETY: the caller's promise; the block has whole vectors.
        unsafe {
            self.sums.of(token, &mut sums);
            for col in cols.clone().step_by(LANES) {
                let sum = s.load(sums[col - cols.start..].as_ptr());
                let dout = load(s, self.dout.at(token, col).cast_const(), (cols.end - col).min(LANES));
                s.store(self.slope(token, col), s.mul(dout, activate_derivative(Activation::Silu, s, sum)));
            }
        }
    }

    #[inline(always)]
    unsafe fn inputs(&self, token: usize, readers: &Range<usize>) {
        let taps = self.sums.input.taps;
        for col in self.sums.cols.clone() {
            let mut sum = 0.0;
            for tap in (0..taps).rev() {
                let reader = token + taps - 1 - tap;
                if reader < readers.end {
                    // SAFETY: the caller's promise.
                    sum += unsafe { self.sums.weight(reader, col, tap) * self.slope(reader, col).read() };
                }
            }
            // SAFETY: the caller's promise.
            unsafe { self.dx.at(token, col).write(E::from_f32(sum)) };
        }
    }

    #[inline(always)]
    unsafe fn weights(&self, token: usize) {
        let taps = self.sums.input.taps;
        for tap in 0..taps {
            let row = self.sums.input.row(token, tap);
            for col in self.sums.cols.clone() {
                // SAFETY: the caller's promise.
                unsafe {
                    let read = row.map_or(0.0, |row| row.add(col).read().to_f32());
                    let gradient = self.slope(token, col).read() * read;
                    self.dweights.at(token, col * taps + tap).write(E::from_f32(gradient));
                }
            }
        }
    }
}
