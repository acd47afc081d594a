//! Overheads: work of a rank that does not grow with its width.
//!
//! They are estimated from the same ranks in two layouts, so that overhead does not count as slowness.

use evenkeel_widths::Widths;

use crate::observation::{ByClass, Class, Manner, even_width};
use crate::tuning::Tuning;
use crate::watch::{Sample, is_measured};

/// By class, as widths.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Overheads {
    /// Every rank with work of the class has this one.
    pub bases: ByClass<f64>,
    /// A rank whose work differs from its home has this one, too.
    pub migrating: ByClass<f64>,
    /// A rank that prunes has this one for each unit of the width that it prunes some of: selecting and scattering columns.
    pub pruning: ByClass<f64>,
}

impl Overheads {
    /// The width that takes as long as everything that a rank does of a class.
    pub fn worked(&self, class: usize, width: f64, manner: Manner) -> f64 {
        let migrating = if manner.migrates { self.migrating[class] } else { 0.0 };
        self.bases[class] + width + migrating + self.pruning[class] * manner.pruned_of
    }

    /// Corrects the estimates by the typical step of two layouts. `errors` are the relative standard errors by class.
    pub fn learn(&mut self, layouts: [&Sample; 2], division: &Widths, errors: ByClass<f64>, tuning: &Tuning) {
        let of_ranks =
            |class: usize| (0..division.shards()).filter_map(|rank| Pair::of(layouts, class, rank, tuning)).collect();
        let comparison = Comparison {
            pairs: std::array::from_fn(of_ranks),
            evens: Class::ALL.map(|class| even_width(division, class)),
            errors,
            tuning,
        };
        self.learn_bases(&comparison);
        self.learn_migrating(&comparison);
        self.learn_pruning(&comparison);
    }

    fn learn_bases(&mut self, comparison: &Comparison<'_>) {
        let mut base_s = 0.0;
        let mut told_s = 0.0;
        for (class, pairs) in comparison.pairs.iter().enumerate() {
            let base = &mut self.bases[class];
            let even = comparison.evens[class];
            let most = comparison.tuning.base_share_max * even;
            let corrections = pairs.iter().filter_map(|pair| {
                let (found, error_factor) = pair.base(*base, comparison.tuning)?;
                Some(comparison.shrinkage(class, error_factor) * (found.clamp(-most, most) - *base))
            });
            if let Some((correction, _)) = mean(corrections) {
                *base = (*base + correction).clamp(0.0, most);
                let seconds: f64 = pairs.iter().map(|pair| pair.seconds[1]).sum();
                base_s += seconds * *base / even;
                told_s += seconds;
            }
        }
        // A class that every rank migrates tells nothing of its base; it gets the average of the other classes.
        for (class, pairs) in comparison.pairs.iter().enumerate().filter(|_| told_s > 0.0) {
            if !pairs.is_empty() && !pairs.iter().any(Pair::is_at_home) {
                self.bases[class] = base_s / told_s * comparison.evens[class];
            }
        }
    }

    fn learn_migrating(&mut self, comparison: &Comparison<'_>) {
        let slower = self.slower(&comparison.pairs);
        for (class, pairs) in comparison.pairs.iter().enumerate() {
            let base = self.bases[class];
            let even = comparison.evens[class];
            let migrating = &mut self.migrating[class];
            if let Some((found, count)) = mean(pairs.iter().filter_map(|pair| pair.migrating(base, slower))) {
                let correction = comparison.shrinkage(class, even / (count as f64).sqrt()) * (found - *migrating);
                *migrating = (*migrating + correction).clamp(0.0, even);
            } else if pairs.iter().all(Pair::is_at_home) {
                *migrating *= comparison.tuning.migrating_kept_share;
            }
        }
    }

    fn learn_pruning(&mut self, comparison: &Comparison<'_>) {
        let slower = self.slower(&comparison.pairs);
        for (class, pairs) in comparison.pairs.iter().enumerate() {
            let (base, pruning) = (self.bases[class], &mut self.pruning[class]);
            if let Some((found, count)) = mean(pairs.iter().filter_map(|pair| pair.pruning(base, slower))) {
                let correction = comparison.shrinkage(class, comparison.evens[class] / (count as f64).sqrt());
                *pruning = (*pruning + correction * (found - *pruning)).clamp(0.0, 1.0);
            }
        }
    }

    /// Time of the second layout over that of the first, for work that no rank migrates.
    fn slower(&self, pairs: &ByClass<Vec<Pair>>) -> f64 {
        let mut found_s = 0.0;
        let mut expected_s = 0.0;
        for (pairs, base) in pairs.iter().zip(self.bases) {
            for pair in pairs.iter().filter(|pair| pair.is_at_home()) {
                found_s += pair.seconds[1];
                expected_s += pair.seconds[0] * (base + pair.worked[1]) / (base + pair.worked[0]);
            }
        }
        if expected_s > 0.0 { found_s / expected_s } else { 1.0 }
    }
}

