//! Attention's products by AMX tiles: bf16 multiplied, f32 sums. Weights and their gradients are rounded to bf16.
//!
//! A multiplication computes 32 × 32 sums in four tiles, 32 summands a step. Every operand is packed so that sixteen
//! rows of sixteen words, a pair of bf16 each, lie where one tile load finds them: a left operand's words run along the
//! summands, a right one's pair two rows.
//!
//! A tile load waits for sixteen lines, so each step fetches the next one's operands into the first cache, as products do, and
//! a product's result is read one product later.

use std::arch::asm;

use half::bf16;

use super::super::math::power_of_two;
use super::super::product::amx::{configure_tiles, release_tiles};
use super::super::simd::{LANES, Simd, Vectorised, vectorise_avx512};
use super::level::{Level, Scored, TileRun};
use super::pack::Rows;
use super::{Shape, TILE};

/// Rows and columns of sums, and summands of a step.
const SQUARE: usize = 32;
/// Words of a step's summands.
const STEP_WORDS: usize = SQUARE / 2;
const WORD_BYTES: usize = 4;
/// From one row of scores, or of words across a tile of queries, to the next.
const TILE_BYTES: usize = WORD_BYTES * TILE;

pub(super) struct Tiles;

impl Level<bf16> for Tiles {
    const WORD: usize = 2;
    const KEYS: usize = SQUARE;
    const WIDTH: usize = SQUARE;
    const ROWS_ARE_COLUMNS: bool = false;
    const DELAY: usize = 1;
    const LOG_E: f32 = std::f32::consts::LOG2_E;

    fn vectorise<W: Vectorised>(work: W) -> W::Output {
        vectorise_avx512(work)
    }

    #[inline(always)]
    fn power<S: Simd>(s: S, x: S::Vector) -> S::Vector {
        power_of_two(s, x)
    }

    unsafe fn begin() {
        // SAFETY: the level is used where the process may use tiles.
        unsafe { configure_tiles() };
    }

    unsafe fn end() {
        // SAFETY: follows `begin`.
        unsafe { release_tiles() };
    }

    #[inline(always)]
    unsafe fn along<S: Simd>(s: S, rows: &Rows<bf16>, row: usize, vector: usize) -> S::Vector {
        let col = vector * SQUARE;
        // SAFETY: the caller's promise.
        unsafe { s.join_upper_halves(rows.load(s, row, col), rows.load(s, row, col + LANES)) }
    }

    #[inline(always)]
    unsafe fn down<S: Simd>(s: S, rows: &Rows<bf16>, word: usize, col: usize) -> S::Vector {
        // SAFETY: the caller's promise.
        unsafe { s.pair_upper_halves(rows.load(s, 2 * word, col), rows.load(s, 2 * word + 1, col)) }
    }

