//! Training whose steps are computed in another cut than the one that ranks keep, against training without.

mod support;

use evenkeel_comm::RankFailure;
use evenkeel_device::DType;
use evenkeel_model::{Cut, Dim, Model, Parameters, SHARES, Shard, Widths, widths_of};
use evenkeel_step::Work;
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, NONE, OASES};
use evenkeel_train::{
    OptimizerOptions, Progress, Ranks, Samples, Trainer, TrainerOptions, checkpoint, costs, costs_migrated,
};
use support::{Strategy, compare_curves, compare_states, spread, start_on, state};

const STEPS: usize = 20;
const TOLERANCE: f64 = 1e-5;

fn llama() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": true,
    });
    Model::from_json(&config).unwrap()
}

fn gpt2() -> Model {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32,
        "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
    });
    Model::from_json(&config).unwrap()
}

fn options() -> TrainerOptions {
    let optimizer = Some(OptimizerOptions { clip_norm: Some(0.5), ..OptimizerOptions::default() });
    TrainerOptions { optimizer, label_smoothing: 0.0, longest: 16, dropout_seed: 5 }
}

fn ranks(model: &Model, topology: &Strategy, arrangement: Arrangement, dtype: DType) -> Ranks {
    start_on(model, &topology.clone().arranged(arrangement), options(), move |shard, split, queue| {
        Parameters::random(shard, dtype, split, 7, queue)
    })
}

/// Micro-batches of different sizes.
fn micros(step: usize) -> Vec<Samples> {
    let micro = |micro: usize| {
        let lengths = vec![5 + micro % 3, 4, 6];
        let tokens: usize = lengths.iter().sum();
        let ids: Vec<u32> = (0..tokens).map(|i| ((i / 2 * 5 + (step + micro) % 7 * 3) % 64) as u32).collect();
        Samples::Tokens { labels: (0..tokens).map(|i| ids[(i + 1) % tokens]).collect(), ids, segment_lengths: lengths }
    };
    (0..2).map(micro).collect()
}

/// Groups of heads and columns of the FFN; what ranks have of the vocabulary stays.
fn widths(model: &Model, topology: &Strategy, head_groups: &[usize], ffn: &[usize]) -> Widths {
    let home = widths_of(&Shard::cut(&model.config, &topology.cut).unwrap());
    let head_shares = head_groups.iter().map(|groups| groups * SHARES).collect();
    home.with(Dim::Heads, head_shares).with(Dim::Columns, ffn.to_vec())
}

fn migrate(ranks: &Ranks, work: Option<&Widths>) -> Result<(), RankFailure> {
    let work = work.cloned();
    ranks.with_trainers(move |trainer| trainer.migrate(work.clone())).map(drop)
}

/// Loss and gradient norm of each step, in the work layouts that take turns every few steps.
fn curve(ranks: &Ranks, works: &[Option<Widths>]) -> Vec<[f64; 2]> {
    let step = |step: usize| {
        if step.is_multiple_of(4) && !works.is_empty() {
            migrate(ranks, works[step / 4 % works.len()].as_ref()).unwrap();
        }
        let outcome = ranks.step(micros(step), 1e-3).unwrap();
        assert!(outcome.updated);
        let migrates = |trainer: &mut Trainer| trainer.program().tasks.iter().any(|task| task.work == Work::Migrate);
        let is_away = !works.is_empty() && works[step / 4 % works.len()].is_some();
        assert!(ranks.with_trainers(migrates).unwrap().iter().all(|&migrates| migrates == is_away), "step {step}");
        [outcome.loss, outcome.grad_norm]
    };
    (0..STEPS).map(step).collect()
}

fn assert_close(what: &str, ours: &[[f64; 2]], theirs: &[[f64; 2]]) {
    compare_curves(what, ours.as_flattened(), theirs.as_flattened(), [0.0, TOLERANCE]);
}

