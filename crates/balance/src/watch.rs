//! Estimates how fast each rank is at each class of work, and since when.

use std::collections::VecDeque;

use evenkeel_widths::Widths;

use crate::observation::{ByClass, Class, Manner, Observation, even_width, worked_width};
use crate::overheads::Overheads;
use crate::speeds::Speeds;
use crate::statistics::{TRIMMED_MEAN_ERROR, over_mean, push, quantile, trimmed_mean};
use crate::target::Target;
use crate::tuning::Tuning;

/// By class and rank: seconds, widths, or seconds per unit of width.
type PerRank = ByClass<Vec<f64>>;

/// The ranks' widths and times in a step.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    step: u64,
    pub seconds: PerRank,
    /// Widths.
    pub worked: PerRank,
    pub manners: ByClass<Vec<Manner>>,
    /// By rank.
    late_s: Vec<f64>,
    /// Seconds per unit of width, with the overheads known now.
    rates: PerRank,
}

#[cfg(test)]
impl Sample {
    pub fn of(seconds: PerRank, worked: PerRank, manners: ByClass<Vec<Manner>>) -> Sample {
        Sample { step: 0, seconds, worked, manners, late_s: Vec::new(), rates: PerRank::default() }
    }
}

/// Times at even widths over the mean of all ranks, by rank; or one number derived from them.
#[derive(Clone, Debug)]
struct Relative<T = Vec<f64>> {
    by_class: ByClass<T>,
    overall: T,
}

/// Collects observations and estimates speeds from them.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    tuning: Tuning,
    /// Steps since the last change of a speed, in any layout. The last `in_layout` of them are of the present one.
    samples: VecDeque<Sample>,
    in_layout: usize,
    has_begun: bool,
    since: Option<u64>,
    /// By step: distance of the ranks' relative times from their trimmed means. Kept across changes, because they describe the
    /// machine.
    deviations: VecDeque<Relative<f64>>,
    /// The typical step of the layout before, until it is compared with this layout.
    before: Option<Sample>,
    overheads: Overheads,
    /// By rank, in the layout before: the only estimate for a rank that has no work in this one.
    slowness: Vec<f64>,
}

impl Watch {
    pub fn new(tuning: Tuning) -> Watch {
        Watch { tuning, ..Watch::default() }
    }

    /// Takes in a step.
    pub fn observe(&mut self, step: u64, target: &Target, observed: &[Observation]) {
        self.since.get_or_insert(step);
        // The first step in a layout includes start-up work, so it is skipped.
        if !std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let sample = self.sample(step, target, observed);
        push(&mut self.samples, sample, self.tuning.window_steps);
        self.in_layout = (self.in_layout + 1).min(self.tuning.window_steps);
        let division = &target.work;
        let enough = self.tuning.trimmed_mean_steps;
        // Steps of different layouts are comparable only once overheads are known.
        if let Some(before) = self.before.take_if(|_| self.in_layout >= enough) {
            let errors = std::array::from_fn(|class| self.class_error(enough, class));
            if let Some(after) = self.typical_sample() {
                self.overheads.learn([&before, &after], division, errors, &self.tuning);
                self.update_rates();
            }
        }
        if self.before.is_none() {
            self.look_for_a_change(division);
        }
    }

    fn sample(&self, step: u64, target: &Target, observed: &[Observation]) -> Sample {
        let ranks = observed.len();
        let gammas: Vec<f64> = observed.iter().map(|rank| rank.gamma).collect();
        let width = |class: Class, rank: usize| worked_width(&target.work, class, &gammas, rank);
        let manner = |class: Class, rank: usize| {
            let prunes = class.is_prunable() && gammas[rank] > 0.0;
            let pruned_of = if prunes { target.work.of(class.dim())[rank] as f64 } else { 0.0 };
            Manner { migrates: target.migrates_in(class, rank), pruned_of }
        };
        let is_credible = |late_s: &f64| (0.0..self.tuning.credible_s_max).contains(late_s);
        let mut sample = Sample {
            step,
            seconds: Class::ALL.map(|class| observed.iter().map(|rank| rank.of(class)).collect()),
            worked: Class::ALL.map(|class| (0..ranks).map(|rank| width(class, rank)).collect()),
            manners: Class::ALL.map(|class| (0..ranks).map(|rank| manner(class, rank)).collect()),
            late_s: observed.iter().map(|rank| Some(rank.late_s).filter(is_credible).unwrap_or(0.0)).collect(),
            rates: PerRank::default(),
        };
        sample.rates = self.rates(&sample);
        sample
    }

