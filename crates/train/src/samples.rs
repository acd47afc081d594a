//! Micro-batches on the host.

use std::ops::Range;

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{DType, Queue};
use evenkeel_model::{Batch, Images, Input, Model};
use evenkeel_step::schedule::PartSize;
use evenkeel_store::Digest;
use serde::{Deserialize, Serialize};

// Kernels get the data's labels as they are.
const _: () = assert!(evenkeel_data::IGNORE == IGNORE);

/// The samples of a micro-batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Samples {
    /// Sequences one after another, cut in documents.
    Tokens { ids: Vec<u32>, labels: Vec<u32>, segment_lengths: Vec<usize> },
    /// Texts one after another, with a label each.
    Texts { ids: Vec<u32>, types: Vec<u32>, labels: Vec<u32>, segment_lengths: Vec<usize> },
    /// Pictures in [image, channel, y, x] order.
    Images { pixels: Vec<f32>, labels: Vec<u32> },
}

impl Samples {
    /// `count` samples of the size that a model reads, for dry runs: sequences or texts of `sequence` tokens, or images.
    pub fn blank(input: Input, count: usize, sequence: usize) -> Samples {
        match input {
            Input::Tokens { .. } => Samples::Tokens {
                ids: vec![0; count * sequence],
                labels: vec![0; count * sequence],
                segment_lengths: vec![sequence; count],
            },
            Input::Texts { .. } => Samples::Texts {
                ids: vec![0; count * sequence],
                types: vec![0; count * sequence],
                labels: vec![0; count],
                segment_lengths: vec![sequence; count],
            },
            Input::Images { size, channels, .. } => {
                Samples::Images { pixels: vec![0.0; count * channels * size * size], labels: vec![0; count] }
            }
        }
    }

