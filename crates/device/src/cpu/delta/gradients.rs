//! A chunk's gradients, given what was kept of it. With the names of [`chunk`](super::chunk):
//!
//! `dN = Pᵀ·dO + εK̂·dS'; X = Tᵀ·dN; F = dO·Nᵀ ⊙ D; E = -X·Nᵀ ⊙ D` strictly below the diagonal
//! `dQ = α·dO·Sᵀ + F·K̂; Z = -α·X·Sᵀ + E·K̂; dK̂ = βZ + ε·N·dS'ᵀ + Fᵀ·Q + Eᵀ·βK̂; dV = βX`
//! `dS = γdS' + (αQ)ᵀ·dO - (αβK̂)ᵀ·X; dβ = Σ X ⊙ V + Σ Z ⊙ K̂`
//!
//! and the gradient of G from every place where a decay stands.

use super::super::matrix::Element;
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::backward::Kept;
use super::block::{Block, Cutter};
use super::chunk::{Chunk, Sizes, lower, query_scale, upper};
use super::fading::{Fading, lanes_until};
use super::product::{Multiply, Operand, Zeros, turned};
use super::rows::{
    AddScaledRows, BlockDot, Clear, LoadRows, PerRow, RowDots, RowDotsWith, Rows, ScaleRows, StoreRows,
    StoreUnitGradients,
};
use crate::kernel::DELTA_CHUNK;

/// Working memory of a chunk's gradients.
#[derive(Clone, Copy)]
pub(super) struct GradientMemory {
    /// [C, C]: P.
    weights: Block,
    /// [2C, C]: F above E.
    scores: Block,
    /// [2C, V]: dO above X.
    outs: Block,
    /// [C, V]: dN.
    news: Block,
    /// [2C, K]: dQ above Z, of one value head.
    units: Block,
    /// [C, K]
    keys: Block,
    /// [2C, K]: dQ above dK̂, of all value heads.
    sums: Block,
}

impl GradientMemory {
    pub fn cut(sizes: Sizes, cutter: &mut Cutter) -> GradientMemory {
        let Sizes { key, value, .. } = sizes;
        GradientMemory {
            weights: cutter.block([DELTA_CHUNK; 2]),
            scores: cutter.block([2 * DELTA_CHUNK, DELTA_CHUNK]),
            outs: cutter.block([2 * DELTA_CHUNK, value]),
            news: cutter.block([DELTA_CHUNK, value]),
            units: cutter.block([2 * DELTA_CHUNK, key]),
            keys: cutter.block([DELTA_CHUNK, key]),
            sums: cutter.block([2 * DELTA_CHUNK, key]),
        }
    }

    /// The same memory for a chunk of `rows` rows.
    pub fn of_rows(&self, rows: usize) -> GradientMemory {
        GradientMemory {
            weights: self.weights.corner(rows, rows),
            scores: self.scores.corner(2 * rows, rows),
            outs: self.outs.corner(2 * rows, self.outs.cols),
            news: self.news.corner(rows, self.news.cols),
            units: self.units.corner(2 * rows, self.units.cols),
            keys: self.keys.corner(rows, self.keys.cols),
            sums: self.sums.corner(2 * rows, self.sums.cols),
        }
    }
}

/// The gradients of a head's gates: of g and β.
pub(super) struct GateGradients {
    pub decays: PerRow,
    pub takes: PerRow,
}

pub(super) struct ChunkGradients {
    /// With units and scores.
    pub chunk: Chunk,
    pub memory: GradientMemory,
}

impl ChunkGradients {
    pub fn clear(&self) {
        vectorise(Clear(self.memory.sums));
    }

