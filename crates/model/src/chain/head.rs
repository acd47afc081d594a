//! The end of the chain: logits, loss and its gradient, a few tokens at a time so that the logits never exist whole.
//!
//! The vocabulary may be split: [`Head::stats`] covers the columns held here, and [`Head::loss`] takes statistics that were
//! merged over all shards.

use std::ops::Range;

use evenkeel_device::kernel::{ColumnSum, LossBackward, LossMerge, LossStats, Order, Product, SoftCap};
use evenkeel_device::{DType, Queue, Tensor};

use crate::chain::batch::Batch;
use crate::chain::body::Context;
use crate::chain::linear::add_weight_gradient;
use crate::chain::pooler::{Pooled, Pooler};
use crate::parameters::{Gradients, ParamId};

/// The sublayer of the last unit.
#[derive(Clone, Debug)]
pub struct Head {
    pub(crate) weight: ParamId,
    pub(crate) bias: Option<ParamId>,
    /// Classes over all shards.
    pub(crate) classes: usize,
    /// The first class that this shard has.
    pub(crate) first_class: usize,
    /// The most classes that any shard has.
    pub(crate) widest: usize,
    pub(crate) reads: HeadRows,
    /// The factor of all logits, and the cap that is put on them behind it.
    pub(crate) scale: f32,
    pub(crate) cap: Option<f32>,
    /// Bytes that the logits in memory at a time may take, as f32.
    pub(crate) logit_bytes: usize,
}

/// What gets logits.
#[derive(Clone, Debug)]
pub(crate) enum HeadRows {
    All,
    /// The first row of each image, its class token. All images have as many rows.
    ClassTokens,
    /// What is made of each text's first row.
    FirstTokens(Pooler),
}

/// The head's input.
pub struct Classified {
    /// The rows that get logits.
    pub rows: Tensor,
    pooled: Option<Pooled>,
}

/// How losses become a number to minimise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossOptions {
    /// The share of each label's probability that is spread over all classes.
    pub smoothing: f32,
    /// Multiplies the gradient: one over the labels of the whole batch.
    pub scale: f32,
}

impl Head {
    pub(crate) fn parameters(&self) -> Vec<ParamId> {
        let of_pooler = match &self.reads {
            HeadRows::FirstTokens(pooler) => vec![pooler.weight, pooler.bias],
            HeadRows::All | HeadRows::ClassTokens => Vec::new(),
        };
        [self.weight].into_iter().chain(self.bias).chain(of_pooler).collect()
    }

    /// How many rows of a batch get logits.
    pub fn rows(&self, batch: &Batch) -> usize {
        match self.reads {
            HeadRows::All => batch.token_count(),
            HeadRows::ClassTokens | HeadRows::FirstTokens(_) => batch.segments.iter().count(),
        }
    }

    /// What gets logits of the stream behind the last layer.
    pub fn classified(&self, context: &Context, normalised: &Tensor) -> Classified {
        match &self.reads {
            HeadRows::All => Classified { rows: normalised.clone(), pooled: None },
            HeadRows::ClassTokens => Classified { rows: class_tokens(context, normalised), pooled: None },
            HeadRows::FirstTokens(pooler) => {
                let (rows, pooled) = pooler.forward(context, normalised);
                Classified { rows, pooled: Some(pooled) }
            }
        }
    }

    /// The rows to treat at a time, the same on every shard.
    pub fn chunks(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let chunk = (self.logit_bytes / DType::F32.size_bytes() / self.widest).clamp(1, rows.max(1));
        (0..rows).step_by(chunk).map(move |start| start..(start + chunk).min(rows))
    }

    /// f32 [rows, classes held here]
    pub fn logits(&self, context: &Context, x: &Tensor) -> Tensor {
        let weight = &context.parameters.value(self.weight);
        let logits = context.queue.tensor(x.rows, weight.rows, DType::F32);
        let bias = self.bias.map(|bias| context.parameters.value(bias).view());
        let product = Product::new(Order::NT, x, weight, &logits).with_bias(bias);
        context.queue.launch(Product { scale: self.scale, ..product });
        if let Some(cap) = self.cap {
            context.queue.launch(SoftCap { x: logits.view(), cap, out: logits.view() });
        }
        logits
    }

