//! What a classifier of texts makes of each text's first token: `drop(tanh(drop(x) · weightᵀ + bias))`.

use std::ops::Range;

use evenkeel_device::kernel::{ActivateBackward, Activation, ColumnSum, Embed, Order, Product};
use evenkeel_device::{Queue, Tensor};

use crate::chain::body::Context;
use crate::chain::dropout::Dropout;
use crate::chain::linear::add_weight_gradient;
use crate::parameters::{Gradients, ParamId};

#[derive(Clone, Debug)]
pub(crate) struct Pooler {
    pub weight: ParamId,
    pub bias: ParamId,
    /// The dropout of first tokens, and of the result.
    pub first_dropout: Option<Dropout>,
    pub dropout: Option<Dropout>,
}

/// Values that the pooler keeps for backward, a row for each text.
pub(crate) struct Pooled {
    /// Its input.
    first: Tensor,
    /// The value before the hyperbolic tangent.
    before: Tensor,
}

impl Pooler {
    /// [texts, H]
    pub fn forward(&self, context: &Context, stream: &Tensor) -> (Tensor, Pooled) {
        let (queue, firsts) = (context.queue, &context.batch.text_rows().firsts);
        let like_first = || queue.tensor(firsts.cols, stream.cols, stream.dtype);
        let (first, before, out) = (like_first(), like_first(), like_first());
        pick(queue, stream, firsts, 0, &first, false);
        drop_rows(self.first_dropout, context, 0..firsts.cols, &first);
        let (weight, bias) = (context.parameters.value(self.weight), context.parameters.value(self.bias));
        queue.launch(Product {
            bias: Some(bias.view()),
            activation: Some(Activation::Tanh),
            preactivation: Some(before.view()),
            ..Product::new(Order::NT, &first, &weight, &out)
        });
        drop_rows(self.dropout, context, 0..firsts.cols, &out);
        (out, Pooled { first, before })
    }

    /// Takes the gradient of the results of these texts, which it overwrites, and puts that of their first tokens in the stream's.
    /// The first texts write all of the stream's gradient, the others add to it.
    pub fn backward(
        &self,
        context: &Context,
        gradients: &Gradients,
        pooled: &Pooled,
        texts: Range<usize>,
        dout: &Tensor,
        dstream: &Tensor,
    ) {
        let queue = context.queue;
        let [first, before] = [&pooled.first, &pooled.before].map(|values| values.row_range(texts.clone()));
        drop_rows(self.dropout, context, texts.clone(), dout);
        let (x, dx) = (before.view(), dout.view());
        queue.launch(ActivateBackward { activation: Activation::Tanh, x, dout: dx, dx });
        if context.trains(self.weight) {
            add_weight_gradient(queue, gradients, self.weight, dout, &first, 1.0);
        }
        if let Some(dbias) = gradients.sum_of_trained(queue, self.bias) {
            queue.launch(ColumnSum { x: dout.view(), out: dbias.view() });
        }
        let dfirst = queue.tensor(first.rows, first.cols, first.dtype);
        queue.launch(Product::new(Order::NN, dout, &context.parameters.value(self.weight), &dfirst));
        drop_rows(self.first_dropout, context, texts.clone(), &dfirst);
        pick(queue, &dfirst, &context.batch.text_rows().texts, texts.start, dstream, texts.start > 0);
    }
}

/// Rows of `x`, whose first has this index; an index without a row gives zeros, or adds nothing.
fn pick(queue: &Queue, x: &Tensor, indices: &Tensor, first: usize, out: &Tensor, accumulate: bool) {
    let (table, indices, first, out) = (x.view(), indices.view(), first as u32, out.view());
    queue.launch(Embed { table, indices, first, scale: 1.0, out, accumulate });
}

/// Drops numbers of some texts' rows in place, each row by the place of its text's first token.
fn drop_rows(dropout: Option<Dropout>, context: &Context, texts: Range<usize>, x: &Tensor) {
    if let (Some(dropout), Some(noise)) = (dropout, context.batch.noise) {
        let rows = context.batch.text_rows().firsts.col_range(texts);
        dropout.launch_at_rows(context.queue, noise, &rows, x, x);
    }
}