    /// For each 32 keys, [W, 32].
    #[inline(always)]
    unsafe fn pack_columns<S: Simd>(s: S, rows: &Rows<bf16>, count: usize, width: usize, to: *mut f32) {
        for block in 0..count / SQUARE {
            for col in (0..width).step_by(LANES) {
                // SAFETY: whole squares of the caller's rows and memory.
                unsafe {
                    let mut square = [s.splat(0.0); LANES];
                    for (i, words) in square.iter_mut().enumerate() {
                        *words = Self::down(s, rows, block * STEP_WORDS + i, col);
                    }
                    for (i, words) in s.transpose(square).into_iter().enumerate() {
                        s.store(to.add((block * width + col + i) * STEP_WORDS), words);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store_left<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, to: *mut f32) {
        for (i, [first, second]) in rows.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { s.store(to.add((row + i) * STEP_WORDS), s.join_nearest_bf16(first, second)) };
        }
    }

    #[inline(always)]
    unsafe fn store_right<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, to: *mut f32) {
        let [upper, lower] = join_rows(s, rows);
        for (v, words) in s.interleave_halves(upper, lower).into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { s.store(to.add(row / 2 * TILE + v * LANES), words) };
        }
    }

    #[inline(always)]
    unsafe fn store_both<S: Simd>(s: S, rows: [[S::Vector; 2]; 2], row: usize, left: *mut f32, right: *mut f32) {
        let [upper, lower] = join_rows(s, rows);
        // SAFETY of all: the caller's promise.
        for (i, words) in [upper, lower].into_iter().enumerate() {
            // SAFETY: above.
            unsafe { s.store(left.add((row + i) * STEP_WORDS), words) };
        }
        for (v, words) in s.interleave_halves(upper, lower).into_iter().enumerate() {
            // SAFETY: above.
            unsafe { s.store(right.add(row / 2 * TILE + v * LANES), words) };
        }
    }

    #[inline(always)]
    unsafe fn scores<S: Simd>(_: S, shape: &Shape, now: Scored, next: Scored, keys: usize, out: *mut f32) {
        let left_row = WORD_BYTES * shape.width / 2;
        let left = Lies { row: left_row, step: WORD_BYTES * STEP_WORDS };
        let right = Lies { row: TILE_BYTES, step: STEP_WORDS * TILE_BYTES };
        let square = |of: Scored, key: usize| Operands {
            left: of.rows.cast::<u8>().wrapping_add(key * left_row),
            right: of.queries.cast(),
        };
        for key in (0..keys).step_by(SQUARE) {
            let after = if key + SQUARE < keys { square(now, key + SQUARE) } else { square(next, 0) };
            let sums = Sums { first: out.wrapping_add(key * TILE), row: TILE_BYTES };
            // SAFETY: the caller's promise.
            unsafe { set(square(now, key), after, [left, right], shape.width / SQUARE, sums) };
        }
    }

    #[inline(always)]
    unsafe fn add_columns<S: Simd>(
        _: S,
        shape: &Shape,
        columns: *const f32,
        weights: *const f32,
        keys: usize,
        out: *mut f32,
    ) {
        let left_row = WORD_BYTES * STEP_WORDS;
        let left = Lies { row: left_row, step: shape.width * left_row };
        let right = Lies { row: TILE_BYTES, step: STEP_WORDS * TILE_BYTES };
        let square = |row: usize| Operands {
            left: columns.cast::<u8>().wrapping_add(row % shape.width * left_row),
            right: weights.cast(),
        };
        for row in (0..shape.width).step_by(SQUARE) {
            let sums = Sums { first: out.wrapping_add(row * TILE), row: TILE_BYTES };
            // SAFETY: the caller's promise.
            unsafe { add(square(row), square(row + SQUARE), [left, right], keys / SQUARE, sums) };
        }
    }

    #[inline(always)]
    unsafe fn add_rows<S: Simd>(
        _: S,
        shape: &Shape,
        weights: *const f32,
        rows: *const f32,
        tiles: TileRun,
        keys: usize,
        out: *mut f32,
    ) {
        let left_row = WORD_BYTES * STEP_WORDS;
        let left = Lies { row: left_row, step: WORD_BYTES * tiles.step };
        let right = Lies { row: WORD_BYTES * shape.width, step: WORD_BYTES * tiles.step };
        let square = |key: usize, col: usize| Operands {
            left: weights.cast::<u8>().wrapping_add(key * left_row),
            right: rows.wrapping_add(col % shape.width).cast(),
        };
        for col in (0..shape.width).step_by(SQUARE) {
            for key in (0..keys).step_by(SQUARE) {
                let last = key + SQUARE == keys;
                let after = if last { square(0, col + SQUARE) } else { square(key + SQUARE, col) };
                let sums = Sums { first: out.wrapping_add(key * shape.width + col), row: WORD_BYTES * shape.width };
                // SAFETY: the caller's promise.
                unsafe { add(square(key, col), after, [left, right], tiles.count, sums) };
            }
        }
    }
}

/// Two rows of weights, rounded. Written out, since a closure is not compiled for the vectors' level.
#[inline(always)]
fn join_rows<S: Simd>(s: S, [upper, lower]: [[S::Vector; 2]; 2]) -> [S::Vector; 2] {
    [s.join_nearest_bf16(upper[0], upper[1]), s.join_nearest_bf16(lower[0], lower[1])]
}

/// The addresses of a multiplication's operands.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Operands {
    pub left: *const u8,
    pub right: *const u8,
}