    /// Writes the statistics of each row's softmax over the classes held here.
    pub fn stats(&self, context: &Context, logits: &Tensor, rows: Range<usize>, stats: &Tensor) {
        let labels = context.batch.labels.view().col_range(rows);
        context.queue.launch(LossStats {
            logits: logits.view(),
            labels,
            first: self.first_class as u32,
            stats: stats.view(),
        });
    }

    /// Joins the statistics of all shards, f32 [shards · rows, 4], one shard after another.
    pub fn merge(&self, context: &Context, parts: &Tensor, stats: &Tensor) {
        let shards = parts.rows / stats.rows;
        let parts = parts.view().reshaped(shards, stats.len());
        context.queue.launch(LossMerge { parts, stats: stats.view() });
    }

    /// Writes the losses of these rows; with `dlogits`, also the gradient of the logits.
    pub fn loss(
        &self,
        context: &Context,
        logits: &Tensor,
        stats: &Tensor,
        rows: Range<usize>,
        options: LossOptions,
        losses: &Tensor,
        dlogits: Option<&Tensor>,
    ) {
        context.queue.launch(LossBackward {
            logits: logits.view(),
            labels: context.batch.labels.view().col_range(rows.clone()),
            first: self.first_class as u32,
            stats: stats.view(),
            vocabulary: self.classes,
            smoothing: options.smoothing,
            scale: options.scale,
            cap: self.cap,
            losses: losses.view().col_range(rows),
            dlogits: dlogits.map(Tensor::view),
        });
    }

    /// Room for the gradient of logits: the logits themselves if they have the compute dtype.
    pub fn dlogits(&self, context: &Context, logits: &Tensor) -> Tensor {
        match context.dtype() {
            DType::F32 => logits.clone(),
            dtype => context.queue.tensor(logits.rows, logits.cols, dtype),
        }
    }

    /// Room for the gradient of the normalised values; rows that get no logits have none. The first rows of texts fill it all.
    pub fn dnormalised(&self, queue: &Queue, normalised: &Tensor) -> Tensor {
        let [rows, cols] = normalised.shape();
        match self.reads {
            HeadRows::ClassTokens => queue.zeros(rows, cols, normalised.dtype),
            HeadRows::All | HeadRows::FirstTokens(_) => queue.tensor(rows, cols, normalised.dtype),
        }
    }

    /// Writes these rows' part of the gradient of the normalised values, beginning with the first rows, and adds those of the
    /// parameters as far as they are trained.
    pub fn backward(
        &self,
        context: &Context,
        gradients: &Gradients,
        classified: &Classified,
        rows: Range<usize>,
        dlogits: &Tensor,
        dnormalised: &Tensor,
    ) {
        let x = &classified.rows.row_range(rows.clone());
        let dx = match (&self.reads, &classified.pooled) {
            (HeadRows::FirstTokens(pooler), Some(pooled)) => {
                let dpooled = context.queue.tensor(rows.len(), x.cols, x.dtype);
                self.backward_rows(context, gradients, x, dlogits, &dpooled);
                return pooler.backward(context, gradients, pooled, rows, &dpooled, dnormalised);
            }
            (HeadRows::ClassTokens, _) => class_tokens(context, dnormalised),
            _ => dnormalised.clone(),
        };
        self.backward_rows(context, gradients, x, dlogits, &dx.row_range(rows));
    }

    /// Writes the gradient of `x` and adds those of weight and bias.
    fn backward_rows(&self, context: &Context, gradients: &Gradients, x: &Tensor, dlogits: &Tensor, dx: &Tensor) {
        let queue = context.queue;
        let weight = &context.parameters.value(self.weight);
        queue.launch(Product { scale: self.scale, ..Product::new(Order::NN, dlogits, weight, dx) });
        if context.trains(self.weight) {
            add_weight_gradient(queue, gradients, self.weight, dlogits, x, self.scale);
        }
        if let Some(dbias) = self.bias.and_then(|bias| gradients.sum_of_trained(queue, bias)) {
            queue.launch(ColumnSum { x: dlogits.view(), out: dbias.view() });
        }
    }
}

/// The first row of each image.
fn class_tokens(context: &Context, rows: &Tensor) -> Tensor {
    let images = context.batch.segments.iter().count();
    rows.every_nth_row(context.batch.token_count() / images)
}
