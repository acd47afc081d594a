//! Experts in place of an MLP or beside it: a router sends each token to some of them, and their outputs are added up by its weights.
//!
//! Nothing is dropped: T tokens that go to k experts each are T·k pairs, whatever the router does, so memory is known beforehand.
//! Pairs lie sorted by expert. A shard has some columns of every expert, or some experts, whose pairs come first: room for the
//! P = T·min(k, E') that E' of them can have at most. Either way its output, the router's gradient and the gradient of the input are
//! summands.

use evenkeel_device::kernel::{
    self, Activate, ActivateBackward, Activation, AddBiases, BalanceBackward, BalanceTally, BiasDots, BiasSums,
    ClampedGate, ClampedGateBackward, ColumnSum, CombinePairs, Copy, Embed, EmbedBackward, Fill, Gated, GatedBackward,
    GatherPairs, GroupedProduct, Order, PairDots, Product, RouteBackward, RowCount, ScalePairs,
};
use evenkeel_device::{DType, Tensor, View};

use crate::chain::adapted_experts::ExpertAdapter;
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
    pub bias: Option<ParamId>,
    /// f32 [T, E]
    pub logits: Slot,
    /// The factor of logits.
    pub scale: f32,
    pub chosen: usize,
    /// The first expert that this shard has.
    pub first: usize,
    pub renormalises: bool,
    pub expert_scales: Option<ExpertScales>,
    pub routes: Routes,
    /// The place of this layer among those with experts.
    pub layer: usize,
    /// The coefficient of the loss of balance, if there is one. Only one of the shards whose gradients are summed has it.
    pub balance: Option<f32>,
}

/// Factors of routes' weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertScales {
    /// A number for each expert.
    pub scales: ParamId,
    /// f32 [T, k]: the weights before.
    pub unscaled: Slot,
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
    /// The experts of this shard: E' of E.
    pub held: usize,
    pub gate: Gate,
    /// [E'·2I, H], or [E'·H, 2I] if it is transposed.
    pub gate_up: ExpertMatrix,
    /// [E'·H, I], or [E'·I, H]
    pub down: ExpertMatrix,
    /// Whether the weights are stored [in, out].
    pub transposed: bool,
    pub biases: Option<ExpertBiases>,
    /// [P, 2I]
    pub wide: Slot,
    /// [P, I]: what `down` multiplies, for its gradient.
    pub narrow: Slot,
    pub out: Slot,
}

/// The matrices of all experts, one below the other, and what stands beside them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertMatrix {
    pub weight: ParamId,
    pub adapter: Option<ExpertAdapter>,
}

/// How much of a shared expert each token gets: `out = sigmoid(x · weightᵀ) · narrow`, row by row, before the product with `down`.
#[derive(Clone, Debug)]
pub(crate) struct SharedGate {
    pub x: Slot,
    /// [1, H]
    pub weight: ParamId,
    /// f32 [T, 1]
    pub logits: Slot,
    pub narrow: Slot,
    pub out: Slot,
}

/// The gates among the outputs of `gate_up`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gate {
    /// All gates before all others.
    Halves(Activation),
    /// Gates and others in turns, none of them beyond the limit.
    Clamped { limit: f32 },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertBiases {
    /// E'·2I numbers.
    pub gate_up: ParamId,
    /// E'·H numbers.
    pub down: ParamId,
    /// Whether this shard adds those of `down`: only one of those whose outputs are summed does.
    pub adds_down: bool,
}

