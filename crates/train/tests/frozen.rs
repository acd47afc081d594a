//! Training of some parameters while others are frozen: on every mesh as on one rank, by every rule, and through checkpoints and
//! reshards.

mod support;

use evenkeel_device::DType;
use evenkeel_model::{Cut, Model, ParamId, Parameters};
use evenkeel_train::{
    AdamW, MuonScale, OptimizerOptions, Progress, Ranks, Rule, StateKind, TrainerOptions, checkpoint, costs,
};
use support::{Strategy, compare_states, micros, spread, start_on};

/// The second layer is trained, but for its norms.
fn model() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": true,
    });
    let model = Model::from_json(&config).unwrap();
    model.training(|_, spec| spec.name.contains("layers.1") && !spec.is_vector())
}

fn rules() -> [Rule; 5] {
    let others = AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-3 };
    [
        Rule::AdamW(others),
        Rule::Sgd { momentum: 0.9, nesterov: true },
        Rule::Lion { beta1: 0.9, beta2: 0.99 },
        Rule::Adafactor,
        Rule::Muon { momentum: 0.95, nesterov: true, scale: MuonScale::MatchRmsAdamW, others },
    ]
}

fn options(rule: Rule) -> TrainerOptions {
    let optimizer = OptimizerOptions { rule, weight_decay: 0.1, decay_vectors: true, clip_norm: Some(0.5) };
    TrainerOptions { optimizer: Some(optimizer), label_smoothing: 0.0, longest: 64, dropout_seed: 0 }
}

fn ranks(strategy: &Strategy, rule: Rule, dtype: DType) -> Ranks {
    start_on(&model(), strategy, options(rule), move |shard, split, queue| {
        Parameters::random(shard, dtype, split, 7, queue)
    })
}

fn train(ranks: &Ranks, steps: std::ops::Range<usize>) {
    for step in steps {
        let outcome = ranks.step([micros(&model(), step), micros(&model(), step + 1)].concat(), 1e-3).unwrap();
        assert!(outcome.updated);
    }
}

fn weights(ranks: &Ranks) -> Vec<Vec<f32>> {
    let whole = |id: usize| ranks.read_rows(StateKind::Weight, ParamId(id), 0..ranks.specs()[id].whole[0]).unwrap();
    (0..ranks.specs().len()).map(whole).collect()
}

/// Training must change what is trained, and nothing else.
fn check_changes(what: &str, before: &[Vec<f32>], ranks: &Ranks) {
    for ((spec, before), now) in ranks.specs().iter().zip(before).zip(weights(ranks)) {
        assert_eq!(*before != now, spec.is_trained, "{what}: {}", spec.name);
    }
}

#[test]
fn every_rule_changes_what_is_trained_alone_and_on_every_mesh_alike() {
    for rule in rules() {
        let alone = ranks(&spread(1, 1, 0), rule, DType::F32);
        let before = weights(&alone);
        train(&alone, 0..3);
        check_changes("one rank", &before, &alone);
        for (dp, tp, zero) in [(1, 2, 0), (2, 1, 1), (2, 2, 2), (2, 2, 3)] {
            let what = format!("{rule:?}, dp {dp}, tp {tp}, ZeRO {zero}");
            let several = ranks(&spread(dp, tp, zero), rule, DType::F32);
            train(&several, 0..3);
            check_changes(&what, &before, &several);
            compare_states(&what, &several, &alone, 1e-5);
        }
    }
}

#[test]
fn frozen_parameters_in_bf16_are_kept_once_and_go_through_checkpoints_and_reshards() {
    let rule = rules()[0];
    let frozen: u64 = model().specs.iter().filter(|spec| !spec.is_trained).map(|spec| spec.len() as u64).sum();
    let cost = |model: &Model| {
        let strategy = Strategy { dtype: DType::Bf16, ..spread(1, 1, 0) };
        costs(std::slice::from_ref(model), &strategy, options(rule), &micros(model, 0))[0].state_bytes
    };
    // Master, two moments and gradient, four bytes each.
    let saved = cost(&model().training(|_, _| true)) - cost(&model());
    assert!(saved >= 15 * frozen, "{saved} bytes saved of {frozen} frozen parameters");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let first = ranks(&spread(2, 2, 3), rule, DType::Bf16);
    let before = weights(&first);
    train(&first, 0..2);
    check_changes("bf16", &before, &first);
    checkpoint::save(&path, &first, &Progress { step: 2, ..Progress::default() }, serde_json::Value::Null).unwrap();
    train(&first, 2..4);
    let second = ranks(&spread(1, 4, 0), rule, DType::Bf16);
    checkpoint::load(&path, &second).unwrap();
    check_changes("resumed", &before, &second);
    let uneven = Cut { split_sequence: true, ..Cut::weighted(vec![1.0, 2.0, 1.0, 2.0]) };
    let saved = weights(&second);
    second.reshard(uneven).unwrap();
    assert!(weights(&second) == saved, "a reshard changes nothing");
    train(&second, 2..4);
    compare_states("resumed on another mesh", &second, &first, 2e-2);
}
