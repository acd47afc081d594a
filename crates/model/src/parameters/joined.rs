//! Frozen weights with their adapters' factors beside them, for devices that then multiply with both at once:
//!
//! ```text
//! | W  0  B |
//! | A       |
//! ```

use evenkeel_device::kernel::{Copies, Copy, Fill, MOST_COPIES};
use evenkeel_device::{DType, Queue, Tensor};

use crate::parameters::{ParamId, Parameters};

/// A frozen weight whose adapter's factors are to lie beside it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JoinedWeight {
    pub weight: ParamId,
    pub a: ParamId,
    pub b: ParamId,
    pub rank: usize,
    pub place: Place,
}

/// The place of an adapter's S in the room beside x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its first column. B has as many columns of zeros between the weight and itself.
    pub first: usize,
    /// The layers with the same x, if the S of all of them are one product.
    pub group: Option<Group>,
}

/// Layers with the same x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// The weight of the first.
    pub first: ParamId,
    /// The sum of their adapters' ranks.
    pub rank: usize,
}

/// The places of an adapter's factors beside a weight. The factors are copies: the optimizer changes others.
#[derive(Clone)]
pub(crate) struct JoinedFactors {
    /// [rank, I]
    pub a: Tensor,
    /// [O, rank]
    b: Tensor,
    /// Zeros, and B in the last columns.
    pub until_b: Tensor,
    /// The A of all layers with the same x, one below the other, if there are several.
    pub stacked_a: Option<Tensor>,
    joined: JoinedWeight,
}

impl JoinedFactors {
    /// Room for a weight of this shape, and for the factors beside it.
    pub fn allocate(
        queue: &Queue,
        [rows, cols]: [usize; 2],
        joined: JoinedWeight,
        stacked_a: Option<Tensor>,
        dtype: DType,
    ) -> (Tensor, JoinedFactors) {
        let (rank, place) = (joined.rank, joined.place.first);
        let all = queue.tensor_with_room(rows + rank, cols, place + rank, dtype);
        let weight = all.row_range(0..rows);
        let beside = |first: usize| weight.room(first..place + rank).expect("made above");
        let (a, b, until_b) = (all.row_range(rows..rows + rank), beside(place), beside(0));
        queue.launch(Fill { out: until_b.view(), value: 0.0 });
        (weight, JoinedFactors { a, b, until_b, stacked_a, joined })
    }

    fn copies(&self, parameters: &Parameters) -> Vec<Copy> {
        let JoinedWeight { a, b, rank, place, .. } = self.joined;
        let [a, b] = [a, b].map(|id| parameters.value(id).view());
        let stacked = self.stacked_a.as_ref().map(|all| all.row_range(place.first..place.first + rank));
        let copy_of_a = stacked.map(|out| Copy { x: a, out: out.view() });
        let copies = [Copy { x: a, out: self.a.view() }, Copy { x: b, out: self.b.view() }];
        copies.into_iter().chain(copy_of_a).collect()
    }
}

/// Copies the factors of these weights' adapters to their places.
pub(crate) fn put_factors(queue: &Queue, parameters: &Parameters, weights: impl Iterator<Item = ParamId>) {
    let factors = weights.filter_map(|weight| parameters.joined_factors(weight));
    let copies: Vec<Copy> = factors.flat_map(|factors| factors.copies(parameters)).collect();
    copies.chunks(MOST_COPIES).for_each(|copies| queue.launch(Copies(copies.to_vec())));
}
