//! Packing operands with AVX-512.
//!
//! Both dtypes are packed as 32-bit words along K: an f32, or the two bf16 of K = 2w and 2w + 1, the order in which the tile
//! and dot-product instructions want them. Missing elements at the edges become zero.

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::super::matrix::{Element, Matrix};

/// Rows and columns of the square that is transposed in registers.
pub(super) const SQUARE: usize = 16;

/// How the elements along K become 32-bit words. Words that begin beyond the matrix are zero.
///
/// # Safety
/// Every method needs AVX-512 F, BW, DQ and VL.
pub(super) unsafe trait Packing {
    type Element: Element;

    /// The words of K elements.
    fn words(k: usize) -> usize;

    /// Sixteen words that lie along a row, from `word` on, a multiple of sixteen.
    /// # Safety
    /// `row` lies in the matrix.
    unsafe fn along(from: &Matrix<Self::Element>, row: usize, word: usize) -> __m512i;

    /// A word of each of sixteen columns from `col` on.
    /// # Safety
    /// `col` lies in the matrix.
    unsafe fn across(from: &Matrix<Self::Element>, word: usize, col: usize) -> __m512i;
}

/// Every f32 is a word.
pub(super) struct Singles;

/// Two bf16 are a word.
pub(super) struct Pairs;

/// Every f32 is the sum of three bf16, each the rounding of what the ones before leave; nothing is left after the third.
/// In each 32 elements, the sixteen words of the first parts are followed by those of the second and of the third.
pub(super) struct Parts;

/// Words of 32 elements in three parts.
pub(super) const PARTS_WORDS: usize = 3 * SQUARE;

// SAFETY: the methods are used under the features named there.
unsafe impl Packing for Singles {
    type Element = f32;

    fn words(k: usize) -> usize {
        k
    }

    #[inline(always)]
    unsafe fn along(from: &Matrix<f32>, row: usize, word: usize) -> __m512i {
        // SAFETY: the row lies in the matrix.
        unsafe { _mm512_castps_si512(load_f32(from, row, word)) }
    }

    #[inline(always)]
    unsafe fn across(from: &Matrix<f32>, word: usize, col: usize) -> __m512i {
        // SAFETY: reads nothing where there is no such row.
        unsafe { _mm512_castps_si512(load_f32(from, word, col)) }
    }
}

// SAFETY: as for `Singles`.
unsafe impl Packing for Pairs {
    type Element = bf16;

    fn words(k: usize) -> usize {
        k.div_ceil(2)
    }

    #[inline(always)]
    unsafe fn along(from: &Matrix<bf16>, row: usize, word: usize) -> __m512i {
        let left = from.cols.saturating_sub(2 * word);
        // SAFETY: the mask leaves out what is beyond the row.
        unsafe { _mm512_maskz_loadu_epi16(low_bits(left, 32), from.beyond(row, 2 * word).cast()) }
    }

    #[inline(always)]
    unsafe fn across(from: &Matrix<bf16>, word: usize, col: usize) -> __m512i {
        // SAFETY: reads nothing where there is no such row.
        unsafe {
            _mm512_or_si512(load_bf16(from, 2 * word, col), _mm512_slli_epi32::<16>(load_bf16(from, 2 * word + 1, col)))
        }
    }
}

// SAFETY: as for `Singles`.
unsafe impl Packing for Parts {
    type Element = f32;

    fn words(k: usize) -> usize {
        k.div_ceil(2 * SQUARE) * PARTS_WORDS
    }

    #[inline(always)]
    unsafe fn along(from: &Matrix<f32>, row: usize, word: usize) -> __m512i {
        let (part, col) = (word / SQUARE % 3, word / PARTS_WORDS * 2 * SQUARE);
        // SAFETY: the row lies in the matrix.
        unsafe {
            let (low, high) = (load_f32(from, row, col), load_f32(from, row, col + SQUARE));
            upper_halves(rounded(left_for_part(low, part)), rounded(left_for_part(high, part)))
        }
    }

