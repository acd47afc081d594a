//! Rotary position tables: cosines and sines of every position's angles.

use std::f64::consts::TAU;
use std::ops::Range;

use evenkeel_device::{DType, Queue, Tensor, View};

use crate::Config;
use crate::config::family::Positions;

/// One rotation of heads by position.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    pub base: f64,
    /// Rotated elements per head.
    pub dim: usize,
    pub scaling: Scaling,
    /// How queries grow with their positions.
    pub growth: Option<Growth>,
}

/// The factor of queries that are n times as far as `positions`, rounded down: `1 + rate · ln(1 + n)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    pub rate: f64,
    pub positions: f64,
}

impl Growth {
    fn at(&self, position: f64) -> f64 {
        1.0 + self.rate * (position / self.positions).floor().ln_1p()
    }
}

/// How frequencies are stretched for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    None,
    Linear {
        factor: f64,
    },
    /// The first so many pairs turn as if all did, the others not at all.
    Proportional {
        factor: f64,
        pairs: usize,
    },
    /// The base grows with the sequence, beyond what the model was made for.
    Dynamic {
        factor: f64,
        positions: f64,
    },
    /// Long waves are stretched, short ones kept, those between blended.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original_positions: f64,
    },
    /// The same, blended by a ramp over pairs: those that turn more often than `fast` times within the original positions are kept,
    /// those that turn less often than `slow` times are stretched.
    Yarn {
        factor: f64,
        fast: f64,
        slow: f64,
        original_positions: f64,
        /// Whether the ramp begins and ends at whole pairs.
        is_truncated: bool,
        amplitude: f64,
    },
    /// A factor for each pair, for sequences up to the original positions and for longer ones.
    Long {
        short: Vec<f64>,
        long: Vec<f64>,
        original_positions: f64,
        amplitude: f64,
    },
}

impl Rotary {
    /// The angle per position of each rotated pair, for sequences of so many tokens.
    fn frequencies(&self, tokens: usize) -> Vec<f64> {
        let (pairs, dim, tokens) = (self.dim / 2, self.dim as f64, tokens as f64);
        let base = match self.scaling {
            Scaling::Dynamic { factor, positions } if dim > 2.0 => {
                let stretched = factor * tokens.max(positions) / positions - (factor - 1.0);
                self.base * stretched.powf(dim / (dim - 2.0))
            }
            _ => self.base,
        };
        (0..pairs).map(|pair| self.scaled(pair, base.powf(-2.0 * pair as f64 / dim), tokens)).collect()
    }

    fn scaled(&self, pair: usize, frequency: f64, tokens: f64) -> f64 {
        match &self.scaling {
            Scaling::None | Scaling::Dynamic { .. } => frequency,
            Scaling::Linear { factor } => frequency / factor,
            Scaling::Proportional { factor, pairs } => {
                if pair < *pairs {
                    frequency / factor
                } else {
                    0.0
                }
            }
            Scaling::Llama3 { factor, low, high, original_positions } => {
                let waves = original_positions * frequency / TAU;
                let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
            Scaling::Yarn { factor, fast, slow, original_positions, is_truncated, .. } => {
                // The pair that turns so often within the original positions.
                let turning =
                    |turns: &f64| self.dim as f64 * (original_positions / (turns * TAU)).ln() / (2.0 * self.base.ln());
                let (first, last) = (turning(fast), turning(slow));
                let (first, last) = if *is_truncated { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.0), last.min(self.dim as f64 - 1.0));
                let width = if first == last { 0.001 } else { last - first };
                let stretched = ((pair as f64 - first) / width).clamp(0.0, 1.0);
                stretched * frequency / factor + (1.0 - stretched) * frequency
            }
            Scaling::Long { short, long, original_positions, .. } => {
                let factors = if tokens > *original_positions { long } else { short };
                frequency / factors[pair]
            }
        }
    }

    /// The factor of all cosines and sines.
    fn amplitude(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn { amplitude, .. } | Scaling::Long { amplitude, .. } => amplitude,
            Scaling::None
            | Scaling::Linear { .. }
            | Scaling::Proportional { .. }
            | Scaling::Dynamic { .. }
            | Scaling::Llama3 { .. } => 1.0,
        }
    }

    /// Rows of cosines and sines for positions `0..positions`, times the factor that heads have there.
    fn table(&self, queue: &Queue, positions: usize, growth: Option<Growth>) -> Tensor {
        let frequencies = self.frequencies(positions);
        let table = queue.tensor(positions, self.dim, DType::F32);
        let filled = queue.write_rows(&table, |first, rows| -> Result<(), std::convert::Infallible> {
            for (position, row) in (first..).zip(rows.chunks_exact_mut(self.dim)) {
                let (cosines, sines) = row.split_at_mut(self.dim / 2);
                let amplitude = self.amplitude() * growth.map_or(1.0, |growth| growth.at(position as f64));
                for ((frequency, cosine), sine) in frequencies.iter().zip(cosines).zip(sines) {
                    let angle = position as f64 * frequency;
                    (*cosine, *sine) = ((amplitude * angle.cos()) as f32, (amplitude * angle.sin()) as f32);
                }
            }
            Ok(())
        });
        filled.expect("infallible");
        table
    }
}

/// A model's rotations, for sequences up to a given length, and its slopes, on a device.
/// Rotations that depend on a sequence's length take this one.
pub struct RotaryTables {
    tables: Vec<Tensor>,
    /// Those of queries, where they are others.
    of_queries: Vec<Option<Tensor>>,
    /// f32 [1, N]: by query head of the whole model, how much less a score is for each token of distance.
    slopes: Option<Tensor>,
}

impl RotaryTables {
    pub fn new(config: &Config, queue: &Queue, positions: usize) -> RotaryTables {
        let has_slopes = matches!(config.family.positions, Positions::Slopes);
        let slopes = has_slopes.then(|| queue.floats(1, config.heads, DType::F32, &slopes(config.heads)));
        let growing = |rotary: &Rotary| rotary.growth.map(|growth| rotary.table(queue, positions, Some(growth)));
        RotaryTables {
            tables: config.rotaries.iter().map(|rotary| rotary.table(queue, positions, None)).collect(),
            of_queries: config.rotaries.iter().map(growing).collect(),
            slopes,
        }
    }

    pub(crate) fn table(&self, index: usize, of_queries: bool) -> &Tensor {
        self.of_queries[index].as_ref().filter(|_| of_queries).unwrap_or(&self.tables[index])
    }

    /// Those of some query heads.
    pub(crate) fn slopes(&self, heads: Range<usize>) -> Option<View> {
        self.slopes.as_ref().map(|slopes| slopes.view().col_range(heads))
    }
}

/// Powers of 2^(-8/n) for n heads, a power of two; further heads lie halfway between those of twice as many.
fn slopes(heads: usize) -> Vec<f32> {
    let of_power = |heads: usize| (1..=heads).map(move |head| 2f64.powf(-8.0 * head as f64 / heads as f64) as f32);
    let largest = 1 << heads.max(1).ilog2();
    of_power(largest).chain(of_power(2 * largest).step_by(2)).take(heads).collect()
}
