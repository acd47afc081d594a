//! Causal convolutions of each column over a few tokens, and their gradients: with u the sums that SiLU is applied to,
//! `du = dout·silu'(u)`, `dx[t] = Σ_j weight[j] · du[t + (W - 1) - j]`, `dweight[j] = Σ_t du[t] · x[t - (W - 1) + j]`.
//!
//! A task has a tile of tokens and columns. The rows of a tile may belong to several segments.

use std::ops::Range;

use super::super::activation::{activate, activate_derivative};
use super::super::matrix::{Element, Matrix, matrix, with_element};
use super::super::rows::{load, store};
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::super::{Run, Team, WorkingMemory};
use super::block::{Block, Cutter};
use crate::View;
use crate::kernel::{Activation, ShortConv, ShortConvBackward};

/// Columns of a tile.
pub(super) const TILE_COLS: usize = 512;
/// Tokens of a tile, for which the weights are packed once.
pub(super) const TILE_ROWS: usize = 64;
/// Tokens whose du is computed at once.
pub(super) const ROWS_AT_ONCE: usize = 32;
/// The gradient of the weights is gathered from at most this many blocks of tokens.
const MOST_BLOCKS: usize = 64;

/// The columns of tile number `tile % tiles(cols)`.
pub(super) fn tile_cols(tile: usize, cols: usize) -> Range<usize> {
    let first = tile % cols.div_ceil(TILE_COLS) * TILE_COLS;
    first..cols.min(first + TILE_COLS)
}

impl Run for ShortConv {
    fn run(&self, team: &mut Team) {
        let segments: Vec<Range<usize>> = self.segments.iter().collect();
        let cols = self.x.cols;
        let tiles = self.x.rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLS);
        with_element!(self.x.dtype, E => {
            team.tasks(tiles, |tile, scratch| {
                let first = tile / cols.div_ceil(TILE_COLS) * TILE_ROWS;
                let tokens = first..self.x.rows.min(first + TILE_ROWS);
                let memory = scratch.floats(taps_floats(self.weight.cols));
                let taps = pack_taps::<E>(&self.weight, tile_cols(tile, cols), memory);
                for (segment, rows) in pieces(&segments, tokens) {
                    let input = Input::<E>::new(&self.x, self.past.as_ref(), self.weight.cols, &segments, segment);
                    vectorise(Convolve { input, taps, rows, cols: tile_cols(tile, cols), out: matrix(&self.out) });
                }
            });
            if let Some(past) = self.past {
                team.tasks(segments.len(), |segment, _| {
                    let input = Input::<E>::new(&self.x, Some(&past), self.weight.cols, &segments, segment);
                    input.leave_last_rows(matrix(&past));
                });
            }
        });
    }

    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::of_thread(taps_floats(self.weight.cols))
    }
}

fn taps_floats(taps: usize) -> usize {
    Block::floats([taps, TILE_COLS])
}

/// Some columns' weights in f32, [W, columns].
fn pack_taps<E: Element>(weight: &View, cols: Range<usize>, memory: &mut [f32]) -> Block {
    let taps = Block::new(memory.as_mut_ptr(), [weight.cols, TILE_COLS]);
    let weight = matrix::<E>(weight);
    for tap in 0..weight.cols {
        for (i, col) in cols.clone().enumerate() {
            // SAFETY: nobody writes the weights, and the memory is that of the block.
            unsafe { taps.at(tap, i).write(weight.at(col, tap).read().to_f32()) };
        }
    }
    taps
}

/// The segments that have some of the tokens, by number, and which.
pub(super) fn pieces(segments: &[Range<usize>], tokens: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let first = segments.partition_point(|segment| segment.end <= tokens.start);
    let reached = segments[first..].iter().take_while(move |segment| segment.start < tokens.end);
    let start = tokens.start;
    let end = tokens.end;
    reached
        .enumerate()
        .map(move |(i, segment)| (first + i, segment.start.max(start)..segment.end.min(end)))
        .filter(|(_, piece)| !piece.is_empty())
}

