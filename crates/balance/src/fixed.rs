//! What ranks do whatever their widths are.

use crate::observation::{Class, Division};
use crate::watch::{Seen, even, is_known};

/// By class, as widths.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fixed {
    /// Of a rank that has any of it.
    pub bases: [f64; Class::ALL.len()],
    /// Of a rank that works on what another keeps, or keeps what another works on.
    pub sharing: [f64; Class::ALL.len()],
}

/// How much it may be, as a share of an even width.
const LIKELY: f64 = 0.2;
const MOST_BASE: f64 = 0.5;
/// Widths that differ by less, as a share, tell nothing of bases.
const LEAST_DIFFERENCE: f64 = 0.2;
/// What is left of what sharing was seen to add, at every change of layout at which nobody shares.
const REMEMBERED: f64 = 0.5;

impl Fixed {
    /// The width that takes as long as all that a rank does.
    pub fn done(&self, class: usize, width: f64, shares: bool) -> f64 {
        self.bases[class] + width + if shares { self.sharing[class] } else { 0.0 }
    }

    /// The same ranks in two layouts tell. `errors` are the standard ones of what was seen of each class, as shares.
    pub fn learn(&mut self, layouts: [&Seen; 2], division: &Division, errors: [f64; Class::ALL.len()]) {
        let ranks = |class: usize| (0..division.ranks()).filter_map(|rank| Pair::of(layouts, class, rank)).collect();
        let comparison = Comparison {
            pairs: std::array::from_fn(ranks),
            evens: Class::ALL.map(|class| even(class, division)),
            errors,
        };
        self.learn_bases(&comparison);
        self.learn_sharing(&comparison);
    }

    fn learn_bases(&mut self, comparison: &Comparison) {
        let (mut base_s, mut told_s) = (0.0, 0.0);
        for (class, pairs) in comparison.pairs.iter().enumerate() {
            let (base, even) = (&mut self.bases[class], comparison.evens[class]);
            let most = MOST_BASE * even;
            let corrections = pairs.iter().filter_map(|pair| {
                let (found, noise) = pair.base(*base)?;
                Some(comparison.kept(class, noise) * (found.clamp(-most, most) - *base))
            });
            if let Some((correction, _)) = mean(corrections) {
                *base = (*base + correction).clamp(0.0, most);
                let seconds: f64 = pairs.iter().map(|pair| pair.seconds[1]).sum();
                (base_s, told_s) = (base_s + seconds * *base / even, told_s + seconds);
            }
        }
        // What is shared by all tells nothing of its base, which is taken to be like the others'.
        for (class, pairs) in comparison.pairs.iter().enumerate().filter(|_| told_s > 0.0) {
            if !pairs.is_empty() && !pairs.iter().any(Pair::is_alone) {
                self.bases[class] = base_s / told_s * comparison.evens[class];
            }
        }
    }

    fn learn_sharing(&mut self, comparison: &Comparison) {
        let slower = self.slower(&comparison.pairs);
        for (class, pairs) in comparison.pairs.iter().enumerate() {
            let (base, even) = (self.bases[class], comparison.evens[class]);
            let sharing = &mut self.sharing[class];
            if let Some((found, count)) = mean(pairs.iter().filter_map(|pair| pair.sharing(base, slower))) {
                let correction = comparison.kept(class, even / (count as f64).sqrt()) * (found - *sharing);
                *sharing = (*sharing + correction).clamp(0.0, even);
            } else if pairs.iter().all(Pair::is_alone) {
                *sharing *= REMEMBERED;
            }
        }
    }

    /// How many times as long all took in the second layout, by what nobody shares.
    fn slower(&self, pairs: &[Vec<Pair>; Class::ALL.len()]) -> f64 {
        let (mut found_s, mut expected_s) = (0.0, 0.0);
        for (pairs, base) in pairs.iter().zip(self.bases) {
            for pair in pairs.iter().filter(|pair| pair.is_alone()) {
                found_s += pair.seconds[1];
                expected_s += pair.seconds[0] * (base + pair.worked[1]) / (base + pair.worked[0]);
            }
        }
        if expected_s > 0.0 { found_s / expected_s } else { 1.0 }
    }
}

/// What two layouts tell, by class.
struct Comparison {
    /// Of the ranks that did some of it in both.
    pairs: [Vec<Pair>; Class::ALL.len()],
    evens: [f64; Class::ALL.len()],
    errors: [f64; Class::ALL.len()],
}

impl Comparison {
    /// As much of a difference as noise does not explain, where it may be off so many times as far as its seconds.
    fn kept(&self, class: usize, noise: f64) -> f64 {
        1.0 / (1.0 + (self.errors[class] * noise / (LIKELY * self.evens[class])).powi(2))
    }
}

/// A rank's work of a class in two layouts.
struct Pair {
    seconds: [f64; 2],
    worked: [f64; 2],
    shares: [bool; 2],
}

impl Pair {
    /// None where it did nothing in one of them.
    fn of(layouts: [&Seen; 2], class: usize, rank: usize) -> Option<Pair> {
        let pair = Pair {
            seconds: layouts.map(|seen| seen.seconds[class][rank]),
            worked: layouts.map(|seen| seen.worked[class][rank]),
            shares: layouts.map(|seen| seen.shares[class][rank]),
        };
        (0..2).all(|layout| is_known(pair.seconds[layout], pair.worked[layout])).then_some(pair)
    }

    fn is_alone(&self) -> bool {
        self.shares == [false; 2]
    }

