//! What tasks and exchanges take on a machine's devices, as measured.
//!
//! A task is known by the kernels that it launches: tasks of other units, parts and strategies that launch the same ones take as
//! long. Between two measured sizes of the same kernels it interpolates; anything else is not known, and never free.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use evenkeel_device::Counts;
use evenkeel_step::simulate::median;
use evenkeel_step::trace::{Span, Timeline};
use evenkeel_step::{Program, Task, Work};
use serde::{Deserialize, Serialize};

use crate::counted::Counted;
use crate::lateness::{Lateness, MOST_STEPS, MeasuredStep, StepTerms, least_ratio};
use crate::prices::{NotKnown, Prices, simulated};

/// Kernels by kind: launches, operations and bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Kernels(BTreeMap<String, [u64; 3]>);

/// Measurements by kind of place: a device, how many others are busy beside it, and what is computed there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    places: BTreeMap<String, Table>,
    /// By strategy: seconds of whole steps.
    #[serde(default)]
    runs: BTreeMap<String, Vec<f64>>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Table {
    tasks: Vec<MeasuredTask>,
    exchanges: Vec<MeasuredExchange>,
    steps: Vec<MeasuredStep>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct MeasuredTask {
    work: String,
    kernels: Kernels,
    seconds: Vec<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct MeasuredExchange {
    work: String,
    members: usize,
    bytes: u64,
    seconds: Vec<f64>,
}

/// The places of a run's ranks, by what was measured there.
pub struct Measured<'a> {
    profile: &'a Profile,
    /// By rank.
    places: &'a [String],
    known: RefCell<HashMap<TaskKey<'a>, Option<f64>>>,
    /// By kind of place.
    lateness: RefCell<HashMap<&'a str, Rc<Lateness>>>,
}

/// A kind of place, of work, and its kernels.
type TaskKey<'a> = (&'a str, &'static str, Counts);

/// The largest factor between the measured sizes of a kind and one beyond them.
const MOST_SCALING: f64 = 2.0;
/// The same if there is one measured size.
const LEAST_SCALING: f64 = 1.1;

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

    fn flops(&self) -> f64 {
        self.0.values().map(|[_, flops, _]| *flops as f64).sum()
    }

    fn bytes(&self) -> f64 {
        self.0.values().map(|[_, _, bytes]| *bytes as f64).sum()
    }

    /// The place of their operations and bytes, kernel by kernel, on the line through those of two others, which are at 0 and 1.
    /// They lie there if all three differ in their tokens alone, or in a width alone. Between other sizes, times are no line.
    fn place_on_line_through(&self, [one, other]: [&Kernels; 2]) -> Option<f64> {
        const TOLERANCE: f64 = 0.01;
        let [low, high, own] = [one, other, self].map(|kernels| kernels.flops() + kernels.bytes());
        let place = (own - low) / (high - low);
        let are_near = |((one, other), own): ((&[u64; 3], &[u64; 3]), &[u64; 3])| {
            (1..3).all(|kind| {
                let [one, other, own] = [one, other, own].map(|counts| counts[kind] as f64);
                (one + place * (other - one) - own).abs() <= TOLERANCE * own
            })
        };
        let is_on_it = place.is_finite() && one.0.values().zip(other.0.values()).zip(self.0.values()).all(are_near);
        is_on_it.then_some(place)
    }

    /// Whether they are at most so many times as much work as others, and no less.
    fn is_within(&self, other: &Kernels, most: f64) -> bool {
        [Kernels::flops, Kernels::bytes].into_iter().all(|work| {
            let (own, other) = (work(self), work(other));
            own <= other * most && other <= own * most
        })
    }

    /// One number that grows with the time they take.
    fn size(&self, flops_per_byte: f64) -> f64 {
        self.bytes() + self.flops() / flops_per_byte
    }
}

