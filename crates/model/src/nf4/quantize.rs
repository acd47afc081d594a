//! Quantises matrices as bitsandbytes does with double quantisation.
//!
//! A block's factor is its largest magnitude; a number times the factor's reciprocal becomes the nearest code. Factors are then
//! quantised themselves: less their mean, in blocks of 256, to 8 bits. They are kept as the f32 numbers that follow from that.

use std::num::NonZero;
use std::ops::Range;
use std::thread;

use evenkeel_device::kernel::{NF4_BLOCK, NF4_CODES};

use super::dynamic_map::{DYNAMIC_MAP, DYNAMIC_MIDPOINTS, MAP_LEN};
use super::sum::mean;

/// Factors that share a factor of the second quantisation.
pub(super) const NESTED_BLOCK: usize = 256;

/// Numbers that become the code above are greater than these.
const MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        midpoints[i] = (NF4_CODES[i] + NF4_CODES[i + 1]) / 2.0;
        i += 1;
    }
    midpoints
};

/// Blocks that a thread reads at a time.
const BLOCKS_AT_A_TIME: usize = 256;

/// The largest magnitude of each block of `len` numbers, which `read` reads in stretches. It is not finite if a number is not.
pub(crate) fn absmax<E: Send>(
    len: usize,
    read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), E> + Sync,
) -> Result<Vec<f32>, E> {
    let mut found = vec![0.0; len.div_ceil(NF4_BLOCK)];
    on_threads(&mut found, 1, |first, found| {
        each_stretch(first..first + found.len(), len, &read, |blocks, values| {
            let found = &mut found[blocks.start - first..blocks.end - first];
            found.iter_mut().zip(values.chunks(NF4_BLOCK)).for_each(|(found, block)| *found = largest(block));
            Ok(())
        })
    })?;
    Ok(found)
}

/// The codes of some of a matrix's `len` numbers, two in a byte, the first in the upper half; the numbers begin with a block. `absmax`
/// has the largest magnitudes of all its blocks.
pub(crate) fn codes<E: Send>(
    numbers: Range<usize>,
    len: usize,
    absmax: &[f32],
    read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), E> + Sync,
    out: &mut [u8],
) -> Result<(), E> {
    const BLOCK_BYTES: usize = NF4_BLOCK / 2;
    assert!(numbers.start.is_multiple_of(NF4_BLOCK) && out.len() == numbers.len().div_ceil(2), "codes of {numbers:?}");
    let first_block = numbers.start / NF4_BLOCK;
    on_threads(out, BLOCK_BYTES, |first_byte, out| {
        let first = first_block + first_byte / BLOCK_BYTES;
        let blocks = first..first + out.len().div_ceil(BLOCK_BYTES);
        each_stretch(blocks, len.min(numbers.end), &read, |blocks, values| {
            let bytes = &mut out[(blocks.start - first) * BLOCK_BYTES..];
            for ((block, values), bytes) in blocks.zip(values.chunks(NF4_BLOCK)).zip(bytes.chunks_mut(BLOCK_BYTES)) {
                encode(values, absmax[block], bytes);
            }
            Ok(())
        })
    })
}

/// A matrix's factors after the second quantisation.
pub(crate) struct Nested {
    pub codes: Vec<u8>,
    /// Largest magnitudes of blocks of 256.
    pub absmax: Vec<f32>,
    pub offset: f32,
}

impl Nested {
    pub fn of(factors: &[f32]) -> Nested {
        let offset = mean(factors);
        let centred: Vec<f32> = factors.iter().map(|factor| factor - offset).collect();
        let absmax: Vec<f32> = centred.chunks(NESTED_BLOCK).map(largest).collect();
        let codes = centred.chunks(NESTED_BLOCK).zip(&absmax).flat_map(|(block, &absmax)| {
            // Factors that are all the same leave nothing to code.
            let reciprocal = if absmax > 0.0 { 1.0 / absmax } else { 0.0 };
            block.iter().map(move |value| nearest(value * reciprocal))
        });
        Nested { codes: codes.collect(), absmax, offset }
    }

    /// The factors that these stand for.
    pub fn expanded(&self) -> Vec<f32> {
        expand_nested(&self.codes, &DYNAMIC_MAP, &self.absmax, self.offset)
    }
}

