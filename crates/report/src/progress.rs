//! One line about a run's progress: rewritten in place on a terminal, a line now and then elsewhere.

use std::io::{self, Write};
use std::time::Duration;

use crate::{Begun, EvalMetrics, RunEvent, Sink, StepMetrics, text};

/// Nobody can read faster updates, and a terminal over a network would slow the run.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// One line, cut to this many columns and rewritten.
    Terminal { columns: usize },
    /// Whole lines, for files and pipes.
    Plain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgressOptions {
    pub style: Style,
    /// Set if a number of steps ends the run.
    pub total_steps: Option<u64>,
    /// Steps between plain lines.
    pub log_every: u64,
}

pub struct ProgressLine<W: Write> {
    out: W,
    options: ProgressOptions,
    /// The text on the terminal's last line.
    shown: String,
    /// When it was drawn, by the run's clock.
    drawn: Option<Duration>,
    /// The last step, and whether it is shown.
    last: Option<(StepMetrics, bool)>,
}

impl<W: Write> ProgressLine<W> {
    pub fn new(out: W, options: ProgressOptions) -> ProgressLine<W> {
        ProgressLine { out, options, shown: String::new(), drawn: None, last: None }
    }

    /// Shows a step if it is time to. A step that was skipped is always shown.
    fn step(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        let due = match self.options.style {
            Style::Terminal { .. } => {
                self.drawn.is_none_or(|drawn| metrics.elapsed.saturating_sub(drawn) >= REDRAW_INTERVAL)
            }
            Style::Plain => self.last.is_none() || metrics.step.is_multiple_of(self.options.log_every.max(1)),
        };
        if metrics.skipped {
            let (loss, norm) = (value(metrics.loss, 4), value(metrics.grad_norm, 2));
            self.note(&format!("step {} skipped: loss {loss}, gradient norm {norm}", metrics.step))?;
        }
        self.last = Some((*metrics, due));
        if due { self.show(metrics) } else { Ok(()) }
    }

    /// The evaluation after a step stands below the step's line. After a run's last step it stays there.
    fn eval(&mut self, step: u64, metrics: &EvalMetrics) -> io::Result<()> {
        let is_plain = self.options.style == Style::Plain;
        if self.last.is_some_and(|(last, _)| is_plain || last.share >= 1.0) {
            self.finish()?;
        }
        self.note(&format!("eval at step {step}: {metrics}"))
    }

    /// A line of its own that stays; the progress goes on below it.
    fn note(&mut self, line: &str) -> io::Result<()> {
        match self.options.style {
            Style::Plain => writeln!(self.out, "{line}")?,
            Style::Terminal { .. } => write!(self.out, "\r\x1b[K{line}\n{}", self.shown)?,
        }
        self.out.flush()
    }

    /// Shows the last step, whether or not it was time to, and ends the line.
    fn finish(&mut self) -> io::Result<()> {
        if let Some((metrics, shown @ false)) = &mut self.last {
            *shown = true;
            let metrics = *metrics;
            self.show(&metrics)?;
        }
        if matches!(self.options.style, Style::Terminal { .. }) && !self.shown.is_empty() {
            self.shown.clear();
            writeln!(self.out)?;
        }
        self.out.flush()
    }

    fn show(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        let line = line(metrics, self.options.total_steps);
        match self.options.style {
            Style::Plain => writeln!(self.out, "{line}")?,
            Style::Terminal { columns } => {
                // A full last column makes some terminals wrap.
                self.shown = line.chars().take(columns.saturating_sub(1)).collect();
                self.drawn = Some(metrics.elapsed);
                write!(self.out, "\r\x1b[K{}", self.shown)?;
            }
        }
        self.out.flush()
    }
}

impl<W: Write> Sink for ProgressLine<W> {
    fn take(&mut self, event: &RunEvent) -> io::Result<()> {
        match event {
            RunEvent::Begun(begun) => self.note(&first_line(begun)),
            RunEvent::Step { metrics, .. } => self.step(metrics),
            RunEvent::Evaluation { step, metrics, .. } => self.eval(*step, metrics),
            RunEvent::Balance(balance) => self.note(&balance.line),
            RunEvent::Note { line } => self.note(line),
            // The command itself reports why it failed.
            RunEvent::Fault { .. } | RunEvent::Ended { .. } => self.finish(),
            RunEvent::Checkpoint { .. } => Ok(()),
        }
    }
}

