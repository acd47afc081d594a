//! bf16 by AMX tiles: 32 rows × 32 columns of sums in four tiles, two tiles of each operand beside them.
//!
//! Rust has no stable intrinsics for tiles, so the loop over K is assembly. The tile registers hold a thread's state only
//! within a task: [`Level::begin`] configures them, [`Level::end`] gives them back so that the system need not save them.

use std::arch::asm;

use half::bf16;

use super::grid::{Left, Level};

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
    const DEPTH_BLOCK: usize = 512;
    const BLOCK: (usize, usize) = (128, 256);
    const LEFT_ACROSS: bool = false;
    const LEFT_PADDED: bool = true;

    unsafe fn begin() {
        // SAFETY: the configuration is 64 readable bytes, and the process may use tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &ALL_TILES, options(nostack, readonly, preserves_flags)) };
    }

    unsafe fn end() {
        // SAFETY: gives the tile registers back.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }

    unsafe fn multiply(left: Left, right: *const u32, width: usize, depth: usize, sums: *mut f32, add: bool) {
        debug_assert!(left.rows == ROWS && left.depth_step == 4 && width == COLS && depth.is_multiple_of(TILE_WORDS));
        // SAFETY: the tiles are configured by `begin`; the left panel has 32 rows and the right one 32 columns of `depth`
        // words, so that each step reads 16 words of them; the sums are 32 × 32.
        unsafe {
            let lower = sums.add(16 * COLS);
            if add {
                asm!(
                    "tileloadd tmm0, [{upper} + {stride}]",
                    "tileloadd tmm1, [{upper} + {stride} + 64]",
                    "tileloadd tmm2, [{lower} + {stride}]",
                    "tileloadd tmm3, [{lower} + {stride} + 64]",
                    upper = in(reg) sums, lower = in(reg) lower, stride = in(reg) 4 * COLS,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, readonly, preserves_flags),
                );
            } else {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack, nomem, preserves_flags),
                );
            }
            asm!(
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloadd tmm6, [{b} + {b_stride}]",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm7, [{b} + {b_stride} + 64]",
                "tileloadd tmm5, [{a_lower} + {a_stride}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 64",
                "add {a_lower}, 64",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{upper} + {stride}], tmm0",
                "tilestored [{upper} + {stride} + 64], tmm1",
                "tilestored [{lower} + {stride}], tmm2",
                "tilestored [{lower} + {stride} + 64], tmm3",
                a = inout(reg) left.row(0) => _,
                a_lower = inout(reg) left.row(16) => _,
                a_stride = in(reg) left.row_step,
                b = inout(reg) right => _,
                b_stride = in(reg) 4 * COLS,
                steps = inout(reg) depth / TILE_WORDS => _,
                upper = in(reg) sums, lower = in(reg) lower, stride = in(reg) 4 * COLS,
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
