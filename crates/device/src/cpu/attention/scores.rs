//! Changes scores between their product and the softmax: see [`ScoreChanges`].

use super::super::math::tanh;
use super::super::matrix::{Matrix, matrix};
use super::super::simd::{LANES, Simd};
use super::{TILE, Tile};
use crate::kernel::ScoreChanges;

/// The maximum before the first score. It is finite, so that a query without keys so far subtracts no infinities.
const LOWEST: f32 = -1e30;

/// The changes that a kernel asks for.
#[derive(Clone, Copy)]
pub(super) struct Changes {
    scale: f32,
    cap: Option<f32>,
    slopes: Option<Matrix<f32>>,
    sinks: Option<Matrix<f32>>,
}

impl Changes {
    pub fn new(scores: &ScoreChanges, scale: f32) -> Changes {
        let of = |view: &crate::View| matrix(view);
        let (slopes, sinks) = (scores.slopes.as_ref().map(of), scores.sinks.as_ref().map(of));
        Changes { scale, cap: scores.cap, slopes, sinks }
    }

    /// Whether scores themselves are changed.
    #[inline(always)]
    pub fn any(&self) -> bool {
        self.cap.is_some() || self.slopes.is_some()
    }

    /// The factor by which scores are to be multiplied after the changes, which scale them too.
    #[inline(always)]
    pub fn scale_after(&self) -> f32 {
        if self.any() { 1.0 } else { self.scale }
    }

    /// Whether [`Changes::apply`] gives derivatives.
    #[inline(always)]
    pub fn caps(&self) -> bool {
        self.cap.is_some()
    }

    /// The maximum subtracted from a head's scores, and the sum of exponentials, before the first score.
    #[inline(always)]
    pub fn begin(&self, head: usize) -> [f32; 2] {
        let Some(sinks) = self.sinks else { return [LOWEST, 0.0] };
        // SAFETY: the kernel's check: a sink for each head.
        let sink = unsafe { sinks.at(0, head).read() };
        let max = sink.max(LOWEST);
        [max, (sink - max).exp()]
    }

    /// Scales and changes the scores of a tile against keys from `first_key` on, counted from the segment's start. With a cap,
    /// `derivatives` are those of the changed scores by the scaled ones.
    ///
    /// # Safety
    /// `scores` and, unless null, `derivatives` are [rows, TILE]. The slopes live.
    #[inline(always)]
    pub unsafe fn apply<S: Simd>(
        &self,
        s: S,
        tile: &Tile,
        first_key: usize,
        rows: usize,
        scores: *mut f32,
        derivatives: *mut f32,
    ) {
        let (mut positions, mut slopes) = ([0.0; TILE], [0.0; TILE]);
        if let Some(of_heads) = self.slopes {
            // SAFETY: the kernel's check: a slope for each head.
            let slope = unsafe { of_heads.at(0, tile.head).read() };
            // Lanes beyond the last query keep a slope of zero, so that their weights stay finite.
            for (lane, query) in tile.queries.clone().enumerate() {
                positions[lane] = query as f32;
                slopes[lane] = slope;
            }
        }
        for lanes in (0..TILE).step_by(LANES) {
            // SAFETY: the caller's promise.
            unsafe {
                let position = s.load(positions.as_ptr().add(lanes));
                let slope = s.load(slopes.as_ptr().add(lanes));
                for row in 0..rows {
                    let at = row * TILE + lanes;
                    let mut score = s.mul(s.load(scores.add(at)), s.splat(self.scale));
                    if let Some(cap) = self.cap {
                        let share = tanh(s, s.mul(score, s.splat(1.0 / cap)));
                        if !derivatives.is_null() {
                            s.store(derivatives.add(at), s.sub(s.splat(1.0), s.mul(share, share)));
                        }
                        score = s.mul(share, s.splat(cap));
                    }
                    let distance = s.sub(s.splat((first_key + row) as f32), position);
                    s.store(scores.add(at), s.mul_add(slope, distance, score));
                }
            }
        }
    }
}
