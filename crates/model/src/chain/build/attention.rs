//! Attention's parameters and operations: all heads that a shard holds at once, or strip by strip where shards share groups
//! of heads by samples.

use std::ops::Range;

use evenkeel_device::kernel::Mask;

use super::{BodyBuilder, Builder, LinearCut, LinearSpec, LinearWeights, sharing};
use crate::chain::body::Slot;
use crate::chain::dropout::{Dropout, Site};
use crate::chain::linear::{Linear, LinearPart};
use crate::chain::norm::NormSpec;
use crate::chain::on_rows::OnRows;
use crate::chain::op::{Attention, HeadSlot, Op};
use crate::config::family::{QkNorm, Qkv};
use crate::config::{Config, Layer};
use crate::sharding::layout::{Ranges, Sharing};
use crate::sharding::shard::Shard;
use crate::sharding::strip::Strip;

/// The parameters of a layer's attention.
struct AttentionWeights {
    qkv: QkvWeights,
    norms: Option<[NormSpec; 2]>,
    out: LinearWeights,
}

#[allow(clippy::large_enum_variant, reason = "there is one at a time, while a layer is built")]
enum QkvWeights {
    Separate([LinearWeights; 3]),
    FusedBlocks(LinearWeights),
    FusedByHead(LinearWeights),
}

/// Query heads, and key and value heads, numbered over the whole model.
#[derive(Clone, PartialEq)]
struct HeadRanges {
    heads: Range<usize>,
    kv_heads: Range<usize>,
}

impl HeadRanges {
    fn held(shard: &Shard) -> HeadRanges {
        HeadRanges { heads: shard.heads.clone(), kv_heads: shard.kv_heads.clone() }
    }

    fn of_groups(config: &Config, kv_heads: Range<usize>) -> HeadRanges {
        let group = config.heads / config.kv_heads;
        HeadRanges { heads: kv_heads.start * group..kv_heads.end * group, kv_heads }
    }
}

fn columns_of(heads: &Range<usize>, width: usize) -> Range<usize> {
    heads.start * width..heads.end * width
}

/// The places of heads among those held.
fn among(held: &Range<usize>, heads: &Range<usize>) -> Range<usize> {
    heads.start - held.start..heads.end - held.start
}