/// A segment's tokens, and the rows before them.
#[derive(Clone)]
pub(super) struct Input<E> {
    x: Matrix<E>,
    /// The W - 1 rows before the segment, and the first one's number.
    past: Option<(Matrix<E>, usize)>,
    pub segment: Range<usize>,
    pub taps: usize,
}

impl<E: Element> Input<E> {
    pub fn new(x: &View, past: Option<&View>, taps: usize, segments: &[Range<usize>], segment: usize) -> Input<E> {
        let past = past.filter(|_| taps > 1).map(|past| (matrix(past), segment * (taps - 1)));
        Input { x: matrix(x), past, segment: segments[segment].clone(), taps }
    }

    /// The row that a token's tap reads, unless it is zero.
    #[inline(always)]
    pub fn row(&self, token: usize, tap: usize) -> Option<*const E> {
        let place = token - self.segment.start + tap;
        if place >= self.taps - 1 {
            return Some(self.x.at(self.segment.start + place - (self.taps - 1), 0).cast_const());
        }
        let (past, first) = self.past.as_ref()?;
        Some(past.at(first + place, 0).cast_const())
    }

    /// u of a token in some columns, `taps` being their weights from the first one of a tile on.
    ///
    /// # Safety
    /// Nobody writes these rows; the columns exist.
    #[inline(always)]
    unsafe fn sum<S: Simd>(
        &self,
        s: S,
        taps: Block,
        token: usize,
        [col, in_tile]: [usize; 2],
        count: usize,
    ) -> S::Vector {
        let mut sum = s.splat(0.0);
        for tap in 0..self.taps {
            if let Some(row) = self.row(token, tap) {
                // SAFETY: the caller's promise, and whole vectors of a block.
                unsafe { sum = s.mul_add(s.load(taps.at(tap, in_tile)), load(s, row.add(col), count), sum) };
            }
        }
        sum
    }

    /// Makes the last rows of the segment the past of its next tokens.
    pub fn leave_last_rows(&self, past: Matrix<E>) {
        let Some((_, first)) = self.past else { return };
        if self.segment.is_empty() {
            return;
        }
        for row in 0..self.taps - 1 {
            // The row that a token right behind the segment would read: of x, or of a later row of the past.
            let Some(from) = self.row(self.segment.end, row) else { return };
            // SAFETY: this segment's past is this task's, and later rows are read before they are written.
            unsafe { std::ptr::copy_nonoverlapping(from, past.at(first + row, 0), past.cols) };
        }
    }
}

/// Some columns of some tokens of a segment.
struct Convolve<E> {
    input: Input<E>,
    taps: Block,
    rows: Range<usize>,
    cols: Range<usize>,
    out: Matrix<E>,
}

impl<E: Element> Vectorised for Convolve<E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for token in self.rows.clone() {
            for col in self.cols.clone().step_by(LANES) {
                let count = (self.cols.end - col).min(LANES);
                // SAFETY: this tile of the output is this task's; nobody writes the input.
                unsafe {
                    let sum = self.input.sum(s, self.taps, token, [col, col - self.cols.start], count);
                    store(s, self.out.at(token, col), activate(Activation::Silu, s, sum), count);
                }
            }
        }
    }
}

impl Run for ShortConvBackward {
    fn run(&self, team: &mut Team) {
        let segments: Vec<Range<usize>> = self.segments.iter().collect();
        let sizes = BackwardSizes::new(self);
        let mut common = team.take_common();
        let partials = PartialSums { first: common.floats(sizes.common_floats()).as_mut_ptr(), sizes };
        with_element!(self.x.dtype, E => {
            team.tasks(sizes.blocks() * sizes.across(), |tile, scratch| {
                let block = tile / sizes.across();
                let tokens = block * sizes.height..self.x.rows.min((block + 1) * sizes.height);
                let cols = tile_cols(tile, sizes.cols);
                let memory = TileMemory::cut(&sizes, &mut Cutter::new(scratch.floats(sizes.thread_floats())));
                let sums = self.dweight.map(|_| partials.of(block));
                let tile = Tile::<E>::new(self, &segments, cols, memory, sums);
                tile.run(&segments, tokens);
            });
        });
        if let Some(dweight) = self.dweight {
            team.tasks(sizes.across(), |tile, _| partials.add_to(matrix(&dweight), tile_cols(tile, sizes.cols)));
        }
        team.return_common(common);
    }

