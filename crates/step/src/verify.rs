//! The proof that programs may run: each by itself, and all ranks' together.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::mem::{Discriminant, discriminant};

use crate::program::{Exchange, Members, Micro, Program, ROOMS, Task, UnitIdx, Value};
use crate::work::{Lane, Work};

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
    let meetings = meetings(programs)?;
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

/// By rank and place in its program: the meeting of each exchange.
pub(crate) type Meetings = HashMap<(usize, usize), usize>;

/// By member: the places of its exchanges in a group.
type Issued = BTreeMap<usize, Vec<usize>>;

/// Matches the ranks' exchanges with one another.
pub(crate) fn meetings(programs: &[Program]) -> Result<Meetings, Unsound> {
    let mut issued: BTreeMap<(&str, &[usize]), Issued> = BTreeMap::new();
    for (rank, program) in programs.iter().enumerate() {
        for (index, task) in program.tasks.iter().enumerate() {
            let Some(Exchange { group, .. }) = task.exchange else { continue };
            let Members { name, ranks } = &program.groups[group.0];
            issued.entry((name, ranks)).or_default().entry(rank).or_default().push(index);
        }
    }
    let (mut meetings, mut count) = (Meetings::new(), 0);
    for ((name, ranks), issued) in issued {
        let of = |rank: usize| issued.get(&rank).map_or(&[][..], Vec::as_slice);
        let most = ranks.iter().map(|&rank| of(rank).len()).max().unwrap_or(0);
        for number in 0..most {
            let first = *ranks.iter().find(|&&rank| of(rank).len() > number).expect("one has most of them");
            for &rank in ranks {
                let asked = [first, rank].map(|rank| of(rank).get(number).map(|&index| &programs[rank].tasks[index]));
                if asked[0].map(what_is_asked) != asked[1].map(what_is_asked) {
                    let found = asked.map(|task| task.map_or("missing".to_owned(), describe));
                    return Err(Unsound::Disagree { group: name.to_owned(), number, ranks: [first, rank], found });
                }
                meetings.insert((rank, of(rank)[number]), count + number);
            }
            let task = |rank: usize| &programs[rank].tasks[of(rank)[number]];
            let receivers = ranks.iter().filter(|&&rank| task(rank).receives()).count();
            if task(first).work.lane() == Lane::Pass && receivers != 1 {
                return Err(Unsound::NotOneWay { group: name.to_owned(), number });
            }
        }
        count += most;
    }
    Ok(meetings)
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

/// A compute task of a rank, or a meeting of several, that waits for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Node {
    Compute(usize, usize),
    Meeting(usize),
}

/// Goes through the programs in order of their waits, without computing. If nodes are left when none can go on, some of them wait
/// for one another.
fn check_waits(programs: &[Program], meetings: &Meetings) -> Result<(), Unsound> {
    let awaited = awaited(programs, meetings);
    let mut open: HashMap<Node, usize> = awaited.iter().map(|(&node, before)| (node, before.len())).collect();
    let mut behind: HashMap<Node, Vec<Node>> = HashMap::new();
    for (&node, before) in &awaited {
        before.iter().for_each(|&other| behind.entry(other).or_default().push(node));
    }
    let mut ready: Vec<Node> = open.iter().filter(|&(_, &count)| count == 0).map(|(&node, _)| node).collect();
    while let Some(node) = ready.pop() {
        open.remove(&node);
        for next in behind.get(&node).into_iter().flatten() {
            let count = open.get_mut(next).expect("a node runs once");
            *count -= 1;
            if *count == 0 {
                ready.push(*next);
            }
        }
    }
    match open.keys().min() {
        Some(&stuck) => Err(Unsound::Cycle(cycle(programs, meetings, &awaited, &open, stuck))),
        None => Ok(()),
    }
}

/// The nodes that each node waits for: the task before it on its queue, the exchanges that write its values, and, for an
/// exchange, the compute tasks before it. An exchange also waits for the one before it on any lane: on GPUs the hosts of its members
/// meet when they issue it.
fn awaited(programs: &[Program], meetings: &Meetings) -> HashMap<Node, HashSet<Node>> {
    let mut awaited: HashMap<Node, HashSet<Node>> = HashMap::new();
    for (rank, program) in programs.iter().enumerate() {
        let computed_before = program.computed_before();
        let mut computed = None;
        let mut issued = None;
        let mut exchanged: BTreeMap<Lane, Node> = BTreeMap::new();
        let mut arriving: HashMap<Value, Node> = HashMap::new();
        for (index, task) in program.tasks.iter().enumerate() {
            let node = match meetings.get(&(rank, index)) {
                Some(&meeting) => Node::Meeting(meeting),
                None => Node::Compute(rank, index),
            };
            let before = awaited.entry(node).or_default();
            if task.exchange.is_some() {
                before.extend(computed_before[index].map(|index| Node::Compute(rank, index)));
                before.extend(issued.replace(node));
                exchanged.insert(task.work.lane(), node);
                arriving.extend(task.writes.iter().map(|&value| (value, node)));
            } else {
                before.extend(computed);
                before.extend(task.reads.iter().filter_map(|value| arriving.get(value)));
                before.extend(
                    exchanged.iter().filter(|(lane, _)| program.waits_for_all(task, **lane)).map(|(_, node)| node),
                );
                computed = Some(node);
            }
        }
    }
    awaited
}

/// Follows stuck nodes, each to a stuck one that it waits for, until it reaches one for the second time.
fn cycle(
    programs: &[Program],
    meetings: &Meetings,
    awaited: &HashMap<Node, HashSet<Node>>,
    stuck: &HashMap<Node, usize>,
    start: Node,
) -> Vec<String> {
    let mut path = vec![start];
    let first = loop {
        let here = path[path.len() - 1];
        let next = awaited[&here].iter().filter(|node| stuck.contains_key(node)).min();
        let next = *next.expect("a stuck node waits for a stuck one");
        if let Some(first) = path.iter().position(|&node| node == next) {
            break first;
        }
        path.push(next);
    };
    let around = &path[first..];
    let waits = (0..around.len()).map(|i| [around[i], around[(i + 1) % around.len()]]);
    waits
        .map(|pair| format!("  {} waits for {}", name(programs, meetings, pair[0]), name(programs, meetings, pair[1])))
        .collect()
}

fn name(programs: &[Program], meetings: &Meetings, node: Node) -> String {
    let task = |rank: usize, index: usize| {
        let Task { work, unit, micro, .. } = &programs[rank].tasks[index];
        format!("{work:?}({}, {micro})", unit.0)
    };
    match node {
        Node::Compute(rank, index) => format!("{}, task {index} of rank {rank},", task(rank, index)),
        Node::Meeting(number) => {
            let mut members: Vec<&(usize, usize)> =
                meetings.iter().filter(|&(_, &meeting)| meeting == number).map(|(place, _)| place).collect();
            members.sort();
            let &&(rank, index) = members.first().expect("a meeting has members");
            let exchange = programs[rank].tasks[index].exchange.expect("a meeting is of exchanges");
            let group = &programs[rank].groups[exchange.group.0].name;
            let places: Vec<String> =
                members.iter().map(|(rank, index)| format!("task {index} of rank {rank}")).collect();
            format!("{} in group `{group}`, {},", task(rank, index), places.join(" and "))
        }
    }
}
