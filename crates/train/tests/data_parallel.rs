//! Training on shares of the data with split state, against one rank with the same global batch; and resuming elsewhere.

mod support;

use evenkeel_device::DType;
use evenkeel_model::{Cut, GRAIN, Model, Parameters};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, DEFAULT, NONE, OASES};
use evenkeel_step::{Pipeline, PipelineOrder};
use evenkeel_train::{OptimizerOptions, Progress, Ranks, Samples, StepOutcome, TrainerOptions, checkpoint, costs};
use support::{Strategy, compare_curves, spread, start_on, state, uneven_micros as micros};

const MICROS: usize = 4;
const STEPS: usize = 6;

fn model() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": true,
    });
    Model::from_json(&config).unwrap()
}

fn options() -> TrainerOptions {
    let optimizer = Some(OptimizerOptions { clip_norm: Some(0.5), ..OptimizerOptions::default() });
    TrainerOptions { optimizer, label_smoothing: 0.0, longest: 16, dropout_seed: 0 }
}

fn ranks(topology: &Strategy, arrangement: Arrangement, dtype: DType) -> Ranks {
    start_on(&model(), &topology.clone().arranged(arrangement), options(), move |shard, split, queue| {
        Parameters::random(shard, dtype, split, 7, queue)
    })
}

fn losses(ranks: &Ranks, steps: std::ops::Range<usize>) -> Vec<f64> {
    let step = |step| {
        let outcome = ranks.step(micros(step, MICROS), 1e-3).unwrap();
        assert!(outcome.updated);
        outcome.loss
    };
    steps.map(step).collect()
}

#[test]
fn every_mesh_stage_and_schedule_has_the_curve_of_the_single_rank() {
    let single = losses(&ranks(&spread(1, 1, 0), Arrangement::default(), DType::F32), 0..STEPS);
    assert!(single[STEPS - 1] < single[0], "{single:?}");
    let arrangements = [
        Arrangement::of(NONE),
        Arrangement::of(OASES).in_parts(2),
        Arrangement::of(DEFAULT),
        Arrangement::of(CROSS_PASS).in_parts(2).ahead(),
    ];
    let mut combinations = 0;
    for (dp, tp) in [(2, 1), (4, 1), (2, 2), (3, 2), (2, 4), (8, 1)] {
        for zero in 0..=3 {
            let arrangement = arrangements[combinations % arrangements.len()];
            let what = format!("dp {dp}, tp {tp}, stage {zero}, {arrangement:?}");
            let ours = losses(&ranks(&spread(dp, tp, zero), arrangement, DType::F32), 0..STEPS);
            compare_curves(&what, &ours, &single, [0.0, 1e-5]);
            combinations += 1;
        }
        // So that the next mesh meets the schedules in other stages.
        combinations += 1;
    }
}

#[test]
fn uneven_shards_are_split_like_others_and_bf16_keeps_f32_masters() {
    let single = losses(&ranks(&spread(1, 1, 0), Arrangement::default(), DType::F32), 0..STEPS);
    let uneven = |zero| Strategy { cut: Cut::weighted(vec![1.0, 2.0]), ..spread(2, 2, zero) };
    for zero in 0..=3 {
        let ours = losses(&ranks(&uneven(zero), Arrangement::default(), DType::F32), 0..STEPS);
        compare_curves(&format!("uneven, stage {zero}"), &ours, &single, [0.0, 1e-5]);
    }
    let bf16 = |topology: &Strategy| losses(&ranks(topology, Arrangement::default(), DType::Bf16), 0..STEPS);
    let whole = bf16(&spread(2, 1, 0));
    for zero in 1..=3 {
        compare_curves(&format!("bf16, stage {zero}"), &bf16(&spread(2, 1, zero)), &whole, [0.0, 1e-6]);
    }
}

