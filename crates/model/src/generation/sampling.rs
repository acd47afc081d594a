//! The choice of the next token among the logits, on the host.

use std::cmp::Ordering;

use evenkeel_random::mixed;

/// How a token is drawn: the logits are divided by the temperature, all but the `top_k` largest are dropped, then all
/// but the fewest whose probabilities reach `top_p` together.
///
/// The random number of a draw is a function of the seed, the sequence and the position, so a text does not depend on
/// how many others are generated beside it or when they end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 always takes the largest logit, the first of equals.
    pub temperature: f32,
    pub top_k: Option<usize>,
    pub top_p: f32,
    pub seed: u64,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("`{option}` is {found}, expected {expected}")]
pub struct SamplingError {
    pub option: &'static str,
    pub found: String,
    pub expected: &'static str,
}

/// A token and its weight in the draw.
type Candidate = (u32, f64);

impl Sampling {
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: 1.0, seed: 0 };

    pub fn check(&self) -> Result<(), SamplingError> {
        let bad = |option, found, expected| Err(SamplingError { option, found, expected });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return bad("temperature", self.temperature.to_string(), "a number that is not negative");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top_p", self.top_p.to_string(), "a number above 0 and at most 1");
        }
        if self.top_k == Some(0) {
            return bad("top_k", "0".to_owned(), "at least 1");
        }
        Ok(())
    }

    /// The token for `position` of a sequence, or `None` if no logit can be chosen: all are -∞, or one is NaN or ∞.
    pub fn choose(&self, logits: &[f32], sequence: usize, position: usize) -> Option<u32> {
        if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return None;
        }
        let (best, &largest) = logits.iter().enumerate().rev().max_by(|(_, a), (_, b)| compare(**a, **b))?;
        if largest == f32::NEG_INFINITY {
            return None;
        }
        if self.temperature == 0.0 {
            return Some(best as u32);
        }
        let weight = |logit: f32| ((logit as f64 - largest as f64) / self.temperature as f64).exp();
        let mut candidates: Vec<Candidate> = (0..).zip(logits.iter().map(|&logit| weight(logit))).collect();
        self.keep_top_k(&mut candidates);
        self.keep_top_p(&mut candidates);
        Some(draw(&candidates, uniform(self.seed, sequence as u64, position as u64)))
    }

    fn keep_top_k(&self, candidates: &mut Vec<Candidate>) {
        let Some(count) = self.top_k.filter(|&count| count < candidates.len()) else { return };
        candidates.select_nth_unstable_by(count, heavier);
        candidates.truncate(count);
        // The draw must not depend on the order that the selection leaves.
        candidates.sort_unstable_by_key(|(token, _)| *token);
    }

    fn keep_top_p(&self, candidates: &mut Vec<Candidate>) {
        if self.top_p >= 1.0 {
            return;
        }
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        // Tokens below this reach less than 1 - p together, so none of them is needed, and few are left to sort.
        let negligible = (1.0 - self.top_p as f64) * total / candidates.len() as f64;
        candidates.retain(|(_, weight)| *weight >= negligible);
        candidates.sort_unstable_by(heavier);
        let mut reached = 0.0;
        let enough = candidates.iter().position(|(_, weight)| {
            reached += weight;
            reached >= self.top_p as f64 * total
        });
        candidates.truncate(enough.map_or(candidates.len(), |last| last + 1));
    }
}

fn compare(a: f32, b: f32) -> Ordering {
    a.partial_cmp(&b).expect("no logit is NaN")
}

/// Heavier ones first, the first of equals before the others.
fn heavier(a: &Candidate, b: &Candidate) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn draw(candidates: &[Candidate], uniform: f64) -> u32 {
    let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
    let mut left = uniform * total;
    for &(token, weight) in candidates {
        left -= weight;
        if left < 0.0 {
            return token;
        }
    }
    // Rounding can leave a small remainder.
    candidates.iter().rev().find(|(_, weight)| *weight > 0.0).expect("the largest has weight one").0
}

/// A number in 0..1, with 53 bits.
fn uniform(seed: u64, sequence: u64, position: u64) -> f64 {
    let word = [sequence, position].into_iter().fold(mixed(seed), |word, counter| mixed(word ^ mixed(counter)));
    (word >> 11) as f64 / (1u64 << 53) as f64
}
