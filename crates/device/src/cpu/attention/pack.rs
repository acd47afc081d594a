//! Copies of heads' rows where products read them best: widened, padded, in order or transposed; and the way back.

use std::ops::Range;

use super::super::matrix::Element;
use super::super::simd::{LANES, Simd};
use super::{HeadRows, TILE};
use crate::kernel::Mask;

/// # Safety
/// `from` is readable for `count` elements, or for a vector if there are more.
#[inline(always)]
unsafe fn load<S: Simd, E: Element>(s: S, from: *const E, count: usize) -> S::Vector {
    // SAFETY: the caller's promise.
    unsafe { if count >= LANES { E::load(s, from) } else { E::load_partial(s, from, count) } }
}

/// `to[i] = factor · from[tokens.start + i]`, [rows, width], zero beyond the tokens and beyond the head.
///
/// # Safety
/// The tokens exist and `to` holds `rows · width` numbers.
#[inline(always)]
pub(super) unsafe fn rows<S: Simd, E: Element>(
    s: S,
    from: HeadRows<E>,
    head: usize,
    tokens: Range<usize>,
    factor: f32,
    to: *mut f32,
    [rows, width]: [usize; 2],
) {
    let factor = s.splat(factor);
    // SAFETY of both loops: the caller's promise, and a head has `dim` numbers.
    for row in 0..tokens.len() {
        let from_row = from.at(tokens.start + row, head);
        for col in (0..width).step_by(LANES) {
            // SAFETY: above.
            unsafe {
                let x = load(s, from_row.add(col), from.dim - col);
                s.store(to.add(row * width + col), s.mul(x, factor));
            }
        }
    }
    for i in (tokens.len() * width..rows * width).step_by(LANES) {
        // SAFETY: above.
        unsafe { s.store(to.add(i), s.splat(0.0)) };
    }
}

#[derive(Clone, Copy)]
pub(super) enum Factor {
    One(f32),
    /// A number for each row.
    Each(*const f32),
}

/// `to[tokens.start + i] = factor · from[i]`, rounded.
///
/// # Safety
/// The tokens exist and belong to this task; `from` is [tokens, width].
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, E: Element>(
    s: S,
    from: *const f32,
    width: usize,
    factor: Factor,
    to: HeadRows<E>,
    head: usize,
    tokens: Range<usize>,
) {
    let one = if let Factor::One(one) = factor { one } else { 1.0 };
    for row in 0..tokens.len() {
        // SAFETY: a number for each row.
        let factor = s.splat(unsafe { if let Factor::Each(factors) = factor { *factors.add(row) } else { one } });
        let to_row = to.at(tokens.start + row, head);
        for col in (0..to.dim).step_by(LANES) {
            // SAFETY: the caller's promise, and a head has `dim` numbers.
            unsafe {
                let x = s.mul(s.load(from.add(row * width + col)), factor);
                let count = to.dim - col;
                if count >= LANES {
                    E::store(s, to_row.add(col), x);
                } else {
                    E::store_partial(s, to_row.add(col), x, count);
                }
            }
        }
    }
}

/// A tile's rows [TILE, width] as columns [width, TILE].
///
/// # Safety
/// Both hold that many numbers and do not overlap.
#[inline(always)]
pub(super) unsafe fn transposed<S: Simd>(s: S, from: *const f32, width: usize, to: *mut f32) {
    for row in (0..TILE).step_by(LANES) {
        for col in (0..width).step_by(LANES) {
            // SAFETY: whole squares of the two.
            unsafe {
                let mut square = [s.splat(0.0); LANES];
                for (i, vector) in square.iter_mut().enumerate() {
                    *vector = s.load(from.add((row + i) * width + col));
                }
                for (i, column) in s.transpose(square).into_iter().enumerate() {
                    s.store(to.add((col + i) * TILE + row), column);
                }
            }
        }
    }
}

/// `to[i] = Σ a · b` over the head of each token.
///
/// # Safety
/// The tokens exist and `to` holds a number for each.
#[inline(always)]
pub(super) unsafe fn row_products<S: Simd, E: Element>(
    s: S,
    a: HeadRows<E>,
    b: HeadRows<E>,
    head: usize,
    tokens: Range<usize>,
    to: *mut f32,
) {
    for (row, token) in tokens.enumerate() {
        let (a_row, b_row) = (a.at(token, head), b.at(token, head));
        let mut sum = s.splat(0.0);
        for col in (0..a.dim).step_by(LANES) {
            let count = a.dim - col;
            // SAFETY: a head has `dim` numbers.
            unsafe { sum = s.mul_add(load(s, a_row.add(col), count), load(s, b_row.add(col), count), sum) };
        }
        // SAFETY: the caller's promise.
        unsafe { to.add(row).write(s.sum(sum)) };
    }
}

/// The first key that each query of a tile sees, then the end of its keys: [2, TILE]. Positions are exact in f32, since
/// no segment has 2²⁴ tokens. Lanes beyond the last query see what it sees.
///
/// # Safety
/// `to` holds that many numbers.
#[inline(always)]
pub(super) unsafe fn bounds(mask: Mask, queries: &Range<usize>, len: usize, to: *mut f32) {
    for lane in 0..TILE {
        let keys = mask.keys((queries.start + lane).min(queries.end - 1), len);
        // SAFETY: the caller's promise.
        unsafe {
            to.add(lane).write(keys.start as f32);
            to.add(TILE + lane).write(keys.end as f32);
        }
    }
}
