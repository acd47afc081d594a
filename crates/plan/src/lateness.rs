//! What steps take beyond their simulation: ranks that meet wait for whoever is late, and the host issues one task after another.
//!
//! Both grow with the numbers of meetings and tasks. How fast, measured steps tell: a linear regression with weak expectations, so
//! that a few measurements already say something and many decide.

use std::collections::BTreeSet;

use evenkeel_step::{Lane, Program};
use serde::{Deserialize, Serialize};

use crate::counted::Counted;

/// What the time of a step may depend on: its simulated seconds, meetings of each kind, and tasks; and what every step takes.
const TERMS: usize = 6;
/// Before anything is measured: a step takes as long as simulated, and nothing beside that.
const EXPECTED: [f64; TERMS] = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
/// How far off that may be: a share, seconds of a meeting, of a task, and of a step.
const DEVIATIONS: [f64; TERMS] = [0.3, 1e-4, 1e-4, 1e-4, 1e-5, 1e-3];
/// How far measured steps are off by themselves, as a share.
const NOISE: f64 = 0.05;
/// What a step says about those whose ranks meet in other groups, over what it says about those like it.
const OF_OTHER_GROUPS: f64 = 0.3;
/// Steps that are kept.
pub const MOST_STEPS: usize = 128;

/// The kinds of groups with several ranks.
pub fn groups(counted: &[Counted]) -> String {
    let several = counted.iter().flat_map(|counted| &counted.program.groups).filter(|group| group.ranks.len() > 1);
    // Passes have a group for each unit that begins a stage.
    let kinds = several.map(|group| if group.name.starts_with("pp ") { "pp" } else { group.name.as_str() });
    kinds.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" ")
}

/// The terms of a step, of the rank that has most of each.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTerms([f64; TERMS]);

/// A step that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredStep {
    /// The groups that its ranks meet in.
    pub groups: String,
    pub terms: StepTerms,
    pub seconds: f64,
}

/// What each term takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lateness([f64; TERMS]);

impl StepTerms {
    /// Of ranks whose programs take so long by a simulation.
    pub fn of(counted: &[Counted], simulated_s: f64) -> StepTerms {
        let mut most = [0.0; TERMS];
        for rank in counted.iter().map(of_rank) {
            most.iter_mut().zip(rank).for_each(|(most, found)| *most = f64::max(*most, found));
        }
        (most[0], most[TERMS - 1]) = (simulated_s, 1.0);
        StepTerms(most)
    }

    pub fn are_sound(&self) -> bool {
        self.0.iter().all(|term| (0.0..1e12).contains(term)) && self.0[0] > 0.0
    }
}

/// A meeting counts more the more members it has: one of them is late.
fn of_rank(Counted { program, stands_for, .. }: &Counted) -> [f64; TERMS] {
    let mut terms = [0.0; TERMS];
    for (index, task) in program.tasks.iter().enumerate() {
        let times = stands_for.get(index).copied().unwrap_or(1.0);
        match task.exchange {
            None => terms[4] += times,
            Some(exchange) => {
                terms[kind(program, exchange.group.0, task.work.lane())] +=
                    times * { (program.groups[exchange.group.0].ranks.len() as f64).log2() }
            }
        }
    }
    terms
}

/// The term of a meeting: of shards, of replicas, or of places.
fn kind(program: &Program, group: usize, lane: Lane) -> usize {
    match &*program.groups[group].name {
        _ if lane == Lane::Pass => 3,
        "dp" => 2,
        _ => 1,
    }
}

impl Lateness {
    /// Of ranks that meet in such groups.
    pub fn of(steps: &[MeasuredStep], groups: &str) -> Lateness {
        // Nothing takes less than no time: a term that seems to is left out.
        let mut is_left_out = [false; TERMS];
        loop {
            let found = regression(steps, groups, &is_left_out);
            let negative = (1..TERMS).filter(|&term| found[term] < 0.0 && !is_left_out[term]);
            match negative.min_by(|&a, &b| (found[a] / DEVIATIONS[a]).total_cmp(&(found[b] / DEVIATIONS[b]))) {
                Some(term) => is_left_out[term] = true,
                None => return Lateness(found.map(|seconds| seconds.max(0.0))),
            }
        }
    }

    /// Seconds of a step.
    pub fn step_s(&self, StepTerms(terms): &StepTerms) -> f64 {
        self.0.iter().zip(terms).map(|(seconds, term)| seconds * term).sum()
    }

    /// The same at least, whatever its meetings and tasks are.
    pub fn least_step_s(&self, simulated_s: f64) -> f64 {
        self.0[0] * simulated_s + self.0[TERMS - 1]
    }
}

