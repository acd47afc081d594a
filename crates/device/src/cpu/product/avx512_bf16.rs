//! bf16 by the dot products of AVX-512: each instruction multiplies a pair of K and adds both to an f32.

use std::arch::x86_64::*;

use half::bf16;

use super::f32::{COLS, ROWS, multiply_words};
use super::grid::{Left, Level};
use super::pack::SQUARE;

pub(super) struct Pairs;

impl Level for Pairs {
    type Operand = bf16;
    const ROWS: usize = ROWS;
    const COLS: usize = COLS;
    const WIDTH_STEP: usize = 16;
    const DEPTH_STEP: usize = 1;
    const DEPTH_BLOCK: usize = 512;
    const BLOCK: (usize, usize) = (128, 384);
    const LEFT_PADDED: bool = false;
    const LEFT_ACROSS: bool = true;

    unsafe fn multiply(
        left: Left,
        _ahead: Left,
        right: *const u32,
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

multiply_words!("avx512f,avx512bf16", |sum, a, b| _mm512_dpbf16_ps(sum, pairs(a), pairs(b)));

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(words: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of which any value is valid.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}