    #[inline(always)]
    unsafe fn across(from: &Matrix<f32>, word: usize, col: usize) -> __m512i {
        let part = word / SQUARE % 3;
        let row = 2 * (word / PARTS_WORDS * SQUARE + word % SQUARE);
        // SAFETY: reads nothing where there is no such row.
        unsafe {
            let (low, high) = (load_f32(from, row, col), load_f32(from, row + 1, col));
            let (low, high) = (rounded(left_for_part(low, part)), rounded(left_for_part(high, part)));
            _mm512_or_si512(_mm512_srli_epi32::<16>(_mm512_castps_si512(low)), _mm512_castps_si512(high))
        }
    }
}

/// Sixteen elements of a row from `col` on, zeros beyond the matrix.
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn load_f32(from: &Matrix<f32>, row: usize, col: usize) -> __m512 {
    let left = if row < from.rows { from.cols.saturating_sub(col) } else { 0 };
    // SAFETY: the mask leaves out what is beyond the matrix.
    unsafe { _mm512_maskz_loadu_ps(low_bits(left, 16) as u16, from.beyond(row, col).cast()) }
}

/// As [`load_f32`], the bits in the lower halves of words.
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn load_bf16(from: &Matrix<bf16>, row: usize, col: usize) -> __m512i {
    let left = if row < from.rows { from.cols.saturating_sub(col) } else { 0 };
    // SAFETY: the mask leaves out what is beyond the matrix.
    unsafe {
        let bits = _mm256_maskz_loadu_epi16(low_bits(left, 16) as u16, from.beyond(row, col).cast());
        _mm512_cvtepu16_epi32(bits)
    }
}

/// The remainder of each element after the parts before `part`.
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn left_for_part(elements: __m512, part: usize) -> __m512 {
    let mut left = elements;
    for _ in 0..part {
        // SAFETY: the caller's promise.
        left = unsafe { _mm512_sub_ps(left, rounded(left)) };
    }
    left
}

/// Rounds to the nearest bf16. NaN stays NaN, there or in the parts that follow.
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn rounded(elements: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm512_castps_si512(elements);
        let numbers = _mm512_cmpord_ps_mask(elements, elements);
        let nearest = _mm512_mask_add_epi32(bits, numbers, bits, _mm512_set1_epi32(0x8000));
        _mm512_castsi512_ps(_mm512_and_si512(nearest, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
    }
}

/// The upper halves of sixteen words and of sixteen more, in order.
/// # Safety
/// AVX-512.
#[inline(always)]
unsafe fn upper_halves(low: __m512, high: __m512) -> __m512i {
    const ODD: [u16; 32] = {
        let mut odd = [0; 32];
        let mut i = 0;
        while i < 32 {
            odd[i] = 2 * i as u16 + 1;
            i += 1;
        }
        odd
    };
    // SAFETY: the caller's promise; the table is 64 bytes.
    unsafe {
        let odd = _mm512_loadu_si512(ODD.as_ptr().cast());
        _mm512_permutex2var_epi16(_mm512_castps_si512(low), odd, _mm512_castps_si512(high))
    }
}

/// Packs columns of the output whose operand rows run along K: rows `first..first + rows` of `from`, words `words`, to
/// `to[word][row]`, `width` words apart. `width` is a multiple of sixteen, and rows are filled up to it with zeros.
///
/// # Safety
/// AVX-512; the rows and words lie in the matrix but for the padding of the last word, `to` has `words.len() * width`
/// words.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn pack_along<P: Packing>(
    from: &Matrix<P::Element>,
    first: usize,
    rows: usize,
    words: std::ops::Range<usize>,
    to: *mut u32,
    width: usize,
) {
    for word in words.clone().step_by(SQUARE) {
        for row in (0..width).step_by(SQUARE) {
            let mut square = [_mm512_setzero_si512(); SQUARE];
            for (i, vector) in square.iter_mut().enumerate() {
                if row + i < rows {
                    // SAFETY: the row lies in the matrix.
                    *vector = unsafe { P::along(from, first + row + i, word) };
                }
            }
            let square = transposed(square);
            let count = SQUARE.min(words.end - word);
            // SAFETY: `count` packed words are left, each `width` wide.
            unsafe { store_rows(&square, to.add((word - words.start) * width + row), width, count) };
        }
    }
}