/// An operand's strides in bytes.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Lies {
    /// From one row of a tile to the next.
    pub row: usize,
    /// From one step to the next.
    pub step: usize,
}

/// 32 rows of 32 sums.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Sums {
    pub first: *mut f32,
    /// From one row to the next, in bytes.
    pub row: usize,
}

/// Fetches eight rows of the next step's left operand and four of its right one.
macro_rules! fetch {
    () => {
        concat!(fetch!(2), fetch!(2), fetch!(2), fetch!(2))
    };
    (2) => {
        "prefetcht0 [{a_next}]
         prefetcht0 [{a_next} + {a_row}]
         lea {a_next}, [{a_next} + 2*{a_row}]
         prefetcht0 [{b_next}]
         prefetcht0 [{b_next} + 64]
         add {b_next}, {b_row}
        "
    };
}

/// The address of the lower sixteen rows, sixteen rows after the first.
macro_rules! lower {
    ($to:literal, $first:literal, $row:literal) => {
        concat!("lea ", $to, ", [", $first, " + 8*", $row, "]\n", "lea ", $to, ", [", $to, " + 8*", $row, "]\n")
    };
}

/// A multiplication that begins with the given instructions.
macro_rules! multiplication {
    ($(#[$what:meta])* $name:ident, $($begin:expr),+) => {
        $(#[$what])*
        ///
        /// # Safety
        /// The tiles are configured; the left operand has 32 rows of 16 words for every step, of which there is one at least,
        /// and the right one 16 rows of 32 words. The operands `after` come next and need not be readable.
        #[inline(always)]
        pub(in crate::cpu) unsafe fn $name(
            now: Operands,
            after: Operands,
            [left, right]: [Lies; 2],
            steps: usize,
            sums: Sums,
        ) {
            assert!(steps > 0, "a multiplication without summands");
            // Thirteen general registers, which is all there are.
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    $($begin,)+
                    "2:",
                    lower!("{a_next}", "{a}", "{a_row}"),
                    "tileloadd tmm6, [{b} + {b_row}]",
                    "tileloadd tmm4, [{a} + {a_row}]",
                    "tileloadd tmm7, [{b} + {b_row} + 64]",
                    "tileloadd tmm5, [{a_next} + {a_row}]",
                    "add {a}, {a_step}",
                    "add {b}, {b_step}",
                    "cmp {steps}, 1",
                    "mov {a_next}, {a}",
                    "mov {b_next}, {b}",
                    "cmove {a_next}, {a_after}",
                    "cmove {b_next}, {b_after}",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    fetch!(),
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    fetch!(),
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    fetch!(),
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    fetch!(),
                    "dec {steps}",
                    "jnz 2b",
                    lower!("{a_next}", "{out}", "{out_row}"),
                    "tilestored [{out} + {out_row}], tmm0",
                    "tilestored [{out} + {out_row} + 64], tmm1",
                    "tilestored [{a_next} + {out_row}], tmm2",
                    "tilestored [{a_next} + {out_row} + 64], tmm3",
                    a = inout(reg) now.left => _,
                    a_row = in(reg) left.row,
                    a_step = in(reg) left.step,
                    a_next = out(reg) _,
                    a_after = in(reg) after.left,
                    b = inout(reg) now.right => _,
                    b_row = in(reg) right.row,
                    b_step = in(reg) right.step,
                    b_next = out(reg) _,
                    b_after = in(reg) after.right,
                    steps = inout(reg) steps => _,
                    out = in(reg) sums.first,
                    out_row = in(reg) sums.row,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

multiplication!(
    /// `sums = left · right`
    set,
    "tilezero tmm0",
    "tilezero tmm1",
    "tilezero tmm2",
    "tilezero tmm3"
);

multiplication!(
    /// `sums += left · right`
    add,
    lower!("{a_next}", "{out}", "{out_row}"),
    "tileloadd tmm0, [{out} + {out_row}]",
    "tileloadd tmm1, [{out} + {out_row} + 64]",
    "tileloadd tmm2, [{a_next} + {out_row}]",
    "tileloadd tmm3, [{a_next} + {out_row} + 64]"
);
