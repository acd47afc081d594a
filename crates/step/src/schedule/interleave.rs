//! Merges lines so that one computes during another's exchange.

use std::collections::{HashMap, VecDeque};

use crate::program::{Task, Value};
use crate::work::Work;

/// Merges the lines of micro-batches in order. A line is left when it would wait for an exchange, and taken up again when others
/// have computed meanwhile. The next micro-batch begins when the one before it has ended or, `ahead`, when all its lines have
/// reached their backward.
pub(super) fn interleave(micros: Vec<Vec<Vec<Task>>>, ahead: bool) -> Vec<Task> {
    let mut waiting: VecDeque<Vec<Line>> =
        micros.into_iter().map(|lines| lines.into_iter().map(Line::of).collect()).collect();
    let mut active: Vec<Vec<Line>> = Vec::new();
    let mut merged = Merged::default();
    loop {
        active.retain(|lines| lines.iter().any(|line| !line.segments.is_empty()));
        let begins = match &active[..] {
            [] => true,
            [only] => ahead && only.iter().all(|line| line.is_in_backward),
            _ => false,
        };
        if begins {
            active.extend(waiting.pop_front());
        }
        let lines = active.iter_mut().flatten().filter(|line| !line.segments.is_empty());
        match lines.min_by_key(|line| merged.rank(line)) {
            Some(line) => merged.run(line),
            None => return merged.tasks,
        }
    }
}

struct Line {
    segments: VecDeque<Segment>,
    is_in_backward: bool,
    /// The turn in which it was last taken up.
    last_turn: usize,
}

/// Tasks that run without waiting once the values that the first of them awaits have arrived.
#[derive(Default)]
struct Segment {
    tasks: Vec<Task>,
    /// Values that exchanges write.
    awaits: Vec<Value>,
}

impl Line {
    fn of(tasks: Vec<Task>) -> Line {
        let mut segments = VecDeque::from([Segment::default()]);
        let mut on_their_way: Vec<Value> = Vec::new();
        for task in tasks {
            let (awaits, others): (Vec<Value>, _) =
                on_their_way.iter().partition(|value| task.exchange.is_none() && task.reads.contains(value));
            if !awaits.is_empty() {
                on_their_way = others;
                segments.push_back(Segment { tasks: Vec::new(), awaits });
            }
            if task.exchange.is_some() {
                on_their_way.extend(&task.writes);
            }
            segments.back_mut().expect("there is always one").tasks.push(task);
        }
        Line { segments, is_in_backward: false, last_turn: 0 }
    }
}

#[derive(Default)]
struct Merged {
    tasks: Vec<Task>,
    turns: usize,
    /// Heavy tasks so far, and their number when each exchange was issued.
    heavy: usize,
    issued: HashMap<Value, usize>,
}

impl Merged {
    /// The least comes next: lines whose exchanges have had a heavy task to hide behind, light segments of them first, because
    /// those issue the next exchange; then the line that has waited longest.
    fn rank(&self, line: &Line) -> (bool, bool, usize, usize) {
        let segment = &line.segments[0];
        let latest = segment.awaits.iter().map(|value| self.issued[value]).max();
        let is_hidden = latest.is_none_or(|issued| issued < self.heavy);
        (
            !is_hidden,
            is_hidden && segment.tasks.iter().any(|task| task.work.is_heavy()),
            latest.unwrap_or(0),
            line.last_turn,
        )
    }

    fn run(&mut self, line: &mut Line) {
        let segment = line.segments.pop_front().expect("a line that is run has segments");
        self.turns += 1;
        line.last_turn = self.turns;
        line.is_in_backward |= segment.tasks.iter().any(|task| matches!(task.work, Work::Loss(_)));
        for task in segment.tasks {
            self.heavy += usize::from(task.work.is_heavy());
            if task.exchange.is_some() {
                self.issued.extend(task.writes.iter().map(|&value| (value, self.heavy)));
            }
            self.tasks.push(task);
        }
    }
}
