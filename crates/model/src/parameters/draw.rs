//! Random parameters.

use std::convert::Infallible;

use evenkeel_device::kernel::{Fill, Placement, RandomNormal};
use evenkeel_device::{Queue, Tensor};
use evenkeel_random::seed_of;

use crate::parameters::load::fill_slice;
use crate::parameters::{Init, ParamSpec};

/// Fills a shard's part of a parameter with random numbers. Each depends on the seed, the parameter's name and its place in the
/// whole parameter.
pub(crate) fn draw(queue: &Queue, spec: &ParamSpec, part: &Tensor, seed: u64) {
    let seed = seed ^ hash_name(&spec.name);
    match spec.init {
        Init::Constant(value) => queue.launch(Fill { out: part.view(), value }),
        Init::Uniform { bound } => {
            let drawn = fill_slice(queue, part, spec, |elements, out| -> Result<(), Infallible> {
                elements.zip(out).for_each(|(element, out)| *out = uniform(seed_of(seed, element as u64), bound));
                Ok(())
            });
            drawn.expect("drawing cannot fail");
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

/// Between plus and minus a bound, from 24 of a key's bits.
fn uniform(key: u64, bound: f32) -> f32 {
    ((key >> 40) as f32 * (2.0 / (1 << 24) as f32) - 1.0) * bound
}

/// FNV-1a: enough to give each parameter its own stream of random numbers.
fn hash_name(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3))
}
