//! What both directions compute of a chunk.
//!
//! Shapes in comments: C rows, tokens and padding; K and V in whole grains. Q and K̂ are the normalised queries, times K^-½, and
//! keys. With T = (I + M)^-1, M the part strictly below the diagonal of `β_i ⟨k_i, k_j⟩ D_ij`, and D_ij = e^(G_i - G_j):
//!
//! `N = T·β(V - αK̂·S); O = αQ·S + (QK̂ᵀ ⊙ D)·N; S' = γS + (εK̂)ᵀ·N`

use super::super::matrix::Element;
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::block::{Block, Cutter};
use super::fading::{Decays, Fading, lanes_until, unless_tiny};
use super::product::{Level, Multiply, Packing, Zeros, turned};
use super::rows::{Clear, LoadUnits, PerRow, Rows, ScaleRows};
use crate::kernel::DELTA_CHUNK;

/// The sizes of heads as products take them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub level: Level,
    /// In whole grains.
    pub key: usize,
    pub value: usize,
}

impl Sizes {
    pub fn new(level: Level, key: usize, value: usize) -> Sizes {
        let grain = level.grain();
        Sizes { level, key: key.next_multiple_of(grain), value: value.next_multiple_of(grain) }
    }

    /// C of a chunk of some tokens.
    pub fn rows(&self, tokens: usize) -> usize {
        tokens.next_multiple_of(self.level.grain())
    }
}

/// Working memory of a chunk.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    /// [2C, K]: Q above K̂.
    pub units: Block,
    /// [2C, C]: QK̂ᵀ above K̂K̂ᵀ, neither written above its diagonal.
    pub scores: Block,
    /// [C, C]: D.
    pub decays: Block,
    /// [C + 16, C]: M above zeros.
    mixing: Block,
    /// [2C, K]: rows of units times factors.
    pub scaled: Block,
    packing: Packing,
}

impl Chunk {
    pub fn cut(sizes: Sizes, cutter: &mut Cutter) -> Chunk {
        let Sizes { level, key, value } = sizes;
        let side = key.max(value);
        Chunk {
            units: cutter.block([2 * DELTA_CHUNK, key]),
            scores: cutter.block([2 * DELTA_CHUNK, DELTA_CHUNK]),
            decays: cutter.block([DELTA_CHUNK; 2]),
            mixing: cutter.block([DELTA_CHUNK + LANES, DELTA_CHUNK]),
            scaled: cutter.block([2 * DELTA_CHUNK, key]),
            packing: Packing::cut(
                level,
                [2 * DELTA_CHUNK, side.max(DELTA_CHUNK)],
                [key.max(2 * DELTA_CHUNK), value.max(DELTA_CHUNK)],
                cutter,
            ),
        }
    }

    /// The same memory for a chunk of `rows` rows.
    pub fn of_rows(&self, rows: usize) -> Chunk {
        Chunk {
            units: self.units.corner(2 * rows, self.units.cols),
            scores: self.scores.corner(2 * rows, rows),
            decays: self.decays.corner(rows, rows),
            mixing: self.mixing.corner(rows + LANES, rows),
            scaled: self.scaled.corner(2 * rows, self.scaled.cols),
            packing: self.packing,
        }
    }

    /// C.
    pub fn rows(&self) -> usize {
        self.decays.rows
    }

    pub fn queries(&self) -> Block {
        upper(self.units)
    }

    pub fn keys(&self) -> Block {
        lower(self.units)
    }

    /// `out = left · right + keep · out`
    ///
    /// # Safety
    /// As [`Packing::multiply`].
    pub unsafe fn multiply(&self, product: Multiply) {
        // SAFETY: the caller's promise.
        unsafe { self.packing.multiply(product) };
    }

    /// Normalises queries and keys; returns their factors.
    pub fn load_units<E: Element>(&self, q: Rows<E>, k: Rows<E>) -> [PerRow; 2] {
        let mut inverses = [[0.0; DELTA_CHUNK]; 2];
        let [of_queries, of_keys] = &mut inverses;
        vectorise(LoadUnits { from: q, scale: query_scale(q.dim), to: self.queries(), inverses: of_queries });
        vectorise(LoadUnits { from: k, scale: 1.0, to: self.keys(), inverses: of_keys });
        inverses
    }

    /// Computes the scores of queries and keys, or only those of keys.
    pub fn score(&self, only_keys: bool) {
        let (left, out) = if only_keys { (self.keys(), lower(self.scores)) } else { (self.units, self.scores) };
        // SAFETY: blocks of this chunk that do not overlap.
        unsafe {
            self.multiply(Multiply {
                out,
                left: left.into(),
                right: turned(self.keys()),
                keep: 0.0,
                zeros: Zeros::AboveResult,
            });
        }
    }

    pub fn decay(&self, fading: &Fading) {
        vectorise(Decays { fading, to: self.decays });
    }

    /// `weights = QK̂ᵀ ⊙ D`
    pub fn weigh(&self, weights: Block) {
        let factors = &[1.0; DELTA_CHUNK];
        vectorise(Weigh { scores: upper(self.scores), decays: self.decays, factors, end: 1, to: weights });
    }

