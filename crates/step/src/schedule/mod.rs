//! Schedules write programs.
//!
//! A line (`line`) is the tasks of one part of a micro-batch. A schedule chooses what forward keeps, how backward gets the rest
//! back, and whether lines run one after another or interleaved (`interleave`), one computing during another's exchange.

mod arrangement;
mod chain;
mod interleave;
mod line;
mod migration;
mod stages;
mod state;

pub use arrangement::Arrangement;
pub use chain::{Chain, ChainBucket, ChainMigration, ChainStages, ChainUnit, PartSize};
use interleave::interleave;
pub use line::Keep;
use line::{Line, Recompute};
use migration::migrate_and_return;
use state::{gather_parameters, reduce_gradients, tail};

use std::fmt::{self, Debug, Formatter};
use std::ops::Range;

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
    pub fn name(self) -> &'static str {
        match self {
            Units::All => "all",
            Units::Attention => "attention",
            Units::Mlp => "mlp",
        }
    }

    pub fn contains(self, kind: UnitKind) -> bool {
        match self {
            Units::All => true,
            Units::Attention => matches!(kind, UnitKind::Attention(_) | UnitKind::Layer(_)),
            Units::Mlp => matches!(kind, UnitKind::Mlp(_) | UnitKind::Layer(_)),
        }
    }
}

/// A schedule, by its name.
#[derive(Clone, Copy)]
pub struct Schedule {
    pub name: &'static str,
    pub about: &'static str,
    /// What a unit's forward keeps, if the unit is among those to compute again.
    keeps: fn(&ChainUnit) -> Keep,
    recompute: Recompute,
    /// Whether parts compute during the exchanges of others.
    pub overlaps: bool,
    /// Whether it leaves a choice of the units to compute again.
    pub chooses_units: bool,
}

impl Debug for Schedule {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
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
    keeps: |_| Keep::Everything,
    recompute: Recompute::Bodies,
    overlaps: true,
    chooses_units: false,
};
pub const DEFAULT: Schedule = Schedule {
    name: "default",
    about: "layers run again, the reductions inside them too; nothing overlaps",
    keeps: layer_inputs,
    recompute: Recompute::Layers,
    overlaps: false,
    chooses_units: false,
};
pub const SAVED_COMM: Schedule = Schedule {
    name: "saved-comm",
    about: "units run again, no reduction does; nothing overlaps",
    keeps: |_| Keep::Stream,
    recompute: Recompute::Bodies,
    overlaps: false,
    chooses_units: true,
};
pub const CROSS_PASS: Schedule = Schedule {
    name: "cross-pass",
    about: "layers run again, the reductions inside them too; parts overlap",
    keeps: layer_inputs,
    recompute: Recompute::Layers,
    overlaps: true,
    chooses_units: false,
};
pub const OASES: Schedule = Schedule {
    name: "oases",
    about: "units run again, no reduction does; parts overlap",
    keeps: |_| Keep::Stream,
    recompute: Recompute::Bodies,
    overlaps: true,
    chooses_units: true,
};

pub const SCHEDULES: [Schedule; 5] = [NONE, DEFAULT, SAVED_COMM, CROSS_PASS, OASES];

/// Only for comparisons: `default` as it was published, with a reduction in every layer whose result is never read.
pub const DEFAULT_REFERENCE: Schedule = Schedule {
    name: "default-reference",
    about: "layers run again, all their reductions too; nothing overlaps",
    recompute: Recompute::Everything,
    ..DEFAULT
};
/// Only for comparisons: `cross-pass` as it was published, with a reduction in every layer whose result is never read.
pub const CROSS_PASS_REFERENCE: Schedule = Schedule {
    name: "cross-pass-reference",
    about: "layers run again, all their reductions too; parts overlap",
    recompute: Recompute::Everything,
    ..CROSS_PASS
};
pub const REFERENCES: [Schedule; 2] = [DEFAULT_REFERENCE, CROSS_PASS_REFERENCE];

