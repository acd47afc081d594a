//! Training with pruned layers: which elements stay, what must not change, and what other ranks notice.

mod support;

use evenkeel_balance::Selection;
use evenkeel_device::{DType, bf16};
use evenkeel_model::{Cut, Imputation, Intake, Model, Parameters, Pruning, ZeroSharding};
use evenkeel_step::schedule::{Arrangement, DEFAULT, NONE, OASES};
use evenkeel_train::{OptimizerOptions, Prune, Ranks, Samples, StateKind, Trainer, TrainerOptions};
use support::{POLICIES, Strategy, check_replicas, compare_curves, micros, spread, start_on, vit};

const SELECTIONS: [Selection; 2] = [Selection::Priority, Selection::Random];

fn prune(gamma: f64, imputation: Imputation, selection: Selection) -> Prune {
    Prune { gamma, imputation, freeze: true, selection, period_steps: 2, seed: 5 }
}

fn llama() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "initializer_range": 0.1,
    });
    Model::from_json(&config).unwrap()
}

fn gpt2() -> Model {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 64,
        "initializer_range": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.0,
    });
    Model::from_json(&config).unwrap()
}

fn options() -> TrainerOptions {
    let optimizer = Some(OptimizerOptions { clip_norm: Some(0.5), ..OptimizerOptions::default() });
    TrainerOptions { optimizer, label_smoothing: 0.0, longest: 16, dropout_seed: 0 }
}

fn alone(model: &Model, dtype: DType) -> Trainer {
    let device = support::device(1);
    let parameters = Parameters::random(model, dtype, ZeroSharding::NONE, 7, device.compute());
    Trainer::alone(model.clone(), device, parameters, options())
}

fn ranks(model: &Model, dp: usize, tp: usize, arrangement: Arrangement) -> Ranks {
    start_on(model, &spread(dp, tp, 0).clone().arranged(arrangement), options(), |shard, split, queue| {
        Parameters::random(shard, DType::F32, split, 7, queue)
    })
}

fn step(trainer: &mut Trainer, step: usize) -> f64 {
    let micros = micros(&trainer.model, step);
    let outcome = trainer.step(&micros, 1e-2).unwrap();
    assert!(outcome.updated, "step {step}");
    outcome.loss
}

fn steps(trainer: &mut Trainer, count: usize) -> Vec<f64> {
    (0..count).map(|index| step(trainer, index)).collect()
}

/// Weights, moments and what is computed with, of every parameter.
fn everything(trainer: &Trainer) -> Vec<Vec<u32>> {
    let queue = trainer.device.compute();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let kinds = [StateKind::Weight, StateKind::Mean, StateKind::Variance];
    let kept = kinds.into_iter().flat_map(|kind| {
        trainer.parameters.ids().map(move |id| queue.read(&trainer.kept(kind, id).expect("nothing is split").1))
    });
    kept.chain(trainer.parameters.ids().map(|id| queue.read(&trainer.parameters.value(id)))).map(bits).collect()
}

fn pruned(pruning: &Pruning) -> Vec<Vec<u32>> {
    (0..pruning.intakes().len()).map(|intake| pruning.pruned(intake).to_vec()).collect()
}

/// Asserts that a step changed every kept column of an intake's weights and nothing of the pruned ones.
fn check_columns(
    what: &str,
    trainer: &Trainer,
    before: &[Vec<u32>],
    after: &[Vec<u32>],
    index: usize,
    intake: &Intake,
) {
    let (count, pruned) = (trainer.model.specs.len(), trainer.pruning().expect("it is pruned").pruned(index));
    for (weight, part) in intake.weights.iter().flat_map(|&weight| (0..4).map(move |part| (weight, part))) {
        let (spec, place) = (&trainer.model.specs[weight.0], part * count + weight.0);
        let cols = spec.matrix[1];
        for column in 0..intake.inputs {
            let is_in_column = |i: usize| if intake.transposed { i / cols == column } else { i % cols == column };
            let mut pairs = before[place].iter().zip(&after[place]).enumerate().filter(|(i, _)| is_in_column(*i));
            let changed = pairs.any(|(_, (before, after))| before != after);
            let is_kept = pruned.binary_search(&(column as u32)).is_err();
            // A step may be too small for the eight bits of a copy.
            let is_right = changed == is_kept || (part == 3 && !changed);
            assert!(is_right, "{what}: column {column} of {}, part {part}, changed: {changed}", spec.name);
        }
    }
}

