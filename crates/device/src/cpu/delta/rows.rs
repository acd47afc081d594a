//! Loops between heads' rows and blocks of working memory.

use std::ops::Range;

use super::super::matrix::{Element, Matrix, matrix};
use super::super::rows::{load, store};
use super::super::simd::{LANES, Simd, Vectorised};
use super::block::Block;
use crate::Heads;
use crate::kernel::{DELTA_CHUNK, DELTA_EPSILON};

/// A number for each row of a chunk.
pub(super) type PerRow = [f32; DELTA_CHUNK];

/// Some rows of a matrix, and some of their columns.
#[derive(Clone, Copy)]
pub(super) struct Rows<E> {
    of: Matrix<E>,
    first: usize,
    pub count: usize,
    col: usize,
    pub dim: usize,
}

impl<E: Element> Rows<E> {
    /// Columns of a head's tokens.
    pub fn of_head(heads: &Heads, head: usize, tokens: Range<usize>, cols: Range<usize>) -> Rows<E> {
        let of = matrix(&heads.view);
        Rows { of, first: tokens.start, count: tokens.len(), col: head * heads.step + cols.start, dim: cols.len() }
    }

    pub fn of_matrix(of: Matrix<E>, rows: Range<usize>, cols: Range<usize>) -> Rows<E> {
        Rows { of, first: rows.start, count: rows.len(), col: cols.start, dim: cols.len() }
    }

    #[inline(always)]
    pub fn at(&self, row: usize, col: usize) -> *mut E {
        self.of.at(self.first + row, self.col + col)
    }

    /// Sixteen numbers of a row from `col` on, zeros beyond the last row and column.
    ///
    /// # Safety
    /// Nobody writes them meanwhile.
    #[inline(always)]
    pub unsafe fn load<S: Simd>(&self, s: S, row: usize, col: usize) -> S::Vector {
        if row >= self.count || col >= self.dim {
            return s.splat(0.0);
        }
        // SAFETY: the columns that are loaded lie in the row.
        unsafe { load(s, self.at(row, col).cast_const(), (self.dim - col).min(LANES)) }
    }

    /// Writes as many of the sixteen numbers as the row has from `col` on.
    ///
    /// # Safety
    /// The row and the column exist and belong to this task.
    #[inline(always)]
    pub unsafe fn store<S: Simd>(&self, s: S, row: usize, col: usize, vector: S::Vector) {
        // SAFETY: the columns that are stored lie in the row.
        unsafe { store(s, self.at(row, col), vector, (self.dim - col).min(LANES)) }
    }
}

/// `to = from`, zeros where `from` has no rows or columns.
pub(super) struct LoadRows<E> {
    pub from: Rows<E>,
    pub to: Block,
}

impl<E: Element> Vectorised for LoadRows<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.to.rows {
            for col in (0..self.to.cols).step_by(LANES) {
                // SAFETY: whole vectors of a block, and rows that nobody writes.
                unsafe { s.store(self.to.at(row, col), self.from.load(s, row, col)) };
            }
        }
    }
}

/// `to = from`, as far as `to` has rows and columns.
pub(super) struct StoreRows<E> {
    pub from: Block,
    pub to: Rows<E>,
}

impl<E: Element> Vectorised for StoreRows<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.to.count {
            for col in (0..self.to.dim).step_by(LANES) {
                // SAFETY: whole vectors of a block, and rows that are this task's.
                unsafe { self.to.store(s, row, col, s.load(self.from.at(row, col))) };
            }
        }
    }
}

/// `to = scale · from / √(Σ from² + ε)`, row by row, zeros beyond; and the roots' inverses.
pub(super) struct LoadUnits<'a, E> {
    pub from: Rows<E>,
    pub scale: f32,
    pub to: Block,
    pub inverses: &'a mut PerRow,
}

impl<E: Element> Vectorised for LoadUnits<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.to.rows {
            let mut squares = s.splat(0.0);
            for col in (0..self.to.cols).step_by(LANES) {
                // SAFETY: nobody writes these rows.
                let x = unsafe { self.from.load(s, row, col) };
                squares = s.mul_add(x, x, squares);
            }
            self.inverses[row] = 1.0 / (s.sum(squares) + DELTA_EPSILON).sqrt();
            let factor = s.splat(self.inverses[row] * self.scale);
            for col in (0..self.to.cols).step_by(LANES) {
                // SAFETY: as above, and whole vectors of a block.
                unsafe { s.store(self.to.at(row, col), s.mul(self.from.load(s, row, col), factor)) };
            }
        }
    }
}