/// Packs columns of the output whose operand columns run along K: words `words` of columns `first..first + cols` of
/// `from`, laid out as by [`pack_along`].
///
/// # Safety
/// As [`pack_along`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn pack_across<P: Packing>(
    from: &Matrix<P::Element>,
    first: usize,
    cols: usize,
    words: std::ops::Range<usize>,
    to: *mut u32,
    width: usize,
) {
    // Columns past `cols` belong to the next panel or to none; a panel wider than its columns must hold zeros there.
    let mut from = *from;
    from.cols = first + cols;
    for word in words.clone() {
        for col in (0..width).step_by(SQUARE) {
            // SAFETY: the rows and columns that exist are read, and sixteen words written inside the panel.
            unsafe {
                let vector = if col < cols { P::across(&from, word, first + col) } else { _mm512_setzero_si512() };
                _mm512_storeu_si512(to.add((word - words.start) * width + col).cast(), vector);
            }
        }
    }
}

/// Copies rows along K, words `0..depth`, filled with zeros: row `first + i` of `from` to `to + i * stride`.
///
/// # Safety
/// AVX-512; `to` has `rows * stride` words, `depth` is a multiple of sixteen and at most `stride`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn copy_rows<P: Packing>(
    from: &Matrix<P::Element>,
    first: usize,
    rows: usize,
    depth: usize,
    to: *mut u32,
    stride: usize,
) {
    for i in 0..rows {
        for word in (0..depth).step_by(SQUARE) {
            // SAFETY: only what lies in the matrix is read, and sixteen words written inside the row.
            unsafe {
                let exists = first + i < from.rows;
                let vector = if exists { P::along(from, first + i, word) } else { _mm512_setzero_si512() };
                _mm512_storeu_si512(to.add(i * stride + word).cast(), vector);
            }
        }
    }
}

/// Turns columns along K into rows: column `first + i`, words `0..depth`, to `to + i * stride`.
///
/// # Safety
/// As [`copy_rows`], and `rows` is a multiple of sixteen.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn turn_columns<P: Packing>(
    from: &Matrix<P::Element>,
    first: usize,
    rows: usize,
    depth: usize,
    to: *mut u32,
    stride: usize,
) {
    for word in (0..depth).step_by(SQUARE) {
        for i in (0..rows).step_by(SQUARE) {
            let mut square = [_mm512_setzero_si512(); SQUARE];
            for (k, vector) in square.iter_mut().enumerate() {
                if first + i < from.cols {
                    // SAFETY: the columns lie in the matrix.
                    *vector = unsafe { P::across(from, word + k, first + i) };
                }
            }
            // SAFETY: sixteen rows of sixteen words inside the copy.
            unsafe { store_rows(&transposed(square), to.add(i * stride + word), stride, SQUARE) };
        }
    }
}

/// Exchanges the rows and columns of a square of words, whose side is a multiple of sixteen.
///
/// # Safety
/// AVX-512; the square is writable.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn turn_square(first: *mut u32, side: usize) {
    for i in (0..side).step_by(SQUARE) {
        for j in (0..=i).step_by(SQUARE) {
            let (lower, upper) = (first.wrapping_add(i * side + j), first.wrapping_add(j * side + i));
            // SAFETY: both lie in the square.
            unsafe {
                let (from_lower, from_upper) = (load_rows(lower, side), load_rows(upper, side));
                store_rows(&transposed(from_lower), upper, side, SQUARE);
                store_rows(&transposed(from_upper), lower, side, SQUARE);
            }
        }
    }
}

