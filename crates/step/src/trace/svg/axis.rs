//! The time axis: round times, and where times lie.

use crate::trace::Timeline;

/// A picosecond: no clock tells more, and labels stay short.
const FINEST_STEP_MS: f64 = 1e-9;

/// A range of times over a range of pixels.
pub(super) struct Axis {
    start_s: f64,
    duration_s: f64,
    left: f64,
    right: f64,
}

impl Axis {
    pub(super) fn over(timeline: &Timeline, left: f64, right: f64) -> Axis {
        let starts = timeline.ranks.iter().flatten().map(|span| span.start_s);
        let start_s = starts.reduce(f64::min).unwrap_or(0.0);
        let duration_s = Some(timeline.duration_s()).filter(|duration| duration.is_finite()).unwrap_or(0.0);
        Axis { start_s, duration_s, left, right }
    }

    /// From the first task's start.
    pub(super) fn since_start_s(&self, time_s: f64) -> f64 {
        time_s - self.start_s
    }

    pub(super) fn x(&self, time_s: f64) -> f64 {
        self.left + self.share(self.since_start_s(time_s)) * (self.right - self.left)
    }

    /// How long a box of so many pixels is.
    pub(super) fn seconds(&self, pixels: f64) -> f64 {
        pixels / (self.right - self.left) * self.duration_s
    }

    /// Of the step, between 0 and 1; all of nothing is at its start.
    pub(super) fn share(&self, seconds: f64) -> f64 {
        if self.duration_s > 0.0 { (seconds / self.duration_s).clamp(0.0, 1.0) } else { 0.0 }
    }

    pub(super) fn duration_s(&self) -> f64 {
        self.duration_s
    }

    /// Pixels and labels of round times in milliseconds, at most so many and the one at zero.
    pub(super) fn ticks(&self, most: usize) -> Vec<(f64, String)> {
        let duration_ms = self.duration_s * 1e3;
        let Some((step_ms, decimals)) = round_step(duration_ms / most as f64) else {
            return vec![(self.left, "0".to_owned())];
        };
        let tick = |index: usize| {
            let time_ms = index as f64 * step_ms;
            (self.x(self.start_s + time_ms / 1e3), format!("{time_ms:.decimals$}"))
        };
        let is_inside = |index: &usize| *index as f64 * step_ms <= duration_ms;
        (0..=most).take_while(is_inside).map(tick).collect()
    }
}

/// The least of 1, 2 and 5 times a power of ten that is not less than `least_ms`, and the decimals it needs.
fn round_step(least_ms: f64) -> Option<(f64, usize)> {
    if !(least_ms.is_finite() && least_ms >= FINEST_STEP_MS) {
        return None;
    }
    let exponent = least_ms.log10().floor();
    let candidates = [(1.0, exponent), (2.0, exponent), (5.0, exponent), (1.0, exponent + 1.0)];
    let steps = candidates.map(|(factor, exponent)| (factor * 10f64.powf(exponent), (-exponent).max(0.0) as usize));
    steps.into_iter().find(|&(step_ms, _)| step_ms >= least_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round() {
        let cases = [
            (0.11, Some((0.2, 1))),
            (0.5, Some((0.5, 1))),
            (0.7, Some((1.0, 0))),
            (1.0, Some((1.0, 0))),
            (3.4, Some((5.0, 0))),
            (81.0, Some((100.0, 0))),
            (0.0021, Some((0.005, 3))),
            (1e-300, None),
            (0.0, None),
            (-1.0, None),
            (f64::NAN, None),
            (f64::INFINITY, None),
        ];
        for (least, expected) in cases {
            let found = round_step(least);
            let is_same = match (found, expected) {
                (Some((a, a_decimals)), Some((b, b_decimals))) => (a - b).abs() < 1e-9 * b && a_decimals == b_decimals,
                (found, expected) => found == expected,
            };
            assert!(is_same, "{least}: {found:?}, expected {expected:?}");
        }
    }
}
