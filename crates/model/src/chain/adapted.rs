//! The adapter of a linear layer: `s·D(x)·Aᵀ·Bᵀ` beside `x·Wᵀ`, D the dropout of its input.
//!
//! Only `s·D(x)·Aᵀ`, [T, rank], has a tensor of its own. The second product is added to the layer's in the same sums, and so is
//! its gradient for x, unless numbers were dropped.
//!
//! On a GPU, S = s·D(x)·Aᵀ lies beside x, B beside W and A below it, so that `[x S]·[W B]ᵀ` is one product; and so are the
//! gradients: `[dout dS]·[W; A]`. Layers with the same x have their S one behind the other, and zeros for those before theirs.
//! Where they follow one another they are a group: all S are one product, all A lie below the first one's W, all dS beside the
//! first one's dout, and the gradients of all A are one product.
//!
//! DoRA's layer computes `u = x·Wᵀ + s·D(x)·Aᵀ·Bᵀ` into a tensor of its own and multiplies its columns. The norms that it divides by
//! are constants in backward, which goes on with the gradient of `u`.
//!
//! Shapes: T tokens, I inputs and O outputs of the layer on this shard.

use evenkeel_device::Tensor;
use evenkeel_device::kernel::{Activate, ColumnDot, Order, Placement, Product, ScaleColumns, Term};

use crate::chain::body::{Body, Context, Slot, Slots};
use crate::chain::dropout::{Dropout, Noise};
use crate::chain::linear::{Linear, LinearPart};
use crate::chain::op::Op;
use crate::chain::unit::{Sublayer, Unit};
use crate::parameters::joined::{Group, Place};
use crate::parameters::{Gradients, ParamId, ParamSpec};

#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearAdapter {
    /// [rank, I]
    pub a: ParamId,
    /// [O, rank]
    pub b: ParamId,
    pub scale: f32,
    pub dropout: Option<Dropout>,
    /// The place of x's first column among the inputs of the whole layer, and how many these are.
    pub first_input: usize,
    pub inputs: usize,
    /// The scaled product of the dropped input with A. [T, rank]
    pub s: Slot,
    /// The place of S beside x, if it is to lie there.
    pub place: Option<Place>,
    /// The output beside whose gradient dS is to lie.
    pub beside: Option<Slot>,
    pub magnitude: Option<LinearMagnitude>,
}

/// DoRA's part of an adapter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearMagnitude {
    pub parameters: MagnitudeParameters,
    /// The layer's output before it is multiplied. [T, O]
    pub u: Slot,
}

/// Vectors with an element for each output. f32 [1, O]
#[derive(Clone, Copy, Debug)]
pub(crate) struct MagnitudeParameters {
    pub magnitudes: ParamId,
    /// The squared norms of the rows of `W + s·B·A`.
    pub squares: ParamId,
}

/// An adapter's gradient for x: a product that is added in the layer's sums or, if numbers of x were dropped, what is left of it.
#[derive(Default)]
pub(super) struct AdapterInputGradient {
    pub also: Option<Term>,
    pub dropped: Option<Tensor>,
}

/// The weight of an adapted layer, and the adapter's factors. Those of experts lie one below the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdaptedWeight {
    pub weight: ParamId,
    pub a: ParamId,
    pub b: ParamId,
    pub rank: usize,
    /// 1 for a linear layer.
    pub experts: usize,
    pub scale: f32,
    /// Whether the weight is stored [in, out].
    pub transposed: bool,
    pub magnitude: Option<MagnitudeParameters>,
}

/// Gives what belongs to adapters places beside what their layers read and write, if these are frozen and not held in 4 bits.
pub(crate) fn make_room(units: &mut [Unit], specs: &[ParamSpec]) {
    let mut output_room = 0;
    for unit in units {
        if let Some(entry) = &mut unit.entry {
            entry.output_room = std::mem::take(&mut output_room);
        }
        let Sublayer::Body(body) = &mut unit.sublayer else { continue };
        output_room = body.make_room(specs);
        if let Some(entry) = &mut unit.entry {
            entry.rooms = body.inputs.iter().map(|slot| body.rooms[slot.0]).collect();
        }
    }
}