    /// The base, and how many times as far as its seconds it may be off, where the widths tell.
    fn base(&self, known: f64) -> Option<(f64, f64)> {
        let ([t1, t2], [w1, w2]) = (self.seconds, self.worked);
        let is_telling = (w1 - w2).abs() > LEAST_DIFFERENCE * w1.max(w2) && (t1 - t2) * (w1 - w2) > 0.0;
        let found = || ((w1 * t2 - w2 * t1) / (t1 - t2), (known + w1) * (known + w2) / (w1 - w2));
        (self.is_alone() && is_telling).then(found)
    }

    /// What sharing adds, where the rank shares in one layout and all are so many times as slow in the second.
    fn sharing(&self, base: f64, slower: f64) -> Option<f64> {
        let [t1, t2] = [self.seconds[0] * slower, self.seconds[1]];
        let [(alone_s, alone), (shared_s, shared)] = match self.shares {
            [false, true] => [(t1, self.worked[0]), (t2, self.worked[1])],
            [true, false] => [(t2, self.worked[1]), (t1, self.worked[0])],
            _ => return None,
        };
        Some(shared_s * (base + alone) / alone_s - base - shared)
    }
}

/// And of how many; none of nothing.
fn mean(values: impl Iterator<Item = f64>) -> Option<(f64, usize)> {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| (sum / count as f64, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observation::Dim;

    const EVEN: f64 = 100.0;
    const MLP: usize = Class::Mlp as usize;
    const ATTENTION: usize = Class::Attention as usize;

    /// Two ranks, of which the second is twice as slow, where `fixed` is true.
    fn seen(fixed: &Fixed, widths: [(f64, bool); 2], slower: f64) -> Seen {
        let [mut seconds, mut worked] = [Class::ALL.map(|_| vec![0.0; 2]), Class::ALL.map(|_| vec![0.0; 2])];
        let mut shares = Class::ALL.map(|_| vec![false; 2]);
        for class in [ATTENTION, MLP] {
            for (rank, (width, is_shared)) in widths.into_iter().enumerate() {
                let is_shared = is_shared && class == ATTENTION;
                seconds[class][rank] = slower * [0.01, 0.02][rank] * fixed.done(class, width, is_shared);
                (worked[class][rank], shares[class][rank]) = (width, is_shared);
            }
        }
        Seen::of(seconds, worked, shares)
    }

    fn division() -> Division {
        Division::new(|dim| if dim == Dim::Tokens { vec![1; 2] } else { vec![EVEN as usize; 2] })
    }

    fn learn(known: Fixed, truth: &Fixed, layouts: [[(f64, bool); 2]; 2], slower: f64, error: f64) -> Fixed {
        let mut learnt = known;
        let [before, after] = [seen(truth, layouts[0], 1.0), seen(truth, layouts[1], slower)];
        learnt.learn([&before, &after], &division(), [error; Class::ALL.len()]);
        learnt
    }

    fn of(base: f64, sharing: f64) -> Fixed {
        let mut fixed = Fixed { bases: [base; Class::ALL.len()], ..Fixed::default() };
        fixed.sharing[ATTENTION] = sharing;
        fixed
    }

    const ALONE: [[(f64, bool); 2]; 2] = [[(EVEN, false), (EVEN, false)], [(130.0, false), (70.0, false)]];
    const SHARED: [[(f64, bool); 2]; 2] = [[(EVEN, false), (EVEN, false)], [(130.0, true), (70.0, true)]];

    fn assert_near(found: f64, expected: f64, what: &str) {
        assert!((found - expected).abs() < 1e-9 * EVEN, "{what}: {found}, expected {expected}");
    }

    #[test]
    fn two_widths_tell_the_base_and_noise_does_not() {
        let learnt = learn(Fixed::default(), &of(20.0, 0.0), ALONE, 1.0, 0.0);
        assert_near(learnt.bases[MLP], 20.0, "the base of a class");
        assert_near(learnt.bases[Class::Head as usize], 0.0, "the base of a class that nobody does");
        let doubted = learn(Fixed::default(), &of(20.0, 0.0), ALONE, 1.0, 1.0).bases[MLP];
        assert!(doubted < 1.0, "{doubted} of times that may be off by as much as they are");
        let most = learn(Fixed::default(), &of(90.0, 0.0), ALONE, 1.0, 0.0).bases[MLP];
        assert_near(most, MOST_BASE * EVEN, "a base that cannot be so much");
    }

    #[test]
    fn what_sharing_adds_is_neither_the_base_nor_what_slows_all_of_them() {
        for (base, sharing, slower) in [(0.0, 30.0, 1.0), (20.0, 30.0, 1.0), (0.0, 30.0, 1.5), (20.0, 0.0, 0.7)] {
            let what = format!("base {base}, sharing {sharing}, {slower} times as slow");
            let learnt = learn(of(base, 0.0), &of(base, sharing), SHARED, slower, 0.0);
            if slower == 1.0 {
                assert_near(learnt.bases[ATTENTION], base, &what);
                assert_near(learnt.sharing[ATTENTION], sharing, &what);
            }
            assert!((learnt.sharing[ATTENTION] - sharing).abs() < 0.1 * EVEN, "{what}: {learnt:?}");
            assert_eq!(learnt.sharing[MLP], 0.0, "{what}");
        }
    }

    #[test]
    fn what_sharing_adds_is_forgotten_by_and_by_where_nobody_shares() {
        let learnt = learn(of(0.0, 40.0), &of(0.0, 40.0), ALONE, 1.0, 0.0);
        assert_near(learnt.sharing[ATTENTION], REMEMBERED * 40.0, "what is left");
    }
}
