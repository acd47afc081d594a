//! Random parameters.

use std::convert::Infallible;

use evenkeel_device::kernel::{Fill, Placement, RandomNormal};
use evenkeel_device::{DType, Queue, Tensor};
use evenkeel_random::seed_of;

use crate::parameters::load::fill_slice;
use crate::parameters::{Init, ParamSpec};
use crate::sharding::layout::Slice;

/// Fills a shard's part of a parameter with random numbers. Each depends on the seed, the parameter's name and its place in the
/// whole parameter.
pub(crate) fn draw(queue: &Queue, spec: &ParamSpec, part: &Tensor, seed: u64) {
    let seed = seed ^ hash_name(&spec.name);
    match spec.init {
        Init::Constant(value) => queue.launch(Fill { out: part.view(), value }),
        Init::Uniform { bound } => {
            draw_each(queue, spec, part, |element| (2.0 * share(seed_of(seed, element)) - 1.0) * bound)
        }
        Init::LogUniform { least, most } => {
            draw_each(queue, spec, part, |element| (least + (most - least) * share(seed_of(seed, element))).ln())
        }
        Init::Normal { deviation } => spec.slice.pieces().for_each(|piece| {
            let (first_row, first_col) = (piece.rows.start as u64, piece.cols.start as u64);
            queue.launch(RandomNormal {
                out: part.view().row_range(piece.held_rows).col_range(piece.held_cols),
                mean: 0.0,
                deviation,
                seed,
                placement: Placement { first_row, first_col, cols: spec.whole[1] as u64 },
            });
        }),
    }
}

/// All numbers of a parameter, as [`draw`] draws them for shards.
pub(crate) fn draw_whole(queue: &Queue, spec: &ParamSpec, seed: u64) -> Vec<f32> {
    /// Numbers on the device at a time.
    const NUMBERS: usize = 1 << 20;
    let [rows, cols] = spec.whole;
    let rows_at_a_time = (NUMBERS / cols.max(1)).clamp(1, rows.max(1));
    let mut numbers = Vec::with_capacity(rows * cols);
    for first in (0..rows).step_by(rows_at_a_time) {
        let held = first..rows.min(first + rows_at_a_time);
        let part = queue.tensor(held.len(), cols, DType::F32);
        draw(queue, &ParamSpec { slice: Slice::of_rows(held, cols), ..spec.clone() }, &part, seed);
        numbers.extend(queue.read(&part));
    }
    numbers
}

/// Fills the shard's part with a function of each element's place in the whole parameter.
fn draw_each(queue: &Queue, spec: &ParamSpec, part: &Tensor, number: impl Fn(u64) -> f32) {
    let drawn = fill_slice(queue, part, spec, |elements, out| -> Result<(), Infallible> {
        elements.zip(out).for_each(|(element, out)| *out = number(element as u64));
        Ok(())
    });
    drawn.expect("drawing cannot fail");
}

/// From 0 to below 1, from 24 of a key's bits.
fn share(key: u64) -> f32 {
    (key >> 40) as f32 * (1.0 / (1 << 24) as f32)
}

/// FNV-1a: enough to give each parameter its own stream of random numbers.
fn hash_name(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3))
}
