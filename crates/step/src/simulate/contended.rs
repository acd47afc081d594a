//! Programs whose tasks take longer beside others, from moment to moment.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::Contention;
use crate::meetings::Meetings;
use crate::program::{ProgramView, Task};
use crate::trace::Span;
use crate::waits::Waits;
use crate::work::Lane;

/// The spans of sound programs, whose tasks take so many seconds when nothing runs beside them.
pub(super) fn run(
    programs: &[ProgramView],
    meetings: &Meetings,
    alone_s: &[Cow<'_, [f64]>],
    contention: Contention,
) -> Vec<Vec<Span>> {
    let ranks =
        programs.iter().enumerate().map(|(number, &program)| Rank::new(number, program, meetings, &alone_s[number]));
    let mut simulation = Simulation {
        contention,
        ranks: ranks.collect(),
        met: Vec::new(),
        transfers: vec![Some(Transfer::default()); meetings.count()],
        now_s: 0.0,
    };
    for (rank, program) in programs.iter().enumerate() {
        for meeting in (0..program.tasks.len()).filter_map(|index| meetings.of_task(rank, index)) {
            simulation.transfers[meeting].as_mut().expect("none is over").members.push(rank);
        }
    }
    while simulation.advance() {}
    simulation.ranks.into_iter().map(Rank::spans).collect()
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
    program: ProgramView<'a>,
    meetings: &'a Meetings,
    /// By task: its seconds when nothing runs beside it.
    alone_s: &'a [f64],
    /// By task: the others that it waits for.
    waits: Vec<Vec<usize>>,
    /// The tasks left on each lane, the next one last.
    queues: BTreeMap<Lane, Vec<usize>>,
    running: Option<(usize, f64)>,
    /// The lanes whose exchange is under way or waits for others.
    meeting: BTreeSet<Lane>,
    starts_s: Vec<f64>,
    spans: Vec<Option<Span>>,
}

impl<'a> Rank<'a> {
    fn new(number: usize, program: ProgramView<'a>, meetings: &'a Meetings, alone_s: &'a [f64]) -> Rank<'a> {
        let tasks = program.tasks;
        let on = |lane: Lane| (lane, (0..tasks.len()).rev().filter(|&task| tasks[task].work.lane() == lane).collect());
        let mut waits = Waits::new(program);
        let of_task = |index| {
            let mut before = Vec::new();
            waits.visit(index, |other| before.push(other));
            before
        };
        Rank {
            number,
            program,
            meetings,
            alone_s,
            waits: (0..tasks.len()).map(of_task).collect(),
            queues: Lane::ALL.map(on).into(),
            running: None,
            meeting: BTreeSet::new(),
            starts_s: vec![0.0; tasks.len()],
            spans: vec![None; tasks.len()],
        }
    }

    fn task(&self, index: usize) -> &'a Task {
        &self.program.tasks[index]
    }

    /// Whether everything has ended that a task waits for.
    fn can_start(&self, task: usize) -> bool {
        self.waits[task].iter().all(|&other| self.spans[other].is_some())
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
            let Some(task) = rank.next(lane).filter(|&task| rank.can_start(task)) else { continue };
            if !rank.meeting.insert(lane) {
                continue;
            }
            rank.take_next(lane);
            rank.starts_s[task] = now_s;
            let meeting = rank.meetings.of_task(rank.number, task).expect("sound exchanges have meetings");
            let transfer = self.transfers[meeting].as_mut().expect("a meeting ends once");
            if transfer.present.is_empty() {
                self.met.push(meeting);
            }
            transfer.present.push((rank.number, task));
            transfer.came_s = now_s;
            // The member that moves most determines how long it takes.
            transfer.remaining_s = transfer.remaining_s.max(rank.alone_s[task]);
        }
        if let Some(task) = rank.next(Lane::Compute).filter(|&task| rank.can_start(task))
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
