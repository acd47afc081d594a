//! Linear layers: forward, and backward in two halves. Their adapters are in [`adapted`](super::adapted).

use std::ops::Range;

use evenkeel_device::kernel::{ActivateBackward, Activation, Add, ColumnSum, Order, Product, Term};
use evenkeel_device::{Queue, Tensor};

use crate::chain::adapted::{AdapterInputGradient, LinearAdapter};
use crate::chain::body::{Context, Slot, Slots};
use crate::parameters::{Gradients, ParamId};

/// `out = activation(x · weightᵀ + bias)`
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    pub x: Slot,
    pub out: Slot,
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    /// Whether this shard adds the bias: only one of those whose outputs are summed does.
    pub adds_bias: bool,
    /// Whether the weight is stored [in, out].
    pub transposed: bool,
    /// The activation, and the slot that keeps the value before it.
    pub activation: Option<(Activation, Slot)>,
    /// Whether nothing needs the gradient of `x`.
    pub first: bool,
    /// The part of its parameters that it computes with, if not all.
    pub part: Option<LinearPart>,
    /// Whether it adds to `out`; such a layer has neither bias nor activation.
    pub adds: bool,
    pub adapter: Option<LinearAdapter>,
}

/// Some of a linear layer's outputs or inputs, counted among those that the shard holds.
#[derive(Clone, Debug)]
pub(crate) enum LinearPart {
    Outputs(Range<usize>),
    Inputs(Range<usize>),
}

impl Linear {
    /// The weight to multiply with: all of it, its part, or its kept columns.
    fn weight(&self, context: &Context) -> Tensor {
        match context.pruned_layer(self.weight) {
            Some(pruned_layer) => {
                assert!(self.part.is_none(), "layers that are pruned are not shared by samples");
                pruned_layer.weight(context)
            }
            None => self.part_of_weight(context.weight(self.weight)),
        }
    }

    pub(super) fn forward(&self, context: &Context, values: &mut Slots) {
        let also = self.prepare(context, values);
        let (queue, weight) = (context.queue, &self.weight(context));
        let x = self.input(context, values);
        let (order, width) = if self.transposed { (Order::NN, weight.cols) } else { (Order::NT, weight.rows) };
        if let Some(magnitude) = self.magnitude() {
            let u = queue.tensor(x.rows, width, context.dtype());
            queue.launch(Product { also, ..Product::new(order, x, weight, &u) });
            return self.magnify(context, values, magnitude, u);
        }
        if self.adds {
            let product = Product::new(order, x, weight, values.get(self.out)).accumulating();
            return queue.launch(Product { also, ..product });
        }
        let out = values.tensor_for(self.out, queue, x.rows, width, context.dtype());
        let bias = self.bias.filter(|_| self.adds_bias).map(|bias| context.parameters.value(bias));
        let preactivation = self.activation.map(|_| queue.tensor(x.rows, width, context.dtype()));
        queue.launch(Product {
            also,
            bias: bias.map(|bias| self.part_of_bias(bias).view()),
            activation: self.activation.map(|(activation, _)| activation),
            preactivation: preactivation.as_ref().map(Tensor::view),
            ..Product::new(order, x, weight, &out)
        });
        values.set(self.out, out);
        if let (Some((_, slot)), Some(tensor)) = (self.activation, preactivation) {
            values.set(slot, tensor);
        }
    }

    /// Values that forward leaves beside its output.
    pub(super) fn recompute(&self, context: &Context, values: &mut Slots) {
        if self.magnitude().is_some() || self.activation.is_some() {
            self.forward(context, values);
        } else {
            self.prepare(context, values);
        }
    }

    /// The kept columns of the input, if not all are, and the adapter's product with A; returns the one with B.
    fn prepare(&self, context: &Context, values: &mut Slots) -> Option<Term> {
        if let (Some(pruned_layer), None) = (context.pruned_layer(self.weight), values.find_narrow(self.x)) {
            let narrow = pruned_layer.input(context.queue, values.get(self.x));
            values.set_narrow(self.x, narrow);
        }
        self.adapted(context, values)
    }

