//! Products of small matrices in working memory, by attention's micro-kernels: AMX tiles for bf16, else fused multiply-adds of f32.

#[cfg(target_arch = "x86_64")]
use super::super::attention::amx;
use super::super::attention::fused::{Depth, Left, ROWS, Right, register_tile};
use super::super::features::{Bf16Level, bf16_level};
#[cfg(target_arch = "x86_64")]
use super::super::product::amx::{configure_tiles, release_tiles};
#[cfg(target_arch = "x86_64")]
use super::super::simd::vectorise_avx512;
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::block::{Block, Cutter};
use crate::DType;

/// How products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Fused,
    /// Operands are rounded to bf16.
    Tiles,
}

impl Level {
    pub fn of(dtype: DType) -> Level {
        Level::at(dtype, bf16_level())
    }

    /// The level for a dtype on a CPU whose products of bf16 are computed at `bf16`.
    pub fn at(dtype: DType, bf16: Bf16Level) -> Level {
        if (dtype, bf16) == (DType::Bf16, Bf16Level::AmxTiles) { Level::Tiles } else { Level::Fused }
    }

    /// The rows, columns and summands of a product come in multiples of this.
    pub fn grain(self) -> usize {
        match self {
            Level::Fused => LANES,
            Level::Tiles => 32,
        }
    }

    /// Runs work that computes products at this level.
    pub fn run(self, work: impl FnOnce()) {
        #[cfg(target_arch = "x86_64")]
        if self == Level::Tiles {
            // SAFETY: the level is used where the process may use tiles.
            unsafe { configure_tiles() };
            work();
            // SAFETY: they were configured above.
            return unsafe { release_tiles() };
        }
        work();
    }
}

/// An operand of a product: a block, or its transpose.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    block: Block,
    is_turned: bool,
}

impl From<Block> for Operand {
    fn from(block: Block) -> Operand {
        Operand { block, is_turned: false }
    }
}

/// The transpose of a block.
pub(super) fn turned(block: Block) -> Operand {
    Operand { block, is_turned: true }
}

impl Operand {
    fn rows(&self) -> usize {
        if self.is_turned { self.block.cols } else { self.block.rows }
    }

    fn cols(&self) -> usize {
        if self.is_turned { self.block.rows } else { self.block.cols }
    }
}

/// What a product need not compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Zeros {
    None,
    /// Nobody reads the result above the diagonal; rows are counted anew after as many as there are columns.
    AboveResult,
    /// The left operand is zero above the diagonal; its rows are counted anew after as many as there are summands.
    AboveLeft,
    /// The left operand is zero below the diagonal.
    BelowLeft,
}

impl Zeros {
    /// Whether a square of the result is left out.
    #[inline(always)]
    fn skips(self, row: usize, rows: usize, col: usize, cols: usize) -> bool {
        self == Zeros::AboveResult && row % cols + rows <= col
    }

    /// The summands that count for some rows.
    #[inline(always)]
    fn summands(self, row: usize, rows: usize, depth: usize) -> std::ops::Range<usize> {
        match self {
            Zeros::None | Zeros::AboveResult => 0..depth,
            Zeros::AboveLeft => 0..depth.min(row % depth + rows),
            Zeros::BelowLeft => row..depth,
        }
    }
}

/// `out = left · right + keep · out`
#[derive(Clone, Copy)]
pub(super) struct Multiply {
    pub out: Block,
    pub left: Operand,
    pub right: Operand,
    pub keep: f32,
    pub zeros: Zeros,
}

/// Memory for packed operands.
#[derive(Clone, Copy)]
pub(super) struct Packing {
    level: Level,
    left: *mut f32,
    right: *mut f32,
}

impl Packing {
    /// For products of operands of at most that many rows and columns, transposed or not.
    pub fn cut(level: Level, left: [usize; 2], right: [usize; 2], cutter: &mut Cutter) -> Packing {
        let floats = |[rows, cols]: [usize; 2]| Block::floats([rows, cols]).max(Block::floats([cols, rows]));
        let left_floats = if level == Level::Tiles { floats(left) / 2 } else { 0 };
        Packing { level, left: cutter.cut(left_floats), right: cutter.cut(floats(right)) }
    }

