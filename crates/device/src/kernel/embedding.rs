use super::{Operation, assert_indices};
use crate::{DType, View};

/// An index or label that stands for nothing: no row is read, no loss is counted.
pub const IGNORE: u32 = u32::MAX;

/// `out[t] = scale · table[index[t] - first]`, zero where the index lies outside the table.
///
/// The zero makes a vocabulary split over ranks a sum of partial outputs.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// [V, H], of any float dtype: a bias looked up as a table of one row is f32.
    pub table: View,
    /// u32 [1, T]
    pub indices: View,
    /// The index of the table's first row.
    pub first: u32,
    pub scale: f32,
    /// [T, H]
    pub out: View,
    /// Add to `out` instead of writing it.
    pub accumulate: bool,
}

impl Operation for Embed {
    fn check(&self) {
        assert_eq!(self.table.cols, self.out.cols, "Embed: widths differ");
        assert_indices("Embed", &self.indices, self.out.rows);
    }

    fn bytes(&self) -> u64 {
        2 * self.out.bytes() + self.indices.bytes()
    }
}

/// `dtable[index[t] - first] += scale · dout[t]`.
#[derive(Clone, Copy, Debug)]
pub struct EmbedBackward {
    /// f32 [V, H], added to.
    pub dtable: View,
    pub indices: View,
    pub first: u32,
    pub scale: f32,
    /// [T, H]
    pub dout: View,
}

impl Operation for EmbedBackward {
    fn check(&self) {
        assert_eq!(self.dtable.cols, self.dout.cols, "EmbedBackward: widths differ");
        assert_eq!(self.dtable.dtype, DType::F32, "EmbedBackward: gradients are f32");
        assert_indices("EmbedBackward", &self.indices, self.dout.rows);
    }

    fn bytes(&self) -> u64 {
        self.dout.bytes() + 2 * (self.dout.len() * 4) as u64 + self.indices.bytes()
    }
}
