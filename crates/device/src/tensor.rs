//! Tensors: matrices in a device's memory.
//!
//! Everything a transformer computes on is a matrix: tokens × features, features × features, a vector as one row.
//! A [`Tensor`] owns a share of an arena block; a [`View`] is the copyable description of it that kernels carry.

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::arena::Block;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    Bf16,
    /// Token ids, labels, positions, column numbers.
    U32,
}

impl DType {
    pub fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 => 2,
        }
    }
}

/// The address and shape of a matrix. It owns nothing and says nothing about lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    pub(crate) address: u64,
    extent: Extent,
}

/// The shape and stride of a view. Public to read; only slicing changes it, inside this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub rows: usize,
    pub cols: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    pub dtype: DType,
}

impl Deref for View {
    type Target = Extent;
    fn deref(&self) -> &Extent {
        &self.extent
    }
}

impl View {
    pub(crate) fn new(address: u64, extent: Extent) -> View {
        View { address, extent }
    }

    /// The address of the first element in the device's memory.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.cols]
    }

    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn is_contiguous(&self) -> bool {
        self.stride == self.cols || self.rows <= 1
    }

    /// Bytes of the elements themselves, gaps between rows not counted.
    pub fn bytes(&self) -> u64 {
        (self.len() * self.dtype.size_bytes()) as u64
    }

    /// The addresses from its first element to its last.
    pub(crate) fn reach(&self) -> Range<u64> {
        let elements = if self.is_empty() { 0 } else { (self.rows - 1) * self.stride + self.cols };
        self.address..self.address + (elements * self.dtype.size_bytes()) as u64
    }

    pub fn row_range(&self, rows: Range<usize>) -> View {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {:?}", self.shape());
        let skipped_bytes = rows.start * self.stride * self.dtype.size_bytes();
        View::new(self.address + skipped_bytes as u64, Extent { rows: rows.len(), ..self.extent })
    }

    pub fn col_range(&self, cols: Range<usize>) -> View {
        assert!(cols.start <= cols.end && cols.end <= self.cols, "cols {cols:?} of {:?}", self.shape());
        let skipped_bytes = cols.start * self.dtype.size_bytes();
        View::new(self.address + skipped_bytes as u64, Extent { cols: cols.len(), ..self.extent })
    }

    /// Rows 0, n, 2n, …
    pub fn every_nth_row(&self, n: usize) -> View {
        let (rows, stride) = (self.rows.div_ceil(n), self.stride * n);
        View::new(self.address, Extent { rows, stride, ..self.extent })
    }

    /// A part of a vector as a matrix: it begins at element `first`, and its rows are `stride` elements apart.
    pub fn block(&self, first: usize, [rows, cols]: [usize; 2], stride: usize) -> View {
        let end = if rows * cols == 0 { first } else { first + (rows - 1) * stride + cols };
        assert!(self.rows == 1 && end <= self.cols, "elements {first}..{end} of {:?}", self.shape());
        let address = self.address + (first * self.dtype.size_bytes()) as u64;
        View::new(address, Extent { rows, cols, stride, ..self.extent })
    }

    /// The matrix that this one and another make up, if the other begins where each row of this one ends.
    pub(crate) fn joined_to_the_right(&self, other: &View) -> Option<View> {
        let end = self.address + (self.cols * self.dtype.size_bytes()) as u64;
        let is_beside =
            end == other.address && (self.rows, self.stride, self.dtype) == (other.rows, other.stride, other.dtype);
        is_beside.then(|| View::new(self.address, Extent { cols: self.cols + other.cols, ..self.extent }))
    }

    /// The same, if the other begins where the next row would.
    pub(crate) fn joined_below(&self, other: &View) -> Option<View> {
        let end = self.address + (self.rows * self.stride * self.dtype.size_bytes()) as u64;
        let is_below =
            end == other.address && (self.cols, self.stride, self.dtype) == (other.cols, other.stride, other.dtype);
        is_below.then(|| View::new(self.address, Extent { rows: self.rows + other.rows, ..self.extent }))
    }

    /// The same elements in another shape.
    pub fn reshaped(&self, rows: usize, cols: usize) -> View {
        assert!(self.is_contiguous(), "only contiguous tensors can be reshaped");
        assert_eq!(rows * cols, self.len(), "reshape of {:?} to {:?}", self.shape(), [rows, cols]);
        View::new(self.address, Extent { rows, cols, stride: cols, ..self.extent })
    }
}

