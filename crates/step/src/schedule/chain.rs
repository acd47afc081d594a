//! What is known of a chain to schedule it.

use evenkeel_device::DType;
use evenkeel_model::pass::STATS;
use evenkeel_model::{Batch, Model, Unit, UnitKind, summed};

use crate::program::{GroupIdx, Members};

/// A chain of units as one rank runs it. The ranks of a tensor-parallel group have the same but for what they sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Before the head.
    pub units: Vec<ChainUnit>,
    pub head_is_partial: bool,
    /// Whether the first unit puts something on the stream beside its output.
    pub starts_stream: bool,
    /// Whether the stream is split by tokens: then every output is partial.
    pub splits_sequence: bool,
    /// Of a token's row of the whole stream.
    pub row_bytes: u64,
    /// What a rank's logits say of one row's softmax.
    pub stats_bytes: u64,
    /// The tensor-parallel group, then those of ranks that sum gradients.
    pub groups: Vec<Members>,
    pub summed: Vec<Summed>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainUnit {
    pub kind: UnitKind,
    /// Whether its output is a summand of the group's.
    pub is_partial: bool,
    /// How often its entry normalises the stream.
    pub inputs: usize,
}

/// Gradients of parameters that several ranks hold, each a summand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summed {
    pub group: GroupIdx,
    pub bytes: u64,
}

/// The size of what runs through a chain together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartSize {
    pub tokens: usize,
    /// Rows that the head treats at a time.
    pub chunk_rows: Vec<usize>,
}

impl Chain {
    /// The chain of a shard that rank `ranks[shard.index]` computes with; the others' are those of the other ranks.
    pub fn of(model: &Model, dtype: DType, ranks: &[usize]) -> Chain {
        let shard = &model.shard;
        assert_eq!(ranks.len(), shard.count, "one rank for each shard");
        let mut groups = vec![Members { name: "tp".to_owned(), ranks: ranks.to_vec() }];
        let sums = summed(&model.specs).into_iter().map(|(holders, members)| {
            let elements: usize = members.iter().map(|id| model.specs[id.0].len()).sum();
            let group = if holders.len() == ranks.len() {
                GroupIdx(0)
            } else {
                assert_eq!(holders, shard.kv_holders, "parts are held by one shard, by all, or with the kv heads");
                groups.push(Members { name: "tp kv heads".to_owned(), ranks: ranks[holders].to_vec() });
                GroupIdx(groups.len() - 1)
            };
            Summed { group, bytes: (elements * DType::F32.size_bytes()) as u64 }
        });
        let summed = sums.collect();
        let unit =
            |unit: &Unit| ChainUnit { kind: unit.kind, is_partial: unit.is_partial, inputs: unit.entry.norm_count() };
        Chain {
            units: model.units.iter().map(unit).collect(),
            head_is_partial: model.head.is_partial,
            starts_stream: model.units[0].body.starts_stream(),
            splits_sequence: shard.split_sequence,
            row_bytes: (model.config.hidden * dtype.size_bytes()) as u64,
            stats_bytes: (STATS * DType::F32.size_bytes()) as u64,
            groups,
            summed,
        }
    }

    /// The chains of all shards of a model, each on the rank of its number.
    pub fn all(shards: &[Model], dtype: DType) -> Vec<Chain> {
        let ranks: Vec<usize> = (0..shards.len()).collect();
        shards.iter().map(|shard| Chain::of(shard, dtype, &ranks)).collect()
    }
}

impl PartSize {
    /// Of so many tokens, of which so many rows get logits.
    pub fn new(model: &Model, tokens: usize, rows: usize) -> PartSize {
        PartSize { tokens, chunk_rows: model.head.chunks(rows).map(|rows| rows.len()).collect() }
    }

    pub fn of(model: &Model, batch: &Batch) -> PartSize {
        PartSize::new(model, batch.token_count(), model.head.rows(batch))
    }
}
