//! Dropout: the numbers that training drops at random.
//!
//! Whether a number is dropped depends on the step's seed, on the site in the model, and on the number's place among all
//! tokens of the step. So cuts over shards, divisions of a batch in parts and recomputation all drop the same numbers.

use evenkeel_device::kernel::{self, AttentionDropout, Placement, seed_of};
use evenkeel_device::{Queue, Tensor};

use crate::chain::batch::Batch;
use crate::chain::body::Context;

/// The shares of numbers that a model's training drops.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropouts {
    /// The share of attention's weights.
    pub attention: f32,
    /// The share of each sublayer's addition to the stream.
    pub residual: f32,
    /// The share of the stream at its beginning.
    pub embedding: f32,
    /// The share of what a classifier of texts computes with, behind the stream.
    pub classifier: f32,
}

/// The source of a batch's random numbers. A batch without it drops nothing.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    /// The step's seed.
    pub seed: u64,
    /// The place of the batch's first token among all tokens of the step.
    pub first_token: u64,
}

/// A place in a model where numbers are dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Site {
    /// At the entry of the unit of this number.
    Entry(usize),
    /// In the layer of this number: attention's weights, and the outputs of attention and of MLP.
    AttentionWeights(usize),
    AttentionOutput(usize),
    MlpOutput(usize),
    /// The first tokens of texts, and what is pooled from them.
    FirstTokens,
    Pooled,
    /// The input of the adapter of this number.
    Adapter(usize),
}

/// The sites of a classifier of texts, and the first of the adapters'; no model has so many others.
const FIRST_TOKENS: u64 = 1 << 31;
const FIRST_ADAPTER: u64 = 1 << 32;

impl Site {
    fn number(self) -> u64 {
        let (index, kind) = match self {
            Site::Entry(unit) => (unit, 0),
            Site::AttentionWeights(layer) => (layer, 1),
            Site::AttentionOutput(layer) => (layer, 2),
            Site::MlpOutput(layer) => (layer, 3),
            Site::FirstTokens => return FIRST_TOKENS,
            Site::Pooled => return FIRST_TOKENS + 1,
            Site::Adapter(number) => return FIRST_ADAPTER + number as u64,
        };
        4 * index as u64 + kind
    }
}

/// The dropout of one site.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropout {
    probability: f32,
    site: Site,
}

impl Dropout {
    /// `None` if nothing is dropped.
    pub fn new(probability: f32, site: Site) -> Option<Dropout> {
        (probability > 0.0).then_some(Dropout { probability, site })
    }

    /// Drops numbers of `x`, whose first row is row `first_row` of the batch, into `out`, which may be `x`. The gradient of `x`
    /// is the gradient of `out`, dropped the same way.
    pub fn launch(&self, queue: &Queue, noise: Noise, first_row: usize, x: &Tensor, out: &Tensor) {
        self.launch_at(queue, noise, Placement { first_row: first_row as u64, ..Placement::whole(x.cols) }, x, out);
    }

    /// The same for some columns of a matrix, placed among the rows of the batch.
    pub fn launch_at(&self, queue: &Queue, noise: Noise, placement: Placement, x: &Tensor, out: &Tensor) {
        queue.launch(kernel::Dropout {
            x: x.view(),
            out: out.view(),
            probability: self.probability,
            seed: self.seed(noise),
            placement: Placement { first_row: noise.first_token + placement.first_row, ..placement },
            rows: None,
        });
    }

    /// The same for rows that lie at these rows of the batch, u32 [1, rows].
    pub fn launch_at_rows(&self, queue: &Queue, noise: Noise, rows: &Tensor, x: &Tensor, out: &Tensor) {
        queue.launch(kernel::Dropout {
            x: x.view(),
            out: out.view(),
            probability: self.probability,
            seed: self.seed(noise),
            placement: Placement { first_row: noise.first_token, ..Placement::whole(x.cols) },
            rows: Some(rows.view()),
        });
    }

    /// The dropout of attention's weights. Its first query head is `first_head` of the whole model's.
    pub fn of_attention(&self, batch: &Batch, first_head: usize) -> Option<AttentionDropout> {
        batch.noise.map(|noise| AttentionDropout {
            probability: self.probability,
            seed: self.seed(noise),
            first_head: first_head as u64,
            first_token: noise.first_token,
        })
    }

    fn seed(&self, noise: Noise) -> u64 {
        seed_of(noise.seed, self.site.number())
    }
}

/// `x` after dropout, in a new tensor, since others may read `x`; `x` itself if nothing is dropped.
pub(crate) fn dropped(dropout: Option<Dropout>, context: &Context, first_row: usize, x: Tensor) -> Tensor {
    let (Some(dropout), Some(noise)) = (dropout, context.batch.noise) else { return x };
    let out = context.queue.tensor(x.rows, x.cols, x.dtype);
    dropout.launch(context.queue, noise, first_row, &x, &out);
    out
}
