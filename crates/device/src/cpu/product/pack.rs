//! Packing operands with AVX-512.
//!
//! Both dtypes are packed as 32-bit words along K: an f32, or the two bf16 of K = 2w and 2w + 1, the order in which the
//! tile and dot-product instructions want them. What is missing at the edges becomes zero.

use std::arch::x86_64::*;

use half::bf16;

use super::super::matrix::Matrix;

/// Rows and columns of the square that is transposed in registers.
pub(super) const SQUARE: usize = 16;

/// An element type whose words can be gathered from memory.
///
/// # Safety
/// Every method needs AVX-512 F, BW, DQ and VL.
pub(super) unsafe trait Words: Copy {
    /// Elements in a word.
    const PER_WORD: usize;

    /// Sixteen words that lie along a row, from its element `col` on.
    /// # Safety
    /// `row` and `col` lie in the matrix.
    unsafe fn along(from: &Matrix<Self>, row: usize, col: usize) -> __m512i;

    /// A word of each of sixteen columns from `col` on: the elements of rows `PER_WORD * word` and following.
    /// # Safety
    /// The first of the rows and `col` lie in the matrix.
    unsafe fn across(from: &Matrix<Self>, word: usize, col: usize) -> __m512i;
}

// SAFETY: the methods are used under the features named there.
unsafe impl Words for f32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    unsafe fn along(from: &Matrix<f32>, row: usize, col: usize) -> __m512i {
        // SAFETY: the mask leaves out what is beyond the row.
        unsafe { _mm512_maskz_loadu_epi32(low_bits(from.cols - col, 16) as u16, from.at(row, col).cast()) }
    }

    #[inline(always)]
    unsafe fn across(from: &Matrix<f32>, word: usize, col: usize) -> __m512i {
        // SAFETY: a row of the matrix.
        unsafe { Self::along(from, word, col) }
    }
}

// SAFETY: as for f32.
unsafe impl Words for bf16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn along(from: &Matrix<bf16>, row: usize, col: usize) -> __m512i {
        // SAFETY: the mask leaves out what is beyond the row.
        unsafe { _mm512_maskz_loadu_epi16(low_bits(from.cols - col, 32), from.at(row, col).cast()) }
    }

    #[inline(always)]
    unsafe fn across(from: &Matrix<bf16>, word: usize, col: usize) -> __m512i {
        let mask = low_bits(from.cols - col, 16) as u16;
        // SAFETY: the mask leaves out what is beyond the row, and a second row is read only if there is one.
        unsafe {
            let low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.at(2 * word, col).cast()));
            if 2 * word + 1 == from.rows {
                return low;
            }
            let high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.at(2 * word + 1, col).cast()));
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
        }
    }
}

/// Packs columns of the output whose operand rows run along K: rows `first..first + rows` of `from`, words `words`, to
/// `to[word][row]`, `width` words apart. `width` is a multiple of sixteen, and rows are filled up to it with zeros.
///
/// # Safety
/// AVX-512; the rows and words lie in the matrix but for the padding of the last word, `to` has `words.len() * width`
/// words.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn pack_along<E: Words>(
    from: &Matrix<E>,
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
                if row + i < rows && word * E::PER_WORD < from.cols {
                    // SAFETY: inside the matrix.
                    *vector = unsafe { E::along(from, first + row + i, word * E::PER_WORD) };
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
pub(super) unsafe fn pack_across<E: Words>(
    from: &Matrix<E>,
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
                let exists = col < cols && word * E::PER_WORD < from.rows;
                let vector = if exists { E::across(&from, word, first + col) } else { _mm512_setzero_si512() };
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
pub(super) unsafe fn copy_rows<E: Words>(
    from: &Matrix<E>,
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
                let exists = first + i < from.rows && word * E::PER_WORD < from.cols;
                let vector =
                    if exists { E::along(from, first + i, word * E::PER_WORD) } else { _mm512_setzero_si512() };
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
pub(super) unsafe fn turn_columns<E: Words>(
    from: &Matrix<E>,
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
                if first + i < from.cols && (word + k) * E::PER_WORD < from.rows {
                    // SAFETY: inside the matrix.
                    *vector = unsafe { E::across(from, word + k, first + i) };
                }
            }
            // SAFETY: sixteen rows of sixteen words inside the copy.
            unsafe { store_rows(&transposed(square), to.add(i * stride + word), stride, SQUARE) };
        }
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
    if count == SQUARE {
        for (i, &row) in rows.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_si512(to.add(i * stride).cast(), row) };
        }
    } else {
        for (i, &row) in rows.iter().enumerate().take(count) {
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_si512(to.add(i * stride).cast(), row) };
        }
    }
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
