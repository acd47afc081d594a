//! Robust statistics of a few values.

use std::collections::VecDeque;

/// The mean of the middle third; `None` without values. Hiccups do not count, and values that jump between two speeds average to
/// one in between, where their median would be one of the two.
pub fn trimmed_mean(mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let cut = values.len() / 3;
    let middle = &values[cut..values.len() - cut];
    (!middle.is_empty()).then(|| middle.iter().sum::<f64>() / middle.len() as f64)
}

/// The standard error of [`trimmed_mean`], in those of a plain mean of as many normally distributed values.
pub(crate) const TRIMMED_MEAN_ERROR: f64 = 1.1;

/// Zero without values.
pub(crate) fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() as f64 * share) as usize).copied().unwrap_or(0.0)
}

/// Each value over the mean of all.
pub(crate) fn over_mean(values: &[f64]) -> Vec<f64> {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    values.iter().map(|value| value / mean.max(f64::MIN_POSITIVE)).collect()
}

/// Appends to a window of at most `most` values.
pub(crate) fn push<T>(window: &mut VecDeque<T>, value: T, most: usize) {
    window.push_back(value);
    if window.len() > most {
        window.pop_front();
    }
}
