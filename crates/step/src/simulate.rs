//! Runs programs on a table of costs: when each rank computes, waits and transfers. Pure: the same input gives the same timeline.
//!
//! Memory needs no table: an [`Executor`](crate::Executor) on a dry device allocates and frees as a program does, to the byte.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::program::{Program, Task, UnitIdx};
use crate::trace::{Span, Timeline};
use crate::verify::{Meetings, Unsound, meetings, verify};
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
    fn of_rank(&self, rank: usize, program: &Program) -> Result<Vec<f64>, Unforeseen> {
        match self.by_task.get(rank).filter(|seconds| seconds.len() == program.tasks.len()) {
            Some(seconds) => Ok(seconds.clone()),
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

/// The upper of two middle values. Some value must be given.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs the programs of all ranks, in their order. Refuses what [`verify`](crate::verify()) refuses, and tasks whose cost is
/// not known.
pub fn simulate(programs: &[Program], costs: &Costs) -> Result<Timeline, Unforeseen> {
    verify(programs)?;
    simulate_sound(programs, costs)
}

/// The same for programs that are known to be sound, such as those of schedules.
pub fn simulate_sound(programs: &[Program], costs: &Costs) -> Result<Timeline, Unforeseen> {
    let meetings = meetings(programs)?;
    let ranks = programs.iter().enumerate().map(|(rank, program)| Rank::new(rank, program, &meetings, costs));
    let mut simulation = Simulation {
        contention: costs.contention,
        ranks: ranks.collect::<Result<_, _>>()?,
        met: Vec::new(),
        transfers: vec![None; meetings.values().max().map_or(0, |last| last + 1)],
        now_s: 0.0,
    };
    for (&(rank, _), &meeting) in &meetings {
        let transfer: &mut Option<Transfer> = &mut simulation.transfers[meeting];
        transfer.get_or_insert_with(Transfer::default).members.push(rank);
    }
    while simulation.advance() {}
    Ok(Timeline { ranks: simulation.ranks.into_iter().map(Rank::spans).collect() })
}

struct Simulation<'a> {
    contention: Contention,
    ranks: Vec<Rank<'a>>,
    /// By meeting; `None` once it is over.
    transfers: Vec<Option<Transfer>>,
    /// The meetings that some member has come to and that are not over.
    met: Vec<usize>,
    now_s: f64,
}

#[derive(Clone, Default)]
struct Transfer {
    members: Vec<usize>,
    /// The members that have come, as rank and place in its program.
    present: Vec<(usize, usize)>,
    came_s: f64,
    remaining_s: f64,
}

impl Transfer {
    fn is_running(&self) -> bool {
        self.present.len() == self.members.len()
    }
}

struct Rank<'a> {
    number: usize,
    program: &'a Program,
    /// By task: its seconds when nothing runs beside it.
    alone_s: Vec<f64>,
    meetings: HashMap<usize, usize>,
    /// By compute task: the exchanges that write its values and, if the program blocks, the last exchange of each lane before it.
    awaits: Vec<Vec<usize>>,
    /// By exchange: the last compute task that it waits for.
    computed_before: Vec<Option<usize>>,
    /// The tasks left on each lane, the next one last.
    queues: BTreeMap<Lane, Vec<usize>>,
    running: Option<(usize, f64)>,
    /// The lanes whose exchange is under way or waits for others.
    meeting: BTreeSet<Lane>,
    starts_s: Vec<f64>,
    spans: Vec<Option<Span>>,
}

impl<'a> Rank<'a> {
    fn new(number: usize, program: &'a Program, meetings: &Meetings, costs: &Costs) -> Result<Rank<'a>, Unforeseen> {
        let tasks = &program.tasks;
        let on = |lane: Lane| (lane, (0..tasks.len()).rev().filter(|&task| tasks[task].work.lane() == lane).collect());
        let own = meetings.iter().filter(|((rank, _), _)| *rank == number);
        Ok(Rank {
            number,
            program,
            alone_s: costs.of_rank(number, program)?,
            meetings: own.map(|(&(_, task), &meeting)| (task, meeting)).collect(),
            awaits: awaits(program),
            computed_before: program.computed_before(),
            queues: Lane::ALL.map(on).into(),
            running: None,
            meeting: BTreeSet::new(),
            starts_s: vec![0.0; tasks.len()],
            spans: vec![None; tasks.len()],
        })
    }

    fn task(&self, index: usize) -> &'a Task {
        &self.program.tasks[index]
    }

    fn can_compute(&self, task: usize) -> bool {
        self.awaits[task].iter().all(|&exchange| self.spans[exchange].is_some())
    }

    /// Whether every compute task that it waits for has run.
    fn can_exchange(&self, task: usize) -> bool {
        let Some(last) = self.computed_before[task] else { return true };
        let is_behind = |other: Option<usize>| other.is_none_or(|other| other > last);
        is_behind(self.running.map(|(task, _)| task)) && is_behind(self.next(Lane::Compute))
    }

    /// The next task of a lane.
    fn next(&self, lane: Lane) -> Option<usize> {
        self.queues[&lane].last().copied()
    }

