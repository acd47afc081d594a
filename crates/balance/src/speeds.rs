//! How long each rank takes for each class of work at any width.

use crate::observation::{ByClass, Class};

/// Seconds as a line over the width: `rate · (base + width)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Speeds {
    /// Seconds per unit of width, by class and rank.
    pub(crate) rates: ByClass<Vec<f64>>,
    /// Overhead that does not depend on the width, by class and rank, as width.
    pub(crate) bases: ByClass<Vec<f64>>,
    /// Overhead of a rank whose work differs from its home, by class, as width.
    pub(crate) migrating: ByClass<f64>,
    /// Overhead of a rank that prunes, by class, as a share of its width.
    pub(crate) pruning: ByClass<f64>,
    /// Time for the same work over that of the fastest rank, by rank.
    pub slowness: Vec<f64>,
    /// The first step with these speeds.
    pub since: u64,
    /// Two standard errors of the slowness, as a share of it.
    pub uncertainty: f64,
}

impl Speeds {
    pub fn seconds(&self, class: Class, rank: usize, width: f64) -> f64 {
        let worked = if width == 0.0 { 0.0 } else { self.bases[class as usize][rank] + width };
        self.rates[class as usize][rank] * worked
    }

    /// The same for a rank that prunes this share, which it does for prunable classes only.
    pub(crate) fn pruned_s(&self, class: Class, rank: usize, width: f64, gamma: f64) -> f64 {
        let prunes = gamma > 0.0 && class.is_prunable();
        let left = if prunes { 1.0 - gamma + self.pruning[class as usize] } else { 1.0 };
        self.seconds(class, rank, width * left)
    }

    /// Seconds that a rank computes longer when its work differs from its home.
    pub(crate) fn migrating_s(&self, class: Class, rank: usize) -> f64 {
        self.rates[class as usize][rank] * self.migrating[class as usize]
    }

    /// Ranks without overheads, from the seconds per unit of width of a rank of slowness one.
    #[cfg(test)]
    pub(crate) fn of_slowness(seconds: ByClass<f64>, slowness: Vec<f64>) -> Speeds {
        let rates = seconds.map(|seconds| slowness.iter().map(|slow| seconds * slow).collect());
        let bases = Class::ALL.map(|_| vec![0.0; slowness.len()]);
        let [migrating, pruning] = [[0.0; Class::ALL.len()]; 2];
        Speeds { rates, bases, migrating, pruning, slowness, since: 0, uncertainty: 0.0 }
    }

    /// The share of a width that a rank must prune to finish in `seconds`; zero if it finishes earlier.
    pub(crate) fn excess(&self, class: Class, rank: usize, width: f64, seconds: f64) -> f64 {
        let worked = seconds / self.rates[class as usize][rank] - self.bases[class as usize][rank];
        // NaN without width or rate, so the comparison fails.
        let pruned = 1.0 - worked / width;
        if width > 0.0 && pruned > 0.0 { (pruned + self.pruning[class as usize]).min(1.0) } else { 0.0 }
    }

    pub fn ranks(&self) -> usize {
        self.slowness.len()
    }

    /// The least time of a class over all divisions of its work.
    pub fn optimum_s(&self, class: Class, total: usize) -> f64 {
        let ranks = self.rates[class as usize].iter().zip(&self.bases[class as usize]);
        let mut ranks: Vec<(f64, f64)> = ranks.map(|(&rate, &base)| (rate, base)).collect();
        // The ranks with the largest overheads may be better left without work, so each prefix of this order is tried.
        ranks.sort_unstable_by(|a, b| (a.0 * a.1).total_cmp(&(b.0 * b.1)));
        let mut per_second = 0.0;
        let mut worked = total as f64;
        let with_prefix = ranks.into_iter().map(|(rate, base)| {
            per_second += 1.0 / rate;
            worked += base;
            if per_second.is_finite() { worked / per_second } else { 0.0 }
        });
        with_prefix.fold(f64::INFINITY, f64::min)
    }
}