impl Profile {
    /// Takes in steps of one strategy, measured task by task: on each rank's kind of place, its program and the spans of every
    /// step. `step_s` is what a step took without that.
    pub fn learn(
        &mut self,
        places: &[String],
        counted: &[Counted],
        steps: &[Timeline],
        step_s: f64,
    ) -> Result<(), NotKnown> {
        let mut tasks: HashMap<(&str, &str, Kernels), Vec<f64>> = HashMap::new();
        let mut exchanges: BTreeMap<(&str, &str, usize, u64), Vec<f64>> = BTreeMap::new();
        for Counted { rank, program, counts, .. } in counted {
            for (index, span) in steps.iter().flat_map(|step| aligned(program, &step.ranks[*rank])) {
                let (place, work) = (places[*rank].as_str(), span.work.row().name);
                match program.tasks[index].exchange {
                    Some(exchange) => {
                        let members = program.groups[exchange.group.0].ranks.len();
                        let seconds = exchanges.entry((place, work, members, exchange.bytes)).or_default();
                        seconds.push(span.end_s - span.came_s);
                    }
                    None => {
                        let seconds = tasks.entry((place, work, Kernels::from(&*counts[index]))).or_default();
                        seconds.push(span.duration_s());
                    }
                }
            }
        }
        for ((place, work, kernels), seconds) in tasks {
            self.places.entry(place.to_owned()).or_default().note_task(work, kernels, median(seconds));
        }
        for ((place, work, members, bytes), seconds) in exchanges {
            self.places.entry(place.to_owned()).or_default().note_exchange(work, members, bytes, median(seconds));
        }
        let terms = StepTerms::of(counted, simulated(&self.on(places), counted)?.duration_s());
        let step = MeasuredStep { terms, seconds: step_s };
        if !step.is_sound() {
            // The machine stood still meanwhile.
            return Ok(());
        }
        for place in places.iter().collect::<BTreeSet<_>>() {
            let steps = &mut self.places.get_mut(place).expect("it has tasks").steps;
            if steps.len() == MOST_STEPS {
                steps.remove(0);
            }
            steps.push(step);
        }
        Ok(())
    }

    /// Whether its numbers can be measurements: a file may have any.
    pub fn is_sound(&self) -> bool {
        const MOST_ENTRIES: usize = 1 << 16;
        let is_sound = |measured: &Vec<f64>| {
            let are_times = measured.iter().all(|number| number.is_finite() && (0.0..MOST_SECONDS).contains(number));
            are_times && (1..=MOST_MEASUREMENTS).contains(&measured.len())
        };
        let of_table = |table: &Table| {
            let tasks = table.tasks.iter().map(|task| &task.seconds);
            let all = tasks.chain(table.exchanges.iter().map(|exchange| &exchange.seconds));
            let are_steps = table.steps.len() <= MOST_STEPS && table.steps.iter().all(MeasuredStep::is_sound);
            are_steps && table.tasks.len() + table.exchanges.len() <= MOST_ENTRIES && { all }.all(is_sound)
        };
        self.places.values().all(of_table) && self.runs.len() <= MOST_ENTRIES && self.runs.values().all(is_sound)
    }

    /// Keeps what whole steps of a strategy took.
    pub fn note_run(&mut self, strategy: &str, seconds: f64) {
        note(self.runs.entry(strategy.to_owned()).or_default(), seconds);
    }

    /// The number of strategies that were run whose names begin so.
    pub fn runs(&self, prefix: &str) -> usize {
        self.runs.keys().filter(|name| name.starts_with(prefix)).count()
    }

    /// Seconds of a strategy's whole step, if it was measured.
    pub fn run_s(&self, strategy: &str) -> Option<f64> {
        self.runs.get(strategy).and_then(|measured| middle(measured))
    }

    /// What is known about the kinds of places that a run's ranks compute on.
    pub fn on<'a>(&'a self, places: &'a [String]) -> Measured<'a> {
        Measured { profile: self, places, known: RefCell::default(), lateness: RefCell::default() }
    }
}

impl<'a> Measured<'a> {
    fn table(&self, rank: usize) -> Option<&'a Table> {
        self.profile.places.get(&self.places[rank])
    }

    fn steps(&self, rank: usize) -> &'a [MeasuredStep] {
        self.table(rank).map_or(&[], |table| &table.steps)
    }

    fn lateness(&self, rank: usize) -> Rc<Lateness> {
        let of_steps = || Rc::new(Lateness::of(self.steps(rank)));
        self.lateness.borrow_mut().entry(&self.places[rank]).or_insert_with(of_steps).clone()
    }
}

