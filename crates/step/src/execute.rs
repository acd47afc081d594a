//! Runs programs: each task on the device's queue, each value held until the program frees it.

use evenkeel_device::{Device, Tensor};
use evenkeel_model::pass::{head_backward, recompute};
use evenkeel_model::{
    Batch, BodyBackward, BodyState, Context, EntryState, Gradients, LossOptions, Model, Parameters, RotaryTables,
};

use crate::program::{Program, Task, Value, ValueKind, Work};
use crate::schedule::Chain;

/// What tasks work on.
pub struct Executor<'a> {
    pub model: &'a Model,
    pub device: &'a Device,
    pub parameters: &'a Parameters,
    pub tables: &'a RotaryTables,
    pub gradients: &'a Gradients,
}

/// The values of one unit and micro-batch that are there now.
#[derive(Default)]
struct UnitValues {
    /// The stream that the first unit starts; all others have theirs in their entry.
    started: Option<Tensor>,
    /// Stream and normalised values.
    entry: Option<EntryState>,
    output: Option<Tensor>,
    saved: Option<BodyState>,
    stream_gradient: Option<Tensor>,
    normalised_gradient: Vec<Tensor>,
    output_gradient: Option<Tensor>,
    weight_inputs: Option<BodyBackward>,
}

/// What a running program holds, by micro-batch and unit.
struct Values(Vec<Vec<UnitValues>>);

impl Values {
    fn at(&mut self, task: &Task) -> &mut UnitValues {
        &mut self.0[task.micro.0][task.unit.0]
    }

    fn before(&mut self, task: &Task) -> &mut UnitValues {
        &mut self.0[task.micro.0][task.unit.0 - 1]
    }

    fn free(&mut self, value: &Value) {
        let values = &mut self.0[value.micro.0][value.unit.0];
        match value.kind {
            ValueKind::Stream => (values.started, values.entry) = (None, None),
            // The entry stays for its stream.
            ValueKind::Normalised => values.entry.iter_mut().for_each(EntryState::forget),
            ValueKind::Output => values.output = None,
            ValueKind::Saved => values.saved = None,
            ValueKind::StreamGradient => values.stream_gradient = None,
            ValueKind::NormalisedGradient => values.normalised_gradient.clear(),
            ValueKind::OutputGradient => values.output_gradient = None,
            ValueKind::WeightInputs => values.weight_inputs = None,
        }
    }
}

impl Executor<'_> {
    /// Runs a verified program over its micro-batches, one batch each. Returns their losses, f32 [1, labels]; gradients
    /// are added to what is there.
    pub fn run(&self, program: &Program, batches: &[Batch], options: LossOptions) -> Vec<Tensor> {
        batches.iter().for_each(|batch| batch.check(&self.model.config));
        let units = || (0..=self.model.units.len()).map(|_| UnitValues::default()).collect();
        let mut values = Values(batches.iter().map(|_| units()).collect());
        let mut losses: Vec<Option<Tensor>> = batches.iter().map(|_| None).collect();
        for task in &program.tasks {
            let context = self.context(&batches[task.micro.0]);
            match task.work {
                Work::Loss => losses[task.micro.0] = Some(self.loss(task, &context, &mut values, options)),
                Work::Enter => self.enter(task, &context, &mut values),
                Work::Forward => self.forward(task, &context, &mut values),
                Work::Recompute => self.recompute(task, &context, &mut values),
                Work::BackwardInput => self.backward_input(task, &context, &mut values),
                Work::BackwardWeight => self.backward_weight(task, &context, &mut values),
                Work::BackwardEnter => self.backward_enter(task, &context, &mut values),
            }
            task.frees.iter().for_each(|value| values.free(value));
        }
        losses.into_iter().map(|losses| losses.expect("every micro-batch has its loss")).collect()
    }

    fn context<'a>(&'a self, batch: &'a Batch) -> Context<'a> {
        Context { queue: self.device.compute(), parameters: self.parameters, tables: self.tables, batch }
    }

    fn enter(&self, task: &Task, context: &Context, values: &mut Values) {
        let entry = &self.model.units[task.unit.0].entry;
        let below = values.before(task);
        let output = below.output.as_ref().expect(VERIFIED);
        let entered = entry.forward(context.queue, context.parameters, below.stream(), output);
        values.at(task).entry = Some(entered);
    }

    fn forward(&self, task: &Task, context: &Context, values: &mut Values) {
        let body = &self.model.units[task.unit.0].body;
        let values = values.at(task);
        let inputs = values.entry.as_ref().map_or(&[][..], |entry| &entry.normalised);
        let (stream, output, saved) = body.forward(context, inputs);
        (values.started, values.output) = (stream, Some(output));
        values.saved = task.writes.iter().any(|value| value.kind == ValueKind::Saved).then_some(saved);
    }

    fn recompute(&self, task: &Task, context: &Context, values: &mut Values) {
        let values = values.at(task);
        values.saved = Some(recompute(&self.model.units[task.unit.0], context, values.entry.as_mut()));
    }

    fn loss(&self, task: &Task, context: &Context, values: &mut Values, options: LossOptions) -> Tensor {
        let below = values.before(task);
        let output = below.output.take().expect(VERIFIED);
        let (losses, dstream, doutput) =
            head_backward(self.model, context, self.gradients, below.stream(), output, options);
        (below.stream_gradient, below.output_gradient) = (Some(dstream), Some(doutput));
        losses
    }

    fn backward_input(&self, task: &Task, context: &Context, values: &mut Values) {
        let body = &self.model.units[task.unit.0].body;
        let values = values.at(task);
        let (saved, doutput) = (values.saved.take().expect(VERIFIED), values.output_gradient.take().expect(VERIFIED));
        let dstream = values.stream_gradient.as_ref();
        let (dinputs, backward) = body.backward_input(context, self.gradients, saved, dstream, &doutput);
        (values.normalised_gradient, values.weight_inputs) = (dinputs, Some(backward));
    }

    fn backward_weight(&self, task: &Task, context: &Context, values: &mut Values) {
        let inputs = values.at(task).weight_inputs.take().expect(VERIFIED);
        self.model.units[task.unit.0].body.backward_weight(context, self.gradients, inputs);
    }

    fn backward_enter(&self, task: &Task, context: &Context, values: &mut Values) {
        let entry = &self.model.units[task.unit.0].entry;
        let here = values.at(task);
        let (dstream, dnormalised) = (here.stream_gradient.take(), std::mem::take(&mut here.normalised_gradient));
        let state = here.entry.as_ref().expect(VERIFIED);
        let (dstream, doutput) =
            entry.backward(context.queue, context.parameters, self.gradients, state, dstream.as_ref(), &dnormalised);
        let below = values.before(task);
        (below.stream_gradient, below.output_gradient) = (Some(dstream), Some(doutput));
    }
}

const VERIFIED: &str = "a verified program writes what it reads";

impl UnitValues {
    fn stream(&self) -> Option<&Tensor> {
        self.entry.as_ref().map(|entry| &entry.stream).or(self.started.as_ref())
    }
}

impl Chain {
    pub fn of(model: &Model) -> Chain {
        Chain { units: model.units.len(), starts_stream: model.units[0].body.starts_stream() }
    }
}
