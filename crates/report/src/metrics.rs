//! JSON lines: one object per step, and one per evaluation.

use std::borrow::Cow;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use crate::{EvalMetrics, RunEvent, Sink, StepMetrics, number};

/// Writes a line for each step and each evaluation, and hands it to the system at once.
pub struct MetricsLog<W: Write> {
    out: W,
}

impl<W: Write> MetricsLog<W> {
    pub fn new(out: W) -> MetricsLog<W> {
        MetricsLog { out }
    }

    pub fn out(&self) -> &W {
        &self.out
    }
}

impl<W: Write> Sink for MetricsLog<W> {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        match event {
            RunEvent::Step { metrics, ranks, .. } => write_step_metrics(&mut self.out, metrics, ranks)?,
            RunEvent::Evaluation { step, metrics, .. } => write_eval_metrics(&mut self.out, *step, metrics)?,
            _ => return Ok(()),
        }
        self.out.flush()
    }
}

/// A rank's work in a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankMetrics {
    /// Sum over all classes of work.
    #[serde(with = "number")]
    pub compute_s: f64,
    /// By the names of classes of work.
    #[serde(with = "number::named")]
    pub by_class_s: Vec<(Cow<'static, str>, f64)>,
    #[serde(with = "number")]
    pub late_s: f64,
    #[serde(with = "number")]
    pub wait_s: f64,
    /// The share of its products that it pruned.
    #[serde(with = "number")]
    pub left_out: f64,
    pub migrated_bytes: u64,
    #[serde(with = "number")]
    pub migration_s: f64,
    /// The width of its work: groups of heads and FFN columns.
    #[serde(with = "number")]
    pub head_groups: f64,
    pub columns: usize,
    /// Those of the stages at its place of a pipeline; 0 without one.
    pub units: usize,
}

/// Writes one line, with each rank's work if ranks are observed. Keys that do not apply are left out, so a key's values are all
/// of one kind.
fn write_step_metrics(out: &mut impl Write, metrics: &StepMetrics, watched: &[RankMetrics]) -> io::Result<()> {
    let some = |count: u64| (count > 0).then(|| count.to_string());
    let fields = [
        ("step", Some(metrics.step.to_string())),
        ("epoch", Some(json(metrics.epoch))),
        ("loss", Some(json(metrics.loss))),
        ("balance_loss", metrics.balance_loss.map(json)),
        ("expert_load", metrics.expert_load.map(json)),
        ("idle_experts", metrics.idle_experts.map(json)),
        ("lr", Some(json(metrics.lr))),
        ("grad_norm", Some(json(metrics.grad_norm))),
        ("tokens", Some(metrics.tokens.to_string())),
        ("tokens_per_s", Some(json(metrics.tokens_per_s))),
        ("peak_share", metrics.peak_share.map(json)),
        ("memory_bytes", Some(metrics.memory_bytes.to_string())),
        ("elapsed_s", Some(json(metrics.elapsed.as_secs_f64()))),
        ("skipped", Some(metrics.skipped.to_string())),
        ("records_skipped", some(metrics.records_skipped)),
        ("records_truncated", some(metrics.records_truncated)),
        ("ranks", (!watched.is_empty()).then(|| ranks(watched))),
    ];
    write_object(out, &fields)
}

/// Writes one line for the evaluation after `step`.
fn write_eval_metrics(out: &mut impl Write, step: u64, metrics: &EvalMetrics) -> io::Result<()> {
    let fields = [
        ("step", Some(step.to_string())),
        ("eval_loss", Some(json(metrics.loss))),
        ("eval_perplexity", metrics.perplexity().map(json)),
        ("eval_accuracy", Some(json(metrics.accuracy))),
    ];
    write_object(out, &fields)
}

/// The computing time of each rank, in all and by class, its waiting, and its widths or units: enough to replay the decisions.
fn ranks(ranks: &[RankMetrics]) -> String {
    let rank = |rank: &RankMetrics| {
        let classes: Vec<String> =
            rank.by_class_s.iter().map(|(class, seconds)| format!("\"{class}\":{}", json(*seconds))).collect();
        let mut fields = vec![
            ("compute_s", json(rank.compute_s)),
            ("by_class_s", format!("{{{}}}", classes.join(","))),
            ("late_s", json(rank.late_s)),
            ("wait_s", json(rank.wait_s)),
            ("left_out", json(rank.left_out)),
            ("migrated_bytes", rank.migrated_bytes.to_string()),
            ("migration_s", json(rank.migration_s)),
        ];
        fields.extend(match rank.units {
            0 => vec![("head_groups", json(rank.head_groups)), ("columns", rank.columns.to_string())],
            units => vec![("units", units.to_string())],
        });
        let fields: Vec<String> = fields.into_iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    };
    format!("[{}]", ranks.iter().map(rank).collect::<Vec<_>>().join(","))
}

