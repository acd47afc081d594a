//! Steps as CUDA graphs have the bits of steps that are issued kernel by kernel.

mod support;

use evenkeel_device::{DType, Replays, cuda_attention_repeats, cudnn_report};
use evenkeel_model::{Cut, Model, Parameters, ZeroSharding};
use evenkeel_train::{OptimizerOptions, Samples, StateKind, Trainer, TrainerOptions, costs};
use serde_json::{Value, json};

/// With dropout everywhere, which is computed by our own kernels.
fn gpt2() -> Value {
    json!({
        "model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 128, "n_layer": 3, "n_head": 2,
        "attn_pdrop": 0.2, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
    })
}

/// Without dropout.
fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 256, "vocab_size": 300,
    })
}

/// Large enough that four ranks still leave attention to cuDNN, on sequences of [`LONG`] tokens.
fn wide_llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 300,
    })
}

const LONG: usize = 2048;

fn samples(lengths: &[usize], seed: u32) -> Samples {
    let tokens: usize = lengths.iter().sum();
    let ids: Vec<u32> = (0..tokens as u32).map(|i| (i * i + 31 * seed + i / 7) % 300).collect();
    let labels = ids.iter().map(|id| (id * 3 + 1) % 300).collect();
    Samples::Tokens { ids, labels, segment_lengths: lengths.to_vec() }
}

/// The micro-batches of a step: mostly two of one shape, their documents' borders elsewhere each time; now and then others.
fn micros(step: usize) -> Vec<Samples> {
    let seed = step as u32;
    match step {
        7 => vec![samples(&[64], seed)],
        11 => vec![samples(&[33, 20], seed), samples(&[7], seed), samples(&[64, 64], seed)],
        _ if step % 3 == 2 => vec![samples(&[40, 24, 32], seed), samples(&[16, 48, 32], seed + 1)],
        _ => vec![samples(&[32, 32, 32], seed), samples(&[32, 32, 32], seed + 1)],
    }
}

const STEPS: usize = 20;

/// Everything that steps with changing rates and evaluations between them come to.
#[derive(PartialEq)]
struct Outcome {
    steps: Vec<[u64; 2]>,
    evaluations: Vec<u64>,
    state: Vec<Vec<u32>>,
    peak_bytes: u64,
}

fn train(config: &Value, dtype: DType, graph: bool) -> (Outcome, Replays) {
    let device = support::device(1);
    device.replay_graphs(graph);
    let model = Model::from_json(config).unwrap().for_device(device.kind());
    let parameters = Parameters::random(&model, dtype, ZeroSharding::NONE, 7, device.compute());
    let mut trainer = Trainer::alone(model, device.clone(), parameters, options());
    let (mut steps, mut evaluations) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let outcome = trainer.step(&micros(step), 1e-3 * (1.0 + step as f64)).unwrap();
        steps.push([outcome.loss, outcome.grad_norm].map(f64::to_bits));
        if step % 4 == 1 {
            evaluations.push(trainer.evaluate(&samples(&[32, 32], 99)).loss().to_bits());
        }
    }
    let kinds = [StateKind::Weight, StateKind::Mean, StateKind::Variance];
    let kept = kinds.into_iter().flat_map(|kind| trainer.parameters.ids().map(move |id| (kind, id)));
    let state = kept.filter_map(|(kind, id)| Some(device.compute().read(&trainer.kept(kind, id)?.1)));
    let state = state.map(|values| values.into_iter().map(f32::to_bits).collect()).collect();
    let peak_bytes = device.usage().peak_bytes;
    (Outcome { steps, evaluations, state, peak_bytes }, device.replays())
}

fn options() -> TrainerOptions {
    TrainerOptions {
        // Below the gradients' norm, so that they are clipped.
        optimizer: Some(OptimizerOptions { clip_norm: Some(0.1), ..OptimizerOptions::default() }),
        label_smoothing: 0.0,
        longest: 64,
        dropout_seed: 5,
    }
}

