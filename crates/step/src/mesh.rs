//! Where ranks stand: which share of the data and which shard of the model each has.

/// `dp` shares of the data times `tp` shards of the model. Ranks of one share are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    pub dp: usize,
    pub tp: usize,
}

impl Mesh {
    /// One share of the data over so many shards.
    pub fn of_shards(tp: usize) -> Mesh {
        Mesh { dp: 1, tp }
    }

    pub fn ranks(&self) -> usize {
        self.dp * self.tp
    }

    /// Which share of the data a rank computes on.
    pub fn share(&self, rank: usize) -> usize {
        rank / self.tp
    }

    /// Which shard of the model a rank computes with.
    pub fn shard(&self, rank: usize) -> usize {
        rank % self.tp
    }

    /// The ranks that compute on the same share of the data as this one, by their shards.
    pub fn tensor_ranks(&self, rank: usize) -> Vec<usize> {
        (0..self.tp).map(|shard| self.share(rank) * self.tp + shard).collect()
    }

    /// The ranks that compute with the same shard as this one, by their shares.
    pub fn data_ranks(&self, rank: usize) -> Vec<usize> {
        (0..self.dp).map(|share| share * self.tp + self.shard(rank)).collect()
    }
}
