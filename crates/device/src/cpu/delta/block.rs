//! Matrices of f32 in a thread's working memory.

use std::ops::Range;

use super::super::simd::LANES;
use crate::{DType, Extent, View};

/// A matrix of f32 in working memory. Its rows are an odd number of vectors apart: were it a power of two, a column's numbers would
/// share a few lines of the first cache.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub first: *mut f32,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl Block {
    pub fn new(first: *mut f32, [rows, cols]: [usize; 2]) -> Block {
        Block { first, rows, cols, stride: (cols.div_ceil(LANES) | 1) * LANES }
    }

    /// The numbers of memory that a block takes.
    pub fn floats([rows, cols]: [usize; 2]) -> usize {
        rows * Block::new(std::ptr::null_mut(), [rows, cols]).stride
    }

    pub fn view(&self) -> View {
        let Block { rows, cols, stride, .. } = *self;
        View::new(self.first as u64, Extent { rows, cols, stride, dtype: DType::F32 })
    }

    #[inline(always)]
    pub fn at(&self, row: usize, col: usize) -> *mut f32 {
        debug_assert!(row < self.rows && col < self.cols, "({row}, {col}) of [{}, {}]", self.rows, self.cols);
        self.first.wrapping_add(row * self.stride + col)
    }

    pub fn row_range(&self, rows: Range<usize>) -> Block {
        debug_assert!(rows.end <= self.rows);
        Block { first: self.first.wrapping_add(rows.start * self.stride), rows: rows.len(), ..*self }
    }

    /// The first rows and columns.
    pub fn corner(&self, rows: usize, cols: usize) -> Block {
        debug_assert!(rows <= self.rows && cols <= self.cols);
        Block { rows, cols, ..*self }
    }
}

/// Cuts memory in parts, or only counts what they take if it begins with a null pointer.
pub(super) struct Cutter {
    first: *mut f32,
    used: usize,
}

impl Cutter {
    pub fn new(memory: &mut [f32]) -> Cutter {
        Cutter { first: memory.as_mut_ptr(), used: 0 }
    }

    /// The numbers that `cut` takes.
    pub fn count<T>(cut: impl FnOnce(&mut Cutter) -> T) -> usize {
        let mut cutter = Cutter { first: std::ptr::null_mut(), used: 0 };
        cut(&mut cutter);
        cutter.used
    }

    pub fn cut(&mut self, floats: usize) -> *mut f32 {
        let part = self.first.wrapping_add(self.used);
        self.used += floats.next_multiple_of(LANES);
        part
    }

    pub fn block(&mut self, shape: [usize; 2]) -> Block {
        Block::new(self.cut(Block::floats(shape)), shape)
    }
}
