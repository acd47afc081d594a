//! bf16 by AMX tiles: 32 rows × 32 columns of sums in four tiles, two tiles of each operand beside them.
//!
//! Rust has no stable intrinsics for tiles, so the loop over K is assembly. The tile registers hold a thread's state only
//! within a task: [`Level::begin`] configures them, [`Level::end`] gives them back so that the system need not save them.

use std::arch::asm;

use half::bf16;

use super::grid::{AHEAD_ROWS, Left, Level};

const ROWS: usize = 32;
const COLS: usize = 32;
/// Words of K in a tile.
const TILE_WORDS: usize = 16;

pub(super) struct Tiles;

impl Level for Tiles {
    type Operand = bf16;
    const ROWS: usize = ROWS;
    const COLS: usize = COLS;
    const WIDTH_STEP: usize = COLS;
    const DEPTH_STEP: usize = TILE_WORDS;
    const DEPTH_BLOCK: usize = 1024;
    const BLOCK: (usize, usize) = (128, 256);
    const LEFT_PADDED: bool = true;
    const LEFT_ACROSS: bool = false;

    unsafe fn begin() {
        // SAFETY: the configuration is 64 readable bytes, and the process may use tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &ALL_TILES, options(nostack, readonly, preserves_flags)) };
    }

    unsafe fn end() {
        // SAFETY: gives the tile registers back.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }

    unsafe fn multiply(
        left: Left,
        ahead: Left,
        right: *const u32,
        width: usize,
        depth: usize,
        sums: *mut f32,
        add: bool,
    ) {
        debug_assert!(left.rows == ROWS && width == COLS && depth.is_multiple_of(TILE_WORDS));
        // SAFETY: the tiles are configured by `begin`; the left panel has 32 rows and the right one 32 columns of `depth`
        // words, so that each step reads 16 words of them; the sums are 32 × 32.
        unsafe {
            asm!(
                "test {add}, {add}",
                "jz 4f",
                "tileloadd tmm0, [{upper} + {stride}]",
                "tileloadd tmm1, [{upper} + {stride} + 64]",
                "tileloadd tmm2, [{upper} + {stride} + 2048]",
                "tileloadd tmm3, [{upper} + {stride} + 2112]",
                "jmp 5f",
                "4:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "5:",
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloadd tmm6, [{b} + {stride}]",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm7, [{b} + {stride} + 64]",
                "tileloadd tmm5, [{a_lower} + {a_stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "prefetcht1 [{ahead}]",
                "prefetcht1 [{ahead} + {a_stride}]",
                "prefetcht1 [{ahead} + 2*{a_stride}]",
                "prefetcht1 [{ahead_last}]",
                "add {ahead}, 64",
                "add {ahead_last}, 64",
                "add {a}, 64",
                "add {a_lower}, 64",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{upper} + {stride}], tmm0",
                "tilestored [{upper} + {stride} + 64], tmm1",
                "tilestored [{upper} + {stride} + 2048], tmm2",
                "tilestored [{upper} + {stride} + 2112], tmm3",
                a = inout(reg) left.row(0) => _,
                a_lower = inout(reg) left.row(16) => _,
                a_stride = in(reg) left.row_step,
                b = inout(reg) right => _,
                ahead = inout(reg) ahead.row(0) => _,
                ahead_last = inout(reg) ahead.row(AHEAD_ROWS - 1) => _,
                steps = inout(reg) depth / TILE_WORDS => _,
                add = in(reg) add as usize,
                upper = in(reg) sums, stride = in(reg) 4 * COLS,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// What `ldtilecfg` reads.
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
