//! Attention's products by fused multiply-adds of f32: for f32 everywhere, for bf16 on CPUs without AMX.

use super::super::math::exp;
use super::super::matrix::Element;
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::level::{Level, Scored, TileRun};
use super::pack::{self, Rows};
use super::{Shape, TILE};

/// Rows of a register tile. All row counts here are multiples of it.
pub(in crate::cpu) const ROWS: usize = 8;

pub(super) struct Fused;

impl<E: Element> Level<E> for Fused {
    const WORD: usize = 1;
    const KEYS: usize = ROWS;
    const WIDTH: usize = LANES;
    const ROWS_ARE_COLUMNS: bool = true;
    const DELAY: usize = 0;
    const LOG_E: f32 = 1.0;

    fn vectorise<W: Vectorised>(work: W) -> W::Output {
        vectorise(work)
    }

    #[inline(always)]
    fn power<S: Simd>(s: S, x: S::Vector) -> S::Vector {
        exp(s, x)
    }

    #[inline(always)]
    unsafe fn along<S: Simd>(s: S, rows: &Rows<E>, row: usize, vector: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { rows.load(s, row, vector * LANES) }
    }

    #[inline(always)]
    unsafe fn down<S: Simd>(s: S, rows: &Rows<E>, word: usize, col: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { rows.load(s, word, col) }
    }

    #[inline(always)]
    unsafe fn pack_columns<S: Simd>(s: S, rows: &Rows<E>, count: usize, width: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack::along::<S, E, Fused>(s, rows, count, width, to) };
    }

    #[inline(always)]
    unsafe fn store_left<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, to: *mut f32) {
        for (i, vectors) in rows.into_iter().enumerate() {
            for (v, vector) in vectors.into_iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { s.store(to.add((row + i) * TILE + v * LANES), vector) };
            }
        }
    }

    #[inline(always)]
    unsafe fn store_right<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { <Fused as Level<E>>::store_left(s, rows, row, to) };
    }

    #[inline(always)]
    unsafe fn store_both<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, left: *mut f32, right: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            <Fused as Level<E>>::store_left(s, rows, row, left);
            <Fused as Level<E>>::store_right(s, rows, row, right);
        }
    }

    #[inline(always)]
    unsafe fn scores<S: Simd>(s: S, shape: &Shape, now: Scored, _: Scored, keys: usize, out: *mut f32) {
        let left = Left { first: now.rows, row: shape.width, depth: 1 };
        let right = Right { first: now.queries, stride: TILE };
        // SAFETY: the caller's promise.
        unsafe { product::<S, false>(s, left, right, Depth::of(shape.dim), [keys, TILE], out) };
    }

    #[inline(always)]
    unsafe fn add_columns<S: Simd>(
        s: S,
        shape: &Shape,
        columns: *const f32,
        weights: *const f32,
        keys: usize,
        out: *mut f32,
    ) {
        let left = Left { first: columns, row: 1, depth: shape.width };
        let right = Right { first: weights, stride: TILE };
        // SAFETY: the caller's promise.
        unsafe { product::<S, true>(s, left, right, Depth::of(keys), [shape.width, TILE], out) };
    }

    #[inline(always)]
    unsafe fn add_rows<S: Simd>(
        s: S,
        shape: &Shape,
        weights: *const f32,
        rows: *const f32,
        tiles: TileRun,
        keys: usize,
        out: *mut f32,
    ) {
        let left = Left { first: weights, row: TILE, depth: 1 };
        let right = Right { first: rows, stride: shape.width };
        let depth = Depth { summands: TILE, tiles };
        // SAFETY: the caller's promise.
        unsafe { product::<S, true>(s, left, right, depth, [keys, shape.width], out) };
    }
}

/// The left operand, read one number at a time, so that it may lie either way.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Left {
    pub first: *const f32,
    /// From one row of the result to the next.
    pub row: usize,
    /// From one summand to the next.
    pub depth: usize,
}

/// The right operand: a row of vectors for each summand.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Right {
    pub first: *const f32,
    pub stride: usize,
}

/// The summands: some numbers of each tile.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Depth {
    summands: usize,
    tiles: TileRun,
}

impl Depth {
    #[inline(always)]
    pub fn of(summands: usize) -> Depth {
        Depth { summands, tiles: TileRun { count: 1, step: 0 } }
    }
}

/// `out = left · right`, or added to it: [rows, width], the rows following one another.
///
/// # Safety
/// The operands and the result hold that many numbers; `rows` is a multiple of [`ROWS`] and `width` of the vector's
/// length.
#[inline(always)]
unsafe fn product<S: Simd, const ADD: bool>(
    s: S,
    left: Left,
    right: Right,
    depth: Depth,
    [rows, width]: [usize; 2],
    out: *mut f32,
) {
    let mut col = 0;
    while col < width {
        // SAFETY: the panel lies in the operands by the caller's promise.
        unsafe {
            let right = Right { first: right.first.add(col), ..right };
            let out = out.add(col);
            let left_vectors = (width - col) / LANES;
            col += match left_vectors {
                1 => panel::<S, 1, ADD>(s, left, right, depth, rows, out, width),
                // Two pairs are faster than three and one.
                2 | 4 => panel::<S, 2, ADD>(s, left, right, depth, rows, out, width),
                _ => panel::<S, 3, ADD>(s, left, right, depth, rows, out, width),
            };
        }
    }
}

/// A panel of `VECTORS` vectors' width; returns that width.
#[inline(always)]
unsafe fn panel<S: Simd, const VECTORS: usize, const ADD: bool>(
    s: S,
    left: Left,
    right: Right,
    depth: Depth,
    rows: usize,
    out: *mut f32,
    stride: usize,
) -> usize {
    for row in (0..rows).step_by(ROWS) {
        // SAFETY: the caller's promise.
        unsafe {
            let left = Left { first: left.first.add(row * left.row), ..left };
            let sums = register_tile::<S, VECTORS>(s, left, right, depth);
            for (i, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let to = out.add((row + i) * stride + v * LANES);
                    s.store(to, if ADD { s.add(s.load(to), sum) } else { sum });
                }
            }
        }
    }
    VECTORS * LANES
}

/// The sums of [`ROWS`] rows and `VECTORS` vectors of columns.
///
/// # Safety
/// The operands hold those summands.
#[inline(always)]
pub(in crate::cpu) unsafe fn register_tile<S: Simd, const VECTORS: usize>(
    s: S,
    left: Left,
    right: Right,
    depth: Depth,
) -> [[S::Vector; VECTORS]; ROWS] {
    let mut sums = [[s.splat(0.0); VECTORS]; ROWS];
    for tile in 0..depth.tiles.count {
        let (mut a, mut b) = (left.first, right.first);
        a = a.wrapping_add(tile * depth.tiles.step);
        b = b.wrapping_add(tile * depth.tiles.step);
        for _ in 0..depth.summands {
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
    }
    sums
}