    /// Adds one value head's share of dQ and dK̂, writes its dV, and turns `dstate` into the gradient of the state before the chunk.
    pub fn of_head<E: Element>(
        &self,
        fading: &Fading,
        kept: Kept,
        [v, dout, dv]: [Rows<E>; 3],
        dstate: Block,
    ) -> GateGradients {
        self.chunk.decay(fading);
        self.chunk.weigh(self.memory.weights);
        self.differentiate_news(fading, kept, dout, dstate);
        let x = lower(self.memory.outs);
        let mut takes = vectorise(RowDotsWith { a: x, b: v });
        let of_scores = self.differentiate_scores(fading, kept);
        let of_reads = self.differentiate_reads(fading, kept, dstate);
        let of_mixing = vectorise(RowDots { a: lower(self.memory.units), b: self.chunk.keys() });
        takes.iter_mut().zip(of_mixing).for_each(|(take, of_mixing)| *take += of_mixing);
        let of_whole = fading.whole * vectorise(BlockDot { a: kept.state, b: dstate });
        self.differentiate_state(fading, dstate);
        vectorise(ScaleRows { from: x, factors: &fading.takes, to: x });
        vectorise(StoreRows { from: x, to: dv });
        GateGradients { decays: decay_gradients(&of_scores, &of_reads, of_whole), takes }
    }

    /// Writes the gradients of queries and keys before they were normalised with these factors.
    pub fn store<E: Element>(&self, inverses: [PerRow; 2], dq: Rows<E>, dk: Rows<E>) {
        let [of_queries, of_keys] = &inverses;
        let (units, gradients) = (self.chunk.queries(), upper(self.memory.sums));
        vectorise(StoreUnitGradients { units, gradients, scale: query_scale(dq.dim), inverses: of_queries, to: dq });
        let (units, gradients) = (self.chunk.keys(), lower(self.memory.sums));
        vectorise(StoreUnitGradients { units, gradients, scale: 1.0, inverses: of_keys, to: dk });
    }

    /// dO and X.
    fn differentiate_news<E: Element>(&self, fading: &Fading, kept: Kept, dout: Rows<E>, dstate: Block) {
        let GradientMemory { weights, outs, news, .. } = self.memory;
        vectorise(LoadRows { from: dout, to: upper(outs) });
        let keys = lower(self.chunk.scaled);
        vectorise(ScaleRows { from: self.chunk.keys(), factors: &fading.to_end, to: keys });
        self.multiply(news, turned(weights), upper(outs).into(), 0.0, Zeros::BelowLeft);
        self.multiply(news, keys.into(), dstate.into(), 1.0, Zeros::None);
        self.multiply(lower(outs), turned(kept.inverse), news.into(), 0.0, Zeros::BelowLeft);
    }

    /// F and E; the gradient of G from D.
    fn differentiate_scores(&self, fading: &Fading, kept: Kept) -> PerRow {
        let GradientMemory { scores: gradients, outs, .. } = self.memory;
        self.multiply(gradients, outs.into(), turned(kept.news), 0.0, Zeros::AboveResult);
        let Chunk { scores, decays, .. } = self.chunk;
        vectorise(ScoreGradients { scores, decays, takes: &fading.takes, gradients })
    }

    /// The sums over ways through the states and the scores to queries and keys; the gradients of α and of ε, each times itself.
    fn differentiate_reads(&self, fading: &Fading, kept: Kept, dstate: Block) -> [PerRow; 2] {
        let GradientMemory { scores, outs, units, keys, sums, .. } = self.memory;
        let (scaled_keys, chunk) = (lower(self.chunk.scaled), &self.chunk);
        self.multiply(units, outs.into(), turned(kept.state), 0.0, Zeros::None);
        self.multiply(keys, kept.news.into(), turned(dstate), 0.0, Zeros::None);
        let minus = fading.since_start.map(|decay| -decay);
        vectorise(ScaleRows { from: upper(units), factors: &fading.since_start, to: upper(units) });
        vectorise(ScaleRows { from: lower(units), factors: &minus, to: lower(units) });
        vectorise(ScaleRows { from: keys, factors: &fading.to_end, to: keys });
        let of_queries = vectorise(RowDots { a: upper(units), b: chunk.queries() });
        let of_keys = vectorise(RowDots { a: lower(units), b: chunk.keys() });
        let since_start: PerRow = std::array::from_fn(|row| of_queries[row] + fading.takes[row] * of_keys[row]);
        let to_end = vectorise(RowDots { a: keys, b: chunk.keys() });

        self.multiply(units, scores.into(), chunk.keys().into(), 1.0, Zeros::AboveLeft);
        let ones = &[1.0; DELTA_CHUNK];
        vectorise(AddScaledRows { from: upper(units), factors: ones, to: upper(sums) });
        vectorise(AddScaledRows { from: lower(units), factors: &fading.takes, to: lower(sums) });
        vectorise(AddScaledRows { from: keys, factors: ones, to: lower(sums) });
        vectorise(ScaleRows { from: chunk.keys(), factors: &fading.takes, to: scaled_keys });
        self.multiply(lower(sums), turned(upper(scores)), chunk.queries().into(), 1.0, Zeros::BelowLeft);
        self.multiply(lower(sums), turned(lower(scores)), scaled_keys.into(), 1.0, Zeros::BelowLeft);
        [since_start, to_end]
    }

