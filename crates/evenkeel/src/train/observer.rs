//! What goes on beside the steps: progress, metrics, evaluations, samples and checkpoints.

use std::io::Stderr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use evenkeel_balance::{Class, Observation};
use evenkeel_report::{
    Curve, EvalMetrics, EventWriter, ProgressLine, RankMetrics, Reads, StepMetrics, Summary, event_file_name,
    events_until, write_eval_metrics, write_step_metrics,
};
use evenkeel_store::{LogFile, exists, read_bytes, read_text, write_file_atomically};
use evenkeel_train::checkpoint::Saver;
use evenkeel_train::{Balanced, Error, Evaluation, Progress, RankReport, Ranks, RunObserver, StepReport};
use serde_json::Value;

use super::feed::Data;
use super::output::RunFolder;
use crate::config::Straggler;
use crate::interruption::Interruption;

pub struct Observer<'a> {
    pub folder: &'a RunFolder,
    pub interruption: &'a Interruption,
    pub data: &'a Data,
    /// Micro-batches of an evaluation; all of them without it.
    pub eval_batches: Option<u64>,
    pub progress: ProgressLine<Stderr>,
    pub records: Records,
    pub summary: Summary,
    pub saver: Saver,
    /// What the run was configured as, in a few digits.
    pub configuration: String,
    /// Emulated, and by how much each rank is slowed now.
    pub stragglers: Vec<Straggler>,
    pub slowed: Vec<f64>,
    /// Parts that each micro-batch should be cut into.
    pub parts: usize,
    pub told: Told,
    /// Operations per token, and per second at this machine's best.
    pub flops_per_token: f64,
    pub peak_flops_per_s: f64,
}

/// Things that the user is told once in a run.
#[derive(Default)]
pub struct Told {
    /// A driver refuses graphs.
    graphs: bool,
    /// Some micro-batches have fewer parts than was wanted.
    parts: bool,
    /// Some records are longer than a sequence.
    truncation: bool,
}

/// What is written down of each step and evaluation.
pub struct Records {
    metrics: LogFile,
    events: Option<EventWriter<LogFile>>,
    curve: Curve,
    /// Where the curve goes.
    drawing: PathBuf,
    pace: Pace,
}

/// When what is shown of a run is brought up to date: not all the time, and the less often the longer it takes.
#[derive(Default)]
struct Pace {
    due: Option<Instant>,
}

impl Pace {
    const LEAST: Duration = Duration::from_secs(5);
    /// A slow disk costs a run 2 % of its time at most.
    const REST: u32 = 50;

    fn is_due(&self, now: Instant) -> bool {
        self.due.is_none_or(|due| now >= due)
    }

    fn done(&mut self, began: Instant, ended: Instant) {
        self.due = Some(ended + Pace::LEAST.max(Pace::REST * ended.saturating_duration_since(began)));
    }
}

/// Of a file of records; millions of steps take so much.
const MOST_BYTES: u64 = 1 << 30;

impl Records {
    /// Continues the records of a run that has come so far; what was written after that is dropped.
    pub fn open(folder: &RunFolder, title: &str, progress: &Progress, tensorboard: bool) -> Result<Records, Error> {
        let step = progress.step;
        let path = folder.metrics();
        let before = if step > 0 && exists(&path) { read_text(&path, MOST_BYTES)? } else { String::new() };
        let mut curve = Curve::new(title);
        let mut kept = String::new();
        for line in before.lines() {
            let Ok(value) = serde_json::from_str::<Value>(line) else { continue };
            let Some(at) = value["step"].as_u64().filter(|&at| at <= step) else { continue };
            // The evaluation after this step is made once more, unless the checkpoint knows it.
            if value.get("eval_loss").is_some() && at == step && progress.evaluated != Some(at) {
                continue;
            }
            if let Some(loss) = value["loss"].as_f64() {
                curve.add(at, loss);
            }
            if let Some(loss) = value["eval_loss"].as_f64() {
                curve.add_eval(at, loss);
            }
            kept.extend([line, "\n"]);
        }
        write_file_atomically(&path, |file| file.put(kept.as_bytes()))?;
        let metrics = LogFile::append(&path)?;
        for path in folder.event_files()? {
            cut_events(&path, step)?;
        }
        let events = if tensorboard { Some(open_events(folder)?) } else { None };
        Ok(Records { metrics, events, curve, drawing: folder.curve(), pace: Pace::default() })
    }

    fn step(&mut self, metrics: &StepMetrics, ranks: &[RankMetrics]) -> Result<(), Error> {
        self.curve.add(metrics.step, metrics.loss);
        write_step_metrics(&mut self.metrics, metrics, ranks).map_err(|error| self.metrics.failure(error))?;
        self.metrics.publish()?;
        if let Some(events) = &mut self.events {
            events.step(now_s(), metrics).map_err(event_failure)?;
        }
        if self.pace.is_due(Instant::now()) { self.publish() } else { Ok(()) }
    }

