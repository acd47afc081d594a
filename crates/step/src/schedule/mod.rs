//! Schedules: functions that write programs.
//!
//! A line (`line`) is the tasks of one part of a micro-batch. A schedule chooses what forward keeps, how backward gets the rest
//! back, and whether lines run one after another or interleaved (`interleave`), one computing during another's exchange.

mod arrangement;
mod chain;
mod interleave;
mod line;
mod migration;
mod state;

pub use arrangement::Arrangement;
pub use chain::{Chain, ChainBucket, ChainMigration, ChainUnit, PartSize};
use interleave::interleave;
pub use line::Keep;
use line::Recompute;
use migration::migrate_and_return;
use state::{gather_parameters, reduce_gradients, tail};

use evenkeel_model::UnitKind;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::program::{Micro, Program, Task};
use crate::work::Work;

/// The input of a schedule.
#[derive(Clone, Copy, Debug)]
pub struct ScheduleInput<'a> {
    pub chain: &'a Chain,
    /// The parts of each micro-batch.
    pub micros: &'a [Vec<PartSize>],
    /// The units to compute again, if the schedule leaves a choice.
    pub recompute: Units,
    /// Whether a micro-batch begins as soon as the one before it reaches its backward.
    pub ahead: bool,
}

/// Some of a chain's units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Units {
    #[default]
    All,
    Attention,
    Mlp,
}

impl Units {
    fn contains(self, unit: &ChainUnit) -> bool {
        match self {
            Units::All => true,
            Units::Attention => matches!(unit.kind, UnitKind::Attention(_) | UnitKind::Layer(_)),
            Units::Mlp => matches!(unit.kind, UnitKind::Mlp(_) | UnitKind::Layer(_)),
        }
    }
}

/// A schedule, by its name.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    pub name: &'static str,
    pub about: &'static str,
    pub write: fn(&ScheduleInput) -> Program,
    /// Whether parts compute during the exchanges of others.
    pub overlaps: bool,
    /// Whether it leaves a choice of the units to compute again.
    pub chooses_units: bool,
}

impl PartialEq for Schedule {
    fn eq(&self, other: &Schedule) -> bool {
        self.name == other.name
    }
}

impl Schedule {
    /// The schedule of a run that chooses none. Layers that run again as a whole keep least; if shards reduce inside them, units
    /// run again on their own.
    pub fn usual(recomputes: bool, tp: usize) -> Schedule {
        match (recomputes, tp) {
            (false, _) => NONE,
            (true, 1) => CROSS_PASS,
            (true, _) => OASES,
        }
    }

    pub fn named(name: &str) -> Option<Schedule> {
        SCHEDULES.into_iter().chain(REFERENCES).find(|schedule| schedule.name == name)
    }
}

impl Serialize for Schedule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Schedule, D::Error> {
        let name = String::deserialize(deserializer)?;
        Schedule::named(&name).ok_or_else(|| D::Error::custom(format!("there is no schedule `{name}`")))
    }
}

pub const NONE: Schedule = Schedule {
    name: "none",
    about: "nothing is computed again; parts overlap",
    write: none,
    overlaps: true,
    chooses_units: false,
};
pub const DEFAULT: Schedule = Schedule {
    name: "default",
    about: "layers run again, the reductions inside them too; nothing overlaps",
    write: default,
    overlaps: false,
    chooses_units: false,
};
pub const SAVED_COMM: Schedule = Schedule {
    name: "saved-comm",
    about: "units run again, no reduction does; nothing overlaps",
    write: saved_comm,
    overlaps: false,
    chooses_units: true,
};
pub const CROSS_PASS: Schedule = Schedule {
    name: "cross-pass",
    about: "layers run again, the reductions inside them too; parts overlap",
    write: cross_pass,
    overlaps: true,
    chooses_units: false,
};
pub const OASES: Schedule = Schedule {
    name: "oases",
    about: "units run again, no reduction does; parts overlap",
    write: oases,
    overlaps: true,
    chooses_units: true,
};

pub const SCHEDULES: [Schedule; 5] = [NONE, DEFAULT, SAVED_COMM, CROSS_PASS, OASES];

/// Only for comparisons: `default` as it was published, with a reduction in every layer whose result is never read.
pub const DEFAULT_REFERENCE: Schedule = Schedule {
    name: "default-reference",
    about: "layers run again, all their reductions too; nothing overlaps",
    write: default_reference,
    ..DEFAULT
};
/// Only for comparisons: `cross-pass` as it was published, with a reduction in every layer whose result is never read.
pub const CROSS_PASS_REFERENCE: Schedule = Schedule {
    name: "cross-pass-reference",
    about: "layers run again, all their reductions too; parts overlap",
    write: cross_pass_reference,
    ..CROSS_PASS
};
pub const REFERENCES: [Schedule; 2] = [DEFAULT_REFERENCE, CROSS_PASS_REFERENCE];

