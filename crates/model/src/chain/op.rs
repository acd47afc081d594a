//! The operations units are made of, each with its forward and its backward.

use std::ops::Range;

use evenkeel_device::kernel::{
    self, Activation, Add, AttentionDropout, Embed, EmbedBackward, Gated, GatedBackward, Mask, Multiply, Pairs,
    ScoreChanges,
};
use evenkeel_device::{DType, Heads, Tensor, View};

use crate::chain::adapted::MagnitudeParameters;
use crate::chain::batch::Batch;
use crate::chain::body::{Context, Slot, Slots};
use crate::chain::dropout::{Dropout, dropped};
use crate::chain::experts::{Experts, Router};
use crate::chain::linear::Linear;
use crate::chain::norm::{self, NormSpec};
use crate::chain::on_rows::OnRows;
use crate::parameters::{Gradients, ParamId};

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Linear(Linear),
    /// A norm of every head in a slot of heads side by side, or of all of them together: of as many columns as it has weights.
    HeadNorm {
        x: Slot,
        out: Slot,
        stats: Slot,
        norm: NormSpec,
    },
    /// Rotates heads in place.
    Rotary {
        x: HeadSlot,
        table: usize,
        pairs: Pairs,
    },
    Attention(Attention),
    /// `out = activation(gate) · up`
    Gated {
        activation: Activation,
        gate: Slot,
        up: Slot,
        out: Slot,
    },
    /// The same, of a slot with the columns of the gate before the others.
    GatedTogether {
        activation: Activation,
        x: Slot,
        out: Slot,
    },
    /// `out = a + b`
    Add {
        a: Slot,
        b: Slot,
        out: Slot,
    },
    /// These elements of the images' patches, as the batch has them.
    Patches {
        elements: Range<usize>,
        out: Slot,
    },
    Lookup(Lookup),
    /// Drops numbers of a slot in place; no earlier operation reads it in backward.
    Dropout {
        x: Slot,
        dropout: Dropout,
    },
    /// Multiplies a slot in place; no earlier operation reads it in backward.
    Scale {
        x: Slot,
        factor: f32,
    },
    /// The rows of a slot and none of its columns: attention's output without heads.
    NoColumns {
        x: Slot,
        out: Slot,
    },
    OnRows(OnRows),
    Router(Router),
    Experts(Experts),
}

/// The columns of heads in a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadSlot {
    pub slot: Slot,
    pub first: usize,
    pub count: usize,
    pub dim: usize,
    pub step: usize,
}

impl HeadSlot {
    fn of(&self, slots: &Slots) -> Heads {
        Heads::strided(slots.get(self.slot), self.first, self.count, self.dim, self.step)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Attention {
    pub q: HeadSlot,
    pub k: HeadSlot,
    pub v: HeadSlot,
    pub out: Slot,
    pub logsum: Slot,
    pub mask: Mask,
    pub scale: f32,
    /// The soft cap on scores.
    pub cap: Option<f32>,
    pub dropout: Option<Dropout>,
    /// The number of the first query head among the whole model's.
    pub first_head: usize,
    /// The place of this layer's keys and values in a cache.
    pub layer: usize,
}

impl Attention {
    fn out_heads(&self, out: &Tensor) -> Heads {
        Heads::packed(out, self.q.count)
    }

    fn scores(&self, context: &Context) -> ScoreChanges {
        let slopes = context.tables.slopes(self.first_head..self.first_head + self.q.count);
        ScoreChanges { cap: self.cap, slopes, sinks: None }
    }

    fn dropped(&self, batch: &Batch) -> Option<AttentionDropout> {
        self.dropout?.of_attention(batch, self.first_head)
    }
}

/// `out = scale · table[index]`, or added to earlier lookups in the slot.
#[derive(Clone, Debug)]
pub(crate) struct Lookup {
    pub table: ParamId,
    /// Rows of the table before that of index 0.
    pub skipped: usize,
    pub index: Index,
    /// The index of the first row that the table has here.
    pub first: usize,
    pub scale: f32,
    pub out: Slot,
    pub accumulate: bool,
}

impl Lookup {
    /// Rows of the whole table.
    pub fn of(table: ParamId, index: Index) -> Lookup {
        Lookup { table, skipped: 0, index, first: 0, scale: 1.0, out: Slot(0), accumulate: false }
    }

    /// The rows that have an index.
    fn rows(&self, table: &Tensor) -> View {
        table.view().row_range(self.skipped..table.rows)
    }
}

/// The indices of the batch that a lookup uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Index {
    Tokens,
    Positions,
    ClassRows,
    PatchRows,
}

impl Index {
    fn of<'a>(&self, context: &Context<'a>) -> &'a Tensor {
        match self {
            Index::Tokens => &context.batch.ids,
            Index::Positions => &context.batch.positions,
            Index::ClassRows => &context.batch.class_rows,
            Index::PatchRows => &context.batch.patch_rows,
        }
    }
}