impl Router {
    pub fn parameters(&self) -> Vec<ParamId> {
        let scales = self.expert_scales.map(|own| own.scales);
        [self.weight].into_iter().chain(self.bias).chain(scales).collect()
    }

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
        let bias = self.bias.map(|bias| context.parameters.value(bias).view());
        queue.launch(Product { bias, scale: self.scale, ..Product::new(Order::NT, x, weight, &logits) });
        queue.launch(kernel::Route {
            logits: logits.view(),
            renormalise: self.renormalises,
            weights: weights.view(),
            chosen: chosen.view(),
            first: self.first,
            pairs: sorted.view(),
            places: places.view(),
            offsets: offsets.view(),
        });
        if let Some(tallies) = &context.batch.tallies {
            let (counted, out) = (tallies.counted.view(), tallies.tally(self.layer));
            queue.launch(BalanceTally { logits: logits.view(), chosen: chosen.view(), counted, out });
        }
        let weights = match self.expert_scales {
            Some(own) => {
                let scaled = own.scaled(context, &weights, &chosen);
                values.set(own.unscaled, weights);
                scaled
            }
            None => weights,
        };
        let routes = &self.routes;
        let slots = [self.logits, routes.weights, routes.chosen, routes.pairs, routes.places, routes.offsets];
        for (slot, tensor) in slots.into_iter().zip([logits, weights, chosen, sorted, places, offsets]) {
            values.set(slot, tensor);
        }
    }

    pub fn saved(&self) -> Vec<Slot> {
        vec![self.x, self.logits, self.routes.chosen, self.weights_of_softmax()]
    }

    fn weights_of_softmax(&self) -> Slot {
        self.expert_scales.map_or(self.routes.weights, |own| own.unscaled)
    }

    pub fn backward_input(&self, context: &Context, gradients: &Gradients, values: &mut Slots, slots: &mut Slots) {
        let (queue, logits) = (context.queue, values.get(self.logits));
        let mut dweights = slots.take(self.routes.weights);
        if let Some(own) = self.expert_scales {
            let (weights, chosen) = (values.get(own.unscaled), values.get(self.routes.chosen));
            dweights = own.backward(context, gradients, weights, chosen, &dweights);
        }
        let dlogits = queue.tensor(logits.rows, logits.cols, context.dtype());
        queue.launch(RouteBackward {
            logits: logits.view(),
            chosen: values.get(self.routes.chosen).view(),
            weights: values.get(self.weights_of_softmax()).view(),
            renormalise: self.renormalises,
            dweights: dweights.view(),
            dlogits: dlogits.view(),
        });
        if let (Some(coefficient), Some(tallies)) = (self.balance, &context.batch.tallies) {
            queue.launch(BalanceBackward {
                logits: logits.view(),
                tallies: tallies.tallies(),
                counted: tallies.counted.view(),
                factor: tallies.factor(coefficient),
                dlogits: dlogits.view(),
            });
        }
        let weight = &context.parameters.value(self.weight);
        // Experts that read the same have begun its gradient.
        let accumulate = slots.find(self.x).is_some();
        if !accumulate {
            let x = values.get(self.x);
            let dx = slots.tensor_for(self.x, queue, x.rows, x.cols, context.dtype());
            slots.set(self.x, dx);
        }
        let dx = slots.get(self.x);
        queue.launch(Product { scale: self.scale, accumulate, ..Product::new(Order::NN, &dlogits, weight, dx) });
        slots.set(self.logits, dlogits);
    }

    pub fn weight_inputs(&self, context: &Context) -> Vec<Slot> {
        context.trains(self.weight).then_some(self.x).into_iter().collect()
    }

    pub fn weight_gradients(&self, context: &Context) -> Vec<Slot> {
        let is_trained = self.parameters().into_iter().any(|id| context.trains(id));
        is_trained.then_some(self.logits).into_iter().collect()
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        if context.trains(self.weight) {
            let (dlogits, x) = (slots.get(self.logits), values.get(self.x));
            add_weight_gradient(context.queue, gradients, self.weight, dlogits, x, self.scale);
        }
        if let Some(dbias) = self.bias.and_then(|bias| gradients.sum_of_trained(context.queue, bias)) {
            context.queue.launch(ColumnSum { x: slots.get(self.logits).view(), out: dbias.view() });
        }
    }
}

impl ExpertScales {
    /// The weights, times the scales of their experts.
    fn scaled(&self, context: &Context, weights: &Tensor, chosen: &Tensor) -> Tensor {
        let scales = self.of_pairs(context, chosen);
        let out = context.queue.tensor(weights.rows, weights.cols, DType::F32);
        let (x, out_pairs) = (pairs_of(weights), pairs_of(&out));
        context.queue.launch(ScalePairs { x, pairs: None, count: None, weights: scales.view(), out: out_pairs });
        out
    }

    /// Adds the gradient of the scales; returns that of the weights.
    fn backward(
        &self,
        context: &Context,
        gradients: &Gradients,
        weights: &Tensor,
        chosen: &Tensor,
        dscaled: &Tensor,
    ) -> Tensor {
        let queue = context.queue;
        if let Some(dscales) = gradients.sum_of_trained(queue, self.scales) {
            let dout = queue.tensor(weights.len(), 1, DType::F32);
            let (x, out) = (pairs_of(dscaled), dout.view());
            queue.launch(ScalePairs { x, pairs: None, count: None, weights: weights.view(), out });
            let (dtable, indices) = (pairs_of(&dscales), chosen.view().reshaped(1, chosen.len()));
            queue.launch(EmbedBackward { dtable, indices, first: 0, scale: 1.0, dout: out });
        }
        self.scaled(context, dscaled, chosen)
    }