/// Nothing is recomputed. The parts of a micro-batch overlap.
pub fn none(input: &ScheduleInput) -> Program {
    input.overlapped(input.lines(|_| Keep::Everything, Recompute::Bodies))
}

/// Keeps the input of a layer and runs the whole layer again before its backward, with the reductions between its units.
pub fn default(input: &ScheduleInput) -> Program {
    input.in_turn(input.lines(layer_inputs, Recompute::Layers))
}

/// Keeps the stream at each unit's entry, so that no reduction runs again.
pub fn saved_comm(input: &ScheduleInput) -> Program {
    input.in_turn(input.lines(input.streams_of_chosen(), Recompute::Bodies))
}

/// The default, but one part computes during another's reductions.
pub fn cross_pass(input: &ScheduleInput) -> Program {
    input.overlapped(input.lines(layer_inputs, Recompute::Layers))
}

/// No reduction runs twice, and one part computes during another's reductions.
pub fn oases(input: &ScheduleInput) -> Program {
    input.overlapped(input.lines(input.streams_of_chosen(), Recompute::Bodies))
}

fn default_reference(input: &ScheduleInput) -> Program {
    input.in_turn(input.lines(layer_inputs, Recompute::Everything))
}

fn cross_pass_reference(input: &ScheduleInput) -> Program {
    input.overlapped(input.lines(layer_inputs, Recompute::Everything))
}

/// A program of gradients with the tail of the step.
pub fn with_tail(mut program: Program, chain: &Chain) -> Program {
    program.tasks.extend(tail(chain));
    program
}

/// The losses of one micro-batch, and no gradients.
pub fn evaluation(chain: &Chain, size: &PartSize) -> Program {
    let tasks = gather_parameters(line::evaluation(chain, Micro { index: 0, part: 0 }, size), chain);
    Program { tasks, groups: chain.groups.clone(), blocking: false }
}

/// Adapts a program to parts of other sizes, with as many parts and chunks. Only the bytes of its exchanges change, and the ranks
/// of a tensor-parallel group agree on those whatever the sizes are, so the proof of the programs still holds.
pub fn fit(program: &mut Program, chain: &Chain, micros: &[Vec<PartSize>]) {
    for task in &mut program.tasks {
        if let (Work::AllReduce | Work::ReduceScatter | Work::AllGather, Some(exchange)) =
            (task.work, &mut task.exchange)
        {
            let size = &micros[task.micro.index][task.micro.part];
            exchange.bytes = chain.exchanged_bytes(task.unit, task.reads[0].kind, size);
        }
    }
}

fn layer_inputs(unit: &ChainUnit) -> Keep {
    if matches!(unit.kind, UnitKind::Mlp(_)) { Keep::Nothing } else { Keep::Stream }
}

impl<'a> ScheduleInput<'a> {
    fn streams_of_chosen(&self) -> impl Fn(&ChainUnit) -> Keep + use<> {
        let chosen = self.recompute;
        move |unit| if chosen.contains(unit) { Keep::Stream } else { Keep::Everything }
    }

    /// A line for each part of each micro-batch.
    fn lines(&self, keep: impl Fn(&ChainUnit) -> Keep, recompute: Recompute) -> Vec<Vec<Vec<Task>>> {
        let lowest = self.chain.lowest_trained().0;
        let kept = |(index, unit): (usize, &ChainUnit)| match keep(unit) {
            _ if index < lowest => Keep::Nothing,
            Keep::Nothing if index == lowest => Keep::Stream,
            kept => kept,
        };
        let keep: Vec<Keep> = self.chain.units.iter().enumerate().map(kept).collect();
        let micros = self.micros.iter().enumerate();
        let line = |index, part, size| line::training(self.chain, Micro { index, part }, size, &keep, recompute);
        micros
            .map(|(index, parts)| parts.iter().enumerate().map(|(part, size)| line(index, part, size)).collect())
            .collect()
    }

    fn in_turn(&self, lines: Vec<Vec<Vec<Task>>>) -> Program {
        self.program(lines.into_iter().flatten().flatten().collect(), true)
    }

    fn overlapped(&self, lines: Vec<Vec<Vec<Task>>>) -> Program {
        self.program(interleave(lines, self.ahead), false)
    }

    fn program(&self, tasks: Vec<Task>, blocking: bool) -> Program {
        let tasks = migrate_and_return(tasks, self.chain);
        let tasks = gather_parameters(reduce_gradients(tasks, self.chain), self.chain);
        Program { tasks, groups: self.chain.groups.clone(), blocking }
    }
}