/// Two layouts side by side, by class.
struct Comparison<'a> {
    /// The ranks with work of the class in both layouts.
    pairs: ByClass<Vec<Pair>>,
    evens: ByClass<f64>,
    errors: ByClass<f64>,
    tuning: &'a Tuning,
}

impl Comparison<'_> {
    /// The weight of a new estimate against the old one: prior variance over prior variance plus the estimate's, which is
    /// `error_factor` times the error of the class.
    fn shrinkage(&self, class: usize, error_factor: f64) -> f64 {
        let prior = self.tuning.overhead_prior_share * self.evens[class];
        1.0 / (1.0 + (self.errors[class] * error_factor / prior).powi(2))
    }
}

/// A rank's work of a class in two layouts.
struct Pair {
    seconds: [f64; 2],
    worked: [f64; 2],
    manners: [Manner; 2],
}

impl Pair {
    /// `None` if the rank did nothing in one of them.
    fn of(layouts: [&Sample; 2], class: usize, rank: usize, tuning: &Tuning) -> Option<Pair> {
        let pair = Pair {
            seconds: layouts.map(|sample| sample.seconds[class][rank]),
            worked: layouts.map(|sample| sample.worked[class][rank]),
            manners: layouts.map(|sample| sample.manners[class][rank]),
        };
        (0..2).all(|layout| is_measured(pair.seconds[layout], pair.worked[layout], tuning)).then_some(pair)
    }

    /// Whether the rank works on what it keeps, and on all of it.
    fn is_at_home(&self) -> bool {
        self.manners == [Manner::default(); 2]
    }

    /// The base, and its error in units of the relative error of the seconds; `None` if the widths are too alike.
    fn base(&self, known: f64, tuning: &Tuning) -> Option<(f64, f64)> {
        let [t1, t2] = self.seconds;
        let [w1, w2] = self.worked;
        let is_telling =
            (w1 - w2).abs() > tuning.base_width_difference_least * w1.max(w2) && (t1 - t2) * (w1 - w2) > 0.0;
        let found = || ((w1 * t2 - w2 * t1) / (t1 - t2), (known + w1) * (known + w2) / (w1 - w2));
        (self.is_at_home() && is_telling).then(found)
    }

    /// The overhead of migrating, if the rank migrates in one layout only and prunes in none.
    fn migrating(&self, base: f64, slower: f64) -> Option<f64> {
        let prunes = self.manners.iter().any(|manner| manner.pruned_of > 0.0);
        if prunes { None } else { self.extra(self.manners.map(|manner| manner.migrates), base, slower) }
    }

    /// The overhead of pruning for each unit of width, if the rank prunes in one layout only and migrates in none.
    fn pruning(&self, base: f64, slower: f64) -> Option<f64> {
        let pruned_of = self.manners.iter().map(|manner| manner.pruned_of).fold(0.0, f64::max);
        let migrates = self.manners.iter().any(|manner| manner.migrates);
        let extra = || self.extra(self.manners.map(|manner| manner.pruned_of > 0.0), base, slower);
        if migrates { None } else { Some(extra()? / pruned_of) }
    }

    /// The width that takes as long as what the rank has to do in one layout only, if there is such a one. All ranks take `slower`
    /// times as long in the second.
    fn extra(&self, is_there: [bool; 2], base: f64, slower: f64) -> Option<f64> {
        let [t1, t2] = [self.seconds[0] * slower, self.seconds[1]];
        let [(plain_s, plain), (extra_s, extra)] = match is_there {
            [false, true] => [(t1, self.worked[0]), (t2, self.worked[1])],
            [true, false] => [(t2, self.worked[1]), (t1, self.worked[0])],
            _ => return None,
        };
        Some(extra_s * (base + plain) / plain_s - base - extra)
    }
}

