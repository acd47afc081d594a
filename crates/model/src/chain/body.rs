//! A unit's sublayer: a list of operations over numbered slots, run forward and backward.
//!
//! A slot holds a tensor; an operation reads some slots and writes others. Backward runs the operations in reverse over gradients
//! in the same slots. It has two halves: other units wait for [`Body::backward_input`], none waits for [`Body::backward_weight`].

use evenkeel_device::{DType, Queue, Tensor};

use crate::chain::batch::Batch;
use crate::chain::linear::Linear;
use crate::chain::op::Op;
use crate::chain::rotary::RotaryTables;
use crate::lossy::prune::{PrunedLayer, Pruning};
use crate::parameters::joined::put_factors;
use crate::parameters::{Gradients, ParamId, Parameters};

/// The inputs that operations need besides their slots.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    pub queue: &'a Queue,
    pub parameters: &'a Parameters,
    pub tables: &'a RotaryTables,
    pub batch: &'a Batch,
    /// Which columns linear layers keep; all without it. For training only: evaluation ignores it.
    pub pruning: Option<&'a Pruning>,
}

impl<'a> Context<'a> {
    /// The same, with every column of every linear layer.
    pub(crate) fn unpruned(&self) -> Context<'a> {
        Context { pruning: None, ..*self }
    }

    pub(crate) fn pruned_layer(&self, weight: ParamId) -> Option<PrunedLayer<'a>> {
        self.pruning?.pruned_layer(weight)
    }

    /// Whether a parameter is trained, so that its gradient is wanted.
    pub(crate) fn trains(&self, id: ParamId) -> bool {
        self.parameters.specs[id.0].is_trained
    }

    /// The values of a linear layer's weight. One in 4 bits is expanded into memory that is free again once the caller drops it.
    pub(crate) fn weight(&self, id: ParamId) -> Tensor {
        self.parameters.weight(self.queue, id)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.parameters.dtype()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub usize);

/// The sublayer of a unit.
#[derive(Clone, Debug)]
pub struct Body {
    pub(crate) ops: Vec<Op>,
    /// By slot: the room beside its values, for what adapters make of them or of their gradients.
    pub(crate) rooms: Vec<usize>,
    /// Outputs of linear layers that are cheap for their size: forward does not keep them, backward computes them again.
    pub(crate) again: Vec<Slot>,
    /// The slots of the entry's normalised values.
    pub(crate) inputs: Vec<Slot>,
    /// Values that go to the residual stream directly: the position embeddings at the chain's beginning.
    pub(crate) stream: Option<Slot>,
    /// This shard's summand of the unit's output.
    pub(crate) output: Slot,
}

/// Tensors by slot.
pub(crate) struct Slots {
    whole: Vec<Option<Tensor>>,
    /// The columns that pruned layers keep of their inputs.
    narrow: Vec<Option<Tensor>>,
    rooms: Vec<usize>,
}

impl Slots {
    pub fn new(rooms: &[usize]) -> Slots {
        Slots { whole: vec![None; rooms.len()], narrow: vec![None; rooms.len()], rooms: rooms.to_vec() }
    }

    /// A tensor for a slot, with the room that belongs beside it.
    pub fn tensor_for(&self, slot: Slot, queue: &Queue, rows: usize, cols: usize, dtype: DType) -> Tensor {
        queue.tensor_with_room(rows, cols, self.rooms[slot.0], dtype)
    }

    /// The tensor in a slot that must hold one.
    pub fn get(&self, slot: Slot) -> &Tensor {
        self.whole[slot.0].as_ref().expect("operations are listed in order of their dependencies")
    }

    pub fn find(&self, slot: Slot) -> Option<&Tensor> {
        self.whole[slot.0].as_ref()
    }

    pub fn set(&mut self, slot: Slot, tensor: Tensor) {
        self.whole[slot.0] = Some(tensor);
    }

    pub fn find_narrow(&self, slot: Slot) -> Option<&Tensor> {
        self.narrow[slot.0].as_ref()
    }

    pub fn set_narrow(&mut self, slot: Slot, tensor: Tensor) {
        self.narrow[slot.0] = Some(tensor);
    }

    pub fn take_narrow(&mut self, slot: Slot) -> Tensor {
        self.narrow[slot.0].take().expect("a pruned layer has left it")
    }

    pub fn take(&mut self, slot: Slot) -> Tensor {
        self.whole[slot.0].take().expect("operations are listed in order of their dependencies")
    }

    /// Drops all other whole tensors; narrow ones stay.
    fn keep(&mut self, kept: impl Fn(Slot) -> bool) {
        for (index, tensor) in self.whole.iter_mut().enumerate() {
            if !kept(Slot(index)) {
                *tensor = None;
            }
        }
    }
}

/// Values that forward keeps for backward.
pub struct BodyState {
    pub(crate) values: Slots,
}

