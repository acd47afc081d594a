//! Finds the fastest strategies without looking at all of them: what cannot be faster than those found is left out.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use evenkeel_step::Strategy;

/// What is known of a strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged<T> {
    pub strategy: Strategy,
    pub step_s: f64,
    /// Bytes needed over bytes there are, on the fullest device.
    pub fullness: f64,
    pub details: T,
}

/// A strategy whose stages are cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Bounded {
    pub strategy: Strategy,
    /// Seconds that its step takes at least.
    pub step_s: f64,
    /// Of the fullest device, at least.
    pub fullness: f64,
}

/// The outcome of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Found<T> {
    /// What fits, the fastest first; but before all, what comes first in the space of those that are hardly slower.
    pub fitting: Vec<Judged<T>>,
    /// What does not fit, the least full first.
    pub too_large: Vec<Judged<T>>,
    /// What needs more memory than there is by its bound alone.
    pub surely_too_large: Vec<Bounded>,
    /// Strategies that cannot be among the wanted ones by their bounds alone.
    pub left_out: usize,
}

/// Looks at strategies, ever more closely and at ever more cost.
pub trait Judge {
    type Details;
    type Error;

    /// Seconds that a step takes at least, wherever stages are cut.
    fn least_step_s(&self, strategy: &Strategy) -> f64;

    /// The strategy with its stages cut, if the model can be cut so.
    fn cut(&self, strategy: Strategy) -> Option<Bounded>;

    fn judge(&mut self, strategy: Strategy) -> Result<Judged<Self::Details>, Self::Error>;
}

/// A strategy must be faster by more than this share than one that needs less: measurements are no better.
const MARGIN: f64 = 0.01;

/// Looks at strategies in the order of the seconds that their steps take at least, until no other can be among the `wanted` fastest
/// that fit.
pub fn search<J: Judge>(
    strategies: Vec<Strategy>,
    wanted: usize,
    judge: &mut J,
) -> Result<Found<J::Details>, J::Error> {
    let open = |(place, strategy): (usize, Strategy)| Open {
        least_step_s: judge.least_step_s(&strategy),
        place,
        is_cut: false,
        strategy,
    };
    let mut open: BinaryHeap<Reverse<Open>> = strategies.into_iter().enumerate().map(open).map(Reverse).collect();
    let mut fitting: Vec<(usize, Judged<J::Details>)> = Vec::new();
    let (mut too_large, mut surely_too_large) = (Vec::new(), Vec::new());
    while let Some(Reverse(Open { least_step_s, place, is_cut, strategy })) = open.pop() {
        if fitting.get(wanted - 1).is_some_and(|(_, worst)| worst.step_s * (1.0 + MARGIN) <= least_step_s) {
            open.push(Reverse(Open { least_step_s, place, is_cut, strategy }));
            break;
        }
        if !is_cut {
            match judge.cut(strategy) {
                None => {}
                Some(bounded) if bounded.fullness > 1.0 => surely_too_large.push(bounded),
                Some(Bounded { strategy, step_s, .. }) => {
                    let least_step_s = step_s.max(least_step_s);
                    open.push(Reverse(Open { least_step_s, place, is_cut: true, strategy }));
                }
            }
            continue;
        }
        let judged = judge.judge(strategy)?;
        if judged.fullness > 1.0 {
            too_large.push(judged);
            continue;
        }
        let is_before = |(other, it): &(usize, Judged<J::Details>)| (it.step_s, *other) <= (judged.step_s, place);
        fitting.insert(fitting.partition_point(is_before), (place, judged));
    }
    if let Some(best_s) = fitting.first().map(|(_, judged)| judged.step_s) {
        let hardly_slower = fitting.iter().take_while(|(_, judged)| judged.step_s <= best_s * (1.0 + MARGIN));
        let simplest = hardly_slower.enumerate().min_by_key(|(_, (place, _))| *place).map_or(0, |(index, _)| index);
        fitting[..=simplest].rotate_right(1);
    }
    too_large.sort_by(|a, b| a.fullness.total_cmp(&b.fullness));
    surely_too_large.sort_by(|a: &Bounded, b| a.fullness.total_cmp(&b.fullness));
    let fitting = fitting.into_iter().map(|(_, judged)| judged).collect();
    Ok(Found { fitting, too_large, surely_too_large, left_out: open.len() })
}