    /// Samples of the same size with random tokens, each to be predicted from those before it; texts of such, all with the first
    /// label; blank images. The same for the same seed.
    pub fn random(input: Input, classes: usize, count: usize, sequence: usize, seed: u64) -> Samples {
        let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(1000 + seed);
        let vocabulary = if let Input::Texts { vocabulary, .. } = input { vocabulary } else { classes };
        let mut token = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 33) % vocabulary as u64) as u32
        };
        match Samples::blank(input, count, sequence) {
            Samples::Tokens { segment_lengths, .. } => {
                let ids: Vec<u32> = (0..count * sequence).map(|_| token()).collect();
                let is_last = |place: usize| (place + 1).is_multiple_of(sequence);
                let label = |place: usize| if is_last(place) { IGNORE } else { ids[place + 1] };
                let labels = (0..ids.len()).map(label).collect();
                Samples::Tokens { ids, labels, segment_lengths }
            }
            Samples::Texts { types, labels, segment_lengths, .. } => {
                let ids = (0..count * sequence).map(|_| token()).collect();
                Samples::Texts { ids, types, labels, segment_lengths }
            }
            images => images,
        }
    }

    /// Bytes on the host.
    pub fn bytes(&self) -> u64 {
        let numbers = match self {
            Samples::Tokens { ids, labels, segment_lengths } => ids.len() + labels.len() + 2 * segment_lengths.len(),
            Samples::Texts { ids, types, labels, segment_lengths } => {
                ids.len() + types.len() + labels.len() + 2 * segment_lengths.len()
            }
            Samples::Images { pixels, labels } => pixels.len() + labels.len(),
        };
        4 * numbers as u64
    }

    /// The same number for these samples on every machine, and almost never for others.
    pub(crate) fn digest(micros: &[Samples]) -> u64 {
        Digest::of_numbers(micros.iter().flat_map(Samples::numbers)).short()
    }

    /// All contents, behind the lengths of all lists.
    fn numbers(&self) -> impl Iterator<Item = u32> {
        let (ids, types, pixels, lengths): (&[u32], &[u32], &[f32], &[usize]) = match self {
            Samples::Tokens { ids, segment_lengths, .. } => (ids, &[], &[], segment_lengths),
            Samples::Texts { ids, types, segment_lengths, .. } => (ids, types, &[], segment_lengths),
            Samples::Images { pixels, .. } => (&[], &[], pixels, &[]),
        };
        let labels = self.labels();
        let counts = [ids.len() + types.len(), pixels.len(), lengths.len(), labels.len()];
        let counts = counts.into_iter().chain(lengths.iter().copied()).map(|count| count as u32);
        let values = ids.iter().chain(types).copied().chain(pixels.iter().map(|pixel| pixel.to_bits()));
        counts.chain(values).chain(labels.iter().copied())
    }

    pub fn labels(&self) -> &[u32] {
        match self {
            Samples::Tokens { labels, .. } | Samples::Texts { labels, .. } | Samples::Images { labels, .. } => labels,
        }
    }

    /// Tokens, or patches of images.
    pub fn tokens(&self, input: Input) -> usize {
        match (self, input) {
            (Samples::Images { labels, .. }, Input::Images { size, patch, .. }) => {
                labels.len() * Input::tokens_per_image(size, patch)
            }
            (Samples::Texts { ids, .. }, _) => ids.len(),
            _ => self.labels().len(),
        }
    }

    /// The most parts that they can be cut in: nothing is cut inside a document, a text or an image.
    pub fn most_parts(&self) -> usize {
        match self {
            Samples::Tokens { segment_lengths, .. } | Samples::Texts { segment_lengths, .. } => {
                segment_lengths.len().max(1)
            }
            Samples::Images { labels, .. } => labels.len().max(1),
        }
    }

    /// The same samples in `count` parts of about the same size, or in as many as there are documents, texts or images.
    pub(crate) fn parts(&self, count: usize) -> Vec<Samples> {
        match self {
            Samples::Tokens { ids, labels, segment_lengths } => {
                let mut start = 0;
                let part = |segments: Range<usize>| {
                    let segment_lengths = segment_lengths[segments].to_vec();
                    let tokens = start..start + segment_lengths.iter().sum::<usize>();
                    start = tokens.end;
                    Samples::Tokens {
                        ids: ids[tokens.clone()].to_vec(),
                        labels: labels[tokens].to_vec(),
                        segment_lengths,
                    }
                };
                divide(segment_lengths, count).into_iter().map(part).collect()
            }
            Samples::Texts { ids, types, labels, segment_lengths } => {
                let mut start = 0;
                let part = |texts: Range<usize>| {
                    let segment_lengths = segment_lengths[texts.clone()].to_vec();
                    let tokens = start..start + segment_lengths.iter().sum::<usize>();
                    start = tokens.end;
                    Samples::Texts {
                        ids: ids[tokens.clone()].to_vec(),
                        types: types[tokens].to_vec(),
                        labels: labels[texts].to_vec(),
                        segment_lengths,
                    }
                };
                divide(segment_lengths, count).into_iter().map(part).collect()
            }
            Samples::Images { pixels, labels } => {
                let size = pixels.len().checked_div(labels.len()).unwrap_or(0);
                let part = |images: Range<usize>| Samples::Images {
                    pixels: pixels[images.start * size..images.end * size].to_vec(),
                    labels: labels[images].to_vec(),
                };
                divide(&vec![1; labels.len()], count).into_iter().map(part).collect()
            }
        }
    }

    /// The sizes of these samples in `count` parts.
    pub fn part_sizes(&self, model: &Model, count: usize) -> Vec<PartSize> {
        let (lengths, each) = match (self, model.config.input) {
            (Samples::Tokens { segment_lengths, .. } | Samples::Texts { segment_lengths, .. }, _) => {
                (segment_lengths.clone(), 1)
            }
            (Samples::Images { labels, .. }, Input::Images { size, patch, .. }) => {
                (vec![1; labels.len()], Input::tokens_per_image(size, patch))
            }
            (Samples::Images { labels, .. }, _) => (vec![1; labels.len()], 1),
        };
        let size = |part: Range<usize>| {
            let (tokens, samples) = (each * lengths[part.clone()].iter().sum::<usize>(), part.len());
            PartSize::new(model, tokens, if model.config.input.is_classified() { samples } else { tokens })
        };
        divide(&lengths, count).into_iter().map(size).collect()
    }

    /// Labels that count.
    pub fn targets(&self) -> usize {
        self.labels().iter().filter(|&&label| label != IGNORE).count()
    }

    /// The same samples, from which nothing is to be learnt.
    pub(crate) fn without_labels(&self) -> Samples {
        let mut samples = self.clone();
        match &mut samples {
            Samples::Tokens { labels, .. } | Samples::Texts { labels, .. } | Samples::Images { labels, .. } => {
                labels.fill(IGNORE)
            }
        }
        samples
    }

    pub(crate) fn batch(&self, model: &Model, dtype: DType, queue: &Queue) -> Batch {
        match self {
            Samples::Tokens { ids, labels, segment_lengths } => {
                Batch::tokens(queue, ids, labels, segments(segment_lengths))
            }
            Samples::Texts { ids, types, labels, segment_lengths } => {
                Batch::texts(queue, ids, types, labels, segments(segment_lengths))
            }
            Samples::Images { pixels, labels } => {
                let images = Images { pixels, count: labels.len() };
                Batch::images(queue, images, labels, model.config.input, dtype)
            }
        }
    }
}