    fn take_next(&mut self, lane: Lane) {
        self.queues.get_mut(&lane).expect("every lane has a queue").pop();
    }

    fn finish(&mut self, task: usize, came_s: f64, now_s: f64) {
        self.spans[task] = Some(Span::of(self.task(task), self.starts_s[task], came_s, now_s));
    }

    fn spans(self) -> Vec<Span> {
        self.spans.into_iter().map(|span| span.expect("verified programs run to their end")).collect()
    }
}

/// The exchanges that each compute task waits for.
fn awaits(program: &Program) -> Vec<Vec<usize>> {
    let mut writers = HashMap::new();
    let mut last: BTreeMap<Lane, usize> = BTreeMap::new();
    let mut of_task = |(index, task): (usize, &Task)| {
        if task.exchange.is_some() {
            last.insert(task.work.lane(), index);
            writers.extend(task.writes.iter().map(|&value| (value, index)));
            return Vec::new();
        }
        let read = task.reads.iter().filter_map(|value| writers.get(value).copied());
        let all = last.iter().filter(|(lane, _)| program.waits_for_all(task, **lane)).map(|(_, index)| *index);
        read.chain(all).collect()
    };
    program.tasks.iter().enumerate().map(&mut of_task).collect()
}

impl Simulation<'_> {
    /// Starts all tasks that can start and advances to the next moment when one ends. False at the end.
    fn advance(&mut self) -> bool {
        (0..self.ranks.len()).for_each(|rank| self.start(rank));
        let busy: Vec<bool> = self.ranks.iter().map(|rank| rank.running.is_some()).collect();
        let mut transferring = vec![false; busy.len()];
        for transfer in self.running() {
            transfer.members.iter().for_each(|&rank| transferring[rank] = true);
        }
        let Contention { compute, exchange } = self.contention;
        let slowness = |is_contended: bool, factor: f64| if is_contended { 1.0 + factor } else { 1.0 };
        let compute_slowness: Vec<f64> = transferring.iter().map(|&contended| slowness(contended, compute)).collect();
        let exchange_slowness =
            |transfer: &Transfer| slowness(transfer.members.iter().any(|&rank| busy[rank]), exchange);
        let computing = self.ranks.iter().filter_map(|rank| Some(rank.running?.1 * compute_slowness[rank.number]));
        let moving = self.running().map(|transfer| transfer.remaining_s * exchange_slowness(transfer));
        let Some(step_s) = computing.chain(moving).min_by(f64::total_cmp) else { return false };
        self.now_s += step_s;
        for rank in &mut self.ranks {
            if let Some((task, remaining_s)) = &mut rank.running {
                *remaining_s -= step_s / compute_slowness[rank.number];
                if *remaining_s <= ROUNDING_S {
                    let task = *task;
                    rank.running = None;
                    rank.finish(task, rank.starts_s[task], self.now_s);
                }
            }
        }
        for &meeting in &self.met {
            let slot = &mut self.transfers[meeting];
            let Some(transfer) = slot.as_mut().filter(|transfer| transfer.is_running()) else { continue };
            transfer.remaining_s -= step_s / exchange_slowness(transfer);
            if transfer.remaining_s <= ROUNDING_S {
                for &(rank, task) in &transfer.present {
                    let lane = self.ranks[rank].task(task).work.lane();
                    self.ranks[rank].meeting.remove(&lane);
                    self.ranks[rank].finish(task, transfer.came_s, self.now_s);
                }
                *slot = None;
            }
        }
        self.met.retain(|&meeting| self.transfers[meeting].is_some());
        true
    }

    fn running(&self) -> impl Iterator<Item = &Transfer> {
        let met = self.met.iter().filter_map(|&meeting| self.transfers[meeting].as_ref());
        met.filter(|transfer| transfer.is_running())
    }

    fn start(&mut self, rank: usize) {
        let now_s = self.now_s;
        let rank = &mut self.ranks[rank];
        for lane in Lane::ALL.into_iter().filter(|lane| lane.exchanges()) {
            let Some(task) = rank.next(lane).filter(|&task| rank.can_exchange(task)) else { continue };
            if !rank.meeting.insert(lane) {
                continue;
            }
            rank.take_next(lane);
            rank.starts_s[task] = now_s;
            let meeting = rank.meetings[&task];
            let transfer = self.transfers[meeting].as_mut().expect("a meeting ends once");
            if transfer.present.is_empty() {
                self.met.push(meeting);
            }
            transfer.present.push((rank.number, task));
            transfer.came_s = now_s;
            // The member that moves most determines how long it takes.
            transfer.remaining_s = transfer.remaining_s.max(rank.alone_s[task]);
        }
        if let Some(task) = rank.next(Lane::Compute).filter(|&task| rank.can_compute(task))
            && rank.running.is_none()
        {
            rank.take_next(Lane::Compute);
            rank.starts_s[task] = now_s;
            rank.running = Some((task, rank.alone_s[task]));
        }
    }
}

/// Remainders below this are over.
const ROUNDING_S: f64 = 1e-12;
