//! Runs programs on a table of costs: when each rank computes, waits and transfers. Pure: the same input gives the same timeline.
//!
//! Memory needs no table: an [`Executor`](crate::Executor) on a dry device allocates and frees as a program does, to the byte.

mod contended;
mod undisturbed;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use crate::meetings::Meetings;
use crate::program::{Program, ProgramView, Task, UnitIdx};
use crate::trace::{Span, Timeline};
use crate::verify::{Unsound, verify};
use crate::work::{Lane, Work};

/// Why programs cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unforeseen {
    #[error(transparent)]
    Unsound(#[from] Unsound),
    #[error("rank {rank}: nothing like `{task}` was measured or estimated, so nobody knows how long it takes")]
    NoCost { rank: usize, task: String },
}

/// The times of tasks when nothing runs beside them, and how much longer they take when something does.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Costs {
    /// By rank and task, for programs whose tasks are known one by one.
    by_task: Vec<Vec<f64>>,
    /// Seconds of compute tasks, by rank.
    compute_s: HashMap<(usize, Work, UnitIdx, usize), f64>,
    /// Seconds of exchanges once all members have come, by kind and bytes moved.
    exchange_s: BTreeMap<(&'static str, u64), f64>,
    pub contention: Contention,
}

/// How much longer a second of work takes a rank while another of its queues is busy too: 0 if the queues do not compete, below 0 if it
/// takes less.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Contention {
    pub compute: f64,
    pub exchange: f64,
}

impl Costs {
    /// Costs given by a function of rank, task index and task. A unit's tasks of a kind on a part take equally long in every
    /// micro-batch, and exchanges of a kind and size take equally long in every group.
    pub fn of_tasks(programs: &[Program], seconds: impl Fn(usize, usize, &Task) -> f64) -> Costs {
        let mut costs = Costs::default();
        for (rank, program) in programs.iter().enumerate() {
            for (index, task) in program.tasks.iter().enumerate() {
                let seconds = seconds(rank, index, task);
                match task.exchange {
                    Some(exchange) => {
                        costs.exchange_s.insert((task.work.row().name, exchange.bytes), seconds);
                    }
                    None => {
                        costs.compute_s.insert((rank, task.work, task.unit, task.micro.part), seconds);
                    }
                }
            }
        }
        costs
    }

    /// By rank, the seconds of each task of its program.
    pub fn one_by_one(by_task: Vec<Vec<f64>>) -> Costs {
        Costs { by_task, ..Costs::default() }
    }

    /// The medians of the times measured in steps without overlaps, all cut in the same parts.
    pub fn measured(steps: &[Timeline]) -> Costs {
        let mut compute: HashMap<_, Vec<f64>> = HashMap::new();
        let mut exchange: BTreeMap<_, Vec<f64>> = BTreeMap::new();
        for (step, (rank, span)) in steps.iter().flat_map(|step| step.spans().map(move |span| (step, span))) {
            match span.lane {
                Lane::Compute => {
                    let key = (rank, span.work, span.unit, span.micro.part);
                    compute.entry(key).or_default().push(span.duration_s());
                }
                _ => {
                    let key = (span.work.row().name, moved_bytes(step, span));
                    exchange.entry(key).or_default().push(span.end_s - span.came_s);
                }
            }
        }
        Costs {
            compute_s: compute.into_iter().map(|(key, seconds)| (key, median(seconds))).collect(),
            exchange_s: exchange.into_iter().map(|(key, seconds)| (key, median(seconds))).collect(),
            ..Costs::default()
        }
    }

    /// Learns from steps with overlaps how much longer tasks take beside one another.
    pub fn with_contention(mut self, steps: &[Timeline]) -> Result<Costs, Unforeseen> {
        let Some(step) = steps.first() else { return Ok(self) };
        // Takes the median of every task: a core that is slow for a moment is no contention.
        let overlapped = Costs::measured(steps);
        let mut longer = [0.0; 2];
        for (rank, span) in step.spans() {
            let queue = usize::from(span.lane.exchanges());
            longer[queue] += overlapped.of(rank, span)? - self.of(rank, span)?;
        }
        let beside = |step: &Timeline| (0..step.ranks.len()).map(|rank| step.beside_s(rank)).sum::<f64>();
        let beside_s = median(steps.iter().map(beside));
        // The share of the time beside another task that was lost; or gained, by cores that need not wake up after every wait.
        let lost = |longer: f64| if beside_s > 0.0 { (longer / beside_s).clamp(-1.0, 0.9) } else { 0.0 };
        let factor = |longer: f64| lost(longer) / (1.0 - lost(longer));
        self.contention = Contention { compute: factor(longer[0]), exchange: factor(longer[1]) };
        Ok(self)
    }

