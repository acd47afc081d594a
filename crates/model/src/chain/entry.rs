//! How a unit begins: the reduced output of the unit before joins the residual stream, and the stream is normalised.
//!
//! Every row is treated by itself, so an entry also works on a part of the sequence. Dropout depends on a row's place in the
//! batch, so an entry is told which row comes first.

use evenkeel_device::kernel::{Add, Copy, Multiply};
use evenkeel_device::{Queue, Tensor};

use crate::chain::body::Context;
use crate::chain::dropout::{Dropout, dropped};
use crate::chain::norm::{Input, NormSpec};
use crate::parameters::{Gradients, ParamId};

/// The addition at a unit's entry: `stream = scale · drop(norm(x + drop(post(p))))`, where `p` is the reduced output of the unit
/// before. An output of two halves has a norm for each, and the sum of both is `p`.
#[derive(Clone, Debug, Default)]
pub struct Join {
    /// Norms of the halves of the previous unit's output, if it has two.
    pub(crate) halves: Option<[NormSpec; 2]>,
    /// A norm on the previous unit's output, before it joins the stream.
    pub(crate) post: Option<NormSpec>,
    /// The dropout of that output.
    pub(crate) output_dropout: Option<Dropout>,
    /// A norm of the sum, which is the stream then.
    pub(crate) norm: Option<NormSpec>,
    /// The dropout of the stream at its beginning.
    pub(crate) stream_dropout: Option<Dropout>,
    /// A number that the sum is multiplied with. It is not trained.
    pub(crate) scale: Option<ParamId>,
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
    /// The sum and its statistics, if it was normalised.
    sum: Option<(Tensor, Tensor)>,
    /// The output of two halves, and the statistics of each.
    halves: Option<(Tensor, [Tensor; 2])>,
}

/// The stream, and the sum that is still to be written to it, by a norm on the way or by itself.
struct Prepared {
    stream: Tensor,
    sum: Option<Input>,
    state: JoinState,
    /// Read by the sum.
    added: Tensor,
}

impl EntryState {
    /// Drops the normalised values, which can be computed again from the stream.
    pub fn forget(&mut self) {
        self.normalised.clear();
    }
}

impl Join {
    pub(crate) fn parameters(&self) -> Vec<ParamId> {
        let norms = self.halves.iter().flatten().chain(&self.post).chain(&self.norm);
        norms.flat_map(NormSpec::parameters).chain(self.scale).collect()
    }

    /// `x` is the stream so far, absent at its beginning; `p` the reduced output of the unit before. Both begin with row
    /// `first_row` of the batch.
    pub fn forward(&self, context: &Context, first_row: usize, x: Option<&Tensor>, p: &Tensor) -> (Tensor, JoinState) {
        let Prepared { stream, sum, state, added: _added } = self.prepare(context, first_row, x, p);
        add(context.queue, sum);
        (stream, state)
    }