impl Body {
    /// Returns the room that the output's gradient should have.
    fn make_room(&mut self, specs: &[ParamSpec]) -> usize {
        self.rooms.fill(0);
        let gapless: Vec<Slot> = self.ops.iter().flat_map(Op::slots_without_gaps).collect();
        for op in &mut self.ops {
            let Op::Linear(linear @ Linear { transposed: false, .. }) = op else { continue };
            let Some(adapter) = &mut linear.adapter else { continue };
            (adapter.place, adapter.beside) = (None, None);
            let weight = &specs[linear.weight.0];
            if weight.is_trained || weight.is_packed || gapless.contains(&linear.x) {
                continue;
            }
            adapter.place = Some(Place { first: self.rooms[linear.x.0], group: None });
            adapter.beside = adapter.magnitude.is_none().then_some(linear.out);
            self.rooms[linear.x.0] += specs[adapter.a.0].matrix[0];
        }
        for layers in self.ops.chunk_by_mut(|before, after| before.linear_input() == after.linear_input()) {
            group(layers, specs, &gapless);
        }
        let mut output_room = 0;
        for linear in self.ops.iter().flat_map(Op::linears) {
            let Some(LinearAdapter { a, beside: Some(slot), place: Some(place), .. }) = linear.adapter else {
                continue;
            };
            let room = place.group.map_or(specs[a.0].matrix[0], |group| group.rank);
            if slot == self.output {
                output_room = room;
            } else if !gapless.contains(&slot) {
                self.rooms[slot.0] = room.max(self.rooms[slot.0]);
            }
        }
        output_room
    }
}

/// Makes a group of the adapted ones of layers that follow one another and read the same x, if their adapters suit that.
fn group(layers: &mut [Op], specs: &[ParamSpec], gapless: &[Slot]) {
    let adapted = layers.iter_mut().filter_map(|op| match op {
        Op::Linear(linear) if linear.adapter.is_some() => Some(linear),
        _ => None,
    });
    let mut adapted: Vec<&mut Linear> = adapted.collect();
    let [leader, _, ..] = &adapted[..] else { return };
    let first = leader.weight;
    let Some(LinearAdapter { scale, beside: Some(beside), place: Some(Place { first: 0, .. }), .. }) = leader.adapter
    else {
        return;
    };
    let joins = |linear: &&mut Linear| {
        let suits = |it: LinearAdapter| it.scale == scale && it.beside.is_some() && it.dropout.is_none();
        linear.part.is_none() && linear.adapter.is_some_and(suits)
    };
    if gapless.contains(&beside) || !adapted.iter().all(joins) {
        return;
    }
    let adapters: Vec<&mut LinearAdapter> = adapted.iter_mut().filter_map(|linear| linear.adapter.as_mut()).collect();
    let group = Group { first, rank: adapters.iter().map(|adapter| specs[adapter.a.0].matrix[0]).sum() };
    for adapter in adapters {
        adapter.place = adapter.place.map(|place| Place { group: Some(group), ..place });
        adapter.beside = Some(beside);
    }
}

impl Linear {
    /// Computes the adapter's product with A; returns the one with B.
    pub(super) fn adapted(&self, context: &Context, values: &mut Slots) -> Option<Term> {
        let adapter = self.adapter?;
        let (queue, a) = (context.queue, self.factor_a(context.parameters.value(adapter.a)));
        let value = values.get(self.x);
        let multiply = |a: &Tensor, s: &Tensor| {
            let x = adapter.dropped(context, value);
            queue.launch(Product { scale: adapter.scale, ..Product::new(Order::NT, &x, a, s) });
        };
        let joined = context.parameters.joined_factors(self.weight).zip(adapter.place);
        let beside = joined.and_then(|(joined, place)| Some((joined, place, value.room(0..place.room(a.rows))?)));
        let (s, term) = match beside {
            Some((joined, place, room)) => {
                let s = room.col_range(place.first..place.first + a.rows);
                match place.group {
                    None => multiply(&a, &s),
                    // The first layer computes it for all.
                    Some(_) => joined.a.iter().for_each(|a| multiply(a, &room)),
                }
                (s, Term::new(Order::NT, &room.col_range(0..place.first + a.rows), &joined.until_b))
            }
            None => {
                let s = queue.tensor(value.rows, a.rows, context.dtype());
                multiply(&a, &s);
                let b = self.factor_b(context.parameters.value(adapter.b));
                let term = Term::new(Order::NT, &s, &b);
                (s, term)
            }
        };
        values.set(adapter.s, s);
        Some(term)
    }