    /// By task of a rank: the seconds that it takes when nothing runs beside it.
    fn of_rank(&self, rank: usize, program: &ProgramView) -> Result<Cow<'_, [f64]>, Unforeseen> {
        match self.by_task.get(rank).filter(|seconds| seconds.len() == program.tasks.len()) {
            Some(seconds) => Ok(Cow::from(seconds)),
            None => program.tasks.iter().map(|task| self.of(rank, &Span::of(task, 0.0, 0.0, 0.0))).collect(),
        }
    }

    /// The seconds that a task takes a rank when nothing runs beside it.
    fn of(&self, rank: usize, span: &Span) -> Result<f64, Unforeseen> {
        let Span { work, unit, micro, bytes, .. } = *span;
        let seconds = match span.lane {
            Lane::Compute => self.compute_s.get(&(rank, work, unit, micro.part)).copied(),
            _ => self.exchange(work, bytes),
        };
        seconds.ok_or_else(|| Unforeseen::NoCost { rank, task: format!("{work:?}({}, {micro})", unit.0) })
    }

    /// Interpolates between measured sizes; other sizes cost as much per byte as the nearest one.
    fn exchange(&self, work: Work, bytes: u64) -> Option<f64> {
        let name = work.row().name;
        let below = self.exchange_s.range((name, 0)..=(name, bytes)).next_back();
        let above = self.exchange_s.range((name, bytes)..=(name, u64::MAX)).next();
        match (below, above) {
            (Some((&(_, low), &low_s)), Some((&(_, high), &high_s))) if high > low => {
                Some(low_s + (high_s - low_s) * (bytes - low) as f64 / (high - low) as f64)
            }
            // An exchange of no bytes has no cost per byte.
            (Some((&(_, 0), &seconds)), _) | (None, Some((&(_, 0), &seconds))) => (bytes == 0).then_some(seconds),
            (Some((&(_, size), &seconds)), _) | (None, Some((&(_, size), &seconds))) => {
                Some(seconds * bytes as f64 / size as f64)
            }
            (None, None) => None,
        }
    }
}

/// The bytes that determine an exchange's time: those of the member that moves most.
fn moved_bytes(step: &Timeline, span: &Span) -> u64 {
    if span.work.row().moves_alike {
        return span.bytes;
    }
    let same = step.spans().filter(|(_, other)| (other.work, other.unit) == (span.work, span.unit));
    same.map(|(_, other)| other.bytes).max().unwrap_or(span.bytes)
}

/// The mean of the two middle values, if there are two. Some value must be given.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (below, above) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
    0.5 * (below + above)
}

/// Runs the programs of all ranks, in their order. Refuses what [`verify`](crate::verify()) refuses, and tasks whose cost is
/// not known.
pub fn simulate(programs: &[Program], costs: &Costs) -> Result<Timeline, Unforeseen> {
    verify(programs)?;
    simulate_sound(&programs.iter().map(Program::view).collect::<Vec<_>>(), costs)
}

/// The same for programs that are known to be sound, such as those of schedules.
pub fn simulate_sound(programs: &[ProgramView], costs: &Costs) -> Result<Timeline, Unforeseen> {
    let meetings = Meetings::of(programs)?;
    let seconds = programs.iter().enumerate().map(|(rank, program)| costs.of_rank(rank, program));
    let seconds = seconds.collect::<Result<Vec<_>, _>>()?;
    let ranks = if costs.contention == Contention::default() {
        undisturbed::run(programs, &meetings, &seconds)
    } else {
        contended::run(programs, &meetings, &seconds, costs.contention)
    };
    Ok(Timeline { ranks })
}
