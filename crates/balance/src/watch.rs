//! How fast each rank is at each kind of work, and since when.

use std::collections::VecDeque;
use std::ops::Range;

use crate::observation::{Class, Division, Observation};

/// Steps that are looked at together.
const WINDOW: usize = 16;
/// Steps that tell how much times vary, at most and at least.
const LONG: usize = 64;
const LEAST_KNOWN: usize = 6;
/// Fewer say nothing: one of them may have met a hiccup.
pub(crate) const LEAST: usize = 3;
/// Relative speeds whose median over the last [`LEAST`] steps has changed by more than this are others.
const CHANGE: f64 = 0.12;
/// The median of [`LEAST`] shows a change when most of them are of it.
const SEEN: usize = LEAST - 1;

/// Seconds as a line over the width: `rate · (base + width)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Speeds {
    /// By class and rank, seconds for one of the width.
    rates: [Vec<f64>; Class::ALL.len()],
    /// By class: what a rank does whatever its width is, as width.
    bases: [f64; Class::ALL.len()],
    /// How many times as long as the fastest rank each takes for the same.
    pub slowness: Vec<f64>,
    /// The first step at which these speeds were seen.
    pub since: u64,
    /// How far the slowness may be off, as a share of it: two standard errors.
    pub uncertainty: f64,
}

impl Speeds {
    pub fn seconds(&self, class: Class, rank: usize, width: f64) -> f64 {
        let worked = if width == 0.0 { 0.0 } else { self.bases[class as usize] + width };
        self.rates[class as usize][rank] * worked
    }

    /// Of ranks that take as many times the seconds, by class, for one of the width.
    #[cfg(test)]
    pub(crate) fn of_slowness(seconds: [f64; Class::ALL.len()], slowness: Vec<f64>) -> Speeds {
        let rates = seconds.map(|seconds| slowness.iter().map(|slow| seconds * slow).collect());
        Speeds { rates, bases: [0.0; Class::ALL.len()], slowness, since: 0, uncertainty: 0.0 }
    }

    /// The share of a width that must be left out to be done in so many seconds; none where it is done earlier.
    pub(crate) fn excess(&self, class: Class, rank: usize, width: f64, seconds: f64) -> f64 {
        let worked = seconds / self.rates[class as usize][rank] - self.bases[class as usize];
        // Nothing to work on, or a rank that takes no time, leaves no number.
        let left_out = 1.0 - worked / width;
        if width > 0.0 && left_out > 0.0 { left_out.min(1.0) } else { 0.0 }
    }

    pub fn ranks(&self) -> usize {
        self.slowness.len()
    }

    /// What a class takes at least, however its work is divided.
    pub fn optimum_s(&self, class: Class, total: usize) -> f64 {
        let per_second: f64 = self.rates[class as usize].iter().map(|rate| 1.0 / rate).sum();
        let base = self.bases[class as usize] * self.ranks() as f64;
        if per_second.is_finite() { (total as f64 + base) / per_second } else { 0.0 }
    }
}

/// Of one step, by class and rank: seconds, or seconds for one of the width.
type Rates = [Vec<f64>; Class::ALL.len()];

/// Seconds with even widths over the mean of all ranks, by rank, or something of them.
#[derive(Clone, Debug)]
struct Relative<Of = Vec<f64>> {
    of_classes: [Of; Class::ALL.len()],
    of_all: Of,
}

/// What was seen of the ranks so far.
#[derive(Clone, Debug)]
pub struct Watch {
    /// Since the layout or a speed changed.
    samples: VecDeque<Rates>,
    /// By step, since a speed changed, whatever the layout was.
    relative: VecDeque<Relative>,
    since: Option<u64>,
    /// By step: the most that a rank's relative times were off their medians. They outlast changes, for they tell of the machine.
    deviations: VecDeque<Relative<f64>>,
    /// Medians of seconds by class and rank, and the widths they were seen at, before the layout changed.
    before: Option<(Rates, Division)>,
    seconds: VecDeque<Rates>,
    bases: [f64; Class::ALL.len()],
}

impl Default for Watch {
    fn default() -> Watch {
        let bases = [0.0; Class::ALL.len()];
        Watch {
            samples: VecDeque::new(),
            relative: VecDeque::new(),
            since: None,
            deviations: VecDeque::new(),
            before: None,
            seconds: VecDeque::new(),
            bases,
        }
    }
}