#[test]
fn micro_batches_that_do_not_come_out_even_are_all_learnt_from() {
    let step = |topology: &Strategy| {
        let ranks = ranks(topology, Arrangement::default(), DType::F32);
        let outcomes = [3, 1].map(|count| ranks.step(micros(0, count), 1e-3).unwrap());
        outcomes.map(|outcome| (outcome.loss, outcome.grad_norm, outcome.tokens))
    };
    let single = step(&spread(1, 1, 0));
    for topology in [spread(2, 1, 0), spread(2, 1, 3), spread(4, 1, 2)] {
        for ((loss, norm, tokens), (expected_loss, expected_norm, expected_tokens)) in
            step(&topology).into_iter().zip(single)
        {
            compare_curves("loss and norm", &[loss, norm], &[expected_loss, expected_norm], [0.0, 1e-5]);
            assert_eq!(tokens, expected_tokens);
        }
    }
}

fn mixtral() -> serde_json::Value {
    serde_json::json!({
        "model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "initializer_range": 0.3,
    })
}

/// The outcomes of some steps of a random model.
fn outcomes(model: &Model, topology: &Strategy) -> [StepOutcome; 3] {
    let ranks = start_on(model, topology, options(), |shard, split, queue| {
        Parameters::random(shard, DType::F32, split, 7, queue)
    });
    [3, 1, 4].map(|count| ranks.step(micros(0, count), 1e-3).unwrap())
}

#[test]
fn the_load_of_experts_is_that_of_all_ranks() {
    let model = Model::from_json(&mixtral()).unwrap();
    let loads = |topology: Strategy| {
        outcomes(&model, &topology).map(|outcome| outcome.expert_load.map(|load| [load.largest, load.idle]).unwrap())
    };
    let single = loads(spread(1, 1, 0));
    assert!(single.iter().all(|[largest, idle]| (1.0..=2.0).contains(largest) && *idle < 0.25), "{single:?}");
    let staged = spread(1, 1, 0).in_stages(2, Pipeline { cuts: vec![3], order: PipelineOrder::OneForwardOneBackward });
    for topology in [spread(2, 1, 0), spread(1, 2, 0), staged] {
        compare_curves(&format!("{:?}", topology.mesh()), &loads(topology).concat(), &single.concat(), [0.0, 1e-6]);
    }
}

/// Also with replicas that have no micro-batch of their own.
#[test]
fn the_balance_among_experts_is_that_of_all_micro_batches() {
    let mut config = mixtral();
    config["output_router_logits"] = true.into();
    config["router_aux_loss_coef"] = 0.5.into();
    let model = Model::from_json(&config).unwrap();
    let steps = |topology: Strategy, arrangement| {
        let outcomes = outcomes(&model, &topology.arranged(arrangement));
        outcomes.map(|outcome| [outcome.loss, outcome.balance_loss.unwrap(), outcome.grad_norm]).concat()
    };
    let single = steps(spread(1, 1, 0), Arrangement::default());
    assert!(single.chunks(3).all(|step| step[1] > 2.0), "each token goes to two: {single:?}");
    for (topology, arrangement) in [
        (spread(2, 1, 0), Arrangement::default()),
        (spread(4, 1, 2), Arrangement::of(OASES).in_parts(2)),
        (spread(2, 2, 3), Arrangement::of(CROSS_PASS).in_parts(2).ahead()),
    ] {
        let what = format!("{:?}, {arrangement:?}", topology.mesh());
        compare_curves(&what, &steps(topology, arrangement), &single, [0.0, 1e-5]);
    }
}

