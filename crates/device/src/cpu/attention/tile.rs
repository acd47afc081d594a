//! The product that attention is made of.

use super::super::simd::{LANES, Simd};

/// Rows of a register tile. All row counts here are multiples of it.
pub(super) const ROWS: usize = 8;

/// The left operand, read one number at a time, so that it may lie either way.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub first: *const f32,
    /// From one row of the result to the next.
    pub row: usize,
    /// From one summand to the next.
    pub depth: usize,
}

/// The right operand: a row of vectors for each summand.
#[derive(Clone, Copy)]
pub(super) struct Right {
    pub first: *const f32,
    pub stride: usize,
}

/// What becomes of a finished vector of the result.
pub(super) trait Finish: Copy {
    /// # Safety
    /// `to` is a vector of the result and `row` its row.
    unsafe fn finish<S: Simd>(self, s: S, row: usize, to: *mut f32, value: S::Vector);
}

#[derive(Clone, Copy)]
pub(super) struct Set;

#[derive(Clone, Copy)]
pub(super) struct Add;

/// Multiplies what was there by a factor of its row, then adds.
#[derive(Clone, Copy)]
pub(super) struct RescaleAdd(pub *const f32);

impl Finish for Set {
    #[inline(always)]
    unsafe fn finish<S: Simd>(self, s: S, _row: usize, to: *mut f32, value: S::Vector) {
        // SAFETY: the caller's promise.
        unsafe { s.store(to, value) };
    }
}

impl Finish for Add {
    #[inline(always)]
    unsafe fn finish<S: Simd>(self, s: S, _row: usize, to: *mut f32, value: S::Vector) {
        // SAFETY: the caller's promise.
        unsafe { s.store(to, s.add(s.load(to), value)) };
    }
}

impl Finish for RescaleAdd {
    #[inline(always)]
    unsafe fn finish<S: Simd>(self, s: S, row: usize, to: *mut f32, value: S::Vector) {
        // SAFETY: the caller's promise, and a factor for every row.
        unsafe { s.store(to, s.mul_add(s.load(to), s.splat(*self.0.add(row)), value)) };
    }
}

/// `out = left · right`: `rows` × `width` from `depth` summands, as `finish` says.
///
/// # Safety
/// The operands and the result (rows `stride` apart) hold that many numbers; `rows` is a multiple of [`ROWS`] and
/// `width` of the vector's length.
#[inline(always)]
pub(super) unsafe fn product<S: Simd>(
    s: S,
    left: Left,
    right: Right,
    depth: usize,
    [rows, width]: [usize; 2],
    out: *mut f32,
    stride: usize,
    finish: impl Finish,
) {
    let mut col = 0;
    while col < width {
        // SAFETY: the panel lies in the operands by the caller's promise.
        unsafe {
            let right = Right { first: right.first.add(col), ..right };
            let out = out.add(col);
            let left_vectors = (width - col) / LANES;
            col += match left_vectors {
                1 => panel::<S, 1>(s, left, right, depth, rows, out, stride, finish),
                // Four are better cut in two pairs than in three and one.
                2 | 4 => panel::<S, 2>(s, left, right, depth, rows, out, stride, finish),
                _ => panel::<S, 3>(s, left, right, depth, rows, out, stride, finish),
            };
        }
    }
}

/// A panel of `VECTORS` vectors' width; returns that width.
#[inline(always)]
unsafe fn panel<S: Simd, const VECTORS: usize>(
    s: S,
    left: Left,
    right: Right,
    depth: usize,
    rows: usize,
    out: *mut f32,
    stride: usize,
    finish: impl Finish,
) -> usize {
    for row in (0..rows).step_by(ROWS) {
        // SAFETY: the caller's promise.
        unsafe {
            let left = Left { first: left.first.add(row * left.row), ..left };
            let sums = register_tile::<S, VECTORS>(s, left, right, depth);
            for (i, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    finish.finish(s, row + i, out.add((row + i) * stride + v * LANES), sum);
                }
            }
        }
    }
    VECTORS * LANES
}

#[inline(always)]
unsafe fn register_tile<S: Simd, const VECTORS: usize>(
    s: S,
    left: Left,
    right: Right,
    depth: usize,
) -> [[S::Vector; VECTORS]; ROWS] {
    let mut sums = [[s.splat(0.0); VECTORS]; ROWS];
    let (mut a, mut b) = (left.first, right.first);
    for _ in 0..depth {
        // SAFETY: the caller's promise.
        unsafe {
            let mut vectors = [s.splat(0.0); VECTORS];
            for (v, vector) in vectors.iter_mut().enumerate() {
                *vector = s.load(b.add(v * LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let number = s.splat(*a.add(i * left.row));
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = s.mul_add(number, vector, *sum);
                }
            }
            // Never read past the last summand, so the address may lie outside.
            a = a.wrapping_add(left.depth);
            b = b.wrapping_add(right.stride);
        }
    }
    sums
}
