//! Training of adapters: ten steps against PEFT's, and on every mesh as on one rank, through checkpoints and reshards, while the
//! base keeps its bits.

#[path = "../../../golden/adapter_cases.rs"]
mod cases;
mod support;

use std::path::PathBuf;

use cases::CASES;
use evenkeel_device::kernel::Fill;
use evenkeel_device::{DType, DeviceKind};
use evenkeel_model::{
    AdapterConfig, AdapterFolder, AdapterValues, Cut, Dim, Input, Model, ParamId, Parameters, SHARES, Shard,
    ZeroSharding, widths_of,
};
use evenkeel_store::{Folder, SafeTensorsFile};
use evenkeel_train::{
    AdamW, OptimizerOptions, Progress, Ranks, Rule, Samples, StateKind, Trainer, TrainerOptions, checkpoint,
};
use support::{Strategy, compare_states, device, distance, floats, golden, indices, micros, spread, start_on};

const STEPS: usize = 10;
const LR: f64 = 1e-3;
const LOSS_TOLERANCE: f64 = 1e-4;
/// Of what a parameter moved in ten steps, by norm.
const MOVEMENT_TOLERANCE: f64 = 1e-2;

fn adapter(case: &str) -> PathBuf {
    golden("adapters").join(case)
}

fn options(dropout_seed: u64) -> TrainerOptions {
    let optimizer = OptimizerOptions {
        rule: Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 }),
        weight_decay: 0.1,
        decay_vectors: true,
        clip_norm: None,
    };
    TrainerOptions { optimizer: Some(optimizer), label_smoothing: 0.0, longest: 64, dropout_seed }
}

#[test]
fn ten_steps_follow_peft() {
    // The arrangements for CPUs and GPUs; any device can run either.
    let kinds = [DeviceKind::Cpu, DeviceKind::Cuda];
    for ((case, base), kind) in CASES.into_iter().flat_map(|case| kinds.map(|kind| (case, kind))) {
        let expected =
            SafeTensorsFile::open(adapter(case).join("expected.safetensors")).expect("golden files are sound");
        // Bases with AdamW's steps of their own have the batches.
        let of_base = SafeTensorsFile::open(golden(base).join("adamw.safetensors"));
        let batches = if expected.tensor("labels").is_some() { &expected } else { of_base.as_ref().unwrap() };
        let device = device(2);
        let queue = device.compute();
        let (folder, saved) = (Folder::open(golden(base)).unwrap(), AdapterFolder::open(&adapter(case)).unwrap());
        let model = Model::open(&folder).unwrap().adapted(saved.config.clone()).unwrap().for_device(kind);
        let values = AdapterValues::Saved(&saved);
        let parameters = model.load_adapted(&folder, &values, DType::F32, ZeroSharding::NONE, queue).unwrap();
        let start: Vec<Vec<f32>> = parameters.ids().map(|id| queue.read(&parameters.weight(queue, id))).collect();
        let mut trainer = Trainer::alone(model.clone(), device.clone(), parameters, options(77));
        let losses = floats(&expected, "losses");
        let labels = indices(batches, "labels");
        let labels_per_step = labels.len() / STEPS;
        for (step, theirs) in losses.iter().enumerate() {
            let of_step = |all: &[u32]| all[step * labels_per_step..][..labels_per_step].to_vec();
            let labels = of_step(&labels);
            let samples = match model.config.input {
                Input::Tokens { .. } => {
                    let offsets = indices(batches, "segments");
                    let segment_lengths = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
                    Samples::Tokens { ids: of_step(&indices(batches, "input_ids")), labels, segment_lengths }
                }
                Input::Texts { .. } => {
                    let offsets = indices(batches, "segments");
                    let segment_lengths: Vec<usize> =
                        offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
                    let tokens: usize = segment_lengths.iter().sum();
                    let [ids, types] = ["input_ids", "token_type_ids"]
                        .map(|name| indices(batches, name)[step * tokens..][..tokens].to_vec());
                    Samples::Texts { ids, types, labels, segment_lengths }
                }
                Input::Images { .. } => {
                    let pixels = floats(batches, "pixel_values");
                    let pixels = pixels[step * pixels.len() / STEPS..][..pixels.len() / STEPS].to_vec();
                    Samples::Images { pixels, labels }
                }
            };
            let ours = trainer.step(&[samples], LR).unwrap().loss;
            assert!((ours - *theirs as f64).abs() <= LOSS_TOLERANCE, "{case} step {step}: {ours}, {theirs}");
        }
        assert_eq!(losses.len(), STEPS);
        let parameters = &trainer.parameters;
        for (id, start) in parameters.ids().zip(&start) {
            let (spec, ours) = (&parameters.specs[id.0], queue.read(&parameters.weight(queue, id)));
            if spec.is_derived {
                continue;
            }
            if !spec.is_trained {
                assert!(ours == *start, "{case}: {} is frozen", spec.name);
                continue;
            }
            let theirs = floats(&expected, &format!("after.{}", model.peft_name(spec)));
            let [ours, start] = [ours, start.clone()].map(|values| spec.in_adapter_file(values));
            let (error, moved) = (distance(&ours, &theirs), distance(&start, &theirs));
            assert!(
                moved > 0.0 && error <= MOVEMENT_TOLERANCE * moved,
                "{case}: {} off by {error} of {moved}",
                spec.name
            );
        }
    }
}