pub(super) fn expand_nested(codes: &[u8], map: &[f32; MAP_LEN], absmax: &[f32], offset: f32) -> Vec<f32> {
    let blocks = codes.chunks(NESTED_BLOCK).zip(absmax);
    let factors =
        blocks.flat_map(|(block, absmax)| block.iter().map(move |&code| map[code as usize] * absmax + offset));
    factors.collect()
}

/// The index of the number of the dynamic map that is nearest to a number between -1 and 1, after that was rounded to one of 2¹⁶
/// steps: bitsandbytes has a table of these on CPUs.
fn nearest(value: f32) -> u8 {
    const STEPS: f32 = 65535.0;
    let step = ((value.clamp(-1.0, 1.0) + 1.0) * 0.5).mul_add(STEPS, 0.5) as u16;
    let value = -1.0 + 2.0 * f32::from(step) / STEPS;
    DYNAMIC_MIDPOINTS.partition_point(|midpoint| *midpoint < value) as u8
}

/// Magnitudes are ordered as their bits are, and those of what is not finite are the largest.
fn largest(block: &[f32]) -> f32 {
    f32::from_bits(block.iter().fold(0, |largest, value| largest.max(value.abs().to_bits())))
}

/// Writes the codes of a block.
fn encode(values: &[f32], absmax: f32, out: &mut [u8]) {
    // Zeros stay zeros.
    let reciprocal = if absmax > 0.0 { 1.0 / absmax } else { 0.0 };
    let mut scaled = [0.0f32; NF4_BLOCK];
    scaled.iter_mut().zip(values).for_each(|(scaled, value)| *scaled = value * reciprocal);
    // Midpoint by midpoint, so that the compiler takes several numbers at a time.
    let mut codes = [0u32; NF4_BLOCK];
    for midpoint in MIDPOINTS {
        codes.iter_mut().zip(&scaled).for_each(|(code, scaled)| *code += u32::from(*scaled > midpoint));
    }
    // A last byte of one number has 0 in its lower half.
    codes[values.len()..].fill(0);
    let bytes = codes.chunks_exact(2).map(|pair| (pair[0] << 4 | pair[1]) as u8);
    out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = byte);
}

/// Reads these blocks of `len` numbers a few at a time: `work(blocks, their numbers)`.
fn each_stretch<E>(
    blocks: Range<usize>,
    len: usize,
    read: impl Fn(Range<usize>, &mut [f32]) -> Result<(), E>,
    mut work: impl FnMut(Range<usize>, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let mut values = vec![0.0; NF4_BLOCK * BLOCKS_AT_A_TIME.min(blocks.len())];
    for first in blocks.clone().step_by(BLOCKS_AT_A_TIME) {
        let stretch = first..blocks.end.min(first + BLOCKS_AT_A_TIME);
        let numbers = stretch.start * NF4_BLOCK..len.min(stretch.end * NF4_BLOCK);
        let values = &mut values[..numbers.len()];
        read(numbers, values)?;
        work(stretch, values)?;
    }
    Ok(())
}

/// Hands consecutive parts of `out`, each of whole grains, to as many threads as there are cores: `work(first, part)`.
fn on_threads<T: Send, E: Send>(
    out: &mut [T],
    grain: usize,
    work: impl Fn(usize, &mut [T]) -> Result<(), E> + Sync,
) -> Result<(), E> {
    /// Less work than this is done before a thread has begun.
    const LEAST: usize = 1 << 10;
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let part = out.len().div_ceil(cores).next_multiple_of(grain).max(LEAST.next_multiple_of(grain));
    if part >= out.len() {
        return work(0, out);
    }
    thread::scope(|scope| {
        let work = &work;
        let spawn = |(number, out)| {
            let thread = thread::Builder::new().name(format!("quantize-{number}"));
            thread.spawn_scoped(scope, move || work(number * part, out)).expect("the system has threads to give")
        };
        let threads: Vec<_> = out.chunks_mut(part).enumerate().map(spawn).collect();
        let join = |thread: thread::ScopedJoinHandle<Result<(), E>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).fold(Ok(()), Result::and)
    })
}
