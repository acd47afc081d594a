//! How a unit begins: the reduced output of the unit before joins the residual stream, and the stream is normalised.
//!
//! Every row is treated by itself, so an entry works as well on a part of the sequence.

use evenkeel_device::kernel::Add;
use evenkeel_device::{Queue, Tensor};

use crate::norm::{Input, NormSpec};
use crate::parameters::{Gradients, ParamId, Parameters};

/// `stream = x + post(p)`, then one norm of the stream for each input of the unit's body.
#[derive(Clone, Debug, Default)]
pub struct Entry {
    /// A norm on the previous unit's output, before it joins the stream.
    pub(crate) post: Option<NormSpec>,
    pub(crate) norms: Vec<NormSpec>,
}

/// What an entry computed.
pub struct EntryState {
    /// The residual stream after the addition. [T, H]
    pub stream: Tensor,
    /// The stream normalised, one per input of the body. [T, H]
    pub normalised: Vec<Tensor>,
    stats: Vec<Tensor>,
    /// The previous unit's output and its statistics, where it was normalised.
    post: Option<(Tensor, Tensor)>,
}

impl EntryState {
    /// Drops the normalised values, which can be computed again from the stream.
    pub fn forget(&mut self) {
        self.normalised.clear();
    }
}

impl Entry {
    pub(crate) fn parameters(&self) -> Vec<ParamId> {
        self.post.iter().chain(&self.norms).flat_map(NormSpec::parameters).collect()
    }

    /// How often the stream is normalised.
    pub fn norm_count(&self) -> usize {
        self.norms.len()
    }

    /// `x` is the stream so far, absent at its beginning; `p` the reduced output of the unit before.
    pub fn forward(&self, queue: &Queue, parameters: &Parameters, x: Option<&Tensor>, p: &Tensor) -> EntryState {
        let like_p = || queue.tensor(p.rows, p.cols, p.dtype);
        let (added, post) = match &self.post {
            None => (p.clone(), None),
            Some(norm) => {
                let added = like_p();
                let stats = norm.forward(queue, parameters, Input::Value(p.view()), added.view());
                (added, Some((p.clone(), stats)))
            }
        };
        let stream = if x.is_some() { like_p() } else { added.clone() };
        // The first norm does the addition; without a norm it is a kernel of its own.
        let mut sum = x.map(|x| Input::Sum { x: x.view(), add: added.view(), into: stream.view() });
        let (normalised, stats) = self.normalise(queue, parameters, &stream, &mut sum);
        if let Some(Input::Sum { x, add, into }) = sum {
            queue.launch(Add { a: x, b: add, out: into });
        }
        EntryState { stream, normalised, stats, post }
    }

    /// Restores what [`EntryState::forget`] dropped, with the same bits.
    pub fn recompute(&self, queue: &Queue, parameters: &Parameters, state: &mut EntryState) {
        (state.normalised, state.stats) = self.normalise(queue, parameters, &state.stream, &mut None);
    }

    fn normalise(
        &self,
        queue: &Queue,
        parameters: &Parameters,
        stream: &Tensor,
        sum: &mut Option<Input>,
    ) -> (Vec<Tensor>, Vec<Tensor>) {
        let one = |norm: &NormSpec| {
            let out = queue.tensor(stream.rows, stream.cols, stream.dtype);
            let input = sum.take().unwrap_or(Input::Value(stream.view()));
            let stats = norm.forward(queue, parameters, input, out.view());
            (out, stats)
        };
        self.norms.iter().map(one).unzip()
    }

    /// Takes the gradient that reaches the stream from behind and those of the normalised values; returns the gradient
    /// of the stream before the addition and that of the previous unit's output.
    pub fn backward(
        &self,
        queue: &Queue,
        parameters: &Parameters,
        gradients: &Gradients,
        state: &EntryState,
        dstream: Option<&Tensor>,
        dnormalised: &[Tensor],
    ) -> (Tensor, Tensor) {
        assert_eq!(dnormalised.len(), self.norms.len(), "one gradient per norm");
        let like_stream = || queue.tensor(state.stream.rows, state.stream.cols, state.stream.dtype);
        let mut dx = dstream.cloned();
        for ((norm, stats), dout) in self.norms.iter().zip(&state.stats).zip(dnormalised) {
            let (x, sum) = (state.stream.view(), like_stream());
            let residual = dx.as_ref().map(Tensor::view);
            norm.backward(queue, parameters, gradients, x, stats, dout.view(), residual, sum.view());
            dx = Some(sum);
        }
        let dx = dx.expect("an entry has a norm or a stream behind it");
        let dp = match (&self.post, &state.post) {
            (Some(norm), Some((p, stats))) => {
                let dp = like_stream();
                norm.backward(queue, parameters, gradients, p.view(), stats, dx.view(), None, dp.view());
                dp
            }
            _ => dx.clone(),
        };
        (dx, dp)
    }
}
