//! The named axes of a run's ranks.

/// `pp` places of a pipeline × `dp` replicas of the data × `tp` shards of every layer. The ranks of a replica are neighbours, and
/// so are the replicas of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    pub pp: usize,
    pub dp: usize,
    pub tp: usize,
}

impl Mesh {
    /// One replica over so many shards.
    pub fn of_shards(tp: usize) -> Mesh {
        Mesh { pp: 1, dp: 1, tp }
    }

    pub fn ranks(&self) -> usize {
        self.pp * self.dp * self.tp
    }

    /// The place of a rank in the pipeline.
    pub fn place(&self, rank: usize) -> usize {
        rank / (self.dp * self.tp)
    }

    /// The replica of the data that a rank computes on.
    pub fn replica(&self, rank: usize) -> usize {
        rank / self.tp % self.dp
    }

    /// The shard of every layer that a rank computes with.
    pub fn shard(&self, rank: usize) -> usize {
        rank % self.tp
    }

    pub fn rank(&self, place: usize, replica: usize, shard: usize) -> usize {
        (place * self.dp + replica) * self.tp + shard
    }

    /// The ranks of this one's place and replica, by their shards.
    pub fn tensor_ranks(&self, rank: usize) -> Vec<usize> {
        (0..self.tp).map(|shard| self.rank(self.place(rank), self.replica(rank), shard)).collect()
    }

    /// The ranks of this one's replica and shard, by their places in the pipeline.
    pub fn place_ranks(&self, rank: usize) -> Vec<usize> {
        (0..self.pp).map(|place| self.rank(place, self.replica(rank), self.shard(rank))).collect()
    }

    /// The ranks of this one's place and shard, by their replicas.
    pub fn data_ranks(&self, rank: usize) -> Vec<usize> {
        (0..self.dp).map(|replica| self.rank(self.place(rank), replica, self.shard(rank))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_once_in_a_group_of_each_axis() {
        let mesh = Mesh { pp: 2, dp: 3, tp: 4 };
        assert_eq!(mesh.ranks(), 24);
        for rank in 0..mesh.ranks() {
            let place = (mesh.place(rank), mesh.replica(rank), mesh.shard(rank));
            assert_eq!(mesh.rank(place.0, place.1, place.2), rank);
            assert_eq!(mesh.tensor_ranks(rank)[place.2], rank);
            assert_eq!(mesh.data_ranks(rank)[place.1], rank);
            assert_eq!(mesh.place_ranks(rank)[place.0], rank);
        }
        assert_eq!(mesh.tensor_ranks(17), [16, 17, 18, 19]);
        assert_eq!(mesh.data_ranks(17), [13, 17, 21]);
        assert_eq!(mesh.place_ranks(17), [5, 17]);
        assert_eq!(mesh.place(17), 1);
    }
}