    /// Computes the gradient of the adapter's product with A; returns its gradient for x.
    pub(super) fn adapted_backward(&self, context: &Context, slots: &mut Slots) -> AdapterInputGradient {
        let Some(adapter) = self.adapter else { return AdapterInputGradient::default() };
        let b = self.factor_b(context.parameters.value(adapter.b));
        let dout = slots.get(self.product_slot());
        let multiply = |ds: &Tensor| {
            context.queue.launch(Product { scale: adapter.scale, ..Product::new(Order::NN, dout, &b, ds) });
        };
        let (ds, a) = match self.room_for_gradient(context, slots, b.cols) {
            Some((place, room, a)) => {
                let first = if place.group.is_some() { place.first } else { 0 };
                multiply(&room.col_range(first..first + b.cols));
                // The first layer, which comes last, goes on with those of all.
                let Some(a) = a else { return AdapterInputGradient::default() };
                (room, a)
            }
            None => {
                let ds = context.queue.tensor(dout.rows, b.cols, context.dtype());
                multiply(&ds);
                (ds, self.factor_a(context.parameters.value(adapter.a)))
            }
        };
        slots.set(adapter.s, ds);
        let term = Term::new(Order::NN, slots.get(adapter.s), &a);
        match adapter.drops(context) {
            None => AdapterInputGradient { also: Some(term), dropped: None },
            Some((dropout, noise)) => {
                let dx = context.queue.tensor(term.a.rows, term.b.cols, context.dtype());
                context.queue.launch(Product::new(term.order, term.a, term.b, &dx));
                dropout.launch_at(context.queue, noise, adapter.placement(), &dx, &dx);
                AdapterInputGradient { also: None, dropped: Some(dx) }
            }
        }
    }

    /// Room for dS, of a group's layers all, and the A below the layer's weight, if there is both.
    fn room_for_gradient(
        &self,
        context: &Context,
        slots: &Slots,
        rank: usize,
    ) -> Option<(Place, Tensor, Option<Tensor>)> {
        let LinearAdapter { place, beside, .. } = self.adapter?;
        let (place, beside) = (place?, slots.find(beside?)?);
        let joined = context.parameters.joined_factors(self.weight)?;
        let room = beside.room(0..place.group.map_or(rank, |group| group.rank))?;
        Some((place, room, joined.a.clone()))
    }

    /// Adds the gradients of A and B.
    pub(super) fn add_factor_gradients(&self, context: &Context, gradients: &Gradients, values: &Slots, slots: &Slots) {
        let Some(adapter) = self.adapter else { return };
        self.add_factor_gradient(context, gradients, adapter.b, slots.get(self.product_slot()), values.get(adapter.s));
        // Without one, the first layer of the group has it.
        let Some(ds) = slots.find(adapter.s) else { return };
        let x = adapter.dropped(context, values.get(self.x));
        let own = [(adapter.a, ds.cols)];
        let is_of_group = adapter.place.and_then(|place| place.group).is_some_and(|group| group.rank == ds.cols);
        let joined = context.parameters.joined_factors(self.weight).filter(|_| is_of_group);
        let factors = joined.map_or(&own[..], |joined| &joined.group);
        let ids: Vec<ParamId> = factors.iter().map(|(a, _)| *a).collect();
        if ids.len() > 1
            && let Some((out, accumulate)) = gradients.overwrite_or_add_stacked(context.queue, &ids)
        {
            context.queue.launch(Product { accumulate, ..Product::new(Order::TN, ds, &x, &out) });
            return;
        }
        let mut first = 0;
        for &(a, rank) in factors {
            self.add_factor_gradient(context, gradients, a, &ds.col_range(first..first + rank), &x);
            first += rank;
        }
    }

    /// Adds `aᵀ·b` to a factor's gradient.
    fn add_factor_gradient(&self, context: &Context, gradients: &Gradients, factor: ParamId, a: &Tensor, b: &Tensor) {
        if !context.trains(factor) {
            return;
        }
        let is_b = self.adapter.is_some_and(|adapter| adapter.b == factor);
        // Overwriting one part would leave the others undefined, so the whole is zeroed first.
        let (whole, accumulate) = match (&self.part, is_b) {
            (Some(LinearPart::Inputs(_)), false) | (Some(LinearPart::Outputs(_)), true) => {
                (gradients.sum(context.queue, factor), true)
            }
            _ => gradients.overwrite_or_add(context.queue, factor),
        };
        let part = if is_b { self.factor_b(whole) } else { self.factor_a(whole) };
        context.queue.launch(Product { accumulate, ..Product::new(Order::TN, a, b, &part) });
    }

