//! How a unit begins: the reduced output of the unit before joins the residual stream, and the stream is normalised.
//!
//! Every row is treated by itself, so an entry also works on a part of the sequence. Dropout depends on a row's place in the
//! batch, so an entry is told which row comes first.

use evenkeel_device::kernel::{Add, Copy};
use evenkeel_device::{Queue, Tensor};

use crate::chain::body::Context;
use crate::chain::dropout::{Dropout, dropped};
use crate::chain::norm::{Input, NormSpec};
use crate::parameters::{Gradients, ParamId};

/// The addition at a unit's entry: `stream = drop(x + drop(post(p)))`, where `p` is the reduced output of the unit before.
#[derive(Clone, Debug, Default)]
pub struct Join {
    /// A norm on the previous unit's output, before it joins the stream.
    pub(crate) post: Option<NormSpec>,
    /// The dropout of that output.
    pub(crate) output_dropout: Option<Dropout>,
    /// The dropout of the sum, at the stream's beginning.
    pub(crate) stream_dropout: Option<Dropout>,
}

/// An addition, then the inputs of the unit's body: the stream normalised, or as it is.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// Absent at the beginning of a stage, where the stream arrives with everything added.
    pub(crate) join: Option<Join>,
    /// By input.
    pub(crate) norms: Vec<Option<NormSpec>>,
    /// By input: the room beside its values, for what adapters make of them.
    pub(crate) rooms: Vec<usize>,
    /// The room beside the gradient of the previous unit's output.
    pub(crate) output_room: usize,
}

/// The results of an entry.
pub struct EntryState {
    /// The residual stream after the addition. [T, H]
    pub stream: Tensor,
    /// The inputs of the body. [T, H]
    pub normalised: Vec<Tensor>,
    stats: Vec<Option<Tensor>>,
    join: JoinState,
}

/// Values that an addition keeps for backward.
#[derive(Default)]
pub struct JoinState {
    /// The previous unit's output and its statistics, if it was normalised.
    post: Option<(Tensor, Tensor)>,
}

impl EntryState {
    /// Drops the normalised values, which can be computed again from the stream.
    pub fn forget(&mut self) {
        self.normalised.clear();
    }
}

impl Join {
    pub(crate) fn parameters(&self) -> Vec<ParamId> {
        self.post.iter().flat_map(NormSpec::parameters).collect()
    }

    /// `x` is the stream so far, absent at its beginning; `p` the reduced output of the unit before. Both begin with row
    /// `first_row` of the batch.
    pub fn forward(&self, context: &Context, first_row: usize, x: Option<&Tensor>, p: &Tensor) -> (Tensor, JoinState) {
        let (stream, sum, state) = self.prepare(context, first_row, x, p);
        add(context.queue, sum);
        (stream, state)
    }

    /// The stream, and the sum that is still to be written to it: a norm may do that on the way.
    fn prepare(
        &self,
        context: &Context,
        first_row: usize,
        x: Option<&Tensor>,
        p: &Tensor,
    ) -> (Tensor, Option<Input>, JoinState) {
        let (queue, parameters) = (context.queue, context.parameters);
        let like_p = || queue.tensor(p.rows, p.cols, p.dtype);
        let (added, post) = match &self.post {
            None => (p.clone(), None),
            Some(norm) => {
                let added = like_p();
                let stats = norm.forward(queue, parameters, Input::Value(p.view()), added.view());
                (added, Some((p.clone(), stats)))
            }
        };
        let added = dropped(self.output_dropout, context, first_row, added);
        let mut stream = if x.is_some() { like_p() } else { added.clone() };
        let mut sum = x.map(|x| Input::Sum { x: x.view(), add: added.view(), into: stream.view() });
        if self.stream_dropout.is_some() && context.batch.noise.is_some() {
            add(queue, sum.take());
            stream = dropped(self.stream_dropout, context, first_row, stream);
        }
        (stream, sum, JoinState { post })
    }

    /// Takes the gradient of the stream behind the addition; returns that of the stream before it and that of the previous unit's
    /// output. All begin with row `first_row` of the batch. The input is left unchanged.
    pub fn backward(
        &self,
        context: &Context,
        first_row: usize,
        gradients: &Gradients,
        state: &JoinState,
        dstream: Tensor,
    ) -> (Tensor, Tensor) {
        let (queue, parameters) = (context.queue, context.parameters);
        let dx = dropped(self.stream_dropout, context, first_row, dstream);
        let dadded = dropped(self.output_dropout, context, first_row, dx.clone());
        let dp = match (&self.post, &state.post) {
            (Some(norm), Some((p, stats))) => {
                let dp = queue.tensor(p.rows, p.cols, p.dtype);
                norm.backward(queue, parameters, gradients, p.view(), stats, dadded.view(), None, dp.view());
                dp
            }
            _ => dadded,
        };
        (dx, dp)
    }
}