/// With the number of values; `None` without any.
fn mean(values: impl Iterator<Item = f64>) -> Option<(f64, usize)> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| (sum / count as f64, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_widths::Dim;

    const EVEN: f64 = 100.0;
    const MLP: usize = Class::Mlp as usize;
    const ATTENTION: usize = Class::Attention as usize;

    /// Two ranks with the given overheads, the second twice as slow. Only attention migrates.
    fn sample(overheads: &Overheads, widths: [(f64, bool); 2], slower: f64) -> Sample {
        let [mut seconds, mut worked] = [Class::ALL.map(|_| vec![0.0; 2]), Class::ALL.map(|_| vec![0.0; 2])];
        let mut manners = Class::ALL.map(|_| vec![Manner::default(); 2]);
        for class in [ATTENTION, MLP] {
            for (rank, (width, is_away)) in widths.into_iter().enumerate() {
                let manner = Manner { migrates: is_away && class == ATTENTION, ..Manner::default() };
                seconds[class][rank] = slower * [0.01, 0.02][rank] * overheads.worked(class, width, manner);
                worked[class][rank] = width;
                manners[class][rank] = manner;
            }
        }
        Sample::of(seconds, worked, manners)
    }

    fn division() -> Widths {
        Widths::new(|dim| if dim == Dim::Tokens { vec![1; 2] } else { vec![EVEN as usize; 2] })
    }

    fn learn(
        known: Overheads,
        truth: &Overheads,
        layouts: [[(f64, bool); 2]; 2],
        slower: f64,
        error: f64,
    ) -> Overheads {
        let mut learnt = known;
        let [before, after] = [sample(truth, layouts[0], 1.0), sample(truth, layouts[1], slower)];
        learnt.learn([&before, &after], &division(), [error; Class::ALL.len()], &Tuning::default());
        learnt
    }

    fn of(base: f64, migrating: f64) -> Overheads {
        let mut overheads = Overheads { bases: [base; Class::ALL.len()], ..Overheads::default() };
        overheads.migrating[ATTENTION] = migrating;
        overheads
    }

    const AT_HOME: [[(f64, bool); 2]; 2] = [[(EVEN, false), (EVEN, false)], [(130.0, false), (70.0, false)]];
    const MIGRATED: [[(f64, bool); 2]; 2] = [[(EVEN, false), (EVEN, false)], [(130.0, true), (70.0, true)]];

    fn assert_near(found: f64, expected: f64, what: &str) {
        assert!((found - expected).abs() < 1e-9 * EVEN, "{what}: {found}, expected {expected}");
    }

    #[test]
    fn two_widths_tell_the_base_and_noise_does_not() {
        let learnt = learn(Overheads::default(), &of(20.0, 0.0), AT_HOME, 1.0, 0.0);
        assert_near(learnt.bases[MLP], 20.0, "the base of a class");
        assert_near(learnt.bases[Class::Head as usize], 0.0, "the base of a class without work");
        let doubted = learn(Overheads::default(), &of(20.0, 0.0), AT_HOME, 1.0, 1.0).bases[MLP];
        assert!(doubted < 1.0, "{doubted} from times with an error of 100 %");
        let most = learn(Overheads::default(), &of(90.0, 0.0), AT_HOME, 1.0, 0.0).bases[MLP];
        assert_near(most, Tuning::default().base_share_max * EVEN, "a base above the limit");
    }

    #[test]
    fn the_migrating_overhead_is_told_from_the_base_and_from_a_general_slowdown() {
        for (base, migrating, slower) in [(0.0, 30.0, 1.0), (20.0, 30.0, 1.0), (0.0, 30.0, 1.5), (20.0, 0.0, 0.7)] {
            let what = format!("base {base}, migrating {migrating}, {slower} times as slow");
            let learnt = learn(of(base, 0.0), &of(base, migrating), MIGRATED, slower, 0.0);
            if slower == 1.0 {
                assert_near(learnt.bases[ATTENTION], base, &what);
                assert_near(learnt.migrating[ATTENTION], migrating, &what);
            }
            assert!((learnt.migrating[ATTENTION] - migrating).abs() < 0.1 * EVEN, "{what}: {learnt:?}");
            assert_eq!(learnt.migrating[MLP], 0.0, "{what}");
        }
    }

    #[test]
    fn the_overhead_of_pruning_is_told_from_a_rank_that_prunes() {
        for (pruning, slower) in [(0.3, 1.0), (0.0, 1.0), (0.3, 1.4)] {
            let truth = Overheads { pruning: [pruning; Class::ALL.len()], ..Overheads::default() };
            let layouts = [0.0, 0.5].map(|gamma: f64| {
                let manners = [0.0, if gamma > 0.0 { EVEN } else { 0.0 }];
                let manners = manners.map(|pruned_of| Manner { pruned_of, migrates: false });
                let widths = [EVEN, EVEN * (1.0 - gamma)];
                let slower = if gamma > 0.0 { slower } else { 1.0 };
                let seconds = |class: usize, rank: usize| {
                    slower * [0.01, 0.02][rank] * truth.worked(class, widths[rank], manners[rank])
                };
                let by_class = |of: &dyn Fn(usize) -> Vec<f64>| std::array::from_fn(of);
                Sample::of(
                    by_class(&|class| vec![seconds(class, 0), seconds(class, 1)]),
                    by_class(&|_| widths.to_vec()),
                    Class::ALL.map(|_| manners.to_vec()),
                )
            });
            let mut learnt = Overheads::default();
            learnt.learn([&layouts[0], &layouts[1]], &division(), [0.0; Class::ALL.len()], &Tuning::default());
            assert!((learnt.pruning[MLP] - pruning).abs() < 1e-9, "{learnt:?}");
            assert_near(learnt.bases[MLP], 0.0, "what pruning costs is no base");
        }
    }

    #[test]
    fn the_migrating_overhead_decays_while_no_rank_migrates() {
        let learnt = learn(of(0.0, 40.0), &of(0.0, 40.0), AT_HOME, 1.0, 0.0);
        assert_near(learnt.migrating[ATTENTION], Tuning::default().migrating_kept_share * 40.0, "after one change");
    }
}
