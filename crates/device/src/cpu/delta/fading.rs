//! Decays of a chunk's tokens, and their gradients.
//!
//! G, the running sum of g, is kept in two parts: among strong decays its differences, which are all that counts, are otherwise lost
//! to rounding.

use std::ops::Range;

use super::super::math::{exp, sigmoid};
use super::super::matrix::{Element, Matrix, matrix};
use super::super::simd::{LANES, Simd, Vectorised, vectorise};
use super::block::Block;
use super::rows::PerRow;
use crate::kernel::{DELTA_CHUNK, DeltaGates};

/// The gates' operands.
#[derive(Clone, Copy)]
pub(super) struct Gates<E> {
    fade: Matrix<E>,
    take: Matrix<E>,
    log_rate: Matrix<f32>,
    bias: Matrix<f32>,
}

impl<E: Element> Gates<E> {
    pub fn of(gates: &DeltaGates) -> Gates<E> {
        Gates {
            fade: matrix(&gates.fade),
            take: matrix(&gates.take),
            log_rate: matrix(&gates.log_rate),
            bias: matrix(&gates.bias),
        }
    }

    /// e^log_rate and the bias of a head.
    pub fn of_head(&self, head: usize) -> [f32; 2] {
        // SAFETY: the kernel's check: a number for each head, which nobody writes.
        unsafe { [self.log_rate.at(0, head).read().exp(), self.bias.at(0, head).read()] }
    }

    /// The number whose softplus fades states.
    pub fn fade(&self, token: usize, head: usize) -> f32 {
        // SAFETY: as above.
        unsafe { self.fade.at(token, head).read().to_f32() }
    }

    fn take(&self, token: usize, head: usize) -> f32 {
        // SAFETY: as above.
        unsafe { self.take.at(token, head).read().to_f32() }
    }
}

fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// A chunk's decays for one head. Rows beyond the last token neither fade nor take anything.
pub(super) struct Fading {
    /// g
    pub decays: PerRow,
    /// β
    pub takes: PerRow,
    /// The two parts of G.
    sums: [PerRow; 2],
    /// α = e^G, 0 if tiny.
    pub since_start: PerRow,
    /// ε = e^(G of the last row - G), 0 if tiny.
    pub to_end: PerRow,
    /// γ, the decay of the whole chunk.
    pub whole: f32,
}

impl Fading {
    pub fn new<E: Element>(gates: &Gates<E>, head: usize, tokens: Range<usize>) -> Fading {
        let zeros = [0.0; DELTA_CHUNK];
        let mut fading = Fading {
            decays: zeros,
            // Its sigmoid is zero.
            takes: [f32::NEG_INFINITY; DELTA_CHUNK],
            sums: [zeros; 2],
            since_start: zeros,
            to_end: zeros,
            whole: 0.0,
        };
        let [rate, bias] = gates.of_head(head);
        let mut sum = 0f64;
        for row in 0..DELTA_CHUNK {
            if row < tokens.len() {
                fading.decays[row] = -rate * softplus(gates.fade(tokens.start + row, head) + bias);
                fading.takes[row] = gates.take(tokens.start + row, head);
                sum += fading.decays[row] as f64;
            }
            let high = sum as f32;
            fading.sums[0][row] = high;
            fading.sums[1][row] = (sum - high as f64) as f32;
        }
        vectorise(Exponentials(&mut fading));
        fading
    }
}

struct Exponentials<'a>(&'a mut Fading);

impl Vectorised for Exponentials<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Fading { takes, sums: [high, low], since_start, to_end, whole, .. } = self.0;
        let (last_high, last_low) = (s.splat(high[DELTA_CHUNK - 1]), s.splat(low[DELTA_CHUNK - 1]));
        for row in (0..DELTA_CHUNK).step_by(LANES) {
            // SAFETY: whole vectors of arrays.
            unsafe {
                let [high, low] = [s.load(high.as_ptr().add(row)), s.load(low.as_ptr().add(row))];
                s.store(since_start.as_mut_ptr().add(row), unless_tiny(s, exp(s, high)));
                let left = s.add(s.sub(last_high, high), s.sub(last_low, low));
                s.store(to_end.as_mut_ptr().add(row), unless_tiny(s, exp(s, left)));
                let take = takes.as_mut_ptr().add(row);
                s.store(take, sigmoid(s, s.load(take)));
            }
        }
        *whole = since_start[DELTA_CHUNK - 1];
    }
}

/// `to[i, j] = e^(G_i - G_j)` for j <= i unless it is tiny, else 0.
pub(super) struct Decays<'a> {
    pub fading: &'a Fading,
    pub to: Block,
}

impl Vectorised for Decays<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let [high, low] = &self.fading.sums;
        for row in 0..self.to.rows {
            for col in (0..self.to.cols).step_by(LANES) {
                let mut decay = s.splat(0.0);
                if col <= row {
                    // SAFETY: whole vectors of arrays, which are at least as long as the rows.
                    let [highs, lows] = unsafe { [s.load(high.as_ptr().add(col)), s.load(low.as_ptr().add(col))] };
                    let sum = s.add(s.sub(s.splat(high[row]), highs), s.sub(s.splat(low[row]), lows));
                    decay = s.select_bits(lanes_until(row + 1, col), unless_tiny(s, exp(s, sum)), decay);
                }
                // SAFETY: whole vectors of a block.
                unsafe { s.store(self.to.at(row, col), decay) };
            }
        }
    }
}

/// Zero for numbers below 2⁻⁶²: their products may be subnormal, for which CPUs take a hundred cycles each, and they are lost
/// beside anything that did not fade. Measured: with strong decays, the rule takes two thirds of the time that it took without this.
#[inline(always)]
pub(super) fn unless_tiny<S: Simd>(s: S, x: S::Vector) -> S::Vector {
    const LEAST: f32 = 1.0 / (1u64 << 62) as f32;
    s.select_less(s.abs(x), s.splat(LEAST), s.splat(0.0), x)
}

/// The lanes of a vector that begins at column `col` which lie before column `end`.
#[inline(always)]
pub(super) fn lanes_until(end: usize, col: usize) -> u16 {
    ((1u32 << end.saturating_sub(col).min(LANES)) - 1) as u16
}
