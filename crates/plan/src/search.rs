//! Finds the fastest strategies without looking at all of them: what cannot be faster than those found is left out.

use evenkeel_step::Strategy;

/// What became of a strategy.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict<T> {
    /// Its step takes so long.
    Fits { step_s: f64, details: T },
    /// Some device would need so many times the memory that it has.
    TooLarge { fullness: f64 },
}

/// The outcome of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Found<T> {
    /// What fits, the fastest first. Among equals the one that comes first in the space.
    pub fitting: Vec<(Strategy, f64, T)>,
    /// What does not fit, the least full first.
    pub too_large: Vec<(Strategy, f64)>,
    /// Strategies that cannot be among the wanted ones by their bounds alone.
    pub left_out: usize,
}

/// Judges strategies in the order of `bound_s`, seconds that their step takes at least, until no other can be among the `wanted`
/// fastest.
pub fn search<T, E>(
    strategies: Vec<Strategy>,
    wanted: usize,
    bound_s: impl Fn(&Strategy) -> f64,
    mut judge: impl FnMut(&Strategy) -> Result<Verdict<T>, E>,
) -> Result<Found<T>, E> {
    let mut bounded: Vec<(f64, usize, Strategy)> = Vec::new();
    for (place, strategy) in strategies.into_iter().enumerate() {
        bounded.push((bound_s(&strategy), place, strategy));
    }
    bounded.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut fitting: Vec<(f64, usize, Strategy, T)> = Vec::new();
    let (mut too_large, mut left_out) = (Vec::new(), 0);
    for (bound_s, place, strategy) in bounded {
        if fitting.len() >= wanted && fitting[wanted - 1].0 <= bound_s {
            left_out += 1;
            continue;
        }
        match judge(&strategy)? {
            Verdict::TooLarge { fullness } => too_large.push((strategy, fullness)),
            Verdict::Fits { step_s, details } => {
                let behind = fitting.partition_point(|other| (other.0, other.1) <= (step_s, place));
                fitting.insert(behind, (step_s, place, strategy, details));
            }
        }
    }
    too_large.sort_by(|a, b| a.1.total_cmp(&b.1));
    let fitting = fitting.into_iter().map(|(step_s, _, strategy, details)| (strategy, step_s, details)).collect();
    Ok(Found { fitting, too_large, left_out })
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
            let judge = |strategy: &Strategy| {
                judged.set(judged.get() + 1);
                Ok::<_, Infallible>(match strategy.accumulate % 5 {
                    0 => Verdict::TooLarge { fullness: strategy.accumulate as f64 },
                    _ => Verdict::Fits { step_s: truth(strategy), details: () },
                })
            };
            let Ok(found) = search(numbered(30), wanted, |strategy| 0.5 * truth(strategy), judge);
            let mut expected: Vec<f64> = numbered(30).iter().filter(|it| it.accumulate % 5 != 0).map(truth).collect();
            expected.sort_by(f64::total_cmp);
            let times: Vec<f64> = found.fitting.iter().take(wanted).map(|(_, step_s, _)| *step_s).collect();
            assert_eq!(times, expected[..wanted]);
            assert_eq!(judged.get() + found.left_out, 30);
            assert!(found.left_out > 0, "the slowest need no look");
            assert!(found.too_large.windows(2).all(|pair| pair[0].1 <= pair[1].1));
        }
    }

    #[test]
    fn among_equals_the_first_of_the_space_wins() {
        let judge = |_: &Strategy| Ok::<_, Infallible>(Verdict::Fits { step_s: 1.0, details: () });
        let Ok(found) = search(numbered(9), 9, |_| 0.0, judge);
        let order: Vec<usize> = found.fitting.iter().map(|(strategy, ..)| strategy.accumulate).collect();
        assert_eq!(order, (1..=9).collect::<Vec<_>>());
    }
}
