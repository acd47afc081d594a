//! A run's events, and the sinks that show them, write them down or sum them up.
//!
//! A [`RunEvent`] is plain data. A [`Sink`] takes events and turns them into text or bytes on a [`Write`](std::io::Write): progress
//! lines, metrics, TensorBoard's records, the loss curve, the summary. Nothing here opens a file, asks a clock or looks for a
//! terminal: callers know them. This crate knows no other crate of the workspace. [`svg`] is the basis of all drawings, those of
//! other crates too.

mod curve;
mod events;
mod metrics;
mod number;
mod progress;
mod summary;
pub mod svg;
mod tensorboard;
pub mod text;

use std::fmt;
use std::time::Duration;

use progress::value;
use serde::{Deserialize, Serialize};

pub use curve::Curve;
pub use events::{BalanceReport, Begun, BestEvaluation, RunEvent, Sink};
pub use metrics::{MetricsLog, RankMetrics};
pub use progress::{ProgressLine, ProgressOptions, Style};
pub use summary::Summary;
pub use tensorboard::{EventWriter, event_file_name, events_until, is_event_file_name};

/// A model's input, and so the words for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reads {
    Tokens,
    /// Texts with a label each.
    Texts,
    Images,
}

impl Reads {
    /// The parts of a sequence, a text or an image.
    pub fn unit(self) -> &'static str {
        match self {
            Reads::Tokens | Reads::Texts => "tokens",
            Reads::Images => "patches",
        }
    }
}

/// The record of one training step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    pub reads: Reads,
    /// From 1.
    pub step: u64,
    /// Epochs done, such as 1.25.
    #[serde(with = "number")]
    pub epoch: f64,
    /// The mean over the step's labels.
    #[serde(with = "number")]
    pub loss: f64,
    /// The loss of balance among experts, if training has one, without its coefficient.
    #[serde(with = "number::option")]
    pub balance_loss: Option<f64>,
    /// The tokens of a layer's busiest expert beside an equal share, and the share of experts without any; means over layers.
    #[serde(with = "number::option")]
    pub expert_load: Option<f64>,
    #[serde(with = "number::option")]
    pub idle_experts: Option<f64>,
    #[serde(with = "number")]
    pub lr: f64,
    /// Before clipping.
    #[serde(with = "number")]
    pub grad_norm: f64,
    /// Total of all steps so far.
    pub tokens: u64,
    /// In this step.
    pub step_tokens: u64,
    pub step_duration: Duration,
    #[serde(with = "number")]
    pub tokens_per_s: f64,
    /// Share of the machine's peak that the step reached; `None` if the peak is not known.
    #[serde(with = "number::option")]
    pub peak_share: Option<f64>,
    pub memory_bytes: u64,
    /// Since the beginning of the run, resumed parts included.
    pub elapsed: Duration,
    /// The share of the run that is done.
    #[serde(with = "number")]
    pub share: f64,
    /// The step changed no weight, because its loss or gradients were not finite.
    pub skipped: bool,
    /// Bad records skipped in all steps so far.
    pub records_skipped: u64,
    /// Records longer than a row, which lost their end, in all steps so far.
    pub records_truncated: u64,
}

impl StepMetrics {
    /// Time left, at the speed so far.
    pub fn left(&self) -> Option<Duration> {
        let seconds = self.elapsed.as_secs_f64() * (1.0 - self.share) / self.share;
        Duration::try_from_secs_f64(seconds).ok()
    }
}

/// The record of one evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalMetrics {
    pub reads: Reads,
    #[serde(with = "number")]
    pub loss: f64,
    /// The share of labels that got the highest logit.
    #[serde(with = "number")]
    pub accuracy: f64,
}

impl EvalMetrics {
    /// Only for the tokens of a language model: the label of a text or an image has none.
    pub fn perplexity(&self) -> Option<f64> {
        (self.reads == Reads::Tokens).then(|| self.loss.exp())
    }
}

impl fmt::Display for EvalMetrics {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let perplexity = self.perplexity().map(|perplexity| format!("perplexity {}, ", value(perplexity, 2)));
        let (loss, accuracy) = (value(self.loss, 4), text::percent(self.accuracy));
        write!(out, "loss {loss}, {}accuracy {accuracy}", perplexity.unwrap_or_default())
    }
}

#[cfg(test)]
fn example() -> StepMetrics {
    StepMetrics {
        reads: Reads::Tokens,
        step: 120,
        epoch: 0.25,
        loss: 3.4521,
        balance_loss: None,
        expert_load: None,
        idle_experts: None,
        lr: 3e-4,
        grad_norm: 1.2345,
        tokens: 983_040,
        step_tokens: 8192,
        step_duration: Duration::from_secs(2),
        tokens_per_s: 12_345.6,
        peak_share: Some(0.4142),
        memory_bytes: 3 << 29,
        elapsed: Duration::from_secs(80),
        share: 0.25,
        skipped: false,
        records_skipped: 0,
        records_truncated: 0,
    }
}