/// The seconds of each term that are most likely by what is expected and measured, if errors are shares of steps.
fn regression(steps: &[MeasuredStep], groups: &str, is_left_out: &[bool; TERMS]) -> [f64; TERMS] {
    let mut rows = [[0.0; TERMS + 1]; TERMS];
    for (term, row) in rows.iter_mut().enumerate() {
        let deviation = if is_left_out[term] { 1e-6 * DEVIATIONS[term] } else { DEVIATIONS[term] };
        // In units of its deviation, so that all rows have numbers of one size.
        row[term] = (DEVIATIONS[term] / deviation).powi(2);
        row[TERMS] = row[term] * EXPECTED[term] / DEVIATIONS[term];
    }
    for MeasuredStep { groups: found, terms: StepTerms(terms), seconds } in steps {
        let weight = if found == groups { 1.0 } else { OF_OTHER_GROUPS };
        let scaled = |term: usize| terms[term] * DEVIATIONS[term] / seconds / NOISE;
        for (term, row) in rows.iter_mut().enumerate() {
            (0..TERMS).for_each(|other| row[other] += weight * scaled(term) * scaled(other));
            row[TERMS] += weight * scaled(term) / NOISE;
        }
    }
    let solution = solved(rows);
    std::array::from_fn(|term| solution[term] * DEVIATIONS[term])
}

/// The solution of linear equations with a positive definite matrix, whose right sides are the last column.
fn solved(mut rows: [[f64; TERMS + 1]; TERMS]) -> [f64; TERMS] {
    for pivot in 0..TERMS {
        let own = rows[pivot];
        for (_, row) in rows.iter_mut().enumerate().filter(|(index, _)| *index != pivot) {
            let factor = row[pivot] / own[pivot];
            row.iter_mut().zip(own).for_each(|(number, own)| *number -= factor * own);
        }
    }
    std::array::from_fn(|term| rows[term][TERMS] / rows[term][term])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(terms: [f64; TERMS], seconds: f64) -> MeasuredStep {
        MeasuredStep { groups: "tp".to_owned(), terms: StepTerms(terms), seconds }
    }

    #[test]
    fn without_measurements_steps_take_as_long_as_simulated() {
        let lateness = Lateness::of(&[], "tp");
        assert!((lateness.step_s(&StepTerms([0.1, 40.0, 3.0, 0.0, 900.0, 1.0])) - 0.1).abs() < 1e-9);
    }

    #[test]
    fn meetings_and_tasks_take_what_measured_steps_say() {
        let truth = [1.05, 8e-5, 3e-5, 0.0, 2e-6, 5e-4];
        let terms = |seed: usize| {
            [
                0.1 + 0.01 * (seed % 7) as f64,
                (seed * 37 % 400) as f64,
                (seed * 11 % 90) as f64,
                0.0,
                (seed * 91 % 2000) as f64,
                1.0,
            ]
        };
        let seconds = |terms: [f64; TERMS]| terms.iter().zip(truth).map(|(term, truth)| term * truth).sum::<f64>();
        let steps: Vec<MeasuredStep> = (0..40).map(|seed| step(terms(seed), seconds(terms(seed)))).collect();
        let lateness = Lateness::of(&steps, "tp");
        for seed in 50..60 {
            let off = lateness.step_s(&StepTerms(terms(seed))) / seconds(terms(seed)) - 1.0;
            assert!(off.abs() < 0.01, "{off}, {lateness:?}");
        }
        assert!(lateness.least_step_s(0.1) <= lateness.step_s(&StepTerms([0.1, 10.0, 0.0, 0.0, 0.0, 1.0])));
    }

    #[test]
    fn steps_with_the_same_groups_count_most() {
        let of = |groups: &str, seconds: f64| MeasuredStep {
            groups: groups.to_owned(),
            ..step([0.1, 0.0, 0.0, 0.0, 0.0, 1.0], seconds)
        };
        let steps: Vec<MeasuredStep> = [of("dp", 0.095), of("tp", 0.12)].into_iter().cycle().take(12).collect();
        let of_groups = |groups: &str| Lateness::of(&steps, groups).step_s(&StepTerms([0.1, 0.0, 0.0, 0.0, 0.0, 1.0]));
        assert!((of_groups("dp") / 0.095 - 1.0).abs() < 0.06 && (of_groups("tp") / 0.12 - 1.0).abs() < 0.06);
    }

    #[test]
    fn nothing_takes_less_than_no_time() {
        let steps = [step([0.1, 0.0, 0.0, 0.0, 10.0, 1.0], 0.11), step([0.1, 300.0, 0.0, 0.0, 10.0, 1.0], 0.08)];
        let Lateness(found) = Lateness::of(&steps, "tp");
        assert!(found.iter().all(|seconds| *seconds >= 0.0), "{found:?}");
        assert!((0.8..1.0).contains(&found[0]), "{found:?}");
    }
}
