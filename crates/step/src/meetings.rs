//! Meetings: the exchanges of several ranks, matched with one another.

use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};

use crate::program::{Micro, ProgramView, Task, UnitIdx};
use crate::verify::Unsound;
use crate::work::{Lane, Work};

/// The meetings of some programs, by number.
pub(crate) struct Meetings {
    /// By rank and task: the meeting, or [`NONE`].
    by_task: Vec<Vec<u32>>,
    count: usize,
}

/// No meeting.
const NONE: u32 = u32::MAX;

/// By rank that issues some: the places of its exchanges in a group.
type Issued = BTreeMap<usize, Vec<usize>>;

impl Meetings {
    /// Matches the ranks' exchanges with one another.
    pub fn of(programs: &[ProgramView]) -> Result<Meetings, Unsound> {
        let none = programs.iter().map(|program| vec![NONE; program.tasks.len()]);
        let mut meetings = Meetings { by_task: none.collect(), count: 0 };
        let mut groups: BTreeMap<(&str, &[usize]), Issued> = BTreeMap::new();
        for (rank, program) in programs.iter().enumerate() {
            for (group, places) in program.groups.iter().zip(issued(program)).filter(|(_, places)| !places.is_empty()) {
                let of_group = groups.entry((group.name.as_str(), group.ranks.as_slice())).or_default();
                of_group.insert(rank, places);
            }
        }
        for ((name, ranks), issued) in groups {
            meetings.add(programs, name, ranks, &issued)?;
        }
        Ok(meetings)
    }

    /// Adds those of a group.
    fn add(&mut self, programs: &[ProgramView], name: &str, ranks: &[usize], issued: &Issued) -> Result<(), Unsound> {
        let members: Vec<(usize, &[usize])> =
            ranks.iter().map(|&rank| (rank, issued.get(&rank).map_or(&[][..], Vec::as_slice))).collect();
        let most = members.iter().map(|(_, places)| places.len()).max().unwrap_or(0);
        for number in 0..most {
            let found = |&(rank, places): &(usize, &[usize])| {
                let index = *places.get(number)?;
                Some((rank, index, &programs[rank].tasks[index]))
            };
            let (first_rank, _, first) = members.iter().find_map(found).expect("one has most of them");
            let asked = what_is_asked(first);
            let mut receivers = 0;
            for member in &members {
                let same = found(member).filter(|(_, _, task)| what_is_asked(task) == asked);
                let Some((rank, index, task)) = same else {
                    let other = found(member).map_or("missing".to_owned(), |(_, _, task)| describe(task));
                    let (ranks, found) = ([first_rank, member.0], [describe(first), other]);
                    return Err(Unsound::Disagree { group: name.to_owned(), number, ranks, found });
                };
                self.by_task[rank][index] = (self.count + number) as u32;
                receivers += usize::from(task.receives());
            }
            if first.work.lane() == Lane::Pass && receivers != 1 {
                return Err(Unsound::NotOneWay { group: name.to_owned(), number });
            }
        }
        self.count += most;
        Ok(())
    }

    /// The number of a task's meeting, if it is an exchange.
    pub fn of_task(&self, rank: usize, index: usize) -> Option<usize> {
        Some(self.by_task[rank][index] as usize).filter(|&meeting| meeting != NONE as usize)
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// The ranks and tasks of a meeting.
    pub fn members(&self, meeting: usize) -> impl Iterator<Item = (usize, usize)> {
        let of_rank = move |(rank, tasks): (usize, &Vec<u32>)| {
            tasks.iter().position(|&other| other as usize == meeting).map(|index| (rank, index))
        };
        self.by_task.iter().enumerate().filter_map(of_rank)
    }
}

/// By group of a program: the places of its exchanges.
fn issued(program: &ProgramView) -> Vec<Vec<usize>> {
    let groups = program.groups;
    // A group that is listed twice is one.
    let first = |group| groups.iter().position(|other| other == group).expect("it is like itself");
    let firsts: Vec<usize> = groups.iter().map(first).collect();
    let mut issued = vec![Vec::new(); groups.len()];
    for (index, task) in program.tasks.iter().enumerate() {
        if let Some(exchange) = task.exchange {
            issued[firsts[exchange.group.0]].push(index);
        }
    }
    issued
}

/// The facts that members must agree on. Each rank numbers buckets for itself.
fn what_is_asked(task: &Task) -> (Discriminant<Work>, UnitIdx, Micro, u64) {
    let bytes = task.exchange.filter(|_| task.work.row().moves_alike).map_or(0, |exchange| exchange.bytes);
    (discriminant(&task.work), task.unit, task.micro, bytes)
}

fn describe(task: &Task) -> String {
    let bytes = task.exchange.map_or(0, |exchange| exchange.bytes);
    format!("{:?}({}, {}) of {bytes} bytes", task.work, task.unit.0, task.micro)
}