/// LoRA with dropout, or DoRA.
fn model(is_dora: bool) -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": true,
    });
    let adapter = AdapterConfig {
        rank: 3,
        dropout: if is_dora { 0.0 } else { 0.1 },
        is_dora,
        trained_modules: vec!["norm".into()],
        ..AdapterConfig::default()
    };
    Model::from_json(&config).unwrap().adapted(adapter).unwrap()
}

fn ranks(is_dora: bool, strategy: &Strategy, dtype: DType) -> Ranks {
    ranks_of(&model(is_dora), strategy, dtype)
}

fn ranks_of(model: &Model, strategy: &Strategy, dtype: DType) -> Ranks {
    start_on(model, strategy, options(5), move |shard, split, queue| {
        // Whatever is read before it is written shows.
        let poison = queue.tensor(1, 1 << 20, DType::F32);
        queue.launch(Fill { out: poison.view(), value: f32::NAN });
        drop(poison);
        Parameters::random(shard, dtype, split, 7, queue)
    })
}

/// The arrangement for GPUs, where an adapter's parts lie beside its layer's.
#[test]
fn adapters_beside_their_layers_train_alike_on_every_mesh_of_one_shard() {
    for is_dora in [false, true] {
        let alone = ranks(is_dora, &spread(1, 1, 0), DType::F32);
        let base = weights(&alone, false);
        train(&alone, 0..4);
        for (dp, zero) in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)] {
            let what = format!("dp {dp}, ZeRO {zero}, DoRA {is_dora}");
            let beside = model(is_dora).for_device(DeviceKind::Cuda);
            let beside = ranks_of(&beside, &spread(dp, 1, zero), DType::F32);
            train(&beside, 0..4);
            assert!(weights(&beside, false) == base, "{what}: the base has changed");
            compare_states(&what, &beside, &alone, 1e-5);
        }
    }
}

fn train(ranks: &Ranks, steps: std::ops::Range<usize>) {
    let model = model(false);
    for step in steps {
        let outcome = ranks.step([micros(&model, step), micros(&model, step + 1)].concat(), 1e-2).unwrap();
        assert!(outcome.updated);
    }
}

fn weights(ranks: &Ranks, is_trained: bool) -> Vec<Vec<f32>> {
    let whole = |id: usize| ranks.read_rows(StateKind::Weight, ParamId(id), 0..ranks.specs()[id].whole[0]).unwrap();
    let specs = ranks.specs();
    let is_meant = |id: &usize| specs[*id].is_trained == is_trained && !specs[*id].is_derived;
    (0..specs.len()).filter(is_meant).map(whole).collect()
}

#[test]
fn every_mesh_trains_the_same_adapter_and_leaves_the_base_alone() {
    for is_dora in [false, true] {
        let alone = ranks(is_dora, &spread(1, 1, 0), DType::F32);
        let base = weights(&alone, false);
        train(&alone, 0..4);
        assert!(weights(&alone, false) == base);
        for (dp, tp, zero) in [(1, 2, 0), (1, 3, 0), (1, 4, 0), (2, 1, 1), (2, 2, 2), (2, 2, 3), (2, 3, 3)] {
            let what = format!("dp {dp}, tp {tp}, ZeRO {zero}, DoRA {is_dora}");
            let several = ranks(is_dora, &spread(dp, tp, zero), DType::F32);
            train(&several, 0..4);
            assert!(weights(&several, false) == base, "{what}: the base has changed");
            compare_states(&what, &several, &alone, 1e-5);
        }
    }
}