    fn eval(&mut self, step: u64, metrics: &EvalMetrics) -> Result<(), Error> {
        self.curve.add_eval(step, metrics.loss);
        write_eval_metrics(&mut self.metrics, step, metrics).map_err(|error| self.metrics.failure(error))?;
        self.metrics.publish()?;
        if let Some(events) = &mut self.events {
            events.eval(now_s(), step, metrics).map_err(event_failure)?;
        }
        self.publish()
    }

    /// Draws the curve as it is now and hands the events to the system.
    fn publish(&mut self) -> Result<(), Error> {
        let began = Instant::now();
        let mut svg = Vec::new();
        self.curve.write_svg(&mut svg).expect("memory takes all bytes");
        write_file_atomically(&self.drawing, |file| file.put(&svg))?;
        if let Some(events) = &mut self.events {
            events.flush().map_err(event_failure)?;
        }
        self.pace.done(began, Instant::now());
        Ok(())
    }
}

/// Drops what an earlier part of the run wrote after a step.
fn cut_events(path: &Path, step: u64) -> Result<(), Error> {
    let written = read_bytes(path, MOST_BYTES)?;
    let kept = events_until(&written, step);
    if kept.len() < written.len() {
        write_file_atomically(path, |file| file.put(kept))?;
    }
    Ok(())
}

fn open_events(folder: &RunFolder) -> Result<EventWriter<LogFile>, Error> {
    let name = event_file_name(now_s() as u64, std::process::id());
    EventWriter::new(LogFile::create(folder.file(&name))?, now_s()).map_err(event_failure)
}

/// `peak_share` and `memory_bytes` are not in the report: the loop knows no machine.
fn step_metrics(report: &StepReport, reads: Reads, peak_share: Option<f64>, memory_bytes: u64) -> StepMetrics {
    let seconds = report.duration.as_secs_f64().max(1e-9);
    StepMetrics {
        reads,
        step: report.step,
        epoch: report.epoch,
        loss: report.outcome.loss,
        lr: report.lr,
        grad_norm: report.outcome.grad_norm,
        tokens: report.tokens,
        step_tokens: report.outcome.tokens as u64,
        step_duration: report.duration,
        tokens_per_s: report.outcome.tokens as f64 / seconds,
        peak_share,
        memory_bytes,
        elapsed: report.elapsed,
        share: report.share,
        skipped: !report.outcome.updated,
        records_skipped: report.counts.skipped,
        records_truncated: report.counts.truncated,
    }
}

fn rank_metrics(report: &RankReport) -> RankMetrics {
    let RankReport { observed, head_groups, columns } = report;
    let Observation { late_s, wait_s, gamma, migrated_bytes, migration_s, .. } = *observed;
    let classes = Class::ALL.iter().map(|&class| (class.name(), observed.of(class)));
    RankMetrics {
        compute_s: observed.total_s(),
        by_class_s: classes.filter(|(_, seconds)| *seconds > 0.0).collect(),
        late_s,
        wait_s,
        left_out: gamma,
        migrated_bytes,
        migration_s,
        head_groups: *head_groups,
        columns: *columns,
    }
}

fn event_failure(error: std::io::Error) -> Error {
    Error::Report(error)
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

impl Observer<'_> {
    /// A signal waits for a checkpoint that is being written; behind it old ones go.
    fn when_saved(&self, progress: &Progress) -> impl FnOnce() -> Result<(), Error> + Send + use<> {
        let (saving, prune) = (self.interruption.saving(), self.folder.pruning(progress));
        move || {
            saving.done();
            Ok(prune()?)
        }
    }

    /// Says if a GPU's driver refused to go on with graphs.
    fn tell_of_graphs(&mut self, ranks: &Ranks) -> Result<(), Error> {
        let refusals = ranks.graph_refusals()?;
        let refused = refusals.into_iter().enumerate().find_map(|(rank, why)| Some((rank, why?)));
        let Some((rank, why)) = refused else { return Ok(()) };
        self.told.graphs = true;
        let note = format!("rank {rank} launches its kernels one by one: CUDA refuses graphs ({why})");
        self.progress.note(&note).map_err(Error::Report)
    }

    /// Says once that a micro-batch has too few documents or images for as many parts as are wanted.
    fn tell_of_parts(&mut self, step: u64, parts: usize) -> Result<(), Error> {
        if parts >= self.parts || self.told.parts {
            return Ok(());
        }
        self.told.parts = true;
        let hides = if parts == 1 { "nothing hides its exchanges" } else { "less of its exchanges is hidden" };
        let samples = if self.data.tokenizer().is_some() { "document" } else { "image" };
        let plural = if parts == 1 { "" } else { "s" };
        self.progress
            .note(&format!(
                "step {step} has a micro-batch of {parts} {samples}{plural}, which cannot be cut in parallel.parts = {}: {hides}",
                self.parts
            ))
            .map_err(Error::Report)
    }

    fn tell_of_truncation(&mut self, records: u64) -> Result<(), Error> {
        if records == 0 || self.told.truncation {
            return Ok(());
        }
        self.told.truncation = true;
        let were = if records == 1 { "record was" } else { "records were" };
        let note = format!(
            "{records} {were} cut at data.sequence tokens so far; a larger data.sequence keeps more of their ends"
        );
        self.progress.note(&note).map_err(Error::Report)
    }
}

