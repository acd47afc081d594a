//! The learning rate over a run.

/// How the rate falls after its warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    Cosine,
    Linear,
    Constant,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub peak: f64,
    /// What the rate falls to.
    pub floor: f64,
    /// Steps over which the rate rises to its peak.
    pub warmup_steps: u64,
    pub decay: Decay,
}

impl Rate {
    /// The rate of a step, counted from 0. `progress` is the share of the run that lies behind it, warm-up included;
    /// `warmup_progress` the share at which the warm-up ended.
    pub fn at(&self, step: u64, progress: f64, warmup_progress: f64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let done = ((progress - warmup_progress) / (1.0 - warmup_progress).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        let left = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            Decay::Linear => 1.0 - done,
            Decay::Constant => return self.peak,
        };
        self.floor + (self.peak - self.floor) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_to_its_peak_and_falls_to_its_floor() {
        let (peak, floor) = (1.0, 0.1);
        // Steps of 20, the first 4 of them warm-up.
        let cases = [
            (Decay::Cosine, [(0, 0.25), (3, 1.0), (4, 1.0), (12, 0.55), (20, 0.1)]),
            (Decay::Linear, [(0, 0.25), (3, 1.0), (4, 1.0), (12, 0.55), (20, 0.1)]),
            (Decay::Constant, [(0, 0.25), (3, 1.0), (4, 1.0), (12, 1.0), (20, 1.0)]),
        ];
        for (decay, points) in cases {
            let rate = Rate { peak, floor, warmup_steps: 4, decay };
            for (step, expected) in points {
                let found = rate.at(step, step as f64 / 20.0, 4.0 / 20.0);
                assert!((found - expected).abs() < 1e-12, "{decay:?} step {step}: {found}, expected {expected}");
            }
        }
    }

    #[test]
    fn cosine_falls_slowly_first() {
        let rate = Rate { peak: 1.0, floor: 0.0, warmup_steps: 0, decay: Decay::Cosine };
        assert!((rate.at(1, 0.25, 0.0) - 0.853_553_390_593_273_8).abs() < 1e-12);
    }
}
