//! Pruned bodies against their plain twin: masked matrices on the ordinary path, with the imputed gradients written in by
//! formula between the operations.

use std::collections::HashMap;
use std::convert::Infallible;
use std::path::Path;

use evenkeel_device::kernel::Segments;
use evenkeel_device::{CpuOptions, DType, Device, Queue, Tensor};
use evenkeel_store::Folder;

use super::{Imputation, PrunedWeights, Pruning};
use crate::chain::body::{Body, Context, Slot, Slots};
use crate::chain::op::Op;
use crate::lossy::intake::Intake;
use crate::{Batch, Cut, Gradients, Images, Input, Model, ParamId, Parameters, RotaryTables, ZeroSharding};

const GAMMA: f64 = 0.4;
/// Relative by norm, for values that both sides sum in different orders.
const F32_TOLERANCE: f64 = 1e-5;
/// The same for values that are then rounded to eight bits.
const BF16_TOLERANCE: f64 = 2e-2;
/// Relative to the largest gradient of a body: some, as those of keys' biases, are zero but for rounding.
const FLOOR: f64 = 1e-6;
const BF16_FLOOR: f64 = 3e-3;

#[derive(Clone, Copy, Debug)]
enum Choice {
    /// By the size of the columns.
    Priority,
    Random,
}

#[derive(Clone, Copy, Debug)]
struct Way {
    imputation: Imputation,
    choice: Choice,
    dtype: DType,
    micros: usize,
    weights: PrunedWeights,
}

/// Every combination of a policy, a choice, a dtype and a number of micro-batches.
fn ways() -> Vec<Way> {
    let mut ways = Vec::new();
    for imputation in [Imputation::Zero, Imputation::Average, Imputation::Same] {
        for choice in [Choice::Priority, Choice::Random] {
            for (dtype, micros) in [(DType::F32, 1), (DType::F32, 2), (DType::Bf16, 1), (DType::Bf16, 2)] {
                let weights = PrunedWeights::Move { repeats: true };
                ways.push(Way { imputation, choice, dtype, micros, weights });
                ways.push(Way { imputation, choice, dtype, micros, weights: PrunedWeights::Stay });
            }
        }
    }
    ways.push(Way { weights: PrunedWeights::Move { repeats: false }, ..ways[ways.len() - 6] });
    ways
}

fn model(case: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(case);
    Model::open(&Folder::open(folder).expect("golden folders are sound")).expect("a known architecture")
}

/// Micro-batches of different sizes.
fn batch(model: &Model, micro: usize, dtype: DType, queue: &Queue) -> Batch {
    match model.config.input {
        Input::Tokens { .. } => {
            let lengths = [5, 4 + micro, 3];
            let offsets = (0..=lengths.len()).map(|end| lengths[..end].iter().sum()).collect();
            let ids = vec![1; lengths.iter().sum()];
            Batch::tokens(queue, &ids, &ids, Segments::new(offsets))
        }
        Input::Texts { .. } => {
            let lengths = [5, 4 + micro, 3];
            let offsets = (0..=lengths.len()).map(|end| lengths[..end].iter().sum()).collect();
            let ids: Vec<u32> = vec![1; lengths.iter().sum()];
            Batch::texts(queue, &ids, &vec![0; ids.len()], &[0, 1, 0], Segments::new(offsets))
        }
        Input::Images { size, channels, .. } => {
            let count = 1 + micro;
            let pixels = vec![0.0; count * channels * size * size];
            Batch::images(queue, Images { pixels: &pixels, count }, &vec![0; count], model.config.input, dtype)
        }
    }
}

/// A matrix on the host.
#[derive(Clone)]
struct Matrix {
    cols: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn read(queue: &Queue, tensor: &Tensor) -> Matrix {
        Matrix { cols: tensor.cols, values: queue.read(tensor) }
    }

    /// Its elements by layer output (or token) and layer input.
    fn at(&mut self, row: usize, input: usize, transposed: bool) -> &mut f32 {
        let [row, col] = if transposed { [input, row] } else { [row, input] };
        &mut self.values[row * self.cols + col]
    }

