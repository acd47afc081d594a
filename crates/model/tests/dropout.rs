//! Dropout in training: PyTorch's numbers with the same numbers dropped, and neither recomputation, nor cores, nor parts of a
//! batch change which numbers are dropped.

mod support;

use std::path::PathBuf;

use evenkeel_device::kernel::{IGNORE, Segments};
use evenkeel_device::{DType, Device, Queue};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{
    Batch, Config, Context, Dropouts, Gradients, Images, Input, LossOptions, Model, Noise, Parameters, RotaryTables,
    ZeroSharding,
};
use evenkeel_store::{Folder, SafeTensorsFile};
use serde_json::{Value, json};
use support::{distance, floats, norm};

/// The same as for models without dropout.
const LOSS_TOLERANCE: f64 = 1e-5;
const GRADIENT_TOLERANCE: f64 = 1e-4;
const GRADIENT_FLOOR: f64 = 1e-6;
const BF16_LOSS_TOLERANCE: f64 = 4e-2;

/// The same as in `golden/make.py`.
const NOISE: Noise = Noise { seed: 77, first_token: 1000 };

/// Golden folders, and the dropout that `golden/make.py` gives them.
fn cases() -> [(&'static str, Value); 8] {
    let neox = json!({"attention_dropout": 0.3, "hidden_dropout": 0.2});
    [
        ("llama_packed", json!({"attention_dropout": 0.3})),
        ("gpt2", json!({"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1})),
        ("gpt_neox", neox.clone()),
        ("gpt_neox_serial", neox),
        ("gpt_oss", json!({"attention_dropout": 0.3})),
        ("vit", json!({"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2})),
        ("bert", json!({"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2, "classifier_dropout": 0.4})),
        ("roberta", json!({"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2})),
    ]
}

fn golden(case: &str) -> PathBuf {
    support::golden().join(case)
}

/// A CPU of so many threads, or the GPU under test.
fn device(threads: usize) -> Device {
    support::device(threads, 1 << 30)
}

/// The model of a golden folder, with the given keys in its config.json.
fn model(folder: &Folder, changes: &Value) -> Model {
    let mut config = folder.config().clone();
    for (key, value) in changes.as_object().expect("a table") {
        config[key] = value.clone();
    }
    Model::from_json(&config).expect("a known architecture")
}

/// The data of a golden file's batch.
struct Data {
    ids: Vec<u32>,
    types: Vec<u32>,
    pixels: Vec<f32>,
    labels: Vec<u32>,
    offsets: Vec<usize>,
}

impl Data {
    fn read(case: &str) -> Data {
        let file = SafeTensorsFile::open(golden(case).join("golden.safetensors")).expect("golden files are sound");
        let integers = |name: &str| -> Vec<i32> {
            let Some(tensor) = file.tensor(name) else { return Vec::new() };
            let mut values = vec![0i32; tensor.element_count()];
            tensor.read(0..values.len(), &mut values).expect("integers");
            values
        };
        let indices = |name| integers(name).iter().map(|&i| if i < 0 { IGNORE } else { i as u32 }).collect();
        let pixels = if file.tensor("pixel_values").is_some() { floats(&file, "pixel_values") } else { Vec::new() };
        let offsets = integers("segments").iter().map(|&offset| offset as usize).collect();
        Data { ids: indices("input_ids"), types: indices("token_type_ids"), pixels, labels: indices("labels"), offsets }
    }

    fn sequences(&self, model: &Model) -> usize {
        match model.config.input {
            Input::Tokens { .. } | Input::Texts { .. } => self.offsets.len() - 1,
            Input::Images { .. } => self.labels.len(),
        }
    }

    /// Some of the sequences or images, and the number of tokens before them.
    fn part(&self, which: std::ops::Range<usize>, model: &Model, dtype: DType, queue: &Queue) -> (Batch, u64) {
        match model.config.input {
            Input::Tokens { .. } => {
                let offsets = &self.offsets[which.start..=which.end];
                let tokens = offsets[0]..offsets[offsets.len() - 1];
                let segments = Segments::new(offsets.iter().map(|offset| offset - tokens.start).collect());
                let batch = Batch::tokens(queue, &self.ids[tokens.clone()], &self.labels[tokens.clone()], segments);
                (batch, tokens.start as u64)
            }
            Input::Texts { .. } => {
                let offsets = &self.offsets[which.start..=which.end];
                let tokens = offsets[0]..offsets[offsets.len() - 1];
                let segments = Segments::new(offsets.iter().map(|offset| offset - tokens.start).collect());
                let (ids, types) = (&self.ids[tokens.clone()], &self.types[tokens.clone()]);
                (Batch::texts(queue, ids, types, &self.labels[which], segments), tokens.start as u64)
            }
            Input::Images { size, patch, .. } => {
                let pixels = self.pixels.len() / self.labels.len();
                let images =
                    Images { pixels: &self.pixels[which.start * pixels..which.end * pixels], count: which.len() };
                let before = which.start * Input::tokens_per_image(size, patch);
                let labels = &self.labels[which];
                (Batch::images(queue, images, labels, model.config.input, dtype), before as u64)
            }
        }
    }
}

#[derive(PartialEq, Debug)]
struct Outcome {
    /// The loss of every label; ignored ones have none.
    losses: Vec<f32>,
    /// The gradients of the mean loss, by the parameters' Hugging Face names.
    gradients: Vec<(String, Vec<f32>)>,
}

impl Outcome {
    fn loss(&self, data: &Data) -> f64 {
        let targets = data.labels.iter().filter(|&&label| label != IGNORE).count();
        self.losses.iter().map(|&loss| loss as f64).sum::<f64>() / targets as f64
    }
}

/// Losses and gradients of a golden batch, cut before the given sequences.
fn train(
    case: &str,
    changes: &Value,
    noise: Option<Noise>,
    cuts: &[usize],
    dtype: DType,
    device: &Device,
    keep: Keep,
) -> Outcome {
    let (queue, data) = (device.compute(), Data::read(case));
    let folder = Folder::open(golden(case)).expect("golden folders are sound");
    let model = model(&folder, changes);
    let parameters = model.load(&folder, dtype, ZeroSharding::NONE, queue).expect("golden weights fit");
    let gradients = Gradients::new(&parameters, queue);
    let targets = data.labels.iter().filter(|&&label| label != IGNORE).count();
    let tables = RotaryTables::new(&model.config, queue, data.labels.len().max(16));
    let ends: Vec<usize> = [&[0], cuts, &[data.sequences(&model)]].concat();
    let mut losses = Vec::new();
    for part in ends.windows(2) {
        let (batch, before) = data.part(part[0]..part[1], &model, dtype, queue);
        let batch = match noise {
            None => batch,
            Some(noise) => batch.with_noise(Noise { first_token: noise.first_token + before, ..noise }),
        };
        let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
        let options = LossOptions { smoothing: 0.0, scale: 1.0 / targets as f32 };
        losses.extend(queue.read(&pass::losses_and_gradients(&model, &context, &gradients, options, keep)));
    }
    Outcome { losses, gradients: read(&parameters, &gradients, queue) }
}

fn read(parameters: &Parameters, gradients: &Gradients, queue: &Queue) -> Vec<(String, Vec<f32>)> {
    let one = |id| queue.read(&gradients.sum(queue, id));
    parameters.ids().map(|id| (parameters.specs[id.0].name.clone(), one(id))).collect()
}

#[test]
fn losses_and_gradients_agree_with_pytorch_that_drops_the_same() {
    let device = device(2);
    for (case, changes) in cases() {
        let data = Data::read(case);
        let expected = SafeTensorsFile::open(golden(case).join("dropout.safetensors")).expect("golden files are sound");
        let outcome = train(case, &changes, Some(NOISE), &[], DType::F32, &device, Keep::Everything);
        let (ours, theirs) = (outcome.loss(&data), floats(&expected, "loss")[0] as f64);
        assert!((ours - theirs).abs() <= LOSS_TOLERANCE, "{case}: loss {ours}, expected {theirs}");
        for (name, ours) in &outcome.gradients {
            let theirs = floats(&expected, &format!("grad.{name}"));
            let (error, size) = (distance(ours, &theirs), norm(&theirs));
            assert!(
                error <= GRADIENT_TOLERANCE * size + GRADIENT_FLOOR,
                "{case}: gradient of {name} off by {error} of {size}"
            );
        }
        let rounded = train(case, &changes, Some(NOISE), &[], DType::Bf16, &device, Keep::Everything).loss(&data);
        assert!((rounded - theirs).abs() <= BF16_LOSS_TOLERANCE, "{case}: loss {rounded} in bf16, expected {theirs}");
    }
}

#[test]
fn a_batch_without_noise_drops_nothing() {
    let device = device(1);
    for (case, changes) in cases() {
        let run = |changes: &Value, noise| train(case, changes, noise, &[], DType::F32, &device, Keep::Everything);
        let plain = run(&json!({}), None);
        assert_eq!(run(&changes, None), plain, "{case}");
        assert_eq!(run(&json!({}), Some(NOISE)), plain, "{case}: noise without dropout");
        assert_ne!(run(&changes, Some(NOISE)).losses, plain.losses, "{case}");
    }
}

#[test]
fn recomputation_and_other_numbers_of_cores_drop_the_same() {
    for (case, changes) in cases() {
        for dtype in [DType::F32, DType::Bf16] {
            let run = |threads, keep| train(case, &changes, Some(NOISE), &[], dtype, &device(threads), keep);
            let kept = run(2, Keep::Everything);
            assert_eq!(run(2, Keep::Stream), kept, "{case} {dtype:?}: recomputed");
            assert_eq!(run(3, Keep::Everything), kept, "{case} {dtype:?}: on three cores");
        }
    }
}

#[test]
fn parts_of_a_batch_drop_what_the_whole_drops() {
    let device = device(2);
    for (case, changes) in cases() {
        let run = |cuts: &[usize]| train(case, &changes, Some(NOISE), cuts, DType::F32, &device, Keep::Everything);
        let (whole, parts) = (run(&[]), run(&[1]));
        let error = distance(&whole.losses, &parts.losses) / norm(&whole.losses);
        assert!(error <= 1e-6, "{case}: losses off by {error:e}");
        for ((name, whole), (_, parts)) in whole.gradients.iter().zip(&parts.gradients) {
            let (error, size) = (distance(whole, parts), norm(whole));
            assert!(error <= 1e-5 * size + GRADIENT_FLOOR, "{case}: gradient of {name} off by {error} of {size}");
        }
    }
}

#[test]
fn every_step_drops_others() {
    let device = device(1);
    for (case, changes) in cases() {
        let losses = |noise| train(case, &changes, Some(noise), &[], DType::F32, &device, Keep::Everything).losses;
        let first = losses(NOISE);
        assert_ne!(losses(Noise { seed: NOISE.seed + 1, ..NOISE }), first, "{case}: another seed");
        assert_ne!(losses(Noise { first_token: NOISE.first_token + 1, ..NOISE }), first, "{case}: other tokens");
    }
}

#[test]
fn a_dry_run_takes_the_same_memory_as_a_real_one() {
    for (case, changes) in cases() {
        for keep in [Keep::Everything, Keep::Stream] {
            let devices = [device(1), Device::dry()];
            let peaks = devices.each_ref().map(|device| {
                train(case, &changes, Some(NOISE), &[], DType::Bf16, device, keep);
                device.usage().peak_bytes
            });
            assert_eq!(peaks[0], peaks[1], "{case} {keep:?}");
            assert_eq!(devices[1].usage().live_bytes, 0, "{case}: everything is given back");
        }
    }
}

#[test]
fn config_json_says_what_is_dropped_by_the_keys_and_defaults_of_its_architecture() {
    let dropouts = |attention, residual, embedding| Dropouts { attention, residual, embedding, classifier: 0.0 };
    for (case, keys, expected, ignored) in [
        ("llama2", json!({}), Dropouts::default(), vec![]),
        ("llama2", json!({"attention_dropout": null}), Dropouts::default(), vec![]),
        ("llama2", json!({"attention_dropout": 0.25}), dropouts(0.25, 0.0, 0.0), vec![]),
        ("llama2", json!({"hidden_dropout": 1.0}), Dropouts::default(), vec!["hidden_dropout"]),
        ("llama2", json!({"hidden_dropout": 0, "resid_pdrop": 0.0}), Dropouts::default(), vec![]),
        ("mistral", json!({"attention_dropout": 0.5}), dropouts(0.5, 0.0, 0.0), vec![]),
        ("qwen2", json!({"attention_dropout": 0.5}), dropouts(0.5, 0.0, 0.0), vec![]),
        ("qwen3", json!({"attention_dropout": 0.5}), dropouts(0.5, 0.0, 0.0), vec![]),
        ("gemma3", json!({"attention_dropout": 0.5}), dropouts(0.5, 0.0, 0.0), vec![]),
        ("gpt2", json!({}), dropouts(0.1, 0.1, 0.1), vec![]),
        ("gpt2", json!({"resid_pdrop": 0.0}), dropouts(0.1, 0.0, 0.1), vec![]),
        (
            "gpt2",
            json!({"attn_pdrop": 0.125, "resid_pdrop": 0.25, "embd_pdrop": 0.5, "attention_dropout": 0.1}),
            dropouts(0.125, 0.25, 0.5),
            vec!["attention_dropout"],
        ),
        ("gpt_neox", json!({}), Dropouts::default(), vec![]),
        ("gpt_neox", json!({"attention_dropout": 0.125, "hidden_dropout": 0.25}), dropouts(0.125, 0.25, 0.25), vec![]),
        ("vit", json!({}), Dropouts::default(), vec![]),
        (
            "vit",
            json!({"attention_probs_dropout_prob": 0.125, "hidden_dropout_prob": 0.25}),
            dropouts(0.125, 0.25, 0.25),
            vec![],
        ),
        ("bert", json!({}), Dropouts { classifier: 0.1, ..dropouts(0.1, 0.1, 0.1) }, vec![]),
        (
            "bert",
            json!({"hidden_dropout_prob": 0.25, "classifier_dropout": null}),
            Dropouts { classifier: 0.25, ..dropouts(0.1, 0.25, 0.25) },
            vec![],
        ),
        (
            "roberta",
            json!({"classifier_dropout": 0.5}),
            Dropouts { classifier: 0.5, ..dropouts(0.1, 0.1, 0.1) },
            vec![],
        ),
    ] {
        let mut config = Folder::open(golden(case)).expect("golden folders are sound").config().clone();
        let table = config.as_object_mut().expect("a table");
        table.retain(|key, _| !key.contains("dropout") && !key.contains("pdrop"));
        table.extend(keys.as_object().expect("a table").clone());
        let config = Config::from_json(&config).expect("a known architecture");
        assert_eq!(config.dropouts, expected, "{case} {keys}");
        assert_eq!(config.ignored_dropouts, ignored, "{case} {keys}");
        assert_eq!(config.warnings(1).len(), usize::from(!ignored.is_empty()), "{case} {keys}");
    }
}
