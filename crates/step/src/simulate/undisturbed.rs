//! Programs whose tasks take as long beside others as alone.
//!
//! A task starts when all have ended that it waits for, so one pass over the programs finds every time. A rank goes on until it
//! comes to an exchange whose other members have not come yet; the last of them lets all go on. Exchanges of sound programs can be
//! met in their order on every rank, so all ranks reach their ends.

use std::borrow::Cow;

use crate::meetings::Meetings;
use crate::program::{GroupIdx, ProgramView};
use crate::trace::Span;
use crate::waits::Waits;
use crate::work::Lane;

/// The spans of sound programs, whose tasks take so many seconds.
pub(super) fn run(programs: &[ProgramView], meetings: &Meetings, seconds: &[Cow<'_, [f64]>]) -> Vec<Vec<Span>> {
    let mut ranks: Vec<Rank> =
        programs.iter().zip(seconds).map(|(&program, seconds)| Rank::new(program, seconds)).collect();
    let mut arrivals = vec![Arrivals::default(); meetings.count()];
    let mut ready: Vec<usize> = (0..ranks.len()).collect();
    while let Some(number) = ready.pop() {
        let rank = &mut ranks[number];
        let Some((group, start_s)) = rank.advance() else { continue };
        let task = rank.spans.len();
        let meeting = meetings.of_task(number, task).expect("sound exchanges have meetings");
        let arrivals = &mut arrivals[meeting];
        arrivals.add(start_s, rank.seconds[task]);
        let members = &rank.program.groups[group.0].ranks;
        if arrivals.count == members.len() {
            members.iter().for_each(|&member| ranks[member].meet(arrivals));
            ready.extend(members);
        }
    }
    ranks.into_iter().map(Rank::spans).collect()
}

/// The members that have come to a meeting.
#[derive(Clone, Default)]
struct Arrivals {
    count: usize,
    last_s: f64,
    /// The member that moves most determines how long it takes.
    most_s: f64,
}

impl Arrivals {
    fn add(&mut self, start_s: f64, seconds: f64) {
        self.count += 1;
        self.last_s = self.last_s.max(start_s);
        self.most_s = self.most_s.max(seconds);
    }
}

struct Rank<'a> {
    program: ProgramView<'a>,
    /// By task.
    seconds: &'a [f64],
    waits: Waits<'a>,
    /// By lane: when its last task ended.
    ends_s: [f64; Lane::ALL.len()],
    /// When the exchange starts that the rank has come to.
    start_s: f64,
    /// Those of the tasks that have ended.
    spans: Vec<Span>,
}

impl<'a> Rank<'a> {
    fn new(program: ProgramView<'a>, seconds: &'a [f64]) -> Rank<'a> {
        let spans = Vec::with_capacity(program.tasks.len());
        Rank { program, seconds, waits: Waits::new(program), ends_s: Default::default(), start_s: 0.0, spans }
    }

    /// Computes up to an exchange; returns its group and when it starts. `None` at the end.
    fn advance(&mut self) -> Option<(GroupIdx, f64)> {
        loop {
            let index = self.spans.len();
            let task = self.program.tasks.get(index)?;
            let mut start_s = self.ends_s[task.work.lane() as usize];
            self.waits.visit(index, |other| start_s = start_s.max(self.spans[other].end_s));
            if let Some(exchange) = task.exchange {
                self.start_s = start_s;
                return Some((exchange.group, start_s));
            }
            self.end(start_s, start_s, start_s + self.seconds[index]);
        }
    }

    /// Ends the exchange that the rank has come to.
    fn meet(&mut self, arrivals: &Arrivals) {
        self.end(self.start_s, arrivals.last_s, arrivals.last_s + arrivals.most_s);
    }

    fn end(&mut self, start_s: f64, came_s: f64, end_s: f64) {
        let span = Span::of(&self.program.tasks[self.spans.len()], start_s, came_s, end_s);
        self.ends_s[span.lane as usize] = end_s;
        self.spans.push(span);
    }

    fn spans(self) -> Vec<Span> {
        assert_eq!(self.spans.len(), self.program.tasks.len(), "sound programs run to their ends");
        self.spans
    }
}