impl Watch {
    /// Takes in a step.
    pub fn observe(&mut self, step: u64, division: &Division, observed: &[Observation]) {
        let ranks = observed.len();
        self.since.get_or_insert(step);
        let gammas: Vec<f64> = observed.iter().map(|rank| rank.gamma).collect();
        let seconds = Class::ALL.map(|class| observed.iter().map(|rank| rank.of(class)).collect::<Vec<f64>>());
        push(&mut self.seconds, seconds, WINDOW);
        let mut rates = Class::ALL.map(|class| {
            let rate = |rank: usize| {
                let width = worked(class, division, &gammas, rank);
                let base = if width == 0.0 { 0.0 } else { self.bases[class as usize] };
                observed[rank].of(class) / (base + width)
            };
            (0..ranks).map(rate).collect::<Vec<f64>>()
        });
        estimate_unknown(&mut rates);
        let of_all = over_mean(&even_seconds(&rates, division));
        push(
            &mut self.relative,
            Relative { of_classes: rates.each_ref().map(|rates| over_mean(rates)), of_all },
            WINDOW,
        );
        push(&mut self.samples, rates, WINDOW);
        self.note_deviation(ranks);
        if self.has_changed(ranks) {
            keep_last(&mut self.relative);
            keep_last(&mut self.samples);
            keep_last(&mut self.seconds);
            self.since = Some(step + 1 - SEEN as u64);
            self.before = None;
        }
        self.learn_bases(division);
    }

    fn note_deviation(&mut self, ranks: usize) {
        let steps = self.relative.len();
        let Some(last) = self.relative.back().filter(|_| steps > 1) else { return };
        // The last is one of those that it is compared with, which draw nearer to it the fewer they are.
        let nearer = (1.0 - 1.0 / steps as f64).sqrt();
        let most_off = |of: &dyn Fn(&Relative) -> &[f64]| {
            let off = |rank: usize| (of(last)[rank] - self.typical(0..steps, |relative| of(relative)[rank])).abs();
            (0..ranks).map(off).fold(0.0, f64::max) / nearer
        };
        let of_classes = Class::ALL.map(|class| most_off(&|relative| &relative.of_classes[class as usize]));
        let of_all = most_off(&|relative| &relative.of_all);
        push(&mut self.deviations, Relative { of_classes, of_all }, LONG);
    }

    /// The median of some of the steps that are kept.
    fn typical(&self, steps: Range<usize>, of: impl Fn(&Relative) -> f64) -> f64 {
        median(self.relative.range(steps).map(of).collect()).expect("some samples")
    }

    fn has_changed(&self, ranks: usize) -> bool {
        let Some(old) = self.relative.len().checked_sub(LEAST).filter(|&old| old >= LEAST) else { return false };
        let least = CHANGE.max(2.0 * self.uncertainty(old, self.deviations.len() - LEAST, |off| off.of_all));
        let change = |rank: usize| {
            let of = |steps: Range<usize>| self.typical(steps, |relative| relative.of_all[rank]);
            of(old..self.relative.len()) / of(0..old) - 1.0
        };
        (0..ranks).any(|rank| change(rank).abs() > least)
    }

    /// How far the median of so many relative times may be off: two standard errors, from the first of the deviations.
    fn uncertainty(&self, steps: usize, deviations: usize, of: impl Fn(&Relative<f64>) -> f64) -> f64 {
        // Four of five deviations are below 1.28 standard ones, and hiccups are rarer than the fifth. The median deviation
        // would say nothing of a core that jumps between two speeds. A median's error is 1.25 times a mean's.
        let standard = quantile(self.deviations.range(..deviations).map(of).collect(), 0.8) / 1.28;
        2.0 * 1.25 * standard / (steps as f64).sqrt()
    }

    /// The layout changes: what was seen is of another one.
    pub fn relaid(&mut self, division: &Division) {
        self.before = self.medians().map(|seconds| (seconds, division.clone()));
        self.samples.clear();
        self.seconds.clear();
    }

    /// By class and rank, of what is in the window.
    fn medians(&self) -> Option<Rates> {
        if self.seconds.len() < LEAST {
            return None;
        }
        let ranks = self.seconds[0][0].len();
        Some(std::array::from_fn(|class| {
            let of = |rank: usize| median(self.seconds.iter().map(|seconds| seconds[class][rank]).collect());
            (0..ranks).map(|rank| of(rank).expect("some samples")).collect()
        }))
    }

