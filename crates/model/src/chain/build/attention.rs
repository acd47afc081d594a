//! Attention's parameters and operations: all heads that a shard holds at once, or strip by strip where shards share groups
//! of heads by samples.

use std::ops::Range;

use evenkeel_device::kernel::Mask;

use super::{BodyBuilder, Builder, LinearCut, LinearSpec, LinearWeights, sharing};
use crate::chain::attention::{Attention, HeadSlot, Sinks};
use crate::chain::body::Slot;
use crate::chain::dropout::{Dropout, Site};
use crate::chain::handed::{HandOn, Handed, TakeHanded};
use crate::chain::linear::{Linear, LinearPart};
use crate::chain::norm::NormSpec;
use crate::chain::on_rows::OnRows;
use crate::chain::op::Op;
use crate::config::family::{QkNorm, Qkv};
use crate::config::{Config, Layer};
use crate::parameters::{Init, ParamId};
use crate::sharding::layout::{Ranges, Sharing, Slice};
use crate::sharding::shard::Shard;
use crate::sharding::strip::Strip;

/// The parameters of a layer's attention.
struct AttentionWeights {
    qkv: QkvWeights,
    /// Of queries, and of keys if the layer has them.
    norms: Vec<NormSpec>,
    sinks: Option<ParamId>,
    out: LinearWeights,
}

#[allow(clippy::large_enum_variant, reason = "there is one at a time, while a layer is built")]
enum QkvWeights {
    Separate([LinearWeights; 3]),
    /// Queries, and keys whose projection is that of values, too.
    WithoutValues([LinearWeights; 2]),
    /// Queries alone; keys and values are those of an earlier layer.
    Queries(LinearWeights),
    /// The first with each head's gate behind its query.
    SeparateWithGate([LinearWeights; 3]),
    FusedBlocks(LinearWeights),
    FusedByGroup(LinearWeights),
}

/// A layer's query heads, and its key and value heads, numbered over the whole layer.
#[derive(Clone, PartialEq)]
struct HeadRanges {
    heads: Range<usize>,
    kv_heads: Range<usize>,
}

impl HeadRanges {
    fn held(shard: &Shard, layer: &Layer, config: &Config) -> HeadRanges {
        let (kv_heads, _) = shard.kv_heads_of(layer, config);
        HeadRanges { heads: shard.heads.clone(), kv_heads }
    }

    /// The heads of groups that shards share.
    fn of_groups(config: &Config, layer: &Layer, groups: &Range<usize>) -> HeadRanges {
        let of_group = |heads: usize| heads / config.kv_heads;
        HeadRanges {
            heads: columns_of(groups, of_group(config.heads)),
            kv_heads: columns_of(groups, of_group(layer.kv_heads)),
        }
    }
}

fn columns_of(heads: &Range<usize>, width: usize) -> Range<usize> {
    heads.start * width..heads.end * width
}

/// The places of heads among those held.
fn among(held: &Range<usize>, heads: &Range<usize>) -> Range<usize> {
    heads.start - held.start..heads.end - held.start
}

