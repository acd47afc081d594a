//! Ten steps of AdamW against PyTorch's, from the same weights on the same batches.

mod support;

use evenkeel_device::DType;
use evenkeel_device::kernel::Segments;
use evenkeel_model::pass::{self, Keep};
use evenkeel_model::{Batch, Context, Gradients, Input, LossOptions, Model, RotaryTables, ZeroSharding};
use evenkeel_store::{Folder, SafeTensorsFile};
use evenkeel_train::{AdamW, Optimizer, OptimizerOptions, Rule, Samples, Trainer, TrainerOptions, Update};
use support::{device, distance, floats, golden, indices};

const STEPS: usize = 10;
const LR: f64 = 1e-3;
const LOSS_TOLERANCE: f64 = 1e-4;
/// Of what a parameter moved in ten steps, by norm.
const MOVEMENT_TOLERANCE: f64 = 1e-2;

#[test]
fn ten_steps_follow_pytorch() {
    for case in ["llama3", "vit"] {
        let expected = SafeTensorsFile::open(golden(case).join("adamw.safetensors")).expect("golden files are sound");
        let device = device(2);
        let queue = device.compute();
        let folder = Folder::open(golden(case)).unwrap();
        let model = Model::open(&folder).unwrap();
        let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
        let start: Vec<Vec<f32>> = parameters.ids().map(|id| queue.read(&parameters.master(id))).collect();
        let optimizer = OptimizerOptions {
            rule: Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 }),
            weight_decay: 0.1,
            decay_vectors: true,
            clip_norm: None,
        };
        let options = TrainerOptions { optimizer: Some(optimizer), label_smoothing: 0.0, longest: 64, dropout_seed: 0 };
        let mut trainer = Trainer::alone(model.clone(), device.clone(), parameters, options);
        let losses = floats(&expected, "losses");
        let labels = indices(&expected, "labels");
        let labels_per_step = labels.len() / STEPS;
        for step in 0..STEPS {
            let of_step = |all: Vec<u32>| all[step * labels_per_step..][..labels_per_step].to_vec();
            let labels = of_step(labels.clone());
            let samples = match model.config.input {
                Input::Tokens { .. } => {
                    let offsets = indices(&expected, "segments");
                    let segment_lengths = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
                    Samples::Tokens { ids: of_step(indices(&expected, "input_ids")), labels, segment_lengths }
                }
                Input::Texts { .. } => {
                    let offsets = indices(&expected, "segments");
                    let segment_lengths: Vec<usize> =
                        offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect();
                    let tokens: usize = segment_lengths.iter().sum();
                    let [ids, types] = ["input_ids", "token_type_ids"]
                        .map(|name| indices(&expected, name)[step * tokens..][..tokens].to_vec());
                    Samples::Texts { ids, types, labels, segment_lengths }
                }
                Input::Images { .. } => {
                    let pixels = floats(&expected, "pixel_values");
                    let pixels = pixels[step * pixels.len() / STEPS..][..pixels.len() / STEPS].to_vec();
                    Samples::Images { pixels, labels }
                }
            };
            let ours = trainer.step(&[samples], LR).unwrap().loss;
            assert!(
                (ours - losses[step] as f64).abs() <= LOSS_TOLERANCE,
                "{case} step {step}: {ours}, {}",
                losses[step]
            );
        }
        let parameters = &trainer.parameters;
        for (id, start) in parameters.ids().zip(&start) {
            let name = format!("final.{}", parameters.specs[id.0].name);
            // The gradient of a key's bias is rounding noise, which AdamW makes whole steps of.
            if expected.tensor(&name).is_some() {
                let (ours, theirs) = (queue.read(&parameters.master(id)), floats(&expected, &name));
                let (error, moved) = (distance(&ours, &theirs), distance(start, &theirs));
                assert!(error <= MOVEMENT_TOLERANCE * moved, "{case}: {name} off by {error} of {moved}");
            }
        }
    }
}

#[test]
fn clipping_bounds_the_norm_and_keeps_copies_equal() {
    let device = device(1);
    let queue = device.compute();
    let folder = Folder::open(golden("llama2")).unwrap();
    let model = Model::open(&folder).unwrap();
    let parameters = model.load(&folder, DType::Bf16, ZeroSharding::NONE, queue).unwrap();
    let gradients = Gradients::new(&parameters, queue);
    let ids: Vec<u32> = (0..32).collect();
    let batch = Batch::tokens(queue, &ids, &ids, Segments::uniform(2, 16));
    let tables = RotaryTables::new(&model.config, queue, 16);
    let context = Context { queue, parameters: &parameters, tables: &tables, batch: &batch, pruning: None };
    let options = LossOptions { smoothing: 0.0, scale: 1.0 };
    pass::losses_and_gradients(&model, &context, &gradients, options, Keep::Everything);
    let clipped = OptimizerOptions {
        rule: Rule::AdamW(AdamW { beta1: 0.0, beta2: 0.0, epsilon: 1.0 }),
        weight_decay: 0.0,
        decay_vectors: true,
        clip_norm: Some(0.01),
    };
    let optimizer = Optimizer::new(clipped, &model, &parameters, queue);
    let before: Vec<Vec<f32>> = parameters.ids().map(|id| queue.read(&parameters.master(id))).collect();
    optimizer.measure_squares(queue, &parameters, &gradients, |_| true);
    let measured = queue.read(optimizer.add_up_squares(queue))[0] as f64;
    optimizer.update(queue, &parameters, &gradients, Update { lr: 1.0, step: 1 }, None);
    let squared: f64 = parameters
        .ids()
        .flat_map(|id| queue.read(&gradients.sum(queue, id)))
        .map(|gradient| (gradient as f64).powi(2))
        .sum();
    assert!((measured / squared - 1.0).abs() < 1e-5, "norm² {measured}, expected {squared}");
    // With both betas 0 and epsilon 1 a weight moves by g / (|g| + 1), and the clipped g is small: nearly by g.
    let moved: f64 = parameters
        .ids()
        .zip(&before)
        .map(|(id, before)| distance(before, &queue.read(&parameters.master(id))).powi(2))
        .sum::<f64>()
        .sqrt();
    assert!((0.0095..0.0101).contains(&moved), "moved by {moved}, clipped to 0.01");
    for id in parameters.ids() {
        let rounded: Vec<f32> = queue.read(&parameters.master(id));
        let rounded = rounded.iter().map(|&value| evenkeel_device::bf16::from_f32(value).to_f32());
        let copy = parameters.value(id);
        if copy.dtype == DType::Bf16 {
            assert!(rounded.eq(queue.read(&copy)), "{}", parameters.specs[id.0].name);
        }
    }
}
