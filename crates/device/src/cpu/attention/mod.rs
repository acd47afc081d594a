//! Attention that never holds a whole row of scores: key blocks stream past tiles of queries.
//!
//! A tile is [`TILE`] tokens of one query head. Its scores against a block of keys are kept transposed, keys down and queries
//! across, so that the softmax of sixteen queries is sixteen independent lanes, masks are comparisons of lanes, and sums over
//! keys are transposed too: weights are never turned. A [`Level`] packs the operands and multiplies them: by AMX tiles in bf16,
//! or widened to f32 by fused multiply-adds.
//!
//! Shapes in comments: W is the head dimension rounded up to what the level multiplies at once, the padding zero.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
mod backward;
mod division;
mod dropout;
mod forward;
pub(super) mod fused;
mod level;
mod mask;
mod pack;
mod scores;
mod sinks;
mod sums;

use std::ops::Range;

use super::matrix::{Element, Matrix, matrix};
use super::simd::LANES;
use crate::Heads;
use crate::kernel::{Mask, Segments};
use level::Level;

/// Tokens of a tile: two vectors of scores.
const TILE: usize = 2 * LANES;
/// Keys that stream past the tiles together.
const KEY_BLOCK: usize = 64;
/// Calls `$run::<E, L>` with the element type of `$dtype` and the level that `$bf16` (a `Bf16Level`) means for it.
macro_rules! with_level {
    ($dtype:expr, $bf16:expr, $run:ident($($argument:expr),*)) => {
        match ($dtype, $bf16) {
            #[cfg(target_arch = "x86_64")]
            ($crate::DType::Bf16, $crate::cpu::features::Bf16Level::AmxTiles) => {
                $run::<half::bf16, $crate::cpu::attention::amx::Tiles>($($argument),*)
            }
            ($crate::DType::Bf16, _) => $run::<half::bf16, $crate::cpu::attention::fused::Fused>($($argument),*),
            ($crate::DType::F32, _) => $run::<f32, $crate::cpu::attention::fused::Fused>($($argument),*),
            ($crate::DType::U32, _) => panic!("indices are not numbers"),
        }
    };
}
use with_level;

/// One tensor's heads as pointers.
#[derive(Clone, Copy)]
struct HeadRows<E> {
    matrix: Matrix<E>,
    step: usize,
    dim: usize,
}

impl<E: Element> HeadRows<E> {
    fn of(heads: &Heads) -> HeadRows<E> {
        HeadRows { matrix: matrix(&heads.view), step: heads.step, dim: heads.dim }
    }

    #[inline(always)]
    fn at(&self, token: usize, head: usize) -> *mut E {
        self.matrix.at(token, head * self.step)
    }
}

/// The division of the work, by shape alone.
#[derive(Clone, Copy)]
struct Shape {
    /// Query heads to a key head.
    group: usize,
    dim: usize,
    /// W.
    width: usize,
    mask: Mask,
    scale: f32,
    /// Tokens of a query block.
    query_block: usize,
}

impl Shape {
    /// A query block has about `query_rows` rows, all heads of a group together.
    fn new<E: Element, L: Level<E>>(q: &Heads, k: &Heads, mask: Mask, scale: f32, query_rows: usize) -> Shape {
        assert_ne!(mask.window, Some(0), "a window without the query's own token hides everything");
        // The largest score is then also the largest before it is scaled.
        assert!(scale > 0.0, "scores are multiplied by {scale}, not by a positive number");
        let group = q.count / k.count;
        let query_block = (query_rows / group / TILE * TILE).max(TILE);
        Shape { group, dim: q.dim, width: q.dim.next_multiple_of(L::WIDTH), mask, scale, query_block }
    }

    /// Tiles of a whole query block.
    fn tiles_at_most(&self) -> usize {
        self.group * self.query_block / TILE
    }

    /// The query blocks of a segment.
    fn blocks(&self, len: usize) -> usize {
        len.div_ceil(self.query_block)
    }

    /// A query block's tokens, counted from the segment's start.
    fn block(&self, number: usize, len: usize) -> Range<usize> {
        number * self.query_block..len.min((number + 1) * self.query_block)
    }
}

