//! The parameters and operations of linear attention. It is cut by key heads, each with its value heads.

use std::ops::Range;

use evenkeel_device::kernel::Activation;

use super::{BodyBuilder, Builder, LinearCut, LinearSpec, sharing};
use crate::chain::attention::HeadSlot;
use crate::chain::body::Slot;
use crate::chain::delta::{Delta, DynamicConv, GatedNorm, ShortConv};
use crate::chain::linear::Linear;
use crate::chain::op::Op;
use crate::config::LinearAttention;
use crate::config::family::{Convolution, LinearAttentionNames, Projections};
use crate::parameters::{Init, ParamId};
use crate::sharding::layout::{Ranges, Sharing, Slice};
use crate::sharding::shard::Shard;

/// A layer's linear attention on a shard.
struct Site<'a> {
    prefix: &'a str,
    layer: usize,
    sizes: LinearAttention,
    names: &'a LinearAttentionNames,
    shard: &'a Shard,
    /// Heads, numbered over the whole model.
    keys: Range<usize>,
    values: Range<usize>,
}

/// Linear attention's inputs, projected.
struct Projected {
    qkv: QkvSlots,
    gate: Slot,
    take: Slot,
    fade: Slot,
}

/// Where queries, keys and values lie.
#[derive(Clone, Copy)]
enum QkvSlots {
    Together(Slot),
    Apart([Slot; 3]),
}

impl Site<'_> {
    fn ratio(&self) -> usize {
        self.sizes.value_heads / self.sizes.key_heads
    }

    fn all_keys(&self) -> usize {
        self.sizes.key_heads * self.sizes.key_dim
    }

    fn all_values(&self) -> usize {
        self.sizes.value_heads * self.sizes.value_dim
    }

    fn held_keys(&self) -> Range<usize> {
        columns_of(&self.keys, self.sizes.key_dim)
    }

    fn held_values(&self) -> Range<usize> {
        columns_of(&self.values, self.sizes.value_dim)
    }

    /// The held ones of all queries, all keys and all values, one behind the other.
    fn blocks(&self) -> Vec<Range<usize>> {
        let behind = |block: Range<usize>, rows: usize| block.start + rows..block.end + rows;
        let keys = self.held_keys();
        vec![keys.clone(), behind(keys, self.all_keys()), behind(self.held_values(), 2 * self.all_keys())]
    }
}

