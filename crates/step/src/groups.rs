//! Which ranks a rank exchanges values with.

use std::ops::Range;

use evenkeel_comm::{Communicator, Group};
use evenkeel_model::Shard;

/// The tensor-parallel group of a rank, and those of its ranks that hold the same key and value heads.
#[derive(Clone)]
pub struct TensorGroups {
    pub all: Group,
    kv_holders: Option<(Range<usize>, Group)>,
}

impl TensorGroups {
    /// `ranks` compute the shards of one model; shard i is that of `ranks[i]`.
    pub fn new(communicator: &Communicator, ranks: &[usize], shard: &Shard) -> TensorGroups {
        assert_eq!((ranks.len(), ranks[shard.index]), (shard.count, communicator.rank()), "shards are given to ranks");
        let all = communicator.group("tp", ranks);
        let kv_holders = (shard.kv_holders.len() > 1).then(|| {
            let holders = shard.kv_holders.clone();
            (holders.clone(), communicator.group("tp kv heads", &ranks[holders]))
        });
        TensorGroups { all, kv_holders }
    }

    /// All ranks compute the shards of one model, in order.
    pub fn of_world(communicator: &Communicator, shard: &Shard) -> TensorGroups {
        let ranks: Vec<usize> = (0..communicator.size()).collect();
        TensorGroups::new(communicator, &ranks, shard)
    }

    /// The group of the shards that hold the same part of a parameter.
    pub(crate) fn of(&self, holders: &Range<usize>) -> &Group {
        match &self.kv_holders {
            Some((range, group)) if range == holders => group,
            _ => {
                assert_eq!(holders.len(), self.all.size(), "parts are held by one shard, by all, or with the kv heads");
                &self.all
            }
        }
    }
}