#[test]
fn what_the_optimizer_has_of_pruned_columns_is_bitwise_unchanged_while_kept_ones_move() {
    for (model, dtype) in [(llama(), DType::F32), (llama(), DType::Bf16), (gpt2(), DType::F32), (vit(), DType::Bf16)] {
        for (selection, imputation) in SELECTIONS.into_iter().flat_map(|s| POLICIES.map(|imputation| (s, imputation))) {
            let what = format!("{} {dtype:?} {selection:?} {imputation:?}", model.config.family.names.embed);
            let mut trainer = alone(&model, dtype);
            trainer.prune(Some(prune(0.5, imputation, selection)));
            let mut selections = Vec::new();
            for index in 0..7 {
                let before = everything(&trainer);
                step(&mut trainer, index);
                let after = everything(&trainer);
                let intakes: Vec<Intake> = trainer.model.intakes();
                for (place, intake) in intakes.iter().enumerate() {
                    check_columns(&format!("{what}, step {index}"), &trainer, &before, &after, place, intake);
                }
                selections.push(pruned(trainer.pruning().expect("it is pruned")));
            }
            let is_first_whole = selection == Selection::Priority;
            assert_eq!(selections[0].iter().all(Vec::is_empty), is_first_whole, "{what}: the first period");
            let half: Vec<usize> = trainer.model.intakes().iter().map(|intake| intake.inputs / 2).collect();
            for (index, selection) in selections.iter().enumerate().skip(2) {
                assert_eq!(selection.iter().map(Vec::len).collect::<Vec<_>>(), half, "{what}, step {index}");
                assert_eq!(selection == &selections[index - 1], index % 2 == 1, "{what}, step {index}: by periods");
            }
            if dtype == DType::Bf16 {
                for id in trainer.parameters.ids().filter(|id| !trainer.model.specs[id.0].is_vector()) {
                    let queue = trainer.device.compute();
                    let masters = queue.read(&trainer.parameters.master(id));
                    let rounded: Vec<f32> = masters.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
                    assert_eq!(queue.read(&trainer.parameters.value(id)), rounded, "{what}: copies are the masters'");
                }
            }
        }
    }
}

#[test]
fn imputed_gradients_move_pruned_columns_and_count_in_the_norm_only_if_these_do_not_stay() {
    let run = |freeze: bool, imputation: Imputation| {
        let mut trainer = alone(&llama(), DType::F32);
        trainer.prune(Some(Prune { freeze, ..prune(0.5, imputation, Selection::Random) }));
        let before = everything(&trainer);
        let outcome = trainer.step(&micros(&trainer.model, 0), 1e-2).unwrap();
        let after = everything(&trainer);
        let moves = |(index, intake): (usize, &Intake)| {
            let pruned = trainer.pruning().expect("it is pruned").pruned(index);
            intake.weights.iter().any(|weight| {
                let (cols, pairs) =
                    (trainer.model.specs[weight.0].matrix[1], before[weight.0].iter().zip(&after[weight.0]));
                let of_pruned = pairs.enumerate().filter(|(i, _)| pruned.binary_search(&((i % cols) as u32)).is_ok());
                of_pruned.into_iter().any(|(_, (before, after))| before != after)
            })
        };
        (trainer.model.intakes().iter().enumerate().any(moves), outcome.grad_norm)
    };
    let [(stay, norm), (moves, imputed_norm)] = [true, false].map(|freeze| run(freeze, Imputation::Average));
    assert!(!stay && moves);
    assert!(imputed_norm > 1.001 * norm, "{imputed_norm} with the imputed ones, {norm} without");
    // Imputed zeros are none.
    assert_eq!(run(true, Imputation::Zero).1, run(false, Imputation::Zero).1);
}

