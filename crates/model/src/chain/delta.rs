//! Linear attention by the gated delta rule: a short convolution of queries, keys and values, the rule, and a gated norm of its
//! output.
//!
//! Nothing passes from one document to the next. In a cache, the convolution's last rows and the rule's states take the place of
//! keys and values.

use std::ops::Range;

use evenkeel_device::kernel::{
    self, DeltaGates, DeltaRule, DeltaRuleBackward, DynamicConvBackward, GatedNormBackward, Segments, ShortConvBackward,
};
use evenkeel_device::{DType, DeviceKind, Heads, Tensor, View};

use crate::chain::attention::HeadSlot;
use crate::chain::body::{Context, Slot, Slots};
use crate::parameters::{Gradients, ParamId};

/// A causal convolution of each column over the last tokens.
#[derive(Clone, Debug)]
pub(crate) struct ShortConv {
    pub x: Slot,
    /// [columns, taps]
    pub weight: ParamId,
    /// Those of the columns that are in the slot.
    pub columns: Range<usize>,
    pub out: Slot,
    /// The place of this layer in a cache.
    pub layer: usize,
}

/// The same with weights of each token's own.
#[derive(Clone, Debug)]
pub(crate) struct DynamicConv {
    pub x: Slot,
    /// [T, columns · taps]
    pub weights: Slot,
    pub columns: usize,
    pub taps: usize,
    pub out: Slot,
    pub layer: usize,
}

/// The rule over heads of queries, keys and values.
#[derive(Clone, Debug)]
pub(crate) struct Delta {
    pub q: HeadSlot,
    pub k: HeadSlot,
    pub v: HeadSlot,
    /// [T, value heads] each.
    pub fade: Slot,
    pub take: Slot,
    /// A number for each value head.
    pub log_rate: ParamId,
    pub bias: ParamId,
    pub out: Slot,
    pub layer: usize,
    pub kind: DeviceKind,
}

/// A norm of each head of a slot, times a gate.
#[derive(Clone, Debug)]
pub(crate) struct GatedNorm {
    pub x: Slot,
    pub gate: Slot,
    pub weight: ParamId,
    pub epsilon: f32,
    pub out: Slot,
}

impl ShortConv {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let (queue, x) = (context.queue, values.get(self.x));
        let out = queue.tensor(x.rows, x.cols, x.dtype);
        queue.launch(kernel::ShortConv {
            x: x.view(),
            weight: context.parameters.value(self.weight).view().row_range(self.columns.clone()),
            segments: segments(context),
            out: out.view(),
            past: context
                .batch
                .cache
                .as_ref()
                .map(|cache| cache.past(self.layer).view().col_range(self.columns.clone())),
        });
        values.set(self.out, out);
    }

    pub fn backward(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &mut Slots) {
        let (queue, x, dout) = (context.queue, values.get(self.x), slots.take(self.out));
        let dx = slots.tensor_for(self.x, queue, x.rows, x.cols, x.dtype);
        let dweight = sum_of_trained(context, gradients, self.weight);
        queue.launch(ShortConvBackward {
            x: x.view(),
            weight: context.parameters.value(self.weight).view().row_range(self.columns.clone()),
            segments: segments(context),
            dout: dout.view(),
            dx: dx.view(),
            dweight: dweight.map(|sum| sum.row_range(self.columns.clone())),
        });
        slots.set(self.x, dx);
    }
}

impl DynamicConv {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let (queue, x) = (context.queue, values.get(self.x));
        let out = queue.tensor(x.rows, x.cols, x.dtype);
        queue.launch(kernel::DynamicConv {
            x: x.view(),
            weights: values.get(self.weights).view(),
            segments: segments(context),
            out: out.view(),
            past: context.batch.cache.as_ref().map(|cache| cache.past(self.layer).view()),
        });
        values.set(self.out, out);
    }

    pub fn backward(&self, context: &Context, values: &Slots, slots: &mut Slots) {
        let (queue, x, weights) = (context.queue, values.get(self.x), values.get(self.weights));
        let dout = slots.take(self.out);
        let dx = slots.tensor_for(self.x, queue, x.rows, x.cols, x.dtype);
        let dweights = slots.tensor_for(self.weights, queue, weights.rows, weights.cols, weights.dtype);
        queue.launch(DynamicConvBackward {
            x: x.view(),
            weights: weights.view(),
            segments: segments(context),
            dout: dout.view(),
            dx: dx.view(),
            dweights: dweights.view(),
        });
        slots.set(self.x, dx);
        slots.set(self.weights, dweights);
    }
}

