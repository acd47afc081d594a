//! Every architecture against PyTorch: the folders that `golden/make.py` wrote, with logits, losses and all gradients.

#[path = "../../../golden/cases.rs"]
mod cases;

mod support;

use std::path::PathBuf;

use cases::CASES;
use evenkeel_device::{DType, Device, Queue};
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{
    Batch, Context, FileTensor, Gradients, LossOptions, Model, ParamSpec, Parameters, RotaryTables, ZeroSharding,
};
use evenkeel_store::{Folder, SafeTensorsFile};
use support::{distance, expected, floats, golden_batch, norm};

const LOGIT_TOLERANCE: f64 = 1e-4;
const LOSS_TOLERANCE: f64 = 1e-5;
/// Relative by norm, per parameter. An order below the promised tolerance: f32 is that precise.
const GRADIENT_TOLERANCE: f64 = 1e-4;
const BF16_LOSS_TOLERANCE: f64 = 2e-2;
const BF16_SMALL_ROWS_LOSS_TOLERANCE: f64 = 4e-2;
const BF16_GRADIENT_TOLERANCE: f64 = 5e-2;
/// With linear attention or token inputs, which divide by the norms of small rows. PyTorch's autocast is off by up to 0.3 on these
/// cases.
const BF16_SMALL_ROWS_TOLERANCE: f64 = 0.2;
/// Gradients that are zero but for rounding (keys' biases) have no meaningful relative error.
const GRADIENT_FLOOR: f64 = 1e-6;
/// The same, relative to the whole gradient's norm.
const BF16_GRADIENT_FLOOR: f64 = 2e-4;
/// With experts: rounding sends a token to another one where two are about as good.
const BF16_EXPERT_FLOOR: f64 = 2e-3;

/// Cases with numbers for the loss of balance among experts.
const EXPERTS: [&str; 4] = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"];

fn golden(case: &str) -> PathBuf {
    support::golden().join(case)
}

/// A CPU of so many threads, or the GPU under test.
fn device(threads: usize) -> Device {
    support::device(threads, 1 << 30)
}

/// One pass over a golden case.
struct Outcome {
    logits: Vec<f32>,
    loss: f64,
    smoothed_loss: f64,
    /// By the parameters' Hugging Face names.
    gradients: Vec<(String, Vec<f32>)>,
}

fn run(case: &str, dtype: DType, device: &Device, keep: Keep) -> Outcome {
    let queue = device.compute();
    let folder = Folder::open(golden(case)).expect("golden folders are sound");
    let model = Model::open(&folder).expect("a known architecture");
    let parameters = model.load(&folder, dtype, ZeroSharding::NONE, queue).expect("golden weights fit");
    let batch = golden_batch(case, &model, dtype, queue);
    outcome(&model, &parameters, &batch, queue, keep)
}

fn outcome(model: &Model, parameters: &Parameters, batch: &Batch, queue: &Queue, keep: Keep) -> Outcome {
    let tables = RotaryTables::new(&model.config, queue, batch.longest);
    let context = Context { queue, parameters, tables: &tables, batch, pruning: None };
    let gradients = Gradients::new(parameters, queue);
    let mean = |losses: Vec<f32>| losses.iter().map(|&loss| loss as f64).sum::<f64>() / batch.targets as f64;
    let options = LossOptions { smoothing: 0.0, scale: 1.0 / batch.targets as f32 };
    let losses = pass::losses_and_gradients(model, &context, &gradients, options, keep);
    Outcome {
        logits: queue.read(&pass::logits(model, &context)),
        loss: mean(queue.read(&losses)),
        smoothed_loss: mean(queue.read(&pass::evaluate(model, &context, 0.1).losses)),
        gradients: parameters
            .ids()
            .filter(|id| parameters.specs[id.0].is_trained)
            .flat_map(|id| in_files(&parameters.specs[id.0], queue.read(&gradients.sum(queue, id))))
            .collect(),
    }
}

/// A parameter's gradient by the tensors that it is in files.
fn in_files(spec: &ParamSpec, gradient: Vec<f32>) -> Vec<(String, Vec<f32>)> {
    let of_tensor = |(tensor, rows): (FileTensor, std::ops::Range<usize>)| {
        (tensor.name, gradient[rows.start * spec.whole[1]..rows.end * spec.whole[1]].to_vec())
    };
    spec.in_files().map(of_tensor).collect()
}

#[test]
fn every_architecture_agrees_with_pytorch_in_f32() {
    let device = device(2);
    for case in CASES {
        let expected = expected(case);
        let outcome = run(case, DType::F32, &device, Keep::Everything);
        assert_eq!(outcome.logits.len(), floats(&expected, "logits").len(), "{case}");
        for (ours, theirs) in outcome.logits.iter().zip(floats(&expected, "logits")) {
            let error = (*ours as f64 - theirs as f64).abs();
            assert!(error <= LOGIT_TOLERANCE, "{case}: logit {ours}, expected {theirs}");
        }
        for (name, loss) in [("loss", outcome.loss), ("smoothed_loss", outcome.smoothed_loss)] {
            let theirs = floats(&expected, name)[0] as f64;
            assert!((loss - theirs).abs() <= LOSS_TOLERANCE, "{case}: {name} {loss}, expected {theirs}");
        }
        for (name, ours) in &outcome.gradients {
            let theirs = floats(&expected, &format!("grad.{name}"));
            let (error, size) = (distance(ours, &theirs), norm(&theirs));
            assert!(
                error <= GRADIENT_TOLERANCE * size + GRADIENT_FLOOR,
                "{case}: gradient of {name} off by {error} of {size}"
            );
        }
    }
}