#[test]
fn columns_that_change_most_are_kept() {
    let mut trainer = alone(&llama(), DType::F32);
    let read = |trainer: &Trainer| -> Vec<Vec<f32>> {
        let queue = trainer.device.compute();
        trainer.parameters.ids().map(|id| queue.read(&trainer.parameters.master(id))).collect()
    };
    let before = read(&trainer);
    trainer.prune(Some(prune(0.25, Imputation::Zero, Selection::Priority)));
    steps(&mut trainer, 2);
    let after = read(&trainer);
    step(&mut trainer, 2);
    for (index, intake) in trainer.model.intakes().iter().enumerate() {
        let mut scores = vec![0.0; intake.inputs];
        for weight in &intake.weights {
            for (i, (after, before)) in after[weight.0].iter().zip(&before[weight.0]).enumerate() {
                scores[i % intake.inputs] += (*after as f64 - *before as f64).abs();
            }
        }
        let pruned = trainer.pruning().expect("it is pruned").pruned(index);
        let of = |is_pruned: bool| {
            let columns = (0..intake.inputs).filter(move |&column| pruned.contains(&(column as u32)) == is_pruned);
            columns.map(|column| scores[column]).collect::<Vec<f64>>()
        };
        let (most, least) = (of(true).into_iter().fold(0.0, f64::max), of(false).into_iter().fold(f64::MAX, f64::min));
        assert!(most <= least && !pruned.is_empty(), "intake {index}: pruned up to {most}, kept from {least}");
    }
}

#[test]
fn evaluations_equal_those_of_the_unpruned_model() {
    for model in [llama(), vit()] {
        let (mut trainer, mut plain) = (alone(&model, DType::F32), alone(&model, DType::F32));
        let samples = micros(&model, 1).remove(0);
        trainer.prune(Some(prune(0.5, Imputation::Zero, Selection::Random)));
        assert_eq!(trainer.evaluate(&samples), plain.evaluate(&samples));
        steps(&mut trainer, 3);
        let pruned_layer = trainer.evaluate(&samples);
        trainer.prune(None);
        assert_eq!(trainer.evaluate(&samples), pruned_layer);
        assert_ne!(plain.evaluate(&samples), pruned_layer);
    }
}

#[test]
fn pruning_nothing_is_bit_identical_to_no_resizing() {
    for model in [llama(), gpt2(), vit()] {
        let run = |prune: Option<Prune>, count: usize| {
            let mut trainer = alone(&model, DType::Bf16);
            trainer.prune(prune);
            (steps(&mut trainer, count), everything(&trainer))
        };
        let plain = run(None, 5);
        for (selection, imputation) in SELECTIONS.into_iter().flat_map(|s| POLICIES.map(|imputation| (s, imputation))) {
            assert!(run(Some(prune(0.0, imputation, selection)), 5) == plain, "{selection:?} {imputation:?}");
        }
        let first_period = run(Some(prune(0.5, Imputation::Zero, Selection::Priority)), 2);
        assert!(first_period == run(None, 2), "priorities are measured on all columns first");
        assert!(run(Some(prune(0.5, Imputation::Zero, Selection::Priority)), 5) != plain);
    }
}

