//! The operands of a product as panels: the left one's rows where they lie or copied, the right one packed.

use std::arch::x86_64::_MM_HINT_T1;
use std::ops::Range;

use super::super::Team;
use super::super::matrix::matrix;
use super::grid::Level;
use super::pack::{self, Packing, SQUARE};
use crate::kernel::{Order, Product};

pub(super) const WORD_BYTES: usize = 4;
/// Words that a packing task reads of each column.
const PACK_DEPTH: usize = 256;
/// Panels of rows across that a task packs, and words of each at a time.
const PACK_PANELS: usize = 8;
const PACK_WORDS: usize = 4;

/// Rows of the left operand: `row_step` bytes apart, their words `depth_step` bytes.
#[derive(Clone, Copy)]
pub(super) struct Left {
    first: *const u8,
    pub rows: usize,
    pub row_step: usize,
    pub depth_step: usize,
    /// From one sixteen rows to the next.
    square_step: usize,
}

// SAFETY: a description, as `Matrix` is.
unsafe impl Send for Left {}
// SAFETY: as above.
unsafe impl Sync for Left {}

impl Left {
    /// Rows along K, where they lie or as `copy_left` laid them out.
    fn along(first: *const u8, rows: usize, row_step: usize) -> Left {
        Left { first, rows, row_step, depth_step: WORD_BYTES, square_step: SQUARE * row_step }
    }

    /// Packed like the right operand, sixteen rows wide.
    fn across(first: *const u8, rows: usize, depth: usize) -> Left {
        let depth_step = SQUARE * WORD_BYTES;
        Left { first, rows, row_step: WORD_BYTES, depth_step, square_step: depth * depth_step }
    }

    /// The address of a row; of the first one for rows that do not exist, whose sums nobody reads.
    #[inline(always)]
    pub fn row(&self, row: usize) -> *const u8 {
        self.first.wrapping_add(if row < self.rows { row * self.row_step } else { 0 })
    }

    /// Prefetches rows along K, so many words of each.
    #[inline(always)]
    pub fn prefetch(&self, rows: Range<usize>, words: usize) {
        rows.for_each(|row| pack::prefetch_bytes::<_MM_HINT_T1>(self.row(row), words * WORD_BYTES));
    }

    /// Rows from `row` on, at most `most`, from a word on; the last rows if `row` is beyond them.
    #[inline(always)]
    pub fn part(&self, row: usize, most: usize, word: usize) -> Left {
        let row = if row < self.rows { row } else { self.rows.saturating_sub(most) };
        let offset = row / SQUARE * self.square_step + row % SQUARE * self.row_step + word * self.depth_step;
        Left { first: self.first.wrapping_add(offset), rows: most.min(self.rows - row), ..*self }
    }
}

/// The packed right operand of a slab of columns.
#[derive(Clone, Copy)]
pub(super) struct Right {
    first: *mut u32,
    pub depth: usize,
}

// SAFETY: a description, as `Matrix` is.
unsafe impl Send for Right {}
// SAFETY: as above.
unsafe impl Sync for Right {}

impl Right {
    /// The panel that begins at a column of the slab; all panels before it are `COLS` wide.
    pub fn panel(&self, col: usize, word: usize, width: usize) -> *mut u32 {
        self.first.wrapping_add(col * self.depth + word * width)
    }
}

/// The operands of a term as a slab reads them.
pub(super) struct SlabOperands {
    pub left: Left,
    pub right: Right,
}

/// The packed operands of a term.
#[derive(Clone, Copy)]
pub(super) struct TermSizes {
    pub depth: usize,
    /// Whether the left operand is copied.
    pub copied: bool,
    pub left_words: usize,
    pub right_words: usize,
}

/// One of the products that are added up, and the memory for its packed operands.
pub(super) struct PackedTerm {
    product: Product,
    pub copied: bool,
    copy: *mut u32,
    right: Right,
}

impl PackedTerm {
    pub fn new(product: Product, sizes: TermSizes, copy: *mut u32, right: *mut u32) -> PackedTerm {
        PackedTerm { product, copied: sizes.copied, copy, right: Right { first: right, depth: sizes.depth } }
    }