    /// The same rank at two widths says how much of its time does not depend on them.
    fn learn_bases(&mut self, division: &Division) {
        let (Some((before, divided)), Some(after)) = (&self.before, self.medians()) else { return };
        for class in Class::ALL {
            let (dim, index) = (class.dim(), class as usize);
            let even = division.total(dim) as f64 / division.ranks() as f64;
            let base = |rank: usize| {
                let [w1, w2] = [divided.of(dim)[rank] as f64, division.of(dim)[rank] as f64];
                let [t1, t2] = [before[index][rank], after[index][rank]];
                let is_telling =
                    (w1 - w2).abs() > 0.2 * w1.max(w2) && w1 > 0.0 && w2 > 0.0 && (t1 - t2) * (w1 - w2) > 0.0;
                is_telling.then(|| ((w1 * t2 - w2 * t1) / (t1 - t2)).clamp(0.0, 0.5 * even))
            };
            if let Some(found) = median((0..division.ranks()).filter_map(base).collect()) {
                self.bases[index] = 0.5 * (self.bases[index] + found);
            }
        }
        self.before = None;
    }

    /// None before there is enough to say.
    pub fn speeds(&self, division: &Division) -> Option<Speeds> {
        if self.samples.len() < LEAST || self.deviations.len() < LEAST_KNOWN {
            return None;
        }
        let ranks = self.samples[0][0].len();
        let rates: Rates = std::array::from_fn(|class| {
            let of = |rank: usize| median(self.samples.iter().map(|rates: &Rates| rates[class][rank]).collect());
            (0..ranks).map(|rank| of(rank).expect("some samples")).collect()
        });
        let rates = self.without_noise(rates, division);
        let even_s = even_seconds(&rates, division);
        let fastest = even_s.iter().copied().fold(f64::INFINITY, f64::min).max(f64::MIN_POSITIVE);
        let slowness = even_s.iter().map(|seconds| seconds / fastest).collect();
        let uncertainty = self.uncertainty(self.samples.len(), self.deviations.len(), |off| off.of_all);
        Some(Speeds { rates, bases: self.bases, slowness, since: self.since.unwrap_or(0), uncertainty })
    }

    /// A rank is as slow at every class as it is in all, but for what noise does not explain.
    fn without_noise(&self, mut rates: Rates, division: &Division) -> Rates {
        let in_all = over_mean(&even_seconds(&rates, division));
        for (class, rates) in rates.iter_mut().enumerate() {
            let mean = rates.iter().sum::<f64>() / rates.len() as f64;
            let differs: Vec<f64> = over_mean(rates).iter().zip(&in_all).map(|(own, all)| own - all).collect();
            let square = differs.iter().map(|off| off * off).sum::<f64>() / differs.len() as f64;
            let error = 0.5 * self.uncertainty(self.samples.len(), self.deviations.len(), |off| off.of_classes[class]);
            let real = if square > 0.0 { (1.0 - error * error / square).max(0.0) } else { 0.0 };
            for ((rate, all), differs) in rates.iter_mut().zip(&in_all).zip(differs) {
                *rate = mean * (all + real * differs);
            }
        }
        rates
    }
}

fn push<T>(window: &mut VecDeque<T>, value: T, most: usize) {
    window.push_back(value);
    if window.len() > most {
        window.pop_front();
    }
}

fn keep_last<T>(window: &mut VecDeque<T>) {
    window.drain(..window.len().saturating_sub(SEEN));
}

/// Whoever has nothing of a class is taken to be as slow at it, compared with those who have some, as at the rest.
fn estimate_unknown(rates: &mut Rates) {
    let known = rates.clone();
    let slower = |rank: usize, other: usize| {
        let both =
            known.iter().map(|rates| rates[rank] / rates[other]).filter(|ratio| ratio.is_finite() && *ratio > 0.0);
        median(both.collect()).unwrap_or(1.0)
    };
    for rates in rates.iter_mut() {
        let seen: Vec<(usize, f64)> = rates.iter().copied().enumerate().filter(|(_, rate)| rate.is_finite()).collect();
        for (rank, rate) in rates.iter_mut().enumerate().filter(|(_, rate)| !rate.is_finite()) {
            let estimates = seen.iter().map(|&(other, rate)| rate * slower(rank, other)).collect();
            *rate = median(estimates).unwrap_or(0.0);
        }
    }
}

/// The width that a rank really works on.
pub(crate) fn worked(class: Class, division: &Division, gammas: &[f64], rank: usize) -> f64 {
    let width = division.of(class.dim())[rank] as f64;
    if class.is_resizable() { width * (1.0 - gammas[rank]) } else { width }
}

/// What ranks would take for everything if all had the same widths.
fn even_seconds(rates: &Rates, division: &Division) -> Vec<f64> {
    let even = |class: Class| division.total(class.dim()) as f64 / division.ranks() as f64;
    let seconds = |rank: usize| Class::ALL.iter().map(|&class| rates[class as usize][rank] * even(class)).sum();
    (0..division.ranks()).map(seconds).collect()
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

pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len().checked_sub(1)? / 2;
    Some(if values.len() % 2 == 1 { values[middle] } else { 0.5 * (values[middle] + values[middle + 1]) })
}