#[test]
fn another_share_keeps_the_scores_and_counts_at_once() {
    let mut trainer = alone(&llama(), DType::F32);
    let now = |trainer: &Trainer| pruned(trainer.pruning().expect("it is pruned"));
    trainer.prune(Some(prune(0.5, Imputation::Zero, Selection::Priority)));
    steps(&mut trainer, 3);
    let half = now(&trainer);
    for gamma in [0.25, 0.75] {
        trainer.prune(Some(prune(gamma, Imputation::Zero, Selection::Priority)));
        for (one, half) in now(&trainer).iter().zip(&half) {
            let (fewer, more) = if gamma < 0.5 { (one, half) } else { (half, one) };
            assert!(fewer.len() < more.len() && fewer.iter().all(|column| more.contains(column)), "{gamma}");
        }
    }
    trainer.prune(Some(prune(0.5, Imputation::Zero, Selection::Priority)));
    assert_eq!(now(&trainer), half);
    // Begun anew, nothing is known.
    trainer.prune(None);
    trainer.prune(Some(prune(0.5, Imputation::Zero, Selection::Priority)));
    step(&mut trainer, 3);
    assert!(now(&trainer).iter().all(Vec::is_empty));
}

#[test]
fn every_step_computes_with_the_weights_that_the_last_one_left() {
    for model in [llama(), gpt2()] {
        for imputation in POLICIES {
            let settings = prune(0.5, imputation, Selection::Random);
            let run = |told_again: bool| {
                let mut trainer = alone(&model, DType::F32);
                trainer.prune(Some(settings));
                let mut losses = Vec::new();
                for index in 0..6 {
                    // The same columns are selected once more, and what is kept of the weights is gathered anew.
                    if told_again {
                        trainer.prune(Some(settings));
                    }
                    losses.push(step(&mut trainer, index));
                }
                (losses, everything(&trainer))
            };
            assert!(run(true) == run(false), "{imputation:?}");
        }
    }
}

#[test]
fn a_step_that_is_not_finite_is_not_repeated() {
    let model = vit();
    for imputation in POLICIES {
        let mut trainer = alone(&model, DType::F32);
        trainer.prune(Some(prune(0.25, imputation, Selection::Random)));
        step(&mut trainer, 0);
        let mut broken = micros(&model, 1);
        let Samples::Images { pixels, .. } = &mut broken[0] else { panic!("images") };
        pixels[3] = f32::NAN;
        assert!(!trainer.step(&broken, 1e-2).unwrap().updated);
        // Columns that were kept and have no number now are pruned.
        trainer.prune(Some(prune(0.5, imputation, Selection::Random)));
        step(&mut trainer, 2);
    }
}

/// Losses and gradient norms of steps in which only the last rank is pruned.
fn curve(ranks: &Ranks, model: &Model, prune: Option<Prune>, steps: usize) -> Vec<[f64; 2]> {
    let last = ranks.count() - 1;
    let prune_last = move |trainer: &mut Trainer| trainer.prune(prune.filter(|_| trainer.rank() == last));
    ranks.with_trainers(prune_last).unwrap();
    let step = |step| ranks.step(micros(model, step), 1e-2).unwrap();
    (0..steps).map(step).map(|outcome| [outcome.loss, outcome.grad_norm]).collect()
}

#[test]
fn one_resized_rank_of_several_trains_and_the_others_notice_nothing() {
    for (model, tp) in [(llama(), 2), (gpt2(), 2), (vit(), 2), (llama(), 4)] {
        for imputation in POLICIES {
            let what = format!("{} on {tp}, {imputation:?}", model.config.family.names.embed);
            let [plain, pruned_layer] = [(); 2].map(|()| ranks(&model, 1, tp, Arrangement::default()));
            let exact = curve(&plain, &model, None, 20);
            let ours = curve(&pruned_layer, &model, Some(prune(0.5, imputation, Selection::Priority)), 20);
            assert_eq!(ours[..2], exact[..2], "{what}: the first period keeps everything");
            assert!(ours[19][0] < 0.9 * ours[0][0], "{what}: {:?} to {:?}", ours[0], ours[19]);
            check_replicas(&what, &pruned_layer, |trainer| everything(trainer));
            let seen = |ranks: &Ranks| {
                let of = |trainer: &mut Trainer| {
                    let shapes: Vec<[usize; 2]> = trainer.model.specs.iter().map(|spec| spec.matrix).collect();
                    (trainer.program().to_string(), shapes, trainer.pruning().is_some())
                };
                ranks.with_trainers(of).unwrap()
            };
            let (plain, pruned_layer) = (seen(&plain), seen(&pruned_layer));
            for (rank, (plain, pruned_layer)) in plain.iter().zip(&pruned_layer).enumerate() {
                assert_eq!((&plain.0, &plain.1), (&pruned_layer.0, &pruned_layer.1), "{what}: rank {rank}");
                assert_eq!(pruned_layer.2, rank == tp - 1);
            }
        }
    }
}

