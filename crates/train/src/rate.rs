//! The learning rate over a run.

/// How the rate falls after its warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    Cosine,
    Linear,
    Constant,
    /// A cosine that restarts from the peak, so many times one after the other.
    Restarts {
        cycles: u32,
    },
    /// A power of the share that is left.
    Polynomial {
        power: f64,
    },
    /// Stays at the peak until this share of the run is left, warm-up included, and then falls (WSD).
    Stable {
        decay_share: f64,
        form: Form,
    },
}

/// The form of the fall at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Cosine,
    Linear,
    /// 1 - √done.
    Sqrt,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub peak: f64,
    /// The value that the rate falls to.
    pub floor: f64,
    /// Steps over which the rate rises to its peak.
    pub warmup_steps: u64,
    pub decay: Decay,
}

impl Rate {
    /// The rate of a step, counted from 0. `progress` is the share of the run done before it, warm-up included; `warmup_progress`
    /// the share at which the warm-up ended.
    pub fn at(&self, step: u64, progress: f64, warmup_progress: f64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let since = |start: f64| ((progress - start) / (1.0 - start).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        let done = since(warmup_progress);
        let left = match self.decay {
            Decay::Cosine => cosine(done),
            Decay::Linear => 1.0 - done,
            Decay::Constant => return self.peak,
            Decay::Restarts { cycles } => match whole_if_close(f64::from(cycles) * done) {
                turns if turns >= f64::from(cycles) => 0.0,
                turns => cosine(turns.fract()),
            },
            Decay::Polynomial { power } => (1.0 - done).powf(power),
            Decay::Stable { decay_share, form } => {
                let done = since(warmup_progress.max(1.0 - decay_share));
                match form {
                    Form::Cosine => cosine(done),
                    Form::Linear => 1.0 - done,
                    Form::Sqrt => 1.0 - done.sqrt(),
                }
            }
        };
        self.floor + (self.peak - self.floor) * left
    }
}

fn cosine(done: f64) -> f64 {
    0.5 * (1.0 + (std::f64::consts::PI * done).cos())
}

/// Shares of a run are rounded; without this a restart could come a step late.
fn whole_if_close(turns: f64) -> f64 {
    if (turns - turns.round()).abs() < 1e-9 { turns.round() } else { turns }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_to_its_peak_and_falls_to_its_floor() {
        let (peak, floor) = (1.0, 0.1);
        // 20 steps, the first 4 of them warm-up.
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

    /// The factors of transformers' `get_polynomial_decay_schedule_with_warmup`,
    /// `get_cosine_with_hard_restarts_schedule_with_warmup` and `get_wsd_schedule` after the warm-up, by whole steps.
    fn factor(decay: Decay, step: f64, warmup: f64, total: f64, floor: f64) -> f64 {
        use std::f64::consts::PI;
        match decay {
            Decay::Polynomial { power } => {
                let remaining: f64 = 1.0 - (step - warmup) / (total - warmup);
                (1.0 - floor) * remaining.powf(power) + floor
            }
            Decay::Restarts { cycles } => {
                let progress = (step - warmup) / (total - warmup);
                let cosine = 0.5 * (1.0 + (PI * ((f64::from(cycles) * progress) % 1.0)).cos());
                (1.0 - floor) * if progress >= 1.0 { 0.0 } else { cosine } + floor
            }
            Decay::Stable { decay_share, form } => {
                let decay_steps = (decay_share * total).round();
                let stable_steps = total - warmup - decay_steps;
                if step < warmup + stable_steps {
                    return 1.0;
                }
                let progress: f64 = (step - warmup - stable_steps) / decay_steps;
                let factor = match form {
                    Form::Linear => 1.0 - progress,
                    Form::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
                    Form::Sqrt => 1.0 - progress.sqrt(),
                };
                factor * (1.0 - floor) + floor
            }
            Decay::Cosine | Decay::Linear | Decay::Constant => unreachable!("checked above"),
        }
    }

    #[test]
    fn the_other_schedules_are_those_of_transformers() {
        let decays = [
            Decay::Polynomial { power: 1.0 },
            Decay::Polynomial { power: 2.5 },
            Decay::Restarts { cycles: 1 },
            Decay::Restarts { cycles: 2 },
            Decay::Restarts { cycles: 3 },
            Decay::Restarts { cycles: 7 },
            Decay::Stable { decay_share: 0.25, form: Form::Cosine },
            Decay::Stable { decay_share: 0.25, form: Form::Linear },
            Decay::Stable { decay_share: 0.25, form: Form::Sqrt },
            Decay::Stable { decay_share: 0.5, form: Form::Linear },
        ];
        for decay in decays {
            for (warmup, total) in [(0, 20), (4, 20), (5, 40), (12, 180), (3, 1004)] {
                for floor in [0.0, 0.1] {
                    let rate = Rate { peak: 2.0, floor: 2.0 * floor, warmup_steps: warmup, decay };
                    let share = |step: u64| step as f64 / total as f64;
                    for step in warmup..=total {
                        let found = rate.at(step, share(step), share(warmup));
                        let expected = 2.0 * factor(decay, step as f64, warmup as f64, total as f64, floor);
                        // Shares are rounded, and a root makes 1e-8 of 1e-16.
                        let close = (found - expected).abs() < if share(step) == 0.75 { 1e-7 } else { 1e-12 };
                        assert!(close, "{decay:?}, step {step} of {warmup} and {total}: {found}, expected {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_stable_rate_falls_from_the_end_of_a_longer_warmup_on() {
        let decay = Decay::Stable { decay_share: 0.5, form: Form::Linear };
        let rate = Rate { peak: 1.0, floor: 0.0, warmup_steps: 16, decay };
        for (step, expected) in [(15, 1.0), (16, 1.0), (18, 0.5), (20, 0.0)] {
            assert!((rate.at(step, step as f64 / 20.0, 0.8) - expected).abs() < 1e-12, "{step}");
        }
    }
}
