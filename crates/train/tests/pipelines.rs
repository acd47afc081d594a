//! Training in stages, against one rank with the same global batch; and resuming on other numbers of stages.

mod support;

use std::time::Duration;

use evenkeel_comm::Link;
use evenkeel_device::{DType, DeviceKind};
use evenkeel_model::{AdapterConfig, Cut, Model, Parameters};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, NONE, OASES};
use evenkeel_step::simulate::Contention;
use evenkeel_step::{Pipeline, PipelineOrder};
use evenkeel_train::{
    AdamW, Machine, MuonScale, OptimizerOptions, Progress, Ranks, Rule, Samples, TrainerOptions, checkpoint, costs,
    staging,
};
use support::{Strategy, compare_curves, compare_states, spread, start_on, state, uneven_micros};

const STEPS: usize = 5;
const MICROS: usize = 4;

fn model(tied: bool) -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": tied,
        "attention_dropout": 0.1,
    });
    Model::from_json(&config).unwrap()
}

fn options(rule: Rule) -> TrainerOptions {
    let optimizer = Some(OptimizerOptions { rule, clip_norm: Some(0.5), ..OptimizerOptions::default() });
    TrainerOptions { optimizer, label_smoothing: 0.0, longest: 16, dropout_seed: 3 }
}

fn ranks(tied: bool, strategy: &Strategy) -> Ranks {
    ranks_by(tied, strategy, OptimizerOptions::default().rule)
}

fn ranks_by(tied: bool, strategy: &Strategy, rule: Rule) -> Ranks {
    start_on(&model(tied), strategy, options(rule), move |shard, split, queue| {
        Parameters::random(shard, DType::F32, split, 7, queue)
    })
}

/// The strategy over so many places, with stages of about as many units each.
fn staged(strategy: Strategy, pp: usize, order: PipelineOrder) -> Strategy {
    let chunks = order.usual_chunks();
    let (units, stages) = (model(true).units.len(), pp * chunks);
    strategy.in_stages(pp, Pipeline { cuts: (1..stages).map(|stage| stage * units / stages).collect(), order })
}

fn micros(step: usize) -> Vec<Samples> {
    uneven_micros(step, MICROS)
}

/// Losses and norms, step by step, and the loss of an evaluation.
fn curve(ranks: &Ranks, steps: std::ops::Range<usize>) -> Vec<f64> {
    let mut curve = Vec::new();
    for step in steps {
        let outcome = ranks.step(micros(step), 1e-3).unwrap();
        assert!(outcome.updated);
        curve.extend([outcome.loss, outcome.grad_norm]);
    }
    curve.push(ranks.evaluate(micros(99).swap_remove(0)).unwrap().loss());
    curve
}

#[test]
fn every_order_has_the_curve_of_the_single_rank() {
    for tied in [true, false] {
        let single = ranks(tied, &spread(1, 1, 0));
        let expected = curve(&single, 0..STEPS);
        for (index, order) in PipelineOrder::ALL.into_iter().enumerate() {
            for (pp, dp, tp, zero) in
                [(2, 1, 1, 0), (3, 1, 1, 0), (4, 1, 1, 0), (2, 2, 1, 1), (2, 1, 2, 0), (2, 2, 2, 1)]
            {
                let arrangement = Arrangement::of([NONE, OASES, CROSS_PASS][(index + pp) % 3]).in_parts(1 + index % 2);
                let strategy = staged(spread(dp, tp, zero), pp, order).arranged(arrangement);
                let what = format!("tied {tied}, {strategy:?}");
                let ours = ranks(tied, &strategy);
                let adds_alike = !tied && [dp, tp, arrangement.parts] == [1; 3];
                let tolerance = if adds_alike { 0.0 } else { 2e-5 };
                compare_curves(&what, &curve(&ours, 0..STEPS), &expected, [0.0, tolerance]);
                compare_states(&what, &ours, &single, 5.0 * tolerance);
            }
        }
    }
}

