//! The input of a pass: tokens or images, their positions, and their labels.

use std::ops::Range;

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{DType, Queue, Tensor};

use crate::chain::dropout::Noise;
use crate::config::{Config, Input};
use crate::generation::cache::Cache;

/// A batch on a device. All its sequences lie one after another: T tokens, cut by `segments`.
pub struct Batch {
    pub segments: Segments,
    /// u32 [1, T]: token ids; empty for images.
    pub(crate) ids: Tensor,
    /// u32 [1, T]: each token's place in its sequence.
    pub(crate) positions: Tensor,
    /// The sequences before these tokens: segment i continues cached sequence i.
    pub(crate) cache: Option<Cache>,
    /// The patches of images, [T, channels · patch²], zero in the class token's rows.
    pub(crate) patches: Option<Tensor>,
    /// u32 [1, T]: 0 for class tokens, [`IGNORE`] for the others, and the reverse.
    pub(crate) class_rows: Tensor,
    pub(crate) patch_rows: Tensor,
    /// u32 [1, T], or one label per image.
    pub(crate) labels: Tensor,
    /// Labels that count.
    pub targets: usize,
    /// The source of dropout. Without it nothing is dropped; see [`Batch::with_noise`].
    pub noise: Option<Noise>,
    /// One past the last position of the longest sequence.
    pub longest: usize,
    largest_id: Option<u32>,
    largest_label: Option<u32>,
}

/// Pictures in [image, channel, y, x] order.
pub struct Images<'a> {
    pub pixels: &'a [f32],
    pub count: usize,
}

impl Batch {
    /// Token sequences. `labels[t]` is the token that should follow token t, or [`IGNORE`].
    pub fn tokens(queue: &Queue, ids: &[u32], labels: &[u32], segments: Segments) -> Batch {
        assert_eq!((ids.len(), labels.len()), (segments.tokens(), segments.tokens()), "one id and one label per token");
        Batch {
            labels: queue.indices(labels),
            targets: count_targets(labels),
            largest_label: largest_label(labels),
            ..Batch::unlabelled(queue, ids, segments, None)
        }
    }

    /// Tokens that continue the sequences of a cache, one segment each.
    pub(crate) fn continuing(queue: &Queue, ids: &[u32], segments: Segments, cache: Cache) -> Batch {
        assert_eq!(ids.len(), segments.tokens(), "one id per token");
        assert_eq!(cache.lengths.len(), segments.iter().count(), "one segment per cached sequence");
        Batch::unlabelled(queue, ids, segments, Some(cache))
    }

    fn unlabelled(queue: &Queue, ids: &[u32], segments: Segments, cache: Option<Cache>) -> Batch {
        let starts = cache.as_ref().map_or(&[][..], |cache| &cache.lengths);
        Batch {
            ids: queue.indices(ids),
            positions: queue.indices_by(segments.tokens(), || positions(&segments, starts)),
            patches: None,
            class_rows: queue.indices(&[]),
            patch_rows: queue.indices(&[]),
            labels: queue.indices(&[]),
            targets: 0,
            noise: None,
            longest: longest(&segments, starts),
            largest_id: (!ids.is_empty()).then(|| largest(ids.iter().copied())),
            largest_label: None,
            cache,
            segments,
        }
    }

