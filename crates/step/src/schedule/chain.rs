//! The facts about a chain that schedules need.

use evenkeel_device::DType;
use evenkeel_model::pass::STATS;
use evenkeel_model::{Batch, Bucket, Migration, Model, Unit, UnitKind};

use super::line::TENSOR;
use crate::program::{GroupIdx, Members, UnitIdx, ValueKind};
use crate::strategy::Strategy;

/// A chain of units as one rank runs it. The chains of a tensor-parallel group differ only in their buckets and the bytes of
/// their migrations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The head is the last.
    pub units: Vec<ChainUnit>,
    /// Whether the stream is split by tokens: then every output is partial.
    pub splits_sequence: bool,
    /// Bytes of a token's row of the whole stream.
    pub row_bytes: u64,
    /// Bytes of a rank's statistics of one row's softmax.
    pub stats_bytes: u64,
    /// The tensor-parallel group first.
    pub groups: Vec<Members>,
    /// The data-parallel group, if there is one.
    pub data_group: Option<GroupIdx>,
    /// Summing over these groups, one after another, sums over all ranks that keep different gradients.
    pub keepers: Vec<GroupIdx>,
    pub buckets: Vec<ChainBucket>,
    /// Whether the norms of adapted weights' rows are measured after an update.
    pub measures_rows: bool,
    /// The units that ranks of the tensor-parallel group compute for one another, in their order.
    pub migrations: Vec<ChainMigration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainUnit {
    pub kind: UnitKind,
    /// Whether its output, or the head's softmax, is a summand of the group's.
    pub is_partial: bool,
    /// Norms of the stream at its entry; 0 if it has no entry.
    pub inputs: usize,
    /// Whether it puts something on the stream beside its output.
    pub starts_stream: bool,
    /// Whether some of its parameters are trained, and some of those of its entry.
    pub is_trained: bool,
    pub entry_is_trained: bool,
}

impl ChainUnit {
    /// A trained unit. The embedding has no entry; every other kind normalises the stream once at its entry.
    pub fn of(kind: UnitKind, is_partial: bool) -> ChainUnit {
        let has_entry = kind != UnitKind::Embedding;
        ChainUnit {
            kind,
            is_partial,
            inputs: usize::from(has_entry),
            starts_stream: false,
            is_trained: true,
            entry_is_trained: has_entry,
        }
    }

    pub fn has_entry(&self) -> bool {
        self.inputs > 0
    }
}

/// Parameters whose values and gradients are moved together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainBucket {
    /// The places of the units that compute with them.
    pub users: Vec<usize>,
    /// Whether a unit's entry may compute with them too, not only its body.
    pub is_of_entries: bool,
    /// Whether they have gradients.
    pub is_trained: bool,
    /// The group of ranks that each have a summand of the gradients, if there are several.
    pub summed_in: Option<GroupIdx>,
    /// Of norms of rows: the groups of ranks that each measure a summand, summed over one after another.
    pub measured_in: Vec<GroupIdx>,
    /// Whether rows are measured with them.
    pub measures_rows: bool,
    pub gradient_bytes: u64,
    pub value_bytes: u64,
    /// Whether a rank keeps only its part of the gradients, and of the values.
    pub splits_gradients: bool,
    pub splits_values: bool,
    /// Whether each rank updates its part of values that all ranks compute with.
    pub splits_update: bool,
}

/// A unit in which some rank computes with other parameters than it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainMigration {
    /// Its place.
    pub unit: usize,
    /// Bytes that this rank sends or receives, whichever is more, when the unit migrates and when its gradients return.
    pub value_bytes: u64,
    pub gradient_bytes: u64,
}

/// The size of a part of a micro-batch, which runs through a chain together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PartSize {
    pub tokens: usize,
    /// Rows that the head treats at a time. Chunks without rows are skipped.
    pub chunk_rows: Vec<usize>,
}