/// A block of queries of all heads of one group. Its tiles are numbered by token first, so that those which see a key
/// follow one another.
#[derive(Clone)]
struct QueryBlock {
    /// The segment's tokens.
    segment: Range<usize>,
    /// Counted from the segment's start.
    queries: Range<usize>,
    first_head: usize,
    group: usize,
}

/// One tile of a block of queries.
struct Tile {
    /// The query head.
    head: usize,
    /// Counted from the segment's start.
    queries: Range<usize>,
    /// Counted from the first of all.
    tokens: Range<usize>,
}

impl QueryBlock {
    fn new(shape: &Shape, segment: &Range<usize>, queries: Range<usize>, key_head: usize) -> QueryBlock {
        QueryBlock { segment: segment.clone(), queries, first_head: key_head * shape.group, group: shape.group }
    }

    #[inline(always)]
    fn tiles(&self) -> usize {
        self.queries.len().div_ceil(TILE) * self.group
    }

    #[inline(always)]
    fn tile(&self, number: usize) -> Tile {
        let start = self.queries.start + number / self.group * TILE;
        let queries = start..self.queries.end.min(start + TILE);
        let tokens = self.segment.start + queries.start..self.segment.start + queries.end;
        Tile { head: self.first_head + number % self.group, queries, tokens }
    }
}

/// Cuts memory in parts.
struct Cutter<'a>(&'a mut [f32]);

impl Cutter<'_> {
    fn cut(&mut self, len: usize) -> *mut f32 {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(len);
        self.0 = rest;
        part.as_mut_ptr()
    }
}

