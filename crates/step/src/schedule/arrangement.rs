//! How a run arranges its steps: a schedule and its choices.

use serde::{Deserialize, Serialize};

use super::{Chain, NONE, PartSize, Schedule, ScheduleInput, Units, with_tail};
use crate::program::Program;

/// A schedule with its choices made, which writes programs:
///
/// ```
/// # use evenkeel_step::schedule::{Arrangement, OASES, Units};
/// let arrangement = Arrangement::of(OASES).in_parts(2).recomputing(Units::Mlp);
/// assert_eq!(arrangement.parts, 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arrangement {
    pub schedule: Schedule,
    /// The number of parts that each micro-batch is cut in, if it has so many samples.
    pub parts: usize,
    /// The units to compute again, if the schedule leaves a choice.
    pub recompute: Units,
    /// Whether a micro-batch begins as soon as the one before it reaches its backward.
    pub ahead: bool,
    /// Whether nothing is computed while something is exchanged, for comparison.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub blocking: bool,
}

impl Arrangement {
    /// Micro-batches whole and one after another.
    pub fn of(schedule: Schedule) -> Arrangement {
        Arrangement { schedule, parts: 1, recompute: Units::All, ahead: false, blocking: false }
    }

    pub fn in_parts(self, parts: usize) -> Arrangement {
        Arrangement { parts, ..self }
    }

    pub fn recomputing(self, recompute: Units) -> Arrangement {
        Arrangement { recompute, ..self }
    }

    pub fn ahead(self) -> Arrangement {
        Arrangement { ahead: true, ..self }
    }

    pub fn blocking(self) -> Arrangement {
        Arrangement { blocking: true, ..self }
    }

    /// Whether anything can be computed while something is exchanged.
    pub fn overlaps(&self) -> bool {
        self.schedule.overlaps && !self.blocking
    }

    /// The program of a step on micro-batches in parts of these sizes.
    pub fn step(&self, chain: &Chain, micros: &[Vec<PartSize>]) -> Program {
        with_tail(self.write(chain, micros), chain)
    }

    /// The same without its tail: the gradients alone.
    pub fn write(&self, chain: &Chain, micros: &[Vec<PartSize>]) -> Program {
        let input = ScheduleInput { chain, micros, recompute: self.recompute, ahead: self.ahead };
        let program = input.write(&self.schedule);
        Program { blocking: program.blocking || self.blocking, ..program }
    }
}

impl Default for Arrangement {
    fn default() -> Arrangement {
        Arrangement::of(NONE)
    }
}
