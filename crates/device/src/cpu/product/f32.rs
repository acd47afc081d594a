//! f32 by fused multiply-adds of AVX-512: 8 rows × 48 columns of sums in 24 registers.
//!
//! Eight rows and not twelve: rows a power of two apart share one set of the first cache, which has twelve ways, and the left
//! operand is read in place.

use std::arch::x86_64::*;

use super::grid::{Level, Panels};
use super::operands::Left;
use super::pack::{SQUARE, Singles};

pub(super) const ROWS: usize = 8;
pub(super) const COLS: usize = 48;

/// A level that multiplies words and adds them with one instruction, and its loop over K: of eight rows, whose words are
/// `STEP` apart, and `VECTORS` vectors of columns.
///
/// A macro with plain loops: a closure or an iterator might not be compiled for AVX-512, and would then cost a call for each
/// vector.
macro_rules! words_level {
    ($level:ident, $packing:ty, $features:literal, |$sum:ident, $a:ident, $b:ident| $multiply_add:expr) => {
        pub(super) struct $level;

        impl Level for $level {
            type Packing = $packing;
            const ROWS: usize = ROWS;
            const COLS: usize = COLS;
            const WIDTH_STEP: usize = 16;
            const DEPTH_STEP: usize = 1;
            const DEPTH_BLOCK: usize = 512;
            const BLOCK: (usize, usize) = (128, 384);
            const LEFT_PADDED: bool = false;
            const LEFT_ACROSS: bool = true;

            unsafe fn multiply(
                Panels { left, right }: Panels,
                _next: Panels,
                _ahead: Left,
                width: usize,
                depth: usize,
                sums: *mut f32,
                add: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    match (width, left.depth_step) {
                        (48, 4) => multiply::<3, 1>(left, right, depth, sums, add),
                        (32, 4) => multiply::<2, 1>(left, right, depth, sums, add),
                        (_, 4) => multiply::<1, 1>(left, right, depth, sums, add),
                        (48, _) => multiply::<3, SQUARE>(left, right, depth, sums, add),
                        (32, _) => multiply::<2, SQUARE>(left, right, depth, sums, add),
                        _ => multiply::<1, SQUARE>(left, right, depth, sums, add),
                    }
                }
            }
        }

        #[allow(clippy::needless_range_loop)]
        #[target_feature(enable = $features)]
        unsafe fn multiply<const VECTORS: usize, const STEP: usize>(
            left: Left,
            right: *const u32,
            depth: usize,
            sums: *mut f32,
            add: bool,
        ) {
            let mut total = [[_mm512_setzero_ps(); VECTORS]; ROWS];
            let mut words = [std::ptr::null::<i32>(); ROWS];
            for row in 0..ROWS {
                words[row] = left.row(row).cast();
            }
            let mut k = 0;
            while k < depth {
                // Four at a time: a neighbour on the same core leaves few slots for loop counting.
                let steps = if k + 4 <= depth { 4 } else { 1 };
                for _ in 0..steps {
                    let mut vectors = [_mm512_setzero_si512(); VECTORS];
                    for v in 0..VECTORS {
                        // SAFETY: the right panel has `depth` words of `VECTORS` vectors.
                        vectors[v] = unsafe { _mm512_loadu_si512(right.add(16 * (VECTORS * k + v)).cast()) };
                    }
                    for row in 0..ROWS {
                        // SAFETY: the left rows have `depth` words.
                        let $a = unsafe { _mm512_set1_epi32(words[row].add(STEP * k).read_unaligned()) };
                        for v in 0..VECTORS {
                            let ($sum, $b) = (total[row][v], vectors[v]);
                            total[row][v] = $multiply_add;
                        }
                    }
                    k += 1;
                }
            }
            for row in 0..ROWS {
                for v in 0..VECTORS {
                    // SAFETY: the tile has ROWS rows of COLS sums.
                    unsafe {
                        let to = sums.add(row * COLS + 16 * v);
                        let before = if add { _mm512_loadu_ps(to) } else { _mm512_setzero_ps() };
                        _mm512_storeu_ps(to, _mm512_add_ps(before, total[row][v]));
                    }
                }
            }
        }
    };
}
pub(super) use words_level;

words_level!(Fma, Singles, "avx512f", |sum, a, b| _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum));
