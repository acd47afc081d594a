//! What users of tensor-parallel training rely on: a model in training on several ranks against one rank.

#[path = "../../../golden/cases.rs"]
mod cases;
mod support;

use std::path::Path;

use cases::CASES;
use evenkeel_comm::{Communicator, Options, RankFailure};
use evenkeel_device::DType;
use evenkeel_model::{Cut, Input, Model, ParamId, Parameters, Shard, TpPlan, ZeroSharding};
use evenkeel_step::Strategy;
use evenkeel_store::{FileDtype, Folder, NewFolder};
use evenkeel_train::{
    Error, OptimizerOptions, Progress, Ranks, Samples, StateKind, Trainer, TrainerOptions, checkpoint, save_weights,
};
use support::{compare_curves, golden};

/// AdamW's first steps go by the sign of a gradient, also where that is nothing but rounding: curves part in proportion to it.
const LR: f64 = 2.5e-4;

fn model(case: &str) -> Model {
    Model::open(&Folder::open(golden(case)).unwrap()).unwrap()
}

fn options(clip_norm: Option<f32>) -> TrainerOptions {
    let optimizer = OptimizerOptions { clip_norm, ..OptimizerOptions::default() };
    TrainerOptions { optimizer: Some(optimizer), label_smoothing: 0.0, longest: 64, dropout_seed: 0 }
}

/// Ranks with the case's own weights.
fn loaded(case: &str, cut: &Cut, dtype: DType, options: TrainerOptions) -> Ranks {
    let path = golden(case);
    support::start(&model(case), cut, options, move |shard, queue| {
        shard.load(&Folder::open(&path).unwrap(), dtype, ZeroSharding::NONE, queue).unwrap()
    })
}

/// Samples with something to learn in them, different from step to step.
fn samples(model: &Model, step: usize) -> Samples {
    match model.config.input {
        Input::Tokens { .. } => {
            let classes = model.config.classes;
            let ids: Vec<u32> = (0..24).map(|i| ((i / 2 * 5 + step % 7 * 3) % classes) as u32).collect();
            let labels = (0..24).map(|i| ids[(i + 1) % 24]).collect();
            Samples::Tokens { ids, labels, segment_lengths: vec![11, 13] }
        }
        Input::Texts { vocabulary, .. } => {
            let labels: Vec<u32> = vec![step as u32 % 3, 1];
            let id = |i: usize| ((i / 2 * 5 + labels[i / 13] as usize * 3) % vocabulary) as u32;
            Samples::Texts { ids: (0..24).map(id).collect(), types: vec![0; 24], labels, segment_lengths: vec![13, 11] }
        }
        Input::Images { size, channels, .. } => {
            let labels: Vec<u32> = vec![step as u32 % 3, 1];
            let shade = |i: usize| labels[i / (channels * size * size)] as f32 / 3.0 + ((i + step) % 13) as f32 / 50.0;
            Samples::Images { pixels: (0..2 * channels * size * size).map(shade).collect(), labels }
        }
    }
}

/// Loss and gradient norm of each step.
fn train(case: &str, ranks: &Ranks, steps: usize) -> Vec<(f64, f64)> {
    let model = model(case);
    let step = |step| ranks.step(vec![samples(&model, step)], LR).unwrap();
    (0..steps).map(step).map(|outcome| (outcome.loss, outcome.grad_norm)).collect()
}

fn losses(curve: &[(f64, f64)]) -> Vec<f64> {
    curve.iter().map(|(loss, _)| *loss).collect()
}

fn norms(curve: &[(f64, f64)]) -> Vec<f64> {
    curve.iter().map(|(_, norm)| *norm).collect()
}

fn uneven(shards: usize) -> Cut {
    Cut::weighted((0..shards).map(|shard| 1.0 + 0.6 * shard as f64).collect())
}

fn split(cut: Cut) -> Cut {
    Cut { split_sequence: true, ..cut }
}

#[test]
fn fifty_steps_give_the_same_curve_on_any_number_of_ranks() {
    let cuts = [[Cut::even(2), split(uneven(2))], [uneven(3), split(Cut::even(3))]];
    for (case, cuts) in CASES.into_iter().zip(cuts.into_iter().cycle()) {
        let alone = train(case, &loaded(case, &Cut::even(1), DType::F32, options(Some(1.0))), 50);
        assert!(alone[49].0 < alone[0].0, "{case} learns");
        for cut in cuts {
            let may_split = model(case).config.whole_parts(cut.weights.len()).is_empty();
            let cut = Cut { split_sequence: cut.split_sequence && may_split, ..cut };
            let together = train(case, &loaded(case, &cut, DType::F32, options(Some(1.0))), 50);
            compare_curves(&format!("{case}, {cut:?}"), &losses(&together), &losses(&alone), [1e-4, 0.0]);
        }
    }
}

