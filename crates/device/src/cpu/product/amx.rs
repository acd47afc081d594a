//! Products by AMX tiles: 32 rows × 32 columns of sums in four tiles, two tiles of each operand beside them.
//!
//! Tiles multiply bf16 and add in f32. An f32 is the sum of three bf16, so tiles multiply f32 too, in six products of parts;
//! the three products omitted are smaller than the rounding of an f32. AVX-512 takes as long for sixteen f32 multiply-adds as
//! tiles for 256 of bf16, so six products pay.
//!
//! Rust has no stable intrinsics for tiles, so the loop over K is assembly. The tile registers hold a thread's state only
//! within a task: [`Level::begin`] configures them, [`Level::end`] gives them back so that the system need not save them.
//!
//! Each step fetches the next step's operands into the first cache. Measured without this, with tile loads that wait for
//! sixteen lines each: 60 % of the speed beside a busy neighbour on the same core, and the same speed without one.

use std::arch::asm;

use super::grid::{AHEAD_ROWS, Level, Panels};
use super::operands::Left;
use super::pack::{PARTS_WORDS, Pairs, Parts};

const ROWS: usize = 32;
const COLS: usize = 32;
/// Words of K in a tile.
const TILE_WORDS: usize = 16;

/// The four products of two left and two right tiles, each followed by instructions that run beside it.
macro_rules! four_products {
    ($beside:expr) => {
        concat!(
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            $beside,
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            $beside,
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            $beside,
            "tdpbf16ps tmm3, tmm5, tmm7\n",
            $beside,
        )
    };
}

/// Loads two left tiles, a number of bytes into their rows.
macro_rules! load_left {
    ($offset:literal) => {
        concat!(
            "tileloadd tmm4, [{a} + {a_stride} + ",
            $offset,
            "]\n",
            "tileloadd tmm5, [{a_lower} + {a_stride} + ",
            $offset,
            "]\n",
        )
    };
}

/// Loads two right tiles, a number of bytes into the step.
macro_rules! load_right {
    ($offset:literal) => {
        concat!(
            "tileloadd tmm6, [{b} + {stride} + ",
            $offset,
            "]\n",
            "tileloadd tmm7, [{b} + {stride} + ",
            $offset,
            " + 64]\n",
        )
    };
}

macro_rules! fetch_four_lines_of_right {
    () => {
        "prefetcht0 [{b_next}]
         prefetcht0 [{b_next} + 64]
         prefetcht0 [{b_next} + 128]
         prefetcht0 [{b_next} + 192]
         add {b_next}, 256
        "
    };
}

/// Fetches a line of each of two rows.
macro_rules! fetch_two_rows_of_left {
    () => {
        "prefetcht0 [{a_next}]
         prefetcht0 [{a_next} + {a_stride}]
         lea {a_next}, [{a_next} + 2*{a_stride}]
        "
    };
}

/// Fetches the three lines of a row in parts.
macro_rules! fetch_parts_of_left {
    () => {
        "prefetcht0 [{a_next}]
         prefetcht0 [{a_next} + 64]
         prefetcht0 [{a_next} + 128]
         add {a_next}, {a_stride}
        "
    };
}