/// Prefetches a block of a matrix, whose rows are too short for the CPU to foresee what comes next.
pub(super) fn prefetch<E: Element>(of: &Matrix<E>, rows: Range<usize>, cols: Range<usize>) {
    for row in rows {
        let first = of.beyond(row, cols.start).cast::<u8>();
        prefetch_bytes::<_MM_HINT_T0>(first, cols.len() * size_of::<E>());
    }
}

/// Prefetches so many bytes that lie side by side, as far as they can be read.
pub(super) fn prefetch_bytes<const HINT: i32>(first: *const u8, bytes: usize) {
    const LINE_BYTES: usize = 64;
    for byte in (0..bytes).step_by(LINE_BYTES) {
        // SAFETY: no address is invalid for a prefetch.
        unsafe { _mm_prefetch::<HINT>(first.wrapping_add(byte).cast()) };
    }
}

/// The lowest `count` bits, or `most` of them.
#[inline(always)]
fn low_bits(count: usize, most: usize) -> u32 {
    ((1u64 << count.min(most)) - 1) as u32
}

/// # Safety
/// `to` has sixteen writable words at each of `count` multiples of `stride`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_rows(rows: &[__m512i; SQUARE], to: *mut u32, stride: usize, count: usize) {
    for (i, &row) in rows.iter().enumerate().take(count) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.add(i * stride).cast(), row) };
    }
}

/// # Safety
/// `from` has sixteen words at each of sixteen multiples of `stride`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_rows(from: *const u32, stride: usize) -> [__m512i; SQUARE] {
    let mut rows = [_mm512_setzero_si512(); SQUARE];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *row = unsafe { _mm512_loadu_si512(from.add(i * stride).cast()) };
    }
    rows
}

/// The transpose of sixteen rows of sixteen words.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(rows: [__m512i; SQUARE]) -> [__m512i; SQUARE] {
    let mut pairs = rows;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // quads[4g + c]: in lane l, column 4l + c of rows 4g..4g + 4.
    let mut quads = pairs;
    for i in 0..4 {
        let [a, b, c, d] = [pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]];
        quads[4 * i] = _mm512_unpacklo_epi64(a, c);
        quads[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
        quads[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
        quads[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    let mut columns = quads;
    for c in 0..4 {
        let [a, b, d, e] = [quads[c], quads[4 + c], quads[8 + c], quads[12 + c]];
        let low_even = _mm512_shuffle_i32x4::<0x88>(a, b);
        let low_odd = _mm512_shuffle_i32x4::<0xdd>(a, b);
        let high_even = _mm512_shuffle_i32x4::<0x88>(d, e);
        let high_odd = _mm512_shuffle_i32x4::<0xdd>(d, e);
        columns[c] = _mm512_shuffle_i32x4::<0x88>(low_even, high_even);
        columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(low_odd, high_odd);
        columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(low_even, high_even);
        columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(low_odd, high_odd);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transpose_exchanges_rows_and_columns() {
        if !is_x86_feature_detected!("avx512f") {
            return;
        }
        let rows: [[i32; 16]; 16] = std::array::from_fn(|i| std::array::from_fn(|j| (16 * i + j) as i32));
        // SAFETY: detected above; both types are sixteen times sixteen words.
        let columns = unsafe {
            let columns = transposed(std::mem::transmute::<[[i32; 16]; 16], [__m512i; 16]>(rows));
            std::mem::transmute::<[__m512i; 16], [[i32; 16]; 16]>(columns)
        };
        for (i, row) in rows.iter().enumerate() {
            for (j, &word) in row.iter().enumerate() {
                assert_eq!(columns[j][i], word);
            }
        }
    }
}