    /// # Safety
    /// The operands and the result are alive, have whole grains of rows and columns, and do not overlap.
    pub unsafe fn multiply(&self, product: Multiply) {
        let Multiply { out, left, right, .. } = product;
        debug_assert_eq!((left.rows(), right.cols(), left.cols()), (out.rows, out.cols, right.rows()));
        // SAFETY: the caller's promise.
        unsafe {
            match self.level {
                Level::Fused => self.multiply_fused(product),
                #[cfg(target_arch = "x86_64")]
                Level::Tiles => self.multiply_tiles(product),
                #[cfg(not(target_arch = "x86_64"))]
                Level::Tiles => unreachable!("only x86-64 has tiles"),
            }
        }
    }

    /// # Safety
    /// As [`Packing::multiply`].
    unsafe fn multiply_fused(&self, mut product: Multiply) {
        if product.right.is_turned {
            let from = product.right.block;
            let to = Block::new(self.right, [from.cols, from.rows]);
            vectorise(Turn { from, to });
            product.right = to.into();
        }
        vectorise(FusedProduct(product));
    }

    /// # Safety
    /// As [`Packing::multiply`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn multiply_tiles(&self, product: Multiply) {
        let Multiply { out, left, right, keep, zeros } = product;
        vectorise_avx512(PackLeft { from: left, to: self.left.cast() });
        vectorise_avx512(PackRight { from: right, to: self.right.cast() });
        if keep != 0.0 && keep != 1.0 {
            vectorise(Scale { block: out, factor: keep });
        }
        let depth = left.cols();
        let left_lies = amx::Lies { row: depth * 2, step: 64 };
        let right_lies = amx::Lies { row: out.cols * 4, step: out.cols * 64 };
        let operands = |row: usize, col: usize, summand: usize| amx::Operands {
            left: self.left.cast::<u8>().wrapping_add(row * left_lies.row + summand * 2),
            right: self.right.cast::<u8>().wrapping_add(summand / 2 * right_lies.row + col * 4),
        };
        for col in (0..out.cols).step_by(TILE) {
            for row in (0..out.rows).step_by(TILE) {
                if zeros.skips(row, TILE, col, out.cols) {
                    continue;
                }
                let summands = zeros.summands(row, TILE, depth);
                let now = operands(row, col, summands.start);
                let after = operands((row + TILE) % out.rows, col, 0);
                let sums = amx::Sums { first: out.at(row, col), row: out.stride * 4 };
                let (lies, steps) = ([left_lies, right_lies], summands.len() / TILE);
                // SAFETY: the operands were packed above, and the result has whole tiles.
                unsafe {
                    if keep == 0.0 {
                        amx::set(now, after, lies, steps, sums);
                    } else {
                        amx::add(now, after, lies, steps, sums);
                    }
                }
            }
        }
    }
}

/// Rows and columns of sums that AMX computes at once.
#[cfg(target_arch = "x86_64")]
const TILE: usize = 32;

struct FusedProduct(Multiply);

impl Vectorised for FusedProduct {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.0.out.cols;
        let mut col = 0;
        while col < cols {
            // Two pairs are faster than three and one.
            col += match (cols - col) / LANES {
                1 => self.panel::<S, 1>(s, col),
                2 | 4 => self.panel::<S, 2>(s, col),
                _ => self.panel::<S, 3>(s, col),
            };
        }
    }
}

impl FusedProduct {
    /// Computes `VECTORS` vectors' columns; returns how many those are.
    #[inline(always)]
    fn panel<S: Simd, const VECTORS: usize>(&self, s: S, col: usize) -> usize {
        let Multiply { out, left, right, keep, zeros } = self.0;
        let from = left.block;
        let (row_step, depth_step) = if left.is_turned { (1, from.stride) } else { (from.stride, 1) };
        for row in (0..out.rows).step_by(ROWS) {
            if zeros.skips(row, ROWS, col, out.cols) {
                continue;
            }
            let summands = zeros.summands(row, ROWS, left.cols());
            let first = from.first.wrapping_add(row * row_step + summands.start * depth_step);
            let of_rows = Left { first, row: row_step, depth: depth_step };
            let of_cols = Right { first: right.block.at(summands.start, col), stride: right.block.stride };
            // SAFETY: the summands lie in both operands, and the columns in the result.
            unsafe {
                let sums = register_tile::<S, VECTORS>(s, of_rows, of_cols, Depth::of(summands.len()));
                for (i, sums) in sums.into_iter().enumerate() {
                    for (v, sum) in sums.into_iter().enumerate() {
                        let to = out.at(row + i, col + v * LANES);
                        s.store(to, if keep == 0.0 { sum } else { s.mul_add(s.splat(keep), s.load(to), sum) });
                    }
                }
            }
        }
        VECTORS * LANES
    }
}