#[test]
fn schedules_that_compute_again_keep_the_same_columns() {
    for (model, tp) in [(llama(), 1), (llama(), 2), (gpt2(), 2)] {
        for (imputation, parts) in POLICIES.into_iter().flat_map(|imputation| [(imputation, 1), (imputation, 2)]) {
            let run = |schedule| {
                let ranks = ranks(&model, 1, tp, Arrangement::of(schedule).in_parts(parts));
                curve(&ranks, &model, Some(prune(0.5, imputation, Selection::Random)), 6)
            };
            let plain = run(NONE);
            for schedule in [DEFAULT, OASES] {
                let what = format!("{imputation:?} on {tp} in {parts} parts, {}", schedule.name);
                compare_curves(&what, run(schedule).as_flattened(), plain.as_flattened(), [0.0, 1e-5]);
            }
        }
    }
}

#[test]
fn shares_of_the_data_resized_alike_equal_one_rank() {
    let model = llama();
    for imputation in POLICIES {
        let settings = Some(prune(0.5, imputation, Selection::Random));
        let run = |dp| {
            let ranks = ranks(&model, dp, 1, Arrangement::default());
            ranks.with_trainers(move |trainer| trainer.prune(settings)).unwrap();
            let step = |step| ranks.step(micros(&model, step), 1e-2).unwrap();
            let losses: Vec<[f64; 2]> = (0..8).map(step).map(|outcome| [outcome.loss, outcome.grad_norm]).collect();
            let held = ranks.with_trainers(|trainer| everything(trainer)).unwrap();
            assert!(held.iter().all(|values| *values == held[0]), "{imputation:?}: shares hold the same");
            losses
        };
        let (ours, alone) = (run(2), run(1));
        compare_curves(&format!("{imputation:?}"), ours.as_flattened(), alone.as_flattened(), [0.0, 1e-3]);
    }
}

#[test]
fn shares_resized_differently_and_split_state_are_refused() {
    let of_rank = |trainer: &mut Trainer| {
        let gamma = 0.1 * trainer.rank() as f64;
        trainer.prune(Some(prune(gamma, Imputation::Zero, Selection::Random)));
    };
    let failure = ranks(&llama(), 2, 1, Arrangement::default()).with_trainers(of_rank).unwrap_err();
    assert!(failure.message.contains("ranks [0, 1] hold the same shard"), "{failure}");
    let split = start_on(&llama(), &spread(2, 1, 1), options(), |shard, split, queue| {
        Parameters::random(shard, DType::F32, split, 7, queue)
    });
    let failure = split
        .with_trainers(|trainer| trainer.prune(Some(prune(0.1, Imputation::Zero, Selection::Random))))
        .unwrap_err();
    assert!(failure.message.contains("parallel.zero = 0"), "{failure}");
}

#[test]
fn cuts_without_a_split_stream_can_be_resized_too() {
    let cut = Cut { split_sequence: false, ..Cut::weighted(vec![2.0, 1.0]) };
    let topology = Strategy::of(cut);
    let ranks = start_on(&llama(), &topology, options(), |shard, split, queue| {
        Parameters::random(shard, DType::F32, split, 7, queue)
    });
    let ours = curve(&ranks, &llama(), Some(prune(0.5, Imputation::Zero, Selection::Priority)), 20);
    assert!(ours[19][0] < 0.9 * ours[0][0], "{:?} to {:?}", ours[0], ours[19]);
    check_replicas("a whole stream", &ranks, |trainer| everything(trainer));
}
