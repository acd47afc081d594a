//! The times of tasks on every rank, recorded or simulated, in the vocabulary of programs.

mod words;

use std::time::Instant;

use evenkeel_device::Stamp;

pub use words::Words;

use crate::program::{Micro, Program, Task, UnitIdx};
use crate::work::{Lane, Work};

/// One task's time, in seconds from the beginning.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub work: Work,
    pub unit: UnitIdx,
    pub micro: Micro,
    pub lane: Lane,
    pub start_s: f64,
    /// When the last member of its group came; the start, for a task that is no exchange.
    pub came_s: f64,
    pub end_s: f64,
    /// Bytes that an exchange moves; 0 for other tasks.
    pub bytes: u64,
}

impl Span {
    pub(crate) fn of(task: &Task, start_s: f64, came_s: f64, end_s: f64) -> Span {
        let Task { work, unit, micro, .. } = *task;
        let bytes = task.exchange.map_or(0, |exchange| exchange.bytes);
        Span { work, unit, micro, lane: work.lane(), start_s, came_s, end_s, bytes }
    }

    pub fn duration_s(&self) -> f64 {
        self.end_s - self.start_s
    }
}

/// One step of all ranks, each in the order of its program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    pub ranks: Vec<Vec<Span>>,
}

/// A rank's time by its use, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Shares {
    pub compute_s: f64,
    /// Time in which exchanges waited for other ranks.
    pub waiting_s: f64,
    pub transfer_s: f64,
    /// Time in which the rank exchanged and did not compute.
    pub exposed_s: f64,
}

impl Timeline {
    /// When the first task starts.
    fn start_s(&self) -> f64 {
        self.spans().map(|(_, span)| span.start_s).fold(f64::INFINITY, f64::min)
    }

    /// From the first task's start to the last one's end.
    pub fn duration_s(&self) -> f64 {
        let end_s = self.spans().map(|(_, span)| span.end_s).fold(f64::NEG_INFINITY, f64::max);
        (end_s - self.start_s()).max(0.0)
    }

    /// The same timeline, with the first task's start at 0.
    pub fn from_zero(&self) -> Timeline {
        let zero_s = self.start_s();
        let moved = |span: &Span| Span {
            start_s: span.start_s - zero_s,
            came_s: span.came_s - zero_s,
            end_s: span.end_s - zero_s,
            ..span.clone()
        };
        Timeline { ranks: self.ranks.iter().map(|spans| spans.iter().map(moved).collect()).collect() }
    }

    /// All spans, with their ranks.
    pub fn spans(&self) -> impl Iterator<Item = (usize, &Span)> {
        self.ranks.iter().enumerate().flat_map(|(rank, spans)| spans.iter().map(move |span| (rank, span)))
    }

    /// The time in which a rank computed and transferred at once.
    pub fn beside_s(&self, rank: usize) -> f64 {
        overlap_s(&self.computing(rank), &self.exchanging(rank, |span| span.came_s))
    }

    pub fn shares(&self, rank: usize) -> Shares {
        let busy_s: f64 = self.exchanges(rank).map(Span::duration_s).sum();
        let waiting_s = self.exchanges(rank).map(|span| span.came_s - span.start_s).sum();
        Shares {
            compute_s: self.computed_s(rank),
            waiting_s,
            transfer_s: busy_s - waiting_s,
            exposed_s: self.exposed_s(rank),
        }
    }

    fn exposed_s(&self, rank: usize) -> f64 {
        let exchanging = self.exchanging(rank, |span| span.start_s);
        let exchanging_s: f64 = exchanging.iter().map(|(start_s, end_s)| end_s - start_s).sum();
        exchanging_s - overlap_s(&self.computing(rank), &exchanging)
    }

    fn computed_s(&self, rank: usize) -> f64 {
        self.computed(rank).map(Span::duration_s).sum()
    }

    fn computed(&self, rank: usize) -> impl Iterator<Item = &Span> {
        self.ranks[rank].iter().filter(|span| !span.lane.exchanges())
    }

    /// The exchanges of all lanes.
    fn exchanges(&self, rank: usize) -> impl Iterator<Item = &Span> {
        self.ranks[rank].iter().filter(|span| span.lane.exchanges())
    }