#[test]
fn every_architecture_in_bf16_stays_near_f32() {
    let device = device(2);
    for case in CASES {
        let exact = run(case, DType::F32, &device, Keep::Everything);
        let rounded = run(case, DType::Bf16, &device, Keep::Everything);
        let error = (rounded.loss - exact.loss).abs();
        let config = Model::open(&Folder::open(golden(case)).unwrap()).unwrap().config;
        let floor = if config.experts.is_some() { BF16_EXPERT_FLOOR } else { BF16_GRADIENT_FLOOR };
        let has_small_rows = config.linear_attention.is_some() || config.token_inputs.is_some();
        let [loss_tolerance, tolerance] = match has_small_rows {
            true => [BF16_SMALL_ROWS_LOSS_TOLERANCE, BF16_SMALL_ROWS_TOLERANCE],
            false => [BF16_LOSS_TOLERANCE, BF16_GRADIENT_TOLERANCE],
        };
        assert!(error <= loss_tolerance, "{case}: loss off by {error}");
        let total = exact.gradients.iter().map(|(_, gradient)| norm(gradient).powi(2)).sum::<f64>().sqrt();
        for ((name, exact), (_, rounded)) in exact.gradients.iter().zip(&rounded.gradients) {
            let (error, size) = (distance(exact, rounded), norm(exact));
            assert!(error <= tolerance * size + floor * total, "{case}: gradient of {name} off by {error} of {size}");
        }
    }
}

#[test]
fn the_loss_of_balance_among_experts_agrees_with_transformers() {
    let device = device(2);
    let queue = device.compute();
    for (case, keep) in EXPERTS.into_iter().flat_map(|case| [Keep::Everything, Keep::Stream].map(|keep| (case, keep))) {
        let folder = Folder::open(golden(case)).unwrap();
        let mut config = folder.config().clone();
        config["output_router_logits"] = true.into();
        config["router_aux_loss_coef"] = 0.5.into();
        let model = Model::of_folder(&config, &folder).unwrap();
        let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
        let batch = golden_batch(case, &model, DType::F32, queue).with_tallies(queue, &model.config, 1.0);
        let outcome = outcome(&model, &parameters, &batch, queue, keep);
        let expected = SafeTensorsFile::open(golden(case).join("balance.safetensors")).unwrap();
        let balance = batch.tallies.as_ref().expect("the config asks for it").read(queue).loss();
        for (name, loss) in [("loss", outcome.loss), ("balance_loss", balance)] {
            let theirs = floats(&expected, name)[0] as f64;
            assert!((loss - theirs).abs() <= LOSS_TOLERANCE, "{case}: {name} {loss}, expected {theirs}");
        }
        for (name, ours) in &outcome.gradients {
            let theirs = floats(&expected, &format!("grad.{name}"));
            let (error, size) = (distance(ours, &theirs), norm(&theirs));
            let most = GRADIENT_TOLERANCE * size + GRADIENT_FLOOR;
            assert!(error <= most, "{case}: gradient of {name} off by {error} of {size}");
        }
    }
}

fn bits(outcome: &Outcome) -> Vec<u32> {
    let gradients = outcome.gradients.iter().flat_map(|(_, gradient)| gradient);
    gradients.chain(&outcome.logits).map(|value| value.to_bits()).collect()
}

#[test]
fn results_have_the_same_bits_on_any_number_of_cores() {
    for case in ["llama_odd", "gpt_neox", "vit"] {
        for dtype in [DType::F32, DType::Bf16] {
            let one = bits(&run(case, dtype, &device(1), Keep::Everything));
            let three = bits(&run(case, dtype, &device(3), Keep::Everything));
            assert!(one == three, "{case} {dtype:?}");
        }
    }
}

#[test]
fn recomputation_repeats_the_same_bits() {
    let device = device(2);
    for case in CASES {
        let kept = bits(&run(case, DType::F32, &device, Keep::Everything));
        let recomputed = bits(&run(case, DType::F32, &device, Keep::Stream));
        assert!(kept == recomputed, "{case}");
    }
}

#[test]
fn a_dry_run_takes_the_same_memory_as_a_real_one() {
    for case in CASES {
        for keep in [Keep::Everything, Keep::Stream] {
            let real = device(1);
            run(case, DType::Bf16, &real, keep);
            let dry = Device::dry();
            run(case, DType::Bf16, &dry, keep);
            assert_eq!(real.usage().peak_bytes, dry.usage().peak_bytes, "{case} {keep:?}");
            assert_eq!(dry.usage().live_bytes, 0, "{case}: everything is given back");
            assert!(dry.take_counts().flops() > 0, "{case}");
        }
    }
}

#[test]
fn gradients_add_up_over_batches() {
    let device = device(1);
    let queue = device.compute();
    let folder = Folder::open(golden("qwen3")).unwrap();
    let model = Model::open(&folder).unwrap();
    let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
    let batch = golden_batch("qwen3", &model, DType::F32, queue);
    let tables = RotaryTables::new(&model.config, queue, batch.longest);
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
    let gradients = Gradients::new(&parameters, queue);
    let options = LossOptions { smoothing: 0.0, scale: 1.0 };
    let read = || -> Vec<Vec<f32>> { parameters.ids().map(|id| queue.read(&gradients.sum(queue, id))).collect() };
    pass::losses_and_gradients(&model, &context, &gradients, options, Keep::Everything);
    let once = read();
    pass::losses_and_gradients(&model, &context, &gradients, options, Keep::Everything);
    for (once, twice) in once.iter().zip(read()) {
        let doubled: Vec<f32> = once.iter().map(|value| 2.0 * value).collect();
        assert!(distance(&doubled, &twice) <= 1e-6 * norm(&doubled));
    }
    gradients.clear();
    pass::losses_and_gradients(&model, &context, &gradients, options, Keep::Everything);
    assert_eq!(read(), once);
}
