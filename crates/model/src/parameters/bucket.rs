//! Buckets: parameters that lie side by side, so that one exchange moves the values or gradients of all of them, and so that
//! their state can be split evenly whatever their shapes are.

use std::collections::HashSet;
use std::ops::Range;

use evenkeel_device::Tensor;

use crate::chain::model::Model;
use crate::parameters::{ParamId, ParamSpec};
use crate::sharding::layout::{Sharing, even_bounds};

/// Parameters begin and splits lie at multiples of this many elements: a cache line of bf16.
pub const GRAIN: usize = 32;

/// Parameters side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Each parameter with the element where it begins.
    pub members: Vec<(ParamId, usize)>,
    /// Elements, gaps included.
    pub len: usize,
    /// The units that compute with them, by their numbers in the chain.
    pub users: Vec<usize>,
    /// The shards whose gradients are to be summed, if there are several. Of derived parameters, the values are.
    pub summed_over: Option<Range<usize>>,
    /// Whether they are vectors, kept in f32 whatever the compute dtype is.
    pub holds_vectors: bool,
    /// Whether they are trained: all of them, or none.
    pub is_trained: bool,
    /// Whether they are computed from others: all of them, or none.
    pub is_derived: bool,
}

impl Bucket {
    /// The offsets of its parts when it is split, and the end, in elements.
    pub fn bounds(&self, parts: usize) -> Vec<usize> {
        self.grain_bounds(parts).into_iter().map(|grains| grains * GRAIN).collect()
    }

    /// The same in grains, the rows in which exchanges cut a bucket; see [`in_grains`].
    pub fn grain_bounds(&self, parts: usize) -> Vec<usize> {
        even_bounds(self.len / GRAIN, parts)
    }

    /// Whether it holds the matrices of one unit, whose gradients shards do not sum: worth gathering and releasing.
    pub fn is_of_one_place(&self) -> bool {
        self.summed_over.is_none() && !self.holds_vectors
    }
}

/// A flat tensor of a bucket, or of a part of one, with a grain in each row.
pub fn in_grains(flat: &Tensor) -> Tensor {
    flat.reshaped(flat.len() / GRAIN, GRAIN)
}

/// Parameters with the same key lie in one bucket.
#[derive(Clone, PartialEq)]
struct Key {
    summed_over: Option<Range<usize>>,
    holds_vectors: bool,
    is_trained: bool,
    is_derived: bool,
    /// Matrices whose gradients shards do not sum lie with those of the same unit, where their gradients become complete.
    unit: Option<usize>,
    /// A table that two stages hold lies alone: they sum its gradients.
    is_shared_table: bool,
}

/// The buckets of a model's parameters.
pub(crate) fn buckets(model: &Model) -> Vec<Bucket> {
    let (used, numbers): (_, Vec<usize>) = (model.parameters_by_unit(), model.unit_numbers().collect());
    let a_factors: HashSet<ParamId> = model.adapted_weights().iter().map(|adapted| adapted.a).collect();
    let mut found: Vec<(Key, Bucket)> = Vec::new();
    for (index, spec) in model.specs.iter().enumerate() {
        let users = (0..used.len()).filter(|&unit| used[unit].contains(&ParamId(index)));
        let users: Vec<usize> = users.map(|unit| numbers[unit]).collect();
        // Weights in 4 bits are whole on every replica and move nowhere.
        if users.is_empty() || spec.is_packed {
            continue;
        }
        let is_shared_table = model.config.tied && !model.is_whole_chain() && ParamId(index) == model.table();
        let key = Key { is_shared_table, ..key(spec, &users) };
        let at = found.iter().position(|(other, _)| *other == key).unwrap_or_else(|| {
            let Key { summed_over, holds_vectors, is_trained, is_derived, .. } = key.clone();
            let (members, users) = (Vec::new(), Vec::new());
            found.push((key, Bucket { members, len: 0, users, summed_over, holds_vectors, is_trained, is_derived }));
            found.len() - 1
        });
        let bucket = &mut found[at].1;
        bucket.members.push((ParamId(index), 0));
        bucket.users.extend(users);
        bucket.users.sort_unstable();
        bucket.users.dedup();
    }
    let laid_out = |(_, mut bucket): (Key, Bucket)| {
        // The factors A of adapters lie side by side: some have their gradients computed at once.
        bucket.members.sort_by_key(|(id, _)| !a_factors.contains(id));
        for (id, start) in &mut bucket.members {
            *start = bucket.len;
            bucket.len += model.specs[id.0].len().next_multiple_of(GRAIN);
        }
        bucket
    };
    found.into_iter().map(laid_out).collect()
}

fn key(spec: &ParamSpec, users: &[usize]) -> Key {
    let summed_over = match &spec.sharing {
        Sharing::Summed(holders) if spec.is_trained || spec.is_derived => Some(holders.clone()),
        _ => None,
    };
    let holds_vectors = spec.is_vector();
    let unit = if holds_vectors || summed_over.is_some() { None } else { users.first().copied() };
    let (is_trained, is_derived) = (spec.is_trained, spec.is_derived);
    Key { summed_over, holds_vectors, is_trained, is_derived, unit, is_shared_table: false }
}