#[test]
fn shares_of_other_numbers_of_documents_and_chunks_split_their_state_alike() {
    // So many classes that the head has 32 tokens at a time.
    const VOCABULARY: u32 = 1 << 18;
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 16, "vocab_size": VOCABULARY, "tie_word_embeddings": true,
    });
    let model = Model::from_json(&config).unwrap();
    let documents = |lengths: &[usize]| {
        let ids: Vec<u32> = (0..lengths.iter().sum::<usize>()).map(|i| i as u32 * 7919 % VOCABULARY).collect();
        Samples::Tokens { labels: ids.clone(), ids, segment_lengths: lengths.to_vec() }
    };
    // One chunk and one part against several of both.
    let micros = vec![documents(&[3]), documents(&[15; 6]), documents(&[12, 11, 10, 9]), documents(&[16; 4])];
    let found = |topology: &Strategy, arrangement: Arrangement| {
        let ranks = start_on(&model, &topology.clone().arranged(arrangement), options(), |shard, split, queue| {
            Parameters::random(shard, DType::F32, split, 7, queue)
        });
        let outcome = ranks.step(micros.clone(), 1e-3).unwrap();
        [outcome.loss, outcome.grad_norm]
    };
    let single = found(&spread(1, 1, 0), Arrangement::default());
    for (topology, arrangement) in [
        (spread(2, 1, 3), Arrangement::default()),
        (spread(2, 2, 3), Arrangement::of(OASES).in_parts(2)),
        (spread(2, 1, 2), Arrangement::of(NONE).in_parts(2).ahead()),
        (spread(4, 1, 3), Arrangement::of(CROSS_PASS).in_parts(4)),
    ] {
        let what = format!("{topology:?}, {arrangement:?}");
        compare_curves(&what, &found(&topology, arrangement), &single, [0.0, 1e-5]);
    }
}

#[test]
fn a_checkpoint_resumes_on_any_other_topology() {
    let uneven = Strategy { cut: Cut::weighted(vec![1.0, 2.0, 1.0]), ..spread(2, 3, 1) };
    let topologies = [
        spread(1, 1, 0),
        spread(2, 1, 1),
        spread(2, 2, 3),
        spread(4, 1, 2),
        spread(1, 4, 0),
        uneven,
        spread(3, 1, 3),
        spread(2, 2, 0),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    for (index, from) in topologies.iter().enumerate() {
        let to = &topologies[(index + 1) % topologies.len()];
        let what = format!("{from:?} to {to:?}");
        let before = ranks(from, Arrangement::default(), DType::F32);
        losses(&before, 0..3);
        checkpoint::save(&path, &before, &Progress { step: 3, ..Progress::default() }, serde_json::Value::Null)
            .unwrap();
        let after = ranks(to, Arrangement::of(OASES), DType::F32);
        let told = checkpoint::load(&path, &after).unwrap().strategy;
        assert_eq!(told.as_ref(), Some(from), "a checkpoint tells the strategy of the ranks that wrote it");
        assert_eq!(state(&before), state(&after), "{what}");
        compare_curves(&what, &losses(&after, 3..STEPS), &losses(&before, 3..STEPS), [0.0, 1e-5]);
        // On the same one, bit for bit.
        let same = ranks(from, Arrangement::default(), DType::F32);
        checkpoint::load(&path, &same).unwrap();
        losses(&same, 3..STEPS);
        assert_eq!(state(&before), state(&same), "{from:?} again");
    }
}

#[test]
fn state_takes_what_the_stage_leaves_of_it() {
    let (model, options) = (model(), options());
    let micros: Vec<Samples> = micros(0, 4);
    for dp in [2, 4] {
        for zero in 0..=3 {
            let strategy = Strategy { dtype: DType::Bf16, ..spread(dp, 1, zero) };
            let cost = costs(std::slice::from_ref(&model), &strategy, options, &micros)[0];
            let mut expected = 0;
            for bucket in &model.buckets {
                let part = (bucket.len / GRAIN).div_ceil(dp) * GRAIN;
                let is_split = bucket.summed_over.is_none() && !bucket.holds_vectors;
                let of =
                    |stage: usize| if zero >= stage && (is_split || stage == 1) { part } else { bucket.len } as u64;
                // Masters and two moments, gradients, and copies in bf16; vectors' masters are what is computed with.
                let (state, gradients, values) = (of(1), of(2), of(3));
                expected += match bucket.holds_vectors {
                    true => 4 * bucket.len as u64 + 8 * state + 4 * gradients,
                    false => 12 * state + 4 * gradients + 2 * values,
                };
            }
            // Scalars, tables and padding.
            let beside = cost.state_bytes - expected;
            assert!(beside < 16 << 10, "dp {dp}, stage {zero}: {} bytes, expected {expected}", cost.state_bytes);
        }
    }
}