/// `to = fromᵀ`
struct Turn {
    from: Block,
    to: Block,
}

impl Vectorised for Turn {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in (0..self.from.rows).step_by(LANES) {
            for col in (0..self.from.cols).step_by(LANES) {
                // SAFETY: whole squares of both blocks.
                unsafe {
                    let mut square = [s.splat(0.0); LANES];
                    for (i, vector) in square.iter_mut().enumerate() {
                        *vector = s.load(self.from.at(row + i, col));
                    }
                    for (i, vector) in s.transpose(square).into_iter().enumerate() {
                        s.store(self.to.at(col + i, row), vector);
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
struct Scale {
    block: Block,
    factor: f32,
}

#[cfg(target_arch = "x86_64")]
impl Vectorised for Scale {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let factor = s.splat(self.factor);
        for row in 0..self.block.rows {
            for col in (0..self.block.cols).step_by(LANES) {
                let at = self.block.at(row, col);
                // SAFETY: whole vectors of the block.
                unsafe { s.store(at, s.mul(s.load(at), factor)) };
            }
        }
    }
}

/// A left operand for tiles: rows of bf16, [rows, summands].
#[cfg(target_arch = "x86_64")]
struct PackLeft {
    from: Operand,
    to: *mut f32,
}

#[cfg(target_arch = "x86_64")]
impl Vectorised for PackLeft {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Operand { block, is_turned } = self.from;
        let words = self.from.cols() / 2;
        for word in (0..words).step_by(LANES) {
            for row in (0..self.from.rows()).step_by(LANES) {
                // SAFETY: whole squares of words of the operand and of its packed memory.
                unsafe {
                    let square =
                        if is_turned { s.transpose(down(s, block, word, row)) } else { along(s, block, row, word) };
                    for (i, vector) in square.into_iter().enumerate() {
                        s.store(self.to.add((row + i) * words + word), vector);
                    }
                }
            }
        }
    }
}

/// A right operand for tiles: two rows of bf16 side by side in words, [summands / 2, columns].
#[cfg(target_arch = "x86_64")]
struct PackRight {
    from: Operand,
    to: *mut f32,
}

#[cfg(target_arch = "x86_64")]
impl Vectorised for PackRight {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Operand { block, is_turned } = self.from;
        let cols = self.from.cols();
        for word in (0..self.from.rows() / 2).step_by(LANES) {
            for col in (0..cols).step_by(LANES) {
                // SAFETY: as in `PackLeft`.
                unsafe {
                    let square =
                        if is_turned { s.transpose(along(s, block, col, word)) } else { down(s, block, word, col) };
                    for (i, vector) in square.into_iter().enumerate() {
                        s.store(self.to.add((word + i) * cols + col), vector);
                    }
                }
            }
        }
    }
}

/// Sixteen rows of sixteen words along them.
///
/// # Safety
/// The block has them.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn along<S: Simd>(s: S, block: Block, row: usize, word: usize) -> [S::Vector; LANES] {
    let mut square = [s.splat(0.0); LANES];
    for (i, words) in square.iter_mut().enumerate() {
        let from = block.at(row + i, 2 * word);
        // SAFETY: the caller's promise.
        *words = unsafe { s.join_nearest_bf16(s.load(from), s.load(from.add(LANES))) };
    }
    square
}

/// Sixteen rows of words that join two rows each, in sixteen columns.
///
/// # Safety
/// The block has them.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn down<S: Simd>(s: S, block: Block, word: usize, col: usize) -> [S::Vector; LANES] {
    let mut square = [s.splat(0.0); LANES];
    for (i, words) in square.iter_mut().enumerate() {
        let row = 2 * (word + i);
        // SAFETY: the caller's promise.
        *words = unsafe { s.pair_nearest_bf16(s.load(block.at(row, col)), s.load(block.at(row + 1, col))) };
    }
    square
}