#[test]
fn replayed_steps_have_the_bits_and_the_memory_of_single_launches() {
    for (name, config) in [("gpt2", gpt2()), ("llama", llama())] {
        for dtype in [DType::F32, DType::Bf16] {
            if name == "llama" && dtype == DType::Bf16 && !cuda_attention_repeats() && support::under_test::on_cuda() {
                println!("skipped: cuDNN's gradients differ each time; set EVENKEEL_CUDA_ATTENTION=repeatable");
                continue;
            }
            let ((alone, none), (replayed, replays)) = (train(&config, dtype, false), train(&config, dtype, true));
            println!("{name} in {dtype:?}: {replays:?}");
            assert_eq!(none.graphs, 0, "{none:?}");
            assert_eq!(replays.refusal, None);
            if support::under_test::on_cuda() {
                assert!(replays.commands_in_graphs > replays.commands_alone, "{name} in {dtype:?}: {replays:?}");
                assert!(replays.changed > 0, "{replays:?}");
            }
            assert_eq!(alone.steps, replayed.steps, "{name} in {dtype:?}: losses and norms");
            assert_eq!(alone.evaluations, replayed.evaluations, "{name} in {dtype:?}: evaluations");
            assert!(alone.state == replayed.state, "{name} in {dtype:?}: weights and moments differ");
            assert_eq!(alone.peak_bytes, replayed.peak_bytes, "{name} in {dtype:?}");
        }
    }
}

#[test]
fn a_step_of_graphs_takes_the_memory_that_was_foretold() {
    let device = support::device(1);
    let model = Model::from_json(&gpt2()).unwrap().for_device(device.kind());
    let micros = micros(0);
    let cost = costs(std::slice::from_ref(&model), &evenkeel_step::Strategy::alone(DType::Bf16), options(), &micros);
    let parameters = Parameters::random(&model, DType::Bf16, ZeroSharding::NONE, 7, device.compute());
    let mut trainer = Trainer::alone(model, device.clone(), parameters, options());
    device.reset_peak();
    for _ in 0..6 {
        trainer.step(&micros, 1e-3).unwrap();
    }
    assert_eq!(device.usage().peak_bytes, cost[0].peak_bytes);
}

/// Losses of a few steps on ranks that share every layer, and what became of each rank's commands.
fn train_ranks(tp: usize, graph: bool) -> (Vec<f64>, Vec<Replays>) {
    let cut = Cut { split_sequence: true, ..Cut::even(tp) };
    let options = TrainerOptions { longest: LONG, ..options() };
    let ranks = support::random(&Model::from_json(&wide_llama()).unwrap(), &cut, options, DType::Bf16);
    let ran = ranks.with_trainers(move |trainer| {
        trainer.device.replay_graphs(graph);
        let step = |step: u32| trainer.step(&[samples(&[LONG, LONG], step % 2)], 1e-3).unwrap().loss;
        let losses: Vec<f64> = (0..8).map(step).collect();
        (losses, trainer.device.replays())
    });
    let (losses, replays): (Vec<Vec<f64>>, Vec<Replays>) = ran.unwrap().into_iter().unzip();
    (losses.into_iter().next().unwrap(), replays)
}

/// Each rank has a thread and streams of its own, with `EVENKEEL_TEST_PARTS` a part of the GPU, too.
#[test]
fn ranks_that_share_a_card_replay_attention_by_cudnn() {
    if !support::under_test::on_cuda() || cuda_attention_repeats() || !matches!(cudnn_report().version, Some(Ok(_))) {
        println!("skipped: needs a card and cuDNN");
        return;
    }
    for tp in [2, 4] {
        let plans = cudnn_report().plans;
        let (alone, none) = train_ranks(tp, false);
        let (replayed, replays) = train_ranks(tp, true);
        assert!(cudnn_report().plans > plans, "attention was not cuDNN's: {}", cudnn_report());
        assert!(none.iter().all(|replays| replays.graphs == 0), "{none:?}");
        for replays in &replays {
            assert_eq!(replays.refusal, None, "tp {tp}");
            assert!(replays.graphs > 0, "tp {tp}: {replays:?}");
        }
        assert_eq!(alone.len(), replayed.len());
        for (step, (alone, replayed)) in alone.iter().zip(&replayed).enumerate() {
            // cuDNN adds up queries' gradients in another order each time.
            assert!((alone - replayed).abs() < 0.02 * alone, "tp {tp}, step {step}: {alone} against {replayed}");
        }
    }
}