    /// T, from the keys' scores and the decays.
    pub fn invert(&self, fading: &Fading, inverse: Block) {
        let to = self.mixing.corner(self.rows(), self.rows());
        vectorise(Weigh { scores: lower(self.scores), decays: self.decays, factors: &fading.takes, end: 0, to });
        vectorise(Clear(self.mixing.row_range(self.rows()..self.mixing.rows)));
        vectorise(Invert { m: self.mixing, inverse });
    }

    /// N of the values `v`, for K̂S in `read`, which it overwrites.
    pub fn news<E: Element>(&self, fading: &Fading, v: Rows<E>, read: Block, inverse: Block, news: Block) {
        vectorise(Residual { v, fading, read });
        // SAFETY: blocks that do not overlap.
        unsafe {
            self.multiply(Multiply {
                out: news,
                left: inverse.into(),
                right: read.into(),
                keep: 0.0,
                zeros: Zeros::AboveLeft,
            });
        }
    }

    /// `S = γS + (εK̂)ᵀ·N`
    pub fn advance(&self, fading: &Fading, news: Block, state: Block) {
        let scaled = lower(self.scaled);
        vectorise(ScaleRows { from: self.keys(), factors: &fading.to_end, to: scaled });
        // SAFETY: blocks that do not overlap.
        unsafe {
            self.multiply(Multiply {
                out: state,
                left: turned(scaled),
                right: news.into(),
                keep: fading.whole,
                zeros: Zeros::None,
            });
        }
    }
}

/// The factor of normalised queries.
pub(super) fn query_scale(dim: usize) -> f32 {
    1.0 / (dim as f32).sqrt()
}

pub(super) fn upper(block: Block) -> Block {
    block.row_range(0..block.rows / 2)
}

pub(super) fn lower(block: Block) -> Block {
    block.row_range(block.rows / 2..block.rows)
}

/// `to[i, j] = factors[i] · scores[i, j] · decays[i, j]` for j < i + end unless it is tiny, else 0.
struct Weigh<'a> {
    scores: Block,
    decays: Block,
    factors: &'a PerRow,
    end: usize,
    to: Block,
}

impl Vectorised for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.to.rows {
            let factor = s.splat(self.factors[row]);
            for col in (0..self.to.cols).step_by(LANES) {
                // SAFETY: whole vectors of blocks.
                unsafe {
                    let product = s.mul(s.load(self.scores.at(row, col)), s.load(self.decays.at(row, col)));
                    // A selection, since scores above the diagonal are whatever was there.
                    let kept = lanes_until(row + self.end, col);
                    let weight = unless_tiny(s, s.mul(product, factor));
                    s.store(self.to.at(row, col), s.select_bits(kept, weight, s.splat(0.0)));
                }
            }
        }
    }
}

/// `inverse = (I + m)^-1`, in squares of sixteen rows and columns. Of m, the part below the diagonal and sixteen rows more are read.
struct Invert {
    m: Block,
    inverse: Block,
}

impl Vectorised for Invert {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(self.m.rows >= self.inverse.rows + LANES, "{} rows of m for {}", self.m.rows, self.inverse.rows);
        let zero = s.splat(0.0);
        for first in (0..self.inverse.rows).step_by(LANES) {
            for col in (first + LANES..self.inverse.cols).step_by(LANES) {
                // SAFETY: whole vectors of a block, here and below.
                (first..first + LANES).for_each(|row| unsafe { s.store(self.inverse.at(row, col), zero) });
            }
            for col in (0..=first).step_by(LANES) {
                // The negative rows of I, and the product of m and the inverse's rows above.
                let mut sums = [zero; LANES];
                if col == first {
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = s.select_bits(1 << i, s.splat(-1.0), zero);
                    }
                }
                for above in col..first {
                    // SAFETY: above, and numbers of m.
                    unsafe {
                        let row = s.load(self.inverse.at(above, col));
                        for (i, sum) in sums.iter_mut().enumerate() {
                            *sum = s.mul_add(s.splat(self.m.at(first + i, above).read()), row, *sum);
                        }
                    }
                }
                for done in first..first + LANES {
                    let row = unless_tiny(s, s.sub(zero, sums[0]));
                    let below = self.m.at(done, done);
                    // SAFETY: as above, and rows that m has by the assertion. Those beyond the square change no sum that is kept.
                    unsafe {
                        s.store(self.inverse.at(done, col), row);
                        for i in 1..LANES {
                            let factor = s.splat(below.wrapping_add(i * self.m.stride).read());
                            sums[i - 1] = s.mul_add(factor, row, sums[i]);
                        }
                    }
                }
            }
        }
    }
}

/// `read = β(V - α · read)`
struct Residual<'a, E> {
    v: Rows<E>,
    fading: &'a Fading,
    read: Block,
}

impl<E: Element> Vectorised for Residual<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.read.rows {
            let (decay, take) = (s.splat(self.fading.since_start[row]), s.splat(self.fading.takes[row]));
            for col in (0..self.read.cols).step_by(LANES) {
                let at = self.read.at(row, col);
                // SAFETY: whole vectors of a block, and rows that nobody writes.
                unsafe {
                    let old = s.mul(decay, s.load(at));
                    s.store(at, s.mul(take, s.sub(self.v.load(s, row, col), old)));
                }
            }
        }
    }
}