    /// f32 [T·k, 1]
    fn of_pairs(&self, context: &Context, chosen: &Tensor) -> Tensor {
        let out = context.queue.tensor(chosen.len(), 1, DType::F32);
        let table = pairs_of(&context.parameters.value(self.scales));
        let indices = chosen.view().reshaped(1, chosen.len());
        context.queue.launch(Embed { table, indices, first: 0, scale: 1.0, out: out.view(), accumulate: false });
        out
    }
}

/// All numbers of a tensor as a column.
fn pairs_of(tensor: &Tensor) -> View {
    tensor.view().reshaped(tensor.len(), 1)
}

impl SharedGate {
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let (queue, x, narrow) = (context.queue, values.get(self.x), values.get(self.narrow));
        let logits = queue.tensor(x.rows, 1, DType::F32);
        queue.launch(Product::new(Order::NT, x, &context.parameters.value(self.weight), &logits));
        let shares = shares(context, &logits);
        let out = values.tensor_for(self.out, queue, narrow.rows, narrow.cols, narrow.dtype);
        let (x, weights) = (narrow.view(), shares.view());
        queue.launch(ScalePairs { x, pairs: None, count: None, weights, out: out.view() });
        values.set(self.logits, logits);
        values.set(self.out, out);
    }

    pub fn saved(&self) -> Vec<Slot> {
        vec![self.x, self.logits, self.narrow]
    }

    pub fn backward_input(&self, context: &Context, values: &Slots, slots: &mut Slots) {
        let (queue, dtype) = (context.queue, context.dtype());
        let (x, narrow, logits) = (values.get(self.x), values.get(self.narrow), values.get(self.logits));
        let dout = slots.take(self.out);
        let dshares = queue.tensor(logits.rows, 1, DType::F32);
        queue.launch(PairDots { a: dout.view(), b: narrow.view(), pairs: None, count: None, out: dshares.view() });
        let weights = shares(context, logits);
        queue.launch(ScalePairs {
            x: dout.view(),
            pairs: None,
            count: None,
            weights: weights.view(),
            out: dout.view(),
        });
        let [logits, dshares] = [logits, &dshares].map(|tensor| tensor.view());
        let activation = Activation::Sigmoid;
        queue.launch(ActivateBackward { activation, x: logits, dout: dshares, dx: dshares });
        let dlogits = queue.tensor(logits.rows, 1, dtype);
        queue.launch(Copy { x: dshares, out: dlogits.view() });
        let dx = slots.tensor_for(self.x, queue, x.rows, x.cols, dtype);
        queue.launch(Product::new(Order::NN, &dlogits, &context.parameters.value(self.weight), &dx));
        for (slot, tensor) in [(self.x, dx), (self.narrow, dout), (self.logits, dlogits)] {
            slots.set(slot, tensor);
        }
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        if context.trains(self.weight) {
            let (dlogits, x) = (slots.get(self.logits), values.get(self.x));
            add_weight_gradient(context.queue, gradients, self.weight, dlogits, x, 1.0);
        }
    }
}

fn shares(context: &Context, logits: &Tensor) -> Tensor {
    let out = context.queue.tensor(logits.rows, 1, DType::F32);
    let activation = Activation::Sigmoid;
    context.queue.launch(Activate { activation, x: logits.view(), out: out.view() });
    out
}

impl Experts {
    pub fn parameters(&self) -> Vec<ParamId> {
        let biases = self.biases.iter().flat_map(|biases| [biases.gate_up, biases.down]);
        let factors = self.adapters().flat_map(|adapter| [adapter.a, adapter.b]);
        self.matrices().map(|matrix| matrix.weight).chain(biases).chain(factors).collect()
    }

    pub fn forward(&self, context: &Context, values: &mut Slots) {
        self.widen(context, values);
        let narrow = self.narrowed(context, values);
        let (queue, tokens) = (context.queue, values.get(self.x).rows);
        let hidden = values.get(self.x).cols;
        let each = queue.tensor(narrow.rows, hidden, context.dtype());
        self.outputs(context, values, &narrow, &self.down, &each);
        if let Some(bias) = self.added_down_bias() {
            self.add_biases(context, values, bias, &each);
        }
        let out = values.tensor_for(self.out, queue, tokens, hidden, context.dtype());
        queue.launch(CombinePairs {
            x: each.view(),
            places: values.get(self.routes.places).view(),
            count: self.count(values),
            weights: Some(values.get(self.routes.weights).view()),
            out: out.view(),
            accumulate: false,
        });
        values.set(self.out, out);
    }