impl Prices for Measured<'_> {
    fn place(&self, rank: usize) -> String {
        self.places[rank].clone()
    }

    fn task_s(&self, rank: usize, task: &Task, kernels: &Counts) -> Option<f64> {
        let (table, work) = (self.table(rank)?, task.work.row().name);
        let key = (self.places[rank].as_str(), work, kernels.clone());
        let found = || table.task_s(work, &Kernels::from(kernels), task.work.is_of_tail());
        *self.known.borrow_mut().entry(key).or_insert_with(found)
    }

    fn exchange_s(&self, rank: usize, work: Work, bytes: u64, members: &[usize]) -> Option<f64> {
        self.table(rank)?.exchange_s(work.row().name, members.len(), bytes)
    }

    fn whole_step_s(&self, counted: &[Counted], programs_s: f64) -> f64 {
        let terms = StepTerms::of(counted, programs_s);
        counted.iter().map(|it| self.lateness(it.rank).step_s(&terms)).fold(0.0, f64::max)
    }

    fn least_step_s(&self, rank: usize, programs_s: f64) -> f64 {
        programs_s * least_ratio(self.steps(rank))
    }
}

impl Table {
    fn note_task(&mut self, work: &str, kernels: Kernels, seconds: f64) {
        let found = self.tasks.iter().position(|known| known.work == work && known.kernels == kernels);
        let place = found.unwrap_or_else(|| {
            self.tasks.push(MeasuredTask { work: work.to_owned(), kernels, seconds: Vec::new() });
            self.tasks.len() - 1
        });
        note(&mut self.tasks[place].seconds, seconds);
    }

    fn note_exchange(&mut self, work: &str, members: usize, bytes: u64, seconds: f64) {
        let is_same =
            |known: &MeasuredExchange| (known.work.as_str(), known.members, known.bytes) == (work, members, bytes);
        let place = self.exchanges.iter().position(is_same).unwrap_or_else(|| {
            self.exchanges.push(MeasuredExchange { work: work.to_owned(), members, bytes, seconds: Vec::new() });
            self.exchanges.len() - 1
        });
        note(&mut self.exchanges[place].seconds, seconds);
    }

    /// The highest rate of any task: operations or bytes per second.
    fn fastest(&self, work: fn(&Kernels) -> f64) -> Option<f64> {
        let rate = |task: &MeasuredTask| Some(work(&task.kernels) / middle(&task.seconds)?);
        self.tasks.iter().filter_map(rate).max_by(f64::total_cmp)
    }

    /// Operations that take as long as moving a byte.
    fn flops_per_byte(&self) -> f64 {
        let rates = self.fastest(Kernels::flops).zip(self.fastest(Kernels::bytes));
        rates.map_or(1.0, |(flops_per_s, bytes_per_s)| (flops_per_s / bytes_per_s).max(f64::MIN_POSITIVE))
    }

    fn task_s(&self, work: &str, kernels: &Kernels, is_of_tail: bool) -> Option<f64> {
        let of_work = || self.tasks.iter().filter(|known| known.work == work);
        if let Some(exact) = of_work().find(|known| known.kernels == *kernels) {
            return middle(&exact.seconds);
        }
        // The same kernels for another unit, part or schedule may go by another name.
        if let Some(exact) = self.tasks.iter().find(|known| known.kernels == *kernels) {
            return middle(&exact.seconds);
        }
        let alike = of_work().filter(|known| known.kernels.names().eq(kernels.names()));
        let balance = self.flops_per_byte();
        let point = |known: &MeasuredTask| Some((known.kernels.size(balance), middle(&known.seconds)?));
        let size = kernels.size(balance);
        if is_of_tail {
            // The tail's work is proportional to a model's parameters, of which a shortened one has few.
            return interpolated(alike.filter_map(point).collect(), size);
        }
        // Whether a size is known depends on what was measured, and not on what it took.
        let alike: Vec<&MeasuredTask> = alike.collect();
        let sizes: Vec<f64> = alike.iter().map(|known| known.kernels.size(balance)).collect();
        let distance = |index: usize| (sizes[index] - size).abs();
        let is_near = |index: usize, most: f64| kernels.is_within(&alike[index].kernels, most);
        let pairs = (0..alike.len()).flat_map(|one| (one + 1..alike.len()).map(move |other| [one, other]));
        let known = pairs.filter_map(|pair @ [one, other]| {
            let place = kernels.place_on_line_through(pair.map(|index| &alike[index].kernels))?;
            let is_beyond = !(0.0..=1.0).contains(&place);
            let is_known = !is_beyond || pair.into_iter().any(|index| is_near(index, MOST_SCALING));
            is_known.then_some((pair, is_beyond, distance(one) + distance(other)))
        });
        let nearest_pair = known.min_by(|a, b| a.1.cmp(&b.1).then(a.2.total_cmp(&b.2)));
        let nearest = || {
            let near = (0..alike.len()).filter(|&index| is_near(index, LEAST_SCALING));
            near.min_by(|&a, &b| distance(a).total_cmp(&distance(b)))
        };
        let known = nearest_pair.map_or_else(|| nearest().into_iter().collect(), |(pair, ..)| Vec::from(pair));
        interpolated(known.into_iter().filter_map(|index| point(alike[index])).collect(), size)
    }