/// A program of gradients with the tail of the step.
pub fn with_tail(mut program: Program, chain: &Chain) -> Program {
    program.tasks.extend(tail(chain));
    program
}

/// The losses of one micro-batch, and no gradients.
pub fn evaluation(chain: &Chain, size: &PartSize) -> Program {
    let (keep, micro) = (vec![Keep::Nothing; chain.units.len()], Micro { index: 0, part: 0 });
    let evaluated = |stage| Line::new(chain, stage, micro, size, &keep, Recompute::Bodies).evaluation();
    let tasks = if chain.stages.pipeline.is_absent() {
        evaluated(0..chain.units.len())
    } else {
        stages::forward(chain, size, evaluated)
    };
    let tasks = gather_parameters(tasks, chain);
    Program { tasks, groups: chain.groups.clone(), blocking: false }
}

/// Adapts a program to parts of other sizes, with as many parts and chunks. Only the bytes of its exchanges change, and their
/// members agree on those whatever the sizes are, so the proof of the programs still holds.
pub fn fit(program: &mut Program, chain: &Chain, micros: &[Vec<PartSize>]) {
    for task in &mut program.tasks {
        let Some(exchange) = &mut task.exchange else { continue };
        let size = || &micros[task.micro.index][task.micro.part];
        match task.work {
            Work::AllReduce | Work::ReduceScatter | Work::AllGather | Work::GatherStats(_) => {
                exchange.bytes = chain.exchanged_bytes(task.unit, task.reads[0].kind, size());
            }
            Work::Pass | Work::PassGradient => exchange.bytes = chain.passed_bytes(size()),
            _ => (),
        }
    }
}

fn layer_inputs(unit: &ChainUnit) -> Keep {
    if matches!(unit.kind, UnitKind::Mlp(_)) { Keep::Nothing } else { Keep::Stream }
}

impl ScheduleInput<'_> {
    /// The program of gradients that a schedule makes of it.
    fn write(&self, schedule: &Schedule) -> Program {
        let keep = self.keep(schedule);
        let line = |stage: Range<usize>, micro: Micro| {
            let size = &self.micros[micro.index][micro.part];
            Line::new(self.chain, stage, micro, size, &keep, schedule.recompute)
        };
        let arrange = |micros: &mut dyn Iterator<Item = Vec<Vec<Task>>>| {
            if schedule.overlaps { interleave(micros, self.ahead) } else { micros.flatten().flatten().collect() }
        };
        let tasks = if self.chain.stages.pipeline.is_absent() {
            let whole = |micro: Micro| line(0..self.chain.units.len(), micro).training();
            arrange(&mut (0..self.micros.len()).map(|index| parts(self.micros, index).map(whole).collect()))
        } else {
            stages::training(self.chain, self.micros, line, arrange)
        };
        let tasks = migrate_and_return(tasks, self.chain);
        let tasks = gather_parameters(reduce_gradients(tasks, self.chain), self.chain);
        Program { tasks, groups: self.chain.groups.clone(), blocking: !schedule.overlaps }
    }

    /// By unit: what forward keeps of it for backward.
    fn keep(&self, schedule: &Schedule) -> Vec<Keep> {
        let (chain, lowest) = (self.chain, self.chain.lowest_trained().0);
        let kept = |(index, unit): (usize, &ChainUnit)| {
            let is_first = index == lowest || chain.stages.pipeline.cuts.contains(&index);
            match (schedule.keeps)(unit) {
                _ if index < lowest => Keep::Nothing,
                _ if schedule.chooses_units && !self.recompute.contains(unit.kind) => Keep::Everything,
                Keep::Nothing if is_first => Keep::Stream,
                kept => kept,
            }
        };
        chain.units.iter().enumerate().map(kept).collect()
    }
}

/// The parts of a micro-batch.
fn parts(micros: &[Vec<PartSize>], index: usize) -> impl Iterator<Item = Micro> {
    (0..micros[index].len()).map(move |part| Micro { index, part })
}
