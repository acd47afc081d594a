//! Turns the loop's reports into events, and does the work beside the steps: evaluations, checkpoints, emulated stragglers.

use evenkeel_balance::{Class, Observation};
use evenkeel_model::Model;
use evenkeel_report::{EvalMetrics, RankMetrics, Reads, RunEvent, Sink, StepMetrics};
use evenkeel_step::Strategy;
use evenkeel_train::checkpoint::{RunOrigin, Saver};
use evenkeel_train::{Error, Evaluation, Progress, RankReport, Ranks, Report, RunObserver, StepReport};
use serde_json::Value;

use super::records::{self, now_s};
use crate::config::Straggler;
use crate::inputs::feed::Data;
use crate::inputs::run_folder::RunFolder;
use crate::interruption::Interruption;
use crate::planning::Forecast;
use crate::stages;

pub struct Observer<'a> {
    pub folder: &'a RunFolder,
    pub interruption: &'a Interruption,
    pub data: &'a Data,
    /// Micro-batches of an evaluation; all of them if `None`.
    pub eval_batches: Option<u64>,
    /// Files before the console: a step is on disk before the user sees it.
    pub sinks: Vec<Box<dyn Sink + 'a>>,
    pub saver: Saver,
    pub origin: RunOrigin,
    /// The emulated stragglers, and the factor by which each rank is slowed now.
    pub stragglers: Vec<Straggler>,
    pub slowed: Vec<f64>,
    /// Parts that each micro-batch should be cut into.
    pub parts: usize,
    pub told: Told,
    /// Present if the run was planned.
    pub forecast: Option<Forecast>,
    pub model: &'a Model,
    /// The strategy that the run began with.
    pub strategy: &'a Strategy,
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

/// `peak_share` and `memory_bytes` are not in the report: the loop knows no machine.
fn step_metrics(report: &StepReport, reads: Reads, peak_share: Option<f64>, memory_bytes: u64) -> StepMetrics {
    let seconds = report.duration.as_secs_f64().max(1e-9);
    StepMetrics {
        reads,
        step: report.step,
        epoch: report.epoch,
        loss: report.outcome.loss,
        balance_loss: report.outcome.balance_loss,
        expert_load: report.outcome.expert_load.map(|load| load.largest),
        idle_experts: report.outcome.expert_load.map(|load| load.idle),
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
    let RankReport { observed, head_groups, columns, units } = report;
    let Observation { late_s, wait_s, gamma, migrated_bytes, migration_s, .. } = *observed;
    let classes = Class::ALL.iter().map(|&class| (class.name().into(), observed.of(class)));
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
        units: *units,
    }
}

