//! Products by panels: the loops that the AVX-512 and AMX levels share.
//!
//! Depth is K counted in 32-bit words, an f32 or two bf16 (see `pack`). The right operand is packed in panels of `COLS` columns
//! of the output, depth × columns, by the whole team; the left one is read in panels of `ROWS` rows in place, or copied first
//! if a level cannot read it so. A task computes one block of the output: for each block of depth, for each left panel, all
//! right panels of the block, which stay in the second cache.

use std::any::TypeId;
use std::ops::Range;

use super::super::matrix::Element;
use super::super::team::{Scratch, Source};
use super::super::{Team, WorkingMemory};
use super::epilogue::Epilogue;
use super::even_parts;
use super::operands::{Left, PackedTerm, SlabOperands, TermSizes, WORD_BYTES, copy_stride, padded_rows};
use super::pack::{self, Packing, SQUARE};
use crate::kernel::{Order, Product, Term};

/// Packed operands take at most this many words each; larger products are computed in slabs. Tests have small products.
const SLAB_WORDS: usize = if cfg!(test) { 1 << 14 } else { 16 << 20 };
/// How many rows of the next left panel are fetched while a panel is multiplied by one right panel.
pub(super) const AHEAD_ROWS: usize = 4;

/// How one CPU level multiplies panels.
pub(super) trait Level: 'static {
    type Packing: Packing;
    /// The tile of sums that one call computes.
    const ROWS: usize;
    const COLS: usize;
    /// A right panel is as wide as its columns, rounded up to this.
    const WIDTH_STEP: usize;
    /// Depth is filled up with zeros to a multiple of this.
    const DEPTH_STEP: usize;
    /// The depth for which the panels of a block stay in the second cache.
    const DEPTH_BLOCK: usize;
    /// Rows and columns of the output that a task computes at most: with their operands they fit the second cache.
    const BLOCK: (usize, usize);
    /// Whether left panels must have all their rows.
    const LEFT_PADDED: bool;
    /// Whether the left operand's words differ from those in memory.
    const LEFT_REPACKED: bool = false;
    /// Whether a left operand whose columns run along K may stay so, packed in squares' widths, or is turned.
    const LEFT_ACROSS: bool;
    /// Whether tiles are square and may be computed transposed, so that the larger operand is the one that is not packed.
    const TURNS: bool = false;

    /// # Safety
    /// The CPU has the level.
    unsafe fn begin() {}

    /// # Safety
    /// Follows `begin`.
    unsafe fn end() {}

    /// The product of two panels, set or added to `sums`, [ROWS, COLS]. The panels `next` come next, and rows `ahead`
    /// will be read later.
    /// # Safety
    /// Between `begin` and `end`; the panels have `depth` words, the right one `width` columns.
    unsafe fn multiply(now: Panels, next: Panels, ahead: Left, width: usize, depth: usize, sums: *mut f32, add: bool);
}

/// The operands of one call.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub left: Left,
    pub right: *const u32,
}

/// The slabs that a product is computed in, and the packed operands of its terms, by shape alone.
struct Slabs {
    rows: usize,
    cols: usize,
    first: TermSizes,
    second: Option<TermSizes>,
}

impl Slabs {
    fn of<L: Level>(product: &Product) -> Slabs {
        let [m, n, _] = product.dims();
        let depth = |term: &Product| L::Packing::words(term.dims()[2]).next_multiple_of(L::DEPTH_STEP);
        let most = SLAB_WORDS / depth(product).max(1);
        let slab = |of: usize, step: usize| of.min(most).next_multiple_of(step).max(step);
        let copies_first = must_copy_left::<L>(product);
        // A left operand in place needs one slab only.
        let rows = if copies_first { slab(m, padded_rows::<L>(1)) } else { m };
        let cols = slab(n, L::COLS);
        let sizes = |term: &Product| {
            // An operand in place is not cut in slabs of rows, so it is copied if the other one is.
            let (depth, copied) = (depth(term), copies_first || must_copy_left::<L>(term));
            let left_words = if copied { padded_rows::<L>(rows) * copy_stride(depth) } else { 0 };
            TermSizes { depth, copied, left_words, right_words: cols * depth }
        };
        Slabs { rows, cols, first: sizes(product), second: product.second().as_ref().map(sizes) }
    }

    /// The words of left and right operands.
    fn words(&self) -> [usize; 2] {
        let second = self.second.map_or([0, 0], |sizes| [sizes.left_words, sizes.right_words]);
        [self.first.left_words + second[0], self.first.right_words + second[1]]
    }
}

