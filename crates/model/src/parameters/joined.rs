//! Frozen weights with their adapters' factors beside them, for devices that then multiply with both at once:
//!
//!     | W  0  B |
//!     | A       |

use evenkeel_device::kernel::{Copy, Fill};
use evenkeel_device::{DType, Queue, Tensor};

/// The places of an adapter's factors beside a weight. The factors are copies: the optimizer changes others.
#[derive(Clone)]
pub(crate) struct JoinedFactors {
    /// [rank, I]
    pub a: Tensor,
    /// [O, rank]
    b: Tensor,
    /// Zeros, and B in the last columns.
    pub until_b: Tensor,
}

impl JoinedFactors {
    /// Room for a weight of this shape, and for the factors beside it.
    pub fn allocate(
        queue: &Queue,
        [rows, cols]: [usize; 2],
        rank: usize,
        place: usize,
        dtype: DType,
    ) -> (Tensor, JoinedFactors) {
        let all = queue.tensor_with_room(rows + rank, cols, place + rank, dtype);
        let weight = all.row_range(0..rows);
        let beside = |first: usize| weight.room(first..place + rank).expect("made above");
        let factors = JoinedFactors { a: all.row_range(rows..rows + rank), b: beside(place), until_b: beside(0) };
        queue.launch(Fill { out: factors.until_b.view(), value: 0.0 });
        (weight, factors)
    }

    /// Copies the factors to their places.
    pub fn put(&self, queue: &Queue, a: &Tensor, b: &Tensor) {
        queue.launch(Copy { x: a.view(), out: self.a.view() });
        queue.launch(Copy { x: b.view(), out: self.b.view() });
    }
}