/// Models with norms behind sublayers, and with biases: vectors that lie side by side in one stage and not in another.
#[test]
fn norms_have_the_same_bits_wherever_a_model_is_cut() {
    let sizes = serde_json::json!({
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 1,
        "intermediate_size": 16, "vocab_size": 64, "tie_word_embeddings": false,
    });
    let families = [
        serde_json::json!({
            "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8,
        }),
        serde_json::json!({ "model_type": "qwen2", "hidden_act": "silu" }),
    ];
    for family in families {
        let mut config = sizes.clone();
        config.as_object_mut().unwrap().extend(family.as_object().unwrap().clone());
        let model = Model::from_json(&config).unwrap();
        let norms = |cuts: Vec<usize>| {
            let pipeline = Pipeline { cuts, order: PipelineOrder::OneForwardOneBackward };
            let strategy = spread(1, 1, 0).in_stages(pipeline.stages(), pipeline);
            let ranks =
                start_on(&model, &strategy, options(OptimizerOptions::default().rule), move |shard, split, queue| {
                    Parameters::random(shard, DType::F32, split, 7, queue)
                });
            let norm = |step| ranks.step(micros(step), 1e-3).unwrap().grad_norm;
            (0..25).map(norm).collect::<Vec<f64>>()
        };
        let expected = norms(Vec::new());
        for cut in 1..model.units.len() {
            assert_eq!(norms(vec![cut]), expected, "{family} cut at unit {cut}");
        }
    }
}

/// As on GPUs: layers with the same input share what belongs to their adapters, and gradients of weights may come much later.
#[test]
fn adapters_that_lie_beside_their_layers_train_in_stages() {
    let adapted = model(false).adapted(AdapterConfig { rank: 4, ..AdapterConfig::default() }).unwrap();
    let model = adapted.for_device(DeviceKind::Cuda);
    let curve_of = |strategy: &Strategy| {
        let options = options(OptimizerOptions::default().rule);
        let random = |shard: &Model, split, queue: &_| Parameters::random(shard, DType::F32, split, 7, queue);
        curve(&start_on(&model, strategy, options, random), 0..STEPS)
    };
    let expected = curve_of(&spread(1, 1, 0));
    for order in PipelineOrder::ALL {
        let strategy = staged(spread(1, 1, 0), 2, order);
        compare_curves(&format!("{order:?}"), &curve_of(&strategy), &expected, [0.0, 2e-5]);
    }
}

#[test]
fn rules_that_look_at_whole_parameters_see_them_through_all_stages() {
    let AdamW { beta1, beta2, .. } = AdamW::default();
    let others = AdamW { beta1, beta2, epsilon: 1e-3 };
    let muon = Rule::Muon { momentum: 0.95, nesterov: true, scale: MuonScale::MatchRmsAdamW, others };
    for rule in [Rule::Adafactor, muon, Rule::Lion { beta1: 0.9, beta2: 0.99 }] {
        for tied in [true, false] {
            let single = ranks_by(tied, &spread(1, 1, 0), rule);
            let expected = curve(&single, 0..STEPS);
            for strategy in [spread(1, 1, 0), spread(2, 1, 1), spread(1, 2, 0)] {
                let strategy = staged(strategy, 3, PipelineOrder::OneForwardOneBackward);
                let what = format!("{rule:?}, tied {tied}, {strategy:?}");
                compare_curves(&what, &curve(&ranks_by(tied, &strategy, rule), 0..STEPS), &expected, [0.0, 1e-4]);
            }
        }
    }
}

