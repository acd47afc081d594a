//! How fast each rank is at each kind of work, and since when.

use std::collections::VecDeque;

use crate::fixed::Fixed;
use crate::observation::{Class, Division, Observation};
use crate::target::Target;

/// Steps that are looked at together.
const WINDOW: usize = 24;
/// Steps that tell how much times vary, at most and at least.
const LONG: usize = 64;
const LEAST_KNOWN: usize = 5;
/// Fewer say nothing: one of them may have met a hiccup.
pub(crate) const LEAST: usize = 3;
/// Steps that speeds are told from: a neighbour that pauses for fewer has not gone.
const ENOUGH: usize = 5;
/// Relative speeds that have changed by no more than this are the same.
const CHANGE: f64 = 0.12;
/// Standard errors that are no chance.
const PROOF: f64 = 3.0;
/// Widths that are less, as a share of an even one, tell nothing of speed: they take as long whatever they are.
const LEAST_TELLING: f64 = 0.1;
/// What took longer was not computing.
const MOST_SECONDS: f64 = 1e6;

/// Seconds as a line over the width: `rate · (base + width)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Speeds {
    /// By class and rank, seconds for one of the width.
    rates: [Vec<f64>; Class::ALL.len()],
    /// By class and rank: what it does whatever its width is, as width.
    bases: Rates,
    /// By class: what a rank does to work on anything that another keeps, or keep what another works on, as width.
    sharing: [f64; Class::ALL.len()],
    /// How many times as long as the fastest rank each takes for the same.
    pub slowness: Vec<f64>,
    /// The first step at which these speeds were seen.
    pub since: u64,
    /// How far the slowness may be off, as a share of it: two standard errors.
    pub uncertainty: f64,
}

impl Speeds {
    pub fn seconds(&self, class: Class, rank: usize, width: f64) -> f64 {
        let worked = if width == 0.0 { 0.0 } else { self.bases[class as usize][rank] + width };
        self.rates[class as usize][rank] * worked
    }

    /// The part of it that depends on the width.
    pub(crate) fn width_s(&self, class: Class, rank: usize, width: f64) -> f64 {
        self.rates[class as usize][rank] * width
    }

    /// What it takes to share some of a class with another rank.
    pub(crate) fn sharing_s(&self, class: Class, rank: usize) -> f64 {
        self.rates[class as usize][rank] * self.sharing[class as usize]
    }

    /// Of ranks that take as many times the seconds, by class, for one of the width.
    #[cfg(test)]
    pub(crate) fn of_slowness(seconds: [f64; Class::ALL.len()], slowness: Vec<f64>) -> Speeds {
        let rates = seconds.map(|seconds| slowness.iter().map(|slow| seconds * slow).collect());
        let bases = Class::ALL.map(|_| vec![0.0; slowness.len()]);
        Speeds { rates, bases, sharing: [0.0; Class::ALL.len()], slowness, since: 0, uncertainty: 0.0 }
    }

    /// The share of a width that must be left out to be done in so many seconds; none where it is done earlier.
    pub(crate) fn excess(&self, class: Class, rank: usize, width: f64, seconds: f64) -> f64 {
        let worked = seconds / self.rates[class as usize][rank] - self.bases[class as usize][rank];
        // Nothing to work on, or a rank that takes no time, leaves no number.
        let left_out = 1.0 - worked / width;
        if width > 0.0 && left_out > 0.0 { left_out.min(1.0) } else { 0.0 }
    }

    pub fn ranks(&self) -> usize {
        self.slowness.len()
    }

