use super::{Operation, assert_indices};
use crate::{DType, Heads, View};

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pairs {
    /// Element i of the first half with element i of the second.
    Halves,
    /// Element 2i with element 2i + 1.
    Neighbours,
}

/// Rotates the first `table.cols` elements of each head, in place. A position outside the table is a bug in the caller and ends
/// the queue.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// T tokens.
    pub x: Heads,
    pub pairs: Pairs,
    /// f32 [positions, rotary dimension]: the cosines of the angles, then their sines.
    pub table: View,
    /// u32 [1, T]: the row of `table` for each token.
    pub positions: View,
    /// Rotates back: the gradient of a rotation.
    pub inverse: bool,
}

impl Operation for Rotary {
    fn check(&self) {
        assert_eq!(self.table.dtype, DType::F32, "Rotary: the table is f32");
        assert!(
            self.table.cols.is_multiple_of(2) && self.table.cols <= self.x.dim,
            "Rotary: {} of {}",
            self.table.cols,
            self.x.dim
        );
        assert_indices("Rotary", &self.positions, self.x.tokens());
    }

    fn bytes(&self) -> u64 {
        2 * self.x.bytes() * self.table.cols as u64 / self.x.dim as u64
    }
}
