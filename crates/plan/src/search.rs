//! Finds the fastest strategies without looking at all of them: what cannot be faster than those found is left out.

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

/// The outcome of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Found<T> {
    /// What fits, the fastest first; but before all, what comes first in the space of those that are hardly slower.
    pub fitting: Vec<Judged<T>>,
    /// What does not fit, the least full first.
    pub too_large: Vec<Judged<T>>,
    /// Strategies that cannot be among the wanted ones by their bounds alone.
    pub left_out: usize,
}

/// A strategy must be faster by more than this share than one that needs less: measurements are no better.
const MARGIN: f64 = 0.01;

/// Judges strategies in the order of `bound_s`, seconds that their step takes at least, until no other can be among the `wanted`
/// fastest that fit.
pub fn search<T, E>(
    strategies: Vec<Strategy>,
    wanted: usize,
    bound_s: impl Fn(&Strategy) -> f64,
    mut judge: impl FnMut(Strategy) -> Result<Judged<T>, E>,
) -> Result<Found<T>, E> {
    let bounded = strategies.into_iter().enumerate().map(|(place, strategy)| (bound_s(&strategy), place, strategy));
    let mut bounded: Vec<(f64, usize, Strategy)> = bounded.collect();
    bounded.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut fitting: Vec<(usize, Judged<T>)> = Vec::new();
    let (mut too_large, mut left_out) = (Vec::new(), 0);
    for (bound_s, place, strategy) in bounded {
        if fitting.get(wanted - 1).is_some_and(|(_, worst)| worst.step_s * (1.0 + MARGIN) <= bound_s) {
            left_out += 1;
            continue;
        }
        let judged = judge(strategy)?;
        if judged.fullness > 1.0 {
            too_large.push(judged);
            continue;
        }
        let is_before = |(other, it): &(usize, Judged<T>)| (it.step_s, *other) <= (judged.step_s, place);
        fitting.insert(fitting.partition_point(is_before), (place, judged));
    }
    if let Some(best_s) = fitting.first().map(|(_, judged)| judged.step_s) {
        let hardly_slower = fitting.iter().take_while(|(_, judged)| judged.step_s <= best_s * (1.0 + MARGIN));
        let simplest = hardly_slower.enumerate().min_by_key(|(_, (place, _))| *place).map_or(0, |(index, _)| index);
        fitting[..=simplest].rotate_right(1);
    }
    too_large.sort_by(|a, b| a.fullness.total_cmp(&b.fullness));
    Ok(Found { fitting: fitting.into_iter().map(|(_, judged)| judged).collect(), too_large, left_out })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;

    use evenkeel_model::Cut;

    use super::*;

    /// Strategies of 1, 2, … micro-batches.
    fn numbered(count: usize) -> Vec<Strategy> {
        (1..=count).map(|accumulate| Strategy { accumulate, ..Strategy::of(Cut::even(1)) }).collect()
    }

    #[test]
    fn the_fastest_are_found_and_what_cannot_be_faster_is_not_judged() {
        // Bounds are half of the truth.
        let truth = |strategy: &Strategy| ((strategy.accumulate * 7) % 31) as f64 + 10.0;
        for wanted in [1, 3] {
            let judged = Cell::new(0);
            let judge = |strategy: Strategy| {
                judged.set(judged.get() + 1);
                let fullness = if strategy.accumulate.is_multiple_of(5) { strategy.accumulate as f64 } else { 0.5 };
                Ok::<_, Infallible>(Judged { step_s: truth(&strategy), fullness, details: (), strategy })
            };
            let Ok(found) = search(numbered(30), wanted, |strategy| 0.5 * truth(strategy), judge);
            let mut expected: Vec<f64> =
                numbered(30).iter().filter(|it| !it.accumulate.is_multiple_of(5)).map(truth).collect();
            expected.sort_by(f64::total_cmp);
            let times: Vec<f64> = found.fitting.iter().take(wanted).map(|judged| judged.step_s).collect();
            assert_eq!(times, expected[..wanted]);
            assert_eq!(judged.get() + found.left_out, 30);
            assert!(found.left_out > 0, "the slowest need no look");
            assert!(found.too_large.windows(2).all(|pair| pair[0].fullness <= pair[1].fullness));
        }
    }

    #[test]
    fn what_is_hardly_faster_does_not_win_over_what_needs_less() {
        let seconds = [2.0, 1.009, 1.0, 1.001];
        let judge = |strategy: Strategy| {
            let step_s = seconds[strategy.accumulate - 1];
            Ok::<_, Infallible>(Judged { strategy, step_s, fullness: 0.0, details: () })
        };
        let Ok(found) = search(numbered(4), 4, |_| 0.0, judge);
        let order: Vec<f64> = found.fitting.iter().map(|judged| judged.step_s).collect();
        assert_eq!(order, [1.009, 1.0, 1.001, 2.0]);
    }

    #[test]
    fn among_equals_the_first_of_the_space_wins() {
        let judge = |strategy| Ok::<_, Infallible>(Judged { strategy, step_s: 1.0, fullness: 1.0, details: () });
        let Ok(found) = search(numbered(9), 9, |_| 0.0, judge);
        let order: Vec<usize> = found.fitting.iter().map(|judged| judged.strategy.accumulate).collect();
        assert_eq!(order, (1..=9).collect::<Vec<_>>());
    }
}