fn write_object(out: &mut impl Write, fields: &[(&str, Option<String>)]) -> io::Result<()> {
    let fields = fields.iter().filter_map(|(key, value)| Some(format!("\"{key}\":{}", value.as_ref()?)));
    // In one call, so that a reader of the growing file finds whole lines.
    out.write_all(format!("{{{}}}\n", fields.collect::<Vec<_>>().join(",")).as_bytes())
}

fn json(value: f64) -> String {
    number::text(value).map_or_else(|| format!("{value:?}"), |text| format!("\"{text}\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Reads, example};

    fn written(write: impl Fn(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        write(&mut out).expect("memory can be written");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_step_is_one_line_of_json() {
        let broken = StepMetrics { loss: f64::NAN, grad_norm: f64::INFINITY, skipped: true, ..example() };
        let bare = StepMetrics {
            peak_share: None,
            lr: 1e-9,
            loss: f64::NEG_INFINITY,
            records_skipped: 3,
            records_truncated: 7,
            ..example()
        };
        let cases = [
            (
                example(),
                "{\"step\":120,\"epoch\":0.25,\"loss\":3.4521,\"lr\":0.0003,\"grad_norm\":1.2345,\"tokens\":983040,\
                 \"tokens_per_s\":12345.6,\"peak_share\":0.4142,\"memory_bytes\":1610612736,\"elapsed_s\":80.0,\
                 \"skipped\":false}\n",
            ),
            (
                broken,
                "{\"step\":120,\"epoch\":0.25,\"loss\":\"NaN\",\"lr\":0.0003,\"grad_norm\":\"Infinity\",\
                 \"tokens\":983040,\"tokens_per_s\":12345.6,\"peak_share\":0.4142,\"memory_bytes\":1610612736,\
                 \"elapsed_s\":80.0,\"skipped\":true}\n",
            ),
            (
                bare,
                "{\"step\":120,\"epoch\":0.25,\"loss\":\"-Infinity\",\"lr\":1e-9,\"grad_norm\":1.2345,\
                 \"tokens\":983040,\"tokens_per_s\":12345.6,\"memory_bytes\":1610612736,\"elapsed_s\":80.0,\
                 \"skipped\":false,\"records_skipped\":3,\"records_truncated\":7}\n",
            ),
        ];
        for (metrics, expected) in cases {
            let line = written(|out| write_step_metrics(out, &metrics, &[]));
            assert_eq!(line, expected);
            let read: serde_json::Value = serde_json::from_str(&line).expect("JSON");
            assert_eq!(read["step"], 120);
        }
    }

    #[test]
    fn an_evaluation_is_one_line_of_json() {
        let line =
            written(|out| write_eval_metrics(out, 7, &EvalMetrics { reads: Reads::Tokens, loss: 0.0, accuracy: 0.5 }));
        assert_eq!(line, "{\"step\":7,\"eval_loss\":0.0,\"eval_perplexity\":1.0,\"eval_accuracy\":0.5}\n");
        let line = written(|out| {
            write_eval_metrics(out, 7, &EvalMetrics { reads: Reads::Tokens, loss: 1e4, accuracy: f64::NAN })
        });
        assert!(line.contains("\"eval_perplexity\":\"Infinity\",\"eval_accuracy\":\"NaN\""), "{line}");
        let of_images = EvalMetrics { reads: Reads::Images, loss: 0.5, accuracy: 0.5 };
        let line = written(|out| write_eval_metrics(out, 7, &of_images));
        assert_eq!(line, "{\"step\":7,\"eval_loss\":0.5,\"eval_accuracy\":0.5}\n");
    }

    #[test]
    fn a_log_has_a_line_for_each_step_with_its_ranks_and_each_evaluation() {
        let rank = RankMetrics { by_class_s: vec![("mlp".into(), 0.5)], columns: 7, ..RankMetrics::default() };
        let metrics = EvalMetrics { reads: Reads::Images, loss: 0.5, accuracy: 0.5 };
        let line = written(|out| {
            let mut log = MetricsLog::new(out);
            log.take(&RunEvent::Note { line: "a note".to_owned() })?;
            log.take(&RunEvent::Step { time_s: 0.0, metrics: example(), ranks: vec![rank.clone()] })?;
            log.take(&RunEvent::Evaluation { time_s: 0.0, step: 120, metrics })
        });
        let lines: Vec<&str> = line.lines().collect();
        assert_eq!(lines.len(), 2, "{line}");
        assert!(lines[0].contains("\"ranks\":[{\"compute_s\":0.0,\"by_class_s\":{\"mlp\":0.5},"), "{line}");
        assert_eq!(lines[1], "{\"step\":120,\"eval_loss\":0.5,\"eval_accuracy\":0.5}");
    }
}