/// The memory that [`run_tiles`] needs for a product of a team that wants so many tasks.
pub(super) fn working_memory<L: Level>(product: &Product, least_tasks: usize) -> WorkingMemory {
    let (product, _) = as_computed::<L>(product);
    let [m, n, _] = product.dims();
    let slabs = Slabs::of::<L>(&product);
    // The last slab may be of another size, and so may its blocks.
    let sizes = |all: usize, slab: usize| [all.min(slab), all % slab].into_iter().filter(|len| *len > 0);
    let of_block = |(rows, cols)| {
        let (block_rows, block_cols) = block_size::<L>(rows, cols, least_tasks);
        sums_floats::<L>(rows.min(block_rows), cols.min(block_cols), slabs.first.depth)
    };
    let blocks = sizes(m, slabs.rows).flat_map(|rows| sizes(n, slabs.cols).map(move |cols| (rows, cols)));
    WorkingMemory::of_thread(blocks.map(of_block).max().unwrap_or(0)).with_operands(slabs.words())
}

/// The most that [`run_tiles`] needs for any of the products `of(1)` to `of(rows)`, which differ in how many rows of `a` they have.
///
/// Packed operands grow with the rows up to a slab's end and begin again smaller, so the largest of each slab are tried.
pub(super) fn most_working_memory<L: Level>(
    of: &dyn Fn(usize) -> Product,
    rows: usize,
    least_tasks: usize,
) -> WorkingMemory {
    let whole = of(rows);
    let [m, n, k] = whole.dims();
    let most_turned = (n * k).saturating_sub(1) / (n + k).max(1);
    let mut tried = vec![1, rows.saturating_sub(1).max(1), rows, rows.min(most_turned.max(1))];
    if whole.order == Order::TN {
        let depth = |rows: usize| L::Packing::words(rows).next_multiple_of(L::DEPTH_STEP);
        // The deepest operands that are computed in slabs of more rows or columns than this.
        for shorter in (0..m.max(n)).step_by(SQUARE) {
            let deepest = SLAB_WORDS / (shorter + 1);
            if depth(rows) > deepest {
                let (mut low, mut high) = (1, rows);
                while low + 1 < high {
                    let middle = (low + high) / 2;
                    if depth(middle) <= deepest { low = middle } else { high = middle }
                }
                tried.push(low);
            }
        }
    } else {
        // Blocks are as high as they become once there are tasks enough, and rows are no longer the transpose's columns.
        let highest = (L::BLOCK.0 * least_tasks).max(most_turned + 2 * L::BLOCK.0);
        tried.push(rows.min(L::ROWS - 1));
        tried.extend((L::ROWS..rows.min(highest + 1)).step_by(L::ROWS));
    }
    let needs = tried.into_iter().map(|rows| working_memory::<L>(&of(rows), least_tasks));
    needs.reduce(WorkingMemory::max).expect("some are tried")
}

/// # Safety
/// The CPU has the level.
pub(super) unsafe fn run_tiles<L: Level, O: Element>(product: &Product, epilogue: &Epilogue<O>, team: &mut Team) {
    let written = [Some(product.out), product.preactivation];
    let (product, is_turned) = as_computed::<L>(product);
    let [m, n, _] = product.dims();
    let slabs = Slabs::of::<L>(&product);
    let [left_words, right_words] = slabs.words();
    let [mut left_operand, mut right_operand] = team.take_operands();
    let (left_source, right_source) = sources::<L>(&product);
    let keeps_left = left_operand.is_of(&left_source) && left_operand.memory.has_floats(left_words);
    let keeps_right = right_operand.is_of(&right_source) && right_operand.memory.has_floats(right_words);
    let copy = left_operand.memory.floats(left_words).as_mut_ptr().cast::<u32>();
    let right = right_operand.memory.floats(right_words).as_mut_ptr().cast::<u32>();

    let TermSizes { left_words, right_words, .. } = slabs.first;
    let first = PackedTerm::new(product, slabs.first, copy, right);
    let second = product.second().zip(slabs.second).map(|(term, sizes)| {
        PackedTerm::new(term, sizes, copy.wrapping_add(left_words), right.wrapping_add(right_words))
    });
    for col in (0..n).step_by(slabs.cols) {
        let cols = col..n.min(col + slabs.cols);
        let unpacked = (!keeps_right).then_some(&first).into_iter().chain(&second);
        unpacked.for_each(|term| term.pack_right::<L>(cols.clone(), team));
        for row in (0..m).step_by(slabs.rows) {
            let rows = row..m.min(row + slabs.rows);
            if col == 0 || slabs.rows < m {
                let uncopied = (!keeps_left).then_some(&first).into_iter().chain(&second);
                uncopied.filter(|term| term.copied).for_each(|term| term.copy_left::<L>(rows.clone(), team));
            }
            let operands = |term: &PackedTerm| term.operands::<L>(rows.len());
            let (first, second) = (operands(&first), second.as_ref().map(operands));
            let slab = Slab { first, second, rows: rows.clone(), cols: cols.clone(), is_turned };
            // SAFETY: the caller's promise.
            unsafe { slab.run::<L, O>(epilogue, team) };
        }
    }
    left_operand.set_source((slabs.first.copied && slabs.rows >= m).then_some(left_source));
    right_operand.set_source((slabs.cols >= n).then_some(right_source));
    for written in written.iter().flatten() {
        left_operand.forget_if_within(written);
        right_operand.forget_if_within(written);
    }
    team.return_operands([left_operand, right_operand]);
}