    /// Forgets the samples before a change of speeds.
    fn look_for_a_change(&mut self, division: &Widths) {
        let relative: Vec<Relative> = self.samples.iter().map(|sample| self.relative(sample, division)).collect();
        self.deviations.extend(deviation(&relative));
        self.deviations.drain(..self.deviations.len().saturating_sub(self.tuning.deviations_kept));
        if let Some(new) = self.steps_since_change_point(&relative) {
            self.samples.drain(..self.samples.len() - new);
            self.in_layout = self.in_layout.min(new);
            self.since = self.samples.front().map(|sample| sample.step);
        }
    }

    /// Seconds per unit of width.
    fn rates(&self, sample: &Sample) -> PerRank {
        let ranks = sample.late_s.len();
        let mut rates: PerRank = std::array::from_fn(|class| {
            let even = sample.worked[class].iter().sum::<f64>() / ranks as f64;
            let rate = |rank: usize| {
                let seconds = sample.seconds[class][rank];
                let width = sample.worked[class][rank];
                let worked = self.overheads.worked(class, width, sample.manners[class][rank]);
                let is_telling =
                    is_measured(seconds, width, &self.tuning) && width > self.tuning.telling_width_share * even;
                if is_telling { seconds / worked } else { f64::NAN }
            };
            (0..ranks).map(rate).collect()
        });
        estimate_unknown(&mut rates, &self.slowness);
        rates
    }

    /// Recomputes the rates of all samples with the overheads known now.
    fn update_rates(&mut self) {
        let rates: Vec<PerRank> = self.samples.iter().map(|sample| self.rates(sample)).collect();
        self.samples.iter_mut().zip(rates).for_each(|(sample, rates)| sample.rates = rates);
    }

    fn relative(&self, sample: &Sample, division: &Widths) -> Relative {
        let overall = over_mean(&add(self.even_seconds(&sample.rates, division), &sample.late_s));
        Relative { by_class: Class::ALL.map(|class| over_mean(&sample.rates[class as usize])), overall }
    }

    /// Change-point test over the last 3, 6, 12 … steps: how many steps ago relative times changed, if they did.
    fn steps_since_change_point(&self, relative: &[Relative]) -> Option<usize> {
        let least = self.tuning.trimmed_mean_steps;
        let lengths = std::iter::successors(Some(least), |steps| Some(2 * steps));
        let known = relative.len().min(self.deviations.len());
        let mut lengths = lengths.take_while(|steps| steps + least <= known);
        // A trimmed mean shows a change once two thirds of its steps are after it.
        lengths.find(|&steps| self.has_changed(relative, steps)).map(|steps| steps - steps / 3)
    }

    /// Whether a rank's relative time in the last `steps` differs from that before by more than noise explains.
    fn has_changed(&self, relative: &[Relative], steps: usize) -> bool {
        let (old, new) = relative.split_at(relative.len() - steps);
        let known = self.deviations.len().saturating_sub(steps);
        let [of_old, of_new] = [old, new].map(|steps| self.uncertainty(steps.len(), known, |off| off.overall));
        let noise = self.tuning.change_standard_errors * 0.5 * of_old.hypot(of_new);
        let least = self.tuning.change_least_share.max(noise);
        let change = |rank: usize| {
            let of = |steps: &[Relative]| typical(steps, |relative| relative.overall[rank]);
            of(new) - of(old)
        };
        (0..relative[0].overall.len()).any(|rank| change(rank).abs() > least)
    }