    /// What a class takes at least, however its work is divided.
    pub fn optimum_s(&self, class: Class, total: usize) -> f64 {
        let ranks = self.rates[class as usize].iter().zip(&self.bases[class as usize]);
        let mut ranks: Vec<(f64, f64)> = ranks.map(|(&rate, &base)| (rate, base)).collect();
        // Whoever does much whatever its width is may better have none.
        ranks.sort_unstable_by(|a, b| (a.0 * a.1).total_cmp(&(b.0 * b.1)));
        let (mut per_second, mut worked) = (0.0, total as f64);
        let with_so_many = ranks.into_iter().map(|(rate, base)| {
            (per_second, worked) = (per_second + 1.0 / rate, worked + base);
            if per_second.is_finite() { worked / per_second } else { 0.0 }
        });
        with_so_many.fold(f64::INFINITY, f64::min)
    }
}

/// By class and rank: seconds, widths, or seconds for one of the width.
type Rates = [Vec<f64>; Class::ALL.len()];

/// What ranks took in a step, and for what width.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    step: u64,
    pub seconds: Rates,
    pub worked: Rates,
    pub shares: [Vec<bool>; Class::ALL.len()],
    /// By rank.
    late: Vec<f64>,
    /// Seconds for one of the width, as far as that is known by now.
    rates: Rates,
}

#[cfg(test)]
impl Seen {
    pub fn of(seconds: Rates, worked: Rates, shares: [Vec<bool>; Class::ALL.len()]) -> Seen {
        Seen { step: 0, seconds, worked, shares, late: Vec::new(), rates: Rates::default() }
    }
}

/// Seconds with even widths over the mean of all ranks, by rank, or something of them.
#[derive(Clone, Debug)]
struct Relative<Of = Vec<f64>> {
    of_classes: [Of; Class::ALL.len()],
    of_all: Of,
}

/// What was seen of the ranks so far.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    /// Since a speed changed, whatever the layout was; the last so many of them are of the present one.
    seen: VecDeque<Seen>,
    in_layout: usize,
    has_begun: bool,
    since: Option<u64>,
    /// By step: how far ranks' relative times were off the middle. They outlast changes, for they tell of the machine.
    deviations: VecDeque<Relative<f64>>,
    /// What is typical of the layout before, until it is compared with this one.
    before: Option<Seen>,
    fixed: Fixed,
    /// By rank, in the layout before: of one that has nothing to do in this one, it is all that is known.
    slowness: Vec<f64>,
}

impl Watch {
    /// Takes in a step.
    pub fn observe(&mut self, step: u64, target: &Target, observed: &[Observation]) {
        let (ranks, division) = (observed.len(), &target.work);
        self.since.get_or_insert(step);
        // The first step in a layout tells of beginnings.
        if !std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let gammas: Vec<f64> = observed.iter().map(|rank| rank.gamma).collect();
        let seconds = Class::ALL.map(|class| observed.iter().map(|rank| rank.of(class)).collect());
        let worked = Class::ALL.map(|class| (0..ranks).map(|rank| worked(class, division, &gammas, rank)).collect());
        let is_sane = |late_s: &f64| (0.0..MOST_SECONDS).contains(late_s);
        let late = observed.iter().map(|rank| Some(rank.late_s).filter(is_sane).unwrap_or(0.0)).collect();
        let shares = Class::ALL.map(|class| (0..ranks).map(|rank| target.shares(class, rank)).collect());
        let mut seen = Seen { step, seconds, worked, shares, late, rates: Rates::default() };
        seen.rates = self.rates(&seen);
        push(&mut self.seen, seen, WINDOW);
        self.in_layout = (self.in_layout + 1).min(WINDOW);
        // Until it is known what does not depend on widths, steps in other ones are not compared.
        if let Some(before) = self.before.take_if(|_| self.in_layout >= LEAST) {
            let errors = std::array::from_fn(|class| self.class_error(LEAST, class));
            if let Some(after) = self.typical_seen() {
                self.fixed.learn([&before, &after], division, errors);
                self.know_better();
            }
        }
        if self.before.is_none() {
            let relative: Vec<Relative> = self.seen.iter().map(|seen| self.relative(seen, division)).collect();
            self.deviations.extend(deviation(&relative));
            self.deviations.drain(..self.deviations.len().saturating_sub(LONG));
            if let Some(new) = self.changed_for(&relative) {
                self.seen.drain(..self.seen.len() - new);
                self.in_layout = self.in_layout.min(new);
                self.since = self.seen.front().map(|seen| seen.step);
            }
        }
    }