fn sources<L: Level>(product: &Product) -> (Source, Source) {
    let source = |view, along| Source { view, level: TypeId::of::<L>(), along };
    (source(product.a, product.order != Order::TN), source(product.b, product.order == Order::NT))
}

/// The product, or its transpose if that leaves the larger operand where it lies; and whether it is the transpose. `out` stays.
/// Packing a number takes about as long as turning one of the result.
fn as_computed<L: Level>(product: &Product) -> (Product, bool) {
    let [m, n, k] = product.dims();
    let are_along = product.order == Order::NT && product.also.is_none_or(|term| term.order == Order::NT);
    if L::TURNS && are_along && m * n + m * k < n * k {
        let also = product.also.map(|Term { order, a, b }| Term { order, a: b, b: a });
        let turned = Product { a: product.b, b: product.a, also, ..*product };
        if !must_copy_left::<L>(&turned) {
            return (turned, true);
        }
    }
    (*product, false)
}

fn must_copy_left<L: Level>(product: &Product) -> bool {
    let [m, _, k] = product.dims();
    let row_bytes = k * product.a.dtype.size_bytes();
    let depth_padded = !row_bytes.is_multiple_of(L::DEPTH_STEP * WORD_BYTES);
    let rows_padded = L::LEFT_PADDED && m < L::ROWS;
    L::LEFT_REPACKED || depth_padded || rows_padded || product.order == Order::TN
}

/// A part of the output with packed operands.
struct Slab {
    first: SlabOperands,
    second: Option<SlabOperands>,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Whether rows and columns are the output's columns and rows.
    is_turned: bool,
}

impl Slab {
    /// # Safety
    /// The CPU has the level.
    unsafe fn run<L: Level, O: Element>(&self, epilogue: &Epilogue<O>, team: &mut Team) {
        let (block_rows, block_cols) = block_size::<L>(self.rows.len(), self.cols.len(), team.least_tasks());
        let row_blocks = self.rows.len().div_ceil(block_rows);
        let col_blocks = self.cols.len().div_ceil(block_cols);
        team.tasks(row_blocks * col_blocks, |task, scratch| {
            let (row, col) = (task % row_blocks * block_rows, task / row_blocks * block_cols);
            let rows = row..self.rows.len().min(row + block_rows);
            let cols = col..self.cols.len().min(col + block_cols);
            // SAFETY: the caller's promise; the block is this task's own.
            unsafe {
                L::begin();
                self.block::<L, O>(rows, cols, epilogue, scratch);
                L::end();
            }
        });
    }

