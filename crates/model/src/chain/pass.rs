//! The plain pass: the whole chain forward and backward on one rank, in order. Every schedule is held to its numbers.

use evenkeel_device::kernel::{Embed, STATS_PER_TOKEN};
use evenkeel_device::{DType, Tensor};

use crate::chain::body::{BodyState, Context};
use crate::chain::entry::{EntryState, Join, JoinState};
use crate::chain::head::{Classified, LossOptions};
use crate::chain::model::Model;
use crate::chain::unit::{Unit, UnitKind};
use crate::parameters::Gradients;

/// The stream and the last unit's output, on the way from unit to unit.
#[derive(Default)]
struct Flow {
    stream: Option<Tensor>,
    output: Option<Tensor>,
}

/// Values that one unit keeps for backward; the first of a chain has no entry.
struct UnitState {
    entry: Option<EntryState>,
    /// Absent if the body is to be computed again.
    body: Option<BodyState>,
}

/// Values that a stage's forward keeps for its backward.
pub struct StageState {
    units: Vec<UnitState>,
    exit: JoinState,
}

/// The values that a forward pass keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    Nothing,
    /// The stream at each unit's entry; the rest is computed again.
    Stream,
    Everything,
}

/// The results of a pass without backward, row by row.
pub struct Findings {
    /// f32 [1, labels]
    pub losses: Tensor,
    /// f32 [labels, STATS], see [`label_is_first`].
    pub stats: Tensor,
}

pub const STATS: usize = STATS_PER_TOKEN;

/// Whether the label of a row with these statistics got the highest logit.
pub fn label_is_first(stats: &[f32]) -> bool {
    let &[maximum, _, label, _] = stats else { panic!("a row has {STATS} statistics") };
    label == maximum
}

/// The losses of the batch's labels, and no gradients.
pub fn evaluate(model: &Model, context: &Context, smoothing: f32) -> Findings {
    let context = &context.unpruned();
    let (head, x) = (model.head(), classified(model, context).rows);
    let losses = context.queue.tensor(1, x.rows, DType::F32);
    let stats = context.queue.tensor(x.rows, STATS, DType::F32);
    let options = LossOptions { smoothing, scale: 1.0 };
    for rows in head.chunks(x.rows) {
        let logits = head.logits(context, &x.row_range(rows.clone()));
        let stats = stats.row_range(rows.clone());
        head.stats(context, &logits, rows.clone(), &stats);
        head.loss(context, &logits, &stats, rows, options, &losses, None);
    }
    Findings { losses, stats }
}

/// The logits of the whole batch, f32 [rows, classes]. For tests and small vocabularies.
pub fn logits(model: &Model, context: &Context) -> Tensor {
    let context = &context.unpruned();
    let x = classified(model, context).rows;
    model.head().logits(context, &x)
}

/// The logits of the next token for each segment that has tokens, in order, f32 [segments with tokens, classes].
pub fn next_logits(model: &Model, context: &Context) -> Tensor {
    let context = &context.unpruned();
    let x = classified(model, context).rows;
    let segments = context.batch.segments.iter().filter(|segment| !segment.is_empty());
    let ends: Vec<u32> = segments.map(|segment| segment.end as u32 - 1).collect();
    let ends = context.queue.indices(&ends);
    let last = context.queue.tensor(ends.cols, x.cols, x.dtype);
    // A lookup in the rows themselves picks each segment's last row.
    let (table, indices, out) = (x.view(), ends.view(), last.view());
    context.queue.launch(Embed { table, indices, first: 0, scale: 1.0, out, accumulate: false });
    model.head().logits(context, &last)
}

/// The losses, f32 [1, labels]; every parameter's gradient is added to `gradients`.
pub fn losses_and_gradients(
    model: &Model,
    context: &Context,
    gradients: &Gradients,
    options: LossOptions,
    keep: Keep,
) -> Tensor {
    last_stage(model, context, gradients, options, keep, None).0
}

/// The same for the last stage, which receives this stream; also returns that stream's gradient.
pub fn last_stage(
    model: &Model,
    context: &Context,
    gradients: &Gradients,
    options: LossOptions,
    keep: Keep,
    arriving: Option<&Tensor>,
) -> (Tensor, Option<Tensor>) {
    assert_ne!(keep, Keep::Nothing, "backward needs at least the stream");
    let (flow, states) = forward(model, context, arriving, keep);
    let entry = enter(last(model), context, arriving, &flow);
    let (losses, dnormalised) = losses_and_input_gradient(model, context, gradients, &entry, options);
    let dflow = backward_entry(last(model), context, gradients, &entry, None, &[dnormalised]);
    (losses, backward(model, context, gradients, states, dflow))
}

/// The stream that a stage before the last passes on.
pub fn stage_forward(model: &Model, context: &Context, keep: Keep, arriving: Option<&Tensor>) -> (Tensor, StageState) {
    let (flow, units) = forward(model, context, arriving, keep);
    let (exit, output) = (exit(model), flow.output.as_ref().expect("a stage has units"));
    let (leaving, exit) = exit.forward(context, 0, flow.stream.as_ref(), output);
    (leaving, StageState { units, exit })
}

