//! What tasks and exchanges take on a machine's devices, as measured.
//!
//! A task is known by the kernels that it launches: tasks of other units, parts and strategies that launch the same ones take as
//! long. Between two measured sizes of the same kernels it interpolates; anything else is not known, and never free.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use evenkeel_device::Counts;
use evenkeel_step::simulate::{Contention, Costs, median};
use evenkeel_step::trace::{Span, Timeline};
use evenkeel_step::{Program, Task};
use serde::{Deserialize, Serialize};

/// A rank's program of a step, and the kernels of its tasks, from a dry run.
pub struct Counted {
    pub program: Program,
    /// By task; none for exchanges.
    pub counts: Vec<Counts>,
}

/// Kernels by kind: launches, operations and bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Kernels(BTreeMap<String, [u64; 3]>);

/// Measurements by kind of place: a device, and how many others are busy beside it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    places: BTreeMap<String, Table>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Table {
    tasks: Vec<MeasuredTask>,
    exchanges: Vec<MeasuredExchange>,
    /// Seconds of a step outside its program.
    host_s: f64,
    contention: [f64; 2],
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct MeasuredTask {
    work: String,
    kernels: Kernels,
    seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct MeasuredExchange {
    work: String,
    members: usize,
    bytes: u64,
    seconds: f64,
}

/// Tasks that nobody has measured, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not measured on {place}: {}", tasks.iter().cloned().collect::<Vec<_>>().join(", "))]
pub struct NotMeasured {
    pub place: String,
    pub tasks: BTreeSet<String>,
}

/// The largest factor between a measured size and one that is foretold from it alone.
const MOST_SCALING: f64 = 2.0;

impl From<&Counts> for Kernels {
    fn from(counts: &Counts) -> Kernels {
        let of_kind = |count: &evenkeel_device::Count| [count.launches, count.flops as u64, count.bytes as u64];
        Kernels(counts.0.iter().map(|(name, count)| ((*name).to_owned(), of_kind(count))).collect())
    }
}

impl Kernels {
    fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// One number that grows with the time they take: bytes, and operations at the usual ratio of a device's speeds.
    fn size(&self) -> f64 {
        const FLOPS_PER_BYTE: f64 = 30.0;
        self.0.values().map(|[_, flops, bytes]| *bytes as f64 + *flops as f64 / FLOPS_PER_BYTE).sum()
    }
}

impl Profile {
    /// Takes in steps of one strategy, measured task by task: on each rank's kind of place, its program and the spans of every
    /// step. `host_s` is what a step took outside its program.
    pub fn learn(&mut self, places: &[String], counted: &[Counted], steps: &[Timeline], host_s: f64) {
        let mut tasks: HashMap<(&str, &str, Kernels), Vec<f64>> = HashMap::new();
        let mut exchanges: BTreeMap<(&str, &str, usize, u64), Vec<f64>> = BTreeMap::new();
        for (rank, (place, Counted { program, counts })) in places.iter().zip(counted).enumerate() {
            for step in steps {
                for (index, span) in aligned(program, &step.ranks[rank]) {
                    let (task, work) = (&program.tasks[index], span.work.row().name);
                    match task.exchange {
                        Some(exchange) => {
                            let members = program.groups[exchange.group.0].ranks.len();
                            let key = (place.as_str(), work, members, exchange.bytes);
                            exchanges.entry(key).or_default().push(span.end_s - span.came_s);
                        }
                        None => {
                            let key = (place.as_str(), work, Kernels::from(&counts[index]));
                            tasks.entry(key).or_default().push(span.duration_s());
                        }
                    }
                }
            }
        }
        for ((place, work, kernels), seconds) in tasks {
            let table = self.places.entry(place.to_owned()).or_default();
            table.tasks.retain(|known| known.work != work || known.kernels != kernels);
            table.tasks.push(MeasuredTask { work: work.to_owned(), kernels, seconds: median(seconds) });
        }
        for ((place, work, members, bytes), seconds) in exchanges {
            let table = self.places.entry(place.to_owned()).or_default();
            table.exchanges.retain(|known| (known.work.as_str(), known.members, known.bytes) != (work, members, bytes));
            table.exchanges.push(MeasuredExchange {
                work: work.to_owned(),
                members,
                bytes,
                seconds: median(seconds),
            });
        }
        for place in places {
            self.places.get_mut(place).expect("it has tasks").host_s = host_s;
        }
    }

    /// The costs of programs on these kinds of places, by rank, and the seconds of a step outside its program.
    pub fn costs(&self, places: &[String], counted: &[Counted]) -> Result<(Costs, f64), NotMeasured> {
        let (mut by_task, mut host_s, mut contention) = (Vec::new(), 0.0f64, [0.0; 2]);
        let mut known: HashMap<(&str, &str, Kernels), Option<f64>> = HashMap::new();
        for (place, Counted { program, counts }) in places.iter().zip(counted) {
            let missing = |tasks| NotMeasured { place: place.clone(), tasks };
            let Some(table) = self.places.get(place) else {
                return Err(missing(program.tasks.iter().map(|task| task.work.row().name.to_owned()).collect()));
            };
            let mut unknown = BTreeSet::new();
            let mut of_task = |(task, counts): (&Task, &Counts)| {
                let work = task.work.row().name;
                let found = match task.exchange {
                    Some(exchange) => {
                        let members = program.groups[exchange.group.0].ranks.len();
                        table.exchange_s(work, members, exchange.bytes)
                    }
                    None if counts.0.is_empty() => Some(0.0),
                    None => {
                        let kernels = Kernels::from(counts);
                        let key = (place.as_str(), work, kernels.clone());
                        *known.entry(key).or_insert_with(|| table.task_s(work, &kernels, task.work.is_of_tail()))
                    }
                };
                found.unwrap_or_else(|| {
                    unknown.insert(work.to_owned());
                    0.0
                })
            };
            by_task.push(program.tasks.iter().zip(counts).map(&mut of_task).collect());
            if !unknown.is_empty() {
                return Err(missing(unknown));
            }
            host_s = host_s.max(table.host_s);
            contention = table.contention;
        }
        let mut costs = Costs::one_by_one(by_task);
        costs.contention = Contention { compute: contention[0], exchange: contention[1] };
        Ok((costs, host_s))
    }

    /// How much longer work takes beside an exchange on a kind of place, and an exchange beside work.
    pub fn set_contention(&mut self, place: &str, Contention { compute, exchange }: Contention) {
        self.places.entry(place.to_owned()).or_default().contention = [compute, exchange];
    }
}

impl Table {
    fn task_s(&self, work: &str, kernels: &Kernels, is_of_tail: bool) -> Option<f64> {
        let of_work = || self.tasks.iter().filter(|known| known.work == work);
        if let Some(exact) = of_work().find(|known| known.kernels == *kernels) {
            return Some(exact.seconds);
        }
        // The same kernels for another unit, part or schedule may go by another name.
        if let Some(exact) = self.tasks.iter().find(|known| known.kernels == *kernels) {
            return Some(exact.seconds);
        }
        let alike = of_work().filter(|known| known.kernels.names().eq(kernels.names()));
        let points = alike.map(|known| (known.kernels.size(), known.seconds)).collect();
        // The tail's work is proportional to a model's parameters, of which a shortened one has few.
        interpolated(points, kernels.size(), if is_of_tail { f64::INFINITY } else { MOST_SCALING })
    }

    fn exchange_s(&self, work: &str, members: usize, bytes: u64) -> Option<f64> {
        let alike = self.exchanges.iter().filter(|known| known.work == work && known.members == members);
        interpolated(alike.map(|known| (known.bytes as f64, known.seconds)).collect(), bytes as f64, f64::INFINITY)
    }
}

/// Seconds of a size between measured ones. Beyond them they are proportional, up to a factor.
fn interpolated(mut points: Vec<(f64, f64)>, size: f64, most: f64) -> Option<f64> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let above = points.partition_point(|point| point.0 < size);
    match (above.checked_sub(1).map(|below| points[below]), points.get(above)) {
        (_, Some(&(found, seconds))) if found == size => Some(seconds),
        (Some((low, low_s)), Some(&(high, high_s))) => Some(low_s + (high_s - low_s) * (size - low) / (high - low)),
        (Some((found, seconds)), None) => (size <= found * most).then(|| seconds * size / found.max(1.0)),
        (None, Some(&(found, seconds))) => (found <= size * most).then(|| seconds * size / found),
        (None, None) => None,
    }
}

/// The spans of a step beside their tasks: tasks without rows have none.
fn aligned<'a>(program: &Program, spans: &'a [Span]) -> Vec<(usize, &'a Span)> {
    let mut spans = spans.iter().peekable();
    let is_of = |task: &Task, span: &Span| (task.work, task.unit, task.micro) == (span.work, span.unit, span.micro);
    let of_task = |(index, task): (usize, &Task)| Some((index, spans.next_if(|span| is_of(task, span))?));
    program.tasks.iter().enumerate().filter_map(of_task).collect()
}