    fn computing(&self, rank: usize) -> Vec<(f64, f64)> {
        self.computed(rank).map(|span| (span.start_s, span.end_s)).collect()
    }

    /// The intervals in which any lane exchanges, in order and without overlaps.
    fn exchanging(&self, rank: usize, start_s: fn(&Span) -> f64) -> Vec<(f64, f64)> {
        let mut spans: Vec<(f64, f64)> = self.exchanges(rank).map(|span| (start_s(span), span.end_s)).collect();
        // With one lane of exchanges they are in order already.
        if !spans.is_sorted_by(|a, b| a.0 <= b.0) {
            spans.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        spans.dedup_by(|next, last| {
            let joins = next.0 < last.1;
            if joins {
                last.1 = last.1.max(next.1);
            }
            joins
        });
        spans
    }

    /// The largest share of the step in which any rank exchanged and did not compute.
    pub fn exposed_share(&self) -> f64 {
        let most = (0..self.ranks.len()).map(|rank| self.exposed_s(rank)).fold(0.0, f64::max);
        most / self.duration_s().max(f64::MIN_POSITIVE)
    }

    /// The share of all ranks' time in which they do not compute: a pipeline's bubble.
    pub fn idle_share(&self) -> f64 {
        let compute_s: f64 = (0..self.ranks.len()).map(|rank| self.computed_s(rank)).sum();
        1.0 - compute_s / (self.ranks.len() as f64 * self.duration_s()).max(f64::MIN_POSITIVE)
    }

    /// The number of a rank's exchanges with some computation beside them.
    pub fn overlapped_exchanges(&self, rank: usize) -> usize {
        let runs_beside = |exchange: &&Span| {
            let mut tasks = self.computed(rank);
            tasks.any(|task| task.start_s < exchange.end_s && exchange.start_s < task.end_s)
        };
        self.exchanges(rank).filter(runs_beside).count()
    }
}

/// The time in both lists of intervals, each in order and without overlaps.
fn overlap_s(a: &[(f64, f64)], b: &[(f64, f64)]) -> f64 {
    let (mut i, mut j, mut total) = (0, 0, 0.0);
    while let (Some(&(a_start, a_end)), Some(&(b_start, b_end))) = (a.get(i), b.get(j)) {
        total += (a_end.min(b_end) - a_start.max(b_start)).max(0.0);
        if a_end < b_end { i += 1 } else { j += 1 }
    }
    total
}

/// A rank's notes of a running program, to be read once its queues have finished.
#[derive(Default)]
pub struct Recording {
    notes: Vec<Note>,
}

struct Note {
    task: usize,
    start: Stamp,
    came: Option<Stamp>,
    end: Stamp,
}

impl Recording {
    /// Notes the time of a task of a program.
    pub fn add(&mut self, task: usize, start: Stamp, came: Option<Stamp>, end: Stamp) {
        self.notes.push(Note { task, start, came, end });
    }

    /// Times from `epoch` on, which all ranks share. `None` if a task has not run.
    pub fn read(&self, program: &Program, epoch: Instant) -> Option<Vec<Span>> {
        let seconds = |stamp: &Stamp| Some(stamp.get()?.saturating_duration_since(epoch).as_secs_f64());
        let span = |note: &Note| {
            let (start_s, end_s) = (seconds(&note.start)?, seconds(&note.end)?);
            // Members that came before this rank's own queue, or a group of one, cause no waiting.
            let came_s = note.came.as_ref().and_then(seconds).unwrap_or(start_s).clamp(start_s, end_s);
            Some(Span::of(&program.tasks[note.task], start_s, came_s, end_s))
        };
        self.notes.iter().map(span).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_overlap_where_both_run() {
        let cases: [(&[_], &[_], f64); 4] = [
            (&[(0.0, 1.0)], &[(1.0, 2.0)], 0.0),
            (&[(0.0, 4.0)], &[(1.0, 2.0), (3.0, 5.0)], 2.0),
            (&[(0.0, 1.0), (2.0, 3.0)], &[(0.5, 2.5)], 1.0),
            (&[], &[(0.5, 2.5)], 0.0),
        ];
        for (a, b, expected) in cases {
            assert_eq!((overlap_s(a, b), overlap_s(b, a)), (expected, expected), "{a:?} {b:?}");
        }
    }
}
