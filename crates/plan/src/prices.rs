//! The time of a step by what tasks and exchanges take on its devices, wherever these times come from.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use evenkeel_device::Counts;
use evenkeel_step::simulate::{Costs, Unforeseen, simulate_sound};
use evenkeel_step::trace::Timeline;
use evenkeel_step::{ProgramView, Task, Work};

use crate::counted::{Counted, groups_among_themselves};

/// What tasks and exchanges take on the devices of a run's ranks.
pub trait Prices {
    /// The device of a rank, in words.
    fn place(&self, rank: usize) -> String;

    /// Seconds of a task with these kernels, if that is known.
    fn task_s(&self, rank: usize, task: &Task, kernels: &Counts) -> Option<f64>;

    /// Seconds of an exchange once all members have come, if that is known.
    fn exchange_s(&self, rank: usize, work: Work, bytes: u64, members: &[usize]) -> Option<f64>;

    /// Seconds of a step whose programs take so long by themselves.
    fn whole_step_s(&self, counted: &[Counted], programs_s: f64) -> f64;

    /// The same at least, whatever the programs are.
    fn least_step_s(&self, rank: usize, programs_s: f64) -> f64;
}

/// Tasks whose time nobody knows, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not measured on {place}: {}", tasks.iter().cloned().collect::<Vec<_>>().join(", "))]
pub struct NotMeasured {
    pub place: String,
    pub tasks: BTreeSet<String>,
}

/// Why a step cannot be foretold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotKnown {
    #[error(transparent)]
    NotMeasured(#[from] NotMeasured),
    #[error(transparent)]
    Unforeseen(#[from] Unforeseen),
}

/// A simulated step.
#[derive(Clone, Debug, PartialEq)]
pub struct ForetoldStep {
    pub step_s: f64,
    /// Of the ranks that stand for all.
    pub timeline: Timeline,
}

/// The step of these ranks, which stand for all of a run.
pub fn foretell(prices: &dyn Prices, counted: &[Counted]) -> Result<ForetoldStep, NotKnown> {
    let timeline = simulated(prices, counted)?;
    Ok(ForetoldStep { step_s: prices.whole_step_s(counted, timeline.duration_s()), timeline })
}

/// The same without what steps take beside their programs.
pub fn simulated(prices: &dyn Prices, counted: &[Counted]) -> Result<Timeline, NotKnown> {
    let by_task = counted.iter().map(|it| seconds(prices, it)).collect::<Result<_, NotMeasured>>()?;
    let groups = groups_among_themselves(counted);
    let programs = counted.iter().zip(&groups).map(|(it, groups)| ProgramView { groups, ..it.program.view() });
    Ok(simulate_sound(&programs.collect::<Vec<_>>(), &Costs::one_by_one(by_task))?)
}

/// By task.
fn seconds(prices: &dyn Prices, counted: &Counted) -> Result<Vec<f64>, NotMeasured> {
    let mut unknown = BTreeSet::new();
    let mut known_kernels: HashMap<*const Counts, Option<f64>> = HashMap::new();
    let of_task = |(index, (task, kernels)): (usize, (&Task, &Arc<Counts>))| {
        let known = match task.exchange {
            Some(exchange) => {
                let members = &counted.program.groups[exchange.group.0].ranks;
                prices.exchange_s(counted.rank, task.work, exchange.bytes, members)
            }
            None if kernels.0.is_empty() => Some(0.0),
            None => {
                let of_kernels = known_kernels.entry(Arc::as_ptr(kernels));
                *of_kernels.or_insert_with(|| prices.task_s(counted.rank, task, kernels))
            }
        };
        let times = counted.stands_for.get(index).copied().unwrap_or(1.0);
        known.map_or_else(
            || {
                unknown.insert(task.work.row().name.to_owned());
                0.0
            },
            |seconds| times * seconds,
        )
    };
    let seconds = counted.program.tasks.iter().zip(&counted.counts).enumerate().map(of_task).collect();
    if unknown.is_empty() {
        Ok(seconds)
    } else {
        Err(NotMeasured { place: prices.place(counted.rank), tasks: unknown })
    }
}