/// The gradients of rows before [`LoadUnits`], which made `units` of them.
pub(super) struct StoreUnitGradients<'a, E> {
    pub units: Block,
    pub gradients: Block,
    pub scale: f32,
    pub inverses: &'a PerRow,
    pub to: Rows<E>,
}

impl<E: Element> Vectorised for StoreUnitGradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.to.count {
            let along = s.splat(dot(s, self.units, self.gradients, row) / self.scale);
            let (scale, inverse) = (s.splat(self.scale), s.splat(self.inverses[row]));
            for col in (0..self.to.dim).step_by(LANES) {
                // SAFETY: whole vectors of blocks, and rows that are this task's.
                unsafe {
                    let scaled = s.mul(s.load(self.gradients.at(row, col)), scale);
                    let across = s.sub(scaled, s.mul(s.load(self.units.at(row, col)), along));
                    self.to.store(s, row, col, s.mul(across, inverse));
                }
            }
        }
    }
}

/// The dot product of two blocks' rows.
#[inline(always)]
pub(super) fn dot<S: Simd>(s: S, a: Block, b: Block, row: usize) -> f32 {
    let mut sum = s.splat(0.0);
    for col in (0..a.cols).step_by(LANES) {
        // SAFETY: whole vectors of both blocks.
        unsafe { sum = s.mul_add(s.load(a.at(row, col)), s.load(b.at(row, col)), sum) };
    }
    s.sum(sum)
}

/// The dot products of two blocks' rows.
pub(super) struct RowDots {
    pub a: Block,
    pub b: Block,
}

impl Vectorised for RowDots {
    type Output = PerRow;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> PerRow {
        let mut dots = [0.0; DELTA_CHUNK];
        for (row, to) in dots[..self.a.rows].iter_mut().enumerate() {
            *to = dot(s, self.a, self.b, row);
        }
        dots
    }
}

/// The same with rows outside working memory.
pub(super) struct RowDotsWith<E> {
    pub a: Block,
    pub b: Rows<E>,
}

impl<E: Element> Vectorised for RowDotsWith<E> {
    type Output = PerRow;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> PerRow {
        let mut dots = [0.0; DELTA_CHUNK];
        for (row, to) in dots[..self.b.count].iter_mut().enumerate() {
            let mut sum = s.splat(0.0);
            for col in (0..self.a.cols).step_by(LANES) {
                // SAFETY: whole vectors of the block, and rows that nobody writes.
                unsafe { sum = s.mul_add(s.load(self.a.at(row, col)), self.b.load(s, row, col), sum) };
            }
            *to = s.sum(sum);
        }
        dots
    }
}

/// `Σ a · b` over two blocks.
pub(super) struct BlockDot {
    pub a: Block,
    pub b: Block,
}

impl Vectorised for BlockDot {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sum = 0.0;
        for row in 0..self.a.rows {
            sum += dot(s, self.a, self.b, row);
        }
        sum
    }
}

/// `to = factors · from`, row by row; `to` may be `from`.
pub(super) struct ScaleRows<'a> {
    pub from: Block,
    pub factors: &'a PerRow,
    pub to: Block,
}

impl Vectorised for ScaleRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.from.rows {
            let factor = s.splat(self.factors[row]);
            for col in (0..self.from.cols).step_by(LANES) {
                // SAFETY: whole vectors of blocks.
                unsafe { s.store(self.to.at(row, col), s.mul(s.load(self.from.at(row, col)), factor)) };
            }
        }
    }
}

/// `to += factors · from`, row by row.
pub(super) struct AddScaledRows<'a> {
    pub from: Block,
    pub factors: &'a PerRow,
    pub to: Block,
}

impl Vectorised for AddScaledRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.from.rows {
            let factor = s.splat(self.factors[row]);
            for col in (0..self.from.cols).step_by(LANES) {
                let to = self.to.at(row, col);
                // SAFETY: whole vectors of blocks.
                unsafe { s.store(to, s.mul_add(s.load(self.from.at(row, col)), factor, s.load(to))) };
            }
        }
    }
}

/// `to = from`
pub(super) struct CopyBlock {
    pub from: Block,
    pub to: Block,
}

impl Vectorised for CopyBlock {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.from.rows {
            for col in (0..self.from.cols).step_by(LANES) {
                // SAFETY: whole vectors of blocks.
                unsafe { s.store(self.to.at(row, col), s.load(self.from.at(row, col))) };
            }
        }
    }
}

/// `to = 0`
pub(super) struct Clear(pub Block);

impl Vectorised for Clear {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.0.rows {
            for col in (0..self.0.cols).step_by(LANES) {
                // SAFETY: whole vectors of a block.
                unsafe { s.store(self.0.at(row, col), s.splat(0.0)) };
            }
        }
    }
}