    /// Seconds for one of the width.
    fn rates(&self, seen: &Seen) -> Rates {
        let mut rates: Rates = std::array::from_fn(|class| {
            let even = seen.worked[class].iter().sum::<f64>() / seen.late.len() as f64;
            let rate = |rank: usize| {
                let (seconds, width) = (seen.seconds[class][rank], seen.worked[class][rank]);
                let done = self.fixed.done(class, width, seen.shares[class][rank]);
                let is_telling = is_known(seconds, width) && width > LEAST_TELLING * even;
                if is_telling { seconds / done } else { f64::NAN }
            };
            (0..seen.late.len()).map(rate).collect()
        });
        estimate_unknown(&mut rates, &self.slowness);
        rates
    }

    /// What was learnt holds for all that was seen.
    fn know_better(&mut self) {
        let rates: Vec<Rates> = self.seen.iter().map(|seen| self.rates(seen)).collect();
        self.seen.iter_mut().zip(rates).for_each(|(seen, rates)| seen.rates = rates);
    }

    fn relative(&self, seen: &Seen, division: &Division) -> Relative {
        let of_all = over_mean(&add(self.even_seconds(&seen.rates, division), &seen.late));
        Relative { of_classes: Class::ALL.map(|class| over_mean(&seen.rates[class as usize])), of_all }
    }

    /// For how many of the last steps ranks have been others than before, if they have.
    fn changed_for(&self, relative: &[Relative]) -> Option<usize> {
        let lengths = std::iter::successors(Some(LEAST), |steps| Some(2 * steps));
        let before = relative.len().min(self.deviations.len());
        let mut lengths = lengths.take_while(|steps| steps + LEAST <= before);
        // The middle of so many shows a change when two thirds of them are of it.
        lengths.find(|&steps| self.has_changed(relative, steps)).map(|steps| steps - steps / 3)
    }

    /// Whether the last so many steps are of others than those before.
    fn has_changed(&self, relative: &[Relative], steps: usize) -> bool {
        let (old, new) = relative.split_at(relative.len() - steps);
        let known = self.deviations.len().saturating_sub(steps);
        let [of_old, of_new] = [old, new].map(|steps| self.uncertainty(steps.len(), known, |off| off.of_all));
        let least = CHANGE.max(PROOF * 0.5 * of_old.hypot(of_new));
        let change = |rank: usize| {
            let of = |steps: &[Relative]| typical(steps, |relative| relative.of_all[rank]);
            of(new) - of(old)
        };
        (0..relative[0].of_all.len()).any(|rank| change(rank).abs() > least)
    }

    /// How far the middle of so many relative times may be off: two standard errors, from the first of the deviations.
    fn uncertainty(&self, steps: usize, deviations: usize, of: impl Fn(&Relative<f64>) -> f64) -> f64 {
        // Four of five deviations are below 1.28 standard ones, and hiccups are rarer than the fifth. The middle of them
        // would say nothing of a core that jumps between two speeds. Its error is 1.1 times that of a mean.
        let standard = quantile(self.deviations.range(..deviations).map(of).collect(), 0.8) / 1.28;
        2.0 * 1.1 * standard / (steps as f64).sqrt()
    }

    /// Of a class, over so many steps: a standard one.
    fn class_error(&self, steps: usize, class: usize) -> f64 {
        0.5 * self.uncertainty(steps, self.deviations.len(), |off| off.of_classes[class])
    }