    /// The operands of a slab of so many rows.
    pub fn operands<L: Level>(&self, rows: usize) -> SlabOperands {
        let (a, depth, padded) = (self.product.a, self.right.depth, padded_rows::<L>(rows));
        let left = if !self.copied {
            Left::along(a.address as *const u8, a.rows, a.stride * a.dtype.size_bytes())
        } else if is_across::<L>(&self.product) {
            Left::across(self.copy.cast(), padded, depth)
        } else {
            Left::along(self.copy.cast(), padded, WORD_BYTES * copy_stride(depth))
        };
        SlabOperands { left, right: self.right }
    }

    pub fn copy_left<L: Level>(&self, rows: Range<usize>, team: &mut Team) {
        const ROWS_PER_TASK: usize = 32;
        let (product, depth) = (&self.product, self.right.depth);
        let a = matrix::<<L::Packing as Packing>::Element>(&product.a);
        let padded_rows = padded_rows::<L>(rows.len());
        if is_across::<L>(product) {
            let copy = Right { first: self.copy, depth };
            return team.blocks(padded_rows, SQUARE, |block, _| {
                let count = block.len().min(rows.len() - block.start);
                // SAFETY: all levels have AVX-512, and the copy has room for these rows.
                unsafe {
                    pack::pack_across::<L::Packing>(
                        &a,
                        rows.start + block.start,
                        count,
                        0..depth,
                        copy.panel(block.start, 0, 1),
                        SQUARE,
                    )
                };
            });
        }
        let stride = copy_stride(depth);
        let depth = depth.next_multiple_of(SQUARE);
        let copy = Right { first: self.copy, depth: stride };
        let is_turned = product.order == Order::TN;
        team.blocks(padded_rows, ROWS_PER_TASK, |block, _| {
            let to = copy.panel(block.start, 0, 1);
            let turn = if is_turned { pack::turn_columns::<L::Packing> } else { pack::copy_rows::<L::Packing> };
            // SAFETY: all levels have AVX-512, and the copy has room for these rows.
            unsafe { turn(&a, rows.start + block.start, block.len(), depth, to, stride) };
        });
    }

    pub fn pack_right<L: Level>(&self, cols: Range<usize>, team: &mut Team) {
        let b = matrix::<<L::Packing as Packing>::Element>(&self.product.b);
        let right = self.right;
        let is_along = self.product.order == Order::NT;
        let pack = if is_along { pack::pack_along::<L::Packing> } else { pack::pack_across::<L::Packing> };
        // A panel needs one line of each row across, which the CPU does not foresee; so several panels are packed together.
        let (most_words, most_cols, words_together) = if is_along {
            (PACK_DEPTH, L::COLS, PACK_DEPTH)
        } else {
            (PACK_DEPTH / 4, PACK_PANELS * L::COLS, PACK_WORDS)
        };
        let parts = right.depth.div_ceil(most_words);
        let summands = self.product.dims()[2];
        team.tasks(cols.len().div_ceil(most_cols) * parts, |task, _| {
            let of_task = task / parts * most_cols..cols.len().min((task / parts + 1) * most_cols);
            let first = task % parts * most_words;
            let end = right.depth.min(first + most_words);
            for word in (first..end).step_by(words_together) {
                let words = word..end.min(word + words_together);
                // The operand's numbers that are packed next.
                let summand = |word: usize| word * summands / right.depth;
                let after = cols.start + of_task.end;
                if is_along {
                    let next = after..cols.end.min(after + L::COLS);
                    pack::prefetch(&b, next, summand(words.start)..summand(words.end));
                } else {
                    let next = summand(words.end)..summand(end.min(words.end + words_together));
                    pack::prefetch(&b, next, cols.start + of_task.start..after);
                }
                for col in of_task.clone().step_by(L::COLS) {
                    let count = L::COLS.min(of_task.end - col);
                    let width = count.next_multiple_of(L::WIDTH_STEP);
                    let to = right.panel(col, words.start, width);
                    // SAFETY: all levels have AVX-512, and the panel has room for these words.
                    unsafe { pack(&b, cols.start + col, count, words.clone(), to, width) };
                }
            }
        });
    }
}

fn is_across<L: Level>(product: &Product) -> bool {
    L::LEFT_ACROSS && product.order == Order::TN
}

/// Words from one copied row to the next: a line more than needed, for rows a power of two apart would share one cache set.
pub(super) fn copy_stride(depth: usize) -> usize {
    depth.next_multiple_of(SQUARE) + SQUARE
}

/// Rows of a copied left operand, with those that fill the last panel.
pub(super) fn padded_rows<L: Level>(rows: usize) -> usize {
    rows.next_multiple_of(L::ROWS.max(SQUARE))
}
