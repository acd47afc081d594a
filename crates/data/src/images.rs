//! Prepares images for a vision model: resized, augmented, normalised.
//!
//! Shapes: a picture from a source is u8 [height, width, 3]; a model's input is f32 [channels, size, size].

use evenkeel_random::Random;

use crate::error::Error;
use crate::order::Cursor;
use crate::pipeline::{Assemble, At, Decode, Emit, Stop};
use crate::source::Record;

/// The purpose of the key, so that no other use shares its random numbers.
const AUGMENT: u64 = 0x696d_6167_6573;
/// A picture of more pixels is broken or hostile.
const MOST_PIXELS: usize = 1 << 28;

/// Random changes to a picture in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Augment {
    /// Mirrors every other picture.
    pub flip: bool,
    /// Shifts a picture by up to this many pixels each way; pixels from outside are black.
    pub shift: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ImageOptions {
    /// Side of the model's square input.
    pub size: usize,
    /// One value for each channel: three, or one for grey.
    pub mean: Vec<f32>,
    pub deviation: Vec<f32>,
    /// For training; without it pictures are only resized.
    pub augment: Option<Augment>,
    /// Labels are below this.
    pub classes: usize,
}

/// The most batches that wait for the caller; each may have hundreds of MB.
pub const BATCHES_READY: usize = 3;

/// Turns image records into pixels.
#[derive(Clone, Debug)]
pub struct Images {
    options: ImageOptions,
    seed: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImageBatch {
    /// f32 [image, channel, y, x].
    pub pixels: Vec<f32>,
    /// One for each image.
    pub labels: Vec<u32>,
}

impl Images {
    pub fn new(options: ImageOptions) -> Result<Images, Error> {
        const LARGEST_SIZE: usize = 8192;
        let bad =
            |what, found: String, expected: &str| Err(Error::BadOption { what, found, expected: expected.into() });
        let channels = options.mean.len();
        if !(1..=LARGEST_SIZE).contains(&options.size) {
            return bad("image size", options.size.to_string(), "1 to 8192");
        }
        if !matches!(channels, 1 | 3) || options.deviation.len() != channels {
            let found = format!("{channels} and {} values", options.deviation.len());
            return bad("mean and deviation of images", found, "3 values each, or 1 for grey");
        }
        if !options.mean.iter().all(|mean| mean.is_finite()) || !options.deviation.iter().all(|&value| value > 0.0) {
            return bad("mean and deviation of images", format!("{options:?}"), "numbers, and deviations above 0");
        }
        if options.augment.is_some_and(|augment| augment.shift >= options.size) {
            return bad("shift of images", format!("{:?}", options.augment), "less than their size");
        }
        Ok(Images { options, seed: 0 })
    }

    /// f32 [channels, size, size]. Augmentation depends on the seed and the place in the order alone.
    pub fn pixels(&self, width: usize, height: usize, rgb: &[u8], cursor: Cursor) -> Result<Vec<f32>, Error> {
        let expected = width.checked_mul(height).filter(|pixels| (1..=MOST_PIXELS).contains(pixels));
        if expected.map(|pixels| pixels * 3) != Some(rgb.len()) {
            let expected = expected.map_or(format!("1 to {MOST_PIXELS} pixels"), |pixels| (pixels * 3).to_string());
            return Err(Error::BadImage { width, height, found_bytes: rgb.len(), expected });
        }
        let ImageOptions { size, mean, deviation, augment, .. } = &self.options;
        let size = *size;
        let mut planes = resize(rgb, width, height, size);
        if mean.len() == 1 {
            planes = grey(&planes);
        }
        if let Some(augment) = augment {
            let mut random = Random::new(&[AUGMENT, self.seed, cursor.epoch, cursor.window, cursor.record]);
            planes = augmented(&planes, size, augment, &mut random);
        }
        for (plane, (mean, deviation)) in planes.chunks_exact_mut(size * size).zip(mean.iter().zip(deviation)) {
            plane.iter_mut().for_each(|value| *value = (*value / 255.0 - mean) / deviation);
        }
        Ok(planes)
    }

    pub(crate) fn keyed(self, seed: u64) -> Images {
        Images { seed, ..self }
    }

    pub(crate) fn batches(&self, batch: usize) -> Result<Batches, Error> {
        if batch == 0 {
            return Err(Error::BadOption { what: "batch", found: "0".into(), expected: "1 image or more".into() });
        }
        Ok(Batches { size: batch, batch: ImageBatch::default() })
    }
}

impl Decode for Images {
    type Piece = (Vec<f32>, u32);

    fn decode(&self, record: Record, cursor: Cursor) -> Result<Option<(Vec<f32>, u32)>, Error> {
        let Record::Image { width, height, rgb, label } = record else {
            return Err(Error::WrongRecord { expected: "an image", found: "text" });
        };
        let classes = self.options.classes;
        let known = u32::try_from(label).ok().filter(|_| label < classes);
        let known = known.ok_or(Error::BadLabel { label, classes })?;
        Ok(Some((self.pixels(width, height, &rgb, cursor)?, known)))
    }

