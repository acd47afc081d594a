//! A run's results.

use std::io::{self, Write};
use std::time::Duration;

use crate::progress::value;
use crate::{BestEvaluation, EvalMetrics, RunEvent, Sink, StepMetrics, text};

/// Collects the facts for the end of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    first: Option<StepMetrics>,
    last: Option<StepMetrics>,
    /// Over the steps of this process, without those before it was resumed.
    tokens: u64,
    duration: Duration,
    peak_share_sum: f64,
    peak_share_count: u64,
    memory_bytes: u64,
    skipped: u64,
    last_eval: Option<EvalMetrics>,
    best_eval: Option<BestEvaluation>,
    /// Why the run ended.
    ended: String,
}

impl Summary {
    fn step(&mut self, metrics: &StepMetrics) {
        let first = self.first.get_or_insert(*metrics);
        self.tokens += metrics.step_tokens;
        self.duration = metrics.elapsed.saturating_sub(first.elapsed) + first.step_duration;
        if let Some(share) = metrics.peak_share {
            self.peak_share_sum += share;
            self.peak_share_count += 1;
        }
        self.memory(metrics.memory_bytes);
        self.skipped += u64::from(metrics.skipped);
        self.last = Some(*metrics);
    }

    /// Notes the process's peak so far.
    pub fn memory(&mut self, bytes: u64) {
        self.memory_bytes = self.memory_bytes.max(bytes);
    }

    fn eval(&mut self, step: u64, metrics: &EvalMetrics) {
        // A loss that is not a number is never better.
        if self.best_eval.is_none_or(|best| metrics.loss < best.loss || best.loss.is_nan()) {
            self.best_eval = Some(BestEvaluation { step, loss: metrics.loss });
        }
        self.last_eval = Some(*metrics);
    }

    /// Writes the table. `files` are the run's results and their places.
    pub fn write(&self, out: &mut impl Write, files: &[(&str, String)]) -> io::Result<()> {
        let rows = self.rows().into_iter().chain(files.iter().map(|(what, place)| (*what, place.clone())));
        let rows: Vec<(&str, String)> = rows.collect();
        let width = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        rows.iter().try_for_each(|(label, value)| writeln!(out, "{label:<width$}  {value}"))
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![("ended", self.ended.clone())];
        let (Some(first), Some(last)) = (&self.first, &self.last) else {
            rows.push(("steps", "0".to_owned()));
            return rows;
        };
        let skipped = if self.skipped == 0 { String::new() } else { format!(", {} skipped", self.skipped) };
        // For a resumed run: totals of the whole run, and of this part of it.
        let since = (first.step > 1).then(|| format!(" since step {}", first.step - 1));
        let and_part = |whole: String, part: String| match &since {
            Some(since) => format!("{whole}, {part}{since}"),
            None => whole,
        };
        let steps = and_part(last.step.to_string(), (last.step + 1 - first.step).to_string());
        rows.push(("steps", format!("{steps}{skipped}")));
        rows.push((last.reads.unit(), and_part(text::count(last.tokens), text::count(self.tokens))));
        rows.push(("time", and_part(text::duration(last.elapsed), text::duration(self.duration))));
        rows.extend(records(last).map(|records| ("records", records)));
        let loss = format!("{} → {}", value(first.loss, 4), value(last.loss, 4));
        rows.push(("loss", format!("{loss}{}", since.unwrap_or_default())));
        if let Some(eval) = &self.last_eval {
            rows.push(("eval", eval.to_string()));
        }
        if let Some(BestEvaluation { step, loss }) =
            self.best_eval.filter(|best| self.last_eval.is_none_or(|last| last.loss != best.loss))
        {
            rows.push(("best eval", format!("loss {} at step {step}", value(loss, 4))));
        }
        if !self.duration.is_zero() {
            let per_second = text::count((self.tokens as f64 / self.duration.as_secs_f64()) as u64);
            rows.push(("speed", format!("{per_second} {}/s, everything included", last.reads.unit())));
        }
        if self.peak_share_count > 0 {
            let share = text::percent(self.peak_share_sum / self.peak_share_count as f64);
            rows.push(("use of machine", format!("{share} of its peak in a step")));
        }
        rows.push(("peak memory", text::mib(self.memory_bytes)));
        rows
    }
}

impl Sink for Summary {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        match event {
            RunEvent::Begun(begun) => self.best_eval = begun.best,
            RunEvent::Step { metrics, .. } => self.step(metrics),
            RunEvent::Evaluation { step, metrics, .. } => self.eval(*step, metrics),
            RunEvent::Ended { why, .. } => self.ended = why.clone(),
            RunEvent::Balance(_) | RunEvent::Checkpoint { .. } | RunEvent::Note { .. } | RunEvent::Fault { .. } => (),
        }
        Ok(())
    }
}