    /// Two standard errors of the trimmed mean of `steps` relative times, from the first `deviations`.
    fn uncertainty(&self, steps: usize, deviations: usize, of: impl Fn(&Relative<f64>) -> f64) -> f64 {
        let deviations = self.deviations.range(..deviations).map(of).collect();
        let standard = quantile(deviations, self.tuning.noise_quantile) / self.tuning.noise_quantile_deviations;
        2.0 * TRIMMED_MEAN_ERROR * standard / (steps as f64).sqrt()
    }

    /// The standard error of a class over `steps`.
    fn class_error(&self, steps: usize, class: usize) -> f64 {
        0.5 * self.uncertainty(steps, self.deviations.len(), |off| off.by_class[class])
    }

    /// By rank: seconds to compute every class at even widths.
    fn even_seconds(&self, rates: &PerRank, division: &Widths) -> Vec<f64> {
        let of = |class: Class, rank: usize| {
            rates[class as usize][rank]
                * self.overheads.worked(class as usize, even_width(division, class), Manner::default())
        };
        (0..division.shards()).map(|rank| Class::ALL.iter().map(|&class| of(class, rank)).sum()).collect()
    }

    /// The layout changes; `division` is the work of the layout before.
    pub fn relaid(&mut self, division: &Widths) {
        self.before = self.typical_sample();
        if let Some(speeds) = self.speeds(division) {
            self.slowness = speeds.slowness;
            self.update_rates();
        }
        self.in_layout = 0;
        self.has_begun = false;
    }

    /// Samples of the present layout.
    fn of_layout(&self) -> impl Iterator<Item = &Sample> + Clone {
        self.samples.iter().skip(self.samples.len() - self.in_layout.min(self.samples.len()))
    }

    /// The trimmed mean of the present layout's samples; `None` if they are too few.
    fn typical_sample(&self) -> Option<Sample> {
        let seconds = self.trimmed_means(|sample| &sample.seconds)?;
        Some(Sample { seconds, ..self.samples.back()?.clone() })
    }

    /// By class and rank, over the present layout; `None` if its samples are too few.
    fn trimmed_means(&self, of: impl Fn(&Sample) -> &PerRank) -> Option<PerRank> {
        let ranks = of(self.of_layout().nth(self.tuning.trimmed_mean_steps - 1)?)[0].len();
        let mean =
            |class: usize, rank: usize| trimmed_mean(self.of_layout().map(|sample| of(sample)[class][rank]).collect());
        Some(std::array::from_fn(|class| (0..ranks).filter_map(|rank| mean(class, rank)).collect()))
    }

    /// `None` until enough steps were observed.
    pub fn speeds(&self, division: &Widths) -> Option<Speeds> {
        if self.deviations.len() < self.tuning.deviations_needed || self.in_layout < self.tuning.settling_steps {
            return None;
        }
        let rates = self.shrunk(self.trimmed_means(|sample| &sample.rates)?, division);
        let late_s = |rank: usize| trimmed_mean(self.of_layout().map(|sample| sample.late_s[rank]).collect());
        let late_s: Vec<f64> = (0..division.shards()).filter_map(late_s).collect();
        let computing_s = self.even_seconds(&rates, division);
        let bases = self.bases(&rates, &late_s, computing_s.iter().sum(), division);
        let even_s = add(computing_s, &late_s);
        let fastest = even_s.iter().copied().fold(f64::INFINITY, f64::min).max(f64::MIN_POSITIVE);
        Some(Speeds {
            rates,
            bases,
            migrating: self.overheads.migrating,
            pruning: self.overheads.pruning,
            slowness: even_s.iter().map(|seconds| seconds / fastest).collect(),
            since: self.since.unwrap_or(0),
            uncertainty: self.uncertainty(self.in_layout, self.deviations.len(), |off| off.overall),
        })
    }