impl Op {
    pub fn parameters(&self) -> Vec<ParamId> {
        match self {
            Op::Linear(linear) => {
                let factors = linear.adapter.iter().flat_map(|adapter| [adapter.a, adapter.b]);
                let magnitudes = linear.magnitude().into_iter().flat_map(|magnitude| {
                    let MagnitudeParameters { magnitudes, squares } = magnitude.parameters;
                    [magnitudes, squares]
                });
                [linear.weight].into_iter().chain(linear.bias).chain(factors).chain(magnitudes).collect()
            }
            Op::HeadNorm { norm, .. } => norm.parameters().collect(),
            Op::Lookup(lookup) => vec![lookup.table],
            Op::OnRows(strip) => strip.ops.iter().flat_map(Op::parameters).collect(),
            Op::Router(router) => vec![router.weight],
            Op::Experts(experts) => vec![experts.gate_up, experts.down],
            Op::Rotary { .. }
            | Op::Attention(_)
            | Op::Gated { .. }
            | Op::GatedTogether { .. }
            | Op::Add { .. }
            | Op::Patches { .. }
            | Op::Dropout { .. }
            | Op::Scale { .. }
            | Op::NoColumns { .. } => Vec::new(),
        }
    }

    /// The slot that it reads as heads that follow one another without gaps, if it does.
    pub fn reads_heads_without_gaps(&self) -> Option<Slot> {
        if let Op::HeadNorm { x, .. } = self { Some(*x) } else { None }
    }

    /// The input of a linear layer.
    pub fn linear_input(&self) -> Option<Slot> {
        if let Op::Linear(linear) = self { Some(linear.x) } else { None }
    }