#[test]
fn bf16_on_ranks_is_as_far_from_bf16_alone_as_rounding_makes_it() {
    for case in ["llama3", "gpt2", "qwen3", "gpt_neox"] {
        let curve = |cut: &Cut, dtype| train(case, &loaded(case, cut, dtype, options(Some(1.0))), 30);
        // A number that is none counts as the largest.
        let largest = |a: &[(f64, f64)], b: &[(f64, f64)]| -> f64 {
            assert_eq!(a.len(), b.len());
            a.iter().zip(b).map(|((a, _), (b, _))| (a - b).abs()).max_by(f64::total_cmp).expect("steps")
        };
        let (exact, alone) = (curve(&Cut::even(1), DType::F32), curve(&Cut::even(1), DType::Bf16));
        let rounding = largest(&exact, &alone);
        for cut in [Cut::even(2), split(uneven(3))] {
            let together = curve(&cut, DType::Bf16);
            let error = largest(&together, &exact);
            assert!(error <= 2.0 * rounding + 2e-3, "{case}, {cut:?}: {error} from f32, alone {rounding}");
        }
    }
}

#[test]
fn the_same_layout_twice_gives_the_same_bits() {
    for (cut, dtype) in [(uneven(3), DType::F32), (split(Cut::even(2)), DType::Bf16)] {
        let [first, second] = [(); 2].map(|_| {
            let ranks = loaded("qwen3", &cut, dtype, options(Some(1.0)));
            (train("qwen3", &ranks, 5), support::state(&ranks))
        });
        assert!(first == second, "{cut:?}");
    }
}

#[test]
fn gradient_norm_under_tp_equals_the_single_ranks_after_20_batches() {
    for case in ["llama3", "gpt2", "qwen3", "gemma3", "vit"] {
        for clip in [None, Some(0.05)] {
            let norms = |cut: &Cut| norms(&train(case, &loaded(case, cut, DType::F32, options(clip)), 20));
            let alone = norms(&Cut::even(1));
            for cut in [uneven(2), Cut::even(4), split(Cut::even(2))] {
                compare_curves(&format!("{case}, {cut:?}, {clip:?}"), &norms(&cut), &alone, [0.0, 1e-3]);
            }
        }
    }
}

#[test]
fn replicated_parameters_stay_bitwise_equal_across_ranks() {
    // Norms, norms of heads, biases of row-parallel layers, positions, and key and value heads that ranks share.
    for case in ["qwen3", "gpt2", "gpt_neox", "llama3", "vit"] {
        for cut in [Cut::even(4), split(uneven(3))] {
            let ranks = loaded(case, &cut, DType::F32, options(Some(1.0)));
            train(case, &ranks, 10);
            support::check_replicas(&format!("{case}, {cut:?}"), &ranks, |trainer| {
                let queue = trainer.device.compute();
                let of = |id: ParamId| trainer.kept(StateKind::Weight, id).map(|(_, kept)| queue.read(&kept));
                trainer.parameters.ids().map(of).collect()
            });
        }
    }
}

#[test]
fn different_batches_within_a_tp_group_are_detected_on_any_step() {
    let ranks = loaded("llama3", &Cut::even(2), DType::F32, options(None));
    train("llama3", &ranks, 3);
    let outcomes = ranks.with_trainers(|trainer| {
        let step = trainer.model.shard.index;
        trainer.step(&[samples(&trainer.model, step)], LR)
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::DifferentSamples { ranks: [0, 1] }), "{error}");
        assert!(error.is_fault());
    }
    assert!(ranks.step(vec![samples(&model("llama3"), 0)], LR).is_ok(), "the ranks can go on");
}

#[test]
fn nothing_is_made_of_what_ranks_computed_once_one_has_ended_the_run() {
    let ranks = loaded("llama3", &Cut::even(2), DType::F32, options(None));
    let answers = ranks.with_trainers(|trainer| trainer.communicator().abort("the link is gone"));
    assert!(answers.unwrap_err().to_string().contains("the link is gone"));
    let step = ranks.step(vec![samples(&model("llama3"), 0)], LR);
    assert!(step.unwrap_err().to_string().contains("the link is gone"));
}

fn saved(ranks: &Ranks, folder: &Path) -> Vec<u8> {
    let new = NewFolder::create(folder).unwrap();
    save_weights(&new, ranks.specs(), FileDtype::F32, &[], |id, rows| ranks.read_rows(StateKind::Weight, id, rows))
        .unwrap();
    new.commit(false).unwrap();
    std::fs::read(folder.join("model.safetensors")).unwrap()
}