    /// Base overheads with lateness added: each class gets its share of it by compute time.
    fn bases(&self, rates: &PerRank, late_s: &[f64], all_s: f64, division: &Widths) -> PerRank {
        Class::ALL.map(|class| {
            let rates = &rates[class as usize];
            let base = self.overheads.bases[class as usize];
            let share = rates.iter().sum::<f64>() * (base + even_width(division, class)) / all_s.max(f64::MIN_POSITIVE);
            let late =
                rates.iter().zip(late_s).map(|(rate, late_s)| if *rate > 0.0 { share * late_s / rate } else { 0.0 });
            late.map(|late| base + late).collect()
        })
    }

    /// Shrinkage estimate: pulls a rank's slowness at each class towards its overall slowness, by as much as noise explains.
    fn shrunk(&self, mut rates: PerRank, division: &Widths) -> PerRank {
        let overall = over_mean(&self.even_seconds(&rates, division));
        for (class, rates) in rates.iter_mut().enumerate() {
            let mean = rates.iter().sum::<f64>() / rates.len() as f64;
            let error = self.class_error(self.in_layout, class);
            for (rate, overall) in rates.iter_mut().zip(&overall).filter(|_| mean > 0.0) {
                let difference = *rate / mean - overall;
                let kept = if difference.abs() > error { 1.0 - (error / difference).powi(2) } else { 0.0 };
                *rate = mean * (overall + kept * difference);
            }
        }
        rates
    }
}

/// Distance of the last step from the trimmed mean: the root mean square over the ranks of each class, the largest overall.
fn deviation(relative: &[Relative]) -> Option<Relative<f64>> {
    let steps = relative.len();
    let last = relative.last()?;
    // The mean includes the last step, which makes deviations this much too small.
    let bias = (1.0 - 1.0 / steps as f64).sqrt();
    let off = |of: &dyn Fn(&Relative) -> &[f64]| -> Vec<f64> {
        let off = |rank: usize| (of(last)[rank] - typical(relative, |relative| of(relative)[rank])).abs() / bias;
        (0..last.overall.len()).map(off).collect()
    };
    let root_mean_square = |off: Vec<f64>| (off.iter().map(|off| off * off).sum::<f64>() / off.len() as f64).sqrt();
    let by_class = Class::ALL.map(|class| root_mean_square(off(&|relative| &relative.by_class[class as usize])));
    let overall = off(&|relative| &relative.overall).into_iter().fold(0.0, f64::max);
    (steps > 1).then_some(Relative { by_class, overall })
}

fn typical(steps: &[Relative], of: impl Fn(&Relative) -> f64) -> f64 {
    trimmed_mean(steps.iter().map(of).collect()).expect("some steps")
}

/// Replaces unknown rates, which are NaN. A rank with too little work of a class gets its slowness at the other classes, a rank
/// without any work its slowness in the layout before.
fn estimate_unknown(rates: &mut PerRank, slowness: &[f64]) {
    let known = rates.clone();
    let before = |rank: usize| slowness.get(rank).copied().unwrap_or(1.0);
    let slower = |rank: usize, other: usize| {
        let both = known.iter().map(|rates| rates[rank] / rates[other]).filter(|ratio| ratio.is_finite());
        trimmed_mean(both.collect()).unwrap_or(before(rank) / before(other))
    };
    for rates in rates.iter_mut() {
        let seen: Vec<(usize, f64)> = rates.iter().copied().enumerate().filter(|(_, rate)| rate.is_finite()).collect();
        for (rank, rate) in rates.iter_mut().enumerate().filter(|(_, rate)| !rate.is_finite()) {
            let estimates = seen.iter().map(|&(other, rate)| rate * slower(rank, other)).collect();
            *rate = trimmed_mean(estimates).unwrap_or(0.0);
        }
    }
}

/// Whether `seconds` can be the time of work on `width`.
pub(crate) fn is_measured(seconds: f64, width: f64, tuning: &Tuning) -> bool {
    width > 0.0 && seconds > 0.0 && seconds < tuning.credible_s_max
}

fn add(seconds: Vec<f64>, more: &[f64]) -> Vec<f64> {
    seconds.iter().zip(more).map(|(seconds, more)| seconds + more).collect()
}
