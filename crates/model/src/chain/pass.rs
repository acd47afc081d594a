//! The plain pass: the whole chain forward and backward on one rank, in order. Every schedule is held to its numbers.

use evenkeel_device::kernel::{Embed, STATS_PER_TOKEN};
use evenkeel_device::{DType, Tensor};

use crate::chain::body::{BodyState, Context};
use crate::chain::build::{Model, Unit};
use crate::chain::entry::EntryState;
use crate::chain::head::{Head, LossOptions};
use crate::parameters::Gradients;

/// The stream and the last unit's output, on the way from unit to unit.
struct Flow {
    stream: Option<Tensor>,
    output: Tensor,
}

/// What one unit leaves for backward; the first has no entry.
struct UnitState {
    entry: Option<EntryState>,
    /// Absent where the body is to be computed again.
    body: Option<BodyState>,
}

/// What a forward pass keeps for backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    Nothing,
    /// The stream at each unit's entry; the rest is computed again.
    Stream,
    Everything,
}

/// What a pass without backward finds, row by row.
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
    let context = &context.unresized();
    let (flow, _) = forward(model, context, Keep::Nothing);
    let (_, x) = enter_head(&model.head, context, flow.stream.as_ref(), &flow.output);
    let losses = context.queue.tensor(1, x.rows, DType::F32);
    let stats = context.queue.tensor(x.rows, STATS, DType::F32);
    let options = LossOptions { smoothing, scale: 1.0 };
    for rows in model.head.chunks(x.rows) {
        let logits = model.head.logits(context, &x.row_range(rows.clone()));
        let stats = stats.row_range(rows.clone());
        model.head.stats(context, &logits, rows.clone(), &stats);
        model.head.loss(context, &logits, &stats, rows, options, &losses, None);
    }
    Findings { losses, stats }
}

/// The logits of the whole batch, f32 [rows, classes]. For tests and small vocabularies.
pub fn logits(model: &Model, context: &Context) -> Tensor {
    let context = &context.unresized();
    let (flow, _) = forward(model, context, Keep::Nothing);
    let (_, x) = enter_head(&model.head, context, flow.stream.as_ref(), &flow.output);
    model.head.logits(context, &x)
}

/// The logits of what follows each segment that has tokens, in order, f32 [segments with tokens, classes].
pub fn next_logits(model: &Model, context: &Context) -> Tensor {
    let context = &context.unresized();
    let (flow, _) = forward(model, context, Keep::Nothing);
    let (_, x) = enter_head(&model.head, context, flow.stream.as_ref(), &flow.output);
    let segments = context.batch.segments.iter().filter(|segment| !segment.is_empty());
    let ends: Vec<u32> = segments.map(|segment| segment.end as u32 - 1).collect();
    let ends = context.queue.indices(&ends);
    let last = context.queue.tensor(ends.cols, x.cols, x.dtype);
    // A lookup in the rows themselves picks the segments' last.
    let (table, indices, out) = (x.view(), ends.view(), last.view());
    context.queue.launch(Embed { table, indices, first: 0, scale: 1.0, out, accumulate: false });
    model.head.logits(context, &last)
}

/// The losses, f32 [1, labels]; every parameter's gradient is added to `gradients`.
pub fn losses_and_gradients(
    model: &Model,
    context: &Context,
    gradients: &Gradients,
    options: LossOptions,
    keep: Keep,
) -> Tensor {
    assert_ne!(keep, Keep::Nothing, "backward needs at least the stream");
    let (flow, states) = forward(model, context, keep);
    let (losses, mut dstream, mut doutput) =
        head_backward(model, context, gradients, flow.stream.as_ref(), flow.output, options);
    for (unit, mut state) in model.units.iter().zip(states).rev() {
        let body = state.body.take().unwrap_or_else(|| recompute(unit, context, state.entry.as_mut()));
        let (dinputs, backward) = unit.body.backward_input(context, gradients, body, Some(&dstream), &doutput);
        unit.body.backward_weight(context, gradients, backward);
        let Some(entry) = state.entry else { break };
        (dstream, doutput) = unit.entry.backward(context, 0, gradients, &entry, Some(&dstream), &dinputs);
    }
    losses
}

/// Runs a unit's forward again from the stream at its entry.
fn recompute(unit: &Unit, context: &Context, entry: Option<&mut EntryState>) -> BodyState {
    let inputs = entry.map_or(Vec::new(), |entry| {
        unit.entry.recompute(context, entry);
        entry.normalised.clone()
    });
    unit.body.forward(context, &inputs).2
}

fn forward(model: &Model, context: &Context, keep: Keep) -> (Flow, Vec<UnitState>) {
    context.batch.check(&model.config);
    let (embed, rest) = model.units.split_first().expect("a chain begins with its embedding");
    let (stream, output, body) = embed.body.forward(context, &[]);
    let mut flow = Flow { stream, output };
    let mut states = vec![UnitState { entry: None, body: (keep == Keep::Everything).then_some(body) }];
    for unit in rest {
        let mut entry = unit.entry.forward(context, 0, flow.stream.as_ref(), &flow.output);
        let (_, output, body) = unit.body.forward(context, &entry.normalised);
        flow = Flow { stream: Some(entry.stream.clone()), output };
        match keep {
            Keep::Nothing => (),
            Keep::Stream => {
                entry.forget();
                states.push(UnitState { entry: Some(entry), body: None });
            }
            Keep::Everything => states.push(UnitState { entry: Some(entry), body: Some(body) }),
        }
    }
    (flow, states)
}

/// The head's entry, and the rows that get logits.
fn enter_head(head: &Head, context: &Context, stream: Option<&Tensor>, output: &Tensor) -> (EntryState, Tensor) {
    let entry = head.entry.forward(context, 0, stream, output);
    let x = head.classified(context, &entry.normalised[0]);
    (entry, x)
}

/// The head, forward and backward: the losses, and the gradients of the stream and of the last unit's output.
fn head_backward(
    model: &Model,
    context: &Context,
    gradients: &Gradients,
    stream: Option<&Tensor>,
    output: Tensor,
    options: LossOptions,
) -> (Tensor, Tensor, Tensor) {
    let (head, queue) = (&model.head, context.queue);
    let (entry, x) = enter_head(head, context, stream, &output);
    let dnormalised = head.dnormalised(queue, &entry.normalised[0]);
    let dx = head.classified(context, &dnormalised);
    let losses = queue.tensor(1, x.rows, DType::F32);
    for rows in head.chunks(x.rows) {
        let part = x.row_range(rows.clone());
        let logits = head.logits(context, &part);
        let stats = queue.tensor(logits.rows, STATS, DType::F32);
        head.stats(context, &logits, rows.clone(), &stats);
        let dlogits = head.dlogits(context, &logits);
        head.loss(context, &logits, &stats, rows.clone(), options, &losses, Some(&dlogits));
        head.backward(context, gradients, &part, &dlogits, &dx.row_range(rows));
    }
    let (dstream, doutput) = head.entry.backward(context, 0, gradients, &entry, None, &[dnormalised]);
    (losses, dstream, doutput)
}