    fn exchange_s(&self, work: &str, members: usize, bytes: u64) -> Option<f64> {
        let alike = self.exchanges.iter().filter(|known| known.work == work && known.members == members);
        let points = alike.filter_map(|known| Some((known.bytes as f64, middle(&known.seconds)?))).collect();
        interpolated(points, bytes as f64)
    }
}

/// Measurements of the same thing that are kept.
const MOST_MEASUREMENTS: usize = 15;
/// No task or step of a plan takes as long.
const MOST_SECONDS: f64 = 1e6;

/// Keeps the latest measurements of the same thing.
fn note(measured: &mut Vec<f64>, seconds: f64) {
    if measured.len() == MOST_MEASUREMENTS {
        measured.remove(0);
    }
    measured.push(seconds);
}

fn middle(measured: &[f64]) -> Option<f64> {
    (!measured.is_empty()).then(|| median(measured.iter().copied()))
}

/// Seconds of a size: on the line between its measured neighbours or, beyond all sizes, on that of the last two; in proportion to
/// one size alone.
fn interpolated(mut points: Vec<(f64, f64)>, size: f64) -> Option<f64> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (first, last) = (*points.first()?, *points.last()?);
    let proportional = |(found, seconds): (f64, f64)| seconds * size / found.max(1.0);
    if points.len() == 1 {
        return Some(proportional(first));
    }
    let above = points.partition_point(|point| point.0 < size).clamp(1, points.len() - 1);
    let ((low, low_s), (high, high_s)) = (points[above - 1], points[above]);
    let seconds = low_s + (high_s - low_s) * (size - low) / (high - low);
    // Noise may tilt a line, but nothing takes longer for being smaller than all, or more than in proportion for being larger.
    Some(match size {
        _ if size < first.0 => seconds.clamp(proportional(first), first.1),
        _ if size > last.0 => seconds.clamp(last.1, proportional(last)),
        _ => seconds,
    })
}