/// A matrix in a device's memory. Clones and slices share the block; the last one to go frees it.
#[derive(Clone, Debug)]
pub struct Tensor {
    block: Arc<Block>,
    view: View,
    /// Columns behind the last one that are its own, for what is to lie beside it.
    room: usize,
}

impl Tensor {
    /// A tensor that begins with its block. What its rows have left behind the last column is room.
    pub(crate) fn new(block: Arc<Block>, extent: Extent) -> Tensor {
        let (view, room) = (View::new(block.address(), extent), extent.stride - extent.cols);
        Tensor { block, view, room }
    }

    /// Some of the columns that it has room for behind its last one, if it has.
    pub fn room(&self, cols: Range<usize>) -> Option<Tensor> {
        let wider = View::new(self.view.address, Extent { cols: self.cols + self.room, ..self.view.extent });
        (cols.end <= self.room).then(|| self.with(wider.col_range(self.cols + cols.start..self.cols + cols.end)))
    }

    pub fn view(&self) -> View {
        self.view
    }

    pub fn row_range(&self, rows: Range<usize>) -> Tensor {
        Tensor { room: self.room, ..self.with(self.view.row_range(rows)) }
    }

    pub fn col_range(&self, cols: Range<usize>) -> Tensor {
        self.with(self.view.col_range(cols))
    }

    pub fn every_nth_row(&self, n: usize) -> Tensor {
        self.with(self.view.every_nth_row(n))
    }

    pub fn reshaped(&self, rows: usize, cols: usize) -> Tensor {
        self.with(self.view.reshaped(rows, cols))
    }

    fn with(&self, view: View) -> Tensor {
        Tensor { block: self.block.clone(), view, room: 0 }
    }
}

impl Deref for Tensor {
    type Target = View;
    fn deref(&self) -> &View {
        &self.view
    }
}

impl From<&Tensor> for View {
    fn from(tensor: &Tensor) -> View {
        tensor.view
    }
}

/// A tensor seen as attention heads: head h of token t starts `h * step` elements into row t.
///
/// `step` may be larger than `dim`, so the heads of a fused QKV projection are read where they lie.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub(crate) view: View,
    pub(crate) count: usize,
    pub(crate) dim: usize,
    pub(crate) step: usize,
}

impl Heads {
    /// Heads that lie side by side and fill the tensor's columns.
    pub fn packed(view: impl Into<View>, count: usize) -> Heads {
        let view = view.into();
        assert!(view.cols.is_multiple_of(count), "{} columns are not {count} heads", view.cols);
        let dim = view.cols.checked_div(count).unwrap_or(0);
        Heads { view, count, dim, step: dim }
    }

    /// Heads of `dim` elements, `step` apart, beginning at column `first`.
    pub fn strided(view: impl Into<View>, first: usize, count: usize, dim: usize, step: usize) -> Heads {
        let view = view.into();
        let cols = if count == 0 { 0..0 } else { first..first + (count - 1) * step + dim };
        Heads { view: view.col_range(cols), count, dim, step }
    }

    pub fn tokens(&self) -> usize {
        self.view.rows
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn dim(&self) -> usize {
        self.dim
    }

    pub fn bytes(&self) -> u64 {
        (self.tokens() * self.count * self.dim * self.view.dtype.size_bytes()) as u64
    }
}
