//! The loop: samples, steps, evaluations and checkpoints until a limit is reached.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use evenkeel_balance::Observation;
use evenkeel_data::RecordCounts;
use evenkeel_step::trace::Shares;

use crate::Error;
use crate::balance::{Balance, Balanced};
use crate::ranks::Ranks;
use crate::rate::Rate;
use crate::restage::{Restage, Restaged};
use crate::samples::Samples;
use crate::trainer::{Evaluation, StepOutcome};

/// A source of micro-batches.
pub trait Feed {
    /// The next micro-batch; `None` after the last epoch.
    fn next(&mut self) -> Result<Option<Samples>, Error>;

    /// The share of the epochs that is done, if their number is a limit.
    fn progress(&self) -> Option<f64>;

    /// Epochs done, such as 1.25.
    fn epoch(&self) -> f64;

    /// Records passed over or cut before the micro-batches handed out so far.
    fn counts(&self) -> RecordCounts {
        RecordCounts::default()
    }

    /// Remarks on the data since the last call.
    fn take_notes(&mut self) -> Vec<String> {
        Vec::new()
    }

    /// A state from which another feed continues with the very next sample.
    fn state(&self) -> serde_json::Value;
}

/// The end of a run. Limits that are not set do not end it; the feed's end always does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    pub steps: Option<u64>,
    pub tokens: Option<u64>,
    pub duration: Option<Duration>,
}

/// The rate, limits and intervals of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunGoals {
    pub rate: Rate,
    pub limits: Limits,
    /// Micro-batches of all replicas together.
    pub micros_per_step: usize,
    pub evaluate_every: Option<u64>,
    pub checkpoint_every: Option<u64>,
    /// The run ends after so many steps in a row whose loss or gradients are not finite.
    pub nonfinite_limit: u32,
    /// Whether a checkpoint is written after each evaluation that is better than all before it.
    pub keep_best: bool,
    pub early_stop: Option<EarlyStop>,
}

/// Ends a run whose evaluations no longer improve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EarlyStop {
    /// Evaluations in a row that may be no better than the best before them.
    pub patience: u32,
    /// An evaluation counts as better only if its loss is lower by more than this.
    pub min_delta: f64,
}

/// The evaluation with the lowest loss.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Best {
    pub step: u64,
    pub loss: f64,
}

/// Progress of a run; part of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Progress {
    pub step: u64,
    pub tokens: u64,
    pub seconds: f64,
    /// The share of the run at which the warm-up ended.
    pub warmup_share: f64,
    /// Steps in a row without an update.
    pub nonfinite_in_a_row: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// Evaluations in a row that were no better than the best before them.
    #[serde(default)]
    pub evaluations_without_gain: u32,
    /// The step of the last evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluated: Option<u64>,
}

impl Progress {
    /// Takes in an evaluation's loss. A loss that is not a number is never better.
    fn judge(&mut self, loss: f64, min_delta: f64) {
        self.evaluated = Some(self.step);
        let is_gain = self.best.map_or(loss.is_finite(), |best| best.loss - loss > min_delta);
        self.evaluations_without_gain = if is_gain { 0 } else { self.evaluations_without_gain + 1 };
        if loss.is_finite() && self.best.is_none_or(|best| loss < best.loss) {
            self.best = Some(Best { step: self.step, loss });
        }
    }

