//! Merges lines so that one computes during another's exchange.

use std::collections::VecDeque;
use std::vec;

use crate::program::{Task, Value};
use crate::work::Work;

/// Merges the lines of micro-batches in order. A line is left when it would wait for an exchange, and taken up again when others
/// have computed meanwhile. The next micro-batch begins when the one before it has ended or, `ahead`, when all its lines have
/// reached their backward. Lines are written when they begin: a step may have thousands of micro-batches.
pub(super) fn interleave(micros: &mut dyn Iterator<Item = Vec<Vec<Task>>>, ahead: bool) -> Vec<Task> {
    let mut active: Vec<Vec<Line>> = Vec::new();
    let mut merged = Merged::default();
    loop {
        active.retain(|lines| lines.iter().any(|line| !line.segments.is_empty()));
        let begins = match &active[..] {
            [] => true,
            [only] => ahead && only.iter().all(|line| line.is_in_backward),
            _ => false,
        };
        if begins && let Some(lines) = micros.next() {
            let count = lines.iter().map(Vec::len).sum::<usize>();
            if merged.tasks.is_empty() {
                merged.tasks.reserve_exact(count * (1 + micros.size_hint().0));
            }
            active.push(lines.into_iter().map(Line::of).collect());
        }
        let lines = active.iter_mut().flatten().filter(|line| !line.segments.is_empty());
        match lines.min_by_key(|line| merged.rank(line)) {
            Some(line) => merged.run(line),
            None => return merged.tasks,
        }
    }
}

struct Line {
    tasks: vec::IntoIter<Task>,
    segments: VecDeque<Segment>,
    /// The number of heavy tasks before each of its exchanges so far, on all lines.
    issued: Vec<usize>,
    is_in_backward: bool,
    /// The turn in which it was last taken up.
    last_turn: usize,
}

/// Tasks that run without waiting once the values that the first of them awaits have arrived.
#[derive(Default)]
struct Segment {
    tasks: usize,
    is_heavy: bool,
    has_loss: bool,
    /// The last of the line's exchanges that it awaits, by number.
    awaits: Option<usize>,
}

impl Line {
    fn of(tasks: Vec<Task>) -> Line {
        let mut segments = VecDeque::from([Segment::default()]);
        let mut on_their_way: Vec<(Value, usize)> = Vec::new();
        let mut exchanges = 0;
        for task in &tasks {
            let mut awaits = None;
            if task.exchange.is_none() {
                on_their_way.retain(|(value, number)| {
                    let is_read = task.reads.contains(value);
                    awaits = awaits.max(is_read.then_some(*number));
                    !is_read
                });
            } else {
                on_their_way.extend(task.writes.iter().map(|&value| (value, exchanges)));
                exchanges += 1;
            }
            if awaits.is_some() {
                segments.push_back(Segment { awaits, ..Segment::default() });
            }
            let segment = segments.back_mut().expect("there is always one");
            segment.tasks += 1;
            segment.is_heavy |= task.work.is_heavy();
            segment.has_loss |= matches!(task.work, Work::Loss(_));
        }
        let issued = Vec::with_capacity(exchanges);
        Line { tasks: tasks.into_iter(), segments, issued, is_in_backward: false, last_turn: 0 }
    }
}

#[derive(Default)]
struct Merged {
    tasks: Vec<Task>,
    turns: usize,
    /// Heavy tasks so far.
    heavy: usize,
}

impl Merged {
    /// The least comes next: lines whose exchanges have had a heavy task to hide behind, light segments of them first, because
    /// those issue the next exchange; then the line that has waited longest.
    fn rank(&self, line: &Line) -> (bool, bool, usize, usize) {
        let segment = &line.segments[0];
        let latest = segment.awaits.map(|exchange| line.issued[exchange]);
        let is_hidden = latest.is_none_or(|issued| issued < self.heavy);
        (!is_hidden, is_hidden && segment.is_heavy, latest.unwrap_or(0), line.last_turn)
    }

    fn run(&mut self, line: &mut Line) {
        let segment = line.segments.pop_front().expect("a line that is run has segments");
        self.turns += 1;
        line.last_turn = self.turns;
        line.is_in_backward |= segment.has_loss;
        for task in line.tasks.by_ref().take(segment.tasks) {
            self.heavy += usize::from(task.work.is_heavy());
            if task.exchange.is_some() {
                line.issued.push(self.heavy);
            }
            self.tasks.push(task);
        }
    }
}
