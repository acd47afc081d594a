//! What one document of a batch says reaches no other document, however slowly linear attention forgets.

#[path = "../../../golden/cases.rs"]
mod cases;
mod support;

use cases::CASES;
use evenkeel_device::kernel::{Fill, IGNORE, Segments};
use evenkeel_device::{DType, Queue};
use evenkeel_model::pass::Keep;
use evenkeel_model::{
    Batch, Context, Gradients, Input, LossOptions, Model, Parameters, RotaryTables, ZeroSharding, pass,
};
use evenkeel_store::Folder;
use support::{device, distance, golden, norm};

/// More than a chunk of the delta rule; the second ends with a part of one.
const LENGTHS: [usize; 2] = [70, 40];
/// Of logits and of each gradient, by norm: rows of experts lie elsewhere in their products, which may round them otherwise.
const TOLERANCE: f64 = 1e-5;

/// Has heads with states keep nearly all of these from token to token.
fn forget_slowly(parameters: &Parameters, queue: &Queue) {
    for id in parameters.ids().filter(|id| parameters.specs[id.0].name.ends_with("A_log")) {
        queue.launch(Fill { out: parameters.master(id).view(), value: 0.05f32.ln() });
    }
}

/// The second document's logits and the gradients of its loss, behind a first one that begins with this token.
fn behind(first: u32, model: &Model, parameters: &Parameters, queue: &Queue) -> (Vec<f32>, Vec<Vec<f32>>) {
    let [before, own] = LENGTHS;
    let classes = model.config.classes;
    let vocabulary = if let Input::Texts { vocabulary, .. } = model.config.input { vocabulary } else { classes };
    let token = |start: u32, place: usize| 1 + (start + 7 * place as u32) % (vocabulary as u32 - 1);
    let tokens: Vec<u32> =
        (0..before).map(|place| token(first, place)).chain((0..own).map(|place| token(5, place))).collect();
    let labels: Vec<u32> = [IGNORE].repeat(before).into_iter().chain(tokens[before..].iter().copied()).collect();
    let segments = Segments::new(vec![0, before, before + own]);
    let is_labelled = model.config.input.is_classified();
    let batch = if is_labelled {
        Batch::texts(queue, &tokens, &vec![0; tokens.len()], &[IGNORE, 1], segments)
    } else {
        Batch::tokens(queue, &tokens, &labels, segments)
    };
    let tables = RotaryTables::new(&model.config, queue, batch.longest);
    let context = Context { queue, parameters, tables: &tables, batch: &batch, pruning: None };
    let gradients = Gradients::new(parameters, queue);
    let options = LossOptions { smoothing: 0.0, scale: 1.0 / own as f32 };
    pass::losses_and_gradients(model, &context, &gradients, options, Keep::Everything);
    let rows_before = if is_labelled { 1 } else { before };
    let logits = queue.read(&pass::logits(model, &context))[rows_before * classes..].to_vec();
    let gradient = |id| gradients.sum_of_trained(queue, id).map_or_else(Vec::new, |sum| queue.read(&sum));
    (logits, parameters.ids().map(gradient).collect())
}

#[test]
fn one_document_never_reaches_another() {
    let device = device(2, 1 << 30);
    let queue = device.compute();
    for case in CASES {
        let folder = Folder::open(golden().join(case)).unwrap();
        let model = Model::open(&folder).unwrap();
        let has_room = model.config.input.most_positions().is_none_or(|positions| positions >= LENGTHS[0]);
        if !model.config.input.is_text() || !has_room {
            continue;
        }
        let parameters = model.load(&folder, DType::F32, ZeroSharding::NONE, queue).unwrap();
        forget_slowly(&parameters, queue);
        let [one, other] = [1, 60].map(|first| behind(first, &model, &parameters, queue));
        let close = |a: &[f32], b: &[f32]| distance(a, b) <= TOLERANCE * norm(a) + 1e-9;
        assert!(close(&one.0, &other.0), "{case}: logits");
        for (id, (a, b)) in parameters.ids().zip(one.1.iter().zip(&other.1)) {
            assert!(close(a, b), "{case}: gradient of {} off by {}", model.specs[id.0].name, distance(a, b));
        }
    }
}