    pub fn linears(&self) -> Vec<&Linear> {
        match self {
            Op::Linear(linear) => vec![linear],
            Op::OnRows(strip) => strip.ops.iter().flat_map(Op::linears).collect(),
            _ => Vec::new(),
        }
    }

    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let queue = context.queue;
        match self {
            Op::Linear(linear) => linear.forward(context, values),
            Op::HeadNorm { x, out, stats, norm } => {
                let input = values.get(*x);
                let dim = context.parameters.value(norm.weight).cols;
                let rows = input.len() / dim;
                let result = queue.tensor(input.rows, input.cols, input.dtype);
                let source = norm::Input::Value(input.view().reshaped(rows, dim));
                let row_stats = norm.forward(queue, context.parameters, source, result.view().reshaped(rows, dim));
                values.set(*out, result);
                values.set(*stats, row_stats);
            }
            Op::Rotary { x, table, pairs } => queue.launch(rotation(context, x.of(values), *table, *pairs, false)),
            Op::Attention(attention) => attention.forward(context, values),
            Op::Gated { activation, gate, up, out } => {
                let (gate, up) = (values.get(*gate), values.get(*up));
                let result = values.tensor_for(*out, queue, gate.rows, gate.cols, gate.dtype);
                let (gate, up) = (gate.view(), up.view());
                queue.launch(Gated { activation: *activation, gate, up, out: result.view() });
                values.set(*out, result);
            }
            Op::GatedTogether { activation, x, out } => {
                let [gate, up] = halves(values.get(*x));
                let result = values.tensor_for(*out, queue, gate.rows, gate.cols, gate.dtype);
                queue.launch(Gated { activation: *activation, gate, up, out: result.view() });
                values.set(*out, result);
            }
            Op::Add { a, b, out } => {
                let (a, b) = (values.get(*a), values.get(*b));
                let result = queue.tensor(a.rows, a.cols, a.dtype);
                queue.launch(Add { a: a.view(), b: b.view(), out: result.view() });
                values.set(*out, result);
            }
            Op::Patches { elements, out } => {
                let patches = context.batch.patches.as_ref().expect("a batch of images for a model that reads images");
                values.set(*out, patches.col_range(elements.clone()));
            }
            Op::Lookup(lookup) => {
                let table = &context.parameters.value(lookup.table);
                let indices = lookup.index.of(context);
                if !lookup.accumulate {
                    values.set(lookup.out, queue.tensor(indices.cols, table.cols, context.dtype()));
                }
                queue.launch(Embed {
                    table: lookup.rows(table),
                    indices: indices.view(),
                    first: lookup.first as u32,
                    scale: lookup.scale,
                    out: values.get(lookup.out).view(),
                    accumulate: lookup.accumulate,
                });
            }
            Op::Dropout { x, dropout } => {
                if let Some(noise) = context.batch.noise {
                    let x = values.get(*x);
                    dropout.launch(queue, noise, 0, x, x);
                }
            }
            Op::Scale { x, factor } => {
                let x = values.get(*x).view();
                queue.launch(Multiply { x, factor: *factor, out: x });
            }
            Op::NoColumns { x, out } => values.set(*out, values.get(*x).col_range(0..0)),
            Op::OnRows(strip) => strip.forward(context, values),
            Op::Router(router) => router.forward(context, values),
            Op::Experts(experts) => experts.forward(context, values),
        }
    }

    /// Forward again, for backward: nothing reads these slots of the body's output, only what else the operation leaves.
    pub fn recompute(&self, context: &Context, values: &mut Slots, skipped: &[Slot]) {
        match self {
            Op::Linear(linear) if skipped.contains(&linear.out) => linear.recompute(context, values),
            Op::Add { out: slot, .. } | Op::Dropout { x: slot, .. } | Op::Scale { x: slot, .. }
                if skipped.contains(slot) => {}
            Op::Lookup(lookup) if skipped.contains(&lookup.out) => (),
            Op::Experts(experts) if skipped.contains(&experts.out) => experts.widen(context, values),
            _ => self.forward(context, values),
        }
    }

    /// Slots that backward reads.
    pub fn saved(&self, context: &Context) -> Vec<Slot> {
        match self {
            Op::Linear(linear) => {
                let before = linear.activation.map(|(_, slot)| slot);
                let product = linear.magnitude().map(|magnitude| magnitude.u);
                self.weight_inputs(context).into_iter().chain(before).chain(product).collect()
            }
            Op::HeadNorm { x, stats, .. } => vec![*x, *stats],
            Op::Attention(attention) => {
                let Attention { q, k, v, out, logsum, .. } = attention;
                vec![q.slot, k.slot, v.slot, *out, *logsum]
            }
            Op::Gated { gate, up, .. } => vec![*gate, *up],
            Op::GatedTogether { x, .. } => vec![*x],
            Op::OnRows(strip) => strip.ops.iter().flat_map(|op| op.saved(context)).collect(),
            Op::Router(router) => router.saved(),
            Op::Experts(experts) => experts.saved(),
            Op::Rotary { .. }
            | Op::Scale { .. }
            | Op::Add { .. }
            | Op::Patches { .. }
            | Op::Lookup(_)
            | Op::Dropout { .. }
            | Op::NoColumns { .. } => Vec::new(),
        }
    }

    /// Writes the gradients of the operation's inputs, adding to gradients that are already there.
    pub fn backward_input(&self, context: &Context, gradients: &Gradients, values: &mut Slots, slots: &mut Slots) {
        let queue = context.queue;
        match self {
            Op::Linear(linear) => linear.backward_input(context, gradients, values, slots),
            Op::HeadNorm { x, out, stats, norm } => {
                let (input, dout) = (values.take(*x), slots.take(*out));
                let dim = context.parameters.value(norm.weight).cols;
                let rows = input.len() / dim;
                let (x_rows, dout_rows) = (input.view().reshaped(rows, dim), dout.view().reshaped(rows, dim));
                let row_stats = values.take(*stats);
                let parameters = context.parameters;
                norm.backward(queue, parameters, gradients, x_rows, &row_stats, dout_rows, None, dout_rows);
                slots.set(*x, dout);
            }
            Op::Rotary { x, table, pairs } => queue.launch(rotation(context, x.of(slots), *table, *pairs, true)),
            Op::Attention(attention) => attention.backward(context, values, slots),
            Op::Gated { activation, gate, up, out } => {
                // The gradients overwrite the values, which nothing reads again.
                let (dgate, dup, dout) = (values.take(*gate), values.take(*up), slots.take(*out));
                queue.launch(GatedBackward {
                    activation: *activation,
                    gate: dgate.view(),
                    up: dup.view(),
                    dout: dout.view(),
                    dgate: dgate.view(),
                    dup: dup.view(),
                });
                slots.set(*gate, dgate);
                slots.set(*up, dup);
            }
            Op::GatedTogether { activation, x, out } => {
                // As above, in place.
                let (dx, dout) = (values.take(*x), slots.take(*out));
                let [gate, up] = halves(&dx);
                let (activation, dout) = (*activation, dout.view());
                queue.launch(GatedBackward { activation, gate, up, dout, dgate: gate, dup: up });
                slots.set(*x, dx);
            }
            Op::Add { a, b, out } => {
                let dout = slots.take(*out);
                slots.set(*a, dout.clone());
                slots.set(*b, dout);
            }
            // Not in place: the sum's gradient is that of both its summands.
            Op::Dropout { x, dropout } => {
                let dx = dropped(Some(*dropout), context, 0, slots.take(*x));
                slots.set(*x, dx);
            }
            Op::Scale { x, factor } => {
                let dout = slots.take(*x);
                let dx = slots.tensor_for(*x, queue, dout.rows, dout.cols, dout.dtype);
                queue.launch(Multiply { x: dout.view(), factor: *factor, out: dx.view() });
                slots.set(*x, dx);
            }
            Op::OnRows(strip) => strip.backward_input(context, gradients, values, slots),
            Op::Router(router) => router.backward_input(context, values, slots),
            Op::Experts(experts) => experts.backward_input(context, values, slots),
            Op::Patches { .. } | Op::Lookup(_) | Op::NoColumns { .. } => (),
        }
    }

    /// The slots whose values the weight half multiplies with. A pruned layer reads narrow ones instead.
    pub fn weight_inputs(&self, context: &Context) -> Vec<Slot> {
        match self {
            Op::Linear(Linear { x, adapter: Some(adapter), .. }) => vec![*x, adapter.s],
            Op::Linear(linear) if context.pruned_layer(linear.weight).is_none() && context.trains(linear.weight) => {
                vec![linear.x]
            }
            Op::OnRows(strip) => strip.ops.iter().flat_map(|op| op.weight_inputs(context)).collect(),
            Op::Router(router) if context.trains(router.weight) => vec![router.x],
            Op::Experts(experts) => experts.weight_inputs(context),
            _ => Vec::new(),
        }
    }

    /// The slots whose gradients the weight half reads.
    pub fn weight_gradients(&self, context: &Context) -> Vec<Slot> {
        match self {
            // The layer may hold what others of its group need.
            Op::Linear(Linear { adapter: None, .. }) | Op::Lookup(_) | Op::OnRows(_)
                if !self.parameters().iter().any(|&id| context.trains(id)) =>
            {
                Vec::new()
            }
            Op::Linear(linear) => {
                // Behind magnitudes, only the bias still reads the gradient of the output.
                let product = linear.product_slot();
                let of_bias = linear.bias.is_some_and(|bias| context.trains(bias)) && product != linear.out;
                let output = of_bias.then_some(linear.out);
                linear.adapter.iter().map(|adapter| adapter.s).chain([product]).chain(output).collect()
            }
            Op::Lookup(lookup) => vec![lookup.out],
            Op::OnRows(strip) => strip.ops.iter().flat_map(|op| op.weight_gradients(context)).collect(),
            Op::Router(router) if context.trains(router.weight) => vec![router.logits],
            Op::Experts(experts) => experts.weight_gradients(context),
            _ => Vec::new(),
        }
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        match self {
            Op::Linear(linear) => linear.backward_weight(context, gradients, values, slots),
            Op::Lookup(lookup) => {
                let Some(dtable) = gradients.sum_of_trained(context.queue, lookup.table) else { return };
                context.queue.launch(EmbedBackward {
                    dtable: lookup.rows(&dtable),
                    indices: lookup.index.of(context).view(),
                    first: lookup.first as u32,
                    scale: lookup.scale,
                    dout: slots.get(lookup.out).view(),
                });
            }
            Op::OnRows(strip) => strip.backward_weight(context, gradients, values, slots),
            Op::Router(router) => router.backward_weight(context, gradients, values, slots),
            Op::Experts(experts) => experts.backward_weight(context, gradients, values, slots),
            _ => (),
        }
    }
}