    fn prepare(&self, context: &Context, first_row: usize, x: Option<&Tensor>, p: &Tensor) -> Prepared {
        let (queue, parameters) = (context.queue, context.parameters);
        let width = if self.halves.is_some() { p.cols / 2 } else { p.cols };
        let like_p = || queue.tensor(p.rows, width, p.dtype);
        let halves = self.halves.map(|norms| {
            let normalised = [like_p(), like_p()];
            let stats = [0, 1].map(|half| {
                let x = Input::Value(half_of(p, half).view());
                norms[half].forward(queue, parameters, x, normalised[half].view())
            });
            (normalised, stats)
        });
        let (p, input, halves) = match &halves {
            Some(([sum, other], stats)) => {
                let input = Input::Sum { x: sum.view(), add: other.view(), into: sum.view() };
                (sum, input, Some((p.clone(), stats.clone())))
            }
            None => (p, Input::Value(p.view()), None),
        };
        let (added, post) = match &self.post {
            None => {
                add(queue, Some(input));
                (p.clone(), None)
            }
            Some(norm) => {
                let added = like_p();
                let stats = norm.forward(queue, parameters, input, added.view());
                (added, Some((p.clone(), stats)))
            }
        };
        let added = dropped(self.output_dropout, context, first_row, added);
        let mut stream = if x.is_some() { like_p() } else { added.clone() };
        let mut sum = x.map(|x| Input::Sum { x: x.view(), add: added.view(), into: stream.view() });
        let normalised = self.norm.map(|norm| {
            let (before, out) = (stream.clone(), like_p());
            let input = sum.take().unwrap_or(Input::Value(before.view()));
            let stats = norm.forward(queue, parameters, input, out.view());
            stream = out;
            (before, stats)
        });
        if self.stream_dropout.is_some() && context.batch.noise.is_some() {
            add(queue, sum.take());
            stream = dropped(self.stream_dropout, context, first_row, stream);
        }
        if self.scale.is_some() {
            add(queue, sum.take());
            // At its beginning the stream may be the unit's output itself.
            let scaled = if x.is_some() { stream.clone() } else { like_p() };
            self.multiply(context, &stream, &scaled);
            stream = scaled;
        }
        Prepared { stream, sum, state: JoinState { post, sum: normalised, halves }, added }
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
        let dsum = if self.scale.is_some() {
            let dsum = queue.tensor(dstream.rows, dstream.cols, dstream.dtype);
            self.multiply(context, &dstream, &dsum);
            dsum
        } else {
            dstream
        };
        let mut dx = dropped(self.stream_dropout, context, first_row, dsum);
        if let (Some(norm), Some((sum, stats))) = (&self.norm, &state.sum) {
            let dsum = queue.tensor(sum.rows, sum.cols, sum.dtype);
            norm.backward(queue, parameters, gradients, sum.view(), stats, dx.view(), None, dsum.view());
            dx = dsum;
        }
        let dadded = dropped(self.output_dropout, context, first_row, dx.clone());
        let dp = match (&self.post, &state.post) {
            (Some(norm), Some((p, stats))) => {
                let dp = queue.tensor(p.rows, p.cols, p.dtype);
                norm.backward(queue, parameters, gradients, p.view(), stats, dadded.view(), None, dp.view());
                dp
            }
            _ => dadded,
        };
        let (Some(norms), Some((p, stats))) = (&self.halves, &state.halves) else { return (dx, dp) };
        let dhalves = queue.tensor(p.rows, p.cols, p.dtype);
        for ((half, norm), stats) in norms.iter().enumerate().zip(stats) {
            let [x, dx] = [half_of(p, half), half_of(&dhalves, half)].map(|tensor| tensor.view());
            norm.backward(queue, parameters, gradients, x, stats, dp.view(), None, dx);
        }
        (dx, dhalves)
    }

    fn multiply(&self, context: &Context, x: &Tensor, out: &Tensor) {
        let by = self.scale.map(|scale| context.parameters.value(scale).view());
        context.queue.launch(Multiply { x: x.view(), factor: 1.0, by, out: out.view() });
    }
}

impl Entry {
    pub(crate) fn parameters(&self) -> Vec<ParamId> {
        let join = self.join.iter().flat_map(Join::parameters);
        join.chain(self.norms.iter().flatten().flat_map(NormSpec::parameters)).collect()
    }

    /// Adds `p` to the stream `x` as [`Join::forward`] does, and normalises the sum.
    pub fn forward(&self, context: &Context, first_row: usize, x: Option<&Tensor>, p: &Tensor) -> EntryState {
        // What was added is held until the sum is issued.
        let Prepared { stream, mut sum, state: join, added: _added } = self.joined().prepare(context, first_row, x, p);
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

fn half_of(tensor: &Tensor, half: usize) -> Tensor {
    let width = tensor.cols / 2;
    tensor.col_range(half * width..(half + 1) * width)
}

/// Writes the sum, if no norm has done so.
fn add(queue: &Queue, sum: Option<Input>) {
    if let Some(Input::Sum { x, add, into }) = sum {
        queue.launch(Add { a: x, b: add, out: into });
    }
}
