//! How much longer steps take than their simulation: ranks that meet wait for whoever is late, hosts issue one task after another,
//! and the stamps that tasks were timed with take time that other steps do not have.
//!
//! Measured steps tell, by a Gaussian process: every meeting and task adds some seconds or saves them, a few percent follow from
//! nothing else, and steps that are alike are off alike. So a few measurements already say something, and many decide.

use evenkeel_step::{Lane, Program};
use serde::{Deserialize, Serialize};

use crate::counted::Counted;

/// Kinds of meetings: of shards, of replicas, of places.
const KINDS: usize = 3;
/// Terms of the ratio of measured to simulated seconds: a constant, and meetings, tasks and steps in a simulated second.
const LINEAR: usize = KINDS + 3;
/// How far each may be off: a share, and seconds of a meeting, a task and a step.
const DEVIATIONS: [f64; LINEAR] = [0.2, 1e-4, 1e-4, 1e-4, 1e-5, 1e-3];
/// The share by which steps that are alike are off alike, beside that.
const ALIKE: f64 = 0.05;
/// Steps are no longer alike if they have so many times the tasks in a second, or the meetings among their tasks.
const UNLIKE: f64 = 2.0;
/// Fewer meetings than this among tasks are as good as none.
const FEW_MEETINGS: f64 = 0.01;
/// How far measured steps are off by themselves, as a share.
const NOISE: f64 = 0.04;
/// No step is foretold to be further below the simulated one, beside what was measured.
const LEAST: f64 = 0.9;
/// Steps that are kept.
pub const MOST_STEPS: usize = 128;

/// A step's simulated time, meetings and tasks, of the rank that has most of each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTerms {
    simulated_s: f64,
    meetings: [f64; KINDS],
    tasks: f64,
}

/// A step that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredStep {
    pub terms: StepTerms,
    pub seconds: f64,
}

/// Foretells steps from measured ones.
#[derive(Clone, Debug)]
pub struct Lateness {
    steps: Vec<MeasuredStep>,
    /// By step.
    weights: Vec<f64>,
}

impl StepTerms {
    /// The terms of ranks whose programs take so long by a simulation.
    pub fn of(counted: &[Counted], simulated_s: f64) -> StepTerms {
        let mut most = StepTerms { simulated_s, meetings: [0.0; KINDS], tasks: 0.0 };
        for (meetings, tasks) in counted.iter().map(of_rank) {
            most.meetings.iter_mut().zip(meetings).for_each(|(most, found)| *most = f64::max(*most, found));
            most.tasks = most.tasks.max(tasks);
        }
        most
    }

    fn linear(&self) -> [f64; LINEAR] {
        let [shards, replicas, places] = self.meetings.map(|meetings| meetings / self.simulated_s);
        [1.0, shards, replicas, places, self.tasks / self.simulated_s, 1.0 / self.simulated_s]
    }

    /// How many meetings there are among tasks, and tasks in a second: steps are alike if these are, however long they are.
    fn mix(&self) -> [f64; KINDS + 1] {
        let tasks = self.tasks.max(1.0);
        let [shards, replicas, places] = self.meetings.map(|meetings| (meetings / tasks + FEW_MEETINGS).log2());
        [shards, replicas, places, (tasks / self.simulated_s).log2()]
    }
}

/// Meetings and tasks. A meeting counts more the more members it has: one of them is late.
fn of_rank(Counted { program, stands_for, .. }: &Counted) -> ([f64; KINDS], f64) {
    let (mut meetings, mut tasks) = ([0.0; KINDS], 0.0);
    for (index, task) in program.tasks.iter().enumerate() {
        let times = stands_for.get(index).copied().unwrap_or(1.0);
        match task.exchange {
            None => tasks += times,
            Some(exchange) => {
                meetings[kind(program, exchange.group.0, task.work.lane())] +=
                    times * { (program.groups[exchange.group.0].ranks.len() as f64).log2() }
            }
        }
    }
    (meetings, tasks)
}

fn kind(program: &Program, group: usize, lane: Lane) -> usize {
    match &*program.groups[group].name {
        _ if lane == Lane::Pass => 2,
        "dp" => 1,
        _ => 0,
    }
}

impl MeasuredStep {
    pub fn is_sound(&self) -> bool {
        let StepTerms { meetings, tasks, .. } = self.terms;
        let are_counts = meetings.into_iter().chain([tasks]).all(|count| (0.0..1e12).contains(&count));
        are_counts && (1e-6..1e6).contains(&self.terms.simulated_s) && (0.01..100.0).contains(&self.ratio())
    }

    fn ratio(&self) -> f64 {
        self.seconds / self.terms.simulated_s
    }
}

/// How much the ratios of two steps vary together.
fn covariance(one: &StepTerms, other: &StepTerms) -> f64 {
    let linear = one.linear().into_iter().zip(other.linear()).zip(DEVIATIONS);
    let linear: f64 = linear.map(|((one, other), deviation)| one * other * deviation * deviation).sum();
    let apart: f64 = one.mix().into_iter().zip(other.mix()).map(|(one, other)| (one - other).powi(2)).sum();
    linear + ALIKE * ALIKE * (-0.5 * apart / UNLIKE.log2().powi(2)).exp()
}

impl Lateness {
    pub fn of(steps: &[MeasuredStep]) -> Lateness {
        let rows = steps.iter().enumerate().map(|(index, step)| {
            let mut row: Vec<f64> = steps.iter().map(|other| covariance(&step.terms, &other.terms)).collect();
            row[index] += NOISE * NOISE;
            row
        });
        let off = steps.iter().map(|step| step.ratio() - 1.0).collect();
        Lateness { weights: solved(rows.collect(), off), steps: steps.to_vec() }
    }