#[test]
fn a_model_saved_from_any_ranks_is_byte_identical_to_one_saved_from_one() {
    let temporary = tempfile::tempdir().unwrap();
    for case in CASES {
        let heads = model(case).config.heads;
        let save = |name: &str, cut: &Cut| {
            let ranks = loaded(case, cut, DType::F32, options(None));
            saved(&ranks, &temporary.path().join(format!("{case}-{name}")))
        };
        let alone = save("1", &Cut::even(1));
        for shards in (2..=4).filter(|&shards| shards <= heads) {
            let [even, by_weight] = [Cut::even(shards), uneven(shards)];
            assert!(save(&format!("{shards}"), &even) == alone, "{case} from {shards}");
            assert!(save(&format!("{shards}-uneven"), &by_weight) == alone, "{case} from {shards}, uneven");
        }
    }
}

fn llama(heads: usize, kv_heads: usize, head_dim: usize, vocab: usize, tied: bool) -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": heads * head_dim, "num_hidden_layers": 1, "head_dim": head_dim,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": 64, "vocab_size": vocab,
        "tie_word_embeddings": tied,
    });
    Model::from_json(&config).unwrap()
}

#[test]
fn heads_are_cut_in_whole_groups() {
    type Widths = Vec<usize>;
    let widths = |model: &Model, shards: usize| -> (Widths, Widths) {
        let shards = Shard::cut(&model.config, &Cut::even(shards)).unwrap();
        let dim = model.config.head_dim;
        let of = |range: fn(&Shard) -> usize| shards.iter().map(|shard| range(shard) * dim).collect();
        (of(|shard| shard.heads.len()), of(|shard| shard.kv_heads.len()))
    };
    assert_eq!(widths(&llama(6, 6, 64, 10, false), 4).1, [128, 128, 64, 64]);
    assert_eq!(widths(&llama(32, 8, 32, 10, false), 3), (vec![384, 384, 256], vec![96, 96, 64]));
    assert_eq!(widths(&llama(12, 12, 8, 10, false), 5).0, [24, 24, 16, 16, 16]);
    // Two key and value heads over three and four ranks: some ranks share one.
    assert_eq!(widths(&llama(8, 2, 8, 10, false), 3), (vec![32, 16, 16], vec![8, 8, 8]));
    let weak = Shard::cut(&llama(8, 2, 8, 10, false).config, &Cut::weighted(vec![1.0, 1.0, 0.5])).unwrap();
    assert_eq!(weak.iter().map(|shard| shard.heads.len()).collect::<Vec<_>>(), [4, 3, 1]);
    assert_eq!(widths(&llama(8, 2, 8, 10, false), 4), (vec![16; 4], vec![8; 4]));
}

#[test]
fn a_rank_holds_less_than_the_whole_and_tied_embeddings_stay_one_tensor() {
    for (vocab, tied) in [(10, false), (10, true), (1001, true)] {
        let model = llama(4, 2, 8, vocab, tied);
        let whole: usize = model.specs.iter().map(|spec| spec.len()).sum();
        let embeddings = |model: &Model| model.specs.iter().filter(|spec| spec.shape == [vocab, 32]).count();
        let shards = model.cut(&Cut::even(3)).unwrap();
        for shard in &shards {
            assert!(shard.specs.iter().map(|spec| spec.len()).sum::<usize>() < whole);
            assert_eq!(embeddings(shard), if tied { 1 } else { 2 });
        }
        if vocab == 10 {
            let rows: Vec<usize> = shards.iter().map(|shard| shard.specs[0].matrix[0]).collect();
            assert_eq!(rows, [4, 3, 3]);
        }
        let step = |cut: &Cut| {
            let ranks = support::random(&model, cut, options(None), DType::F32);
            let outcome = ranks.step(vec![samples(&model, 0)], LR).unwrap();
            (outcome.loss, support::state(&ranks))
        };
        let ((loss, alone), (shared_loss, shared)) = (step(&Cut::even(1)), step(&Cut::even(3)));
        assert!((loss - shared_loss).abs() < 1e-5);
        assert_eq!(alone.concat().len(), shared.concat().len());
        let distance: f64 =
            alone.concat().iter().zip(shared.concat()).map(|(a, b)| (a - b) as f64).map(|d| d * d).sum::<f64>().sqrt();
        assert!(distance < 1e-3, "{vocab} {tied}: off by {distance}");
    }
}