impl Builder<'_> {
    pub(super) fn attention(
        &mut self,
        body: &mut BodyBuilder,
        input: Slot,
        prefix: &str,
        index: usize,
        layer: &Layer,
        shard: &Shard,
    ) -> Slot {
        let weights = self.attention_weights(prefix, shard);
        let held = HeadRanges::held(shard);
        if !shard.is_shared_by_samples() {
            let attended = self.attend(body, input, &weights, &held, &held, index, layer);
            let linear = body.linear_with(attended, weights.out, None);
            return body.linear(linear);
        }
        let (whole, mut partial): (Vec<Strip>, Vec<Strip>) =
            shard.strips().into_iter().partition(Strip::is_of_all_samples);
        // The whole groups, even if there are none, write all rows of the output and treat its bias.
        let groups = whole.first().map_or(held.kv_heads.start..held.kv_heads.start, |strip| strip.kv_heads.clone());
        let heads = HeadRanges::of_groups(self.config, groups.clone());
        let attended = if groups.is_empty() {
            let out = body.slot();
            body.ops.push(Op::NoColumns { x: input, out });
            out
        } else {
            self.attend(body, input, &weights, &held, &heads, index, layer)
        };
        let part = self.out_part(&held, &heads);
        let linear = body.linear_with(attended, weights.out, part);
        let output = body.linear(linear);
        // A strip without rows stands for parameters of which nothing is held.
        if whole.is_empty() && partial.is_empty() {
            partial.push(Strip { kv_heads: groups, shares: 0..0 });
        }
        for strip in partial {
            let heads = HeadRanges::of_groups(self.config, strip.kv_heads.clone());
            let (x, out) = (body.slot(), body.slot());
            let ops_before = std::mem::take(&mut body.ops);
            let attended = self.attend(body, x, &weights, &held, &heads, index, layer);
            let part = self.out_part(&held, &heads);
            let linear = body.linear_with(attended, LinearWeights { bias: None, ..weights.out }, part);
            body.linear(Linear { out, adds: true, ..linear });
            let ops = std::mem::replace(&mut body.ops, ops_before);
            body.ops.push(Op::OnRows(OnRows { strip, input, output, x, out, ops }));
        }
        output
    }

    fn attention_weights(&mut self, prefix: &str, shard: &Shard) -> AttentionWeights {
        let Config { hidden, heads, kv_heads, head_dim: dim, qkv_bias, out_bias, .. } = *self.config;
        let Shard { heads: held, kv_heads: held_kv, kv_holders, .. } = shard;
        let linear = |name: &str, outputs: usize, held: Vec<Range<usize>>, sharing| LinearSpec {
            name: format!("{prefix}{name}"),
            dims: [hidden, outputs],
            cut: LinearCut::Outputs(Ranges::new(held)),
            sharing,
            has_bias: qkv_bias,
            transposed: self.config.family.is_transposed,
            init_scale: 1.0,
        };
        let qkv = match self.names.qkv {
            Qkv::Separate([q, k, v]) => {
                let kv_sharing =
                    if kv_holders.len() > 1 { Sharing::Summed(kv_holders.clone()) } else { sharing(shard) };
                let of_keys =
                    |name: &str| linear(name, kv_heads * dim, vec![columns_of(held_kv, dim)], kv_sharing.clone());
                let q = linear(q, heads * dim, vec![columns_of(held, dim)], sharing(shard));
                QkvWeights::Separate([q, of_keys(k), of_keys(v)].map(|spec| self.linear_weights(spec)))
            }
            Qkv::FusedBlocks(name) => {
                let firsts = [(0, held), (heads, held_kv), (heads + kv_heads, held_kv)];
                let blocks = firsts.map(|(first, held)| columns_of(&(first + held.start..first + held.end), dim));
                let spec = linear(name, (heads + 2 * kv_heads) * dim, blocks.to_vec(), sharing(shard));
                QkvWeights::FusedBlocks(self.linear_weights(spec))
            }
            Qkv::FusedByHead(name) => {
                let spec = linear(name, 3 * heads * dim, vec![columns_of(held, 3 * dim)], sharing(shard));
                QkvWeights::FusedByHead(self.linear_weights(spec))
            }
        };
        let norms = self.names.qk_norm.map(|norm| {
            // Each shard sees its own heads, so each has a summand of the gradient.
            let of_heads = if shard.is_whole() { Sharing::Same } else { Sharing::Summed(0..shard.count) };
            let (names, widths, sharing) = match norm {
                QkNorm::Heads(names) => (names, [dim; 2], of_heads),
                QkNorm::Whole(names) => (names, [heads * dim, kv_heads * dim], Sharing::Same),
            };
            let mut norm =
                |place: usize| self.norm_of(&format!("{prefix}{}", names[place]), widths[place], sharing.clone());
            [norm(0), norm(1)]
        });
        let out = self.linear_weights(LinearSpec {
            name: format!("{prefix}{}", self.names.out),
            dims: [heads * dim, hidden],
            cut: LinearCut::Inputs(columns_of(held, dim)),
            sharing: sharing(shard),
            has_bias: out_bias,
            transposed: self.config.family.is_transposed,
            init_scale: self.out_scale(),
        });
        AttentionWeights { qkv, norms, out }
    }

    /// The inputs of the output layer that come from these heads.
    fn out_part(&self, held: &HeadRanges, heads: &HeadRanges) -> Option<LinearPart> {
        let columns = columns_of(&among(&held.heads, &heads.heads), self.config.head_dim);
        (held != heads).then_some(LinearPart::Inputs(columns))
    }

    /// Adds the operations of some of the held heads, up to the output layer; returns the slot of their outputs, side by side.
    fn attend(
        &self,
        body: &mut BodyBuilder,
        x: Slot,
        weights: &AttentionWeights,
        held: &HeadRanges,
        heads: &HeadRanges,
        index: usize,
        layer: &Layer,
    ) -> Slot {
        let [mut q, mut k, v] = self.queries_keys_values(body, x, &weights.qkv, held, heads);
        for (heads, norm) in [&mut q, &mut k].into_iter().zip(weights.norms.into_iter().flatten()) {
            let (x, out, stats) = (heads.slot, body.slot(), body.slot());
            body.ops.push(Op::HeadNorm { x, out, stats, norm });
            heads.slot = out;
        }
        if let Some(table) = layer.rotary {
            let pairs = self.config.pairs;
            body.ops.extend([q, k].map(|x| Op::Rotary { x, table, pairs }));
        }
        let (out, logsum) = (body.slot(), body.slot());
        body.ops.push(Op::Attention(Attention {
            q,
            k,
            v,
            out,
            logsum,
            mask: Mask { causal: self.config.causal, window: layer.window },
            scale: self.config.attention_scale * layer.scale,
            cap: self.config.score_cap,
            dropout: Dropout::new(self.config.dropouts.attention, Site::AttentionWeights(index)),
            first_head: heads.heads.start,
            layer: index,
        }));
        out
    }

    fn queries_keys_values(
        &self,
        body: &mut BodyBuilder,
        x: Slot,
        weights: &QkvWeights,
        held: &HeadRanges,
        heads: &HeadRanges,
    ) -> [HeadSlot; 3] {
        let (dim, is_part) = (self.config.head_dim, held != heads);
        let (local, local_kv) = (among(&held.heads, &heads.heads), among(&held.kv_heads, &heads.kv_heads));
        let mut project = |weights: LinearWeights, columns: Range<usize>| {
            let linear = body.linear_with(x, weights, is_part.then_some(LinearPart::Outputs(columns)));
            body.linear(linear)
        };
        let packed = |slot: Slot, count: usize| HeadSlot { slot, first: 0, count, dim, step: dim };
        match weights {
            QkvWeights::Separate([q, k, v]) => [(q, &local), (k, &local_kv), (v, &local_kv)]
                .map(|(weights, local)| packed(project(*weights, columns_of(local, dim)), local.len())),
            QkvWeights::FusedBlocks(weights) => {
                let (queries, keys) = (held.heads.len(), held.kv_heads.len());
                let blocks = [(0, &local), (queries, &local_kv), (queries + keys, &local_kv)];
                // A part of each block is not one range of columns.
                if is_part {
                    blocks.map(|(first, local)| {
                        let columns = columns_of(&(first + local.start..first + local.end), dim);
                        packed(project(*weights, columns), local.len())
                    })
                } else {
                    let slot = project(*weights, columns_of(&(0..queries + 2 * keys), dim));
                    blocks.map(|(first, local)| HeadSlot { first: first * dim, ..packed(slot, local.len()) })
                }
            }
            QkvWeights::FusedByHead(weights) => {
                let slot = project(*weights, columns_of(&local, 3 * dim));
                [0, 1, 2].map(|part| HeadSlot { first: part * dim, step: 3 * dim, ..packed(slot, local.len()) })
            }
        }
    }
}
