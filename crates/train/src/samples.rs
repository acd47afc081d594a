//! What one micro-batch is made of, on the host.

use std::hash::{Hash, Hasher};

use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{Batch, Images, Input, Model};

/// The samples of a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Samples {
    /// Sequences one after another, cut in documents.
    Tokens { ids: Vec<u32>, labels: Vec<u32>, segment_lengths: Vec<usize> },
    /// Pictures in [image, channel, y, x] order.
    Images { pixels: Vec<f32>, labels: Vec<u32> },
}

impl Samples {
    /// `count` samples of the size that a model reads, for dry runs: sequences of `sequence` tokens, or images.
    pub fn blank(input: Input, count: usize, sequence: usize) -> Samples {
        match input {
            Input::Tokens { .. } => Samples::Tokens {
                ids: vec![0; count * sequence],
                labels: vec![0; count * sequence],
                segment_lengths: vec![sequence; count],
            },
            Input::Images { size, channels, .. } => {
                Samples::Images { pixels: vec![0.0; count * channels * size * size], labels: vec![0; count] }
            }
        }
    }

    /// A number that other samples hardly have.
    pub(crate) fn hash(micros: &[Samples]) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        for samples in micros {
            match samples {
                Samples::Tokens { ids, labels, segment_lengths } => (ids, labels, segment_lengths).hash(&mut hasher),
                Samples::Images { pixels, labels } => {
                    pixels.iter().for_each(|pixel| pixel.to_bits().hash(&mut hasher));
                    labels.hash(&mut hasher);
                }
            }
        }
        hasher.finish()
    }

    pub fn labels(&self) -> &[u32] {
        match self {
            Samples::Tokens { labels, .. } | Samples::Images { labels, .. } => labels,
        }
    }

    /// Tokens, or patches of images.
    pub fn tokens(&self, input: Input) -> usize {
        match (self, input) {
            (Samples::Images { labels, .. }, Input::Images { size, patch, .. }) => {
                labels.len() * Input::tokens_per_image(size, patch)
            }
            _ => self.labels().len(),
        }
    }

    pub(crate) fn batch(&self, model: &Model, dtype: DType, queue: &Queue) -> Batch {
        match self {
            Samples::Tokens { ids, labels, segment_lengths } => {
                let ends = segment_lengths.iter().scan(0, |end, length| {
                    *end += length;
                    Some(*end)
                });
                let offsets = std::iter::once(0).chain(ends).collect();
                Batch::tokens(queue, ids, labels, Segments::new(offsets))
            }
            Samples::Images { pixels, labels } => {
                let images = Images { pixels, count: labels.len() };
                Batch::images(queue, images, labels, model.config.input, dtype)
            }
        }
    }
}
