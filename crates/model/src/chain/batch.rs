//! The input of a pass: tokens, texts or images, their positions, and their labels.

use std::ops::Range;

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{DType, Queue, Tensor};

use crate::chain::balance::Tallies;
use crate::chain::dropout::Noise;
use crate::chain::handed::HandedValues;
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
    /// What a classifier of texts reads beside ids.
    pub(crate) texts: Option<TextRows>,
    /// u32 [1, T]: 0 for class tokens, [`IGNORE`] for the others, and the reverse.
    pub(crate) class_rows: Tensor,
    pub(crate) patch_rows: Tensor,
    /// u32 [1, T], or one label per image or text.
    pub(crate) labels: Tensor,
    /// Labels that count.
    pub targets: usize,
    /// The source of dropout. Without it nothing is dropped; see [`Batch::with_noise`].
    pub noise: Option<Noise>,
    /// The notes of routers, in training.
    pub tallies: Option<Tallies>,
    /// What layers hand to later ones.
    pub(crate) handed: HandedValues,
    /// One past the last position of the longest sequence.
    pub longest: usize,
    /// Segments without labels, but for documents of one token, which have none.
    padding: Vec<Range<usize>>,
    largest_id: Option<u32>,
    largest_label: Option<u32>,
    largest_type: Option<u32>,
}

/// The tokens of texts, and where texts begin.
pub(crate) struct TextRows {
    /// u32 [1, T]
    pub types: Tensor,
    /// u32 [1, texts]: the row of each text's first token.
    pub firsts: Tensor,
    /// u32 [1, T]: the number of the text that begins in a row, or [`IGNORE`].
    pub texts: Tensor,
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
            padding: padding(&segments, labels),
            ..Batch::unlabelled(queue, ids, segments, None)
        }
    }

    /// Texts with one label each, or [`IGNORE`]; each is a segment.
    pub fn texts(queue: &Queue, ids: &[u32], types: &[u32], labels: &[u32], segments: Segments) -> Batch {
        let firsts: Vec<u32> = segments.iter().map(|segment| segment.start as u32).collect();
        assert_eq!((ids.len(), types.len()), (segments.tokens(), segments.tokens()), "one id and one type per token");
        assert_eq!(labels.len(), firsts.len(), "one label per text");
        assert!(segments.iter().all(|segment| !segment.is_empty()), "a text without tokens has no first one");
        let mut texts = vec![IGNORE; ids.len()];
        firsts.iter().enumerate().for_each(|(text, &first)| texts[first as usize] = text as u32);
        let rows =
            TextRows { types: queue.indices(types), firsts: queue.indices(&firsts), texts: queue.indices(&texts) };
        Batch {
            texts: Some(rows),
            labels: queue.indices(labels),
            targets: count_targets(labels),
            largest_label: largest_label(labels),
            largest_type: (!types.is_empty()).then(|| largest(types.iter().copied())),
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
            texts: None,
            class_rows: queue.indices(&[]),
            patch_rows: queue.indices(&[]),
            labels: queue.indices(&[]),
            targets: 0,
            noise: None,
            tallies: None,
            handed: HandedValues::default(),
            longest: longest(&segments, starts),
            padding: Vec::new(),
            largest_id: (!ids.is_empty()).then(|| largest(ids.iter().copied())),
            largest_label: None,
            largest_type: None,
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
            texts: None,
            cache: None,
            labels: queue.indices(labels),
            targets: count_targets(labels),
            noise: None,
            tallies: None,
            handed: HandedValues::default(),
            longest: longest(&segments, &[]),
            padding: Vec::new(),
            largest_id: None,
            largest_label: largest_label(labels),
            largest_type: None,
            segments,
        }
    }

    /// The batch for training, with the dropout of the model's config.
    pub fn with_noise(self, noise: Noise) -> Batch {
        Batch { noise: Some(noise), ..self }
    }

    /// The batch for training, with what routers note if there are experts. `share` is the factor of its loss of balance in a step's.
    pub fn with_tallies(self, queue: &Queue, config: &Config, share: f32) -> Batch {
        Batch { tallies: Tallies::of_batch(queue, config, self.token_count(), &self.padding, share), ..self }
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
            texts: None,
            class_rows: none(&self.class_rows),
            patch_rows: none(&self.patch_rows),
            labels: none(&self.labels),
            targets: 0,
            noise: self.noise.map(moved),
            tallies: None,
            handed: HandedValues::default(),
            longest: self.longest,
            padding: Vec::new(),
            largest_id: None,
            largest_label: None,
            largest_type: None,
            segments,
        }
    }

    pub(crate) fn text_rows(&self) -> &TextRows {
        self.texts.as_ref().expect("a batch of texts for a model that labels texts")
    }

    /// Asserts that a model can read this batch. Callers check ids from a file beforehand.
    pub fn check(&self, config: &Config) {
        let (vocabulary, types) = match config.input {
            Input::Texts { vocabulary, types, .. } => (vocabulary, types),
            Input::Tokens { .. } | Input::Images { .. } => (config.classes, 1),
        };
        let found = [
            ("token id", self.largest_id, vocabulary),
            ("token type", self.largest_type, types),
            ("label", self.largest_label, config.classes),
        ];
        for (what, largest, count) in found {
            let largest = largest.map_or(0, |largest| largest as usize);
            assert!(largest < count, "{what} {largest} in a batch for {count}");
        }
        let longest = self.longest;
        let limit = config.input.most_positions().unwrap_or(longest);
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

fn padding(segments: &Segments, labels: &[u32]) -> Vec<Range<usize>> {
    let is_padding =
        |segment: &Range<usize>| segment.len() > 1 && labels[segment.clone()].iter().all(|&label| label == IGNORE);
    segments.iter().filter(is_padding).collect()
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