    /// What ranks would take to compute everything with even widths.
    fn even_seconds(&self, rates: &Rates, division: &Division) -> Vec<f64> {
        let of = |class: Class, rank: usize| {
            rates[class as usize][rank] * self.fixed.done(class as usize, even(class, division), false)
        };
        (0..division.ranks()).map(|rank| Class::ALL.iter().map(|&class| of(class, rank)).sum()).collect()
    }

    /// The layout changes.
    pub fn relaid(&mut self, division: &Division) {
        self.before = self.typical_seen();
        if let Some(speeds) = self.speeds(division) {
            self.slowness = speeds.slowness;
            self.know_better();
        }
        self.in_layout = 0;
        self.has_begun = false;
    }

    /// Steps in the present layout.
    fn laid(&self) -> impl Iterator<Item = &Seen> + Clone {
        self.seen.iter().skip(self.seen.len() - self.in_layout.min(self.seen.len()))
    }

    /// The middle of what was seen of the present layout; none where that is too little.
    fn typical_seen(&self) -> Option<Seen> {
        let seconds = middles(self.laid().map(|seen| &seen.seconds))?;
        Some(Seen { seconds, ..self.seen.back()?.clone() })
    }

    /// None before there is enough to say.
    pub fn speeds(&self, division: &Division) -> Option<Speeds> {
        if self.deviations.len() < LEAST_KNOWN || self.in_layout < ENOUGH {
            return None;
        }
        let rates = self.without_noise(middles(self.laid().map(|seen| &seen.rates))?, division);
        let late_s = |rank: usize| middle(self.laid().map(|seen| seen.late[rank]).collect());
        let late: Vec<f64> = (0..division.ranks()).filter_map(late_s).collect();
        let computing_s = self.even_seconds(&rates, division);
        let all_s: f64 = computing_s.iter().sum();
        // Ranks are late at every class by as much of the time as it has.
        let bases = Class::ALL.map(|class| {
            let (rates, base) = (&rates[class as usize], self.fixed.bases[class as usize]);
            let share = rates.iter().sum::<f64>() * (base + even(class, division)) / all_s.max(f64::MIN_POSITIVE);
            let late = rates.iter().zip(&late).map(|(rate, late)| if *rate > 0.0 { share * late / rate } else { 0.0 });
            late.map(|late| base + late).collect()
        });
        let even_s = add(computing_s, &late);
        let fastest = even_s.iter().copied().fold(f64::INFINITY, f64::min).max(f64::MIN_POSITIVE);
        let slowness = even_s.iter().map(|seconds| seconds / fastest).collect();
        let uncertainty = self.uncertainty(self.in_layout, self.deviations.len(), |off| off.of_all);
        let (sharing, since) = (self.fixed.sharing, self.since.unwrap_or(0));
        Some(Speeds { rates, bases, sharing, slowness, since, uncertainty })
    }

    /// A rank is as slow at every class as it is in all, but for what noise does not explain.
    fn without_noise(&self, mut rates: Rates, division: &Division) -> Rates {
        let in_all = over_mean(&self.even_seconds(&rates, division));
        for (class, rates) in rates.iter_mut().enumerate() {
            let mean = rates.iter().sum::<f64>() / rates.len() as f64;
            let error = self.class_error(self.in_layout, class);
            for (rate, all) in rates.iter_mut().zip(&in_all).filter(|_| mean > 0.0) {
                let differs = *rate / mean - all;
                let real = if differs.abs() > error { 1.0 - (error / differs).powi(2) } else { 0.0 };
                *rate = mean * (all + real * differs);
            }
        }
        rates
    }
}

