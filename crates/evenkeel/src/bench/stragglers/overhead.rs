//! The cost of watching the ranks if none of them is slow, and of deciding for many.

use std::time::Instant;

use evenkeel_balance::{Class, Mode, Observation, Widths};
use evenkeel_model::{Cut, Model};
use evenkeel_step::Mesh;
use evenkeel_train::Balance;

use super::{Arguments, WARM_UP};
use crate::Failure;
use crate::bench::median;
use crate::launch::Launch;

/// Steps with a simulated straggler, in which decisions are made.
const DECIDING_STEPS: u64 = 60;
const DECIDING_RANKS: usize = 64;

/// Steps with and without watching take turns, so that changes of the machine's speed affect both.
pub fn run(arguments: &Arguments, model: &Model) -> Result<String, Failure> {
    let launch = Launch::from(arguments.subject.strategy(arguments.tp));
    let shards = model.cut(&launch.strategy.cut)?;
    let options = arguments.balance(Mode::Auto);
    let mut balance = Balance::new(options, model, &launch.strategy.cut, &shards, launch.strategy.mesh());
    let ranks = arguments.start(&launch, shards)?;
    balance.start(&ranks)?;
    let (mut plain_s, mut watched_s) = (Vec::new(), Vec::new());
    for turn in 0..WARM_UP + arguments.steps {
        // Neither is always the first of the two.
        for is_watched in [turn % 2 == 0, turn % 2 == 1] {
            let samples = arguments.subject.samples(turn as u64);
            let start = Instant::now();
            if is_watched {
                let (_, observed) = ranks.observed_step(samples, 1e-4)?;
                // Decisions about noise are not carried out, so that steps with and without watching stay alike.
                balance.simulate_step(turn as u64 + 1, start.elapsed().as_secs_f64(), &observed);
                watched_s.push(start.elapsed().as_secs_f64());
            } else {
                ranks.step(samples, 1e-4)?;
                plain_s.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let share = overhead(&plain_s[WARM_UP..], &watched_s[WARM_UP..]);
    let [plain_s, watched_s] = [plain_s, watched_s].map(|times| median(times[WARM_UP..].iter().copied()));
    let decision_s = slowest_decision(arguments)?;
    if arguments.json {
        let result = serde_json::json!({
            "what": arguments.title(arguments.tp), "plain_s": plain_s, "watched_s": watched_s, "overhead": share,
            "decision_ranks": DECIDING_RANKS, "decision_s": decision_s,
        });
        return Ok(result.to_string());
    }
    Ok(format!(
        "{}, tp {}, {} steps each in turn: {:.3} ms alone, {:.3} ms watched, {:+.2} % by pairs\n\
         the slowest of {DECIDING_STEPS} decisions for {DECIDING_RANKS} ranks, one of which is slow: {:.0} µs",
        arguments.subject.describe(),
        arguments.tp,
        arguments.steps,
        1e3 * plain_s,
        1e3 * watched_s,
        100.0 * share,
        1e6 * decision_s,
    ))
}

/// The typical excess of a watched step over the plain one of the same turn, as a share of the latter.
fn overhead(plain_s: &[f64], watched_s: &[f64]) -> f64 {
    let ratios = watched_s.iter().zip(plain_s).map(|(watched_s, plain_s)| watched_s / plain_s);
    median(ratios) - 1.0
}

/// For ranks that share a Llama in which everything can be moved.
fn slowest_decision(arguments: &Arguments) -> Result<f64, Failure> {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": DECIDING_RANKS,
        "num_key_value_heads": DECIDING_RANKS, "intermediate_size": 28672, "vocab_size": 128256,
        "tie_word_embeddings": false,
    });
    let model = Model::from_json(&config)?;
    let cut = Cut { split_sequence: true, ..Cut::even(DECIDING_RANKS) };
    let (shards, mesh) = (model.cut(&cut)?, Mesh::of_shards(DECIDING_RANKS));
    let mut balance = Balance::new(arguments.balance(Mode::Auto), &model, &cut, &shards, mesh);
    let even = balance.target().work.clone();
    let mut slowest_s = 0.0f64;
    for step in 1..=DECIDING_STEPS {
        let observed: Vec<Observation> = (0..DECIDING_RANKS)
            .map(|rank| {
                let slowness = if rank == 17 { 4.0 } else { 1.0 };
                let seconds = |class: Class| {
                    let width = |division: &Widths| division.of(class.dim())[rank] as f64;
                    slowness * 0.01 * width(&balance.target().work) / width(&even).max(1.0)
                };
                Observation { compute_s: Class::ALL.map(seconds), ..Observation::default() }
            })
            .collect();
        let start = Instant::now();
        balance.simulate_step(step, 0.1, &observed);
        slowest_s = slowest_s.max(start.elapsed().as_secs_f64());
    }
    Ok(slowest_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overhead_is_that_of_pairs_and_one_that_was_disturbed_does_not_count() {
        // The machine halves its speed meanwhile, and others use it in the last turn.
        let plain_s = [1.0, 1.0, 2.0, 2.0, 2.0];
        let watched_s = [1.25, 1.25, 2.5, 2.5, 90.0];
        assert_eq!(overhead(&plain_s, &watched_s), 0.25);
        assert_eq!(overhead(&watched_s[..3], &plain_s[..3]), 0.8 - 1.0);
    }
}
