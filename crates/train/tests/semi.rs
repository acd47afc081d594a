//! Ranks that compute for one another and leave something out at the same time, against ranks that keep what they compute with.

mod support;

use std::collections::HashMap;

use evenkeel_balance::Selection;
use evenkeel_device::DType;
use evenkeel_model::{Cut, Dim, Imputation, Model, ParamId, Parameters, SHARES, Shard, Widths, widths_of};
use evenkeel_step::Work;
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, NONE, OASES};
use evenkeel_train::{OptimizerOptions, Progress, Prune, Ranks, Trainer, TrainerOptions, checkpoint};
use support::{POLICIES, Strategy, compare_curves, compare_states, micros, spread, start_on, state, vit};

const TOLERANCE: f64 = 1e-5;

fn llama() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 64, "initializer_range": 0.1,
    });
    Model::from_json(&config).unwrap()
}

fn gpt2() -> Model {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 16,
        "vocab_size": 64, "initializer_range": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.0,
    });
    Model::from_json(&config).unwrap()
}

/// Nothing is clipped: what gradients of pruned columns are imputed as counts in their norm and nowhere else.
fn ranks(model: &Model, topology: &Strategy, arrangement: Arrangement) -> Ranks {
    let optimizer = Some(OptimizerOptions { clip_norm: None, ..OptimizerOptions::default() });
    let options = TrainerOptions { optimizer, label_smoothing: 0.0, longest: 16, dropout_seed: 5 };
    start_on(model, &topology.clone().arranged(arrangement), options, |shard, split, queue| {
        Parameters::random(shard, DType::F32, split, 7, queue)
    })
}

/// Groups of heads and columns of the FFN; what ranks have of the rest stays.
fn widths(model: &Model, topology: &Strategy, head_groups: &[usize], ffn: &[usize]) -> Widths {
    let home = widths_of(&Shard::cut(&model.config, &topology.cut).unwrap());
    let head_shares = head_groups.iter().map(|groups| groups * SHARES).collect();
    home.with(Dim::Heads, head_shares).with(Dim::Columns, ffn.to_vec())
}

fn prune(ranks: &Ranks, gammas: &[f64], imputation: Imputation, selection: Selection) {
    let prune = |&gamma: &f64| Some(Prune { gamma, imputation, freeze: true, selection, period_steps: 2, seed: 5 });
    ranks.prune(gammas.iter().map(prune).collect()).unwrap();
}

/// Losses and gradient norms.
fn steps(ranks: &Ranks, model: &Model, steps: std::ops::Range<usize>) -> Vec<[f64; 2]> {
    let step = |step| ranks.step(micros(model, step), 1e-2).unwrap();
    steps.map(step).map(|outcome| [outcome.loss, outcome.grad_norm]).collect()
}

fn assert_close(what: &str, ours: &[[f64; 2]], theirs: &[[f64; 2]]) {
    compare_curves(what, ours.as_flattened(), theirs.as_flattened(), [0.0, TOLERANCE]);
}