/// A strategy that was not judged yet. The one that may be the fastest comes first; of equals the first of the space.
struct Open {
    least_step_s: f64,
    place: usize,
    is_cut: bool,
    strategy: Strategy,
}

impl Ord for Open {
    fn cmp(&self, other: &Open) -> Ordering {
        self.least_step_s.total_cmp(&other.least_step_s).then(self.place.cmp(&other.place))
    }
}

impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Open) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Open {
    fn eq(&self, other: &Open) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Open {}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use evenkeel_model::Cut;

    use super::*;

    /// Strategies of 1, 2, … micro-batches.
    fn numbered(count: usize) -> Vec<Strategy> {
        (1..=count).map(|accumulate| Strategy { accumulate, ..Strategy::of(Cut::even(1)) }).collect()
    }

    /// Judges by two tables; bounds are so much of the truth.
    struct Tables<S: Fn(usize) -> f64, F: Fn(usize) -> f64> {
        step_s: S,
        fullness: F,
        bound: f64,
        judged: usize,
    }

    impl<S: Fn(usize) -> f64, F: Fn(usize) -> f64> Judge for Tables<S, F> {
        type Details = ();
        type Error = Infallible;

        fn least_step_s(&self, strategy: &Strategy) -> f64 {
            0.5 * self.bound * (self.step_s)(strategy.accumulate)
        }

        fn cut(&self, strategy: Strategy) -> Option<Bounded> {
            Some(Bounded { step_s: self.bound * (self.step_s)(strategy.accumulate), fullness: 0.0, strategy })
        }

        fn judge(&mut self, strategy: Strategy) -> Result<Judged<()>, Infallible> {
            self.judged += 1;
            let (step_s, fullness) = ((self.step_s)(strategy.accumulate), (self.fullness)(strategy.accumulate));
            Ok(Judged { strategy, step_s, fullness, details: () })
        }
    }

    #[test]
    fn the_fastest_are_found_and_what_cannot_be_faster_is_not_judged() {
        let step_s = |number: usize| ((number * 7) % 31) as f64 + 10.0;
        let fullness = |number: usize| if number.is_multiple_of(5) { number as f64 } else { 0.5 };
        for wanted in [1, 3] {
            let mut judge = Tables { step_s, fullness, bound: 0.5, judged: 0 };
            let Ok(found) = search(numbered(30), wanted, &mut judge);
            let fits = numbered(30).into_iter().map(|it| it.accumulate).filter(|it| !it.is_multiple_of(5));
            let mut expected: Vec<f64> = fits.map(step_s).collect();
            expected.sort_by(f64::total_cmp);
            let times: Vec<f64> = found.fitting.iter().take(wanted).map(|judged| judged.step_s).collect();
            assert_eq!(times, expected[..wanted]);
            assert_eq!(judge.judged + found.left_out, 30);
            assert!(found.left_out > 0, "the slowest need no look");
            assert!(found.too_large.windows(2).all(|pair| pair[0].fullness <= pair[1].fullness));
        }
    }

    #[test]
    fn what_is_hardly_faster_does_not_win_over_what_needs_less() {
        let step_s = |number: usize| [2.0, 1.009, 1.0, 1.001][number - 1];
        let Ok(found) = search(numbered(4), 4, &mut Tables { step_s, fullness: |_| 0.0, bound: 0.0, judged: 0 });
        let order: Vec<f64> = found.fitting.iter().map(|judged| judged.step_s).collect();
        assert_eq!(order, [1.009, 1.0, 1.001, 2.0]);
    }

    #[test]
    fn among_equals_the_first_of_the_space_wins() {
        let mut judge = Tables { step_s: |_| 1.0, fullness: |_| 1.0, bound: 0.0, judged: 0 };
        let Ok(found) = search(numbered(9), 9, &mut judge);
        let order: Vec<usize> = found.fitting.iter().map(|judged| judged.strategy.accumulate).collect();
        assert_eq!(order, (1..=9).collect::<Vec<_>>());
    }
}
