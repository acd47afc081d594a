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
    pub group: Option<Group>,
}

/// Layers with the same x that share what belongs to their adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// The weight of the first, below which the A of all lie.
    pub first: ParamId,
    /// The sum of their adapters' ranks.
    pub rank: usize,
}

impl Place {
    /// The columns beside x that this layer fills or reads, if its adapter has such a rank.
    pub fn room(&self, rank: usize) -> usize {
        self.group.map_or(self.first + rank, |group| group.rank)
    }
}

/// The places of an adapter's factors beside a weight. The factors are copies: the optimizer changes others.
#[derive(Clone)]
pub(crate) struct JoinedFactors {
    /// Below the weight, [rank, I]: A of the layer, or those of its group if it is the first.
    pub a: Option<Tensor>,
    /// [O, rank]
    b: Tensor,
    /// Zeros, and B in the last columns.
    pub until_b: Tensor,
    /// The layers whose A lie below the weight, with their ranks, if it is the first of a group.
    pub group: Vec<(ParamId, usize)>,
    joined: JoinedWeight,
}

impl JoinedFactors {
    /// Room for a weight of this shape, and for the factors beside it. `all` are the model's.
    pub fn allocate(
        queue: &Queue,
        [rows, cols]: [usize; 2],
        joined: JoinedWeight,
        all: &[JoinedWeight],
        dtype: DType,
    ) -> (Tensor, JoinedFactors) {
        let JoinedWeight { rank, place, weight, .. } = joined;
        let is_of_group = |other: &&JoinedWeight| other.place.group.is_some_and(|group| group.first == weight);
        let group: Vec<_> = all.iter().filter(is_of_group).map(|other| (other.a, other.rank)).collect();
        let below = match place.group {
            None => rank,
            Some(_) => group.iter().map(|(_, rank)| rank).sum(),
        };
        let everything = queue.tensor_with_room(rows + below, cols, place.first + rank, dtype);
        let weight = everything.row_range(0..rows);
        let beside = |first: usize| weight.room(first..place.first + rank).expect("made above");
        let (b, until_b) = (beside(place.first), beside(0));
        let a = (below > 0).then(|| everything.row_range(rows..rows + below));
        queue.launch(Fill { out: until_b.view(), value: 0.0 });
        (weight, JoinedFactors { a, b, until_b, group, joined })
    }

    fn copies(&self, parameters: &Parameters) -> [Copy; 2] {
        let JoinedWeight { a, b, rank, place, .. } = self.joined;
        let (home, first) = match place.group {
            None => (Some(self), 0),
            Some(group) => (parameters.joined_factors(group.first), place.first),
        };
        let below = home.and_then(|home| home.a.as_ref()).expect("the first of a group lies here, too");
        let [a, b] = [a, b].map(|id| parameters.value(id).view());
        [Copy { x: a, out: below.row_range(first..first + rank).view() }, Copy { x: b, out: self.b.view() }]
    }
}

/// Copies the factors of these weights' adapters to their places.
pub(crate) fn put_factors(queue: &Queue, parameters: &Parameters, weights: impl Iterator<Item = ParamId>) {
    let factors = weights.filter_map(|weight| parameters.joined_factors(weight));
    let copies: Vec<Copy> = factors.flat_map(|factors| factors.copies(parameters)).collect();
    copies.chunks(MOST_COPIES).for_each(|copies| queue.launch(Copies(copies.to_vec())));
}