#[test]
fn the_curve_is_that_without_migration_whatever_the_work_layouts() {
    for (model, columns) in [(llama(), 48), (gpt2(), 128)] {
        for (dp, tp, zero, arrangement) in [
            (1, 2, 0, Arrangement::of(NONE)),
            (1, 4, 0, Arrangement::of(OASES).in_parts(2)),
            (2, 2, 0, Arrangement::of(CROSS_PASS).in_parts(2).ahead()),
            (2, 2, 1, Arrangement::of(OASES)),
        ] {
            let topology = spread(dp, tp, zero);
            let what = format!("{:?}, {topology:?}, {arrangement:?}", model.config.family.names.embed);
            let without = ranks(&model, &topology, arrangement, DType::F32);
            let expected = curve(&without, &[]);
            assert!(expected[STEPS - 1][0] < expected[0][0], "{what} learns");
            let layouts: [(&[usize], &[usize]); 2] = match tp {
                2 => [(&[1, 3], &[columns / 4, columns - columns / 4]), (&[4, 0], &[columns, 0])],
                _ => [
                    (&[0, 2, 1, 1], &[7, columns / 2 - 7, 5, columns / 2 - 5]),
                    (&[1, 1, 1, 1], &[columns - 3, 3, 0, 0]),
                ],
            };
            let [first, second] = layouts.map(|(heads, ffn)| Some(widths(&model, &topology, heads, ffn)));
            for works in [vec![first.clone()], vec![first, None, second]] {
                let ranks = ranks(&model, &topology, arrangement, DType::F32);
                assert_close(&what, &curve(&ranks, &works), &expected);
                // Whatever migrated last, what is evaluated, kept and saved is at home.
                let [ours, theirs] =
                    [&ranks, &without].map(|ranks| ranks.evaluate(micros(3).remove(0)).unwrap().loss());
                assert!((ours - theirs).abs() <= TOLERANCE * theirs, "{what}: evaluated {ours}, expected {theirs}");
                compare_states(&what, &ranks, &without, 1e-3);
            }
        }
    }
}

#[test]
fn a_home_without_heads_or_columns_learns_saves_and_resumes() {
    let model = llama();
    let expected = curve(&ranks(&model, &spread(1, 1, 0), Arrangement::default(), DType::F32), &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    for (dp, zero) in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)] {
        let even = spread(dp, 3, zero);
        let home = widths(&model, &even, &[0, 3, 1], &[20, 28, 0]);
        let topology = Strategy { cut: Cut { widths: Some(home), ..even.cut.clone() }, ..even.clone() };
        let without = ranks(&model, &topology, Arrangement::default(), DType::F32);
        assert_close(&format!("{topology:?}"), &curve(&without, &[]), &expected);
        let progress = Progress { step: STEPS as u64, ..Progress::default() };
        checkpoint::save(&path, &without, &progress, serde_json::Value::Null).unwrap();
        let resumed = ranks(&model, &even, Arrangement::default(), DType::F32);
        checkpoint::load(&path, &resumed).unwrap();
        assert_eq!(state(&without), state(&resumed), "{topology:?}");
    }
}

fn train(ranks: &Ranks, steps: std::ops::Range<usize>) {
    steps.for_each(|step| assert!(ranks.step(micros(step), 1e-3).unwrap().updated));
}

#[test]
fn a_checkpoint_taken_while_work_is_elsewhere_continues_bitwise() {
    let (model, topology) = (llama(), spread(2, 2, 1));
    let work = Some(widths(&model, &topology, &[1, 3], &[11, 37]));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let before = ranks(&model, &topology, Arrangement::default(), DType::F32);
    migrate(&before, work.as_ref()).unwrap();
    train(&before, 0..3);
    checkpoint::save(&path, &before, &Progress { step: 3, ..Progress::default() }, serde_json::Value::Null).unwrap();
    let after = ranks(&model, &topology, Arrangement::default(), DType::F32);
    checkpoint::load(&path, &after).unwrap();
    migrate(&after, work.as_ref()).unwrap();
    for ranks in [&before, &after] {
        train(ranks, 3..6);
    }
    assert_eq!(state(&before), state(&after));
}