/// The segments that have tokens.
fn filled(segments: &Segments) -> Vec<Range<usize>> {
    segments.iter().filter(|segment| !segment.is_empty()).collect()
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use half::bf16;

    use super::super::features::{Bf16Level, bf16_level};
    use super::super::{Run, Team};
    use super::*;
    use crate::kernel::{Attention, AttentionBackward, AttentionDropout, ScoreChanges};
    use crate::{Extent, View};

    fn numbers(len: usize, seed: u64) -> Vec<bf16> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| bf16::from_f32(next())).collect()
    }

    fn view<E: Element>(values: &mut [E], rows: usize) -> View {
        let cols = values.len() / rows;
        View::new(values.as_mut_ptr() as u64, Extent { rows, cols, stride: cols, dtype: E::DTYPE })
    }

    /// The cap, and numbers of the heads, of scores that are changed.
    const CAP: f32 = 2.0;
    const SLOPES: [f32; 4] = [0.5, 0.0, 0.02, -0.01];
    const SINKS: [f32; 4] = [1.0, -2.0, 0.0, 3.0];

    const DROPOUT: AttentionDropout = AttentionDropout { probability: 0.2, seed: 7, first_head: 2, first_token: 100 };

    /// out, dq, dk and dv at a level.
    fn compute(
        level: Bf16Level,
        dim: usize,
        mask: Mask,
        segments: &Segments,
        dropout: Option<AttentionDropout>,
        changes: bool,
    ) -> [Vec<f32>; 4] {
        let heads = 4;
        let key_heads = 2;
        let tokens = segments.tokens();
        let scale = 1.5 / (dim as f32).sqrt();
        let mut queries = [1, 2, 3, 4].map(|seed| numbers(tokens * heads * dim, seed));
        let mut keys = [5, 6, 7, 8].map(|seed| numbers(tokens * key_heads * dim, seed));
        let mut sums = vec![0f32; tokens * heads];
        let (mut slopes, mut sinks) = (SLOPES, SINKS);
        let [slopes, sinks] = [&mut slopes, &mut sinks].map(|numbers| Some(view(&mut numbers[..], 1)));
        let scores = if changes { ScoreChanges { cap: Some(CAP), slopes, sinks } } else { ScoreChanges::default() };
        let logsum = view(&mut sums, tokens);
        let [q, out, dout, dq] = queries.each_mut().map(|x| Heads::packed(view(x, tokens), heads));
        let [k, v, dk, dv] = keys.each_mut().map(|x| Heads::packed(view(x, tokens), key_heads));
        let mut team = Team::start("test", 2, |_| ()).unwrap();
        let forward = Attention {
            q,
            k,
            v,
            out,
            logsum,
            segments: segments.clone(),
            mask,
            scale,
            dropout,
            scores: scores.clone(),
        };
        forward::run_at(&forward, level, &mut team);
        let segments = segments.clone();
        let backward = AttentionBackward {
            q,
            k,
            v,
            out,
            logsum,
            dout,
            dq,
            dk,
            dv,
            segments,
            mask,
            scale,
            dropout,
            scores,
            dsinks: None,
        };
        backward::run_at(&backward, level, &mut team);
        [&queries[1], &queries[3], &keys[2], &keys[3]].map(|x| x.iter().map(|x| x.to_f32()).collect())
    }

    // Tasks share the sums of some of these segments; others are computed twice.
    #[test]
    fn working_memory_is_known_from_the_shape() {
        let heads = 4;
        let key_heads = 2;
        let scale = 0.3;
        for (dim, offsets) in [(16, vec![0, 30, 60]), (64, vec![0, 200]), (40, vec![0, 1, 500])] {
            let segments = Segments::new(offsets);
            let tokens = segments.tokens();
            let mask = Mask { causal: true, window: None };
            let mut queries = [1, 2, 3, 4].map(|seed| numbers(tokens * heads * dim, seed));
            let mut keys = [5, 6, 7, 8].map(|seed| numbers(tokens * key_heads * dim, seed));
            let mut sums = vec![0f32; tokens * heads];
            let logsum = view(&mut sums, tokens);
            let [q, out, dout, dq] = queries.each_mut().map(|x| Heads::packed(view(x, tokens), heads));
            let [k, v, dk, dv] = keys.each_mut().map(|x| Heads::packed(view(x, tokens), key_heads));
            let dropout = None;
            let mut numbers = [0f32; 4];
            let numbers = Some(view(&mut numbers[..], 1));
            let scores = ScoreChanges { sinks: numbers, ..ScoreChanges::default() };
            let forward = Attention {
                q,
                k,
                v,
                out,
                logsum,
                segments: segments.clone(),
                mask,
                scale,
                dropout,
                scores: scores.clone(),
            };
            let backward = AttentionBackward {
                q,
                k,
                v,
                out,
                logsum,
                dout,
                dq,
                dk,
                dv,
                segments,
                mask,
                scale,
                dropout,
                scores,
                dsinks: numbers,
            };
            let mut team = Team::start("test", 1, |_| ()).unwrap();
            forward.run(&mut team);
            assert_eq!(team.working_memory(), forward.working_memory(), "forward, dimension {dim}");
            backward.run(&mut team);
            let both = forward.working_memory().max(backward.working_memory());
            assert_eq!(team.working_memory(), both, "backward, dimension {dim}");
        }
    }

    // The longer segments have no room for sums in tests, so their scores are computed twice.
    #[test]
    fn tiles_and_fused_multiply_adds_agree_on_bf16() {
        if bf16_level() < Bf16Level::AmxTiles {
            println!("skipped: this CPU has no AMX tiles");
            return;
        }
        for (causal, window) in [(true, None), (false, None), (true, Some(40)), (false, Some(100))] {
            for (dim, offsets, dropout, changes) in [
                (64, vec![0, 60, 260, 261], None, false),
                (64, vec![0, 60, 260, 261], Some(DROPOUT), false),
                (64, vec![0, 60, 260, 261], Some(DROPOUT), true),
                (40, vec![0, 500], None, false),
                (40, vec![0, 500], None, true),
                (16, vec![0, 33, 400], Some(DROPOUT), false),
            ] {
                let mask = Mask { causal, window };
                let segments = Segments::new(offsets);
                let [tiles, fused] = [Bf16Level::AmxTiles, Bf16Level::Widen]
                    .map(|level| compute(level, dim, mask, &segments, dropout, changes));
                for (name, (tiles, fused)) in ["out", "dq", "dk", "dv"].into_iter().zip(tiles.iter().zip(&fused)) {
                    let size: f32 = fused.iter().map(|x| x * x).sum();
                    let difference: f32 = tiles.iter().zip(fused).map(|(a, b)| (a - b) * (a - b)).sum();
                    let error = (difference / size).sqrt();
                    // Both are rounded to bf16, the tiles' weights too.
                    assert!(
                        error < 6e-3,
                        "{name} of dimension {dim}, {mask:?}, {segments:?}, {dropout:?}, {changes}: {error:.1e}"
                    );
                }
            }
        }
    }
}
