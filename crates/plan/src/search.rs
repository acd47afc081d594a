//! Finds the fastest strategies without looking at all of them: what cannot be faster than those found is left out.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use evenkeel_step::Strategy;

/// What a strategy takes at least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Least {
    pub step_s: f64,
    /// Of the fullest device.
    pub fullness: f64,
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

/// A strategy whose step was foretold.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed<T> {
    pub strategy: Strategy,
    pub step_s: f64,
    /// What is known about its step beside that.
    pub timing: T,
}

/// A strategy whose memory is known, too.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged<T, M> {
    pub timed: Timed<T>,
    /// Bytes needed over bytes there are, on the fullest device.
    pub fullness: f64,
    /// What is known about its memory beside that.
    pub memory: M,
}

/// Whether a strategy fits.
pub enum Fit<M> {
    /// Bytes needed over bytes there are, on the fullest device.
    Known { fullness: f64, memory: M },
    /// It would with other stages.
    Recut(Box<Strategy>),
}

/// The outcome of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Found<T, M> {
    /// What fits, the fastest first; but before all, what comes first in the space of those that are hardly slower.
    pub fitting: Vec<Judged<T, M>>,
    /// What does not fit, the least full first.
    pub too_large: Vec<Judged<T, M>>,
    /// What needs more memory than there is by its bound alone. Its stages may not be cut yet, and its time is not known.
    pub surely_too_large: Vec<(Strategy, Least)>,
    /// What is too slow to be among the wanted ones, whether it fits or not, the fastest first.
    pub too_slow: Vec<Timed<T>>,
    /// Strategies that cannot be among the wanted ones by their bounds alone, and the seconds that these say, the least first.
    pub left_out: Vec<(Strategy, f64)>,
}

/// Looks at strategies, ever more closely and at ever more cost.
pub trait Judge {
    type Timing;
    type Memory;
    type Error;

    /// What a step takes at least, wherever stages are cut. What needs more memory than there is may have any time.
    fn least(&self, strategy: &Strategy) -> Least;

    /// The strategy with its stages cut.
    fn cut(&self, strategy: Strategy) -> Bounded;

    /// The time of its step.
    fn time(&mut self, strategy: Strategy) -> Result<Timed<Self::Timing>, Self::Error>;

    /// Strategies that are slower and need less memory: only what does not fit is worth them.
    fn leaner(&self, strategy: &Strategy) -> Vec<Strategy>;

    /// Whether it fits in memory.
    fn fit(&mut self, strategy: &Strategy) -> Result<Fit<Self::Memory>, Self::Error>;
}

/// A strategy must be faster by more than this share than one that needs less: measurements are no better.
const MARGIN: f64 = 0.01;

/// A strategy that fits, and its place in the space.
type Placed<J> = (usize, Judged<<J as Judge>::Timing, <J as Judge>::Memory>);

