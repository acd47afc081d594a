//! A run's steps beside its plan.

use evenkeel_step::simulate::median;
use evenkeel_step::trace::Shares;

use super::choice::TimedStep;
use crate::text::{milliseconds, percent};

/// The step that a plan foretold, until enough steps were made to compare it with. If it was off, the tasks of some further steps
/// are timed to find out where.
pub struct Forecast {
    foretold: Terms,
    measured_s: Vec<f64>,
    /// Present once the plan was found to be off: steps whose tasks were timed.
    timed: Option<Vec<Terms>>,
}

/// What a step's seconds are spent on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Terms {
    step_s: f64,
    /// Of the ranks, in the mean.
    compute_s: f64,
    /// In which the rank that is worst off exchanges or waits for others, and does not compute.
    exposed_s: f64,
}

/// Steps that are compared, behind the first ones, which include start-up work.
const STEPS: usize = 10;
const FIRST_STEPS: usize = 3;
/// Steps whose tasks are timed if the plan is off.
const TIMED_STEPS: usize = 5;
/// A plan that is off by less is as good as its measurements.
const TOLERANCE: f64 = 0.1;

impl Forecast {
    pub fn of(planned: &TimedStep) -> Forecast {
        let timing = planned.timing;
        Forecast::of_terms(Terms {
            step_s: planned.step_s,
            compute_s: (1.0 - timing.idle) * timing.program_s,
            exposed_s: timing.exposed * timing.program_s,
        })
    }

    fn of_terms(foretold: Terms) -> Forecast {
        Forecast { foretold, measured_s: Vec::new(), timed: None }
    }

    /// Whether the tasks of the next step are to be timed. A plan that is right costs nothing.
    pub fn wants_times(&self) -> bool {
        self.timed.as_ref().is_some_and(|timed| timed.len() < TIMED_STEPS)
    }

    /// Takes in a step and, by rank, where its time went if that was wanted. Once there are enough steps, it says how far off the
    /// plan was if that is more than a tenth, and after some more, on what the time is spent.
    pub fn compare(&mut self, seconds: f64, times: &[Shares]) -> Option<String> {
        if self.wants_times() && !times.is_empty() {
            let timed = self.timed.as_mut().expect("the plan was off");
            timed.push(Terms::measured(seconds, times));
            return (timed.len() == TIMED_STEPS).then(|| Terms::medians(timed).beside(&self.foretold));
        }
        if self.measured_s.len() == FIRST_STEPS + STEPS {
            return None;
        }
        self.measured_s.push(seconds);
        if self.measured_s.len() < FIRST_STEPS + STEPS {
            return None;
        }
        let step_s = median(self.measured_s[FIRST_STEPS..].iter().copied());
        let off = step_s / self.foretold.step_s - 1.0;
        if off.abs() <= TOLERANCE {
            return None;
        }
        self.timed = Some(Vec::new());
        Some(format!(
            "steps take {:.1} ms, {} {} than the plan foretold; `evenkeel plan --fresh` measures this machine anew",
            1e3 * step_s,
            percent(off.abs()),
            if off > 0.0 { "longer" } else { "less" },
        ))
    }
}

impl Terms {
    fn measured(step_s: f64, times: &[Shares]) -> Terms {
        Terms {
            step_s,
            compute_s: times.iter().map(|rank| rank.compute_s).sum::<f64>() / times.len() as f64,
            exposed_s: times.iter().map(|rank| rank.exposed_s).fold(0.0, f64::max),
        }
    }

    fn medians(steps: &[Terms]) -> Terms {
        let of = |term: fn(&Terms) -> f64| median(steps.iter().map(term));
        Terms { step_s: of(|it| it.step_s), compute_s: of(|it| it.compute_s), exposed_s: of(|it| it.exposed_s) }
    }

    /// The host, the data, and ranks that are late to begin.
    fn rest_s(&self) -> f64 {
        (self.step_s - self.compute_s - self.exposed_s).max(0.0)
    }