    fn working_memory(&self) -> WorkingMemory {
        let sizes = BackwardSizes::new(self);
        WorkingMemory::of_thread(sizes.thread_floats()).max(WorkingMemory::of_team(sizes.common_floats()))
    }
}

/// The division of the work, by shape alone.
#[derive(Clone, Copy)]
struct BackwardSizes {
    rows: usize,
    cols: usize,
    taps: usize,
    /// Tokens of a block.
    height: usize,
    has_sums: bool,
}

impl BackwardSizes {
    fn new(kernel: &ShortConvBackward) -> BackwardSizes {
        let [rows, cols] = kernel.x.shape();
        let height = rows.div_ceil(MOST_BLOCKS).max(ROWS_AT_ONCE);
        BackwardSizes { rows, cols, taps: kernel.weight.cols, height, has_sums: kernel.dweight.is_some() }
    }

    fn blocks(&self) -> usize {
        self.rows.div_ceil(self.height)
    }

    fn across(&self) -> usize {
        self.cols.div_ceil(TILE_COLS)
    }

    fn thread_floats(&self) -> usize {
        Cutter::count(|cutter| TileMemory::cut(self, cutter))
    }

    /// The shape of a block's share of `dweight`.
    fn share(&self) -> [usize; 2] {
        [self.taps, self.across() * TILE_COLS]
    }

    fn common_floats(&self) -> usize {
        if self.has_sums { self.blocks() * Block::floats(self.share()) } else { 0 }
    }
}

/// Each block's share of `dweight`, [W, C].
struct PartialSums {
    first: *mut f32,
    sizes: BackwardSizes,
}

// SAFETY: tasks write disjoint tiles.
unsafe impl Sync for PartialSums {}

impl PartialSums {
    fn of(&self, block: usize) -> Block {
        let share = self.sizes.share();
        Block::new(self.first.wrapping_add(block * Block::floats(share)), share)
    }

    /// Adds the blocks' shares of some columns in order.
    fn add_to(&self, dweight: Matrix<f32>, cols: Range<usize>) {
        for col in cols {
            for tap in 0..self.sizes.taps {
                // SAFETY: the shares are complete, and these columns are this task's.
                unsafe {
                    let total: f32 = (0..self.sizes.blocks()).map(|block| self.of(block).at(tap, col).read()).sum();
                    *dweight.at(col, tap) += total;
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct TileMemory {
    /// [W, columns]
    taps: Block,
    /// [tokens at once and the W - 1 after them, columns]: du.
    slopes: Block,
}

impl TileMemory {
    fn cut(sizes: &BackwardSizes, cutter: &mut Cutter) -> TileMemory {
        let taps = cutter.block([sizes.taps, TILE_COLS]);
        TileMemory { taps, slopes: cutter.block([ROWS_AT_ONCE + sizes.taps - 1, TILE_COLS]) }
    }
}

/// A task of backward.
struct Tile<'a, E> {
    kernel: &'a ShortConvBackward,
    cols: Range<usize>,
    memory: TileMemory,
    dout: Matrix<E>,
    dx: Matrix<E>,
    /// The block's share of `dweight`, if it is wanted.
    sums: Option<Block>,
}

impl<E: Element> Tile<'_, E> {
    fn new<'a>(
        kernel: &'a ShortConvBackward,
        segments: &[Range<usize>],
        cols: Range<usize>,
        memory: TileMemory,
        sums: Option<Block>,
    ) -> Tile<'a, E> {
        debug_assert!(!segments.is_empty());
        Tile { kernel, cols, memory, dout: matrix(&kernel.dout), dx: matrix(&kernel.dx), sums }
    }

    fn run(&self, segments: &[Range<usize>], tokens: Range<usize>) {
        // SAFETY: the tile's memory is this task's.
        let taps =
            unsafe { std::slice::from_raw_parts_mut(self.memory.taps.first, taps_floats(self.kernel.weight.cols)) };
        pack_taps::<E>(&self.kernel.weight, self.cols.clone(), taps);
        if let Some(sums) = self.sums {
            for tap in 0..sums.rows {
                // SAFETY: these columns of the share are this task's.
                self.cols.clone().for_each(|col| unsafe { sums.at(tap, col).write(0.0) });
            }
        }
        for (segment, piece) in pieces(segments, tokens) {
            let input = Input::<E>::new(&self.kernel.x, None, self.kernel.weight.cols, segments, segment);
            for first in piece.clone().step_by(ROWS_AT_ONCE) {
                let rows = first..piece.end.min(first + ROWS_AT_ONCE);
                vectorise(TileGradients { tile: self, input: input.clone(), rows });
            }
        }
    }
}

/// A tile's gradients of some tokens of a segment.
struct TileGradients<'a, E> {
    tile: &'a Tile<'a, E>,
    input: Input<E>,
    rows: Range<usize>,
}