    fn bytes((pixels, _): &(Vec<f32>, u32)) -> usize {
        size_of_val(&pixels[..])
    }
}

/// Collects images into batches. The last of a run may be smaller.
pub(crate) struct Batches {
    size: usize,
    batch: ImageBatch,
}

impl Assemble for Batches {
    type Piece = (Vec<f32>, u32);
    type Item = ImageBatch;
    const ITEMS_AHEAD: usize = BATCHES_READY;

    fn add(&mut self, at: At, (pixels, label): (Vec<f32>, u32), emit: Emit<ImageBatch>) -> Result<bool, Stop> {
        self.batch.pixels.extend_from_slice(&pixels);
        self.batch.labels.push(label);
        if self.batch.labels.len() == self.size {
            emit(std::mem::take(&mut self.batch), at.through())?;
        }
        Ok(true)
    }

    fn finish(&mut self, end: At, emit: Emit<ImageBatch>) -> Result<(), Stop> {
        if self.batch.labels.is_empty() { Ok(()) } else { emit(std::mem::take(&mut self.batch), end.before()) }
    }
}

/// u8 [height, width, 3] → f32 [3, size, size], 0 to 255, first along x, then along y.
fn resize(rgb: &[u8], width: usize, height: usize, size: usize) -> Vec<f32> {
    let (along_x, along_y) = (taps(width, size), taps(height, size));
    // [3, height, size]
    let mut narrow = vec![0.0; 3 * height * size];
    for (y, line) in rgb.chunks_exact(3 * width).enumerate() {
        for (x, tap) in along_x.iter().enumerate() {
            let mut sums = [0.0f32; 3];
            for (pixel, weight) in line[3 * tap.first..].chunks_exact(3).zip(&tap.weights) {
                (0..3).for_each(|channel| sums[channel] += weight * f32::from(pixel[channel]));
            }
            (0..3).for_each(|channel| narrow[(channel * height + y) * size + x] = sums[channel]);
        }
    }
    let mut out = vec![0.0; 3 * size * size];
    for (row, out) in out.chunks_exact_mut(size).enumerate() {
        let (channel, tap) = (row / size, &along_y[row % size]);
        for (offset, weight) in tap.weights.iter().enumerate() {
            let start = (channel * height + tap.first + offset) * size;
            out.iter_mut().zip(&narrow[start..start + size]).for_each(|(out, value)| *out += weight * value);
        }
    }
    out
}

/// The source pixels of one resized pixel.
struct Tap {
    first: usize,
    weights: Vec<f32>,
}

/// Bilinear weights. If a side shrinks, the triangle is widened, so that every pixel has its share and fine patterns do not
/// alias, as in Pillow.
fn taps(from: usize, to: usize) -> Vec<Tap> {
    let scale = from as f64 / to as f64;
    let support = scale.max(1.0);
    let tap = |index: usize| {
        let centre = (index as f64 + 0.5) * scale;
        let first = (centre - support + 0.5).max(0.0) as usize;
        let end = ((centre + support + 0.5) as usize).min(from);
        let weight = |pixel: usize| (1.0 - ((pixel as f64 + 0.5 - centre) / support).abs()).max(0.0);
        let sum: f64 = (first..end).map(weight).sum();
        Tap { first, weights: (first..end).map(|pixel| (weight(pixel) / sum) as f32).collect() }
    };
    (0..to).map(tap).collect()
}

/// [3, …] → [1, …] by the brightness the eye sees.
fn grey(planes: &[f32]) -> Vec<f32> {
    let (red, rest) = planes.split_at(planes.len() / 3);
    let (green, blue) = rest.split_at(rest.len() / 2);
    red.iter().zip(green.iter().zip(blue)).map(|(r, (g, b))| 0.299 * r + 0.587 * g + 0.114 * b).collect()
}

fn augmented(planes: &[f32], size: usize, augment: &Augment, random: &mut Random) -> Vec<f32> {
    let flip = augment.flip && random.below(2) == 1;
    let mut offset = || random.below(2 * augment.shift as u64 + 1) as isize - augment.shift as isize;
    let (down, right) = (offset(), offset());
    let inside = |place: usize, offset: isize| place.checked_add_signed(offset).filter(|&place| place < size);
    let mut out = vec![0.0; planes.len()];
    for (row, out) in out.chunks_exact_mut(size).enumerate() {
        let (plane, y) = (row / size, row % size);
        let Some(y) = inside(y, down) else { continue };
        let line = &planes[(plane * size + y) * size..][..size];
        for (x, out) in out.iter_mut().enumerate() {
            let x = inside(x, right).map(|x| if flip { size - 1 - x } else { x });
            *out = x.map_or(0.0, |x| line[x]);
        }
    }
    out
}