/// Ranks, their groups of heads, their columns, and the shares that they leave out.
type Layout = (usize, &'static [usize], &'static [usize], &'static [f64]);

/// One straggler; one that computes with nothing that it keeps; several, whose work has moved as far.
fn layouts() -> Vec<Layout> {
    vec![
        (2, &[3, 1], &[36, 12], &[0.0, 0.5]),
        (2, &[1, 3], &[7, 41], &[0.4, 0.0]),
        (2, &[2, 2], &[30, 18], &[0.0, 0.3]),
        (3, &[2, 1, 1], &[29, 2, 17], &[0.0, 0.6, 0.25]),
        (4, &[2, 2, 0, 0], &[23, 20, 3, 2], &[0.0, 0.0, 0.5, 0.25]),
        (4, &[1, 1, 1, 1], &[0, 24, 11, 13], &[0.5, 0.0, 0.3, 0.4]),
    ]
}

#[test]
fn what_is_left_out_while_work_is_elsewhere_equals_what_is_left_out_at_home() {
    for model in [llama(), gpt2(), vit()] {
        for (tp, heads, ffn, gammas) in layouts() {
            for (imputation, schedule) in POLICIES.into_iter().zip([NONE, OASES, CROSS_PASS]) {
                let (topology, arrangement) = (spread(1, tp, 0), Arrangement::of(schedule));
                let what = format!("{} {heads:?} {ffn:?} {gammas:?} {imputation:?}", model.config.family.names.embed);
                let work = widths(&model, &topology, heads, ffn);
                let ours = ranks(&model, &topology, arrangement);
                ours.migrate(Some(work.clone())).unwrap();
                // The twin keeps what ours computes with.
                let cut = Cut { widths: Some(work), ..topology.cut.clone() };
                let twin = ranks(&model, &Strategy { cut, ..topology }, arrangement);
                for ranks in [&ours, &twin] {
                    prune(ranks, gammas, imputation, Selection::Random);
                }
                let [found, mut expected] = [&ours, &twin].map(|ranks| steps(ranks, &model, 0..5));
                if imputation == Imputation::Same {
                    // Gradients of weights are repeated only where they are kept, which no update sees.
                    expected.iter_mut().zip(&found).for_each(|(expected, found)| expected[1] = found[1]);
                }
                assert_close(&what, &found, &expected);
                compare_states(&what, &ours, &twin, 1e-3);
                let migrates = |trainer: &mut Trainer| trainer.program().tasks.iter().any(|t| t.work == Work::Migrate);
                assert!(ours.with_trainers(migrates).unwrap().into_iter().all(|migrates| migrates), "{what}");
            }
        }
    }
}

#[test]
fn leaving_out_nothing_is_bit_identical_to_migration() {
    for model in [llama(), gpt2(), vit()] {
        for (tp, heads, ffn, _) in layouts() {
            let topology = spread(1, tp, 0);
            let work = widths(&model, &topology, heads, ffn);
            let run = |selection: Option<Selection>| {
                let ranks = ranks(&model, &topology, Arrangement::of(OASES));
                ranks.migrate(Some(work.clone())).unwrap();
                if let Some(selection) = selection {
                    prune(&ranks, &vec![0.0; tp], Imputation::Zero, selection);
                }
                (steps(&ranks, &model, 0..5), state(&ranks))
            };
            let plain = run(None);
            for selection in [Selection::Priority, Selection::Random] {
                assert!(run(Some(selection)) == plain, "{heads:?} {ffn:?} {selection:?}");
            }
        }
    }
}

/// By parameter: which of its elements somebody computes with and leaves out; none where nobody ever does.
fn left_out(ranks: &Ranks, model: &Model, work: &[Model]) -> Vec<Option<Vec<bool>>> {
    let pruned = |trainer: &mut Trainer| {
        let pruning = trainer.pruning().expect("it is pruned");
        let pruned = (0..pruning.intakes().len()).map(|intake| pruning.pruned(intake).to_vec());
        (trainer.model.shard.index, pruned.collect::<Vec<_>>())
    };
    let mut found: Vec<Option<Vec<bool>>> = vec![None; model.specs.len()];
    for (shard, pruned) in ranks.with_trainers(pruned).unwrap() {
        for (intake, pruned) in work[shard].intakes().iter().zip(pruned) {
            for weight in &intake.weights {
                let spec = &work[shard].specs[weight.0];
                let [rows, cols] = spec.whole;
                let elements = found[weight.0].get_or_insert_with(|| vec![false; rows * cols]);
                for piece in spec.slice.pieces() {
                    for (row, held_row) in piece.rows.clone().zip(piece.held_rows.clone()) {
                        for (col, held_col) in piece.cols.clone().zip(piece.held_cols.clone()) {
                            let input = if intake.transposed { held_row } else { held_col };
                            elements[row * cols + col] |= pruned.contains(&(input as u32));
                        }
                    }
                }
            }
        }
    }
    found
}

#[test]
fn what_others_leave_out_of_what_a_rank_keeps_stays_bitwise_and_the_rest_moves() {
    for model in [llama(), gpt2(), vit()] {
        for (tp, heads, ffn, gammas) in layouts() {
            for (selection, imputation) in
                [(Selection::Random, Imputation::Average), (Selection::Priority, Imputation::Zero)]
            {
                let topology = spread(1, tp, 0);
                let work = widths(&model, &topology, heads, ffn);
                let ranks = ranks(&model, &topology, Arrangement::default());
                prune(&ranks, &vec![0.0; tp], imputation, selection);
                steps(&ranks, &model, 0..3);
                // In the middle of a period work moves, and then shares change.
                ranks.migrate(Some(work.clone())).unwrap();
                let shards = model.cut(&Cut { widths: Some(work), ..topology.cut }).unwrap();
                for step in 3..8 {
                    let what =
                        format!("{} {heads:?} {ffn:?} {selection:?}, step {step}", model.config.family.names.embed);
                    if step == 4 {
                        prune(&ranks, gammas, imputation, selection);
                    }
                    let before = state(&ranks);
                    steps(&ranks, &model, step..step + 1);
                    let (after, frozen) = (state(&ranks), left_out(&ranks, &model, &shards));
                    let count = |is_frozen: bool| {
                        frozen.iter().flatten().flatten().filter(|frozen| **frozen == is_frozen).count()
                    };
                    assert_eq!(count(true) > 0, step >= 4, "{what}");
                    let mut moved = 0;
                    for (place, (before, after)) in before.iter().zip(&after).enumerate() {
                        let Some(frozen) = &frozen[place % model.specs.len()] else { continue };
                        for (i, (before, after)) in before.iter().zip(after).enumerate() {
                            let stays = before.to_bits() == after.to_bits();
                            assert!(
                                stays || !frozen[i],
                                "{what}: {} at {i}",
                                model.specs[place % model.specs.len()].name
                            );
                            moved += usize::from(!stays);
                        }
                    }
                    assert!(moved > 3 * count(false) * 9 / 10, "{what}: {moved} of {} moved", 3 * count(false));
                }
            }
        }
    }
}

/// Whether a work shard computes with some of what a home shard keeps of a weight; both have one rectangle of it.
fn meets(home: &Model, work: &Model, weight: ParamId) -> bool {
    !home.specs[weight.0].slice.overlaps(&work.specs[weight.0].slice).is_empty()
}

/// The columns of the whole weight that a shard has.
fn columns_of(model: &Model, weight: ParamId) -> Vec<usize> {
    let columns = |piece: evenkeel_model::Piece| piece.cols.collect::<Vec<usize>>();
    model.specs[weight.0].slice.pieces().next().map_or_else(Vec::new, columns)
}

#[test]
fn columns_that_change_least_are_left_out_wherever_they_are_kept() {
    const GAMMAS: [f64; 4] = [0.0, 0.0, 0.4, 0.5];
    let (model, topology) = (llama(), spread(1, 4, 0));
    let widths = widths(&model, &topology, &[2, 1, 1, 0], &[20, 16, 5, 7]);
    let work = model.cut(&Cut { widths: Some(widths.clone()), ..topology.cut.clone() }).unwrap();
    let home = model.cut(&topology.cut).unwrap();
    let ranks = ranks(&model, &topology, Arrangement::default());
    prune(&ranks, &GAMMAS, Imputation::Zero, Selection::Priority);
    ranks.migrate(Some(widths)).unwrap();
    // By the first weight of an intake, home shard and column of the whole: how much it changed when it was last kept.
    let mut scores: HashMap<(ParamId, usize, usize), f64> = HashMap::new();
    let mut left_out: Vec<Vec<Vec<u32>>> = vec![Vec::new(); 4];
    for period in 0..4 {
        let before = state(&ranks);
        steps(&ranks, &model, 2 * period..2 * period + 2);
        let after = state(&ranks);
        for (shard, work) in work.iter().enumerate() {
            for (index, intake) in work.intakes().iter().enumerate() {
                let (weight, pruned) = (intake.weights[0], &pruned(&ranks)[shard][index]);
                let share = if period == 0 { 0.0 } else { GAMMAS[shard] };
                assert_eq!(pruned.len(), (share * intake.inputs as f64).floor() as usize, "shard {shard}");
                let score = |column: usize| -> f64 {
                    let homes = (0..4).filter(|&other| meets(&home[other], work, weight));
                    homes.filter_map(|other| scores.get(&(weight, other, columns_of(work, weight)[column]))).sum()
                };
                let is_pruned = |column: usize| pruned.contains(&(column as u32));
                let most = (0..intake.inputs).filter(|&column| is_pruned(column)).map(score).fold(0.0, f64::max);
                let least = (0..intake.inputs).filter(|&column| !is_pruned(column)).map(score).fold(f64::MAX, f64::min);
                assert!(most <= least * (1.0 + 1e-6), "period {period}, shard {shard}: up to {most}, from {least}");
            }
        }
        left_out.clone_from(&pruned(&ranks));
        for (shard, kept) in home.iter().enumerate() {
            for intake in kept.intakes() {
                let first = intake.weights[0];
                for column in columns_of(kept, first) {
                    let leaves_out = |other: usize| {
                        let intakes = work[other].intakes();
                        let index = intakes.iter().position(|intake| intake.weights[0] == first);
                        let place = columns_of(&work[other], first).iter().position(|&used| used == column);
                        let (Some(index), Some(place)) = (index, place) else { return false };
                        meets(kept, &work[other], first) && left_out[other][index].contains(&(place as u32))
                    };
                    if (0..4).any(leaves_out) {
                        continue;
                    }
                    let change = |weight: &ParamId| -> f64 {
                        let (piece, cols) =
                            (kept.specs[weight.0].slice.pieces().next(), model.specs[weight.0].whole[1]);
                        let rows = piece.map_or(0..0, |piece| piece.rows).map(|row| row * cols + column);
                        rows.map(|at| (after[weight.0][at] as f64 - before[weight.0][at] as f64).abs()).sum()
                    };
                    scores.insert((first, shard, column), intake.weights.iter().map(change).sum());
                }
            }
        }
    }
}

#[test]
fn shares_of_the_data_agree_on_what_is_left_out_of_what() {
    let (model, topology) = (llama(), spread(2, 2, 0));
    let ranks = ranks(&model, &topology, Arrangement::default());
    ranks.migrate(Some(widths(&model, &topology, &[3, 1], &[40, 8]))).unwrap();
    prune(&ranks, &[0.0, 0.5], Imputation::Zero, Selection::Priority);
    let losses = steps(&ranks, &model, 0..20);
    assert!(losses[19][0] < 0.9 * losses[0][0], "{losses:?}");
    let held = ranks.with_trainers(|trainer| {
        let queue = trainer.device.compute();
        let masters = trainer.parameters.ids().map(|id| queue.read(&trainer.parameters.master(id)));
        (trainer.model.shard.index, masters.collect::<Vec<_>>())
    });
    let held = held.unwrap();
    for (shard, values) in &held {
        assert!(held.iter().all(|(other, others)| shard != other || values == others), "shard {shard}");
    }
}

#[test]
fn work_that_comes_home_is_evaluated_and_left_out_as_if_it_had_never_been_away() {
    let (model, topology) = (llama(), spread(1, 2, 0));
    let work = widths(&model, &topology, &[3, 1], &[40, 8]);
    let run = |is_away: bool| {
        let ranks = ranks(&model, &topology, Arrangement::default());
        prune(&ranks, &[0.0, 0.0], Imputation::Zero, Selection::Random);
        ranks.migrate(Some(work.clone()).filter(|_| is_away)).unwrap();
        steps(&ranks, &model, 0..3);
        let evaluated = ranks.evaluate(micros(&model, 1).remove(0)).unwrap().loss();
        ranks.migrate(None).unwrap();
        prune(&ranks, &[0.0, 0.5], Imputation::Zero, Selection::Random);
        [vec![[evaluated; 2]], steps(&ranks, &model, 3..8)].concat()
    };
    assert_close("home again", &run(true), &run(false));
}

#[test]
fn ranks_that_are_resized_by_other_rules_cannot_compute_for_one_another() {
    let (model, topology) = (llama(), spread(1, 2, 0));
    let ranks = ranks(&model, &topology, Arrangement::default());
    ranks.migrate(Some(widths(&model, &topology, &[3, 1], &[40, 8]))).unwrap();
    let prune = |period_steps| {
        let (imputation, selection) = (Imputation::Zero, Selection::Random);
        Some(Prune { gamma: 0.5, imputation, freeze: true, selection, period_steps, seed: 5 })
    };
    ranks.prune(vec![prune(2), prune(3)]).unwrap();
    let failure = ranks.step(micros(&model, 0), 1e-2).unwrap_err().to_string();
    assert!(failure.contains("compute for one another and are pruned by different rules"), "{failure}");
}

/// By rank and intake.
fn pruned(ranks: &Ranks) -> Vec<Vec<Vec<u32>>> {
    let of = |trainer: &mut Trainer| {
        let pruning = trainer.pruning().expect("it is pruned");
        (0..pruning.intakes().len()).map(|intake| pruning.pruned(intake).to_vec()).collect()
    };
    ranks.with_trainers(of).unwrap()
}

#[test]
fn a_run_that_is_continued_leaves_out_the_same_columns_and_has_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for (model, dp, work) in [(llama(), 1, None), (gpt2(), 2, None), (llama(), 1, Some(([3, 1], [33, 15])))] {
        let topology = spread(dp, 2, 0);
        let home = widths(&model, &topology, &[1, 3], &[20, 28]);
        let uneven = Strategy { cut: Cut { widths: Some(home), ..topology.cut.clone() }, ..topology.clone() };
        let work = work.map(|(heads, ffn)| widths(&model, &topology, &heads, &ffn));
        // In the middle of a period, at its end, and before there are scores.
        for (selection, saved_at) in
            [(Selection::Priority, 5), (Selection::Priority, 6), (Selection::Priority, 1), (Selection::Random, 3)]
        {
            let what = format!("dp {dp}, away: {}, {selection:?} after step {saved_at}", work.is_some());
            let path = folder.path().join("checkpoint");
            let settle = |ranks: &Ranks, gamma: f64| {
                ranks.migrate(work.clone()).unwrap();
                prune(ranks, &[0.0, gamma], Imputation::Zero, selection);
            };
            let through = ranks(&model, &uneven, Arrangement::default());
            settle(&through, 0.5);
            steps(&through, &model, 0..saved_at - 1);
            // Columns that come back in the middle of a period were not kept all through it.
            prune(&through, &[0.0, 0.75], Imputation::Zero, selection);
            steps(&through, &model, saved_at - 1..saved_at);
            prune(&through, &[0.0, 0.5], Imputation::Zero, selection);
            let progress = Progress { step: saved_at as u64, ..Progress::default() };
            checkpoint::save(&path, &through, &progress, serde_json::Value::Null).unwrap();
            let continued = ranks(&model, &uneven, Arrangement::default());
            checkpoint::load(&path, &continued).unwrap();
            settle(&continued, 0.5);
            for step in saved_at..saved_at + 5 {
                let [ours, theirs] = [&continued, &through].map(|ranks| steps(ranks, &model, step..step + 1));
                assert_eq!(ours, theirs, "{what}, step {step}");
                assert_eq!(pruned(&continued), pruned(&through), "{what}, step {step}");
            }
            assert_eq!(state(&continued), state(&through), "{what}");
            let is_left_out = pruned(&through)[1].iter().all(|columns| !columns.is_empty());
            assert!(is_left_out, "{what}");
            // Other widths have other rows: nothing is known of them.
            let other = ranks(&model, &topology, Arrangement::default());
            checkpoint::load(&path, &other).unwrap();
            settle(&other, 0.5);
            steps(&other, &model, 0..1);
            let knows_nothing = pruned(&other)[1].iter().all(Vec::is_empty);
            assert_eq!(knows_nothing, selection == Selection::Priority, "{what}");
        }
    }
}

