//! The facts about a chain that schedules need.

use std::collections::BTreeMap;
use std::ops::Range;

use evenkeel_device::DType;
use evenkeel_model::pass::STATS;
use evenkeel_model::{Batch, Bucket, Migration, Model, Unit, UnitKind};

use super::line::TENSOR;
use crate::pipeline::Pipeline;
use crate::program::{GroupIdx, Members, UnitIdx, ValueKind};
use crate::strategy::Strategy;

/// A chain of units as one rank runs it. The chains of a tensor-parallel group differ only in their buckets, their groups and the
/// bytes of their migrations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Those of the whole network, of which the rank may compute only some. The head is the last.
    pub units: Vec<ChainUnit>,
    pub stages: ChainStages,
    /// Whether the stream is split by tokens: then every output is partial.
    pub splits_sequence: bool,
    /// Bytes of a token's row of the whole stream.
    pub row_bytes: u64,
    /// Bytes of the squares that a norm is added up from.
    pub squares_bytes: u64,
    /// Bytes of a rank's statistics of one row's softmax.
    pub stats_bytes: u64,
    /// The tensor-parallel group first.
    pub groups: Vec<Members>,
    /// The data-parallel group, if there is one, and the group of the pipeline's places.
    pub data_group: Option<GroupIdx>,
    pub pipeline_group: Option<GroupIdx>,
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
    /// How many times as wide as the stream its output is.
    pub outputs: usize,
    /// Whether it puts something on the stream beside its output.
    pub starts_stream: bool,
    /// Whether some of its parameters are trained, and some of those of its entry.
    pub is_trained: bool,
    pub entry_is_trained: bool,
    /// Whether a norm of the output that joins the stream at its entry is trained.
    pub join_is_trained: bool,
}

/// The stages of a network, and a rank's place among them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChainStages {
    pub pipeline: Pipeline,
    /// Places of the pipeline, and the rank's; no places are one.
    pub places: usize,
    pub place: usize,
    /// By a stage's first unit: the group of the rank and the one that passes it the stream, or that it passes it to.
    pub passes: BTreeMap<usize, GroupIdx>,
}

