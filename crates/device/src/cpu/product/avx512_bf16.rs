//! bf16 by the dot products of AVX-512: each instruction multiplies a pair of K and adds both to an f32.

use std::arch::x86_64::*;

use super::f32::{COLS, ROWS, words_level};
use super::grid::{Level, Panels};
use super::operands::Left;
use super::pack::{Pairs, SQUARE};

words_level!(Dots, Pairs, "avx512f,avx512bf16", |sum, a, b| _mm512_dpbf16_ps(sum, pairs(a), pairs(b)));

#[inline]
#[target_feature(enable = "avx512f")]
fn pairs(words: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of which any value is valid.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}