    /// Computes a block of the slab, [rows, cols].
    /// # Safety
    /// Between `begin` and `end`, and no other thread touches the block.
    unsafe fn block<L: Level, O: Element>(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        epilogue: &Epilogue<O>,
        scratch: &mut Scratch,
    ) {
        let SlabOperands { left: all_left, right } = &self.first;
        let depth = right.depth;
        let steps = depth_steps::<L>(depth);
        let step = depth.div_ceil(steps).next_multiple_of(L::DEPTH_STEP);
        let floats = sums_floats::<L>(rows.len(), cols.len(), depth);
        let sums = scratch.floats(floats).as_mut_ptr();
        let buffers = floats / (L::ROWS * L::COLS);
        let mut pending = None;
        for index in 0..steps {
            let words = (index * step).min(depth)..((index + 1) * step).min(depth);
            let mut tile = 0;
            for row in rows.clone().step_by(L::ROWS) {
                // A panel that would have too few rows begins earlier; some of its sums are those of rows before.
                let from = if L::LEFT_PADDED { row.min(self.rows.len().saturating_sub(L::ROWS)) } else { row };
                let left = all_left.part(from, L::ROWS, words.start);
                let next_left = all_left.part(row + L::ROWS, L::ROWS, words.start);
                if L::LEFT_PADDED {
                    let panels = cols.len().div_ceil(L::COLS);
                    next_left.prefetch(panels * AHEAD_ROWS..next_left.rows, words.len());
                }
                for (panel, col) in cols.clone().step_by(L::COLS).enumerate() {
                    let count = L::COLS.min(cols.end - col);
                    let width = count.next_multiple_of(L::WIDTH_STEP);
                    let now = Panels { left, right: right.panel(col, words.start, width) };
                    let next = if col + L::COLS < cols.end {
                        Panels { left, right: right.panel(col + L::COLS, words.start, L::COLS) }
                    } else {
                        Panels { left: next_left, right: right.panel(cols.start, words.start, L::COLS) }
                    };
                    let ahead = next_left.part(panel * AHEAD_ROWS % L::ROWS, AHEAD_ROWS, 0);
                    let to = sums.wrapping_add(tile % buffers * L::ROWS * L::COLS);
                    tile += 1;
                    let sums = Sums {
                        tile: to,
                        skipped: row - from,
                        at: [self.rows.start + row, self.cols.start + col],
                        shape: [L::ROWS.min(rows.end - row), count],
                        is_turned: self.is_turned,
                    };
                    if index + 1 == steps {
                        sums.prefetch(epilogue);
                    }
                    // SAFETY: the panels have these words, and the tile is one of the scratch.
                    unsafe { L::multiply(now, next, ahead, width, words.len(), to, index > 0) };
                    if index + 1 == steps {
                        if let Some(SlabOperands { left, right }) = &self.second {
                            let left = left.part(from, L::ROWS, 0);
                            let now = Panels { left, right: right.panel(col, 0, width) };
                            // SAFETY: as above.
                            unsafe { L::multiply(now, next, ahead, width, right.depth, to, true) };
                        }
                        // A tile is finished one later, when its last sums have arrived and other multiplications wait.
                        if let Some(before) = pending.replace(sums) {
                            // SAFETY: the tile lies in the block, which is this task's.
                            unsafe { before.finish::<L, O>(epilogue) };
                        }
                    }
                }
            }
        }
        if let Some(last) = pending {
            // SAFETY: as above.
            unsafe { last.finish::<L, O>(epilogue) };
        }
    }
}

fn depth_steps<L: Level>(depth: usize) -> usize {
    depth.div_ceil(L::DEPTH_BLOCK).max(1)
}

/// The tiles that a block has in memory. With one step every tile is finished at once, and two in turns are enough.
fn sums_floats<L: Level>(rows: usize, cols: usize, depth: usize) -> usize {
    let tiles = rows.div_ceil(L::ROWS) * cols.div_ceil(L::COLS);
    L::ROWS * L::COLS * if depth_steps::<L>(depth) == 1 { 2 } else { tiles }
}

/// A tile that only lacks the epilogue.
struct Sums {
    tile: *mut f32,
    /// Rows of the tile before the first that counts.
    skipped: usize,
    /// Its first row and column in the product as computed, and the rows and columns that count.
    at: [usize; 2],
    shape: [usize; 2],
    is_turned: bool,
}

impl Sums {
    /// The row and the column of the output, and how many there are.
    fn place(&self) -> ((usize, usize), [usize; 2]) {
        let ([row, col], [rows, cols]) = (self.at, self.shape);
        if self.is_turned { ((col, row), [cols, rows]) } else { ((row, col), [rows, cols]) }
    }

    /// Prefetches the output's lines: a store that misses the cache would wait.
    fn prefetch<O: Element>(&self, epilogue: &Epilogue<O>) {
        let ((row, col), [rows, cols]) = self.place();
        pack::prefetch(&epilogue.out, row..row + rows, col..col + cols);
    }

    /// # Safety
    /// As [`Epilogue::finish`].
    unsafe fn finish<L: Level, O: Element>(&self, epilogue: &Epilogue<O>) {
        let (at, [rows, cols]) = self.place();
        let first = if self.is_turned { self.skipped } else { self.skipped * L::COLS };
        // SAFETY: the caller's promise; tiles that are turned are square.
        unsafe {
            if self.is_turned {
                pack::turn_square(self.tile.cast(), L::COLS);
            }
            epilogue.finish(self.tile.wrapping_add(first), L::COLS, at, rows, cols);
        }
    }
}

/// The block of a task: the level's, lower where there would be too few tasks.
fn block_size<L: Level>(rows: usize, cols: usize, least_tasks: usize) -> (usize, usize) {
    let mut block_rows = even_parts(rows, L::BLOCK.0, L::ROWS);
    let mut block_cols = even_parts(cols, L::BLOCK.1, L::COLS);
    while rows.div_ceil(block_rows) * cols.div_ceil(block_cols) < least_tasks {
        if block_rows >= 2 * L::ROWS.max(32) {
            block_rows = (block_rows / 2).next_multiple_of(L::ROWS);
        } else if block_cols >= 2 * L::COLS {
            block_cols = (block_cols / 2).next_multiple_of(L::COLS);
        } else {
            break;
        }
    }
    (block_rows, block_cols)
}