    /// Images for a classifier with the given input sizes, one label each.
    pub fn images(queue: &Queue, images: Images<'_>, labels: &[u32], input: Input, dtype: DType) -> Batch {
        let Input::Images { size, patch, channels } = input else { panic!("this model reads tokens") };
        assert_eq!(labels.len(), images.count, "one label per image");
        assert_eq!(images.pixels.len(), images.count * channels * size * size, "pixels of {} images", images.count);
        let segments = Segments::uniform(images.count, Input::tokens_per_image(size, patch));
        let positions = positions(&segments, &[]);
        let rows = |is_class: bool| -> Vec<u32> {
            positions.iter().map(|&position| if (position == 0) == is_class { 0 } else { IGNORE }).collect()
        };
        let width = channels * patch * patch;
        let patches = queue.tensor(segments.tokens(), width, dtype);
        let filled = queue.write_rows(&patches, |first, rows| -> Result<(), std::convert::Infallible> {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                copy_patch(&images, first + i, size, patch, channels, row);
            }
            Ok(())
        });
        filled.expect("infallible");
        Batch {
            ids: queue.indices(&[]),
            class_rows: queue.indices(&rows(true)),
            patch_rows: queue.indices(&rows(false)),
            positions: queue.indices(&positions),
            patches: Some(patches),
            cache: None,
            labels: queue.indices(labels),
            targets: count_targets(labels),
            noise: None,
            longest: longest(&segments, &[]),
            largest_id: None,
            largest_label: largest_label(labels),
            segments,
        }
    }

    /// The batch for training, with the dropout of the model's config.
    pub fn with_noise(self, noise: Noise) -> Batch {
        Batch { noise: Some(noise), ..self }
    }

    /// The part of a batch that attention needs for some of its rows, which are whole segments: positions and dropout. It lacks
    /// the inputs of embedding and head.
    pub(crate) fn attended(&self, rows: Range<usize>) -> Batch {
        assert!(self.cache.is_none(), "cached sequences are attended to as a whole");
        let within = |segment: &Range<usize>| rows.start <= segment.start && segment.end <= rows.end;
        let ends = self.segments.iter().filter(within).map(|segment| segment.end - rows.start);
        let segments = Segments::new([0].into_iter().chain(ends).collect());
        assert_eq!(segments.tokens(), rows.len(), "rows {rows:?} cut a segment of {:?}", self.segments);
        let none = |indices: &Tensor| indices.col_range(0..0);
        let moved = |noise: Noise| Noise { first_token: noise.first_token + rows.start as u64, ..noise };
        Batch {
            ids: none(&self.ids),
            positions: self.positions.col_range(rows.clone()),
            cache: None,
            patches: None,
            class_rows: none(&self.class_rows),
            patch_rows: none(&self.patch_rows),
            labels: none(&self.labels),
            targets: 0,
            noise: self.noise.map(moved),
            longest: self.longest,
            largest_id: None,
            largest_label: None,
            segments,
        }
    }

    /// Asserts that a model can read this batch. Callers check ids from a file beforehand.
    pub fn check(&self, config: &Config) {
        for (what, largest) in [("token id", self.largest_id), ("label", self.largest_label)] {
            let (largest, classes) = (largest.map_or(0, |largest| largest as usize), config.classes);
            assert!(largest < classes, "{what} {largest} in a batch for {classes} classes");
        }
        let Input::Tokens { learned_positions } = config.input else { return };
        let longest = self.longest;
        let limit = learned_positions.unwrap_or(longest);
        assert!(longest <= limit, "a sequence of {longest} tokens for a model of {limit} positions");
    }

    pub fn token_count(&self) -> usize {
        self.segments.tokens()
    }
}

/// Segments without a start begin at 0.
fn positions(segments: &Segments, starts: &[usize]) -> Vec<u32> {
    let mut positions = Vec::with_capacity(segments.tokens());
    of_segments(segments, starts)
        .for_each(|of_segment| positions.extend(of_segment.start as u32..of_segment.end as u32));
    positions
}

fn longest(segments: &Segments, starts: &[usize]) -> usize {
    let ends =
        of_segments(segments, starts).filter(|of_segment| !of_segment.is_empty()).map(|of_segment| of_segment.end);
    ends.max().unwrap_or(0)
}

/// By segment: its tokens' places in their sequence.
fn of_segments(segments: &Segments, starts: &[usize]) -> impl Iterator<Item = Range<usize>> {
    let starts = starts.iter().copied().chain(std::iter::repeat(0));
    segments.iter().zip(starts).map(|(segment, start)| start..start + segment.len())
}

fn largest_label(labels: &[u32]) -> Option<u32> {
    // One more than each label, so that those that do not count are 0.
    const { assert!(IGNORE == u32::MAX) };
    largest(labels.iter().map(|label| label.wrapping_add(1))).checked_sub(1)
}

/// Many at a time, which `max` does not compare.
fn largest(numbers: impl Iterator<Item = u32>) -> u32 {
    numbers.fold(0, u32::max)
}

fn count_targets(labels: &[u32]) -> usize {
    labels.iter().filter(|&&label| label != IGNORE).count()
}

/// Writes the patch of token `row` of the batch, in [channel, y, x] order; the class token's is zero.
fn copy_patch(images: &Images, row: usize, size: usize, patch: usize, channels: usize, out: &mut [f32]) {
    let per_side = size / patch;
    let tokens = Input::tokens_per_image(size, patch);
    let (image, token) = (row / tokens, row % tokens);
    let Some(index) = token.checked_sub(1) else { return out.fill(0.0) };
    let (top, left) = (index / per_side * patch, index % per_side * patch);
    for (line, out) in out.chunks_exact_mut(patch).enumerate() {
        let (channel, y) = (line / patch, top + line % patch);
        let start = ((image * channels + channel) * size + y) * size + left;
        out.copy_from_slice(&images.pixels[start..start + patch]);
    }
}