/// Records that were skipped or cut; `None` if there are none.
fn records(metrics: &StepMetrics) -> Option<String> {
    let told =
        [(metrics.records_skipped, "bad ones skipped"), (metrics.records_truncated, "cut at the length of a sequence")];
    let told: Vec<String> =
        told.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    (!told.is_empty()).then(|| told.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Begun, Reads, example};

    fn written(summary: &Summary, ended: &str, files: &[(&str, String)]) -> String {
        let (mut summary, mut out) = (summary.clone(), Vec::new());
        let last = RunEvent::Ended { step: 0, why: ended.to_owned() };
        summary.take(&last).expect("it keeps all events");
        summary.write(&mut out, files).expect("memory can be written");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_run_is_summed_up_in_a_table() {
        let mut summary = Summary::default();
        for step in 1..=5u64 {
            summary.step(&StepMetrics {
                step,
                loss: 10.0 / step as f64,
                tokens: 1000 * step,
                step_tokens: 1000,
                elapsed: Duration::from_secs(2 * step),
                peak_share: Some(0.1 * step as f64),
                memory_bytes: (6 - step) << 20,
                skipped: step == 3,
                records_skipped: step / 5,
                records_truncated: 2 * step,
                ..example()
            });
        }
        for (step, loss) in [(2, 4.0), (4, 1.0), (5, 2.0)] {
            summary.eval(step, &EvalMetrics { reads: Reads::Tokens, loss, accuracy: 0.5 });
        }
        let files = [("model", "run/model".to_owned()), ("curve", "run/loss.svg".to_owned())];
        let expected = "\
ended           all steps done
steps           5, 1 skipped
tokens          5.0 K
time            10s
records         1 bad ones skipped, 10 cut at the length of a sequence
loss            10.0000 → 2.0000
eval            loss 2.0000, perplexity 7.39, accuracy 50.0%
best eval       loss 1.0000 at step 4
speed           500 tokens/s, everything included
use of machine  30.0% of its peak in a step
peak memory     5 MiB
model           run/model
curve           run/loss.svg
";
        assert_eq!(written(&summary, "all steps done", &files), expected);
    }

    #[test]
    fn a_resumed_run_says_what_the_whole_and_what_this_part_came_to() {
        let mut summary = Summary::default();
        for step in 11..=15u64 {
            summary.step(&StepMetrics {
                reads: Reads::Images,
                step,
                loss: 10.0 / step as f64,
                tokens: 1000 * step,
                step_tokens: 1000,
                elapsed: Duration::from_secs(100 + 2 * step),
                ..example()
            });
        }
        summary.eval(15, &EvalMetrics { reads: Reads::Images, loss: 1.0, accuracy: 0.5 });
        let text = written(&summary, "as planned", &[]);
        let expected = "\
ended           as planned
steps           15, 5 since step 10
patches         15.0 K, 5.0 K since step 10
time            2m 10s, 10s since step 10
loss            0.9091 → 0.6667 since step 10
eval            loss 1.0000, accuracy 50.0%
speed           500 patches/s, everything included
";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn a_resumed_run_knows_the_best_evaluation_of_the_whole() {
        let mut summary = Summary::default();
        let begun = Begun { step: 10, best: Some(BestEvaluation { step: 7, loss: 1.5 }), ..Begun::default() };
        summary.take(&RunEvent::Begun(begun)).expect("it keeps all events");
        summary.step(&StepMetrics { step: 11, ..example() });
        for (loss, best) in [(2.0, "loss 1.5000 at step 7"), (1.0, ""), (1.25, "loss 1.0000 at step 11")] {
            summary.eval(11, &EvalMetrics { reads: Reads::Tokens, loss, accuracy: 0.5 });
            let text = written(&summary, "as planned", &[]);
            let row = text.lines().find_map(|line| line.strip_prefix("best eval")).unwrap_or_default();
            assert_eq!(row.trim(), best, "{text}");
        }
    }

    #[test]
    fn a_run_without_steps_or_numbers_says_so() {
        assert_eq!(written(&Summary::default(), "interrupted", &[]), "ended  interrupted\nsteps  0\n");
        let mut summary = Summary::default();
        summary.step(&StepMetrics { loss: f64::NAN, peak_share: None, skipped: true, ..example() });
        summary.eval(120, &EvalMetrics { reads: Reads::Tokens, loss: f64::NAN, accuracy: 0.0 });
        summary.eval(120, &EvalMetrics { reads: Reads::Tokens, loss: f64::INFINITY, accuracy: 0.0 });
        let text = written(&summary, "ten steps in a row were not finite", &[]);
        assert!(text.contains(" NaN → NaN since step 119\n") && text.contains("loss inf, perplexity inf"), "{text}");
        assert!(!text.contains("best eval"), "{text}");
    }
}