fn segments(lengths: &[usize]) -> Segments {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    Segments::new(std::iter::once(0).chain(ends).collect())
}

/// Cuts a list into at most `count` ranges, none empty, whose sums are about equal.
fn divide(lengths: &[usize], count: usize) -> Vec<Range<usize>> {
    let count = count.clamp(1, lengths.len().max(1));
    let total: usize = lengths.iter().sum();
    let (mut ranges, mut start, mut end, mut sum) = (Vec::new(), 0, 0, 0);
    for part in 1..=count {
        let (target, latest) = (total * part / count, lengths.len() - (count - part));
        while end < latest && (end == start || part == count || sum + lengths[end] / 2 < target) {
            sum += lengths[end];
            end += 1;
        }
        ranges.push(start..end);
        start = end;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_about_the_same_size_and_none_is_empty() {
        let cases: [(&[usize], usize, &[usize]); 8] = [
            (&[4, 4, 4, 4], 2, &[2, 2]),
            (&[4, 4, 4, 4], 1, &[4]),
            (&[4, 4, 4], 2, &[1, 2]),
            (&[9, 1, 1, 1], 2, &[1, 3]),
            (&[1, 1, 1, 9], 2, &[3, 1]),
            (&[1, 1, 1, 9], 4, &[1, 1, 1, 1]),
            (&[5, 5], 4, &[1, 1]),
            (&[], 2, &[0]),
        ];
        for (lengths, count, expected) in cases {
            let found: Vec<usize> = divide(lengths, count).iter().map(Range::len).collect();
            assert_eq!(found, expected, "{lengths:?} in {count}");
        }
    }

    #[test]
    fn a_digest_is_the_same_on_every_machine_and_another_for_other_samples() {
        let tokens = |ids: &[u32], segment_lengths: &[usize]| Samples::Tokens {
            ids: ids.to_vec(),
            labels: vec![2, 3, 9],
            segment_lengths: segment_lengths.to_vec(),
        };
        let images = |pixels: &[f32]| Samples::Images { pixels: pixels.to_vec(), labels: vec![7] };
        let samples = [tokens(&[1, 2, 3], &[2, 1]), images(&[0.5, -1.0])];
        // By the reference implementation of XXH3.
        assert_eq!(Samples::digest(&samples), 0x1127_d9d0_3ddb_1f94);
        for other in [
            [images(&[0.5, -1.0]), tokens(&[1, 2, 3], &[2, 1])],
            [tokens(&[1, 2, 4], &[2, 1]), images(&[0.5, -1.0])],
            [tokens(&[1, 2, 3], &[1, 2]), images(&[0.5, -1.0])],
            [tokens(&[1, 2, 3], &[3]), images(&[0.5, -1.0])],
            [tokens(&[1, 2, 3], &[2, 1]), images(&[0.5, 1.0])],
        ] {
            assert_ne!(Samples::digest(&other), Samples::digest(&samples), "{other:?}");
        }
    }

    #[test]
    fn parts_put_together_are_the_samples() {
        let tokens =
            Samples::Tokens { ids: (0..10).collect(), labels: (10..20).collect(), segment_lengths: vec![3, 2, 4, 1] };
        let Samples::Tokens { ids, labels, segment_lengths } = &tokens else { unreachable!() };
        let (mut all_ids, mut all_labels, mut all_lengths) = (Vec::new(), Vec::new(), Vec::new());
        let parts = tokens.parts(2);
        assert_eq!(parts.len(), 2);
        for part in parts {
            let Samples::Tokens { ids, labels, segment_lengths } = part else { unreachable!() };
            all_ids.extend(ids);
            all_labels.extend(labels);
            all_lengths.extend(segment_lengths);
        }
        assert_eq!((&all_ids, &all_labels, &all_lengths), (ids, labels, segment_lengths));
    }
}