impl ChainUnit {
    /// A trained unit. The embedding has no entry; every other kind normalises the stream once at its entry.
    pub fn of(kind: UnitKind, is_partial: bool) -> ChainUnit {
        let has_entry = kind != UnitKind::Embedding;
        ChainUnit {
            kind,
            is_partial,
            inputs: usize::from(has_entry),
            outputs: 1,
            starts_stream: false,
            is_trained: true,
            entry_is_trained: has_entry,
            join_is_trained: false,
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
    /// Whether stages at different places hold it: the table of embedding and head, if it is tied.
    pub is_shared_table: bool,
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

impl ChainBucket {
    /// The unit that its exchanges name: the first that computes with it on any rank.
    pub(super) fn unit(&self) -> UnitIdx {
        UnitIdx(if self.is_shared_table { 0 } else { self.users[0] })
    }
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
    /// The chain of a rank that computes with this shard of a model, or with some stages of it.
    pub fn of(model: &Model, strategy: &Strategy, rank: usize) -> Chain {
        assert!(model.is_whole_chain(), "a chain knows the units of all stages");
        let (shard, dtype, mesh) = (&model.shard, strategy.dtype, strategy.mesh());
        assert_eq!((shard.index, shard.count), (mesh.shard(rank), mesh.tp), "ranks have the shards of their places");
        let tensor_ranks = mesh.tensor_ranks(rank);
        let mut groups = vec![Members { name: "tp".to_owned(), ranks: tensor_ranks.clone() }];
        let data_group = (mesh.dp > 1).then(|| {
            groups.push(Members { name: "dp".to_owned(), ranks: mesh.data_ranks(rank) });
            GroupIdx(groups.len() - 1)
        });
        let stages = ChainStages::of(model, strategy, rank, &mut groups);
        let pipeline_group = (mesh.pp > 1).then(|| {
            groups.push(Members { name: "pp".to_owned(), ranks: mesh.place_ranks(rank) });
            GroupIdx(groups.len() - 1)
        });
        let table_group = tied_group(model, strategy, rank, &mut groups);
        let own = if mesh.pp > 1 { &model.stages(&strategy.units(rank, model.units.len())) } else { model };
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
            let holds_table = bucket.members.iter().any(|(id, _)| *id == model.table());
            let shared = table_group.filter(|_| holds_table && bucket.is_trained);
            assert!(shared.is_none() || summed_in.is_none(), "shards sum no gradients of a table that they cut");
            ChainBucket {
                users: bucket.users.clone(),
                is_shared_table: shared.is_some(),
                is_of_entries: !bucket.is_of_one_place(),
                is_trained: bucket.is_trained,
                summed_in: summed_in.filter(|_| bucket.is_trained).or(shared),
                measured_in: summed_in.into_iter().chain(measured_apart).filter(|_| bucket.is_derived).collect(),
                measures_rows: bucket.members.iter().any(|(id, _)| factors.contains(id)),
                gradient_bytes: (bucket.len * DType::F32.size_bytes()) as u64,
                value_bytes: (bucket.len * value_dtype.size_bytes()) as u64,
                splits_gradients: split.splits_gradients_of(bucket),
                splits_values: split.splits_values_of(bucket),
                splits_update: split.splits_state_of(bucket) && !split.splits_values_of(bucket),
            }
        };
        let buckets = own.buckets.iter().map(bucket).collect();
        let of_replicas = data_group.filter(|_| split.splits_state());
        let keepers = (mesh.tp > 1).then_some(TENSOR).into_iter().chain(of_replicas).chain(pipeline_group).collect();
        let unit = |unit: &Unit| ChainUnit {
            kind: unit.kind,
            is_partial: unit.is_partial,
            inputs: unit.input_count(),
            outputs: unit.output_count(),
            starts_stream: unit.starts_stream(),
            is_trained: model.trains(unit.parameters()),
            entry_is_trained: model.trains(unit.entry_parameters()),
            join_is_trained: model.trains(unit.join_parameters()),
        };
        Chain {
            units: model.units.iter().map(unit).collect(),
            stages,
            splits_sequence: shard.split_sequence,
            row_bytes: (model.config.hidden * dtype.size_bytes()) as u64,
            squares_bytes: (model.specs.len() * DType::F32.size_bytes()) as u64,
            stats_bytes: (STATS * DType::F32.size_bytes()) as u64,
            groups,
            data_group,
            pipeline_group,
            keepers,
            buckets,
            measures_rows: own.measures_rows(),
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

    /// Bytes of the stream that the tensor-parallel group passes to another stage.
    pub(super) fn passed_bytes(&self, size: &PartSize) -> u64 {
        size.tokens as u64 * self.row_bytes
    }

    /// Whether something before a unit's norms is trained: then the gradient of the stream is wanted before the unit.
    pub(super) fn trains_before(&self, unit: usize) -> bool {
        self.lowest_trained().0 < unit || self.units[unit].join_is_trained
    }

    /// The units of a stage.
    pub(super) fn stage(&self, stage: usize) -> Range<usize> {
        self.stages.pipeline.units(stage, self.units.len())
    }

    /// Whether the rank computes losses: it has the head.
    pub fn has_head(&self) -> bool {
        let ChainStages { pipeline, places, place, .. } = &self.stages;
        pipeline.is_absent() || pipeline.place(pipeline.stages() - 1, *places) == *place
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
            ValueKind::Output | ValueKind::OutputGradient => self.units[unit.0].outputs,
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

impl ChainStages {
    /// Adds the groups in which the rank passes streams, if there are several stages.
    fn of(model: &Model, strategy: &Strategy, rank: usize, groups: &mut Vec<Members>) -> ChainStages {
        let (mesh, pipeline) = (strategy.mesh(), &strategy.pipeline);
        if mesh.pp == 1 {
            assert!(pipeline.is_absent(), "one place has one stage");
            return ChainStages::default();
        }
        let (place, ranks) = (mesh.place(rank), mesh.place_ranks(rank));
        let mut passes = BTreeMap::new();
        for stage in 1..pipeline.stages() {
            let [below, above] = [stage - 1, stage].map(|stage| pipeline.place(stage, mesh.pp));
            if below != above && [below, above].contains(&place) {
                let unit = pipeline.units(stage, model.units.len()).start;
                groups.push(Members {
                    name: format!("pp {unit}"),
                    ranks: vec![ranks[below.min(above)], ranks[below.max(above)]],
                });
                passes.insert(unit, GroupIdx(groups.len() - 1));
            }
        }
        ChainStages { pipeline: pipeline.clone(), places: mesh.pp, place, passes }
    }
}

/// Adds the group of the ranks that hold the table of embedding and head, if it is tied and they are at different places.
fn tied_group(model: &Model, strategy: &Strategy, rank: usize, groups: &mut Vec<Members>) -> Option<GroupIdx> {
    let (mesh, pipeline) = (strategy.mesh(), &strategy.pipeline);
    let last = pipeline.place(pipeline.stages() - 1, mesh.pp);
    if !model.config.tied || last == 0 || ![0, last].contains(&mesh.place(rank)) {
        return None;
    }
    let ranks = mesh.place_ranks(rank);
    groups.push(Members { name: "tied".to_owned(), ranks: vec![ranks[0], ranks[last]] });
    Some(GroupIdx(groups.len() - 1))
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