/// DoRA's norms are those of the present factors on every mesh, whichever way these came there.
#[test]
fn norms_of_rows_follow_every_update_load_and_reshard() {
    let squares = |ranks: &Ranks| -> Vec<f32> {
        let specs = ranks.specs();
        let derived = (0..specs.len()).filter(|&id| specs[id].is_derived);
        derived.flat_map(|id| ranks.read_rows(StateKind::Weight, ParamId(id), 0..1).unwrap()).collect()
    };
    let error = |ours: &[f32], theirs: &[f32]| distance(ours, theirs) / distance(theirs, &vec![0.0; theirs.len()]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let alone = ranks(true, &spread(1, 1, 0), DType::F32);
    let new = squares(&alone);
    train(&alone, 0..3);
    checkpoint::save(&path, &alone, &Progress { step: 3, ..Progress::default() }, serde_json::Value::Null).unwrap();
    let trained = squares(&alone);
    assert!(error(&new, &trained) > 1e-3, "training has changed nothing");
    let several = ranks(true, &spread(1, 3, 0), DType::F32);
    assert!(error(&squares(&several), &new) < 1e-6, "new");
    train(&several, 0..3);
    assert!(error(&squares(&several), &trained) < 1e-5, "updated");
    let resumed = ranks(true, &spread(2, 2, 1), DType::F32);
    checkpoint::load(&path, &resumed).unwrap();
    assert!(error(&squares(&resumed), &trained) < 1e-6, "resumed");
    resumed.reshard(Cut { split_sequence: true, ..Cut::weighted(vec![1.0, 2.0]) }).unwrap();
    assert!(error(&squares(&resumed), &trained) < 1e-6, "resharded");
    // Each replica measures what it keeps, which begins and ends inside of rows.
    let split = ranks(true, &spread(3, 2, 3), DType::F32);
    assert!(error(&squares(&split), &new) < 1e-6, "new, split");
    checkpoint::load(&path, &split).unwrap();
    assert!(error(&squares(&split), &trained) < 1e-6, "resumed, split");
    split.reshard(Cut::weighted(vec![2.0, 1.0])).unwrap();
    assert!(error(&squares(&split), &trained) < 1e-6, "resharded, split");
    // Magnitudes and norms of a new adapter differ by rounding only.
    let model = model(true);
    let config = model.config.adapters.as_ref().unwrap().config.clone();
    let base = Folder::open(golden("llama3")).unwrap();
    let model = Model::open(&base).unwrap().adapted(AdapterConfig { trained_modules: Vec::new(), ..config }).unwrap();
    let started = start_on(&model, &spread(1, 2, 0), options(5), |shard, split, queue| {
        let base = Folder::open(golden("llama3")).unwrap();
        shard.load_adapted(&base, &AdapterValues::New { seed: 1 }, DType::F32, split, queue).unwrap()
    });
    let specs = started.specs();
    let magnitudes: Vec<f32> = (0..specs.len())
        .filter(|&id| specs[id].name.ends_with("lora_magnitude_vector"))
        .flat_map(|id| started.read_rows(StateKind::Weight, ParamId(id), 0..1).unwrap())
        .collect();
    let norms: Vec<f32> = squares(&started).iter().map(|square| square.sqrt()).collect();
    assert!(error(&magnitudes, &norms) < 1e-6, "begun on two ranks");
}

/// Weights in 4 bits are whole on every replica; their rows are measured by all of them together where values are split.
#[test]
fn every_mesh_trains_the_same_dora_on_a_base_in_4_bits() {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64,
        "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 64, "tie_word_embeddings": true,
    });
    let adapter = AdapterConfig { rank: 3, is_dora: true, ..AdapterConfig::default() };
    let model = Model::from_json(&config).unwrap().packed().adapted(adapter).unwrap();
    for dtype in [DType::F32, DType::Bf16] {
        let alone = ranks_of(&model, &Strategy { dtype, ..spread(1, 1, 0) }, dtype);
        train(&alone, 0..4);
        // Sums of bf16 numbers are rounded differently in every cut.
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 3e-2 };
        for (dp, tp, zero) in [(1, 2, 0), (2, 1, 0), (2, 1, 1), (2, 2, 2), (2, 1, 3), (3, 1, 3), (2, 2, 3)] {
            let several = ranks_of(&model, &Strategy { dtype, ..spread(dp, tp, zero) }, dtype);
            train(&several, 0..4);
            compare_states(&format!("dp {dp}, tp {tp}, ZeRO {zero}, {dtype:?}"), &several, &alone, tolerance);
        }
    }
}

