//! Which weights of a tile are dropped.

use super::super::random::{UNIFORM_STEPS, uniform_steps, word};
use super::super::simd::{LANES, Simd};
use super::{TILE, Tile};
use crate::kernel::{AttentionDropout, seed_of};

/// What becomes of weights. Decided outside of the loops over them, so that keeping all costs nothing.
pub(super) trait Dropping: Copy {
    /// What is left of numbers of a key, counted from its segment's start, and sixteen queries of a tile from `lanes` on.
    /// It is not divided by the share that is kept: see [`kept_factor`].
    fn keep<S: Simd, const N: usize>(self, s: S, key: usize, lanes: usize, numbers: [S::Vector; N]) -> [S::Vector; N];
}

#[derive(Clone, Copy)]
pub(super) struct KeepAll;

impl Dropping for KeepAll {
    #[inline(always)]
    fn keep<S: Simd, const N: usize>(self, _: S, _: usize, _: usize, numbers: [S::Vector; N]) -> [S::Vector; N] {
        numbers
    }
}

/// The random numbers of a tile: its queries' keys, in halves.
pub(super) struct TileNoise {
    lower: [u32; TILE],
    upper: [u32; TILE],
    /// Steps of a uniform number below which a weight is dropped.
    dropped_below: f32,
}

impl TileNoise {
    #[inline(always)]
    pub fn of(dropout: &AttentionDropout, tile: &Tile) -> TileNoise {
        let seed = seed_of(dropout.seed, dropout.first_head + tile.head as u64);
        let first = dropout.first_token + tile.tokens.start as u64;
        let (mut lower, mut upper) = ([0; TILE], [0; TILE]);
        // Lanes beyond the last query have numbers too, which nobody uses.
        for lane in 0..TILE {
            let key = seed_of(seed, first + lane as u64);
            lower[lane] = key as u32;
            upper[lane] = (key >> 32) as u32;
        }
        TileNoise { lower, upper, dropped_below: dropout.probability * UNIFORM_STEPS }
    }
}

impl Dropping for &TileNoise {
    #[inline(always)]
    fn keep<S: Simd, const N: usize>(
        self,
        s: S,
        key: usize,
        lanes: usize,
        mut numbers: [S::Vector; N],
    ) -> [S::Vector; N] {
        let mut steps = [0f32; LANES];
        // Written out, since what a closure computes is not compiled for the vectors' level.
        for (lane, step) in steps.iter_mut().enumerate() {
            *step = uniform_steps(word([self.lower[lanes + lane], self.upper[lanes + lane]], key as u32));
        }
        // SAFETY: the array has LANES elements.
        let steps = unsafe { s.load(steps.as_ptr()) };
        for number in &mut numbers {
            *number = s.select_less(steps, s.splat(self.dropped_below), s.splat(0.0), *number);
        }
        numbers
    }
}

/// The dropout that a kernel asks for, if it drops anything.
pub(super) fn active(dropout: Option<AttentionDropout>) -> Option<AttentionDropout> {
    dropout.filter(|dropout| dropout.probability > 0.0)
}

/// What the weights that are kept are multiplied by.
pub(super) fn kept_factor(dropout: Option<AttentionDropout>) -> f32 {
    dropout.map_or(1.0, |dropout| 1.0 / (1.0 - dropout.probability))
}
