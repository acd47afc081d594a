//! Ranks' programs with the kernels of their tasks, and the ranks that stand for all others.

use std::collections::HashMap;
use std::sync::Arc;

use evenkeel_device::Counts;
use evenkeel_step::{Members, Mesh, Program};

/// A rank's program of a step, and the kernels of its tasks, from a dry run.
#[derive(Clone, Debug)]
pub struct Counted {
    pub rank: usize,
    pub program: Program,
    /// By task; none for exchanges. Tasks that share their kernels take as long.
    pub counts: Vec<Arc<Counts>>,
    /// By task: the tasks of a longer chain that it stands for. Empty if all stand for themselves.
    pub stands_for: Vec<f64>,
    /// By task: the growth of the memory in use behind it.
    pub kept_bytes: Vec<i64>,
}

/// Ranks that stand for all others: the first of the replicas that are alike, and the first of the shards that are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Representatives {
    pub ranks: Vec<usize>,
    /// By rank: the place among `ranks` of the one that stands for it.
    pub of: Vec<usize>,
}

impl Representatives {
    /// Ranks are alike if they compute the same on the same kind of device.
    pub fn new(mesh: Mesh, are_alike: impl Fn(usize, usize) -> bool) -> Representatives {
        let Mesh { pp, dp, tp } = mesh;
        let replicas = first_of_each(dp, |one, other| {
            let mut places = (0..pp).flat_map(|place| (0..tp).map(move |shard| (place, shard)));
            places.all(|(place, shard)| are_alike(mesh.rank(place, one, shard), mesh.rank(place, other, shard)))
        });
        let firsts: Vec<usize> = (0..dp).filter(|&replica| replicas[replica] == replica).collect();
        let shards = first_of_each(tp, |one, other| {
            let mut places = (0..pp).flat_map(|place| firsts.iter().map(move |&replica| (place, replica)));
            places.all(|(place, replica)| are_alike(mesh.rank(place, replica, one), mesh.rank(place, replica, other)))
        });
        let stands_for =
            |rank: usize| mesh.rank(mesh.place(rank), replicas[mesh.replica(rank)], shards[mesh.shard(rank)]);
        let ranks: Vec<usize> = (0..mesh.ranks()).filter(|&rank| stands_for(rank) == rank).collect();
        let place = |rank: usize| ranks.binary_search(&stands_for(rank)).expect("it stands for itself");
        Representatives { of: (0..mesh.ranks()).map(place).collect(), ranks }
    }
}

/// By index: the first one that is like it.
fn first_of_each(count: usize, are_alike: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    let mut firsts: Vec<usize> = Vec::new();
    let of_index = |index: usize| {
        let found = firsts.iter().copied().find(|&first| are_alike(first, index));
        found.unwrap_or_else(|| {
            firsts.push(index);
            index
        })
    };
    (0..count).map(of_index).collect()
}

/// By rank that stands for all: its groups, of which only such ranks are members.
pub(crate) fn groups_among_themselves(counted: &[Counted]) -> Vec<Vec<Members>> {
    let places: HashMap<usize, usize> = counted.iter().enumerate().map(|(place, it)| (it.rank, place)).collect();
    let smaller = |group: &Members| Members {
        name: group.name.clone(),
        ranks: group.ranks.iter().filter_map(|rank| places.get(rank).copied()).collect(),
    };
    counted.iter().map(|it| it.program.groups.iter().map(smaller).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_are_alike_are_represented_by_the_first() {
        let mesh = Mesh { pp: 2, dp: 4, tp: 2 };
        let ranks = |are_alike: &dyn Fn(usize, usize) -> bool| Representatives::new(mesh, are_alike).ranks;
        assert_eq!(ranks(&|_, _| true), [0, 8]);
        assert_eq!(ranks(&|_, _| false), (0..16).collect::<Vec<_>>());
        // The third replica of the second place is on another kind of device.
        let is_slow = |rank: usize| mesh.place(rank) == 1 && mesh.replica(rank) == 2;
        assert_eq!(ranks(&|one, other| is_slow(one) == is_slow(other)), [0, 4, 8, 12]);
        // Shards are unequal.
        let by_shard = |one: usize, other: usize| mesh.shard(one) == mesh.shard(other);
        assert_eq!(ranks(&by_shard), [0, 1, 8, 9]);
        assert_eq!(Representatives::new(mesh, by_shard).of, [0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3]);
    }
}