    pub(super) fn magnitude(&self) -> Option<LinearMagnitude> {
        self.adapter?.magnitude
    }

    /// The slot of the layer's product: its output, unless magnitudes are multiplied with it.
    pub(super) fn product_slot(&self) -> Slot {
        self.magnitude().map_or(self.out, |magnitude| magnitude.u)
    }

    /// The rest of forward behind the product: `out = activation(u·m/n + bias)`, or `out += u·m/n`.
    pub(super) fn magnify(&self, context: &Context, values: &mut Slots, magnitude: LinearMagnitude, u: Tensor) {
        let queue = context.queue;
        let [scale, squares] = self.magnitude_values(context, magnitude);
        let launch = |bias: Option<Tensor>, out: &Tensor, accumulate: bool| {
            let [x, scale, squares, out] = [&u, &scale, &squares, out].map(Tensor::view);
            queue.launch(ScaleColumns { x, scale, squares, bias: bias.as_ref().map(Tensor::view), out, accumulate });
        };
        if self.adds {
            launch(None, values.get(self.out), true);
        } else {
            let bias = self.bias.filter(|_| self.adds_bias).map(|id| context.parameters.value(id));
            let out = queue.tensor(u.rows, u.cols, u.dtype);
            launch(bias.map(|bias| self.part_of_bias(bias)), &out, false);
            match self.activation {
                None => values.set(self.out, out),
                Some((activation, before)) => {
                    let activated = queue.tensor(out.rows, out.cols, out.dtype);
                    queue.launch(Activate { activation, x: out.view(), out: activated.view() });
                    values.set(before, out);
                    values.set(self.out, activated);
                }
            }
        }
        values.set(magnitude.u, u);
    }

    /// Adds the gradient of the magnitudes, and computes that of the product. The norms are constants.
    pub(super) fn magnify_backward(
        &self,
        context: &Context,
        gradients: &Gradients,
        values: &mut Slots,
        slots: &mut Slots,
    ) {
        let Some(magnitude) = self.magnitude() else { return };
        let (u, dout) = (values.take(magnitude.u), slots.get(self.out));
        let [scale, squares] = self.magnitude_values(context, magnitude);
        if let Some(whole) = gradients.sum_of_trained(context.queue, magnitude.parameters.magnitudes) {
            let out = self.part_of_bias(whole);
            let (a, b, squares) = (dout.view(), u.view(), squares.view());
            context.queue.launch(ColumnDot { a, b, squares, out: out.view() });
        }
        // In the memory of the product, which nothing reads again.
        let (scale, squares) = (scale.view(), squares.view());
        let (x, out) = (dout.view(), u.view());
        context.queue.launch(ScaleColumns { x, scale, squares, bias: None, out, accumulate: false });
        slots.set(magnitude.u, u);
    }

    /// This layer's magnitudes and squared norms.
    fn magnitude_values(&self, context: &Context, magnitude: LinearMagnitude) -> [Tensor; 2] {
        let MagnitudeParameters { magnitudes, squares } = magnitude.parameters;
        [magnitudes, squares].map(|id| self.part_of_bias(context.parameters.value(id)))
    }

    /// The part of A, or of its gradient, that this layer uses.
    fn factor_a(&self, whole: Tensor) -> Tensor {
        match &self.part {
            Some(LinearPart::Inputs(cols)) => whole.col_range(cols.clone()),
            Some(LinearPart::Outputs(_)) | None => whole,
        }
    }

    fn factor_b(&self, whole: Tensor) -> Tensor {
        match &self.part {
            Some(LinearPart::Outputs(rows)) => whole.row_range(rows.clone()),
            Some(LinearPart::Inputs(_)) | None => whole,
        }
    }
}

impl LinearAdapter {
    /// The dropout of this batch, if numbers are dropped.
    fn drops(&self, context: &Context) -> Option<(Dropout, Noise)> {
        self.dropout.zip(context.batch.noise)
    }

    /// `x` after dropout, in a new tensor; `x` itself if nothing is dropped.
    fn dropped(&self, context: &Context, x: &Tensor) -> Tensor {
        let Some((dropout, noise)) = self.drops(context) else { return x.clone() };
        let out = context.queue.tensor(x.rows, x.cols, x.dtype);
        dropout.launch_at(context.queue, noise, self.placement(), x, &out);
        out
    }

    fn placement(&self) -> Placement {
        Placement { first_row: 0, first_col: self.first_input as u64, cols: self.inputs as u64 }
    }
}
