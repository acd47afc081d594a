//! The operations units are made of, each with its forward and its backward.

use std::ops::Range;

use evenkeel_device::kernel::{self, Activation, Add, Copy, Gated, GatedBackward, Multiply, Pairs};
use evenkeel_device::{Heads, Tensor, View};

use crate::chain::adapted::MagnitudeParameters;
use crate::chain::attention::{Attention, HeadSlot};
use crate::chain::body::{Context, Slot, Slots};
use crate::chain::delta::{Delta, DynamicConv, GatedNorm, ShortConv};
use crate::chain::dropout::{Dropout, dropped};
use crate::chain::experts::{Experts, Router, SharedGate};
use crate::chain::handed::{HandOn, TakeHanded};
use crate::chain::linear::Linear;
use crate::chain::lookup::Lookup;
use crate::chain::norm::{self, NormSpec};
use crate::chain::on_rows::OnRows;
use crate::parameters::{Gradients, ParamId};

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Linear(Linear),
    /// A norm of every head, or of all of them together. The result lies side by side.
    HeadNorm {
        x: HeadSlot,
        out: Slot,
        stats: Slot,
        norm: NormSpec,
        /// Whether an operation behind it begins the gradient of the same heads.
        adds: bool,
    },
    /// Copies heads from among others to a slot where they lie side by side.
    TakeHeads {
        x: HeadSlot,
        out: Slot,
        /// Whether nothing else reads the slot: then the gradient of what is not copied is zero.
        alone: bool,
    },
    /// Rotates heads in place.
    Rotary {
        x: HeadSlot,
        table: usize,
        is_query: bool,
        pairs: Pairs,
    },
    Attention(Attention),
    /// `out = sigmoid(gate) · x`, head by head.
    GateHeads {
        x: Slot,
        gate: HeadSlot,
        out: Slot,
    },
    ShortConv(ShortConv),
    DynamicConv(DynamicConv),
    Delta(Delta),
    GatedNorm(GatedNorm),
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
    /// The columns of two slots of the same width, the first before the second.
    SideBySide {
        parts: [Slot; 2],
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
    SharedGate(SharedGate),
    HandOn(HandOn),
    TakeHanded(TakeHanded),
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
            Op::Attention(attention) => attention.sinks.iter().map(|sinks| sinks.logits).collect(),
            Op::Router(router) => router.parameters(),
            Op::Experts(experts) => experts.parameters(),
            Op::SharedGate(gate) => vec![gate.weight],
            Op::ShortConv(convolution) => vec![convolution.weight],
            Op::Delta(delta) => vec![delta.log_rate, delta.bias],
            Op::GatedNorm(norm) => vec![norm.weight],
            Op::TakeHeads { .. }
            | Op::HandOn(_)
            | Op::TakeHanded(_)
            | Op::Rotary { .. }
            | Op::GateHeads { .. }
            | Op::DynamicConv(_)
            | Op::Gated { .. }
            | Op::GatedTogether { .. }
            | Op::Add { .. }
            | Op::SideBySide { .. }
            | Op::Patches { .. }
            | Op::Dropout { .. }
            | Op::Scale { .. }
            | Op::NoColumns { .. } => Vec::new(),
        }
    }

    /// The slots that it uses as heads that follow one another without gaps.
    pub fn slots_without_gaps(&self) -> Vec<Slot> {
        match self {
            Op::HeadNorm { x, .. } | Op::TakeHeads { x, .. } => vec![x.slot],
            Op::GateHeads { x, gate, out } => vec![*x, gate.slot, *out],
            Op::GatedNorm(norm) => vec![norm.x, norm.gate, norm.out],
            _ => Vec::new(),
        }
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
            Op::HeadNorm { x, out, stats, norm, .. } => {
                let input = values.get(x.slot);
                let result = queue.tensor(input.rows, x.count * x.dim, input.dtype);
                let (source, rows) = (norm::Input::Value(x.rows(input)), x.packed_rows(&result));
                let row_stats = norm.forward(queue, context.parameters, source, rows);
                values.set(*out, result);
                values.set(*stats, row_stats);
            }
            Op::TakeHeads { x, out, .. } => {
                let from = values.get(x.slot);
                let result = values.tensor_for(*out, queue, from.rows, x.count * x.dim, from.dtype);
                queue.launch(Copy { x: x.rows(from), out: x.packed_rows(&result) });
                values.set(*out, result);
            }
            Op::Rotary { x, table, is_query, pairs } => {
                queue.launch(rotation(context, x.of(values), *table, *is_query, *pairs, false));
            }
            Op::Attention(attention) => attention.forward(context, values),
            Op::GateHeads { x, gate, out } => {
                let (heads, gates) = (values.get(*x), values.get(gate.slot));
                let result = values.tensor_for(*out, queue, heads.rows, heads.cols, heads.dtype);
                let (up, rows) = (gate.packed_rows(heads), gate.packed_rows(&result));
                queue.launch(Gated {
                    activation: Activation::Sigmoid,
                    gate: gate.rows(gates),
                    up,
                    out: rows,
                    count: None,
                });
                values.set(*out, result);
            }
            Op::ShortConv(convolution) => convolution.forward(context, values),
            Op::DynamicConv(convolution) => convolution.forward(context, values),
            Op::Delta(delta) => delta.forward(context, values),
            Op::GatedNorm(norm) => norm.forward(context, values),
            Op::Gated { activation, gate, up, out } => {
                let (gate, up) = (values.get(*gate), values.get(*up));
                let result = values.tensor_for(*out, queue, gate.rows, gate.cols, gate.dtype);
                let (gate, up) = (gate.view(), up.view());
                queue.launch(Gated { activation: *activation, gate, up, out: result.view(), count: None });
                values.set(*out, result);
            }
            Op::GatedTogether { activation, x, out } => {
                let [gate, up] = halves(values.get(*x));
                let result = values.tensor_for(*out, queue, gate.rows, gate.cols, gate.dtype);
                queue.launch(Gated { activation: *activation, gate, up, out: result.view(), count: None });
                values.set(*out, result);
            }
            Op::Add { a, b, out } => {
                let (a, b) = (values.get(*a), values.get(*b));
                let result = queue.tensor(a.rows, a.cols, a.dtype);
                queue.launch(Add { a: a.view(), b: b.view(), out: result.view() });
                values.set(*out, result);
            }
            Op::SideBySide { parts, out } => {
                let parts = parts.map(|part| values.get(part));
                let cols = parts.map(|part| part.cols);
                let result = queue.tensor(parts[0].rows, cols[0] + cols[1], parts[0].dtype);
                for (part, first) in parts.into_iter().zip([0, cols[0]]) {
                    let out = result.col_range(first..first + part.cols).view();
                    queue.launch(Copy { x: part.view(), out });
                }
                values.set(*out, result);
            }
            Op::Patches { elements, out } => {
                let patches = context.batch.patches.as_ref().expect("a batch of images for a model that reads images");
                values.set(*out, patches.col_range(elements.clone()));
            }
            Op::Lookup(lookup) => lookup.forward(context, values),
            Op::Dropout { x, dropout } => {
                if let Some(noise) = context.batch.noise {
                    let x = values.get(*x);
                    dropout.launch(queue, noise, 0, x, x);
                }
            }
            Op::Scale { x, factor } => {
                let x = values.get(*x).view();
                queue.launch(Multiply { x, factor: *factor, by: None, out: x });
            }
            Op::NoColumns { x, out } => values.set(*out, values.get(*x).col_range(0..0)),
            Op::OnRows(strip) => strip.forward(context, values),
            Op::Router(router) => router.forward(context, values),
            Op::Experts(experts) => experts.forward(context, values),
            Op::SharedGate(gate) => gate.forward(context, values),
            Op::HandOn(hand) => hand.forward(context, values),
            Op::TakeHanded(take) => take.forward(context, values),
        }
    }

    /// Forward again, for backward: nothing reads these slots of the body's output, only what else the operation leaves.
    pub fn recompute(&self, context: &Context, values: &mut Slots, skipped: &[Slot]) {
        match self {
            Op::Linear(linear) if skipped.contains(&linear.out) => linear.recompute(context, values),
            Op::Add { out: slot, .. }
            | Op::SideBySide { out: slot, .. }
            | Op::Dropout { x: slot, .. }
            | Op::Scale { x: slot, .. }
                if skipped.contains(slot) => {}
            Op::HandOn(_) => (),
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
            Op::HeadNorm { x, stats, .. } => vec![x.slot, *stats],
            Op::GateHeads { x, gate, .. } => vec![*x, gate.slot],
            Op::ShortConv(convolution) => vec![convolution.x],
            Op::DynamicConv(convolution) => vec![convolution.x, convolution.weights],
            Op::Delta(delta) => delta.saved(),
            Op::GatedNorm(norm) => vec![norm.x, norm.gate],
            Op::Attention(attention) => {
                let Attention { q, k, v, out, logsum, .. } = attention;
                vec![q.slot, k.slot, v.slot, *out, *logsum]
            }
            Op::Gated { gate, up, .. } => vec![*gate, *up],
            Op::GatedTogether { x, .. } => vec![*x],
            Op::OnRows(strip) => strip.ops.iter().flat_map(|op| op.saved(context)).collect(),
            Op::Router(router) => router.saved(),
            Op::Experts(experts) => experts.saved(),
            Op::SharedGate(gate) => gate.saved(),
            Op::TakeHeads { .. }
            | Op::HandOn(_)
            | Op::TakeHanded(_)
            | Op::Rotary { .. }
            | Op::Scale { .. }
            | Op::Add { .. }
            | Op::SideBySide { .. }
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
            Op::HeadNorm { x, out, stats, norm, adds } => {
                let (dout, row_stats) = (slots.take(*out), values.take(*stats));
                let input = values.get(x.slot);
                let dout_rows = x.packed_rows(&dout);
                // A gate beside each head has begun the gradient already.
                let dx_rows = slots.find(x.slot).map_or(dout_rows, |begun| x.rows(begun));
                let (parameters, rows) = (context.parameters, x.rows(input));
                let residual = adds.then_some(dx_rows);
                norm.backward(queue, parameters, gradients, rows, &row_stats, dout_rows, residual, dx_rows);
                if slots.find(x.slot).is_none() {
                    slots.set(x.slot, dout);
                }
            }
            Op::TakeHeads { x, out, alone } => {
                let dout = slots.take(*out);
                if slots.find(x.slot).is_none() {
                    let dx = slots.tensor_for(x.slot, queue, dout.rows, x.count * x.step, dout.dtype);
                    if *alone && x.dim < x.step {
                        queue.launch(kernel::Fill { out: dx.view(), value: 0.0 });
                    }
                    slots.set(x.slot, dx);
                }
                queue.launch(Copy { x: x.packed_rows(&dout), out: x.rows(slots.get(x.slot)) });
            }
            Op::Rotary { x, table, is_query, pairs } => {
                queue.launch(rotation(context, x.of(slots), *table, *is_query, *pairs, true));
            }
            Op::Attention(attention) => attention.backward(context, gradients, values, slots),
            Op::GateHeads { x, gate, out } => {
                let (heads, gates, dout) = (values.get(*x), values.get(gate.slot), slots.take(*out));
                let dgates = slots.tensor_for(gate.slot, queue, gates.rows, gates.cols, gates.dtype);
                let dout_rows = gate.packed_rows(&dout);
                queue.launch(GatedBackward {
                    activation: Activation::Sigmoid,
                    gate: gate.rows(gates),
                    up: gate.packed_rows(heads),
                    dout: dout_rows,
                    dgate: gate.rows(&dgates),
                    dup: dout_rows,
                    count: None,
                });
                slots.set(gate.slot, dgates);
                slots.set(*x, dout);
            }
            Op::ShortConv(convolution) => convolution.backward(context, gradients, values, slots),
            Op::DynamicConv(convolution) => convolution.backward(context, values, slots),
            Op::Delta(delta) => delta.backward(context, gradients, values, slots),
            Op::GatedNorm(norm) => norm.backward(context, gradients, values, slots),
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
                    count: None,
                });
                slots.set(*gate, dgate);
                slots.set(*up, dup);
            }
            Op::GatedTogether { activation, x, out } => {
                // As above, in place.
                let (dx, dout) = (values.take(*x), slots.take(*out));
                let [gate, up] = halves(&dx);
                let (activation, dout) = (*activation, dout.view());
                queue.launch(GatedBackward { activation, gate, up, dout, dgate: gate, dup: up, count: None });
                slots.set(*x, dx);
            }
            Op::Add { a, b, out } => {
                let dout = slots.take(*out);
                slots.set(*a, dout.clone());
                slots.set(*b, dout);
            }
            Op::SideBySide { parts: [a, b], out } => {
                let dout = slots.take(*out);
                let middle = dout.cols / 2;
                slots.set(*a, dout.col_range(0..middle));
                slots.set(*b, dout.col_range(middle..dout.cols));
            }
            // Not in place: the sum's gradient is that of both its summands.
            Op::Dropout { x, dropout } => {
                let dx = dropped(Some(*dropout), context, 0, slots.take(*x));
                slots.set(*x, dx);
            }
            Op::Scale { x, factor } => {
                let dout = slots.take(*x);
                let dx = slots.tensor_for(*x, queue, dout.rows, dout.cols, dout.dtype);
                queue.launch(Multiply { x: dout.view(), factor: *factor, by: None, out: dx.view() });
                slots.set(*x, dx);
            }
            Op::OnRows(strip) => strip.backward_input(context, gradients, values, slots),
            Op::Router(router) => router.backward_input(context, gradients, values, slots),
            Op::Experts(experts) => experts.backward_input(context, values, slots),
            Op::SharedGate(gate) => gate.backward_input(context, values, slots),
            Op::HandOn(hand) => hand.backward(context, slots),
            Op::TakeHanded(take) => take.backward(context, slots),
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
            Op::Router(router) => router.weight_inputs(context),
            Op::Experts(experts) => experts.weight_inputs(context),
            Op::SharedGate(gate) if context.trains(gate.weight) => vec![gate.x],
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
            Op::Router(router) => router.weight_gradients(context),
            Op::Experts(experts) => experts.weight_gradients(context),
            Op::SharedGate(gate) if context.trains(gate.weight) => vec![gate.logits],
            _ => Vec::new(),
        }
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        match self {
            Op::Linear(linear) => linear.backward_weight(context, gradients, values, slots),
            Op::Lookup(lookup) => lookup.backward_weight(context, gradients, slots),
            Op::OnRows(strip) => strip.backward_weight(context, gradients, values, slots),
            Op::Router(router) => router.backward_weight(context, gradients, values, slots),
            Op::Experts(experts) => experts.backward_weight(context, gradients, values, slots),
            Op::SharedGate(gate) => gate.backward_weight(context, gradients, values, slots),
            _ => (),
        }
    }
}

/// The left and the right half of the columns.
pub(super) fn halves(x: &Tensor) -> [View; 2] {
    let width = x.cols / 2;
    [0..width, width..2 * width].map(|columns| x.view().col_range(columns))
}

fn rotation(context: &Context, x: Heads, table: usize, is_query: bool, pairs: Pairs, inverse: bool) -> kernel::Rotary {
    let (table, positions) = (context.tables.table(table, is_query).view(), context.batch.positions.view());
    kernel::Rotary { x, pairs, table, positions, inverse }
}
