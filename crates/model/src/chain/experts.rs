//! Experts in place of an MLP: a router sends each token to some of them, and their outputs are added up by its weights.
//!
//! Nothing is dropped: T tokens that go to k experts each are T·k pairs, whatever the router does, so memory is known beforehand.
//! Pairs lie sorted by expert. A shard has some columns of every expert, so its output, the router's gradient and the gradient of
//! the input are summands.

use evenkeel_device::kernel::{
    self, Activation, CombinePairs, Gated, GatedBackward, GatherPairs, GroupedProduct, Order, PairDots, Product,
    RouteBackward, ScalePairs,
};
use evenkeel_device::{DType, Tensor, View};

use crate::chain::body::{Context, Slot, Slots};
use crate::chain::linear::add_weight_gradient;
use crate::chain::op::halves;
use crate::parameters::{Gradients, ParamId};

/// Chooses experts for each token.
#[derive(Clone, Debug)]
pub(crate) struct Router {
    pub x: Slot,
    /// [E, H]
    pub weight: ParamId,
    /// f32 [T, E]
    pub logits: Slot,
    pub chosen: usize,
    pub renormalises: bool,
    pub routes: Routes,
}

/// The routes of tokens to their experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routes {
    /// f32 [T, k]
    pub weights: Slot,
    /// u32 [T, k]
    pub chosen: Slot,
    /// u32 [1, T·k]: the pairs by expert, and the place of each pair among them.
    pub pairs: Slot,
    pub places: Slot,
    /// u32 [1, E + 1]
    pub offsets: Slot,
}

/// The experts' outputs, added up for each token.
#[derive(Clone, Debug)]
pub(crate) struct Experts {
    pub x: Slot,
    pub routes: Routes,
    pub activation: Activation,
    /// [E·2I, H]: of each expert the gate's rows, then the others.
    pub gate_up: ParamId,
    /// [E·H, I]
    pub down: ParamId,
    /// [T·k, 2I]
    pub wide: Slot,
    /// [T·k, I]: what `down` multiplies, for its gradient.
    pub narrow: Slot,
    pub out: Slot,
}

impl Router {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let (queue, x) = (context.queue, values.get(self.x));
        let weight = &context.parameters.value(self.weight);
        let [tokens, experts] = [x.rows, weight.rows];
        let pairs = tokens * self.chosen;
        let logits = queue.tensor(tokens, experts, DType::F32);
        let weights = queue.tensor(tokens, self.chosen, DType::F32);
        let chosen = queue.tensor(tokens, self.chosen, DType::U32);
        let [sorted, places] = [pairs; 2].map(|count| queue.tensor(1, count, DType::U32));
        let offsets = queue.tensor(1, experts + 1, DType::U32);
        queue.launch(Product::new(Order::NT, x, weight, &logits));
        queue.launch(kernel::Route {
            logits: logits.view(),
            renormalise: self.renormalises,
            weights: weights.view(),
            chosen: chosen.view(),
            pairs: sorted.view(),
            places: places.view(),
            offsets: offsets.view(),
        });
        let routes = &self.routes;
        let slots = [self.logits, routes.weights, routes.chosen, routes.pairs, routes.places, routes.offsets];
        for (slot, tensor) in slots.into_iter().zip([logits, weights, chosen, sorted, places, offsets]) {
            values.set(slot, tensor);
        }
    }

    pub fn saved(&self) -> Vec<Slot> {
        vec![self.x, self.logits, self.routes.chosen, self.routes.weights]
    }

    pub fn backward_input(&self, context: &Context, values: &mut Slots, slots: &mut Slots) {
        let (queue, logits) = (context.queue, values.get(self.logits));
        let dweights = slots.take(self.routes.weights);
        let dlogits = queue.tensor(logits.rows, logits.cols, context.dtype());
        queue.launch(RouteBackward {
            logits: logits.view(),
            chosen: values.get(self.routes.chosen).view(),
            weights: values.get(self.routes.weights).view(),
            renormalise: self.renormalises,
            dweights: dweights.view(),
            dlogits: dlogits.view(),
        });
        let weight = &context.parameters.value(self.weight);
        let dx = slots.get(self.x);
        queue.launch(Product::new(Order::NN, &dlogits, weight, dx).accumulating());
        slots.set(self.logits, dlogits);
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        if context.trains(self.weight) {
            let (dlogits, x) = (slots.get(self.logits), values.get(self.x));
            add_weight_gradient(context.queue, gradients, self.weight, dlogits, x, 1.0);
        }
    }
}