    /// Computes the values that backward needs, without the output.
    pub fn widen(&self, context: &Context, values: &mut Slots) {
        let [rows, cols] = context.parameters.value(self.gate_up.weight).shape();
        let gathered = self.gathered(context, values, values.get(self.x), false);
        let width = if self.transposed { cols } else { rows / self.held };
        let wide = context.queue.tensor(gathered.rows, width, context.dtype());
        let s = self.outputs(context, values, &gathered, &self.gate_up, &wide);
        if let Some(ExpertBiases { gate_up, .. }) = self.biases {
            self.add_biases(context, values, gate_up, &wide);
        }
        values.set(self.wide, wide);
        if let (Some(ExpertAdapter { s: slot, .. }), Some(s)) = (self.gate_up.adapter, s) {
            values.set(slot, s);
        }
    }

    pub fn saved(&self) -> Vec<Slot> {
        let Routes { weights, pairs, places, offsets, .. } = self.routes;
        let s = self.gate_up.adapter.map(|adapter| adapter.s);
        [self.x, self.wide, weights, pairs, places, offsets].into_iter().chain(s).collect()
    }

    pub fn backward_input(&self, context: &Context, values: &mut Slots, slots: &mut Slots) {
        let (queue, dtype) = (context.queue, context.dtype());
        let narrow = self.narrowed(context, values);
        let dout = self.gathered(context, values, slots.get(self.out), false);
        let dnarrow = queue.tensor(narrow.rows, narrow.cols, dtype);
        let ds_of_down = self.inputs(context, values, &dout, &self.down, &dnarrow);
        let weights = values.get(self.routes.weights);
        let dweights = queue.tensor(weights.rows, weights.cols, DType::F32);
        let (pairs, count) = (self.pairs(values, narrow.rows), self.count(values));
        if count.is_some() {
            queue.launch(Fill { out: dweights.view(), value: 0.0 });
        }
        queue.launch(PairDots { a: dnarrow.view(), b: narrow.view(), pairs: Some(pairs), count, out: dweights.view() });
        if let Some(bias) = self.added_down_bias() {
            let (x, offsets, out) = (dout.view(), self.offsets(values), dweights.view());
            let biases = self.of_experts(context.parameters.value(bias));
            queue.launch(BiasDots { x, biases, offsets, pairs, out });
        }
        drop(dout);
        let weights = weights.view();
        for gradient in [Some(&dnarrow), ds_of_down.as_ref()].into_iter().flatten() {
            queue.launch(ScalePairs { x: gradient.view(), pairs: Some(pairs), count, weights, out: gradient.view() });
        }
        slots.set(self.routes.weights, dweights);
        if let (Some(adapter), Some(ds)) = (self.down.adapter, ds_of_down) {
            let s = adapter.product_with_a(self, context, values, &narrow);
            values.set(adapter.s, s);
            slots.set(adapter.s, ds);
        }
        // The gradients overwrite the values, which nothing reads again.
        let dwide = values.take(self.wide);
        let dout = dnarrow.view();
        match self.gate {
            Gate::Halves(activation) => {
                let [gate, up] = halves(&dwide);
                queue.launch(GatedBackward { activation, gate, up, dout, dgate: gate, dup: up, count });
            }
            Gate::Clamped { limit } => {
                queue.launch(ClampedGateBackward { x: dwide.view(), limit, dout, dx: dwide.view(), count });
            }
        }
        drop(dnarrow);
        let x = values.get(self.x);
        let each = queue.tensor(dwide.rows, x.cols, dtype);
        let ds = self.inputs(context, values, &dwide, &self.gate_up, &each);
        if let (Some(adapter), Some(ds)) = (self.gate_up.adapter, ds) {
            slots.set(adapter.s, ds);
        }
        let accumulate = slots.find(self.x).is_some();
        if !accumulate {
            let dx = slots.tensor_for(self.x, queue, x.rows, x.cols, dtype);
            slots.set(self.x, dx);
        }
        let (places, out) = (values.get(self.routes.places).view(), slots.get(self.x).view());
        queue.launch(CombinePairs { x: each.view(), places, count, weights: None, out, accumulate });
        slots.set(self.wide, dwide);
        values.set(self.narrow, narrow);
    }