/// The inputs of the output layer that come from these heads.
fn out_part(layer: &Layer, held: &HeadRanges, heads: &HeadRanges) -> Option<LinearPart> {
    let columns = columns_of(&among(&held.heads, &heads.heads), layer.head_dim);
    (held != heads).then_some(LinearPart::Inputs(columns))
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
        let weights = self.attention_weights(prefix, layer, shard);
        let held = HeadRanges::held(shard, layer, self.config);
        let is_shared = shard.is_shared_by_samples();
        assert!(!is_shared || !self.config.hands_values_on(), "values are handed on for all samples");
        if !is_shared {
            let attended = self.attend(body, input, &weights, &held, &held, index, layer);
            let linear = body.linear_with(attended, weights.out, None);
            return body.linear(linear);
        }
        let (whole, mut partial): (Vec<Strip>, Vec<Strip>) =
            shard.strips().into_iter().partition(Strip::is_of_all_samples);
        // The whole groups, even if there are none, write all rows of the output and treat its bias.
        let first = shard.kv_heads.start;
        let groups = whole.first().map_or(first..first, |strip| strip.kv_heads.clone());
        let heads = HeadRanges::of_groups(self.config, layer, &groups);
        let attended = if groups.is_empty() {
            let out = body.slot();
            body.ops.push(Op::NoColumns { x: input, out });
            out
        } else {
            self.attend(body, input, &weights, &held, &heads, index, layer)
        };
        let part = out_part(layer, &held, &heads);
        let linear = body.linear_with(attended, weights.out, part);
        let output = body.linear(linear);
        // A strip without rows stands for parameters of which nothing is held.
        if whole.is_empty() && partial.is_empty() {
            partial.push(Strip { kv_heads: groups, shares: 0..0 });
        }
        for strip in partial {
            let heads = HeadRanges::of_groups(self.config, layer, &strip.kv_heads);
            let (x, out) = (body.slot(), body.slot());
            let ops_before = std::mem::take(&mut body.ops);
            let attended = self.attend(body, x, &weights, &held, &heads, index, layer);
            let part = out_part(layer, &held, &heads);
            let linear = body.linear_with(attended, LinearWeights { bias: None, ..weights.out }, part);
            body.linear(Linear { out, adds: true, ..linear });
            let ops = std::mem::replace(&mut body.ops, ops_before);
            body.ops.push(Op::OnRows(OnRows { strip, input, output, x, out, ops }));
        }
        output
    }

    fn attention_weights(&mut self, prefix: &str, layer: &Layer, shard: &Shard) -> AttentionWeights {
        let Config { hidden, heads, qkv_bias, out_bias, .. } = *self.config;
        let Layer { kv_heads, head_dim: dim, .. } = *layer;
        let held = &shard.heads;
        let (held_kv, kv_holders) = &shard.kv_heads_of(layer, self.config);
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
            Qkv::Separate([q, k, v]) | Qkv::SeparateWithGate([q, k, v]) => {
                let kv_sharing =
                    if kv_holders.len() > 1 { Sharing::Summed(kv_holders.clone()) } else { sharing(shard) };
                let of_keys =
                    |name: &str| linear(name, kv_heads * dim, vec![columns_of(held_kv, dim)], kv_sharing.clone());
                let has_gate = matches!(self.names.qkv, Qkv::SeparateWithGate(_));
                let step = if has_gate { 2 * dim } else { dim };
                let q = linear(q, heads * step, vec![columns_of(held, step)], sharing(shard));
                if layer.keys_of.is_some() {
                    QkvWeights::Queries(self.linear_weights(q))
                } else if layer.values_are_keys {
                    assert!(!has_gate, "no model has both");
                    QkvWeights::WithoutValues([q, of_keys(k)].map(|spec| self.linear_weights(spec)))
                } else {
                    let weights = [q, of_keys(k), of_keys(v)].map(|spec| self.linear_weights(spec));
                    if has_gate { QkvWeights::SeparateWithGate(weights) } else { QkvWeights::Separate(weights) }
                }
            }
            Qkv::FusedBlocks(name) => {
                let firsts = [(0, held), (heads, held_kv), (heads + kv_heads, held_kv)];
                let blocks = firsts.map(|(first, held)| columns_of(&(first + held.start..first + held.end), dim));
                let spec = linear(name, (heads + 2 * kv_heads) * dim, blocks.to_vec(), sharing(shard));
                QkvWeights::FusedBlocks(self.linear_weights(spec))
            }
            Qkv::FusedByGroup(name) => {
                let group = (heads / kv_heads + 2) * dim;
                let spec = linear(name, kv_heads * group, vec![columns_of(held_kv, group)], sharing(shard));
                QkvWeights::FusedByGroup(self.linear_weights(spec))
            }
        };
        let norms = self.names.qk_norm.map_or_else(Vec::new, |norm| {
            // Each shard sees its own heads, so each has a summand of the gradient.
            let of_heads = if shard.is_whole() { Sharing::Same } else { Sharing::Summed(0..shard.count) };
            let (names, widths, sharing) = match norm {
                QkNorm::Heads(names) => (names, [dim; 2], of_heads),
                QkNorm::Whole(names) => (names, [heads * dim, kv_heads * dim], Sharing::Same),
            };
            let own = if layer.keys_of.is_some() { 1 } else { 2 };
            let norm =
                |place: usize| self.norm_of(&format!("{prefix}{}", names[place]), widths[place], sharing.clone());
            (0..own).map(norm).collect()
        });
        let sinks = self.config.family.sinks.map(|name| {
            let (slice, init) =
                (Slice::of_cols(1, held.clone()), Init::Normal { deviation: self.config.init_deviation });
            self.tensor(&format!("{prefix}{name}"), vec![heads], slice, sharing(shard), init)
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
        AttentionWeights { qkv, norms, sinks, out }
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
        let [mut q, mut k, mut v] = self.queries_keys_values(body, x, &weights.qkv, layer, held, heads);
        let has_gate = matches!(weights.qkv, QkvWeights::SeparateWithGate(_));
        let gate = has_gate.then(|| HeadSlot { first: q.first + q.dim, ..q });
        for (heads, norm) in [&mut q, &mut k].into_iter().zip(weights.norms.iter().copied()) {
            let (out, stats) = (body.slot(), body.slot());
            let x = match self.names.qk_norm {
                Some(QkNorm::Whole(_)) => HeadSlot::packed(heads.slot, 1, heads.count * heads.dim),
                Some(QkNorm::Heads(_)) | None => *heads,
            };
            let adds = x.slot == v.slot && x.first == v.first;
            body.ops.push(Op::HeadNorm { x, out, stats, norm, adds });
            *heads = HeadSlot::packed(out, heads.count, heads.dim);
        }
        if self.config.family.has_value_norm && layer.keys_of.is_none() {
            let (x, out, stats) = (v, body.slot(), body.slot());
            let Config { norm: kind, epsilon, .. } = *self.config;
            let norm = NormSpec { kind, weight: None, bias: None, weight_offset: 0.0, epsilon };
            body.ops.push(Op::HeadNorm { x, out, stats, norm, adds: false });
            v = HeadSlot::packed(out, v.count, v.dim);
        }
        if let Some(table) = layer.rotary {
            let pairs = self.config.pairs;
            let rotated =
                [(q, true), (k, false)].into_iter().filter(|(_, is_query)| *is_query || layer.keys_of.is_none());
            body.ops.extend(rotated.map(|(x, is_query)| Op::Rotary { x, table, is_query, pairs }));
        }
        if self.config.layers[index..].iter().any(|other| other.keys_of == Some(index)) {
            for (heads, what) in [(k, Handed::Keys(index)), (v, Handed::Values(index))] {
                body.ops.push(Op::HandOn(HandOn { what, x: heads.slot }));
            }
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
            sinks: weights.sinks.map(|logits| Sinks { logits, heads: among(&held.heads, &heads.heads) }),
            first_head: heads.heads.start,
            layer: layer.keys_of.unwrap_or(index),
        }));
        let Some(gate) = gate else { return out };
        let gated = body.slot();
        body.ops.push(Op::GateHeads { x: out, gate, out: gated });
        gated
    }

    fn queries_keys_values(
        &self,
        body: &mut BodyBuilder,
        x: Slot,
        weights: &QkvWeights,
        layer: &Layer,
        held: &HeadRanges,
        heads: &HeadRanges,
    ) -> [HeadSlot; 3] {
        let (dim, is_part) = (layer.head_dim, held != heads);
        let (local, local_kv) = (among(&held.heads, &heads.heads), among(&held.kv_heads, &heads.kv_heads));
        let mut project = |weights: LinearWeights, columns: Range<usize>| {
            let linear = body.linear_with(x, weights, is_part.then_some(LinearPart::Outputs(columns)));
            body.linear(linear)
        };
        let packed = |slot: Slot, count: usize| HeadSlot::packed(slot, count, dim);
        match weights {
            QkvWeights::SeparateWithGate([q, k, v]) => {
                let slot = project(*q, columns_of(&local, 2 * dim));
                let [k, v] =
                    [k, v].map(|weights| packed(project(*weights, columns_of(&local_kv, dim)), local_kv.len()));
                [HeadSlot { step: 2 * dim, ..packed(slot, local.len()) }, k, v]
            }
            QkvWeights::Separate([q, k, v]) => [(q, &local), (k, &local_kv), (v, &local_kv)]
                .map(|(weights, local)| packed(project(*weights, columns_of(local, dim)), local.len())),
            QkvWeights::Queries(q) => {
                let q = packed(project(*q, columns_of(&local, dim)), local.len());
                let source = layer.keys_of.expect("a layer without keys has those of another");
                let [k, v] = [Handed::Keys(source), Handed::Values(source)].map(|what| {
                    let out = body.slot();
                    body.ops.push(Op::TakeHanded(TakeHanded { what, columns: None, out }));
                    packed(out, local_kv.len())
                });
                [q, k, v]
            }
            QkvWeights::WithoutValues([q, k]) => {
                let [q, k] = [(q, &local), (k, &local_kv)]
                    .map(|(weights, local)| packed(project(*weights, columns_of(local, dim)), local.len()));
                [q, k, k]
            }
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
            QkvWeights::FusedByGroup(weights) => {
                let queries = self.config.heads / layer.kv_heads * dim;
                let step = queries + 2 * dim;
                let slot = project(*weights, columns_of(&local_kv, step));
                let part = |first: usize, dim: usize| HeadSlot { slot, first, count: local_kv.len(), dim, step };
                let q = match local_kv.len() {
                    1 => packed(slot, local.len()),
                    _ if queries == dim => part(0, dim),
                    _ => {
                        let out = body.slot();
                        body.ops.push(Op::TakeHeads { x: part(0, queries), out, alone: false });
                        packed(out, local.len())
                    }
                };
                [q, part(queries, dim), part(queries + dim, dim)]
            }
        }
    }
}