impl Experts {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        self.widen(context, values);
        let narrow = self.narrowed(context, values);
        let down = &context.parameters.value(self.down);
        let (queue, tokens) = (context.queue, values.get(self.x).rows);
        let hidden = values.get(self.x).cols;
        let each = queue.tensor(narrow.rows, hidden, context.dtype());
        self.product(context, values, Order::NT, &narrow, down, &each, false);
        let out = values.tensor_for(self.out, queue, tokens, hidden, context.dtype());
        queue.launch(CombinePairs {
            x: each.view(),
            places: values.get(self.routes.places).view(),
            weights: Some(values.get(self.routes.weights).view()),
            out: out.view(),
            accumulate: false,
        });
        values.set(self.out, out);
    }

    /// Computes the values that backward needs, without the output.
    pub fn widen(&self, context: &Context, values: &mut Slots) {
        let gate_up = &context.parameters.value(self.gate_up);
        let gathered = self.gathered(context, values, values.get(self.x), false);
        let experts = values.get(self.routes.offsets).cols - 1;
        let wide = context.queue.tensor(gathered.rows, gate_up.rows / experts, context.dtype());
        self.product(context, values, Order::NT, &gathered, gate_up, &wide, false);
        values.set(self.wide, wide);
    }

    pub fn saved(&self) -> Vec<Slot> {
        let Routes { weights, pairs, places, offsets, .. } = self.routes;
        vec![self.x, self.wide, weights, pairs, places, offsets]
    }

    pub fn backward_input(&self, context: &Context, values: &mut Slots, slots: &mut Slots) {
        let (queue, dtype) = (context.queue, context.dtype());
        let narrow = self.narrowed(context, values);
        let dout = self.gathered(context, values, slots.get(self.out), false);
        let dnarrow = queue.tensor(narrow.rows, narrow.cols, dtype);
        let down = &context.parameters.value(self.down);
        self.product(context, values, Order::NN, &dout, down, &dnarrow, false);
        drop(dout);
        let weights = values.get(self.routes.weights);
        let dweights = queue.tensor(weights.rows, weights.cols, DType::F32);
        let pairs = values.get(self.routes.pairs).view();
        queue.launch(PairDots { a: dnarrow.view(), b: narrow.view(), pairs, out: dweights.view() });
        queue.launch(ScalePairs { x: dnarrow.view(), pairs, weights: weights.view(), out: dnarrow.view() });
        slots.set(self.routes.weights, dweights);
        // The gradients overwrite the values, which nothing reads again.
        let dwide = values.take(self.wide);
        let [gate, up] = halves(&dwide);
        let (activation, dout) = (self.activation, dnarrow.view());
        queue.launch(GatedBackward { activation, gate, up, dout, dgate: gate, dup: up });
        drop(dnarrow);
        let x = values.get(self.x);
        let gate_up = &context.parameters.value(self.gate_up);
        let each = queue.tensor(dwide.rows, x.cols, dtype);
        self.product(context, values, Order::NN, &dwide, gate_up, &each, false);
        let accumulate = slots.find(self.x).is_some();
        if !accumulate {
            let dx = slots.tensor_for(self.x, queue, x.rows, x.cols, dtype);
            slots.set(self.x, dx);
        }
        let (places, out) = (values.get(self.routes.places).view(), slots.get(self.x).view());
        queue.launch(CombinePairs { x: each.view(), places, weights: None, out, accumulate });
        slots.set(self.wide, dwide);
        values.set(self.narrow, narrow);
    }

    pub fn weight_inputs(&self, context: &Context) -> Vec<Slot> {
        let Routes { weights, pairs, offsets, .. } = self.routes;
        let [trains_wide, trains_down] = [self.gate_up, self.down].map(|id| context.trains(id));
        let of_wide = trains_wide.then_some(self.x);
        let of_down = trains_down.then_some([self.narrow, weights]);
        let shared = (trains_wide || trains_down).then_some([pairs, offsets]);
        of_wide.into_iter().chain(of_down.into_iter().flatten()).chain(shared.into_iter().flatten()).collect()
    }

    pub fn weight_gradients(&self, context: &Context) -> Vec<Slot> {
        let of_wide = context.trains(self.gate_up).then_some(self.wide);
        of_wide.into_iter().chain(context.trains(self.down).then_some(self.out)).collect()
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        let queue = context.queue;
        if context.trains(self.gate_up) {
            let gathered = self.gathered(context, values, values.get(self.x), false);
            let (dweight, accumulate) = gradients.overwrite_or_add(queue, self.gate_up);
            self.product(context, values, Order::TN, slots.get(self.wide), &gathered, &dweight, accumulate);
        }
        if context.trains(self.down) {
            let dout = self.gathered(context, values, slots.get(self.out), true);
            let (dweight, accumulate) = gradients.overwrite_or_add(queue, self.down);
            self.product(context, values, Order::TN, &dout, values.get(self.narrow), &dweight, accumulate);
        }
    }

    /// The rows of all pairs, times their weights or as they are. [T·k, H]
    fn gathered(&self, context: &Context, values: &Slots, x: &Tensor, is_weighted: bool) -> Tensor {
        let pairs = values.get(self.routes.pairs);
        let out = context.queue.tensor(pairs.cols, x.cols, x.dtype);
        let chosen_per_token = pairs.cols.checked_div(x.rows).unwrap_or(1).max(1);
        let weights = is_weighted.then(|| values.get(self.routes.weights).view());
        let (x, pairs) = (x.view(), pairs.view());
        context.queue.launch(GatherPairs { x, pairs, chosen_per_token, weights, out: out.view() });
        out
    }

    /// The factor of `down`: activated gates times the rest. [T·k, I]
    fn narrowed(&self, context: &Context, values: &Slots) -> Tensor {
        let wide = values.get(self.wide);
        let [gate, up]: [View; 2] = halves(wide);
        let out = context.queue.tensor(gate.rows, gate.cols, gate.dtype);
        context.queue.launch(Gated { activation: self.activation, gate, up, out: out.view() });
        out
    }

    fn product(
        &self,
        context: &Context,
        values: &Slots,
        order: Order,
        a: &Tensor,
        b: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) {
        let offsets = values.get(self.routes.offsets).view();
        let (a, b, out) = (a.view(), b.view(), out.view());
        context.queue.launch(GroupedProduct { order, a, b, out, offsets, accumulate });
    }
}