    fn is_best(&self) -> bool {
        self.best.is_some_and(|best| best.step == self.step)
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A limit was reached.
    Done,
    /// The data are used up.
    DataEnded,
    /// Evaluations no longer improve.
    NoGain,
    /// The user asked for it.
    Interrupted,
}

/// An event of a run, for display and records.
#[derive(Clone, Copy, Debug)]
pub enum Report<'a> {
    Step(&'a StepReport),
    Evaluation {
        step: u64,
        evaluation: &'a Evaluation,
    },
    /// Slow ranks led to a change.
    Balanced(&'a Balanced),
    /// Slow places of the pipeline led to other stages.
    Restaged(&'a Restaged),
    /// A remark on the data.
    Note(&'a str),
}

/// A finished step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// From 1.
    pub step: u64,
    /// Epochs done, this step's samples included.
    pub epoch: f64,
    pub lr: f64,
    pub outcome: StepOutcome,
    /// Total of all steps so far.
    pub tokens: u64,
    pub duration: Duration,
    /// Duration of the whole run, resumed parts included.
    pub elapsed: Duration,
    /// The share of the run that is done.
    pub share: f64,
    /// Totals of all records so far.
    pub counts: RecordCounts,
    /// By shard, or by place of a pipeline: the slowest of its ranks, if they are observed.
    pub ranks: Vec<RankReport>,
    /// By rank: its time by its use, if the observer wanted to know.
    pub times: Vec<Shares>,
}

/// The work of a shard or of a place in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankReport {
    pub observed: Observation,
    /// The width of a shard's work: groups of heads and FFN columns.
    pub head_groups: f64,
    pub columns: usize,
    /// Those of a place's stages.
    pub units: usize,
}

/// What a run does about slow ranks: it divides layers anew between the ranks that share them, or stages between places.
#[derive(Default)]
pub struct Balancing<'a, 'b> {
    pub widths: Option<&'a mut Balance>,
    pub stages: Option<&'a mut Restage<'b>>,
}

/// The parts of a run that the loop leaves to its caller.
pub trait RunObserver {
    /// Step `step`, from 1, is about to begin.
    fn stepping(&mut self, ranks: &Ranks, step: u64) -> Result<(), Error>;
    /// Whether the tasks of the next step are to be timed one by one. They are not where widths are balanced, which needs every step.
    fn wants_times(&self) -> bool {
        false
    }
    /// Shows or records an event.
    fn tell(&mut self, report: Report) -> Result<(), Error>;
    /// Evaluates on held-out samples; `None` if there are none, or the run was interrupted.
    fn evaluate(&mut self, ranks: &Ranks) -> Result<Option<Evaluation>, Error>;
    /// Writes everything needed to continue from here, with the feed in this state; it may still be on its way on return.
    fn checkpoint(&mut self, ranks: &Ranks, feed: &serde_json::Value, progress: &Progress) -> Result<(), Error>;
    /// The same, if no step follows: the ranks may have to wait until it is written.
    fn last_checkpoint(&mut self, ranks: &Ranks, feed: &serde_json::Value, progress: &Progress) -> Result<(), Error> {
        self.checkpoint(ranks, feed, progress)
    }
    /// Waits until all checkpoints are complete.
    fn settle(&mut self) -> Result<(), Error>;
}

/// Trains until a limit is reached, the data end or `interrupted` is set. Then it checkpoints the last good state, also if data
/// or an evaluation fail. `balancing` observes the ranks and has work moved between them.
pub fn run(
    ranks: &Ranks,
    feed: &mut dyn Feed,
    plan: &RunGoals,
    mut balancing: Balancing,
    progress: &mut Progress,
    interrupted: &AtomicBool,
    observer: &mut dyn RunObserver,
) -> Result<Stop, Error> {
    let begun = Instant::now();
    let seconds_before = progress.seconds;
    let mut checkpointed = progress.step;
    // A step that fails may have taken some of its samples already.
    let (mut reached, mut feed_state) = (progress.step, feed.state());
    // A continued run may have been interrupted in the middle of an evaluation.
    if is_due(plan.evaluate_every, progress.step) && progress.evaluated != Some(progress.step) {
        evaluate(ranks, plan, progress, observer)?;
    }
    let outcome = loop {
        if interrupted.load(Ordering::Relaxed) {
            break Ok(Stop::Interrupted);
        }
        if share(plan, progress, feed) >= 1.0 {
            break Ok(Stop::Done);
        }
        if plan.early_stop.is_some_and(|stop| progress.evaluations_without_gain >= stop.patience) {
            break Ok(Stop::NoGain);
        }
        let stepped = step(ranks, feed, plan, &mut balancing, progress, observer);
        if progress.step > reached {
            (reached, feed_state) = (progress.step, feed.state());
        }
        match stepped {
            Ok(true) => progress.seconds = seconds_before + begun.elapsed().as_secs_f64(),
            Ok(false) => break Ok(Stop::DataEnded),
            Err(error) => break Err(error),
        }
        let is_wanted = is_due(plan.checkpoint_every, progress.step) || (plan.keep_best && progress.is_best());
        if is_wanted && share(plan, progress, feed) < 1.0 {
            observer.checkpoint(ranks, &feed_state, progress)?;
            checkpointed = progress.step;
        }
    };
    let told = match balancing.widths.and_then(Balance::judge) {
        Some(balanced) => observer.tell(Report::Balanced(&balanced)),
        None => Ok(()),
    };
    if matches!(outcome, Err(Error::NotFinite { .. })) {
        return observer.settle().and(told).and(outcome);
    }
    let before = *progress;
    let evaluated = match outcome {
        Ok(Stop::Done | Stop::DataEnded) if progress.evaluated != Some(progress.step) => {
            evaluate(ranks, plan, progress, observer)
        }
        _ => Ok(()),
    };
    // A checkpoint of this step may exist already, but does not know of its evaluation.
    if checkpointed != progress.step || *progress != before {
        observer.last_checkpoint(ranks, &feed_state, progress)?;
    }
    observer.settle()?;
    told.and(evaluated).and(outcome)
}

/// One step, its report, balancing and evaluation; false if there are no more samples.
fn step(
    ranks: &Ranks,
    feed: &mut dyn Feed,
    plan: &RunGoals,
    balancing: &mut Balancing,
    progress: &mut Progress,
    observer: &mut dyn RunObserver,
) -> Result<bool, Error> {
    observer.stepping(ranks, progress.step + 1)?;
    let start = Instant::now();
    let share = rate_share(plan, progress, feed);
    let micros = next_micros(feed, plan.micros_per_step);
    feed.take_notes().iter().try_for_each(|note| observer.tell(Report::Note(note)))?;
    let micros = micros?;
    if micros.is_empty() {
        return Ok(false);
    }
    if progress.step == plan.rate.warmup_steps {
        progress.warmup_share = share;
    }
    let lr = plan.rate.at(progress.step, share, progress.warmup_share);
    let Balancing { widths: balance, stages } = balancing;
    let measuring = Instant::now();
    if let Some(stages) = stages
        && let Some(restaged) = stages.before_step(ranks, progress.step, &micros)?
    {
        observer.tell(Report::Restaged(&restaged))?;
    }
    let start = start + measuring.elapsed();
    let wants_times = balance.is_none() && observer.wants_times();
    // Stages are as well judged by the steps behind the few that are timed.
    let stages = stages.as_deref_mut().filter(|stages| !wants_times && stages.is_due(progress.step + 1));
    let (mut observed, mut times) = (Vec::new(), Vec::new());
    let outcome;
    if balance.is_some() || stages.is_some() {
        (outcome, observed) = ranks.observed_step(micros, lr)?;
    } else if wants_times {
        (outcome, times) = ranks.timed_step(micros, lr)?;
    } else {
        outcome = ranks.step(micros, lr)?;
    }
    progress.step += 1;
    progress.tokens += outcome.tokens as u64;
    let duration = start.elapsed();
    progress.seconds += duration.as_secs_f64();
    let share = self::share(plan, progress, feed).min(1.0);
    let report = StepReport {
        step: progress.step,
        epoch: feed.epoch(),
        lr,
        outcome,
        tokens: progress.tokens,
        duration,
        elapsed: Duration::from_secs_f64(progress.seconds),
        share,
        counts: feed.counts(),
        ranks: match (balance.as_deref(), stages.as_deref()) {
            (Some(balance), _) => balance.reports(&observed),
            (None, Some(stages)) => stages.reports(&observed),
            (None, None) => Vec::new(),
        },
        times,
    };
    observer.tell(Report::Step(&report))?;
    guard(plan, progress, &outcome)?;
    // Steps left, at the pace so far.
    let left = (progress.step as f64 * (1.0 - share) / share.max(f64::MIN_POSITIVE)) as u64;
    if let Some(balance) = balance
        && let Some(balanced) = balance.after_step(ranks, progress.step, duration, &observed, left)?
    {
        observer.tell(Report::Balanced(&balanced))?;
    }
    if let Some(stages) = stages
        && let Some(restaged) = stages.after_step(ranks, progress.step, &observed, left)?
    {
        observer.tell(Report::Restaged(&restaged))?;
    }
    if is_due(plan.evaluate_every, progress.step) {
        evaluate(ranks, plan, progress, observer)?;
    }
    Ok(true)
}

fn evaluate(
    ranks: &Ranks,
    plan: &RunGoals,
    progress: &mut Progress,
    observer: &mut dyn RunObserver,
) -> Result<(), Error> {
    let Some(evaluation) = observer.evaluate(ranks)? else { return Ok(()) };
    progress.judge(evaluation.loss(), plan.early_stop.map_or(0.0, |stop| stop.min_delta));
    observer.tell(Report::Evaluation { step: progress.step, evaluation: &evaluation })
}

fn is_due(every: Option<u64>, step: u64) -> bool {
    every.is_some_and(|every| step > 0 && step.is_multiple_of(every))
}

/// The micro-batches of a step; fewer at the end of the data.
fn next_micros(feed: &mut dyn Feed, count: usize) -> Result<Vec<Samples>, Error> {
    let mut micros = Vec::with_capacity(count);
    while micros.len() < count
        && let Some(samples) = feed.next()?
    {
        micros.push(samples);
    }
    Ok(micros)
}

/// The share of the run that is done, by the nearest limit.
fn share(plan: &RunGoals, progress: &Progress, feed: &dyn Feed) -> f64 {
    let time = plan.limits.duration.map_or(0.0, |duration| progress.seconds / duration.as_secs_f64());
    countable_share(plan, progress, feed).unwrap_or(0.0).max(time)
}

/// The share that the learning rate follows. The clock counts only if nothing else limits the run, since no two runs agree on it.
fn rate_share(plan: &RunGoals, progress: &Progress, feed: &dyn Feed) -> f64 {
    countable_share(plan, progress, feed).unwrap_or_else(|| share(plan, progress, feed))
}

fn countable_share(plan: &RunGoals, progress: &Progress, feed: &dyn Feed) -> Option<f64> {
    let shares = [
        plan.limits.steps.map(|steps| progress.step as f64 / steps as f64),
        plan.limits.tokens.map(|tokens| progress.tokens as f64 / tokens as f64),
        feed.progress(),
    ];
    shares.into_iter().flatten().reduce(f64::max)
}

/// Ends a run that no longer learns.
fn guard(plan: &RunGoals, progress: &mut Progress, outcome: &StepOutcome) -> Result<(), Error> {
    let is_finite = outcome.loss.is_finite() && outcome.grad_norm.is_finite();
    progress.nonfinite_in_a_row = if is_finite { 0 } else { progress.nonfinite_in_a_row + 1 };
    if progress.nonfinite_in_a_row >= plan.nonfinite_limit {
        let (steps, step) = (progress.nonfinite_in_a_row, progress.step);
        return Err(Error::NotFinite { steps, step, loss: outcome.loss, grad_norm: outcome.grad_norm });
    }
    Ok(())
}