impl<E: Element> Vectorised for TileGradients<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Tile { cols, .. } = self.tile;
        // Tokens after these read them, too.
        let readers = self.rows.start..self.input.segment.end.min(self.rows.end + self.input.taps - 1);
        for col in cols.clone().step_by(LANES) {
            let count = (cols.end - col).min(LANES);
            // SAFETY: the tile of dx and of the sums is this task's; nobody writes the operands.
            unsafe {
                self.slopes(s, readers.clone(), col, count);
                self.inputs(s, readers.clone(), col, count);
                if let Some(sums) = self.tile.sums {
                    self.weights(s, sums, col, count);
                }
            }
        }
    }
}

impl<E: Element> TileGradients<'_, E> {
    #[inline(always)]
    fn slope_at(&self, token: usize, col: usize) -> *mut f32 {
        self.tile.memory.slopes.at(token - self.rows.start, col - self.tile.cols.start)
    }

    /// du.
    #[inline(always)]
    unsafe fn slopes<S: Simd>(&self, s: S, readers: Range<usize>, col: usize, count: usize) {
        let Tile { memory, dout, cols, .. } = self.tile;
        for token in readers {
            // SAFETY: the caller's promise.
            unsafe {
                let sum = self.input.sum(s, memory.taps, token, [col, col - cols.start], count);
                let slope = activate_derivative(Activation::Silu, s, sum);
                let dout = load(s, dout.at(token, col).cast_const(), count);
                s.store(self.slope_at(token, col), s.mul(dout, slope));
            }
        }
    }

    /// dx.
    #[inline(always)]
    unsafe fn inputs<S: Simd>(&self, s: S, readers: Range<usize>, col: usize, count: usize) {
        let Tile { memory, dx, cols, .. } = self.tile;
        let taps = self.input.taps;
        for token in self.rows.clone() {
            let mut sum = s.splat(0.0);
            for tap in (0..taps).rev() {
                let reader = token + taps - 1 - tap;
                if reader < readers.end {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let weight = s.load(memory.taps.at(tap, col - cols.start));
                        sum = s.mul_add(weight, s.load(self.slope_at(reader, col)), sum);
                    }
                }
            }
            // SAFETY: the caller's promise.
            unsafe { store(s, dx.at(token, col), sum, count) };
        }
    }

    /// Adds to the share of dweight.
    #[inline(always)]
    unsafe fn weights<S: Simd>(&self, s: S, sums: Block, col: usize, count: usize) {
        for tap in 0..self.input.taps {
            // SAFETY: the caller's promise; a share has whole vectors of columns.
            unsafe {
                let mut sum = s.load(sums.at(tap, col));
                for token in self.rows.clone() {
                    if let Some(row) = self.input.row(token, tap) {
                        let slope = s.load(self.slope_at(token, col));
                        sum = s.mul_add(slope, load(s, row.add(col), count), sum);
                    }
                }
                s.store(sums.at(tap, col), sum);
            }
        }
    }
}