    /// Imputes the pruned columns by the policy; `last` is the step before.
    fn impute(&mut self, imputation: Imputation, last: Option<&Matrix>, kept: &[bool], transposed: bool) {
        let rows = if transposed { self.cols } else { self.values.len() / self.cols };
        for row in 0..rows {
            let kept_inputs: Vec<usize> = (0..kept.len()).filter(|&input| kept[input]).collect();
            let sum: f64 = kept_inputs.iter().map(|&input| *self.at(row, input, transposed) as f64).sum();
            for input in (0..kept.len()).filter(|&input| !kept[input]) {
                *self.at(row, input, transposed) = match imputation {
                    Imputation::Zero => 0.0,
                    Imputation::Average => (sum / kept_inputs.len() as f64) as f32,
                    Imputation::Same => last.map_or(0.0, |last| *last.clone().at(row, input, transposed)),
                };
            }
        }
    }
}

struct Setting {
    model: Model,
    device: Device,
    parameters: Parameters,
    /// The parameters with the pruned columns zeroed.
    masked: Parameters,
    tables: RotaryTables,
    gradients: Gradients,
    masked_gradients: Gradients,
    intakes: Vec<Intake>,
    batches: Vec<Batch>,
    random: fastrand::Rng,
}

impl Setting {
    fn new(model: &Model, way: Way) -> Setting {
        let options = CpuOptions { memory_bytes: 1 << 28, ..CpuOptions::with_threads(1) };
        let device = Device::cpu(&options).expect("a CPU device starts");
        let queue = device.compute();
        let [parameters, masked] = [(); 2].map(|()| Parameters::allocate(model, way.dtype, ZeroSharding::NONE, queue));
        Setting {
            tables: RotaryTables::new(&model.config, queue, 64),
            gradients: Gradients::new(&parameters, queue),
            masked_gradients: Gradients::new(&parameters, queue),
            intakes: model.intakes(),
            batches: (0..way.micros).map(|micro| batch(model, micro, way.dtype, queue)).collect(),
            random: fastrand::Rng::with_seed(3),
            model: model.clone(),
            parameters,
            masked,
            device,
        }
    }

    fn numbers(&mut self, count: usize, size: f32) -> Vec<f32> {
        (0..count).map(|_| size * (self.random.f32() * 2.0 - 1.0)).collect()
    }

    /// A new step's weights.
    fn draw(&mut self) -> Vec<Vec<f32>> {
        let lengths: Vec<usize> = self.model.specs.iter().map(|spec| spec.len()).collect();
        let weights: Vec<Vec<f32>> = lengths.into_iter().map(|len| self.numbers(len, 0.3)).collect();
        fill(&self.parameters, &weights, self.device.compute());
        weights
    }

    fn choose(&mut self, choice: Choice, weights: &[Vec<f32>]) -> Vec<Vec<bool>> {
        let intakes = self.intakes.clone();
        let choose = |intake: &Intake| {
            let weight = intake.weights[0];
            let mut matrix = Matrix { cols: self.model.specs[weight.0].matrix[1], values: weights[weight.0].clone() };
            let outputs = matrix.values.len() / intake.inputs;
            let mut score = |input: usize| match choice {
                Choice::Priority => (0..outputs).map(|row| matrix.at(row, input, intake.transposed).abs()).sum(),
                Choice::Random => self.random.f32(),
            };
            let scores: Vec<f32> = (0..intake.inputs).map(&mut score).collect();
            let mut order: Vec<usize> = (0..intake.inputs).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            let count = intake.inputs - (GAMMA * intake.inputs as f64).floor() as usize;
            (0..intake.inputs).map(|input| order[..count].contains(&input)).collect()
        };
        intakes.iter().map(choose).collect()
    }

    fn intake_of(&self, weight: ParamId) -> Option<usize> {
        self.intakes.iter().position(|intake| intake.weights.contains(&weight))
    }

    fn mask(&self, weights: &[Vec<f32>], kept: &[Vec<bool>]) {
        let mut masked = weights.to_vec();
        for (intake, kept) in self.intakes.iter().zip(kept) {
            for weight in &intake.weights {
                let mut matrix =
                    Matrix { cols: self.model.specs[weight.0].matrix[1], values: weights[weight.0].clone() };
                matrix.impute(Imputation::Zero, None, kept, intake.transposed);
                masked[weight.0] = matrix.values;
            }
        }
        fill(&self.masked, &masked, self.device.compute());
    }

