//! Training of adapters: ten steps against PEFT's, and on every mesh as on one rank, through checkpoints and reshards, while the
//! base keeps its bits.

mod support;

use std::path::PathBuf;

use evenkeel_device::DType;
use evenkeel_device::kernel::IGNORE;
use evenkeel_model::{
    AdapterConfig, AdapterFolder, AdapterValues, Cut, Input, Model, PEFT_PREFIX, ParamId, Parameters, ZeroSharding,
};
use evenkeel_store::{Folder, SafeTensorsFile};
use evenkeel_train::{
    AdamW, OptimizerOptions, Progress, Ranks, Rule, Samples, StateKind, Trainer, TrainerOptions, checkpoint,
};
use support::{Strategy, compare_states, device, golden, micros, spread, start_on};

const STEPS: usize = 10;
const LR: f64 = 1e-3;
const LOSS_TOLERANCE: f64 = 1e-4;
/// Of what a parameter moved in ten steps, by norm.
const MOVEMENT_TOLERANCE: f64 = 1e-2;

const CASES: [(&str, &str); 11] = [
    ("llama_lora", "llama3"),
    ("qwen2_rslora", "qwen2"),
    ("gpt2_lora", "gpt2"),
    ("vit_lora_old", "vit"),
    ("llama_patterns", "llama3"),
    ("llama_layers", "llama_odd"),
    ("llama_saved_tied", "llama3"),
    ("llama_saved_untied", "llama2"),
    ("qwen2_saved_tied", "qwen2"),
    ("llama_dropout", "llama3"),
    ("llama_qlora", "llama_nf4"),
];

fn adapter(case: &str) -> PathBuf {
    golden("adapters").join(case)
}

fn floats(file: &SafeTensorsFile, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap_or_else(|| panic!("golden file has {name}"));
    let mut values = vec![0.0; tensor.element_count()];
    tensor.read(0..values.len(), &mut values).expect("numbers");
    values
}

fn indices(file: &SafeTensorsFile, name: &str) -> Vec<u32> {
    let tensor = file.tensor(name).unwrap_or_else(|| panic!("golden file has {name}"));
    let mut values = vec![0i32; tensor.element_count()];
    tensor.read(0..values.len(), &mut values).expect("integers");
    values.iter().map(|&value| if value < 0 { IGNORE } else { value as u32 }).collect()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(&a, &b)| (a as f64 - b as f64).powi(2)).sum::<f64>().sqrt()
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
    for (case, base) in CASES {
        let expected =
            SafeTensorsFile::open(adapter(case).join("expected.safetensors")).expect("golden files are sound");
        // Bases with AdamW's steps of their own have the batches.
        let of_base = SafeTensorsFile::open(golden(base).join("adamw.safetensors"));
        let batches = if expected.tensor("labels").is_some() { &expected } else { of_base.as_ref().unwrap() };
        let device = device(2);
        let queue = device.compute();
        let (folder, saved) = (Folder::open(golden(base)).unwrap(), AdapterFolder::open(&adapter(case)).unwrap());
        let model = Model::open(&folder).unwrap().adapted(saved.config.clone()).unwrap();
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
            if !spec.is_trained {
                assert!(ours == *start, "{case}: {} is frozen", spec.name);
                continue;
            }
            let theirs = floats(&expected, &format!("after.{PEFT_PREFIX}{}", spec.name));
            let (error, moved) = (distance(&ours, &theirs), distance(start, &theirs));
            assert!(
                moved > 0.0 && error <= MOVEMENT_TOLERANCE * moved,
                "{case}: {} off by {error} of {moved}",
                spec.name
            );
        }
    }
}

fn model() -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": true,
    });
    let adapter =
        AdapterConfig { rank: 3, dropout: 0.1, trained_modules: vec!["norm".into()], ..AdapterConfig::default() };
    Model::from_json(&config).unwrap().adapted(adapter).unwrap()
}

/// Ranks whose B is not zero.
fn ranks(strategy: &Strategy, dtype: DType) -> Ranks {
    start_on(&model(), strategy, options(5), move |shard, split, queue| {
        Parameters::random(shard, dtype, split, 7, queue)
    })
}

fn train(ranks: &Ranks, steps: std::ops::Range<usize>) {
    for step in steps {
        let outcome = ranks.step([micros(&model(), step), micros(&model(), step + 1)].concat(), 1e-2).unwrap();
        assert!(outcome.updated);
    }
}

fn weights(ranks: &Ranks, is_trained: bool) -> Vec<Vec<f32>> {
    let whole = |id: usize| ranks.read_rows(StateKind::Weight, ParamId(id), 0..ranks.specs()[id].whole[0]).unwrap();
    let specs = ranks.specs();
    (0..specs.len()).filter(|&id| specs[id].is_trained == is_trained).map(whole).collect()
}

#[test]
fn every_mesh_trains_the_same_adapter_and_leaves_the_base_alone() {
    let alone = ranks(&spread(1, 1, 0), DType::F32);
    let base = weights(&alone, false);
    train(&alone, 0..4);
    assert!(weights(&alone, false) == base);
    for (dp, tp, zero) in [(1, 2, 0), (1, 3, 0), (1, 4, 0), (2, 1, 1), (2, 2, 2), (2, 2, 3), (2, 3, 3)] {
        let what = format!("dp {dp}, tp {tp}, ZeRO {zero}");
        let several = ranks(&spread(dp, tp, zero), DType::F32);
        train(&several, 0..4);
        assert!(weights(&several, false) == base, "{what}: the base has changed");
        compare_states(&what, &several, &alone, 1e-5);
    }
}

#[test]
fn checkpoints_have_the_adapter_alone_and_resume_on_any_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let first = ranks(&spread(2, 2, 3), DType::F32);
    let base = weights(&first, false);
    train(&first, 0..2);
    checkpoint::save(&path, &first, &Progress { step: 2, ..Progress::default() }, serde_json::Value::Null).unwrap();
    let written: u64 = std::fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "safetensors"))
        .map(|entry| entry.metadata().unwrap().len())
        .sum();
    let elements: u64 = model().specs.iter().filter(|spec| spec.is_trained).map(|spec| spec.len() as u64).sum();
    let frozen: u64 = model().specs.iter().filter(|spec| !spec.is_trained).map(|spec| spec.len() as u64).sum();
    assert!(written >= 12 * elements && written < 12 * elements + 4 * frozen, "{written} bytes of {elements} trained");
    train(&first, 2..4);
    for (dp, tp, zero) in [(1, 4, 0), (1, 1, 0), (2, 3, 1)] {
        let second = ranks(&spread(dp, tp, zero), DType::F32);
        checkpoint::load(&path, &second).unwrap();
        let uneven: Vec<f64> = (0..tp).map(|shard| 1.0 + shard as f64 % 2.0).collect();
        second.reshard(Cut { split_sequence: tp > 1, ..Cut::weighted(uneven) }).unwrap();
        train(&second, 2..4);
        let what = format!("resumed on dp {dp}, tp {tp}, ZeRO {zero}");
        assert!(weights(&second, false) == base, "{what}: the base has changed");
        compare_states(&what, &second, &first, 1e-5);
    }
}