#[test]
fn what_a_plan_leaves_whole_is_computed_whole_on_every_rank() {
    if support::under_test::parts_differ() {
        println!("skipped: parts of different sizes round differently, and `evenkeel train` refuses this");
        return;
    }
    for (case, plan) in [
        ("llama3", serde_json::json!({"layers.*.mlp.*": "skip"})),
        ("qwen3", serde_json::json!({"layers": [["layers.0.self_attn.*", "replicate"], ["lm_head", "replicate"]]})),
        ("gpt2", serde_json::json!({"wte": "replicate", "h.*.attn.c_*": "replicate"})),
    ] {
        let uncut = TpPlan::from_json(&plan).unwrap().uncut(&model(case), 2).unwrap();
        assert!(!uncut.is_empty());
        let cut = Cut { uncut, ..Cut::even(2) };
        let curve = |cut: &Cut| train(case, &loaded(case, cut, DType::F32, options(Some(1.0))), 10);
        let (together, alone) = (curve(&cut), curve(&Cut::even(1)));
        compare_curves(case, &losses(&together), &losses(&alone), [1e-4, 0.0]);
        compare_curves(case, &norms(&together), &norms(&alone), [0.0, 1e-3]);
        let error = model(case).cut(&split(cut)).unwrap_err();
        assert!(error.to_string().contains("cannot be split by tokens"), "{error}");
    }
}

#[test]
fn loading_touches_only_a_ranks_own_slices() {
    let model = llama(4, 2, 8, 400, true);
    let device = support::device(1);
    let parameters = Parameters::random(&model, DType::F32, ZeroSharding::NONE, 3, device.compute());
    let shards = model.cut(&Cut::even(2)).unwrap();
    let queue = device.compute();
    for (id, spec) in parameters.ids().zip(&model.specs) {
        let whole = queue.read(&parameters.master(id));
        let asked = std::cell::RefCell::new(vec![false; whole.len()]);
        let held = &shards[1].specs[id.0];
        let tensor = queue.tensor(held.matrix[0], held.matrix[1], DType::F32);
        evenkeel_model::fill_slice(queue, &tensor, held, |range, out| -> Result<(), std::convert::Infallible> {
            asked.borrow_mut()[range.clone()].fill(true);
            out.copy_from_slice(&whole[range]);
            Ok(())
        })
        .unwrap();
        assert_eq!(asked.into_inner().iter().filter(|&&asked| asked).count(), held.len(), "{}", spec.name);
    }
}

#[test]
fn a_rank_that_panics_ends_all_whatever_the_others_do() {
    // The other rank has done its job and is idle.
    let ranks = loaded("llama3", &Cut::even(2), DType::F32, options(None));
    let failure =
        ranks.with_trainers(|trainer| assert_eq!(trainer.model.shard.index, 0, "only the first")).unwrap_err();
    assert!(failure.rank == 1 && failure.message.contains("only the first"), "{failure}");
    let again = ranks.with_trainers(|_| ()).unwrap_err();
    assert_eq!(again, failure, "it is known from then on");
    let error = ranks.step(vec![samples(&model("llama3"), 0)], LR).unwrap_err();
    assert!(error.is_fault(), "{error}");
}

#[test]
fn a_rank_that_panics_or_fails_while_it_is_made_is_an_error() {
    let make = |communicator: &Communicator, how: &'static str| -> Result<Trainer, RankFailure> {
        match (communicator.rank(), how) {
            (1, "panic") => panic!("the second cannot be made"),
            (1, how) => Err(RankFailure { rank: 1, message: how.to_owned() }),
            _ => {
                let (model, device) = (model("llama3"), support::device(1));
                let parameters = Parameters::random(&model, DType::F32, ZeroSharding::NONE, 0, device.compute());
                Ok(Trainer::alone(model, device, parameters, options(None)))
            }
        }
    };
    for (how, expected) in [("panic", "the second cannot be made"), ("refused", "refused")] {
        let outcome = Ranks::start(3, &Options::default(), move |communicator| make(communicator, how));
        let failure = outcome.err().expect("no ranks");
        assert!(failure.rank == 1 && failure.message.contains(expected), "{failure}");
    }
}

#[test]
fn a_checkpoint_that_one_rank_cannot_load_is_an_error() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().join("checkpoint");
    let (small, large) = (llama(4, 2, 8, 40, false), llama(4, 2, 8, 48, false));
    let ranks = support::random(&small, &Cut::even(2), options(None), DType::F32);
    checkpoint::save(&folder, &ranks, &Progress::default(), serde_json::Value::Null).unwrap();
    let mixed = [small.cut(&Cut::even(2)).unwrap().remove(0), large.cut(&Cut::even(2)).unwrap().remove(1)];
    let ranks = Ranks::start(2, &Options::default(), move |communicator| -> Result<Trainer, RankFailure> {
        let device = support::device(1);
        let parameters =
            Parameters::random(&mixed[communicator.rank()], DType::F32, ZeroSharding::NONE, 0, device.compute());
        Ok(Trainer::new(&mixed, &Strategy::of(Cut::even(2)), communicator, device, parameters, options(None)))
    });
    let error = checkpoint::load(&folder, &ranks.unwrap()).unwrap_err();
    assert!(error.to_string().contains("as [40, 32], this run needs [48, 32]"), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("a model of another size")) && !error.is_fault(), "{error}");
}