/// Looks at strategies in the order of the seconds that their steps take, at least by what is known so far, until no other can be
/// among the `wanted` fastest that fit.
pub fn search<J: Judge>(
    strategies: Vec<Strategy>,
    wanted: usize,
    judge: &mut J,
) -> Result<Found<J::Timing, J::Memory>, J::Error> {
    let mut open: BinaryHeap<Reverse<Open<J::Timing>>> = BinaryHeap::new();
    let mut fitting: Vec<Placed<J>> = Vec::new();
    let (mut too_large, mut surely_too_large) = (Vec::new(), Vec::new());
    let mut new: VecDeque<(usize, Strategy)> = strategies.into_iter().enumerate().collect();
    loop {
        while let Some((place, strategy)) = new.pop_front() {
            match judge.least(&strategy) {
                least if least.fullness > 1.0 => {
                    new.extend(judge.leaner(&strategy).into_iter().map(|leaner| (place, leaner)));
                    surely_too_large.push((strategy, least));
                }
                Least { step_s, .. } => {
                    open.push(Reverse(Open { least_step_s: step_s, place, known: Known::Uncut(strategy) }))
                }
            }
        }
        let Some(Reverse(Open { least_step_s, place, known })) = open.pop() else { break };
        let step_s = |index: usize| fitting.get(index).map(|(_, judged)| judged.timed.step_s);
        if step_s(wanted - 1).zip(step_s(0)).is_some_and(|(last_s, best_s)| {
            // What is hardly slower than the best may come before it.
            least_step_s >= last_s.max(best_s * (1.0 + MARGIN))
        }) {
            open.push(Reverse(Open { least_step_s, place, known }));
            break;
        }
        let (least_step_s, known) = match known {
            Known::Uncut(strategy) => match judge.cut(strategy) {
                Bounded { strategy, step_s, fullness } if fullness > 1.0 => {
                    new.extend(judge.leaner(&strategy).into_iter().map(|leaner| (place, leaner)));
                    surely_too_large.push((strategy, Least { step_s, fullness }));
                    continue;
                }
                Bounded { strategy, step_s, .. } => (step_s.max(least_step_s), Known::Cut(strategy)),
            },
            Known::Cut(strategy) => {
                let timed = judge.time(strategy)?;
                (timed.step_s, Known::Timed(timed))
            }
            Known::Timed(timed) => match judge.fit(&timed.strategy)? {
                Fit::Recut(strategy) => {
                    new.extend(judge.leaner(&timed.strategy).into_iter().map(|leaner| (place, leaner)));
                    (timed.step_s, Known::Cut(*strategy))
                }
                Fit::Known { fullness, memory } => {
                    let judged = Judged { timed, fullness, memory };
                    if fullness > 1.0 {
                        new.extend(judge.leaner(&judged.timed.strategy).into_iter().map(|leaner| (place, leaner)));
                        too_large.push(judged)
                    } else {
                        // Steps that were run may take less than their bounds.
                        let is_faster = |other: &Placed<J>| other.1.timed.step_s <= judged.timed.step_s;
                        let at = fitting.partition_point(is_faster);
                        fitting.insert(at, (place, judged))
                    }
                    continue;
                }
            },
        };
        open.push(Reverse(Open { least_step_s, place, known }));
    }
    if let Some(best_s) = fitting.first().map(|(_, judged)| judged.timed.step_s) {
        let hardly_slower = fitting.iter().take_while(|(_, judged)| judged.timed.step_s <= best_s * (1.0 + MARGIN));
        let simplest = hardly_slower.enumerate().min_by_key(|(_, (place, _))| *place).map_or(0, |(index, _)| index);
        fitting[..=simplest].rotate_right(1);
    }
    too_large.sort_by(|a, b| a.fullness.total_cmp(&b.fullness));
    surely_too_large.sort_by(|(_, a), (_, b)| a.fullness.total_cmp(&b.fullness));
    let fitting = fitting.into_iter().map(|(_, judged)| judged).collect();
    let (mut too_slow, mut left_out) = (Vec::new(), Vec::new());
    for Reverse(open) in open.into_sorted_vec().into_iter().rev() {
        match open.known {
            Known::Timed(timed) => too_slow.push(timed),
            Known::Uncut(strategy) | Known::Cut(strategy) => left_out.push((strategy, open.least_step_s)),
        }
    }
    Ok(Found { fitting, too_large, surely_too_large, too_slow, left_out })
}

/// A strategy that may be among the fastest. The one that may be the fastest comes first; of equals the first of the space.
struct Open<T> {
    least_step_s: f64,
    place: usize,
    known: Known<T>,
}

/// How much is known about a strategy.
enum Known<T> {
    Uncut(Strategy),
    Cut(Strategy),
    Timed(Timed<T>),
}

impl<T> Ord for Open<T> {
    fn cmp(&self, other: &Open<T>) -> Ordering {
        self.least_step_s.total_cmp(&other.least_step_s).then(self.place.cmp(&other.place))
    }
}