    /// dS, in place of dS'.
    fn differentiate_state(&self, fading: &Fading, dstate: Block) {
        let scaled = self.chunk.scaled;
        let of_keys: PerRow = std::array::from_fn(|row| -fading.since_start[row] * fading.takes[row]);
        vectorise(ScaleRows { from: self.chunk.queries(), factors: &fading.since_start, to: upper(scaled) });
        vectorise(ScaleRows { from: self.chunk.keys(), factors: &of_keys, to: lower(scaled) });
        self.multiply(dstate, turned(scaled), self.memory.outs.into(), fading.whole, Zeros::None);
    }

    fn multiply(&self, out: Block, left: Operand, right: Operand, keep: f32, zeros: Zeros) {
        // SAFETY: blocks of one task's memory; none of the products above writes what it reads.
        unsafe { self.chunk.multiply(Multiply { out, left, right, keep, zeros }) };
    }
}

/// The gradients of g: sums of those of G from each row to the last.
fn decay_gradients(of_scores: &PerRow, [since_start, to_end]: &[PerRow; 2], of_whole: f32) -> PerRow {
    let mut sum = of_whole as f64 + to_end.iter().map(|&of_row| of_row as f64).sum::<f64>();
    let mut decays = [0.0; DELTA_CHUNK];
    for row in (0..DELTA_CHUNK).rev() {
        sum += of_scores[row] as f64 + since_start[row] as f64 - to_end[row] as f64;
        decays[row] = sum as f32;
    }
    decays
}

/// Turns the products dO·Nᵀ and X·Nᵀ into F and E, in place. Returns the gradient of G from D.
struct ScoreGradients<'a> {
    scores: Block,
    decays: Block,
    takes: &'a PerRow,
    gradients: Block,
}

impl Vectorised for ScoreGradients<'_> {
    type Output = PerRow;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> PerRow {
        let count = self.decays.rows;
        let (mut of_rows, mut of_cols) = ([0.0; DELTA_CHUNK], [0.0; DELTA_CHUNK]);
        let zero = s.splat(0.0);
        for (row, of_row) in of_rows[..count].iter_mut().enumerate() {
            let take = s.splat(self.takes[row]);
            let mut sum = zero;
            for col in (0..count).step_by(LANES) {
                // SAFETY: whole vectors of blocks and of an array. Products above the diagonal are whatever was there.
                unsafe {
                    let decay = s.load(self.decays.at(row, col));
                    let [out_at, mixing_at] = [self.gradients.at(row, col), self.gradients.at(count + row, col)];
                    let [outs, mixing] = [lanes_until(row + 1, col), lanes_until(row, col)];
                    let out = s.select_bits(outs, s.mul(decay, s.load(out_at)), zero);
                    let mixed = s.select_bits(mixing, s.mul(decay, s.sub(zero, s.load(mixing_at))), zero);
                    s.store(out_at, out);
                    s.store(mixing_at, mixed);
                    let of_out = s.mul(out, s.load(self.scores.at(row, col)));
                    let of_mixing = s.mul(mixed, s.mul(take, s.load(self.scores.at(count + row, col))));
                    // The scores above the diagonal are whatever was there, too.
                    let share = s.add(s.select_bits(outs, of_out, zero), s.select_bits(mixing, of_mixing, zero));
                    sum = s.add(sum, share);
                    let to = of_cols.as_mut_ptr().add(col);
                    s.store(to, s.add(s.load(to), share));
                }
            }
            *of_row = s.sum(sum);
        }
        of_rows.iter_mut().zip(of_cols).for_each(|(row, col)| *row -= col);
        of_rows
    }
}