/// A level whose step over K is the given assembly.
macro_rules! tiles_level {
    ($(#[$what:meta])* $level:ident, $packing:ty, $step_words:expr, $depth_block:expr, repacked: $repacked:expr, $($step:expr),+ $(,)?) => {
        $(#[$what])*
        pub(super) struct $level;

        impl Level for $level {
            type Packing = $packing;
            const ROWS: usize = ROWS;
            const COLS: usize = COLS;
            const WIDTH_STEP: usize = COLS;
            const DEPTH_STEP: usize = $step_words;
            const DEPTH_BLOCK: usize = $depth_block;
            const BLOCK: (usize, usize) = (128, 256);
            const LEFT_PADDED: bool = true;
            const LEFT_REPACKED: bool = $repacked;
            const LEFT_ACROSS: bool = false;
            const TURNS: bool = !$repacked;

            unsafe fn begin() {
                // SAFETY: the caller's promise.
                unsafe { configure_tiles() };
            }

            unsafe fn end() {
                // SAFETY: the caller's promise.
                unsafe { release_tiles() };
            }

            unsafe fn multiply(
                now: Panels,
                next: Panels,
                ahead: Left,
                width: usize,
                depth: usize,
                sums: *mut f32,
                add: bool,
            ) {
                assert!(now.left.rows == ROWS && width == COLS && depth.is_multiple_of($step_words));
                if depth == 0 {
                    // SAFETY: the sums are 32 × 32.
                    return unsafe { sums.write_bytes(0, ROWS * COLS * usize::from(!add)) };
                }
                // Thirteen general registers, which is all there are.
                // SAFETY: the tiles are configured by `begin`; the left panel has 32 rows and the right one 32 columns
                // of `depth` words, of which each step reads as many as it says; the sums are 32 × 32.
                unsafe {
                    asm!(
                        "test {a_next}, {a_next}",
                        "jz 4f",
                        "tileloadd tmm0, [{upper} + {stride}]",
                        "tileloadd tmm1, [{upper} + {stride} + 64]",
                        "tileloadd tmm2, [{upper} + {stride} + 2048]",
                        "tileloadd tmm3, [{upper} + {stride} + 2112]",
                        "jmp 2f",
                        "4:",
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        "2:",
                        "cmp {steps}, 1",
                        "lea {a_next}, [{a} + {a_step}]",
                        "cmove {a_next}, {a_after}",
                        "lea {b_next}, [{b} + {b_step}]",
                        "cmove {b_next}, {b_after}",
                        $($step,)+
                        "prefetcht1 [{ahead}]",
                        "prefetcht1 [{ahead} + {a_stride}]",
                        "prefetcht1 [{ahead} + 2*{a_stride}]",
                        "prefetcht1 [{ahead_last}]",
                        "add {ahead}, {a_step}",
                        "add {ahead_last}, {a_step}",
                        "add {a}, {a_step}",
                        "add {a_lower}, {a_step}",
                        "add {b}, {b_step}",
                        "dec {steps}",
                        "jnz 2b",
                        "tilestored [{upper} + {stride}], tmm0",
                        "tilestored [{upper} + {stride} + 64], tmm1",
                        "tilestored [{upper} + {stride} + 2048], tmm2",
                        "tilestored [{upper} + {stride} + 2112], tmm3",
                        a = inout(reg) now.left.row(0) => _,
                        a_lower = inout(reg) now.left.row(16) => _,
                        a_stride = in(reg) now.left.row_step,
                        a_step = const 4 * $step_words,
                        // Before the first step, whether to add.
                        a_next = inout(reg) add as usize => _,
                        a_after = in(reg) next.left.row(0),
                        b = inout(reg) now.right => _,
                        b_step = const 4 * COLS * $step_words,
                        b_next = out(reg) _,
                        b_after = in(reg) next.right,
                        ahead = inout(reg) ahead.row(0) => _,
                        ahead_last = inout(reg) ahead.row(AHEAD_ROWS - 1) => _,
                        steps = inout(reg) depth / $step_words => _,
                        upper = in(reg) sums,
                        stride = in(reg) 4 * COLS,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            }
        }
    };
}

tiles_level!(
    /// bf16.
    Tiles, Pairs, TILE_WORDS, 1024, repacked: false,
    load_right!(0),
    load_left!(0),
    four_products!(concat!(
        fetch_four_lines_of_right!(),
        fetch_two_rows_of_left!(),
        fetch_two_rows_of_left!(),
        fetch_four_lines_of_right!(),
        fetch_two_rows_of_left!(),
        fetch_two_rows_of_left!(),
    )),
);

tiles_level!(
    /// f32 in three parts. The parts lie 64 bytes apart in a left row, 2048 in the right panel.
    TilesOfParts, Parts, PARTS_WORDS, 16 * PARTS_WORDS, repacked: true,
    load_left!(0),
    load_right!(4096),
    four_products!(concat!(fetch_four_lines_of_right!(), fetch_parts_of_left!(), fetch_parts_of_left!())),
    load_right!(2048),
    four_products!(concat!(fetch_four_lines_of_right!(), fetch_parts_of_left!(), fetch_parts_of_left!())),
    load_right!(0),
    four_products!(concat!(fetch_four_lines_of_right!(), fetch_parts_of_left!())),
    load_left!(128),
    four_products!(concat!(fetch_four_lines_of_right!(), fetch_parts_of_left!())),
    load_left!(64),
    four_products!(concat!(fetch_four_lines_of_right!(), fetch_parts_of_left!())),
    load_right!(2048),
    four_products!(concat!(fetch_four_lines_of_right!(), fetch_parts_of_left!())),
);

/// Makes the tile registers eight tiles of 16 rows of 64 bytes.
///
/// # Safety
/// The process may use tiles.
pub(in super::super) unsafe fn configure_tiles() {
    // SAFETY: the configuration is 64 readable bytes, and the caller's promise.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &ALL_TILES, options(nostack, readonly, preserves_flags)) };
}

/// Gives the tile registers back.
///
/// # Safety
/// Follows [`configure_tiles`].
pub(in super::super) unsafe fn release_tiles() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Eight tiles of 16 rows of 64 bytes.
static ALL_TILES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};
