//! Another cut of the same model for some steps: ranks compute with it and keep the one they have.

use evenkeel_device::DType;
use evenkeel_model::{Migration, Model, Widths};
use evenkeel_step::Mesh;
use evenkeel_step::schedule::Chain;

/// The cut that ranks compute their steps with.
pub(crate) struct Migrated {
    /// The shards that ranks compute with, and the index of this rank's.
    pub shards: Vec<Model>,
    shard: usize,
    /// The work that migrates to and from this rank.
    pub migration: Migration,
    /// By rank.
    pub chains: Vec<Chain>,
}

impl Migrated {
    /// `home` are the shards that the ranks keep, `chains` their chains, `shard` the index of this rank's. `None` if they have
    /// these widths already.
    pub fn new(
        home: &[Model],
        chains: &[Chain],
        mesh: &Mesh,
        work: Widths,
        dtype: DType,
        shard: usize,
    ) -> Option<Migrated> {
        assert!(
            home[0].config.can_be_cut(&work, mesh.tp),
            "{work:?} is no cut of this model over {} ranks: widths of each dim must add up to it",
            mesh.tp
        );
        let work = home[0].cut(&home[0].shard.cut_of(work)).expect("what was cut in so many shards can be cut again");
        let mut all = Migration::all(home, &work);
        let migrating = |(rank, chain): (usize, &Chain)| {
            let shard = mesh.shard(rank);
            chain.clone().with_migration(&all[shard], shard, dtype)
        };
        let chains = chains.iter().enumerate().map(migrating).collect();
        let migration = all.swap_remove(shard);
        (!migration.is_empty()).then_some(Migrated { shards: work, shard, migration, chains })
    }

    /// The shard that this rank computes with.
    pub fn model(&self) -> &Model {
        &self.shards[self.shard]
    }
}