/// The left and the right half of the columns.
pub(super) fn halves(x: &Tensor) -> [View; 2] {
    let width = x.cols / 2;
    [0..width, width..2 * width].map(|columns| x.view().col_range(columns))
}

fn rotation(context: &Context, x: Heads, table: usize, pairs: Pairs, inverse: bool) -> kernel::Rotary {
    let (table, positions) = (context.tables.table(table).view(), context.batch.positions.view());
    kernel::Rotary { x, pairs, table, positions, inverse }
}

impl Attention {
    /// Tokens that continue cached sequences see those. Others see only their own segment, and keep values for backward.
    fn forward(&self, context: &Context, values: &mut Slots) {
        let (queue, batch) = (context.queue, context.batch);
        let (q, k, v) = (self.q.of(values), self.k.of(values), self.v.of(values));
        let result = values.tensor_for(self.out, queue, q.tokens(), q.count() * q.dim(), context.dtype());
        let (out, segments, mask, scale) = (self.out_heads(&result), batch.segments.clone(), self.mask, self.scale);
        if let Some(cache) = &batch.cache {
            let [cached_k, cached_v] = cache.heads(self.layer);
            let (capacity, lengths) = (cache.capacity, cache.lengths.clone());
            queue.launch(kernel::CachedAttention {
                q,
                k,
                v,
                out,
                cached_k,
                cached_v,
                capacity,
                lengths,
                segments,
                mask,
                scale,
                scores: self.scores(context),
            });
        } else {
            let logsum = queue.tensor(q.tokens(), q.count(), DType::F32);
            let (logsum_view, dropout) = (logsum.view(), self.dropped(batch));
            let scores = self.scores(context);
            queue.launch(kernel::Attention {
                q,
                k,
                v,
                out,
                logsum: logsum_view,
                segments,
                mask,
                scale,
                scores,
                dropout,
            });
            values.set(self.logsum, logsum);
        }
        values.set(self.out, result);
    }

    fn backward(&self, context: &Context, values: &mut Slots, slots: &mut Slots) {
        let dout = slots.take(self.out);
        for heads in [&self.q, &self.k, &self.v] {
            if slots.find(heads.slot).is_none() {
                let value = values.get(heads.slot);
                let dheads = slots.tensor_for(heads.slot, context.queue, value.rows, value.cols, value.dtype);
                slots.set(heads.slot, dheads);
            }
        }
        context.queue.launch(kernel::AttentionBackward {
            q: self.q.of(values),
            k: self.k.of(values),
            v: self.v.of(values),
            out: self.out_heads(values.get(self.out)),
            logsum: values.get(self.logsum).view(),
            dout: self.out_heads(&dout),
            dq: self.q.of(slots),
            dk: self.k.of(slots),
            dv: self.v.of(slots),
            segments: context.batch.segments.clone(),
            mask: self.mask,
            scale: self.scale,
            scores: self.scores(context),
            dsinks: None,
            dropout: self.dropped(context.batch),
        });
    }
}