    fn context<'a>(&'a self, micro: usize, parameters: &'a Parameters, pruning: Option<&'a Pruning>) -> Context<'a> {
        let (queue, tables, batch) = (self.device.compute(), &self.tables, &self.batches[micro]);
        Context { queue, parameters, tables, batch, pruning }
    }
}

fn fill(parameters: &Parameters, values: &[Vec<f32>], queue: &Queue) {
    let filled = parameters.fill(queue, |id, _, whole| {
        queue.write_rows(whole, |first, rows| -> Result<(), Infallible> {
            rows.copy_from_slice(&values[id.0][first * whole.cols..][..rows.len()]);
            Ok(())
        })
    });
    filled.expect("infallible");
}

/// Gradients that the twin remembers from step to step.
#[derive(Default)]
struct Memory {
    /// By intake and micro-batch.
    inputs: HashMap<(usize, usize), Matrix>,
    weights: HashMap<ParamId, Matrix>,
}

/// The gradients of a masked body's inputs; those of its weights are added up, masked.
fn twin_backward(
    setting: &Setting,
    body: &Body,
    micro: usize,
    values: Slots,
    doutput: &Tensor,
    kept: &[Vec<bool>],
    imputation: Imputation,
    memory: &mut Memory,
) -> Vec<Tensor> {
    let (context, gradients) = (setting.context(micro, &setting.masked, None), &setting.masked_gradients);
    let (mut values, mut slots) = (values, Slots::new(&body.rooms));
    slots.set(body.output, doutput.clone());
    let mut readers: HashMap<usize, Vec<Slot>> = HashMap::new();
    for op in body.ops.iter().rev() {
        op.backward_input(&context, gradients, &mut values, &mut slots);
        let Op::Linear(linear) = op else { continue };
        let Some(index) = setting.intake_of(linear.weight) else { continue };
        let seen = readers.entry(index).or_default();
        seen.push(linear.x);
        if seen.len() == setting.intakes[index].weights.len() {
            let (queue, dx) = (context.queue, slots.take(linear.x));
            let mut matrix = Matrix::read(queue, &dx);
            matrix.impute(imputation, memory.inputs.get(&(index, micro)), &kept[index], false);
            slots.set(linear.x, queue.floats(dx.rows, dx.cols, dx.dtype, &matrix.values));
            memory.inputs.insert((index, micro), matrix);
        }
    }
    body.ops.iter().rev().for_each(|op| op.backward_weight(&context, gradients, &values, &slots));
    body.inputs.iter().map(|&slot| slots.get(slot).clone()).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&value| (value as f64).powi(2)).sum::<f64>().sqrt()
}

fn compare(what: &str, ours: &[f32], expected: &[f32], dtype: DType, largest: f64) {
    assert_eq!(ours.len(), expected.len(), "{what}");
    let (tolerance, floor) = if dtype == DType::F32 { (F32_TOLERANCE, FLOOR) } else { (BF16_TOLERANCE, BF16_FLOOR) };
    let difference: Vec<f32> = ours.iter().zip(expected).map(|(a, b)| a - b).collect();
    let (error, size) = (norm(&difference), norm(expected));
    assert!(error <= tolerance * size + floor * largest, "{what}: off by {error:e} of {size:e}");
}

