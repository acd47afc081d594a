//! The time axis: round times, and the places of times.

use evenkeel_report::svg::round_step;
use evenkeel_step::trace::Timeline;

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

    /// Seconds since the first task's start.
    pub(super) fn since_start_s(&self, time_s: f64) -> f64 {
        time_s - self.start_s
    }

    pub(super) fn x(&self, time_s: f64) -> f64 {
        self.left + self.share(self.since_start_s(time_s)) * (self.right - self.left)
    }

    /// The duration of a box of so many pixels.
    pub(super) fn seconds(&self, pixels: f64) -> f64 {
        pixels / (self.right - self.left) * self.duration_s
    }

    /// Share of the step, between 0 and 1; 0 if the step has no duration.
    pub(super) fn share(&self, seconds: f64) -> f64 {
        if self.duration_s > 0.0 { (seconds / self.duration_s).clamp(0.0, 1.0) } else { 0.0 }
    }

    pub(super) fn duration_s(&self) -> f64 {
        self.duration_s
    }

    /// Pixels and labels of round times in milliseconds, at most so many and the one at zero.
    pub(super) fn ticks(&self, most: usize) -> Vec<(f64, String)> {
        let duration_ms = self.duration_s * 1e3;
        let step = round_step(duration_ms / most as f64).filter(|(step_ms, _)| *step_ms >= FINEST_STEP_MS);
        let Some((step_ms, decimals)) = step else {
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