#[test]
fn a_checkpoint_resumes_on_any_number_of_stages() {
    let strategies = [
        spread(1, 1, 0),
        staged(spread(1, 1, 0), 2, PipelineOrder::OneForwardOneBackward),
        staged(spread(2, 1, 1), 2, PipelineOrder::ZbV),
        staged(spread(1, 2, 0), 3, PipelineOrder::Gpipe),
        spread(2, 2, 3),
        staged(Strategy { cut: Cut::weighted(vec![1.0, 2.0]), ..spread(1, 2, 0) }, 2, PipelineOrder::Interleaved),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    for (index, from) in strategies.iter().enumerate() {
        let to = &strategies[(index + 1) % strategies.len()];
        let what = format!("{from:?} to {to:?}");
        let before = ranks(true, from);
        curve(&before, 0..2);
        let progress = Progress { step: 2, ..Progress::default() };
        checkpoint::save(&path, &before, &progress, serde_json::Value::Null).unwrap();
        let after = ranks(true, to);
        assert_eq!(checkpoint::load(&path, &after).unwrap().strategy.as_ref(), Some(from));
        assert_eq!(state(&before), state(&after), "{what}");
        compare_curves(&what, &curve(&after, 2..STEPS), &curve(&before, 2..STEPS), [0.0, 2e-5]);
    }
}

#[test]
fn units_move_between_places_and_training_goes_on_as_it_would_have() {
    for (order, cuts) in [(PipelineOrder::OneForwardOneBackward, vec![3]), (PipelineOrder::ZbV, vec![1, 4, 6])] {
        for (tied, strategy) in
            [true, false].map(|tied| [(1, 1, 0), (2, 1, 1), (1, 2, 0)].map(|it| (tied, it))).concat()
        {
            let adds_alike = !tied && strategy == (1, 1, 0);
            let strategy = staged(spread(strategy.0, strategy.1, strategy.2), 2, order);
            let what = format!("tied {tied}, {strategy:?}");
            let [moved, unmoved] = [(); 2].map(|()| ranks(tied, &strategy));
            for ranks in [&moved, &unmoved] {
                curve(ranks, 0..2);
            }
            let before = state(&moved);
            moved.recut(cuts.clone()).unwrap();
            assert_eq!(state(&moved), before, "{what}");
            let tolerance = if adds_alike { 0.0 } else { 2e-5 };
            compare_curves(&what, &curve(&moved, 2..STEPS), &curve(&unmoved, 2..STEPS), [0.0, tolerance]);
        }
    }
}

#[test]
fn units_are_measured_where_they_are_and_training_begins_as_it_would_have() {
    for strategy in [spread(1, 1, 0), spread(2, 1, 1), spread(1, 2, 0)] {
        let strategy = staged(strategy, 2, PipelineOrder::ZbV);
        let what = format!("{strategy:?}");
        let [measured, untouched] = [(); 2].map(|()| ranks(true, &strategy));
        let before = state(&measured);
        let units = model(true).units.len();
        for (rank, seconds) in measured.unit_seconds(micros(7)).unwrap().into_iter().enumerate() {
            let own = strategy.units(rank, units);
            assert_eq!(seconds.len(), units);
            for (unit, seconds) in seconds.into_iter().enumerate() {
                let is_own = own.iter().any(|run| run.contains(&unit));
                // Its norm may be where the stream leaves the stage below.
                let is_next = own.iter().any(|run| run.end == unit);
                assert!(
                    if is_own { seconds > 0.0 } else { is_next || seconds == 0.0 },
                    "{what}: unit {unit}, {seconds}"
                );
            }
        }
        assert_eq!(state(&measured), before, "{what}");
        compare_curves(&what, &curve(&measured, 0..STEPS), &curve(&untouched, 0..STEPS), [0.0, 0.0]);
    }
}

#[test]
fn a_place_with_little_memory_gets_what_fits() {
    let machine = Machine {
        flops_per_s: vec![1e11],
        bytes_per_s: vec![1e10],
        launch: Duration::from_micros(1),
        half_speed_rows: 1.0,
        link: Link { bytes_per_s: 1e10, latency: Duration::ZERO },
        moved_bytes_per_s: 1e10,
        contention: Contention { compute: 1.0, exchange: 1.0 },
    };
    let samples = micros(0).swap_remove(0);
    let options = options(OptimizerOptions::default().rule);
    for order in PipelineOrder::ALL {
        let strategy = staged(Strategy { accumulate: MICROS, ..spread(1, 1, 0) }, 2, order);
        let staging = staging(&model(false), &strategy, &samples, &machine);
        let needed = |cuts: &[usize]| -> Vec<u64> {
            let costs = costs(&[model(false)], &strategy.clone().cut_at(cuts), options, &vec![samples.clone(); MICROS]);
            costs.iter().map(|cost| cost.arena_bytes).collect()
        };
        // The first place is fast, so it would have most units.
        let slowness = [1.0, 3.0];
        let fastest = staging.best_cut(&slowness, &|_| vec![0.0; 2]).expect("everything fits");
        let most = needed(&fastest)[0] - 1;
        let fullness = |cuts: &[usize]| vec![needed(cuts)[0] as f64 / most as f64, 0.0];
        let fitting = staging.best_cut(&slowness, &fullness).expect("the other place has room for all");
        assert!(needed(&fitting)[0] <= most, "{order:?}: {fastest:?}, {fitting:?}");
        let none = staging.best_cut(&slowness, &|_| vec![2.0; 2]);
        assert_eq!(none, None, "{order:?}");
    }
}

#[test]
fn a_dry_run_foretells_the_memory_of_every_place() {
    for order in PipelineOrder::ALL {
        let strategy = staged(spread(1, 1, 0), 3, order);
        let ours = ranks(true, &strategy);
        ours.step(micros(0), 1e-3).unwrap();
        let peaks = ours.with_trainers(|trainer| trainer.device.usage().peak_bytes).unwrap();
        let foretold = costs(&[model(true)], &strategy, options(OptimizerOptions::default().rule), &micros(0));
        let foretold: Vec<u64> = foretold.iter().map(|cost| cost.peak_bytes).collect();
        assert_eq!(peaks, foretold, "{order:?}");
    }
}
