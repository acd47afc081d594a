//! AdamW over all parameters of a model.

use std::ops::Range;

use evenkeel_device::kernel::{self, ClipFactor, Fill, SquaredNorm};
use evenkeel_device::{DType, Queue, Tensor};
use evenkeel_model::{Frozen, Gradients, ParamId, Parameters, Stretch};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
    pub weight_decay: f32,
    /// Whether biases and norm weights decay too.
    pub decay_vectors: bool,
    /// Gradients are scaled down to this global norm; not at all without it.
    pub clip_norm: Option<f32>,
}

impl Default for AdamWOptions {
    fn default() -> AdamWOptions {
        AdamWOptions {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            decay_vectors: false,
            clip_norm: Some(1.0),
        }
    }
}

/// What changes from one update to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    pub lr: f32,
    /// From 1.
    pub step: u32,
}

/// The optimizer's state: first and second moments of what masters are kept here, f32, by bucket.
pub struct AdamW {
    options: AdamWOptions,
    means: Vec<Tensor>,
    variances: Vec<Tensor>,
    /// f32 [1, 1] each.
    squared_norm: Tensor,
    clip_factor: Tensor,
}

impl AdamW {
    pub fn new(options: AdamWOptions, parameters: &Parameters, queue: &Queue) -> AdamW {
        let zeros = |bucket: usize| queue.zeros(1, parameters.masters(bucket).len(), DType::F32);
        let all = || (0..parameters.buckets.len()).map(zeros).collect();
        let scalar = || queue.zeros(1, 1, DType::F32);
        AdamW { options, means: all(), variances: all(), squared_norm: scalar(), clip_factor: scalar() }
    }

    /// Measures the squared norm of the gradients kept here of the parameters that are counted, f32 [1, 1].
    /// [`AdamW::update`] clips by what is there then.
    pub fn measure_norm(
        &self,
        queue: &Queue,
        parameters: &Parameters,
        gradients: &Gradients,
        is_counted: impl Fn(ParamId) -> bool,
    ) -> &Tensor {
        let out = self.squared_norm.view();
        queue.launch(Fill { out, value: 0.0 });
        let counted = parameters.ids().filter(|&id| is_counted(id));
        let stretches =
            counted.filter_map(|id| Some((parameters.own_stretch(id)?.place, parameters.bucket_of(id), ())));
        for Together { bucket, place, .. } in together(stretches) {
            let x = gradients.own(queue, bucket).col_range(place).view();
            queue.launch(SquaredNorm { x, out, accumulate: true });
        }
        &self.squared_norm
    }

    /// Updates every master kept here and its copy, but for what is frozen: that and its moments stay as they are, bit for bit.
    /// The gradients stay, too.
    pub fn update(
        &self,
        queue: &Queue,
        parameters: &Parameters,
        gradients: &Gradients,
        update: Update,
        frozen: Option<&Frozen>,
    ) {
        let grad_factor = self.options.clip_norm.map(|limit| {
            let (squared_norm, out) = (self.squared_norm.view(), self.clip_factor.view());
            queue.launch(ClipFactor { squared_norm, limit, out });
            out
        });
        let stretches = parameters.ids().filter_map(|id| {
            let Stretch { place, .. } = parameters.own_stretch(id)?;
            let decays = self.options.decay_vectors || !parameters.specs[id.0].is_vector();
            // The bits of a frozen parameter are its own.
            let frozen = frozen.filter(|frozen| frozen.of(id).is_some()).map(|_| id);
            Some((place, parameters.bucket_of(id), (decays, frozen)))
        });
        for Together { bucket, place, like: (decays, frozen_id) } in together(stretches) {
            let of = |flat: &Tensor| flat.col_range(place.clone()).view();
            queue.launch(kernel::AdamW {
                weight: of(parameters.masters(bucket)),
                grad: of(&gradients.own(queue, bucket)),
                mean: of(&self.means[bucket]),
                variance: of(&self.variances[bucket]),
                copy: parameters.copies(bucket).as_ref().map(of),
                lr: update.lr,
                beta1: self.options.beta1,
                beta2: self.options.beta2,
                epsilon: self.options.epsilon,
                weight_decay: if decays { self.options.weight_decay } else { 0.0 },
                step: update.step,
                grad_factor,
                frozen: frozen_id.and_then(|id| Some(frozen?.of(id)?.view())),
            });
        }
    }

    /// The same optimizer whose moments, by bucket, are kept elsewhere. The variances stay until the means are moved, so that
    /// there is never more than one kind twice.
    pub fn with_moments(self, moved: impl Fn(Vec<Tensor>) -> Vec<Tensor>) -> AdamW {
        AdamW { means: moved(self.means), variances: moved(self.variances), ..self }
    }

    /// The moments of a bucket's masters that are kept here.
    pub fn means(&self, bucket: usize) -> &Tensor {
        &self.means[bucket]
    }

    pub fn variances(&self, bucket: usize) -> &Tensor {
        &self.variances[bucket]
    }
}

/// Parameters that lie side by side in a bucket and are treated alike.
struct Together<T> {
    bucket: usize,
    place: Range<usize>,
    like: T,
}

/// Joins stretches of a bucket where one begins at the end of the other: a launch for each parameter costs a small model on a
/// card more than the work. Gaps between parameters are nobody's and end a stretch.
fn together<T: PartialEq>(stretches: impl Iterator<Item = (Range<usize>, usize, T)>) -> Vec<Together<T>> {
    let mut found: Vec<Together<T>> = Vec::new();
    for (place, bucket, like) in stretches {
        let before = found.iter_mut().rev().find(|before| before.bucket == bucket);
        match before.filter(|before| before.place.end == place.start && before.like == like) {
            Some(before) => before.place.end = place.end,
            None => found.push(Together { bucket, place, like }),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_that_are_treated_alike_are_joined_in_their_bucket_only() {
        let stretches = [
            (0..32, 0, 'a'),
            (0..64, 1, 'a'),
            (32..64, 0, 'a'),
            (64..96, 0, 'b'),
            (64..100, 1, 'a'),
            (128..160, 1, 'a'),
            (96..128, 0, 'a'),
        ];
        let found: Vec<_> = together(stretches.into_iter()).into_iter().map(|t| (t.place, t.bucket, t.like)).collect();
        let expected = [(0..64, 0, 'a'), (0..100, 1, 'a'), (64..96, 0, 'b'), (128..160, 1, 'a'), (96..128, 0, 'a')];
        assert_eq!(found, expected);
    }
}