impl Delta {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let (queue, v) = (context.queue, self.v.of(values));
        let out = queue.tensor(v.tokens(), v.count() * v.dim(), context.dtype());
        let rule = DeltaRule {
            q: self.q.of(values),
            k: self.k.of(values),
            v,
            gates: self.gates(context, values),
            segments: segments(context),
            out: self.packed(&out),
            states: context.batch.cache.as_ref().map(|cache| cache.states(self.layer).view()),
            work: None,
        };
        let work = self.work(context, rule.work_len());
        queue.launch(DeltaRule { work: work.as_ref().map(Tensor::view), ..rule });
        values.set(self.out, out);
    }

    pub fn saved(&self) -> Vec<Slot> {
        vec![self.q.slot, self.k.slot, self.v.slot, self.fade, self.take]
    }

    pub fn backward(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &mut Slots) {
        let (queue, dout) = (context.queue, slots.take(self.out));
        for slot in self.saved() {
            if slots.find(slot).is_some() {
                continue;
            }
            let value = values.get(slot);
            let gradient = slots.tensor_for(slot, queue, value.rows, value.cols, value.dtype);
            slots.set(slot, gradient);
        }
        let rule = DeltaRuleBackward {
            q: self.q.of(values),
            k: self.k.of(values),
            v: self.v.of(values),
            gates: self.gates(context, values),
            segments: segments(context),
            dout: self.packed(&dout),
            dq: self.q.of(slots),
            dk: self.k.of(slots),
            dv: self.v.of(slots),
            dfade: slots.get(self.fade).view(),
            dtake: slots.get(self.take).view(),
            dlog_rate: sum_of_trained(context, gradients, self.log_rate),
            dbias: sum_of_trained(context, gradients, self.bias),
            work: None,
        };
        let work = self.work(context, rule.work_len());
        queue.launch(DeltaRuleBackward { work: work.as_ref().map(Tensor::view), ..rule });
    }

    fn gates(&self, context: &Context, values: &Slots) -> DeltaGates {
        let [log_rate, bias] = [self.log_rate, self.bias].map(|id| context.parameters.value(id).view());
        DeltaGates { fade: values.get(self.fade).view(), take: values.get(self.take).view(), log_rate, bias }
    }

    fn packed(&self, tensor: &Tensor) -> Heads {
        Heads::strided(tensor, 0, self.v.count, self.v.dim, self.v.dim)
    }

    /// Working memory, which CPUs have of their own.
    fn work(&self, context: &Context, len: usize) -> Option<Tensor> {
        (self.kind == DeviceKind::Cuda).then(|| context.queue.tensor(1, len, DType::F32))
    }
}

impl GatedNorm {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let (queue, x) = (context.queue, values.get(self.x));
        let out = values.tensor_for(self.out, queue, x.rows, x.cols, x.dtype);
        let weight = context.parameters.value(self.weight).view();
        let [x, gate, rows] = [x, values.get(self.gate), &out].map(|tensor| heads(tensor, weight.cols));
        queue.launch(kernel::GatedNorm { x, gate, weight, epsilon: self.epsilon, out: rows });
        values.set(self.out, out);
    }

    /// The gradients overwrite the output's and the gate, which nothing reads again.
    pub fn backward(&self, context: &Context, gradients: &Gradients, values: &mut Slots, slots: &mut Slots) {
        let (gate, dout) = (values.take(self.gate), slots.take(self.out));
        let weight = context.parameters.value(self.weight).view();
        let [x, gate_rows, dout_rows] = [values.get(self.x), &gate, &dout].map(|tensor| heads(tensor, weight.cols));
        context.queue.launch(GatedNormBackward {
            x,
            gate: gate_rows,
            weight,
            epsilon: self.epsilon,
            dout: dout_rows,
            dx: dout_rows,
            dgate: gate_rows,
            dweight: sum_of_trained(context, gradients, self.weight),
        });
        slots.set(self.gate, gate);
        slots.set(self.x, dout);
    }
}

/// Heads of so many elements as rows of a matrix.
fn heads(tensor: &Tensor, dim: usize) -> View {
    tensor.view().reshaped(tensor.len() / dim, dim)
}

fn segments(context: &Context) -> Segments {
    context.batch.segments.clone()
}

fn sum_of_trained(context: &Context, gradients: &Gradients, id: ParamId) -> Option<View> {
    gradients.sum_of_trained(context.queue, id).map(|sum| sum.view())
}