#[test]
fn a_dry_run_tells_the_memory_of_the_work_layout_to_the_byte() {
    for (model, ffn) in [(llama(), [4, 44]), (gpt2(), [20, 108])] {
        for (dp, zero, arrangement) in
            [(1, 0, Arrangement::of(NONE)), (2, 1, Arrangement::of(OASES).in_parts(2)), (2, 0, Arrangement::of(OASES))]
        {
            let topology = spread(dp, 2, zero);
            let work = widths(&model, &topology, &[1, 3], &ffn);
            let shards = model.cut(&topology.cut).unwrap();
            for dtype in [DType::F32, DType::Bf16] {
                let (options, micros) = (options(), micros(0));
                let strategy = Strategy { dtype, ..topology.clone().arranged(arrangement) };
                let ranks = ranks(&model, &topology, arrangement, dtype);
                migrate(&ranks, Some(&work)).unwrap();
                let of_step = {
                    let micros = micros.clone();
                    ranks.with_trainers(move |trainer| {
                        trainer.device.compute().finish();
                        trainer.device.reset_peak();
                        trainer.step(&micros, 0.0).unwrap();
                        let program = trainer.program();
                        let migrates = program.tasks.iter().filter(|task| task.work == Work::Migrate).count();
                        assert_eq!(migrates, 4, "attention and MLP of two layers");
                        trainer.device.usage().peak_bytes
                    })
                };
                let dry = costs_migrated(&shards, &strategy, options, &micros, Some(&work));
                let peaks: Vec<u64> = dry.iter().map(|cost| cost.peak_bytes).collect();
                assert_eq!(of_step.unwrap(), peaks, "dp {dp}, stage {zero}, {dtype:?}");
                let home = costs(&shards, &strategy, options, &micros);
                assert!(dry[1].peak_bytes > home[1].peak_bytes, "who computes for another needs room for it");
                if model.config.family.names.embed == llama().config.family.names.embed {
                    // One rectangle of every matrix: what is left to compute is used, and its gradients added up, in place.
                    assert!(dry[0].peak_bytes <= home[0].peak_bytes, "who computes less needs no more");
                }
                assert!(dry[0].flops < home[0].flops && dry[1].flops > home[1].flops, "and has more to compute");
            }
        }
    }
}

#[test]
fn what_cannot_be_migrated_is_refused_with_a_reason() {
    let model = llama();
    let failure = |model: &Model, topology: &Strategy, work: &Widths| {
        let ranks = ranks(model, topology, Arrangement::default(), DType::F32);
        migrate(&ranks, Some(work)).unwrap_err().message
    };
    let two = spread(1, 2, 0);
    let stage_2 = spread(2, 2, 2);
    let work = widths(&model, &two, &[1, 3], &[20, 28]);
    assert!(failure(&model, &stage_2, &work).contains("expected stage 0 or 1 of ZeRO, found 2"));
    let too_wide = work.clone().with(Dim::Columns, vec![20, 29]);
    assert!(failure(&model, &two, &too_wide).contains("widths of each dim must add up"));
    let other_classes = work.clone().with(Dim::Classes, vec![30, 34]);
    assert!(failure(&model, &two, &other_classes).contains("only heads, FFN columns and experts migrate"));
    let uncut = Cut { uncut: [evenkeel_model::Part::Mlp(0)].into(), ..Cut::even(2) };
    let partly = Strategy::of(uncut);
    assert!(failure(&model, &partly, &work).contains("what every shard holds whole cannot migrate"));
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64,
    });
    let (few, four) = (Model::from_json(&config).unwrap(), spread(1, 4, 0));
    let work = widths(&few, &four, &[0; 4], &[12, 12, 4, 20]);
    assert!(failure(&few, &four, &work).contains("2 key and value heads over 4 shards"));
}
