//! Emulated slow ranks, as a configuration names them.

use std::ops::RangeInclusive;

/// A rank whose kernels take `factor` times as long in some steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Straggler {
    pub rank: usize,
    pub factor: f64,
    pub steps: RangeInclusive<u64>,
}

/// Slower than this, a step takes hours.
const MOST: f64 = 1000.0;

impl Straggler {
    /// The steps of one for which nobody says any.
    pub const ALWAYS: RangeInclusive<u64> = 1..=u64::MAX;

    /// `RANK:FACTOR`, or `RANK:FACTOR@FIRST-LAST`, steps counted from 1.
    pub fn parse(text: &str) -> Result<Straggler, String> {
        let parsed = || {
            let (rank, rest) = text.split_once(':')?;
            let (factor, steps) = match rest.split_once('@') {
                Some((factor, steps)) => {
                    let (first, last) = steps.split_once('-')?;
                    (factor, first.parse().ok()?..=last.parse().ok()?)
                }
                None => (rest, Straggler::ALWAYS),
            };
            Some(Straggler { rank: rank.parse().ok()?, factor: factor.parse().ok()?, steps })
        };
        let is_sound = |straggler: &Straggler| (1.0..=MOST).contains(&straggler.factor) && !straggler.steps.is_empty();
        parsed().filter(is_sound).ok_or_else(|| {
            format!("`{text}` is no straggler, expected RANK:FACTOR or RANK:FACTOR@FIRST-LAST with a factor from 1 to {MOST}")
        })
    }

    /// By rank: the factor by which it is slower in a step, the largest if there are several.
    pub fn factors(stragglers: &[Straggler], ranks: usize, step: u64) -> Vec<f64> {
        let mut factors = vec![1.0f64; ranks];
        for straggler in stragglers.iter().filter(|straggler| straggler.steps.contains(&step)) {
            factors[straggler.rank] = factors[straggler.rank].max(straggler.factor);
        }
        factors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stragglers_are_read_and_nonsense_is_told() {
        let straggler = |rank, factor, steps| Straggler { rank, factor, steps };
        assert_eq!(Straggler::parse("1:2"), Ok(straggler(1, 2.0, 1..=u64::MAX)));
        assert_eq!(Straggler::parse("3:1.5@40-90"), Ok(straggler(3, 1.5, 40..=90)));
        for nonsense in ["", "1", "1:", "1:0.5", "1:nan", "x:2", "1:2@5", "1:2@9-5", "1:2@-", "-1:2", "1:1e9"] {
            let told = Straggler::parse(nonsense).expect_err(nonsense);
            assert!(told.starts_with(&format!("`{nonsense}` is no straggler")), "{told}");
        }
    }

    #[test]
    fn the_worst_that_is_said_of_a_rank_counts() {
        let stragglers = ["1:2@1-10", "1:3@5-6", "0:4@10-10"].map(|text| Straggler::parse(text).unwrap());
        let cases = [(1, [1.0, 2.0]), (5, [1.0, 3.0]), (10, [4.0, 2.0]), (11, [1.0, 1.0])];
        for (step, expected) in cases {
            assert_eq!(Straggler::factors(&stragglers, 2, step), expected, "step {step}");
        }
    }
}