impl RunObserver for Observer<'_> {
    fn stepping(&mut self, ranks: &Ranks, step: u64) -> Result<(), Error> {
        let factors = Straggler::factors(&self.stragglers, ranks.count(), step);
        if factors != self.slowed {
            self.slowed = factors.clone();
            ranks.throttle(factors)?;
        }
        if step.is_power_of_two() && !self.told.graphs {
            self.tell_of_graphs(ranks)?;
        }
        Ok(())
    }

    fn balanced(&mut self, balanced: &Balanced) -> Result<(), Error> {
        self.progress.note(&super::balance::describe(balanced)).map_err(Error::Report)
    }

    fn noted(&mut self, note: &str) -> Result<(), Error> {
        self.progress.note(note).map_err(Error::Report)
    }

    fn stepped(&mut self, report: &StepReport) -> Result<(), Error> {
        let seconds = report.duration.as_secs_f64().max(f64::MIN_POSITIVE);
        let flops_per_s = self.flops_per_token * report.outcome.tokens as f64 / seconds;
        // A step that beats the peak shows that others used the machine while it was measured.
        self.peak_flops_per_s = self.peak_flops_per_s.max(flops_per_s);
        let peak_share = Some(flops_per_s / self.peak_flops_per_s);
        let metrics = step_metrics(report, self.data.reads(), peak_share, crate::process::peak_bytes());
        self.interruption.stepped();
        self.summary.step(&metrics);
        let ranks: Vec<RankMetrics> = report.ranks.iter().map(rank_metrics).collect();
        self.records.step(&metrics, &ranks)?;
        self.progress.step(&metrics).map_err(Error::Report)?;
        self.tell_of_truncation(metrics.records_truncated)?;
        self.tell_of_parts(report.step, report.outcome.parts)
    }

    fn evaluate(&mut self, ranks: &Ranks) -> Result<Option<Evaluation>, Error> {
        self.data.evaluate(ranks, self.eval_batches, self.interruption.is_asked())
    }

    fn evaluated(&mut self, step: u64, evaluation: &Evaluation) -> Result<(), Error> {
        let reads = self.data.reads();
        let metrics = EvalMetrics { reads, loss: evaluation.loss(), accuracy: evaluation.accuracy() };
        self.summary.eval(step, &metrics);
        self.records.eval(step, &metrics)?;
        self.progress.eval(step, &metrics).map_err(Error::Report)
    }

    fn checkpoint(&mut self, ranks: &Ranks, feed: &Value, progress: &Progress) -> Result<(), Error> {
        let (path, then) = (self.folder.checkpoint(progress.step), self.when_saved(progress));
        self.saver.begin(path, ranks, progress, feed.clone(), &self.configuration, then)?;
        self.records.publish()
    }

    fn last_checkpoint(&mut self, ranks: &Ranks, feed: &Value, progress: &Progress) -> Result<(), Error> {
        let (path, then) = (self.folder.checkpoint(progress.step), self.when_saved(progress));
        self.saver.save(path, ranks, progress, feed.clone(), &self.configuration, then)?;
        self.records.publish()
    }

    fn settle(&mut self) -> Result<(), Error> {
        self.saver.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_drawn_at_first_then_now_and_then_and_seldom_on_a_slow_disk() {
        let start = Instant::now();
        let drawn = |took: Duration| {
            let mut pace = Pace::default();
            assert!(pace.is_due(start));
            pace.done(start, start + took);
            pace
        };
        let millisecond = Duration::from_millis(1);
        for (took, rest) in [(millisecond, Pace::LEAST), (Duration::from_secs(1), Duration::from_secs(50))] {
            let pace = drawn(took);
            assert!(!pace.is_due(start + took + rest - millisecond), "{took:?}");
            assert!(pace.is_due(start + took + rest), "{took:?}");
        }
    }
}