    /// Says which terms of a measured step are off, the worst first.
    fn beside(&self, foretold: &Terms) -> String {
        let mut terms = [
            ("computing", self.compute_s, foretold.compute_s),
            ("exchanging and waiting for other ranks", self.exposed_s, foretold.exposed_s),
            ("the rest (host, data)", self.rest_s(), foretold.rest_s()),
        ];
        terms.sort_by(|one, other| (other.1 - other.2).abs().total_cmp(&(one.1 - one.2).abs()));
        // Next to nothing of both is nothing to tell of.
        let is_term =
            |(_, measured_s, foretold_s): &&(&str, f64, f64)| measured_s.max(*foretold_s) > 0.01 * foretold.step_s;
        let line = |&(name, measured_s, foretold_s): &(&str, f64, f64)| {
            let instead = format!("{} instead of {}", milliseconds(measured_s), milliseconds(foretold_s));
            // A share of next to nothing says nothing.
            if foretold_s < 0.01 * foretold.step_s {
                return format!("{name} takes {instead}");
            }
            let off = measured_s / foretold_s - 1.0;
            if off.abs() < 0.005 {
                return format!("{name} takes as long as foretold");
            }
            let than = if off > 0.0 { "longer" } else { "less" };
            format!("{name} takes {} {than} than foretold ({instead})", percent(off.abs()))
        };
        let lines: Vec<String> = terms.iter().filter(is_term).map(line).collect();
        format!("by {TIMED_STEPS} timed steps, {}", lines.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tenth of a second, most of it computing.
    const FORETOLD: Terms = Terms { step_s: 0.1, compute_s: 0.08, exposed_s: 0.015 };

    /// What is told of steps that take so long, and where their time goes if that is wanted.
    fn told(step_s: f64, times: &[Shares]) -> Vec<String> {
        let mut forecast = Forecast::of_terms(FORETOLD);
        // The first steps take long, whatever the plan.
        let steps = [9.0; FIRST_STEPS].into_iter().chain([step_s; 3 * STEPS]);
        let mut wanted = 0;
        let mut told = Vec::new();
        for seconds in steps {
            let times = if forecast.wants_times() { times } else { &[] };
            wanted += usize::from(!times.is_empty());
            told.extend(forecast.compare(seconds, times));
        }
        let is_off = !told.is_empty() && !times.is_empty();
        assert_eq!(wanted, if is_off { TIMED_STEPS } else { 0 }, "a plan that is right costs nothing");
        told
    }

    #[test]
    fn a_plan_that_is_off_by_more_than_a_tenth_is_told_once() {
        assert!(told(0.1, &[]).is_empty() && told(0.109, &[]).is_empty() && told(0.091, &[]).is_empty());
        assert_eq!(told(0.15, &[]).len(), 1, "ranks that are observed otherwise are not timed");
        assert!(told(0.15, &[])[0].contains("150.0 ms, 50.0% longer"), "{:?}", told(0.15, &[]));
        assert!(told(0.05, &[])[0].contains("50.0% less"));
    }

    #[test]
    fn what_is_off_is_told_term_by_term_the_worst_first() {
        let rank = |compute_s: f64, exposed_s: f64| Shares { compute_s, exposed_s, ..Shares::default() };
        let cases: [(f64, [Shares; 2], &str); 4] = [
            (
                0.15,
                [rank(0.13, 0.010), rank(0.11, 0.015)],
                "computing takes 50.0% longer than foretold (120.0 ms instead of 80.00 ms); the rest (host, data) takes 200.0% \
                 longer than foretold (15.00 ms instead of 5.000 ms); exchanging and waiting for other ranks takes as long as foretold",
            ),
            (
                0.15,
                [rank(0.08, 0.065), rank(0.08, 0.002)],
                "exchanging and waiting for other ranks takes 333.3% longer",
            ),
            (0.15, [rank(0.08, 0.015), rank(0.08, 0.015)], "the rest (host, data) takes 1000.0% longer"),
            (
                0.05,
                [rank(0.04, 0.006), rank(0.04, 0.002)],
                "computing takes 50.0% less than foretold (40.00 ms instead",
            ),
        ];
        for (step_s, times, expected) in cases {
            let told = told(step_s, &times);
            assert_eq!(told.len(), 2, "{told:?}");
            assert!(told[1].starts_with(&format!("by 5 timed steps, {expected}")), "{told:?}");
        }
        let none = Terms { exposed_s: 0.0, ..FORETOLD };
        let line = Terms { exposed_s: 0.04, ..FORETOLD }.beside(&none);
        assert!(line.contains("exchanging and waiting for other ranks takes 40.00 ms instead of 0.000 ms"), "{line}");
        assert!(!none.beside(&none).contains("exchanging"), "{}", none.beside(&none));
    }
}