    pub fn weight_inputs(&self, context: &Context) -> Vec<Slot> {
        let Routes { weights, pairs, offsets, .. } = self.routes;
        let of_wide = self.gate_up.needs_inputs(context).then_some(self.x);
        let of_down = self.down.needs_inputs(context).then_some(self.narrow);
        let of_outputs = self.trains_outputs(context).then_some(weights);
        let of_adapters = self.adapters().map(|adapter| adapter.s);
        let is_any_trained = self.parameters().into_iter().any(|id| context.trains(id));
        let shared = is_any_trained.then_some([pairs, offsets]);
        let shared = shared.into_iter().flatten();
        of_wide.into_iter().chain(of_down).chain(of_outputs).chain(of_adapters).chain(shared).collect()
    }

    pub fn weight_gradients(&self, context: &Context) -> Vec<Slot> {
        let trains_wide =
            self.gate_up.needs_inputs(context) || self.biases.is_some_and(|biases| context.trains(biases.gate_up));
        let of_wide = trains_wide.then_some(self.wide);
        let of_outputs = self.trains_outputs(context).then_some(self.out);
        of_wide.into_iter().chain(of_outputs).chain(self.adapters().map(|adapter| adapter.s)).collect()
    }

    /// Whether something is trained whose gradient follows from that of the output.
    fn trains_outputs(&self, context: &Context) -> bool {
        self.down.needs_inputs(context) || self.biases.is_some_and(|biases| context.trains(biases.down))
    }

    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        if self.gate_up.needs_inputs(context) {
            let gathered = self.gathered(context, values, values.get(self.x), false);
            let dwide = slots.get(self.wide);
            self.add_matrix_gradients(context, gradients, values, slots, &self.gate_up, [&gathered, dwide]);
        }
        if let Some(ExpertBiases { gate_up, .. }) = self.biases.filter(|biases| context.trains(biases.gate_up)) {
            self.add_bias_gradient(context, gradients, values, gate_up, slots.get(self.wide));
        }
        if self.trains_outputs(context) {
            let dout = self.gathered(context, values, slots.get(self.out), true);
            if self.down.needs_inputs(context) {
                let narrow = values.get(self.narrow);
                self.add_matrix_gradients(context, gradients, values, slots, &self.down, [narrow, &dout]);
            }
            if let Some(ExpertBiases { down, .. }) = self.biases {
                self.add_bias_gradient(context, gradients, values, down, &dout);
            }
        }
    }

    /// The rows of all pairs, times their weights or as they are. [P, H]
    fn gathered(&self, context: &Context, values: &Slots, x: &Tensor, is_weighted: bool) -> Tensor {
        let chosen_per_token = values.get(self.routes.pairs).cols.checked_div(x.rows).unwrap_or(1).max(1);
        let out = context.queue.tensor(x.rows * chosen_per_token.min(self.held), x.cols, x.dtype);
        let weights = is_weighted.then(|| values.get(self.routes.weights).view());
        let (x, pairs, count) = (x.view(), self.pairs(values, out.rows), self.count(values));
        context.queue.launch(GatherPairs { x, pairs, chosen_per_token, weights, count, out: out.view() });
        out
    }

    /// The first of the sorted pairs, so many.
    fn pairs(&self, values: &Slots, rows: usize) -> View {
        values.get(self.routes.pairs).view().col_range(0..rows)
    }

    /// Where the pairs of each of this shard's experts begin, and their end.
    fn offsets(&self, values: &Slots) -> View {
        values.get(self.routes.offsets).view().col_range(0..self.held + 1)
    }

    /// How many pairs this shard's experts have, if others have the rest: as many as their share of the experts, one may expect.
    fn count(&self, values: &Slots) -> Option<RowCount> {
        let offsets = values.get(self.routes.offsets).view();
        let experts = offsets.cols - 1;
        let expected = (values.get(self.routes.pairs).cols * self.held).div_ceil(experts.max(1));
        (self.held < experts).then(|| RowCount { at: offsets.col_range(self.held..self.held + 1), expected })
    }

    /// A vector with as many numbers of each expert as a row for each.
    fn of_experts(&self, vector: Tensor) -> View {
        vector.view().reshaped(self.held, vector.len() / self.held)
    }

    /// The factor of `down`: activated gates times the rest. [P, I]
    fn narrowed(&self, context: &Context, values: &Slots) -> Tensor {
        let (queue, wide, count) = (context.queue, values.get(self.wide), self.count(values));
        let out = queue.tensor(wide.rows, wide.cols / 2, wide.dtype);
        match self.gate {
            Gate::Halves(activation) => {
                let [gate, up]: [View; 2] = halves(wide);
                queue.launch(Gated { activation, gate, up, out: out.view(), count });
            }
            Gate::Clamped { limit } => queue.launch(ClampedGate { x: wide.view(), limit, out: out.view(), count }),
        }
        out
    }

    /// The bias of `down`, if this shard adds it.
    fn added_down_bias(&self) -> Option<ParamId> {
        self.biases.filter(|biases| biases.adds_down).map(|biases| biases.down)
    }

    fn add_biases(&self, context: &Context, values: &Slots, bias: ParamId, x: &Tensor) {
        let (biases, offsets) = (self.of_experts(context.parameters.value(bias)), self.offsets(values));
        context.queue.launch(AddBiases { x: x.view(), biases, offsets });
    }

    fn add_bias_gradient(
        &self,
        context: &Context,
        gradients: &Gradients,
        values: &Slots,
        bias: ParamId,
        dout: &Tensor,
    ) {
        let Some(dbias) = gradients.sum_of_trained(context.queue, bias) else { return };
        context.queue.launch(BiasSums { x: dout.view(), offsets: self.offsets(values), out: self.of_experts(dbias) });
    }

    /// The gradients of a matrix and of its adapter, of its inputs and its outputs' gradient.
    fn add_matrix_gradients(
        &self,
        context: &Context,
        gradients: &Gradients,
        values: &Slots,
        slots: &Slots,
        matrix: &ExpertMatrix,
        [x, dout]: [&Tensor; 2],
    ) {
        let (a, b) = if self.transposed { (x, dout) } else { (dout, x) };
        self.add_gradient(context, gradients, values, matrix.weight, a, b);
        if let Some(ExpertAdapter { a, b, s, .. }) = matrix.adapter {
            self.add_gradient(context, gradients, values, a, slots.get(s), x);
            self.add_gradient(context, gradients, values, b, dout, values.get(s));
        }
    }

    /// Adds `aᵀ · b` of each expert to a parameter's gradient, if it is trained.
    fn add_gradient(
        &self,
        context: &Context,
        gradients: &Gradients,
        values: &Slots,
        id: ParamId,
        a: &Tensor,
        b: &Tensor,
    ) {
        if context.trains(id) {
            let (out, accumulate) = gradients.overwrite_or_add(context.queue, id);
            self.product(context, values, Order::TN, a, b, &out, accumulate);
        }
    }

    /// What each expert's matrix makes of its rows. Returns what its adapter made of them on the way.
    fn outputs(
        &self,
        context: &Context,
        values: &Slots,
        x: &Tensor,
        matrix: &ExpertMatrix,
        out: &Tensor,
    ) -> Option<Tensor> {
        let (order, weight) = (if self.transposed { Order::NN } else { Order::NT }, matrix.weight);
        self.product(context, values, order, x, &context.parameters.value(weight), out, false);
        matrix.adapter.map(|adapter| adapter.add_outputs(self, context, values, x, out))
    }

    /// The gradient of those rows. Returns the gradient of what the adapter made of them.
    fn inputs(
        &self,
        context: &Context,
        values: &Slots,
        dout: &Tensor,
        matrix: &ExpertMatrix,
        dx: &Tensor,
    ) -> Option<Tensor> {
        let (order, weight) = (if self.transposed { Order::NT } else { Order::NN }, matrix.weight);
        self.product(context, values, order, dout, &context.parameters.value(weight), dx, false);
        matrix.adapter.map(|adapter| adapter.add_inputs(self, context, values, dout, dx))
    }

    pub(super) fn product(
        &self,
        context: &Context,
        values: &Slots,
        order: Order,
        a: &Tensor,
        b: &Tensor,
        out: &Tensor,
        accumulate: bool,
    ) {
        let (a, b, out, offsets) = (a.view(), b.view(), out.view(), self.offsets(values));
        let expected_rows = self.count(values).map(|count| count.expected);
        context.queue.launch(GroupedProduct { order, a, b, out, offsets, accumulate, expected_rows });
    }
}

impl ExpertMatrix {
    /// Whether something is trained whose gradient follows from its inputs.
    fn needs_inputs(&self, context: &Context) -> bool {
        self.adapter.is_some() || context.trains(self.weight)
    }
}
