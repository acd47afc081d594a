//! Changes of attention's scores, and their plain formulas in f64.

#![allow(dead_code, reason = "each test uses its part")]

use evenkeel_device::kernel::ScoreChanges;
use evenkeel_device::{DType, Queue, Tensor};

#[derive(Clone, Copy, Debug)]
pub struct Changes {
    pub cap: Option<f32>,
    /// Whether each head has a slope.
    pub slopes: bool,
    /// The first head's sink; the others' are near.
    pub sinks: Option<f32>,
}

pub const UNCHANGED: Changes = Changes { cap: None, slopes: false, sinks: None };

/// Each change by itself, and together.
pub const ALL_CHANGES: [Changes; 6] = [
    Changes { cap: Some(1.5), ..UNCHANGED },
    Changes { slopes: true, ..UNCHANGED },
    Changes { sinks: Some(0.5), ..UNCHANGED },
    Changes { cap: Some(30.0), sinks: Some(9.0), ..UNCHANGED },
    Changes { cap: Some(0.7), slopes: true, sinks: None },
    EVERYTHING,
];

pub const EVERYTHING: Changes = Changes { cap: Some(2.0), slopes: true, sinks: Some(1.5) };

/// A score, and its derivative by the score before the changes.
pub struct Changed {
    pub score: f64,
    pub derivative: f64,
}

impl Changes {
    /// The third head has none, the fifth one that favours distant keys.
    fn slope(&self, head: usize) -> f32 {
        match head {
            _ if !self.slopes => 0.0,
            2 => 0.0,
            4 => -0.015,
            _ => 0.7 / (1 + 2 * head) as f32,
        }
    }

    pub fn sink(&self, head: usize) -> Option<f64> {
        self.sinks.map(|sink| (sink + [0.0, -1.25, 0.75][head % 3]) as f64)
    }

    /// The score of a key that lies so far after the query.
    pub fn apply(&self, head: usize, score: f64, distance: f64) -> Changed {
        let (score, derivative) = match self.cap.map(f64::from) {
            Some(cap) => (cap * (score / cap).tanh(), 1.0 - (score / cap).tanh().powi(2)),
            None => (score, 1.0),
        };
        Changed { score: score + self.slope(head) as f64 * distance, derivative }
    }

    /// The changes as a kernel takes them, and the tensors that hold them.
    pub fn scores(&self, queue: &Queue, heads: usize) -> (ScoreChanges, Vec<Tensor>) {
        let tensor = |of: &dyn Fn(usize) -> f32| {
            let numbers: Vec<f32> = (0..heads).map(of).collect();
            queue.floats(1, heads, DType::F32, &numbers)
        };
        let slopes = self.slopes.then(|| tensor(&|head| self.slope(head)));
        let sinks = self.sinks.map(|_| tensor(&|head| self.sink(head).unwrap_or(0.0) as f32));
        let view = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::view);
        let scores = ScoreChanges { cap: self.cap, slopes: view(&slopes), sinks: view(&sinks) };
        (scores, slopes.into_iter().chain(sinks).collect())
    }
}