    /// Seconds of a step.
    pub fn step_s(&self, terms: &StepTerms) -> f64 {
        let of_step = |(step, weight): (&MeasuredStep, &f64)| weight * covariance(terms, &step.terms);
        let ratio = 1.0 + self.steps.iter().zip(&self.weights).map(of_step).sum::<f64>();
        terms.simulated_s * ratio.max(least_ratio(&self.steps))
    }
}

/// No step takes a smaller share of its simulation than this, after such steps.
pub fn least_ratio(steps: &[MeasuredStep]) -> f64 {
    LEAST * steps.iter().map(MeasuredStep::ratio).fold(1.0, f64::min)
}

/// The solution of linear equations with a positive definite matrix, by Cholesky's factors.
fn solved(mut rows: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let count = right.len();
    let dot = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(one, other)| one * other).sum::<f64>();
    for row in 0..count {
        for column in 0..=row {
            let rest = rows[row][column] - dot(&rows[row][..column], &rows[column][..column]);
            // Every step's own noise is in its pivot, also where that is lost to rounding.
            rows[row][column] =
                if row == column { rest.max(NOISE * NOISE).sqrt() } else { rest / rows[column][column] };
        }
    }
    for row in 0..count {
        right[row] = (right[row] - dot(&rows[row][..row], &right[..row])) / rows[row][row];
    }
    for row in (0..count).rev() {
        let below: f64 = (row + 1..count).map(|below| rows[below][row] * right[below]).sum();
        right[row] = (right[row] - below) / rows[row][row];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(simulated_s: f64, shards: f64, tasks: f64) -> StepTerms {
        StepTerms { simulated_s, meetings: [shards, 3.0, 0.0], tasks }
    }

    fn of(steps: impl IntoIterator<Item = (StepTerms, f64)>) -> Lateness {
        let steps: Vec<MeasuredStep> =
            steps.into_iter().map(|(terms, seconds)| MeasuredStep { terms, seconds }).collect();
        assert!(steps.iter().all(MeasuredStep::is_sound));
        Lateness::of(&steps)
    }

    #[test]
    fn without_measurements_steps_take_as_long_as_simulated() {
        assert_eq!(of([]).step_s(&terms(0.1, 40.0, 900.0)), 0.1);
    }

    #[test]
    fn meetings_and_tasks_take_what_measured_steps_say() {
        // Tasks that were timed by stamps take less without them.
        for task_s in [2e-6, -2e-6] {
            let some = |seed: usize| {
                terms(0.1 + 0.01 * (seed % 7) as f64, (seed * 37 % 400) as f64, 200.0 + (seed * 91 % 2000) as f64)
            };
            let seconds = |it: &StepTerms| 1.05 * it.simulated_s + 8e-5 * it.meetings[0] + task_s * it.tasks + 5e-4;
            let lateness = of((0..40).map(some).map(|it| (it, seconds(&it))));
            for it in (50..60).map(some) {
                let off = lateness.step_s(&it) / seconds(&it) - 1.0;
                assert!(off.abs() < 0.01, "{off}, {it:?}");
            }
        }
    }

    #[test]
    fn steps_that_are_alike_are_off_alike() {
        let (few, many) = (terms(0.1, 0.0, 200.0), terms(0.1, 100.0, 200.0));
        let lateness = of([(few, 0.095), (many, 0.12)].into_iter().cycle().take(12));
        // The same mix in a longer step.
        let longer = |it: StepTerms| StepTerms {
            simulated_s: 8.0 * it.simulated_s,
            meetings: it.meetings.map(|meetings| 8.0 * meetings),
            tasks: 8.0 * it.tasks,
        };
        for (it, expected) in [(few, 0.95), (many, 1.2), (longer(few), 0.95), (longer(many), 1.2)] {
            let ratio = lateness.step_s(&it) / it.simulated_s;
            assert!((ratio / expected - 1.0).abs() < 0.02, "{ratio} instead of {expected}");
        }
        // Nothing is known about steps unlike all of these but that steps take longer in the mean.
        let other = lateness.step_s(&terms(0.1, 0.0, 100_000.0)) / 0.1;
        assert!((0.9..1.3).contains(&other), "{other}");
    }

    #[test]
    fn no_step_takes_less_than_any_that_was_measured() {
        let steps = [(terms(0.1, 0.0, 10.0), 0.11), (terms(0.1, 3000.0, 10.0), 0.08)];
        let lateness = of(steps);
        let least = least_ratio(&lateness.steps);
        assert!((least - 0.72).abs() < 1e-9);
        for meetings in [0.0, 3e3, 3e5] {
            assert!(lateness.step_s(&terms(0.1, meetings, 10.0)) >= 0.1 * least);
        }
    }

    #[test]
    fn numbers_that_no_step_has_are_not_sound() {
        let sound = MeasuredStep { terms: terms(0.1, 3.0, 10.0), seconds: 0.1 };
        assert!(sound.is_sound());
        for bad in [f64::NAN, -1.0, f64::INFINITY, 1e300, 0.0] {
            assert!(!MeasuredStep { seconds: bad, ..sound }.is_sound(), "{bad}");
            assert!(!MeasuredStep { terms: terms(bad, 3.0, 10.0), ..sound }.is_sound(), "{bad}");
            assert_eq!(MeasuredStep { terms: terms(0.1, bad, 10.0), ..sound }.is_sound(), bad == 0.0, "{bad}");
        }
    }
}