impl Entry {
    pub(crate) fn parameters(&self) -> Vec<ParamId> {
        let join = self.join.iter().flat_map(Join::parameters);
        join.chain(self.norms.iter().flatten().flat_map(NormSpec::parameters)).collect()
    }

    /// Adds `p` to the stream `x` as [`Join::forward`] does, and normalises the sum.
    pub fn forward(&self, context: &Context, first_row: usize, x: Option<&Tensor>, p: &Tensor) -> EntryState {
        let (stream, mut sum, join) = self.joined().prepare(context, first_row, x, p);
        // The first norm does the addition; without a norm it is a kernel of its own.
        let (normalised, stats) = self.normalise(context, &stream, &mut sum);
        add(context.queue, sum);
        EntryState { stream, normalised, stats, join }
    }

    /// Normalises a stream that arrives with everything added.
    pub fn resume(&self, context: &Context, stream: &Tensor) -> EntryState {
        let (normalised, stats) = self.normalise(context, stream, &mut None);
        EntryState { stream: stream.clone(), normalised, stats, join: JoinState::default() }
    }

    /// Whether the stream arrives from another stage.
    pub fn begins_stage(&self) -> bool {
        self.join.is_none()
    }

    fn joined(&self) -> &Join {
        self.join.as_ref().expect("an entry inside a stage begins with an addition")
    }

    /// Restores the values that [`EntryState::forget`] dropped, with the same bits.
    pub fn recompute(&self, context: &Context, state: &mut EntryState) {
        (state.normalised, state.stats) = self.normalise(context, &state.stream, &mut None);
    }

    fn normalise(
        &self,
        context: &Context,
        stream: &Tensor,
        sum: &mut Option<Input>,
    ) -> (Vec<Tensor>, Vec<Option<Tensor>>) {
        let (queue, parameters) = (context.queue, context.parameters);
        let one = |(norm, &room): (&Option<NormSpec>, &usize)| {
            let with_room = || queue.tensor_with_room(stream.rows, stream.cols, room, stream.dtype);
            match norm {
                Some(norm) => {
                    let out = with_room();
                    let input = sum.take().unwrap_or(Input::Value(stream.view()));
                    let stats = norm.forward(queue, parameters, input, out.view());
                    (out, Some(stats))
                }
                None => {
                    add(queue, sum.take());
                    if room == 0 {
                        return (stream.clone(), None);
                    }
                    let copy = with_room();
                    queue.launch(Copy { x: stream.view(), out: copy.view() });
                    (copy, None)
                }
            }
        };
        assert_eq!(self.norms.len(), self.rooms.len(), "one room per input");
        self.norms.iter().zip(&self.rooms).map(one).unzip()
    }

    /// Takes the gradient that reaches the stream from behind and those of the normalised values; returns the gradient of the
    /// stream before the addition and that of the previous unit's output. All begin with row `first_row` of the batch. The inputs
    /// are left unchanged.
    pub fn backward(
        &self,
        context: &Context,
        first_row: usize,
        gradients: &Gradients,
        state: &EntryState,
        dstream: Option<&Tensor>,
        dnormalised: &[Tensor],
    ) -> (Tensor, Tensor) {
        let dstream = self.backward_norms(context, gradients, state, dstream, dnormalised);
        self.joined().backward(context, first_row, gradients, &state.join, dstream)
    }

    /// The gradient of the stream behind the addition.
    pub fn backward_norms(
        &self,
        context: &Context,
        gradients: &Gradients,
        state: &EntryState,
        dstream: Option<&Tensor>,
        dnormalised: &[Tensor],
    ) -> Tensor {
        let (queue, parameters) = (context.queue, context.parameters);
        assert_eq!(dnormalised.len(), self.norms.len(), "one gradient per input");
        let like_stream =
            || queue.tensor_with_room(state.stream.rows, state.stream.cols, self.output_room, state.stream.dtype);
        let mut dx = dstream.cloned();
        for ((norm, stats), dout) in self.norms.iter().zip(&state.stats).zip(dnormalised) {
            let (residual, sum) = (dx.as_ref().map(Tensor::view), like_stream());
            match (norm, stats, residual) {
                (Some(norm), Some(stats), _) => {
                    let x = state.stream.view();
                    norm.backward(queue, parameters, gradients, x, stats, dout.view(), residual, sum.view());
                }
                (_, _, Some(residual)) => queue.launch(Add { a: residual, b: dout.view(), out: sum.view() }),
                (_, _, None) => queue.launch(Copy { x: dout.view(), out: sum.view() }),
            }
            dx = Some(sum);
        }
        dx.expect("an entry has an input or a stream behind it")
    }
}

/// Writes the sum, if no norm has done so.
fn add(queue: &Queue, sum: Option<Input>) {
    if let Some(Input::Sum { x, add, into }) = sum {
        queue.launch(Add { a: x, b: add, out: into });
    }
}