/// Takes the gradient of the stream that a stage passed on; returns that of the stream it received, `None` for the first stage.
pub fn stage_backward(
    model: &Model,
    context: &Context,
    gradients: &Gradients,
    state: StageState,
    dleaving: Tensor,
) -> Option<Tensor> {
    let (stream, output) = exit(model).backward(context, 0, gradients, &state.exit, dleaving);
    backward(model, context, gradients, state.units, Flow { stream: Some(stream), output: Some(output) })
}

fn last(model: &Model) -> &Unit {
    model.units.last().expect("a model has units")
}

fn exit(model: &Model) -> &Join {
    model.exit(model.stages.last().expect("a model has a stage").units.end)
}

/// Runs the units before the head.
fn forward(model: &Model, context: &Context, arriving: Option<&Tensor>, keep: Keep) -> (Flow, Vec<UnitState>) {
    context.batch.check(&model.config);
    let (mut flow, mut states) = (Flow::default(), Vec::new());
    for unit in model.units.iter().filter(|unit| unit.kind != UnitKind::Head) {
        let mut entry = unit.entry.is_some().then(|| enter(unit, context, arriving, &flow));
        let inputs = entry.as_ref().map_or(&[][..], |entry| &entry.normalised);
        let (stream, output, body) = unit.body().forward(context, inputs);
        flow = Flow { stream: entry.as_ref().map(|entry| entry.stream.clone()).or(stream), output: Some(output) };
        if keep == Keep::Stream {
            entry.iter_mut().for_each(EntryState::forget);
        }
        if keep != Keep::Nothing {
            states.push(UnitState { entry, body: (keep == Keep::Everything).then_some(body) });
        }
    }
    (flow, states)
}

fn enter(unit: &Unit, context: &Context, arriving: Option<&Tensor>, flow: &Flow) -> EntryState {
    let entry = unit.entry.as_ref().expect("only a chain's first unit has no entry");
    match &flow.output {
        Some(output) => entry.forward(context, 0, flow.stream.as_ref(), output),
        None => entry.resume(context, arriving.expect("a stream arrives at all stages but the first")),
    }
}

/// The head's input: what gets logits.
fn classified(model: &Model, context: &Context) -> Classified {
    let (flow, _) = forward(model, context, None, Keep::Nothing);
    let entry = enter(last(model), context, None, &flow);
    model.head().classified(context, &entry.normalised[0])
}

/// The losses, and the gradient of the head's normalised input.
fn losses_and_input_gradient(
    model: &Model,
    context: &Context,
    gradients: &Gradients,
    entry: &EntryState,
    options: LossOptions,
) -> (Tensor, Tensor) {
    let (head, queue) = (model.head(), context.queue);
    let classified = head.classified(context, &entry.normalised[0]);
    let x = &classified.rows;
    let dnormalised = head.dnormalised(queue, &entry.normalised[0]);
    let losses = queue.tensor(1, x.rows, DType::F32);
    for rows in head.chunks(x.rows) {
        let part = x.row_range(rows.clone());
        let logits = head.logits(context, &part);
        let stats = queue.tensor(logits.rows, STATS, DType::F32);
        head.stats(context, &logits, rows.clone(), &stats);
        let dlogits = head.dlogits(context, &logits);
        head.loss(context, &logits, &stats, rows.clone(), options, &losses, Some(&dlogits));
        head.backward(context, gradients, &classified, rows, &dlogits, &dnormalised);
    }
    (losses, dnormalised)
}

/// Backward of the units before the head. `dflow` has the gradients of the last one's stream and output. Returns the gradient of
/// the received stream.
fn backward(
    model: &Model,
    context: &Context,
    gradients: &Gradients,
    states: Vec<UnitState>,
    mut dflow: Flow,
) -> Option<Tensor> {
    for (unit, mut state) in model.units.iter().zip(states).rev() {
        let body = state.body.take().unwrap_or_else(|| recompute(unit, context, state.entry.as_mut()));
        let doutput = dflow.output.as_ref().expect("a unit behind it gave a gradient");
        let (dinputs, backward) = unit.body().backward_input(context, gradients, body, dflow.stream.as_ref(), doutput);
        unit.body().backward_weight(context, gradients, backward);
        dflow = backward_entry(unit, context, gradients, &state.entry?, dflow.stream.as_ref(), &dinputs);
    }
    dflow.stream
}

/// The gradients of the stream before an entry and of the output that it adds; at a stage's beginning nothing is added.
fn backward_entry(
    unit: &Unit,
    context: &Context,
    gradients: &Gradients,
    state: &EntryState,
    dstream: Option<&Tensor>,
    dnormalised: &[Tensor],
) -> Flow {
    let entry = unit.entry.as_ref().expect("it was entered");
    if entry.join.is_none() {
        let stream = entry.backward_norms(context, gradients, state, dstream, dnormalised);
        return Flow { stream: Some(stream), output: None };
    }
    let (stream, output) = entry.backward(context, 0, gradients, state, dstream, dnormalised);
    Flow { stream: Some(stream), output: Some(output) }
}

/// Computes what a unit's backward reads again, from the stream at its entry.
fn recompute(unit: &Unit, context: &Context, entry: Option<&mut EntryState>) -> BodyState {
    let mut inputs = Vec::new();
    if let (Some(entry), Some(state)) = (&unit.entry, entry) {
        entry.recompute(context, state);
        inputs.clone_from(&state.normalised);
    }
    unit.body().recompute(context, &inputs)
}