impl Chain {
    /// The chain of a rank that computes with this shard of a model.
    pub fn of(model: &Model, strategy: &Strategy, rank: usize) -> Chain {
        assert!(model.first_unit == 0 && model.exit.is_none(), "programs of stages are not written yet");
        let (shard, dtype, mesh) = (&model.shard, strategy.dtype, strategy.mesh());
        assert_eq!((shard.index, shard.count), (mesh.shard(rank), mesh.tp), "ranks have the shards of their places");
        let tensor_ranks = mesh.tensor_ranks(rank);
        let mut groups = vec![Members { name: "tp".to_owned(), ranks: tensor_ranks.clone() }];
        let data_group = (mesh.dp > 1).then(|| {
            groups.push(Members { name: "dp".to_owned(), ranks: mesh.data_ranks(rank) });
            GroupIdx(groups.len() - 1)
        });
        let split = strategy.zero_sharding(rank);
        let factors = model.measured_factors();
        // Replicas that split values each measure what they keep.
        let measured_apart = data_group.filter(|_| split.splits_values());
        let mut kv_group = None;
        let bucket = |bucket: &Bucket| {
            let value_dtype = if bucket.holds_vectors { DType::F32 } else { dtype };
            let summed_in = bucket.summed_over.clone().map(|holders| {
                if holders.len() == mesh.tp {
                    return GroupIdx(0);
                }
                assert_eq!(holders, shard.kv_holders, "parts are held by one shard, by all, or with the kv heads");
                *kv_group.get_or_insert_with(|| {
                    let ranks = tensor_ranks[holders].to_vec();
                    groups.push(Members { name: "tp kv heads".to_owned(), ranks });
                    GroupIdx(groups.len() - 1)
                })
            });
            ChainBucket {
                users: bucket.users.clone(),
                is_of_entries: !bucket.is_of_one_place(),
                is_trained: bucket.is_trained,
                summed_in: summed_in.filter(|_| bucket.is_trained),
                measured_in: summed_in.into_iter().chain(measured_apart).filter(|_| bucket.is_derived).collect(),
                measures_rows: bucket.members.iter().any(|(id, _)| factors.contains(id)),
                gradient_bytes: (bucket.len * DType::F32.size_bytes()) as u64,
                value_bytes: (bucket.len * value_dtype.size_bytes()) as u64,
                splits_gradients: split.splits_gradients_of(bucket),
                splits_values: split.splits_values_of(bucket),
                splits_update: split.splits_state_of(bucket) && !split.splits_values_of(bucket),
            }
        };
        let buckets = model.buckets.iter().map(bucket).collect();
        let of_replicas = data_group.filter(|_| split.splits_state());
        let keepers = (mesh.tp > 1).then_some(TENSOR).into_iter().chain(of_replicas).collect();
        let unit = |unit: &Unit| ChainUnit {
            kind: unit.kind,
            is_partial: unit.is_partial,
            inputs: unit.norm_count(),
            starts_stream: unit.starts_stream(),
            is_trained: model.trains(unit.parameters()),
            entry_is_trained: model.trains(unit.entry_parameters()),
        };
        Chain {
            units: model.units.iter().map(unit).collect(),
            splits_sequence: shard.split_sequence,
            row_bytes: (model.config.hidden * dtype.size_bytes()) as u64,
            stats_bytes: (STATS * DType::F32.size_bytes()) as u64,
            groups,
            data_group,
            keepers,
            buckets,
            measures_rows: model.measures_rows(),
            migrations: Vec::new(),
        }
    }

    /// The same chain with this migration; `shard` is the rank's place in the tensor-parallel group.
    pub fn with_migration(self, migration: &Migration, shard: usize, dtype: DType) -> Chain {
        let migrated = |&unit: &usize| {
            let [value_bytes, gradient_bytes] = migration.bytes(unit, shard, dtype);
            ChainMigration { unit, value_bytes, gradient_bytes }
        };
        Chain { migrations: migration.units.keys().map(migrated).collect(), ..self }
    }

    /// The bytes that are reduced or gathered when the tensor-parallel group exchanges such a value of a part of this size.
    pub(super) fn exchanged_bytes(&self, unit: UnitIdx, sent: ValueKind, size: &PartSize) -> u64 {
        let tensors = match sent {
            ValueKind::Stats(chunk) => {
                let rows = size.chunk_rows[chunk.0] * self.groups[TENSOR.0].ranks.len();
                return rows as u64 * self.stats_bytes;
            }
            // An entry may normalise the stream more than once.
            ValueKind::Normalised | ValueKind::NormalisedGradient => self.units[unit.0].inputs,
            _ => 1,
        };
        (size.tokens * tensors) as u64 * self.row_bytes
    }

    /// The buckets that are gathered to measure rows with them, and their groups.
    pub fn gathered_for_rows(&self) -> impl Iterator<Item = (usize, GroupIdx)> {
        let is_gathered = |bucket: &ChainBucket| bucket.measures_rows && bucket.splits_values;
        let of = move |(index, bucket)| Some((index, self.data_group.filter(|_| is_gathered(bucket))?));
        self.buckets.iter().enumerate().filter_map(of)
    }

    /// The buckets whose values are summed over ranks when rows have been measured, and their groups.
    pub fn summed_rows(&self) -> impl Iterator<Item = (usize, GroupIdx)> {
        let of =
            |(index, bucket): (usize, &ChainBucket)| bucket.measured_in.clone().into_iter().map(move |it| (index, it));
        self.buckets.iter().enumerate().flat_map(of)
    }

    /// The lowest unit that has trained parameters. Those before it have no backward.
    pub(super) fn lowest_trained(&self) -> UnitIdx {
        UnitIdx(
            self.units.iter().position(|unit| unit.is_trained).expect("a model that is trained has something to train"),
        )
    }

    /// The chains of all ranks that run these shards of a model.
    pub fn all(shards: &[Model], strategy: &Strategy) -> Vec<Chain> {
        let chain = |rank: usize| Chain::of(&shards[strategy.mesh().shard(rank)], strategy, rank);
        (0..strategy.ranks()).map(chain).collect()
    }
}

impl PartSize {
    /// A part of so many tokens, in which so many rows get logits.
    pub fn new(model: &Model, tokens: usize, rows: usize) -> PartSize {
        PartSize { tokens, chunk_rows: model.head().chunks(rows).map(|rows| rows.len()).collect() }
    }

    pub fn of(model: &Model, batch: &Batch) -> PartSize {
        PartSize::new(model, batch.token_count(), model.head().rows(batch))
    }

    /// The same with this many chunks; added ones have no rows. Programs of such sizes are alike whatever the number of rows.
    pub fn in_chunks(mut self, chunks: usize) -> PartSize {
        assert!(chunks >= self.chunk_rows.len(), "{chunks} chunks, of which {} have rows", self.chunk_rows.len());
        self.chunk_rows.resize(chunks, 0);
        self
    }
}
