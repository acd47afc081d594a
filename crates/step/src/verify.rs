//! The proof that programs may run: each by itself, and all ranks' together.

use std::collections::HashSet;
use std::fmt;

use crate::meetings::Meetings;
use crate::program::{Exchange, Members, Program, ROOMS, Task, Value};
use crate::waits::Waits;

/// Why programs may not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsound {
    #[error("{place} reads {value}, which nothing has written or which is freed")]
    ReadsNothing { place: Place, value: Value },
    #[error("{place} writes {value}, which is there already")]
    WritesTwice { place: Place, value: Value },
    #[error("{place} frees {value}, which is not there or for which nobody has waited")]
    FreesNothing { place: Place, value: Value },
    #[error("rank {rank}: {value} is never freed")]
    NeverFreed { rank: usize, value: Value },
    #[error("{place} is on a lane of exchanges and exchanges nothing, or exchanges on the compute lane")]
    WrongLane { place: Place },
    #[error("{place} exchanges in group {group} of {groups}")]
    NoGroup { place: Place, group: usize, groups: usize },
    #[error("{place} exchanges in group `{group}` of ranks {ranks:?}, which it is no member of")]
    NoMember { place: Place, group: String, ranks: Vec<usize> },
    #[error("rank {rank}: group `{group}` has ranks {ranks:?}, expected different ones of {world}")]
    NoRanks { rank: usize, group: String, ranks: Vec<usize>, world: usize },
    #[error(
        "{place} receives what there is no room for: {ROOMS} micro-batches that arrived before it are still to be read"
    )]
    NoRoom { place: Place },
    #[error("pass {number} of group `{group}` has two senders or two receivers")]
    NotOneWay { group: String, number: usize },
    #[error("exchange {number} of group `{group}` is {} on rank {}, and {} on rank {}", .found[0], .ranks[0], .found[1], .ranks[1])]
    Disagree { group: String, number: usize, ranks: [usize; 2], found: [String; 2] },
    #[error("these tasks wait for one another, so none of them would ever run:\n{}", .0.join("\n"))]
    Cycle(Vec<String>),
}

/// A task of a rank's program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: usize,
    pub index: usize,
    pub task: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, task {}, `{}`,", self.rank, self.index, self.task)
    }
}

/// Checks the programs of all ranks, in their order: every value is written before it is read, read before it is freed, and
/// freed once; the members of every group issue the same exchanges in the same order; and no tasks wait for one another.
pub fn verify(programs: &[Program]) -> Result<(), Unsound> {
    for (rank, program) in programs.iter().enumerate() {
        check_values(rank, program)?;
        check_groups(rank, program, programs.len())?;
    }
    let meetings = Meetings::of(&programs.iter().map(Program::view).collect::<Vec<_>>())?;
    check_waits(programs, &meetings)
}

fn check_values(rank: usize, program: &Program) -> Result<(), Unsound> {
    let (mut live, mut arriving): (HashSet<Value>, HashSet<Value>) = Default::default();
    for (index, task) in program.tasks.iter().enumerate() {
        let place = || place(rank, index, task);
        if let Some(&value) = task.reads.iter().find(|value| !live.contains(value)) {
            return Err(Unsound::ReadsNothing { place: place(), value });
        }
        if let Some(&value) = task.writes.iter().find(|&&value| !live.insert(value)) {
            return Err(Unsound::WritesTwice { place: place(), value });
        }
        // A value that an exchange writes may be in flight until a compute task has waited for it.
        if task.exchange.is_some() {
            arriving.extend(task.writes.iter().filter(|value| !task.frees.contains(value)));
        } else {
            arriving.retain(|value| !task.reads.contains(value));
        }
        if let Some(&value) = task.frees.iter().find(|value| arriving.contains(value) || !live.remove(value)) {
            return Err(Unsound::FreesNothing { place: place(), value });
        }
        let has_come = |value: &&Value| value.arrives_by() == Some(task.work) && value.unit == task.unit;
        let unread = || live.iter().filter(has_come).map(|value| value.micro.index).collect::<HashSet<usize>>();
        if task.receives() && unread().len() > ROOMS {
            return Err(Unsound::NoRoom { place: place() });
        }
    }
    match live.into_iter().min_by_key(|value| (value.micro, value.unit)) {
        Some(value) => Err(Unsound::NeverFreed { rank, value }),
        None => Ok(()),
    }
}

fn check_groups(rank: usize, program: &Program, world: usize) -> Result<(), Unsound> {
    for Members { name, ranks } in &program.groups {
        let distinct: HashSet<&usize> = ranks.iter().filter(|&&rank| rank < world).collect();
        if distinct.len() != ranks.len() {
            return Err(Unsound::NoRanks { rank, group: name.clone(), ranks: ranks.clone(), world });
        }
    }
    for (index, task) in program.tasks.iter().enumerate() {
        let place = || place(rank, index, task);
        let is_exchange = task.work.lane().exchanges();
        if is_exchange != task.exchange.is_some() {
            return Err(Unsound::WrongLane { place: place() });
        }
        let Some(Exchange { group, .. }) = task.exchange else { continue };
        let groups = program.groups.len();
        let Some(members) = program.groups.get(group.0) else {
            return Err(Unsound::NoGroup { place: place(), group: group.0, groups });
        };
        if !members.ranks.contains(&rank) {
            let (group, ranks) = (members.name.clone(), members.ranks.clone());
            return Err(Unsound::NoMember { place: place(), group, ranks });
        }
    }
    Ok(())
}