impl Builder<'_> {
    pub(super) fn linear_attention(
        &mut self,
        body: &mut BodyBuilder,
        x: Slot,
        prefix: &str,
        layer: usize,
        sizes: LinearAttention,
        names: &LinearAttentionNames,
        shard: &Shard,
    ) -> Slot {
        let keys = shard.linear_heads(self.config, sizes.key_heads);
        let ratio = sizes.value_heads / sizes.key_heads;
        let site = Site { values: keys.start * ratio..keys.end * ratio, keys, prefix, layer, sizes, names, shard };
        let projected = self.project(body, x, &site);
        let qkv = match &names.convolution {
            Convolution::Same(name) => self.convolve(body, projected.qkv, name, &site),
            Convolution::Generated { narrow, wide } => {
                let QkvSlots::Apart([q, k, v]) = projected.qkv else { unreachable!("values lie by themselves") };
                QkvSlots::Apart([q, k, self.convolve_dynamically(body, x, v, [narrow, wide], &site)])
            }
        };
        let attended = self.delta(body, qkv, &projected, &site);
        let gated = self.gated_norm(body, attended, projected.gate, &site);
        let linear = LinearSpec {
            name: format!("{prefix}{}", names.out),
            dims: [site.all_values(), self.config.hidden],
            cut: LinearCut::Inputs(site.held_values()),
            sharing: sharing(shard),
            has_bias: false,
            transposed: false,
            init_scale: 1.0,
        };
        self.linear(body, gated, linear)
    }

    fn project(&mut self, body: &mut BodyBuilder, x: Slot, site: &Site) -> Projected {
        let Site { sizes, keys, values, .. } = site;
        let mut linear = |body: &mut BodyBuilder, name: &str, outputs: usize, rows: Vec<Range<usize>>| {
            self.head_projection(body, x, name, outputs, rows, site)
        };
        match site.names.projections {
            Projections::Apart { qkv, gate, take, fade } => Projected {
                qkv: QkvSlots::Together(linear(body, qkv, 2 * site.all_keys() + site.all_values(), site.blocks())),
                gate: linear(body, gate, site.all_values(), vec![site.held_values()]),
                take: linear(body, take, sizes.value_heads, vec![values.clone()]),
                fade: linear(body, fade, sizes.value_heads, vec![values.clone()]),
            },
            Projections::Separate { qkv: [q, k, v], gate, take, fade } => {
                let v = linear(body, v, site.all_values(), vec![site.held_values()]);
                let gate = linear(body, gate, site.all_values(), vec![site.held_values()]);
                let take = linear(body, take, sizes.value_heads, vec![values.clone()]);
                let fade = linear(body, fade, sizes.value_heads, vec![values.clone()]);
                let [q, k] = [q, k].map(|name| {
                    let spec = self.projection_spec(name, site.all_keys(), vec![site.held_keys()], site);
                    let linear = self.linear_op(body, x, spec);
                    activated(body, linear)
                });
                Projected { qkv: QkvSlots::Apart([q, k, v]), gate, take, fade }
            }
            Projections::ByHead { qkvz, ba } => {
                let (ratio, key_dim) = (site.ratio(), sizes.key_dim);
                let value_dim = ratio * sizes.value_dim;
                let [together, gates] = [2 * key_dim + 2 * value_dim, 2 * ratio];
                let qkvz = linear(body, qkvz, sizes.key_heads * together, vec![columns_of(keys, together)]);
                let ba = linear(body, ba, sizes.key_heads * gates, vec![columns_of(keys, gates)]);
                let mut part = |slot: Slot, step: usize, first: usize, dim: usize| {
                    let (x, out) = (HeadSlot { slot, first, count: keys.len(), dim, step }, body.slot());
                    body.ops.push(Op::TakeHeads { x, out, alone: false });
                    out
                };
                Projected {
                    qkv: QkvSlots::Apart([
                        part(qkvz, together, 0, key_dim),
                        part(qkvz, together, key_dim, key_dim),
                        part(qkvz, together, 2 * key_dim, value_dim),
                    ]),
                    gate: part(qkvz, together, 2 * key_dim + value_dim, value_dim),
                    take: part(ba, gates, 0, ratio),
                    fade: part(ba, gates, ratio, ratio),
                }
            }
        }
    }

    fn head_projection(
        &mut self,
        body: &mut BodyBuilder,
        x: Slot,
        name: &str,
        outputs: usize,
        rows: Vec<Range<usize>>,
        site: &Site,
    ) -> Slot {
        let spec = self.projection_spec(name, outputs, rows, site);
        self.linear(body, x, spec)
    }

    fn projection_spec(&self, name: &str, outputs: usize, rows: Vec<Range<usize>>, site: &Site) -> LinearSpec {
        LinearSpec {
            name: format!("{}{name}", site.prefix),
            dims: [self.config.hidden, outputs],
            cut: LinearCut::Outputs(Ranges::new(rows)),
            sharing: sharing(site.shard),
            has_bias: false,
            transposed: false,
            init_scale: 1.0,
        }
    }

    /// A convolution of queries, keys and values.
    fn convolve(&mut self, body: &mut BodyBuilder, qkv: QkvSlots, name: &str, site: &Site) -> QkvSlots {
        let Site { prefix, layer, sizes: LinearAttention { taps, .. }, .. } = *site;
        let columns = 2 * site.all_keys() + site.all_values();
        let slice = Slice::of_rows(Ranges::new(site.blocks()), taps);
        let init = Init::Uniform { bound: 1.0 / (taps as f32).sqrt() };
        let weight = self.tensor(&format!("{prefix}{name}"), vec![columns, 1, taps], slice, sharing(site.shard), init);
        let mut convolve = |x: Slot, columns: Range<usize>| {
            let out = body.slot();
            body.ops.push(Op::ShortConv(ShortConv { x, weight, columns, out, layer }));
            out
        };
        let (keys, values) = (site.held_keys().len(), site.held_values().len());
        match qkv {
            QkvSlots::Together(x) => QkvSlots::Together(convolve(x, 0..2 * keys + values)),
            QkvSlots::Apart([q, k, v]) => QkvSlots::Apart([
                convolve(q, 0..keys),
                convolve(k, keys..2 * keys),
                convolve(v, 2 * keys..2 * keys + values),
            ]),
        }
    }

    /// A convolution of values with weights that two layers make of each token. Every shard computes the whole narrow one.
    fn convolve_dynamically(
        &mut self,
        body: &mut BodyBuilder,
        x: Slot,
        v: Slot,
        [narrow, wide]: [&str; 2],
        site: &Site,
    ) -> Slot {
        let Site { prefix, layer, sizes: LinearAttention { taps, generator, .. }, .. } = *site;
        let width = generator.expect("a model whose convolutions are generated says by what");
        let spec = |name: &str, dims: [usize; 2], held: Range<usize>, sharing: Sharing, has_bias: bool| LinearSpec {
            name: format!("{prefix}{name}"),
            dims,
            cut: LinearCut::Outputs(held.into()),
            sharing,
            has_bias,
            transposed: false,
            init_scale: 1.0,
        };
        let whole = self.summed(&sharing(site.shard));
        let linear = self.linear_op(body, x, spec(narrow, [self.config.hidden, width], 0..width, whole, false));
        let narrow = activated(body, linear);
        let held = columns_of(&site.held_values(), taps);
        let wide = spec(wide, [width, site.all_values() * taps], held, sharing(site.shard), true);
        let weights = self.linear(body, narrow, wide);
        // They are as large as all else that backward reads of a layer.
        body.again.push(weights);
        let (out, columns) = (body.slot(), site.held_values().len());
        body.ops.push(Op::DynamicConv(DynamicConv { x: v, weights, columns, taps, out, layer }));
        out
    }

    fn delta(&mut self, body: &mut BodyBuilder, qkv: QkvSlots, projected: &Projected, site: &Site) -> Slot {
        let Site { sizes: LinearAttention { key_dim, value_dim, .. }, keys, values, .. } = site;
        let [log_rate, bias] = self.rates(site);
        let columns = site.held_keys().len();
        let [q, k, v] = match qkv {
            QkvSlots::Together(slot) => [(slot, 0), (slot, columns), (slot, 2 * columns)],
            QkvSlots::Apart(slots) => slots.map(|slot| (slot, 0)),
        };
        let heads = |(slot, first): (Slot, usize), held: &Range<usize>, dim: usize| HeadSlot {
            first,
            ..HeadSlot::packed(slot, held.len(), dim)
        };
        let out = body.slot();
        body.ops.push(Op::Delta(Delta {
            q: heads(q, keys, *key_dim),
            k: heads(k, keys, *key_dim),
            v: heads(v, values, *value_dim),
            fade: projected.fade,
            take: projected.take,
            log_rate,
            bias,
            out,
            layer: site.layer,
            kind: self.kind,
        }));
        out
    }

    /// How fast each value head's state fades.
    fn rates(&mut self, site: &Site) -> [ParamId; 2] {
        let inits = [
            (site.names.log_rate, Init::LogUniform { least: 0.01, most: 16.0 }),
            (site.names.bias, Init::Constant(1.0)),
        ];
        inits.map(|(name, init)| {
            let slice = Slice::of_cols(1, site.values.clone());
            let name = format!("{}{name}", site.prefix);
            self.tensor(&name, vec![site.sizes.value_heads], slice, sharing(site.shard), init)
        })
    }

    fn gated_norm(&mut self, body: &mut BodyBuilder, x: Slot, gate: Slot, site: &Site) -> Slot {
        let LinearAttention { value_dim, epsilon, .. } = site.sizes;
        // Each shard sees its own heads, so each has a summand of the gradient.
        let of_heads = self.summed(&sharing(site.shard));
        let (name, slice) = (format!("{}{}", site.prefix, site.names.norm), Slice::whole([1, value_dim]));
        let weight = self.tensor(&name, vec![value_dim], slice, of_heads, Init::Constant(1.0));
        let out = body.slot();
        body.ops.push(Op::GatedNorm(GatedNorm { x, gate, weight, epsilon, out }));
        out
    }
}

/// Adds a layer with SiLU behind it.
fn activated(body: &mut BodyBuilder, linear: Linear) -> Slot {
    let before = body.slot();
    body.linear(Linear { activation: Some((Activation::Silu, before)), ..linear })
}

fn columns_of(heads: &Range<usize>, width: usize) -> Range<usize> {
    heads.start * width..heads.end * width
}
