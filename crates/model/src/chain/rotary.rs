//! Rotary position tables: cosines and sines of every position's angles.

use evenkeel_device::{DType, Queue, Tensor};

use crate::Config;

/// One rotation of heads by position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    pub base: f64,
    /// Rotated elements per head.
    pub dim: usize,
    pub scaling: Scaling,
}

/// How frequencies are stretched for longer contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    None,
    Linear {
        factor: f64,
    },
    /// Long waves are stretched, short ones kept, those between blended.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original_positions: f64,
    },
}

impl Rotary {
    /// The angle per position of each rotated pair.
    fn frequencies(&self) -> Vec<f64> {
        let pairs = self.dim / 2;
        let plain = (0..pairs).map(|i| self.base.powf(-2.0 * i as f64 / self.dim as f64));
        plain.map(|frequency| self.scaled(frequency)).collect()
    }

    fn scaled(&self, frequency: f64) -> f64 {
        match self.scaling {
            Scaling::None => frequency,
            Scaling::Linear { factor } => frequency / factor,
            Scaling::Llama3 { factor, low, high, original_positions } => {
                let waves = original_positions * frequency / std::f64::consts::TAU;
                let kept = ((waves - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
        }
    }

    /// Rows of cosines and sines for positions `0..positions`.
    fn table(&self, queue: &Queue, positions: usize) -> Tensor {
        let (frequencies, table) = (self.frequencies(), queue.tensor(positions, self.dim, DType::F32));
        let filled = queue.write_rows(&table, |first, rows| -> Result<(), std::convert::Infallible> {
            for (position, row) in (first..).zip(rows.chunks_exact_mut(self.dim)) {
                let (cosines, sines) = row.split_at_mut(self.dim / 2);
                for ((frequency, cosine), sine) in frequencies.iter().zip(cosines).zip(sines) {
                    let angle = position as f64 * frequency;
                    (*cosine, *sine) = (angle.cos() as f32, angle.sin() as f32);
                }
            }
            Ok(())
        });
        filled.expect("infallible");
        table
    }
}

/// A model's rotations on a device, for sequences up to a given length.
pub struct RotaryTables {
    tables: Vec<Tensor>,
}

impl RotaryTables {
    pub fn new(config: &Config, queue: &Queue, positions: usize) -> RotaryTables {
        RotaryTables { tables: config.rotaries.iter().map(|rotary| rotary.table(queue, positions)).collect() }
    }

    pub(crate) fn table(&self, index: usize) -> &Tensor {
        &self.tables[index]
    }
}
