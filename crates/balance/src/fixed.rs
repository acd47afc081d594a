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
        let pairs: [Vec<Pair>; Class::ALL.len()] = std::array::from_fn(|class| {
            (0..division.ranks()).filter_map(|rank| Pair::of(layouts, class, rank)).collect()
        });
        // As much of a difference as noise does not explain.
        let kept = |class: Class, noise: f64| {
            1.0 / (1.0 + (errors[class as usize] * noise / (LIKELY * even(class, division))).powi(2))
        };
        let (mut base_s, mut told_s) = (0.0, 0.0);
        for class in Class::ALL {
            let base = &mut self.bases[class as usize];
            let most = MOST_BASE * even(class, division);
            let corrections = pairs[class as usize].iter().filter_map(|pair| {
                let (found, noise) = pair.base(*base)?;
                Some(kept(class, noise) * (found.clamp(-most, most) - *base))
            });
            if let Some((correction, _)) = mean(corrections) {
                *base = (*base + correction).clamp(0.0, most);
                let seconds: f64 = pairs[class as usize].iter().map(|pair| pair.seconds[1]).sum();
                (base_s, told_s) = (base_s + seconds * *base / even(class, division), told_s + seconds);
            }
        }
        // What is shared by all tells nothing of its base, which is taken to be like the others'.
        for class in Class::ALL.into_iter().filter(|_| told_s > 0.0) {
            let pairs = &pairs[class as usize];
            if !pairs.is_empty() && !pairs.iter().any(Pair::is_alone) {
                self.bases[class as usize] = base_s / told_s * even(class, division);
            }
        }
        let slower = self.slower(&pairs);
        for class in Class::ALL {
            let (pairs, base) = (&pairs[class as usize], self.bases[class as usize]);
            let (sharing, even) = (&mut self.sharing[class as usize], even(class, division));
            if let Some((found, count)) = mean(pairs.iter().filter_map(|pair| pair.sharing(base, slower))) {
                let correction = kept(class, even / (count as f64).sqrt()) * (found - *sharing);
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
