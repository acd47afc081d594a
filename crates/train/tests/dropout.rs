//! Dropout from step to step: every step drops others, evaluations nothing, and the seed decides.

mod support;

use evenkeel_device::DType;
use evenkeel_model::{Cut, Model, Parameters};
use evenkeel_step::schedule::Arrangement;
use evenkeel_train::{OptimizerOptions, Ranks, Samples, TrainerOptions};
use support::{Strategy, start_on};

/// So many shares of the data, each on the shards of a cut.
fn ranks(attention_dropout: f64, dp: usize, cut: &Cut, parts: usize, dropout_seed: u64) -> Ranks {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 50, "initializer_range": 0.2,
        "attention_dropout": attention_dropout,
    });
    let optimizer = Some(OptimizerOptions::default());
    let options = TrainerOptions { optimizer, label_smoothing: 0.0, longest: 16, dropout_seed };
    let strategy = Strategy { dp, ..Strategy::of(cut.clone()).arranged(Arrangement::default().in_parts(parts)) };
    start_on(&Model::from_json(&config).unwrap(), &strategy, options, |shard, split, queue| {
        Parameters::random(shard, DType::F32, split, 7, queue)
    })
}

fn samples() -> Samples {
    let ids: Vec<u32> = (0..48).map(|i| i * i % 50).collect();
    let labels = ids.iter().map(|id| (id + 1) % 50).collect();
    Samples::Tokens { ids, labels, segment_lengths: vec![16; 3] }
}

/// The losses of steps on the same two micro-batches, with weights that stay as they are.
fn losses(ranks: &Ranks, steps: usize) -> Vec<f64> {
    (0..steps).map(|_| ranks.step(vec![samples(), samples()], 0.0).unwrap().loss).collect()
}

#[test]
fn every_step_drops_others_and_the_seed_decides_which() {
    let [first, again, other] = [1, 1, 2].map(|seed| losses(&ranks(0.4, 1, &Cut::even(1), 1, seed), 3));
    assert!(first[0] != first[1] && first[1] != first[2], "{first:?}");
    assert_eq!(first, again);
    assert!(first.iter().zip(&other).all(|(first, other)| first != other), "{first:?} {other:?}");
    let plain = losses(&ranks(0.0, 1, &Cut::even(1), 1, 1), 2);
    assert_eq!(plain[0], plain[1]);
    // Two micro-batches that drop the same have the mean of one.
    let one = ranks(0.4, 1, &Cut::even(1), 1, 1).step(vec![samples()], 0.0).unwrap().loss;
    assert_ne!(one, first[0]);
}

#[test]
fn ranks_and_parts_change_nothing_of_it() {
    let whole = losses(&ranks(0.4, 1, &Cut::even(1), 1, 3), 3);
    for (dp, shards, split_sequence, parts) in
        [(1, 1, false, 3), (1, 2, false, 2), (1, 2, true, 1), (1, 4, true, 2), (2, 1, false, 1), (2, 2, true, 2)]
    {
        let cut = Cut { split_sequence, ..Cut::even(shards) };
        let ours = losses(&ranks(0.4, dp, &cut, parts, 3), 3);
        support::compare_curves(&format!("{dp} shares, {cut:?} in {parts} parts"), &ours, &whole, [1e-5, 0.0]);
    }
}

#[test]
fn evaluations_drop_nothing() {
    let [dropping, plain] = [0.4, 0.0].map(|share| ranks(share, 1, &Cut::even(1), 1, 1));
    let evaluate = |ranks: &Ranks| ranks.evaluate(samples()).unwrap().loss();
    let before = evaluate(&dropping);
    assert_eq!(before, evaluate(&plain));
    losses(&dropping, 1);
    assert_eq!(evaluate(&dropping), before);
}
