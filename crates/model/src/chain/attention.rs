//! Attention over heads that lie in slots.

use std::ops::Range;

use evenkeel_device::kernel::{self, AttentionDropout, Mask, ScoreChanges};
use evenkeel_device::{DType, Heads, Tensor, View};

use crate::chain::batch::Batch;
use crate::chain::body::{Context, Slot, Slots};
use crate::chain::dropout::Dropout;
use crate::parameters::{Gradients, ParamId};

/// The columns of heads in a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadSlot {
    pub slot: Slot,
    pub first: usize,
    pub count: usize,
    pub dim: usize,
    pub step: usize,
}

impl HeadSlot {
    pub(super) fn of(&self, slots: &Slots) -> Heads {
        Heads::strided(slots.get(self.slot), self.first, self.count, self.dim, self.step)
    }

    /// Heads that fill a slot, side by side.
    pub fn packed(slot: Slot, count: usize, dim: usize) -> HeadSlot {
        HeadSlot { slot, first: 0, count, dim, step: dim }
    }

    /// The same heads side by side in a tensor of their own, as rows of a matrix.
    pub(super) fn packed_rows(&self, tensor: &Tensor) -> View {
        tensor.view().reshaped(tensor.rows * self.count, self.dim)
    }

    /// The heads of a slot's tensor as rows of a matrix. The tensor must be made up of steps, without gaps.
    pub(super) fn rows(&self, tensor: &Tensor) -> View {
        let rows = tensor.view().reshaped(tensor.rows * self.count, self.step);
        rows.col_range(self.first..self.first + self.dim)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Attention {
    pub q: HeadSlot,
    pub k: HeadSlot,
    pub v: HeadSlot,
    pub out: Slot,
    pub logsum: Slot,
    pub mask: Mask,
    pub scale: f32,
    /// The soft cap on scores.
    pub cap: Option<f32>,
    pub dropout: Option<Dropout>,
    pub sinks: Option<Sinks>,
    /// The number of the first query head among the whole model's.
    pub first_head: usize,
    /// The place of this layer's keys and values in a cache.
    pub layer: usize,
}

/// A logit of each query head that joins the softmax's sum and has no value.
#[derive(Clone, Debug)]
pub(crate) struct Sinks {
    /// A number for each head that the shard holds.
    pub logits: ParamId,
    /// Those of the heads that are attended here.
    pub heads: Range<usize>,
}

impl Sinks {
    /// The part of the sinks, or of their gradients, that is used here.
    fn part_of(&self, whole: Tensor) -> View {
        whole.col_range(self.heads.clone()).view()
    }
}

impl Attention {
    fn out_heads(&self, out: &Tensor) -> Heads {
        Heads::packed(out, self.q.count)
    }

    fn scores(&self, context: &Context) -> ScoreChanges {
        let slopes = context.tables.slopes(self.first_head..self.first_head + self.q.count);
        let sinks = self.sinks.as_ref().map(|sinks| sinks.part_of(context.parameters.value(sinks.logits)));
        ScoreChanges { cap: self.cap, slopes, sinks }
    }

    fn dropped(&self, batch: &Batch) -> Option<AttentionDropout> {
        self.dropout?.of_attention(batch, self.first_head)
    }

    /// Tokens that continue cached sequences see those. Others see only their own segment, and keep values for backward.
    pub fn forward(&self, context: &Context, values: &mut Slots) {
        let (queue, batch) = (context.queue, context.batch);
        let (q, k, v) = (self.q.of(values), self.k.of(values), self.v.of(values));
        let result = values.tensor_for(self.out, queue, q.tokens(), q.count() * q.dim(), context.dtype());
        let (out, segments, mask, scale) = (self.out_heads(&result), batch.segments.clone(), self.mask, self.scale);
        if let Some(cache) = &batch.cache {
            let [cached_k, cached_v] = cache.heads(self.layer);
            let (capacity, lengths) = (cache.capacity, cache.lengths.clone());
            queue.launch(kernel::CachedAttention {
                q,
                k,
                v,
                out,
                cached_k,
                cached_v,
                capacity,
                lengths,
                segments,
                mask,
                scale,
                scores: self.scores(context),
            });
        } else {
            let logsum = queue.tensor(q.tokens(), q.count(), DType::F32);
            let (logsum_view, dropout) = (logsum.view(), self.dropped(batch));
            let scores = self.scores(context);
            queue.launch(kernel::Attention {
                q,
                k,
                v,
                out,
                logsum: logsum_view,
                segments,
                mask,
                scale,
                scores,
                dropout,
            });
            values.set(self.logsum, logsum);
        }
        values.set(self.out, result);
    }

    pub fn backward(&self, context: &Context, gradients: &Gradients, values: &mut Slots, slots: &mut Slots) {
        let dout = slots.take(self.out);
        let dsinks = self
            .sinks
            .as_ref()
            .and_then(|sinks| Some(sinks.part_of(gradients.sum_of_trained(context.queue, sinks.logits)?)));
        for heads in [&self.q, &self.k, &self.v] {
            if slots.find(heads.slot).is_none() {
                let value = values.get(heads.slot);
                let dheads = slots.tensor_for(heads.slot, context.queue, value.rows, value.cols, value.dtype);
                slots.set(heads.slot, dheads);
            }
        }
        context.queue.launch(kernel::AttentionBackward {
            q: self.q.of(values),
            k: self.k.of(values),
            v: self.v.of(values),
            out: self.out_heads(values.get(self.out)),
            logsum: values.get(self.logsum).view(),
            dout: self.out_heads(&dout),
            dq: self.q.of(slots),
            dk: self.k.of(slots),
            dv: self.v.of(slots),
            segments: context.batch.segments.clone(),
            mask: self.mask,
            scale: self.scale,
            scores: self.scores(context),
            dsinks,
            dropout: self.dropped(context.batch),
        });
    }
}