/// Four steps of one body. All but the third keep other columns than the step before.
fn check_body(what: &str, model: &Model, unit: usize, way: Way) {
    let mut setting = Setting::new(model, way);
    let body = model.units[unit].body();
    let mut pruning = Pruning::new(model, way.imputation, way.weights);
    let (mut memory, mut kept) = (Memory::default(), Vec::new());
    for step in 0..4 {
        let weights = setting.draw();
        if step != 2 {
            kept = setting.choose(way.choice, &weights);
            for (index, kept) in kept.iter().enumerate() {
                let columns: Vec<u32> = (0..kept.len() as u32).filter(|&col| kept[col as usize]).collect();
                pruning.keep(setting.device.compute(), way.dtype, index, &columns);
            }
        }
        setting.mask(&weights, &kept);
        pruning.begin_step();
        setting.gradients.clear();
        setting.masked_gradients.clear();
        for micro in 0..way.micros {
            let what = format!("{what}, {way:?}, step {step}, micro-batch {micro}");
            let (tokens, hidden) = (setting.batches[micro].token_count(), model.config.hidden);
            let mut stream = || {
                let numbers = setting.numbers(tokens * hidden, 1.0);
                setting.device.compute().floats(tokens, hidden, way.dtype, &numbers)
            };
            let inputs: Vec<Tensor> = body.inputs.iter().map(|_| stream()).collect();
            let doutput = stream();
            let (queue, context) =
                (setting.device.compute(), setting.context(micro, &setting.parameters, Some(&pruning)));
            let (_, output, state) = body.forward(&context, &inputs);
            let (dinputs, backward) = body.backward_input(&context, &setting.gradients, state, None, &doutput);
            body.backward_weight(&context, &setting.gradients, backward);

            let (_, expected, state) = body.forward(&setting.context(micro, &setting.masked, None), &inputs);
            compare(&format!("{what}: output"), &queue.read(&output), &queue.read(&expected), way.dtype, 0.0);
            let expected =
                twin_backward(&setting, body, micro, state.values, &doutput, &kept, way.imputation, &mut memory);
            for (ours, expected) in dinputs.iter().zip(&expected) {
                compare(&format!("{what}: dx"), &queue.read(ours), &queue.read(expected), way.dtype, 0.0);
            }
        }
        check_weights(&format!("{what}, {way:?}, step {step}"), &setting, body, way, &kept, &mut memory);
    }
}

fn check_weights(what: &str, setting: &Setting, body: &Body, way: Way, kept: &[Vec<bool>], memory: &mut Memory) {
    let queue = setting.device.compute();
    let expected = |id: ParamId, memory: &mut Memory| {
        let mut matrix = Matrix::read(queue, &setting.masked_gradients.sum(queue, id));
        if let Some(index) = setting.intake_of(id) {
            let intake = &setting.intakes[index];
            let repeats = way.weights == PrunedWeights::Move { repeats: true } && !intake.is_summed(id);
            let last = memory.weights.get(&id).filter(|_| repeats);
            let imputation = if way.weights == PrunedWeights::Stay { Imputation::Zero } else { way.imputation };
            matrix.impute(imputation, last, &kept[index], intake.transposed);
            memory.weights.insert(id, matrix.clone());
        }
        matrix.values
    };
    let expected: Vec<(ParamId, Vec<f32>)> =
        body.parameters().into_iter().map(|id| (id, expected(id, memory))).collect();
    let largest = expected.iter().map(|(_, values)| norm(values)).fold(0.0, f64::max);
    for (id, expected) in &expected {
        let ours = queue.read(&setting.gradients.sum(queue, *id));
        compare(&format!("{what}: {}", setting.model.specs[id.0].name), &ours, expected, way.dtype, largest);
    }
}

/// Column- and row-parallel layers of a whole model's first layer, and of its shards.
fn check(case: &str, shards: usize) {
    for (index, shard) in model(case).cut(&Cut::even(shards)).expect("enough heads").iter().enumerate() {
        let per_layer = if shard.config.parallel { 1 } else { 2 };
        for unit in 1..=per_layer {
            for way in ways() {
                check_body(&format!("{case}, shard {index} of {shards}, {}", shard.units[unit].kind), shard, unit, way);
            }
        }
    }
}

#[test]
fn a_resized_llama_equals_its_twin_of_masked_matrices() {
    check("llama3", 1);
    check("llama3", 2);
}

#[test]
fn shards_that_hold_the_same_keys_and_values_equal_their_twins() {
    let shared = model("llama_packed").cut(&Cut::even(4)).expect("enough heads");
    let summed = |intake: &Intake| intake.weights.iter().filter(|&&weight| intake.is_summed(weight)).count();
    assert_eq!(shared[3].intakes().iter().map(summed).collect::<Vec<_>>(), [2, 0, 0, 0, 2, 0, 0, 0]);
    check("llama_packed", 4);
}

#[test]
fn a_resized_gpt2_with_transposed_matrices_and_biases_equals_its_twin() {
    check("gpt2", 1);
    check("gpt2", 2);
}

#[test]
fn a_resized_vit_equals_its_twin() {
    check("vit", 1);
    check("vit", 2);
}

#[test]
fn attention_and_mlp_side_by_side_and_norms_of_heads_equal_their_twins() {
    check("gpt_neox", 2);
    check("qwen3", 2);
}