#[test]
fn what_a_checkpoint_says_of_columns_is_for_the_next_step_or_for_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let (model, topology, path) = (llama(), spread(1, 2, 0), folder.path().join("checkpoint"));
    let before = ranks(&model, &topology, Arrangement::default());
    prune(&before, &[0.0, 0.5], Imputation::Zero, Selection::Priority);
    steps(&before, &model, 0..5);
    let progress = Progress { step: 5, ..Progress::default() };
    checkpoint::save(&path, &before, &progress, serde_json::Value::Null).unwrap();
    let after = ranks(&model, &topology, Arrangement::default());
    checkpoint::load(&path, &after).unwrap();
    steps(&after, &model, 5..6);
    prune(&after, &[0.0, 0.5], Imputation::Zero, Selection::Priority);
    steps(&after, &model, 6..7);
    assert!(pruned(&after).iter().flatten().all(Vec::is_empty), "the weights have changed since");
    // Without anything left out a checkpoint has nothing to say of it.
    let plain = ranks(&model, &topology, Arrangement::default());
    checkpoint::save(&path, &plain, &Progress::default(), serde_json::Value::Null).unwrap();
    let manifest = std::fs::read_to_string(path.join("manifest.json")).unwrap();
    assert!(!manifest.contains("resize") && !manifest.contains("snapshot."), "{manifest}");
}
