//! Packs heads' rows for products: padded, in order or transposed; and unpacks results.

use std::ops::Range;

use super::super::matrix::Element;
use super::super::simd::{LANES, Simd};
use super::level::Level;
use super::{HeadRows, TILE};

/// Tokens of one head.
#[derive(Clone)]
pub(super) struct Rows<E> {
    pub of: HeadRows<E>,
    pub head: usize,
    pub tokens: Range<usize>,
}

impl<E: Element> Rows<E> {
    /// Sixteen numbers of a row from `col` on, zeros beyond the head and beyond the tokens.
    ///
    /// # Safety
    /// The tokens and the head exist.
    #[inline(always)]
    pub unsafe fn load<S: Simd>(&self, s: S, row: usize, col: usize) -> S::Vector {
        if row >= self.tokens.len() || col >= self.of.dim {
            return s.splat(0.0);
        }
        let count = self.of.dim - col;
        let from = self.of.at(self.tokens.start + row, self.head);
        // SAFETY: a head has `dim` numbers.
        unsafe { if count >= LANES { E::load(s, from.add(col)) } else { E::load_partial(s, from.add(col), count) } }
    }

    /// Writes as many of the sixteen numbers as the head has from `col` on.
    ///
    /// # Safety
    /// The row and the column exist and belong to this task.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, s: S, row: usize, col: usize, vector: S::Vector) {
        let count = self.of.dim - col;
        let to = self.of.at(self.tokens.start + row, self.head);
        // SAFETY: a head has `dim` numbers.
        unsafe {
            if count >= LANES {
                E::store(s, to.add(col), vector);
            } else {
                E::store_partial(s, to.add(col), vector, count);
            }
        }
    }
}

/// `count` rows in order, [count, width]: the left operand of scores.
///
/// # Safety
/// The rows exist, but for padding, and `to` has room for them.
#[inline(always)]
pub(super) unsafe fn along<S: Simd, E: Element, L: Level<E>>(
    s: S,
    rows: &Rows<E>,
    count: usize,
    width: usize,
    to: *mut f32,
) {
    let words = width / L::WORD;
    for row in 0..count {
        for vector in 0..words / LANES {
            // SAFETY: the caller's promise.
            unsafe { s.store(to.add(row * words + vector * LANES), L::along(s, rows, row, vector)) };
        }
    }
}

/// A tile's rows as columns, [width, TILE]: the right operand of scores.
///
/// # Safety
/// As [`along`].
#[inline(always)]
pub(super) unsafe fn across<S: Simd, E: Element, L: Level<E>>(s: S, rows: &Rows<E>, width: usize, to: *mut f32) {
    for row in (0..TILE).step_by(LANES) {
        for vector in 0..width / L::WORD / LANES {
            // SAFETY: whole squares of the caller's rows and memory.
            unsafe {
                let mut square = [s.splat(0.0); LANES];
                for (i, words) in square.iter_mut().enumerate() {
                    *words = L::along(s, rows, row + i, vector);
                }
                for (i, column) in s.transpose(square).into_iter().enumerate() {
                    s.store(to.add((vector * LANES + i) * TILE + row), column);
                }
            }
        }
    }
}

/// A tile's rows in order, [TILE, width]: the right operand of sums over queries.
///
/// # Safety
/// As [`along`].
#[inline(always)]
pub(super) unsafe fn down<S: Simd, E: Element, L: Level<E>>(s: S, rows: &Rows<E>, width: usize, to: *mut f32) {
    for word in 0..TILE / L::WORD {
        for col in (0..width).step_by(LANES) {
            // SAFETY: the caller's promise.
            unsafe { s.store(to.add(word * width + col), L::down(s, rows, word, col)) };
        }
    }
}

/// `to = factor · from`, [tokens, width], rounded.
///
/// # Safety
/// The rows exist and belong to this task; `from` holds that many numbers.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, E: Element>(s: S, from: *const f32, width: usize, factor: f32, to: &Rows<E>) {
    let factor = s.splat(factor);
    for row in 0..to.tokens.len() {
        for col in (0..to.of.dim).step_by(LANES) {
            // SAFETY: the caller's promise.
            unsafe { to.store(s, row, col, s.mul(s.load(from.add(row * width + col)), factor)) };
        }
    }
}

/// `to = (factors · from)ᵀ`, rounded: `from` is [W, TILE] with a factor for each column.
///
/// # Safety
/// As [`unpack`].
#[inline(always)]
pub(super) unsafe fn unpack_columns<S: Simd, E: Element>(s: S, from: *const f32, factors: *const f32, to: &Rows<E>) {
    for row in (0..to.tokens.len()).step_by(LANES) {
        for col in (0..to.of.dim).step_by(LANES) {
            // SAFETY: whole squares of `from`, and rows that exist.
            unsafe {
                let factor = s.load(factors.add(row));
                let mut square = [s.splat(0.0); LANES];
                for (i, column) in square.iter_mut().enumerate() {
                    *column = s.mul(s.load(from.add((col + i) * TILE + row)), factor);
                }
                for (i, numbers) in s.transpose(square).into_iter().enumerate() {
                    if row + i < to.tokens.len() {
                        to.store(s, row + i, col, numbers);
                    }
                }
            }
        }
    }
}

/// `to[i] = Σ a · b` over the head of each token.
///
/// # Safety
/// The rows exist and `to` holds a number for each.
#[inline(always)]
pub(super) unsafe fn row_products<S: Simd, E: Element>(s: S, a: &Rows<E>, b: &Rows<E>, to: *mut f32) {
    for row in 0..a.tokens.len() {
        let mut sum = s.splat(0.0);
        for col in (0..a.of.dim).step_by(LANES) {
            // SAFETY: the caller's promise.
            unsafe { sum = s.mul_add(a.load(s, row, col), b.load(s, row, col), sum) };
        }
        // SAFETY: the caller's promise.
        unsafe { to.add(row).write(s.sum(sum)) };
    }
}

/// Sets `count` numbers, a multiple of a vector's.
///
/// # Safety
/// `to` holds them.
#[inline(always)]
pub(super) unsafe fn fill<S: Simd>(s: S, to: *mut f32, count: usize, value: f32) {
    for i in (0..count).step_by(LANES) {
        // SAFETY: the caller's promise.
        unsafe { s.store(to.add(i), s.splat(value)) };
    }
}