/// Values and gradients that the input half of backward keeps for the weight half.
pub struct BodyBackward {
    pub(crate) values: Slots,
    pub(crate) gradients: Slots,
}

impl Body {
    pub(crate) fn parameters(&self) -> Vec<ParamId> {
        self.ops.iter().flat_map(Op::parameters).collect()
    }

    /// Its linear layers, in order; one that works in strips is there several times.
    pub(crate) fn linears(&self) -> Vec<&Linear> {
        self.ops.iter().flat_map(Op::linears).collect()
    }

    /// Returns the contribution to the stream, the partial output, and the values for backward.
    pub fn forward(&self, context: &Context, inputs: &[Tensor]) -> (Option<Tensor>, Tensor, BodyState) {
        let mut values = self.begin(context, inputs);
        for op in &self.ops {
            op.forward(context, &mut values);
        }
        let stream = self.stream.map(|slot| values.get(slot).clone());
        let output = values.get(self.output).clone();
        (stream, output, self.saved(context, values, &self.again(context)))
    }

    /// The values for backward alone; what only the output needs is not computed.
    pub fn recompute(&self, context: &Context, inputs: &[Tensor]) -> BodyState {
        let mut values = self.begin(context, inputs);
        let skipped = self.slots_of_output();
        for op in &self.ops {
            op.recompute(context, &mut values, &skipped);
        }
        // Backward follows at once.
        self.saved(context, values, &[])
    }

    fn begin(&self, context: &Context, inputs: &[Tensor]) -> Slots {
        put_factors(context.queue, context.parameters, self.linears().into_iter().map(|linear| linear.weight));
        let mut values = Slots::new(&self.rooms);
        for (&slot, input) in self.inputs.iter().zip(inputs) {
            values.set(slot, input.clone());
        }
        values
    }

    fn saved(&self, context: &Context, mut values: Slots, again: &[&Linear]) -> BodyState {
        let is_saved = |slot: Slot| self.ops.iter().any(|op| op.saved(context).contains(&slot));
        let is_made = |slot: Slot| again.iter().any(|linear| linear.out == slot);
        let is_needed = |slot: Slot| again.iter().any(|linear| linear.x == slot);
        values.keep(|slot| is_needed(slot) || (is_saved(slot) && !is_made(slot)));
        BodyState { values }
    }

    /// The linear layers that backward computes again. Pruned ones leave more than their output.
    fn again(&self, context: &Context) -> Vec<&Linear> {
        let linears = self.linears().into_iter().filter(|linear| self.again.contains(&linear.out));
        linears.filter(|linear| context.pruned_layer(linear.weight).is_none()).collect()
    }

    /// Computes what an operation's backward reads and forward did not keep.
    fn make_again(&self, context: &Context, op: &Op, values: &mut Slots) {
        if self.again.is_empty() {
            return;
        }
        let saved = op.saved(context);
        for linear in self.again(context).into_iter().filter(|linear| saved.contains(&linear.out)) {
            if values.find(linear.out).is_none() {
                linear.forward(context, values);
            }
        }
    }

    /// The slots of the body's results and of their summands. Strips add to the output's rows in place, so there it must be whole.
    fn slots_of_output(&self) -> Vec<Slot> {
        if self.ops.iter().any(|op| matches!(op, Op::OnRows(_))) {
            return Vec::new();
        }
        let summands = self.ops.iter().filter_map(|op| match op {
            Op::Add { a, b, out } | Op::SideBySide { parts: [a, b], out } if *out == self.output => Some([*a, *b]),
            _ => None,
        });
        summands.flatten().chain([self.output]).chain(self.stream).collect()
    }

    /// Returns the gradients of the inputs, partial like the output.
    pub fn backward_input(
        &self,
        context: &Context,
        gradients: &Gradients,
        state: BodyState,
        dstream: Option<&Tensor>,
        doutput: &Tensor,
    ) -> (Vec<Tensor>, BodyBackward) {
        let mut values = state.values;
        let mut slots = Slots::new(&self.rooms);
        slots.set(self.output, doutput.clone());
        if let (Some(slot), Some(dstream)) = (self.stream, dstream) {
            slots.set(slot, dstream.clone());
        }
        for op in self.ops.iter().rev() {
            self.make_again(context, op, &mut values);
            op.backward_input(context, gradients, &mut values, &mut slots);
        }
        let dinputs = self.inputs.iter().map(|&slot| slots.take(slot)).collect();
        values.keep(|slot| self.ops.iter().any(|op| op.weight_inputs(context).contains(&slot)));
        slots.keep(|slot| self.ops.iter().any(|op| op.weight_gradients(context).contains(&slot)));
        (dinputs, BodyBackward { values, gradients: slots })
    }

    /// Adds the gradients of this body's matrices and biases.
    pub fn backward_weight(&self, context: &Context, gradients: &Gradients, backward: BodyBackward) {
        for op in self.ops.iter().rev() {
            op.backward_weight(context, gradients, &backward.values, &backward.gradients);
        }
    }
}
