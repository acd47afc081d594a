//! A run's steps beside its plan.

use evenkeel_step::simulate::median;

use crate::text;

/// The step that a plan foretold, until enough steps were made to compare it with.
pub struct Forecast {
    step_s: f64,
    measured_s: Vec<f64>,
}

/// Steps that are compared, behind the first ones, which include start-up work.
const STEPS: usize = 10;
const FIRST_STEPS: usize = 3;
/// A plan that is off by less is as good as its measurements.
const TOLERANCE: f64 = 0.1;

impl Forecast {
    pub fn of(step_s: f64) -> Forecast {
        Forecast { step_s, measured_s: Vec::new() }
    }

    /// Takes in a step. Once there are enough, it says how far off the plan was, if that is more than a tenth.
    pub fn compare(&mut self, seconds: f64) -> Option<String> {
        self.measured_s.push(seconds);
        if self.measured_s.len() != FIRST_STEPS + STEPS {
            return None;
        }
        let step_s = median(self.measured_s[FIRST_STEPS..].iter().copied());
        let off = step_s / self.step_s - 1.0;
        let than = if off > 0.0 { "longer" } else { "less" };
        (off.abs() > TOLERANCE).then(|| {
            format!(
                "steps take {:.1} ms, {} {than} than the plan foretold; `evenkeel plan --fresh` measures this machine anew",
                1e3 * step_s,
                text::percent(off.abs())
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_is_off_by_more_than_a_tenth_is_told_once() {
        let told = |step_s: f64| {
            let mut forecast = Forecast::of(0.1);
            // The first steps take long, whatever the plan.
            let steps = [9.0; FIRST_STEPS].into_iter().chain([step_s; 3 * STEPS]);
            steps.filter_map(|seconds| forecast.compare(seconds)).collect::<Vec<_>>()
        };
        assert!(told(0.1).is_empty() && told(0.109).is_empty() && told(0.091).is_empty());
        assert_eq!(told(0.15).len(), 1);
        assert!(told(0.15)[0].contains("150.0 ms, 50.0% longer"), "{:?}", told(0.15));
        assert!(told(0.05)[0].contains("50.0% less"));
    }
}