/// The spans of a step beside their tasks: tasks without rows have none.
fn aligned<'a>(program: &Program, spans: &'a [Span]) -> Vec<(usize, &'a Span)> {
    let mut spans = spans.iter().peekable();
    let is_of = |task: &Task, span: &Span| (task.work, task.unit, task.micro) == (span.work, span.unit, span.micro);
    let of_task = |(index, task): (usize, &Task)| Some((index, spans.next_if(|span| is_of(task, span))?));
    program.tasks.iter().enumerate().filter_map(of_task).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_between_measured_sizes_and_beyond_them_lie_on_lines() {
        // A second, and a half for each unit of size.
        let points = || vec![(8.0, 5.0), (2.0, 2.0)];
        for (size, expected) in [(2.0, 2.0), (5.0, 3.5), (16.0, 9.0), (1.0, 1.5), (80.0, 41.0)] {
            assert_eq!(interpolated(points(), size), Some(expected), "{size}");
        }
        // Larger sizes that seem to take less say nothing about those beyond them.
        let tilted = || vec![(8.0, 1.0), (2.0, 2.0)];
        assert_eq!(interpolated(tilted(), 16.0), Some(1.0));
        assert_eq!(interpolated(tilted(), 1.0), Some(2.0));
        assert_eq!(interpolated(vec![(8.0, 4.0)], 2.0), Some(1.0));
        assert_eq!(interpolated(Vec::new(), 1.0), None);
    }

    #[test]
    fn far_sizes_are_not_known_whatever_was_measured() {
        let copy = |bytes: u64| Kernels([("copy".to_owned(), [1, 0, bytes])].into());
        let known = |measured: &[(u64, f64)], bytes: u64| {
            let task = |&(bytes, seconds): &(u64, f64)| MeasuredTask {
                work: "forward".to_owned(),
                kernels: copy(bytes),
                seconds: vec![seconds],
            };
            let table = Table { tasks: measured.iter().map(task).collect(), ..Table::default() };
            table.task_s("forward", &copy(bytes), false).is_some()
        };
        for seconds in [0.1, 1.0, 10.0] {
            let two = [(2000, 1.0), (8000, seconds)];
            let cases = [(2000, true), (5000, true), (16_000, true), (17_000, false), (1000, true), (900, false)];
            cases.into_iter().for_each(|(bytes, is_known)| assert_eq!(known(&two, bytes), is_known, "{bytes}"));
            let cases = [(8000, true), (8700, true), (9000, false), (4000, false)];
            cases.into_iter().for_each(|(bytes, is_known)| assert_eq!(known(&two[1..], bytes), is_known, "{bytes}"));
        }
    }

    #[test]
    fn what_differs_in_tokens_and_in_width_is_not_interpolated_at_once() {
        const IN: u64 = 64;
        let product = |tokens: u64, width: u64| {
            let counts = [1, 2 * tokens * IN * width, 2 * (tokens * IN + IN * width + tokens * width)];
            Kernels([("product".to_owned(), counts)].into())
        };
        let measured =
            |(kernels, seconds)| MeasuredTask { work: "forward".to_owned(), kernels, seconds: vec![seconds] };
        let known = [(product(100, 32), 1.0), (product(200, 32), 1.8), (product(100, 48), 1.2)].map(measured);
        let table = Table { tasks: known.into(), ..Table::default() };
        let seconds = |kernels: Kernels| table.task_s("forward", &kernels, false);
        for (kernels, expected) in [(product(150, 32), 1.4), (product(100, 40), 1.1), (product(100, 56), 1.3)] {
            assert!((seconds(kernels).unwrap() - expected).abs() < 1e-6);
        }
        // Two products of other sizes take as long as neither line says.
        assert_eq!(seconds(product(200, 48)), None);
        assert_eq!(seconds(product(150, 40)), None);
    }

    #[test]
    fn numbers_that_nobody_can_have_measured_are_no_profile() {
        let table = |seconds: Vec<f64>| Table {
            tasks: vec![MeasuredTask { work: "update".to_owned(), kernels: Kernels::default(), seconds }],
            steps: vec![MeasuredStep { terms: StepTerms::of(&[], 1.0), seconds: 1.0 }],
            ..Table::default()
        };
        let is_sound =
            |table: Table| Profile { places: [("here".to_owned(), table)].into(), ..Profile::default() }.is_sound();
        assert!(is_sound(table(vec![1e-6, 2.0])));
        for bad in [vec![], vec![-1.0], vec![f64::NAN], vec![f64::INFINITY], vec![1e308], vec![1.0; 16]] {
            assert!(!is_sound(table(bad.clone())), "{bad:?}");
        }
        assert!(is_sound(Table { steps: vec![], ..table(vec![1.0]) }), "a machine may have stood still in every step");
        let too_many = table(vec![1.0]).steps.repeat(MOST_STEPS + 1);
        assert!(!is_sound(Table { steps: too_many, ..table(vec![1.0]) }));
        for terms in [f64::NAN, -1.0, 0.0, 1e300] {
            let steps = vec![MeasuredStep { terms: StepTerms::of(&[], terms), seconds: 1.0 }];
            assert!(!is_sound(Table { steps, ..table(vec![1.0]) }), "{terms}");
        }
    }

    #[test]
    fn the_latest_measurements_of_a_thing_count() {
        let mut measured = Vec::new();
        (0..20).for_each(|number| note(&mut measured, f64::from(number)));
        assert_eq!((measured.len(), middle(&measured)), (15, Some(12.0)));
        assert_eq!(middle(&[]), None);
    }
}