impl<T> PartialOrd for Open<T> {
    fn partial_cmp(&self, other: &Open<T>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Open<T> {
    fn eq(&self, other: &Open<T>) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T> Eq for Open<T> {}

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
        /// A number, and the one of its leaner strategy.
        leaner: Vec<(usize, usize)>,
        timed: usize,
        fitted: usize,
    }

    impl<S: Fn(usize) -> f64, F: Fn(usize) -> f64> Judge for Tables<S, F> {
        type Timing = ();
        type Memory = ();
        type Error = Infallible;

        fn least(&self, strategy: &Strategy) -> Least {
            Least { step_s: 0.5 * self.bound * (self.step_s)(strategy.accumulate), fullness: 0.0 }
        }

        fn cut(&self, strategy: Strategy) -> Bounded {
            Bounded { step_s: self.bound * (self.step_s)(strategy.accumulate), fullness: 0.0, strategy }
        }

        fn time(&mut self, strategy: Strategy) -> Result<Timed<()>, Infallible> {
            self.timed += 1;
            Ok(Timed { step_s: (self.step_s)(strategy.accumulate), strategy, timing: () })
        }

        fn leaner(&self, strategy: &Strategy) -> Vec<Strategy> {
            self.leaner
                .iter()
                .filter(|(of, _)| *of == strategy.accumulate)
                .flat_map(|(_, leaner)| numbered(*leaner).pop())
                .collect()
        }

        fn fit(&mut self, strategy: &Strategy) -> Result<Fit<()>, Infallible> {
            self.fitted += 1;
            Ok(Fit::Known { fullness: (self.fullness)(strategy.accumulate), memory: () })
        }
    }

    impl<S: Fn(usize) -> f64, F: Fn(usize) -> f64> Tables<S, F> {
        fn new(step_s: S, fullness: F, bound: f64) -> Tables<S, F> {
            Tables { step_s, fullness, bound, leaner: Vec::new(), timed: 0, fitted: 0 }
        }
    }

    #[test]
    fn the_fastest_are_found_and_what_cannot_be_faster_is_not_judged() {
        let step_s = |number: usize| ((number * 7) % 31) as f64 + 10.0;
        let fullness = |number: usize| if number.is_multiple_of(5) { number as f64 } else { 0.5 };
        for wanted in [1, 3] {
            let mut judge = Tables::new(step_s, fullness, 0.5);
            let Ok(found) = search(numbered(30), wanted, &mut judge);
            let fits = numbered(30).into_iter().map(|it| it.accumulate).filter(|it| !it.is_multiple_of(5));
            let mut expected: Vec<f64> = fits.map(step_s).collect();
            expected.sort_by(f64::total_cmp);
            let times: Vec<f64> = found.fitting.iter().take(wanted).map(|judged| judged.timed.step_s).collect();
            assert_eq!(times, expected[..wanted]);
            assert_eq!(found.fitting.len() + found.too_large.len(), judge.fitted);
            assert_eq!(judge.fitted + found.too_slow.len(), judge.timed);
            assert_eq!(judge.timed + found.left_out.len(), 30);
            assert!(found.too_slow.is_sorted_by(|a, b| a.step_s <= b.step_s));
            assert!(judge.timed < 30, "the slowest need no look");
            assert!(judge.fitted < judge.timed, "only the fastest need memory");
            assert!(found.too_large.windows(2).all(|pair| pair[0].fullness <= pair[1].fullness));
        }
    }

    #[test]
    fn what_is_hardly_faster_does_not_win_over_what_needs_less() {
        let step_s = |number: usize| [2.0, 1.009, 1.0, 1.001][number - 1];
        let Ok(found) = search(numbered(4), 4, &mut Tables::new(step_s, |_| 0.0, 0.0));
        let order: Vec<f64> = found.fitting.iter().map(|judged| judged.timed.step_s).collect();
        assert_eq!(order, [1.009, 1.0, 1.001, 2.0]);
    }

    #[test]
    fn what_needs_less_is_looked_at_if_something_does_not_fit() {
        for (fullness, fastest) in [(0.9, 1), (1.1, 4)] {
            let mut judge = Tables::new(
                |number| [1.0, 9.0, 8.0, 3.0][number - 1],
                |number| if number == 1 { fullness } else { 0.0 },
                0.5,
            );
            judge.leaner = vec![(1, 4), (2, 4)];
            let Ok(found) = search(numbered(3), 1, &mut judge);
            assert_eq!(found.fitting[0].timed.strategy.accumulate, fastest);
        }
    }

    #[test]
    fn among_equals_the_first_of_the_space_wins() {
        let mut judge = Tables::new(|_| 1.0, |_| 1.0, 0.0);
        let Ok(found) = search(numbered(9), 9, &mut judge);
        let order: Vec<usize> = found.fitting.iter().map(|judged| judged.timed.strategy.accumulate).collect();
        assert_eq!(order, (1..=9).collect::<Vec<_>>());
    }
}