/// Norms of rows migrate with the layers that divide by them, and are measured where these are kept.
#[test]
fn ranks_that_compute_for_one_another_train_the_same_dora() {
    let alone = ranks(true, &spread(1, 1, 0), DType::F32);
    train(&alone, 0..4);
    let several = ranks(true, &spread(1, 2, 0), DType::F32);
    let home = widths_of(&Shard::cut(&model(true).config, &Cut::even(2)).unwrap());
    train(&several, 0..1);
    let shares = vec![SHARES + SHARES / 2, SHARES / 2];
    several.migrate(Some(home.with(Dim::Columns, vec![40, 8]).with(Dim::Heads, shares))).unwrap();
    train(&several, 1..3);
    several.migrate(None).unwrap();
    train(&several, 3..4);
    compare_states("migrated", &several, &alone, 1e-5);
}

#[test]
fn every_mesh_trains_the_same_adapters_of_experts_and_resumes_them() {
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": true, "tie_word_embeddings": true,
    });
    let parameters = ["experts.gate_up_proj", "experts.down_proj"].map(str::to_owned).to_vec();
    let adapter = AdapterConfig { rank: 3, parameters, ..AdapterConfig::default() };
    let model = Model::from_json(&config).unwrap().adapted(adapter).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let alone = ranks_of(&model, &spread(1, 1, 0), DType::F32);
    let base = weights(&alone, false);
    train(&alone, 0..2);
    checkpoint::save(&path, &alone, &Progress { step: 2, ..Progress::default() }, serde_json::Value::Null).unwrap();
    train(&alone, 2..4);
    let meshes = [(1, 2, 0), (1, 3, 0), (2, 1, 1), (2, 2, 2), (2, 2, 3)];
    for ((dp, tp, zero), whole_experts) in meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        let what = format!("dp {dp}, tp {tp}, ZeRO {zero}, whole experts {whole_experts}");
        let spread = spread(dp, tp, zero);
        let spread = Strategy { cut: Cut { whole_experts, ..spread.cut.clone() }, ..spread };
        let several = ranks_of(&model, &spread, DType::F32);
        train(&several, 0..4);
        assert!(weights(&several, false) == base, "{what}: the base has changed");
        compare_states(&what, &several, &alone, 1e-5);
        let resumed = ranks_of(&model, &spread, DType::F32);
        checkpoint::load(&path, &resumed).unwrap();
        // Experts that were whole are cut by columns, and the other way round.
        let uneven: Vec<f64> = (0..tp).map(|shard| 1.0 + shard as f64 % 2.0).collect();
        let cut = Cut { split_sequence: tp > 1, whole_experts: !whole_experts, ..Cut::weighted(uneven) };
        resumed.reshard(cut).unwrap();
        train(&resumed, 2..4);
        compare_states(&format!("resumed on {what}"), &resumed, &alone, 1e-5);
    }
}

#[test]
fn checkpoints_have_the_adapter_alone_and_resume_on_any_mesh() {
    for is_dora in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        let first = ranks(is_dora, &spread(2, 2, 3), DType::F32);
        let base = weights(&first, false);
        train(&first, 0..2);
        checkpoint::save(&path, &first, &Progress { step: 2, ..Progress::default() }, serde_json::Value::Null).unwrap();
        let written: u64 = std::fs::read_dir(&path)
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "safetensors"))
            .map(|entry| entry.metadata().unwrap().len())
            .sum();
        let specs = model(is_dora).specs;
        let elements: u64 = specs.iter().filter(|spec| spec.is_trained).map(|spec| spec.len() as u64).sum();
        let frozen: u64 = specs.iter().filter(|spec| !spec.is_trained).map(|spec| spec.len() as u64).sum();
        let is_of_adapter = written >= 12 * elements && written < 12 * elements + 4 * frozen;
        assert!(is_of_adapter, "{written} bytes of {elements} trained");
        train(&first, 2..4);
        for (dp, tp, zero) in [(1, 4, 0), (1, 1, 0), (2, 3, 1)] {
            let second = ranks(is_dora, &spread(dp, tp, zero), DType::F32);
            checkpoint::load(&path, &second).unwrap();
            let uneven: Vec<f64> = (0..tp).map(|shard| 1.0 + shard as f64 % 2.0).collect();
            second.reshard(Cut { split_sequence: tp > 1, ..Cut::weighted(uneven) }).unwrap();
            train(&second, 2..4);
            let what = format!("resumed on dp {dp}, tp {tp}, ZeRO {zero}, DoRA {is_dora}");
            assert!(weights(&second, false) == base, "{what}: the base has changed");
            compare_states(&what, &second, &first, 1e-5);
        }
    }
}