fn place(rank: usize, index: usize, task: &Task) -> Place {
    Place { rank, index, task: task.to_string() }
}

/// A compute task of a rank, or a meeting of several, that waits for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Compute(usize, usize),
    Meeting(usize),
}

/// The nodes of some programs, by number: the tasks of one rank behind those of the other, then the meetings. Long programs have
/// millions of them, so they are numbers in lists.
struct Nodes<'a> {
    programs: &'a [Program],
    meetings: &'a Meetings,
    /// By rank: the number of its first task.
    firsts: Vec<usize>,
    tasks: usize,
}

/// A node, and one that waits for it.
type Wait = (u32, u32);

/// Goes through the programs in order of their waits, without computing. If nodes are left when none can go on, some of them wait
/// for one another.
fn check_waits(programs: &[Program], meetings: &Meetings) -> Result<(), Unsound> {
    let nodes = Nodes::of(programs, meetings);
    let mut waits = nodes.waits();
    waits.sort_unstable();
    waits.dedup();
    let mut open = vec![0u32; nodes.tasks + meetings.count()];
    waits.iter().for_each(|&(_, node)| open[node as usize] += 1);
    let mut ready: Vec<u32> = (0..).zip(&open).filter(|&(_, &count)| count == 0).map(|(node, _)| node).collect();
    while let Some(node) = ready.pop() {
        let first = waits.partition_point(|&(awaited, _)| awaited < node);
        for &(_, next) in waits[first..].iter().take_while(|&&(awaited, _)| awaited == node) {
            open[next as usize] -= 1;
            if open[next as usize] == 0 {
                ready.push(next);
            }
        }
    }
    match open.iter().position(|&count| count > 0) {
        Some(stuck) => Err(Unsound::Cycle(nodes.cycle(&waits, &open, stuck as u32))),
        None => Ok(()),
    }
}

impl<'a> Nodes<'a> {
    fn of(programs: &'a [Program], meetings: &'a Meetings) -> Nodes<'a> {
        let mut tasks = 0;
        let first = |program: &Program| {
            tasks += program.tasks.len();
            tasks - program.tasks.len()
        };
        let firsts = programs.iter().map(first).collect();
        Nodes { programs, meetings, firsts, tasks }
    }

    fn number(&self, rank: usize, index: usize) -> u32 {
        let number = match self.meetings.of_task(rank, index) {
            Some(meeting) => self.tasks + meeting,
            None => self.firsts[rank] + index,
        };
        u32::try_from(number).expect("programs have fewer tasks")
    }

    fn node(&self, number: u32) -> Node {
        let number = number as usize;
        if number >= self.tasks {
            return Node::Meeting(number - self.tasks);
        }
        let rank = self.firsts.partition_point(|&first| first <= number) - 1;
        Node::Compute(rank, number - self.firsts[rank])
    }

    /// Each node waits for the task before it on its queue, the exchanges that write its values, and, if it is an exchange, the
    /// compute tasks before it. An exchange also waits for the one before it on any lane: on GPUs the hosts of its members meet when
    /// they issue it.
    fn waits(&self) -> Vec<Wait> {
        let mut found = Vec::new();
        for (rank, program) in self.programs.iter().enumerate() {
            let mut waits = Waits::new(program.view());
            for (index, task) in program.tasks.iter().enumerate() {
                let node = self.number(rank, index);
                let last = if task.exchange.is_some() { waits.issued() } else { waits.computed() };
                found.extend(last.map(|last| (self.number(rank, last), node)));
                waits.visit(index, |other| found.push((self.number(rank, other), node)));
            }
        }
        found
    }

    /// Follows stuck nodes, which have waits left, each to a stuck one that it waits for, until it reaches one for the second time.
    fn cycle(&self, waits: &[Wait], open: &[u32], start: u32) -> Vec<String> {
        let mut path = vec![start];
        let first = loop {
            let here = path[path.len() - 1];
            let awaited = waits.iter().filter(|&&(_, node)| node == here).map(|&(awaited, _)| awaited);
            let next = awaited.filter(|&awaited| open[awaited as usize] > 0).min();
            let next = next.expect("a stuck node waits for a stuck one");
            if let Some(first) = path.iter().position(|&node| node == next) {
                break first;
            }
            path.push(next);
        };
        let around = &path[first..];
        let pairs = (0..around.len()).map(|i| [around[i], around[(i + 1) % around.len()]]);
        pairs.map(|[node, awaited]| format!("  {} waits for {}", self.name(node), self.name(awaited))).collect()
    }

    fn name(&self, number: u32) -> String {
        let task = |rank: usize, index: usize| {
            let Task { work, unit, micro, .. } = &self.programs[rank].tasks[index];
            format!("{work:?}({}, {micro})", unit.0)
        };
        match self.node(number) {
            Node::Compute(rank, index) => format!("{}, task {index} of rank {rank},", task(rank, index)),
            Node::Meeting(number) => {
                let members: Vec<(usize, usize)> = self.meetings.members(number).collect();
                let &(rank, index) = members.first().expect("a meeting has members");
                let exchange = self.programs[rank].tasks[index].exchange.expect("a meeting is of exchanges");
                let group = &self.programs[rank].groups[exchange.group.0].name;
                let places: Vec<String> =
                    members.iter().map(|(rank, index)| format!("task {index} of rank {rank}")).collect();
                format!("{} in group `{group}`, {},", task(rank, index), places.join(" and "))
            }
        }
    }
}