fn first_line(begun: &Begun) -> String {
    let Begun { title, ranks, memory_bytes, is_gpu_memory, resumed_from, .. } = begun;
    let ranks = if ranks.is_empty() { String::new() } else { format!(", {ranks}") };
    let memory = if *is_gpu_memory { "GPU memory" } else { "memory" };
    let begins = resumed_from.as_ref().map_or_else(|| "begins".to_owned(), |path| format!("resumes from `{path}`"));
    format!("{title}{ranks}, {} of {memory}, {begins}", text::bytes(*memory_bytes))
}

/// The most important first, since a narrow terminal cuts the end.
fn line(metrics: &StepMetrics, total_steps: Option<u64>) -> String {
    let step = metrics.step.to_string();
    let step = match total_steps {
        // Step numbers get longer on the way; the line keeps its form.
        Some(total) => format!("step {step:>width$}/{total}", width = total.to_string().len()),
        None => format!("step {step} ({})", text::percent(metrics.share)),
    };
    let parts = [
        Some(step),
        Some(format!("loss {}", value(metrics.loss, 4))),
        metrics.left().map(|left| format!("{} left", text::duration(left))),
        Some(format!("{} {}/s", text::count(metrics.tokens_per_s as u64), metrics.reads.unit())),
        metrics.peak_share.map(|share| format!("{} of peak", text::percent(share))),
        Some(format!("lr {:.2e}", metrics.lr)),
        Some(format!("norm {}", value(metrics.grad_norm, 2))),
        Some(text::bytes(metrics.memory_bytes)),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("  ")
}

/// Numbers that are not finite say so; very large ones stay short.
pub(crate) fn value(value: f64, decimals: usize) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.abs() >= 1e6 && value.is_finite() {
        format!("{value:.2e}")
    } else {
        format!("{value:.decimals$}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Reads, example};

    fn shown(style: Style, log_every: u64, act: impl Fn(&mut ProgressLine<&mut Vec<u8>>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        let options = ProgressOptions { style, total_steps: Some(1000), log_every };
        act(&mut ProgressLine::new(&mut out, options)).expect("memory can be written");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn the_line_says_everything_plainly() {
        let cases = [
            (
                example(),
                Some(1000),
                "step  120/1000  loss 3.4521  4m 00s left  12.3 K tokens/s  41.4% of peak  lr 3.00e-4  norm 1.23  1.5 GiB",
            ),
            (
                StepMetrics { loss: f64::NAN, grad_norm: f64::INFINITY, peak_share: None, ..example() },
                None,
                "step 120 (25.0%)  loss NaN  4m 00s left  12.3 K tokens/s  lr 3.00e-4  norm inf  1.5 GiB",
            ),
            (
                StepMetrics { loss: 3.3e8, grad_norm: f64::NAN, share: 0.0, tokens_per_s: f64::NAN, ..example() },
                Some(120),
                "step 120/120  loss 3.30e8  0 tokens/s  41.4% of peak  lr 3.00e-4  norm NaN  1.5 GiB",
            ),
        ];
        for (metrics, total, expected) in cases {
            assert_eq!(line(&metrics, total), expected);
        }
        let of_images = StepMetrics { reads: Reads::Images, ..example() };
        assert!(line(&of_images, None).contains("  12.3 K patches/s  "));
    }

    #[test]
    fn without_a_terminal_there_is_a_line_at_first_now_and_then_and_at_last() {
        let text = shown(Style::Plain, 10, |progress| {
            (1..=25).try_for_each(|step| progress.step(&StepMetrics { step, ..example() }))?;
            progress.eval(25, &EvalMetrics { reads: Reads::Tokens, loss: 1.0, accuracy: 0.25 })?;
            progress.finish()
        });
        let starts: Vec<String> = text.lines().map(|line| line.chars().take(14).collect()).collect();
        assert_eq!(starts, ["step    1/1000", "step   10/1000", "step   20/1000", "step   25/1000", "eval at step 2"]);
        assert!(text.contains("eval at step 25: loss 1.0000, perplexity 2.72, accuracy 25.0%\n"), "{text}");
        assert!(!text.contains(['\r', '\x1b']), "{text:?}");
    }

    #[test]
    fn a_last_line_that_was_shown_is_not_shown_again() {
        let text = shown(Style::Plain, 10, |progress| {
            progress.step(&StepMetrics { step: 10, ..example() })?;
            progress.finish()
        });
        assert_eq!(text.lines().count(), 1, "{text}");
    }

    #[test]
    fn a_terminal_has_one_line_that_is_rewritten_and_cut() {
        let text = shown(Style::Terminal { columns: 20 }, 1, |progress| {
            for (step, milliseconds) in [(1, 1000), (2, 1050), (3, 1100), (4, 1101)] {
                progress.step(&StepMetrics { step, elapsed: Duration::from_millis(milliseconds), ..example() })?;
            }
            progress.note("a note")?;
            progress.finish()
        });
        let (first, third, last) = ("step    1/1000  los", "step    3/1000  los", "step    4/1000  los");
        let expected = format!("\r\x1b[K{first}\r\x1b[K{third}\r\x1b[Ka note\n{third}\r\x1b[K{last}\n");
        assert_eq!(text, expected);
    }

    #[test]
    fn the_last_evaluation_stands_below_the_last_step() {
        let of_images = EvalMetrics { reads: Reads::Images, loss: 1.0, accuracy: 0.25 };
        let (style, eval) = (Style::Terminal { columns: 20 }, "eval at step 4: loss 1.0000, accuracy 25.0%");
        for (share, expected) in
            [(0.5, format!("{eval}\nstep    4/1000  los\n")), (1.0, format!("los\n\r\x1b[K{eval}\n"))]
        {
            let text = shown(style, 1, |progress| {
                progress.step(&StepMetrics { step: 4, share, ..example() })?;
                progress.eval(4, &of_images)?;
                progress.finish()
            });
            assert!(text.ends_with(&expected), "{share}: {text:?}");
        }
    }

    #[test]
    fn a_skipped_step_leaves_a_line() {
        let skipped = StepMetrics { step: 7, loss: f64::NAN, grad_norm: f64::INFINITY, skipped: true, ..example() };
        for style in [Style::Plain, Style::Terminal { columns: 80 }] {
            let text = shown(style, 1000, |progress| {
                progress.step(&example())?;
                progress.step(&skipped)
            });
            assert!(text.contains("step 7 skipped: loss NaN, gradient norm inf\n"), "{text:?}");
        }
    }

    #[test]
    fn a_run_says_how_it_begins_and_its_last_step_is_shown_however_it_ends() {
        let begun = Begun { title: "Llama, 1 M parameters".to_owned(), memory_bytes: 3 << 29, ..Begun::default() };
        let resumed = Begun {
            ranks: "tp 2".to_owned(),
            is_gpu_memory: true,
            resumed_from: Some("run/step-00000005".to_owned()),
            ..begun.clone()
        };
        let ended = RunEvent::Ended { step: 11, why: "as planned".to_owned() };
        let failed = RunEvent::Fault { what: "rank 1 failed".to_owned(), hint: None };
        let cases = [
            (begun, ended, "Llama, 1 M parameters, 1.5 GiB of memory, begins"),
            (resumed, failed, "Llama, 1 M parameters, tp 2, 1.5 GiB of GPU memory, resumes from `run/step-00000005`"),
        ];
        for (begun, last, expected) in cases {
            let text = shown(Style::Plain, 10, |progress| {
                progress.take(&RunEvent::Begun(begun.clone()))?;
                for step in 10..=11 {
                    let metrics = StepMetrics { step, ..example() };
                    progress.take(&RunEvent::Step { time_s: 0.0, metrics, ranks: Vec::new() })?;
                }
                progress.take(&RunEvent::Note { line: "a note".to_owned() })?;
                progress.take(&last)
            });
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!((lines.len(), lines[0], lines[2]), (4, expected, "a note"), "{text}");
            assert!(lines[1].starts_with("step   10/1000") && lines[3].starts_with("step   11/1000"), "{text}");
        }
    }
}
