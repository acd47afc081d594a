//! Layouts that change while training goes on, against runs whose layout stays.

mod support;

use evenkeel_device::DType;
use evenkeel_model::{Cut, Dim, Model, Parameters, SHARES, Widths, widths_of};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, DEFAULT, NONE, OASES, SAVED_COMM};
use evenkeel_train::{OptimizerOptions, Ranks, Samples, TrainerOptions};
use support::{Strategy, compare_curves, spread, start_on, state};

const SEQUENCE: usize = 8;
const SAMPLES: usize = 4;

fn llama() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 64, "tie_word_embeddings": true,
    });
    Model::from_json(&config).unwrap()
}

fn gpt2() -> Model {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 64,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    });
    Model::from_json(&config).unwrap()
}

fn vit() -> Model {
    let config = serde_json::json!({
        "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "image_size": 8, "patch_size": 4, "num_channels": 3,
        "id2label": { "0": "a", "1": "b", "2": "c", "3": "d", "4": "e" },
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    });
    Model::from_json(&config).unwrap()
}

fn samples(model: &Model, step: usize) -> Samples {
    if let evenkeel_model::Input::Images { size, channels, .. } = model.config.input {
        let pixels = SAMPLES * channels * size * size;
        let pixel = |i: usize| ((i * 7 + step * 13) % 29) as f32 / 14.0 - 1.0;
        let labels = (0..SAMPLES).map(|i| ((i + step) % 5) as u32).collect();
        return Samples::Images { pixels: (0..pixels).map(pixel).collect(), labels };
    }
    let tokens = SAMPLES * SEQUENCE;
    let ids: Vec<u32> = (0..tokens).map(|i| ((i / 2 * 5 + step % 7 * 3) % 64) as u32).collect();
    let labels = (0..tokens).map(|i| ids[(i + 1) % tokens]).collect();
    Samples::Tokens { ids, labels, segment_lengths: vec![SEQUENCE; SAMPLES] }
}

fn start(model: &Model, topology: &Strategy, arrangement: Arrangement, dtype: DType) -> Ranks {
    let optimizer = Some(OptimizerOptions { clip_norm: Some(0.5), ..OptimizerOptions::default() });
    let options = TrainerOptions { optimizer, label_smoothing: 0.0, longest: SEQUENCE, dropout_seed: 3 };
    start_on(model, &topology.clone().arranged(arrangement), options, move |shard, split, queue| {
        Parameters::random(shard, dtype, split, 7, queue)
    })
}

/// Widths that follow these weights and none of the grains that a cut by weights prefers.
fn widths(model: &Model, weights: &[usize]) -> Widths {
    let total: usize = weights.iter().sum();
    let divided = |len: usize| -> Vec<usize> {
        let mut widths: Vec<usize> = weights.iter().map(|weight| len * weight / total).collect();
        let rest = len - widths.iter().sum::<usize>();
        *widths.last_mut().unwrap() += rest;
        widths
    };
    let whole = widths_of([&model.shard]);
    Widths::new(|dim| match dim {
        Dim::Heads => divided(whole.total(dim) / SHARES).into_iter().map(|groups| groups * SHARES).collect(),
        Dim::Tokens => weights.to_vec(),
        _ => divided(whole.total(dim)),
    })
}

fn uneven(model: &Model, cut: &Cut, weights: &[usize]) -> Cut {
    Cut { widths: Some(widths(model, weights)), ..cut.clone() }
}

/// The widths of one run after another: uneven, uneven the other way, and back.
fn tours(tp: usize) -> Vec<Vec<usize>> {
    match tp {
        2 => vec![vec![1, 2], vec![3, 1], vec![1, 1], vec![2, 3], vec![1, 1]],
        3 => vec![vec![1, 1, 2], vec![2, 1, 1], vec![1, 2, 1], vec![1, 1, 2], vec![1, 1, 1]],
        _ => vec![vec![2, 1, 1, 0], vec![1, 1, 1, 1], vec![0, 1, 1, 2], vec![1, 2, 1, 0], vec![1; 4]],
    }
}

fn curve(model: &Model, topology: &Strategy, arrangement: Arrangement, moves: &[Vec<usize>]) -> Vec<f64> {
    let ranks = start(model, topology, arrangement, DType::F32);
    let mut losses = Vec::new();
    for step in 0..2 * moves.len().max(5) {
        if step % 2 == 1
            && let Some(weights) = moves.get(step / 2)
        {
            ranks.reshard(uneven(model, &topology.cut, weights)).unwrap();
        }
        let outcome = ranks.step(vec![samples(model, step), samples(model, step + 1)], 3e-3).unwrap();
        assert!(outcome.updated);
        losses.push(outcome.loss);
    }
    losses
}

#[test]
fn a_curve_with_five_reshards_equals_the_one_without() {
    let arrangements = [
        Arrangement::of(NONE),
        Arrangement::of(DEFAULT),
        Arrangement::of(SAVED_COMM),
        Arrangement::of(CROSS_PASS).in_parts(2),
        Arrangement::of(OASES).in_parts(2).ahead(),
    ];
    let mut which = 0;
    for (name, model) in [("llama", llama()), ("gpt2", gpt2()), ("vit", vit())] {
        let meshes = [(1, 2, 0), (1, 3, 0), (1, 4, 0), (2, 2, 0), (2, 2, 3)];
        for topology in meshes.map(|(dp, tp, zero)| spread(dp, tp, zero)) {
            let arrangement = arrangements[which % arrangements.len()];
            which += 1;
            let tour = tours(topology.cut.weights.len());
            let expected = curve(&model, &topology, arrangement, &[]);
            let found = curve(&model, &topology, arrangement, &tour);
            assert!(expected.last() < expected.first(), "{name} learns: {expected:?}");
            compare_curves(&format!("{name}, {topology:?}, {arrangement:?}"), &found, &expected, [0.0, 1e-4]);
        }
    }
}

#[test]
fn weights_and_moments_arrive_bitwise_in_every_stage_and_dtype() {
    let model = llama();
    for (dp, tp, zero) in [(1, 2, 0), (1, 3, 0), (2, 2, 0), (2, 2, 1), (2, 2, 2), (2, 3, 3)] {
        for dtype in [DType::F32, DType::Bf16] {
            let topology = spread(dp, tp, zero);
            let ranks = start(&model, &topology, Arrangement::default(), dtype);
            let step = |number| ranks.step(vec![samples(&model, number); dp], 3e-3).unwrap().loss;
            step(0);
            let before = state(&ranks);
            for weights in tours(tp) {
                ranks.reshard(uneven(&model, &topology.cut, &weights)).unwrap();
                assert!(state(&ranks) == before, "dp {dp}, tp {tp}, stage {zero}, {dtype:?}, {weights:?}");
            }
            let moved = step(1);
            let stayed = {
                let ranks = start(&model, &topology, Arrangement::default(), dtype);
                ranks.step(vec![samples(&model, 0); dp], 3e-3).unwrap();
                ranks.reshard(uneven(&model, &topology.cut, &vec![1; tp])).unwrap();
                ranks.step(vec![samples(&model, 1); dp], 3e-3).unwrap().loss
            };
            assert_eq!(moved, stayed, "the same layout gives the same bits, however it came about");
        }
    }
}
