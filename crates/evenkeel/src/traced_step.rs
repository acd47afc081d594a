//! A step of a benchmark or a plan, timed as a whole and task by task.

use std::time::{Duration, Instant};

use evenkeel_step::schedule::Arrangement;
use evenkeel_step::trace::{Span, Timeline};
use evenkeel_train::{Observe, Ranks, Samples, Trainer};

use crate::Failure;

/// The learning rate of measured steps.
pub const LR: f64 = 3e-4;

pub struct TracedStep {
    pub duration_s: f64,
    /// Of the same step without tracing, one of several in a row.
    pub untraced_s: f64,
    pub timeline: Timeline,
}

impl TracedStep {
    /// Time outside the program: the host's.
    pub fn beside_s(&self) -> f64 {
        self.duration_s - self.timeline.duration_s()
    }
}

/// Steps in a row are no more than this, however short they are.
const MOST_IN_A_ROW: f64 = 40.0;

/// Arranges the ranks' steps so, makes three to warm up and measures so many in a row that they take about `least_s`, and another one
/// with its tasks' times.
pub fn measure(
    ranks: &Ranks,
    arrangement: Arrangement,
    [first, second]: [Vec<Samples>; 2],
    least_s: f64,
) -> Result<TracedStep, Failure> {
    let warm_up = move |trainer: &mut Trainer| {
        trainer.rearrange(arrangement);
        // A GPU captures graphs of what it is told for the second time.
        for _ in 0..2 {
            trainer.step(&first, LR)?;
        }
        trainer.device.compute().finish();
        let start = Instant::now();
        trainer.step(&first, LR)?;
        trainer.device.compute().finish();
        Ok(start.elapsed())
    };
    let warmed_up: Vec<Duration> =
        ranks.with_trainers(warm_up)?.into_iter().collect::<Result<_, evenkeel_train::Error>>()?;
    let longest_s = warmed_up.into_iter().max().expect("there is a rank").as_secs_f64();
    // All ranks make as many.
    let in_a_row = (least_s / longest_s).ceil().clamp(1.0, MOST_IN_A_ROW) as u32;
    let epoch = Instant::now();
    let measured = move |trainer: &mut Trainer| {
        let start = Instant::now();
        for _ in 0..in_a_row {
            trainer.step(&second, LR)?;
        }
        trainer.device.compute().finish();
        let untraced = start.elapsed();
        let mut prepared = trainer.prepare(&second)?;
        let spans = trainer.step_on(&mut prepared, LR, Observe::Tasks { epoch }).spans;
        Ok(([start.elapsed() - untraced, untraced / in_a_row], spans))
    };
    type Measured = ([Duration; 2], Vec<Span>);
    let measured =
        ranks.with_trainers(measured)?.into_iter().collect::<Result<Vec<Measured>, evenkeel_train::Error>>()?;
    let longest = |which: usize| measured.iter().map(|(durations, _)| durations[which]).max().expect("there is a rank");
    let [duration_s, untraced_s] = [0, 1].map(|which| longest(which).as_secs_f64());
    let ranks = measured.into_iter().map(|(_, spans)| spans).collect();
    Ok(TracedStep { duration_s, untraced_s, timeline: Timeline { ranks } })
}