/// How far the last of some steps is off what is typical of them.
fn deviation(relative: &[Relative]) -> Option<Relative<f64>> {
    let (steps, last) = (relative.len(), relative.last()?);
    // The last is one of those that it is compared with, which draw nearer to it the fewer they are.
    let nearer = (1.0 - 1.0 / steps as f64).sqrt();
    let off = |of: &dyn Fn(&Relative) -> &[f64]| -> Vec<f64> {
        let off = |rank: usize| (of(last)[rank] - typical(relative, |relative| of(relative)[rank])).abs() / nearer;
        (0..last.of_all.len()).map(off).collect()
    };
    let root_mean_square = |off: Vec<f64>| (off.iter().map(|off| off * off).sum::<f64>() / off.len() as f64).sqrt();
    let of_classes = Class::ALL.map(|class| root_mean_square(off(&|relative| &relative.of_classes[class as usize])));
    let of_all = off(&|relative| &relative.of_all).into_iter().fold(0.0, f64::max);
    (steps > 1).then_some(Relative { of_classes, of_all })
}

fn typical(steps: &[Relative], of: impl Fn(&Relative) -> f64) -> f64 {
    middle(steps.iter().map(of).collect()).expect("some steps")
}

/// By class and rank; none of too few.
fn middles<'a>(all: impl Iterator<Item = &'a Rates> + Clone) -> Option<Rates> {
    let ranks = all.clone().nth(LEAST - 1)?[0].len();
    let of = |class: usize, rank: usize| middle(all.clone().map(|rates| rates[class][rank]).collect());
    Some(std::array::from_fn(|class| (0..ranks).filter_map(|rank| of(class, rank)).collect()))
}

pub(crate) fn push<T>(window: &mut VecDeque<T>, value: T, most: usize) {
    window.push_back(value);
    if window.len() > most {
        window.pop_front();
    }
}

/// Whoever has next to nothing of a class is taken to be as slow at it, compared with those who have some, as at the rest; whoever has
/// nothing at all, as slow as it was.
fn estimate_unknown(rates: &mut Rates, slowness: &[f64]) {
    let known = rates.clone();
    let was = |rank: usize| slowness.get(rank).copied().unwrap_or(1.0);
    let slower = |rank: usize, other: usize| {
        let both = known.iter().map(|rates| rates[rank] / rates[other]).filter(|ratio| ratio.is_finite());
        middle(both.collect()).unwrap_or(was(rank) / was(other))
    };
    for rates in rates.iter_mut() {
        let seen: Vec<(usize, f64)> = rates.iter().copied().enumerate().filter(|(_, rate)| rate.is_finite()).collect();
        for (rank, rate) in rates.iter_mut().enumerate().filter(|(_, rate)| !rate.is_finite()) {
            let estimates = seen.iter().map(|&(other, rate)| rate * slower(rank, other)).collect();
            *rate = middle(estimates).unwrap_or(0.0);
        }
    }
}

/// Work that took no time or for ever was not measured.
pub(crate) fn is_known(seconds: f64, width: f64) -> bool {
    width > 0.0 && seconds > 0.0 && seconds < MOST_SECONDS
}

/// The width that a rank really works on.
pub(crate) fn worked(class: Class, division: &Division, gammas: &[f64], rank: usize) -> f64 {
    let width = division.of(class.dim())[rank] as f64;
    if class.is_resizable() { width * (1.0 - gammas[rank]) } else { width }
}

/// The width that ranks have if all have the same.
pub(crate) fn even(class: Class, division: &Division) -> f64 {
    division.total(class.dim()) as f64 / division.ranks() as f64
}

fn add(seconds: Vec<f64>, more: &[f64]) -> Vec<f64> {
    seconds.iter().zip(more).map(|(seconds, more)| seconds + more).collect()
}

fn over_mean(values: &[f64]) -> Vec<f64> {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    values.iter().map(|value| value / mean.max(f64::MIN_POSITIVE)).collect()
}

/// Zero where there are no values.
fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() as f64 * share) as usize).copied().unwrap_or(0.0)
}

/// The mean of the middle third: hiccups do not count, and what jumps between two values is between them. None of nothing.
pub fn middle(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let out = values.len() / 3;
    let middle = &values[out..values.len() - out];
    (!middle.is_empty()).then(|| middle.iter().sum::<f64>() / middle.len() as f64)
}