    /// The values that the weight is multiplied with: the whole slot, or its kept columns.
    fn input<'a>(&self, context: &Context, values: &'a Slots) -> &'a Tensor {
        match context.pruned_layer(self.weight) {
            Some(_) => values.find_narrow(self.x).expect("forward has left it"),
            None => values.get(self.x),
        }
    }

    pub(super) fn backward_input(
        &self,
        context: &Context,
        gradients: &Gradients,
        values: &mut Slots,
        slots: &mut Slots,
    ) {
        let queue = context.queue;
        let dout = slots.get(self.out);
        if let Some((activation, slot)) = self.activation {
            let x = values.take(slot).view();
            queue.launch(ActivateBackward { activation, x, dout: dout.view(), dx: dout.view() });
        }
        if self.first {
            return;
        }
        self.magnify_backward(context, gradients, values, slots);
        let AdapterInputGradient { also, dropped } = self.adapted_backward(context, slots);
        let dout = slots.get(self.product_slot());
        let (weight, is_pruned) = (&self.weight(context), context.pruned_layer(self.weight).is_some());
        let (order, width) = if self.transposed { (Order::NT, weight.rows) } else { (Order::NN, weight.cols) };
        match if is_pruned { slots.find_narrow(self.x) } else { slots.find(self.x) } {
            Some(dx) => {
                queue.launch(Product { also, ..Product::new(order, dout, weight, dx).accumulating() });
                let add = |dropped: &Tensor| queue.launch(Add { a: dx.view(), b: dropped.view(), out: dx.view() });
                dropped.iter().for_each(add);
            }
            None => {
                let accumulate = dropped.is_some();
                let dx = dropped.unwrap_or_else(|| queue.tensor(dout.rows, width, context.dtype()));
                queue.launch(Product { also, accumulate, ..Product::new(order, dout, weight, &dx) });
                if is_pruned { slots.set_narrow(self.x, dx) } else { slots.set(self.x, dx) }
            }
        }
        if let Some(pruning) = context.pruning {
            pruning.complete_input(queue, self.weight, self.x, slots);
        }
    }

    pub(super) fn backward_weight(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        let queue = context.queue;
        if context.trains(self.weight) {
            let (x, dout) = (self.input(context, values), slots.get(self.product_slot()));
            let (a, b) = if self.transposed { (x, dout) } else { (dout, x) };
            match (context.pruned_layer(self.weight), &self.part) {
                (Some(pruned_layer), _) => pruned_layer.add_weight_gradient(queue, gradients, a, b),
                (None, None) => add_weight_gradient(queue, gradients, self.weight, a, b, 1.0),
                // Overwriting one part would leave the others undefined, so the whole is zeroed first.
                (None, Some(_)) => {
                    let dweight = self.part_of_weight(gradients.sum(queue, self.weight));
                    queue.launch(Product::new(Order::TN, a, b, &dweight).accumulating());
                }
            }
        }
        self.add_factor_gradients(context, gradients, values, slots);
        if let Some(dbias) = self.bias.and_then(|bias| gradients.sum_of_trained(queue, bias)) {
            let dbias = self.part_of_bias(dbias);
            queue.launch(ColumnSum { x: slots.get(self.out).view(), out: dbias.view() });
        }
    }

    /// The part of the weight, or of its gradient, that this layer uses.
    fn part_of_weight(&self, whole: Tensor) -> Tensor {
        match (&self.part, self.transposed) {
            (None, _) => whole,
            (Some(LinearPart::Outputs(rows)), false) | (Some(LinearPart::Inputs(rows)), true) => {
                whole.row_range(rows.clone())
            }
            (Some(LinearPart::Outputs(cols)), true) | (Some(LinearPart::Inputs(cols)), false) => {
                whole.col_range(cols.clone())
            }
        }
    }

    /// The same for the bias, which has a number for each output.
    pub(super) fn part_of_bias(&self, whole: Tensor) -> Tensor {
        match &self.part {
            Some(LinearPart::Outputs(cols)) => whole.col_range(cols.clone()),
            Some(LinearPart::Inputs(_)) | None => whole,
        }
    }
}

/// `dweight += scale · aᵀ · b`
pub(crate) fn add_weight_gradient(
    queue: &Queue,
    gradients: &Gradients,
    weight: ParamId,
    a: &Tensor,
    b: &Tensor,
    scale: f32,
) {
    let (dweight, accumulate) = gradients.overwrite_or_add(queue, weight);
    queue.launch(Product { scale, accumulate, ..Product::new(Order::TN, a, b, &dweight) });
}