impl Observer<'_> {
    pub fn emit(&mut self, event: &RunEvent) -> Result<(), Error> {
        self.sinks.take(event).map_err(records::failure)
    }

    pub fn note(&mut self, line: impl Into<String>) -> Result<(), Error> {
        self.emit(&RunEvent::Note { line: line.into() })
    }

    fn emit_checkpoint(&mut self, progress: &Progress) -> Result<(), Error> {
        let path = self.folder.checkpoint(progress.step).display().to_string();
        self.emit(&RunEvent::Checkpoint { step: progress.step, path })
    }

    /// A signal waits until the checkpoint is written; then old ones are removed.
    fn when_saved(&self, progress: &Progress) -> impl FnOnce() -> Result<(), Error> + Send + use<> {
        let (saving, prune) = (self.interruption.saving(), self.folder.pruning(progress));
        move || {
            saving.done();
            Ok(prune()?)
        }
    }

    fn tell_of_step(&mut self, report: &StepReport) -> Result<(), Error> {
        let seconds = report.duration.as_secs_f64().max(f64::MIN_POSITIVE);
        let flops_per_s = self.flops_per_token * report.outcome.tokens as f64 / seconds;
        // A step that beats the peak shows that others used the machine while it was measured.
        self.peak_flops_per_s = self.peak_flops_per_s.max(flops_per_s);
        let peak_share = Some(flops_per_s / self.peak_flops_per_s);
        let metrics = step_metrics(report, self.data.reads(), peak_share, crate::process::peak_bytes());
        self.interruption.stepped();
        let ranks = report.ranks.iter().map(rank_metrics).collect();
        self.emit(&RunEvent::Step { time_s: now_s(), metrics, ranks })?;
        if let Some(line) = self.forecast.as_mut().and_then(|forecast| forecast.compare(seconds, &report.times)) {
            self.note(line)?;
        }
        self.tell_of_truncation(metrics.records_truncated)?;
        self.tell_of_parts(report.step, report.outcome.parts)
    }

    /// Reports if a GPU's driver refused to go on with graphs.
    fn tell_of_graphs(&mut self, ranks: &Ranks) -> Result<(), Error> {
        let refusals = ranks.graph_refusals()?;
        let refused = refusals.into_iter().enumerate().find_map(|(rank, why)| Some((rank, why?)));
        let Some((rank, why)) = refused else { return Ok(()) };
        self.told.graphs = true;
        self.note(format!("rank {rank} launches its kernels one by one: CUDA refuses graphs ({why})"))
    }

    /// Reports once that a micro-batch has too few documents or images for the wanted number of parts.
    fn tell_of_parts(&mut self, step: u64, parts: usize) -> Result<(), Error> {
        if parts >= self.parts || self.told.parts {
            return Ok(());
        }
        self.told.parts = true;
        let hides = if parts == 1 { "nothing hides its exchanges" } else { "less of its exchanges is hidden" };
        let samples = if self.data.tokenizer().is_some() { "document" } else { "image" };
        let plural = if parts == 1 { "" } else { "s" };
        self.note(format!(
            "step {step} has a micro-batch of {parts} {samples}{plural}, which cannot be cut in parallel.parts = {}: {hides}",
            self.parts
        ))
    }

    fn tell_of_truncation(&mut self, records: u64) -> Result<(), Error> {
        if records == 0 || self.told.truncation {
            return Ok(());
        }
        self.told.truncation = true;
        let were = if records == 1 { "record was" } else { "records were" };
        self.note(format!(
            "{records} {were} cut at data.sequence tokens so far; a larger data.sequence keeps more of their ends"
        ))
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

    fn wants_times(&self) -> bool {
        self.forecast.as_ref().is_some_and(Forecast::wants_times)
    }

    fn tell(&mut self, report: Report) -> Result<(), Error> {
        match report {
            Report::Step(report) => self.tell_of_step(report),
            Report::Evaluation { step, evaluation } => {
                let reads = self.data.reads();
                let metrics = EvalMetrics { reads, loss: evaluation.loss(), accuracy: evaluation.accuracy() };
                self.emit(&RunEvent::Evaluation { time_s: now_s(), step, metrics })
            }
            Report::Balanced(balanced) => self.emit(&RunEvent::Balance(super::balance::event(balanced))),
            Report::Restaged(restaged) => self.note(stages::describe_change(self.model, self.strategy, restaged)),
            Report::Note(line) => self.note(line),
        }
    }

    fn evaluate(&mut self, ranks: &Ranks) -> Result<Option<Evaluation>, Error> {
        self.data.evaluate(ranks, self.eval_batches, self.interruption.is_asked())
    }

    fn checkpoint(&mut self, ranks: &Ranks, feed: &Value, progress: &Progress) -> Result<(), Error> {
        let (path, then) = (self.folder.checkpoint(progress.step), self.when_saved(progress));
        self.saver.begin(path, ranks, progress, feed.clone(), &self.origin, then)?;
        self.emit_checkpoint(progress)
    }

    fn last_checkpoint(&mut self, ranks: &Ranks, feed: &Value, progress: &Progress) -> Result<(), Error> {
        let (path, then) = (self.folder.checkpoint(progress.step), self.when_saved(progress));
        self.saver.save(path, ranks, progress, feed.clone(), &self.origin, then)?;
        self.emit_checkpoint(progress)
    }

    fn settle(&mut self) -> Result<(), Error> {
        self.saver.finish()
    }
}
