//! One tensor in its file, and reading parts of it.

use std::ops::Range;
use std::path::Path;

use crate::convert::Element;
use crate::{Defect, Error, FileDtype};

/// A tensor of an open file: its header entry and its bytes, not copied.
///
/// For reading a block it counts as a matrix: rows are the first dim and columns all others together. A vector is one
/// row, a scalar is 1 × 1.
#[derive(Clone, Copy)]
pub struct RawTensor<'file> {
    pub(crate) name: &'file str,
    pub(crate) file: &'file Path,
    pub(crate) dtype: FileDtype,
    pub(crate) shape: &'file [usize],
    pub(crate) bytes: &'file [u8],
}

impl<'file> RawTensor<'file> {
    /// The Hugging Face name.
    pub fn name(&self) -> &'file str {
        self.name
    }

    /// The file it is in, for messages.
    pub fn file(&self) -> &'file Path {
        self.file
    }

    /// The type of its elements in the file.
    pub fn dtype(&self) -> FileDtype {
        self.dtype
    }

    /// Its dims; none for a scalar.
    pub fn shape(&self) -> &'file [usize] {
        self.shape
    }

    /// Its elements as they are in the file: row-major, little-endian, at any alignment.
    pub fn bytes(&self) -> &'file [u8] {
        self.bytes
    }

    /// How many elements it has.
    pub fn element_count(&self) -> usize {
        self.bytes.len() / self.dtype.size_bytes()
    }

    /// Rows of the matrix it counts as.
    pub fn rows(&self) -> usize {
        match self.shape {
            [] | [_] => 1,
            [rows, ..] => *rows,
        }
    }

    /// Columns of the matrix it counts as.
    pub fn cols(&self) -> usize {
        match self.shape {
            [] => 1,
            [cols] => *cols,
            // Saturating, because with 0 rows the header's check of the size does not bound this product.
            [_, others @ ..] => others.iter().fold(1, |cols, dim| cols.saturating_mul(*dim)),
        }
    }

    /// Refuses a type that cannot be read as another.
    pub fn check_conversion<T: Element>(&self) -> Result<(), Error> {
        T::conversion(self.dtype).map(drop).ok_or_else(|| self.cannot_convert(T::NAME))
    }

    /// Reads a range of elements in row-major order into a buffer of just that length.
    ///
    /// # Panics
    /// If the range is not within the tensor, or the buffer's length is another.
    pub fn read<T: Element>(&self, elements: Range<usize>, into: &mut [T]) -> Result<(), Error> {
        assert!(
            elements.end <= self.element_count() && elements.len() == into.len(),
            "tensor `{}` has {} elements, asked for {elements:?} into a buffer of {}",
            self.name,
            self.element_count(),
            into.len(),
        );
        let convert = T::conversion(self.dtype).ok_or_else(|| self.cannot_convert(T::NAME))?;
        let size = self.dtype.size_bytes();
        let bytes = &self.bytes[elements.start * size..elements.end * size];
        convert(bytes, into).map_err(|value| self.does_not_fit(value.0, T::NAME))
    }

    /// Reads the block `rows` × `cols` into a buffer in which one row begins `stride` elements after the other.
    /// Elements between the rows are left as they are.
    ///
    /// # Panics
    /// If the block is not within the tensor, or the buffer does not hold it.
    pub fn read_block<T: Element>(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        into: &mut [T],
        stride: usize,
    ) -> Result<(), Error> {
        let width = self.cols();
        assert!(
            rows.start <= rows.end && rows.end <= self.rows() && cols.start <= cols.end && cols.end <= width,
            "tensor `{}` is {} × {width}, asked for rows {rows:?} and columns {cols:?}",
            self.name,
            self.rows(),
        );
        assert!(cols.len() <= stride, "rows of {} elements overlap at stride {stride}", cols.len());
        if cols.len() == width && stride == width {
            return self.read(rows.start * width..rows.end * width, &mut into[..rows.len() * width]);
        }
        if cols.is_empty() {
            return Ok(());
        }
        for (block_row, row) in rows.enumerate() {
            let elements = row * width + cols.start..row * width + cols.end;
            self.read(elements, &mut into[block_row * stride..][..cols.len()])?;
        }
        Ok(())
    }

    fn cannot_convert(&self, wanted: &'static str) -> Error {
        Defect::CannotConvert { tensor: self.name.to_owned(), dtype: self.dtype, wanted }.of(self.file)
    }

    fn does_not_fit(&self, value: i128, wanted: &'static str) -> Error {
        Defect::DoesNotFit { tensor: self.name.to_owned(), value, wanted }.of(self.file)
    }
}
