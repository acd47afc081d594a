//! Runs programs: each task on its queue, each value held until the program frees it.

use std::collections::{HashMap, VecDeque};

use evenkeel_device::{DType, Device, Event, Queue, Tensor};
use evenkeel_model::pass::{Findings, STATS};
use evenkeel_model::{
    Batch, BodyBackward, BodyState, Context, Entry, EntryState, Gradients, LossOptions, Model, Parameters,
    RotaryTables, even_bounds,
};

use crate::groups::TensorGroups;
use crate::program::{Chunk, Lane, Program, Task, UnitIdx, Value, ValueKind, Work};
use crate::schedule::Chain;

/// What tasks work on.
pub struct Executor<'a> {
    pub model: &'a Model,
    pub device: &'a Device,
    pub parameters: &'a Parameters,
    pub tables: &'a RotaryTables,
    pub gradients: &'a Gradients,
    pub groups: &'a TensorGroups,
}

impl Executor<'_> {
    /// Runs a verified program over its micro-batches, one batch each. Returns what it found of each; gradients are added
    /// to what is there.
    pub fn run(&self, program: &Program, batches: &[Batch], options: LossOptions) -> Vec<Findings> {
        batches.iter().for_each(|batch| batch.check(&self.model.config));
        let mut run = Run {
            executor: self,
            batches,
            options,
            values: Values::default(),
            findings: batches.iter().map(|_| None).collect(),
            arrivals: HashMap::new(),
            in_flight: VecDeque::new(),
            exchanges: 0,
        };
        for task in &program.tasks {
            match task.work.lane() {
                Lane::Compute => run.compute(task),
                Lane::Comm => run.exchange(task),
            }
        }
        run.await_exchanges();
        run.findings.into_iter().map(|findings| findings.expect("every micro-batch has its losses")).collect()
    }
}

/// What a running program holds.
#[derive(Default)]
struct Values {
    tensors: HashMap<Value, Vec<Tensor>>,
    /// Behind the streams of all units but the first.
    entries: HashMap<Value, EntryState>,
    saved: HashMap<Value, BodyState>,
    weight_inputs: HashMap<Value, BodyBackward>,
}

impl Values {
    fn tensors(&self, value: Value) -> &[Tensor] {
        self.tensors.get(&value).expect(VERIFIED)
    }

    fn put(&mut self, value: Value, tensors: Vec<Tensor>) {
        self.tensors.insert(value, tensors);
    }

    fn free(&mut self, value: &Value) {
        self.tensors.remove(value);
        self.entries.remove(value);
        self.saved.remove(value);
        self.weight_inputs.remove(value);
    }
}

const VERIFIED: &str = "a verified program writes what it reads";

/// A program on its way.
struct Run<'a> {
    executor: &'a Executor<'a>,
    batches: &'a [Batch],
    options: LossOptions,
    values: Values,
    findings: Vec<Option<Findings>>,
    /// When values that the comm queue writes will be there, and by which exchange.
    arrivals: HashMap<Value, (u64, Event)>,
    /// What exchanges read. It may be freed when the compute queue, which may get its memory next, waits for them.
    in_flight: VecDeque<(u64, Vec<Tensor>)>,
    exchanges: u64,
}

impl<'a> Run<'a> {
    fn compute(&mut self, task: &Task) {
        task.reads.iter().for_each(|value| self.await_arrival(value));
        match task.work {
            Work::Enter => self.enter(task),
            Work::Forward => self.forward(task),
            Work::Normalise => self.normalise(task),
            Work::Recompute => self.recompute(task),
            Work::Logits(chunk) => self.logits(task, chunk),
            Work::Loss(chunk) => self.loss(task, chunk),
            Work::Evaluate(chunk) => self.evaluate(task, chunk),
            Work::BackwardInput => self.backward_input(task),
            Work::BackwardWeight => self.backward_weight(task),
            Work::BackwardEnter => self.backward_enter(task),
            Work::AllReduce | Work::ReduceScatter | Work::AllGather | Work::SumGradients => {
                unreachable!("exchanges run on the comm queue")
            }
        }
        task.frees.iter().for_each(|value| self.values.free(value));
    }

    fn await_arrival(&mut self, value: &Value) {
        if let Some((exchange, event)) = self.arrivals.remove(value) {
            self.await_exchange(exchange, &event);
        }
    }

    fn await_exchange(&mut self, exchange: u64, event: &Event) {
        self.queue().wait(event);
        while self.in_flight.front().is_some_and(|&(number, _)| number <= exchange) {
            self.in_flight.pop_front();
        }
    }

    /// Whatever comes next on the compute queue runs behind all exchanges.
    fn await_exchanges(&mut self) {
        if self.exchanges > 0 {
            let event = self.executor.device.comm().record();
            self.await_exchange(self.exchanges, &event);
        }
    }

    fn exchange(&mut self, task: &Task) {
        let Executor { device, gradients, groups, .. } = *self.executor;
        let buckets = if task.work == Work::SumGradients { gradients.buckets(device.compute()) } else { &[] };
        let (comm, group) = (device.comm(), &groups.all);
        comm.wait(&device.compute().record());
        self.exchanges += 1;
        for bucket in buckets {
            groups.of(&bucket.holders).all_reduce(comm, &bucket.flat);
        }
        if let (&[from], &[to]) = (&task.reads[..], &task.writes[..]) {
            let tensors = self.values.tensors.remove(&from).expect(VERIFIED);
            let bounds = match from.kind {
                // Every rank has its statistics of all rows.
                ValueKind::Stats(_) => (0..=group.size()).map(|rank| rank * tensors[0].rows).collect(),
                _ => self.row_bounds(task),
            };
            let received = tensors.iter().map(|tensor| match task.work {
                Work::AllReduce => {
                    group.all_reduce(comm, tensor);
                    tensor.clone()
                }
                Work::ReduceScatter => {
                    let own = bounds[group.rank() + 1] - bounds[group.rank()];
                    let received = comm.tensor(own, tensor.cols, tensor.dtype);
                    group.reduce_scatter(comm, tensor, &received, &bounds);
                    received
                }
                _ => {
                    let received = comm.tensor(bounds[group.size()], tensor.cols, tensor.dtype);
                    group.all_gather(comm, tensor, &received, &bounds);
                    received
                }
            });
            let received = received.collect();
            self.values.put(to, received);
            self.arrivals.insert(to, (self.exchanges, comm.record()));
            self.in_flight.push_back((self.exchanges, tensors));
        }
    }

    /// Where each rank's rows of the stream begin.
    fn row_bounds(&self, task: &Task) -> Vec<usize> {
        even_bounds(self.batches[task.micro.0].token_count(), self.executor.groups.all.size())
    }

    fn queue(&self) -> &'a Queue {
        self.executor.device.compute()
    }

    fn context(&self, task: &Task) -> Context<'a> {
        let Executor { device, parameters, tables, .. } = *self.executor;
        Context { queue: device.compute(), parameters, tables, batch: &self.batches[task.micro.0] }
    }

    fn entry(&self, unit: UnitIdx) -> &'a Entry {
        let model = self.executor.model;
        model.units.get(unit.0).map_or(&model.head.entry, |unit| &unit.entry)
    }

    fn enter(&mut self, task: &Task) {
        let stream = task.reads.iter().find(|value| value.kind == ValueKind::Stream);
        let stream = stream.map(|value| match self.values.entries.get(value) {
            Some(entry) => &entry.stream,
            None => &self.values.tensors(*value)[0],
        });
        let output = task.reads.last().expect("an entry reads an output");
        let output = &self.values.tensors(*output)[0];
        let context = self.context(task);
        let mut entry = self.entry(task.unit).forward(context.queue, context.parameters, stream, output);
        self.values.put(task.value(ValueKind::Normalised), std::mem::take(&mut entry.normalised));
        self.values.entries.insert(task.value(ValueKind::Stream), entry);
    }

    fn normalise(&mut self, task: &Task) {
        let mut entry = self.values.entries.remove(&task.value(ValueKind::Stream)).expect(VERIFIED);
        let context = self.context(task);
        self.entry(task.unit).recompute(context.queue, context.parameters, &mut entry);
        self.values.put(task.value(ValueKind::Normalised), std::mem::take(&mut entry.normalised));
        self.values.entries.insert(task.value(ValueKind::Stream), entry);
    }

    /// A body's forward on what the task reads.
    fn run_body(&self, task: &Task) -> (Option<Tensor>, Tensor, BodyState) {
        let inputs = task.reads.first().map_or(&[][..], |&input| self.values.tensors(input));
        self.executor.model.units[task.unit.0].body.forward(&self.context(task), inputs)
    }

    fn forward(&mut self, task: &Task) {
        let (stream, output, saved) = self.run_body(task);
        if let Some(stream) = stream {
            let own = self.own_rows(task);
            self.values.put(task.value(ValueKind::Stream), vec![stream.row_range(own)]);
        }
        self.values.put(task.value(ValueKind::Output), vec![output]);
        let value = task.value(ValueKind::Saved);
        if task.writes.contains(&value) {
            self.values.saved.insert(value, saved);
        }
    }

    /// The rows of the stream that this rank has.
    fn own_rows(&self, task: &Task) -> std::ops::Range<usize> {
        if !self.executor.model.shard.split_sequence {
            return 0..self.batches[task.micro.0].token_count();
        }
        let (bounds, rank) = (self.row_bounds(task), self.executor.groups.all.rank());
        bounds[rank]..bounds[rank + 1]
    }

    fn recompute(&mut self, task: &Task) {
        let (_, _, saved) = self.run_body(task);
        self.values.saved.insert(task.value(ValueKind::Saved), saved);
    }

    /// The rows that the head treats, and where a chunk of them lies.
    fn chunk(&self, task: &Task, chunk: Chunk) -> (Tensor, std::ops::Range<usize>) {
        let (head, context) = (&self.executor.model.head, self.context(task));
        let input = self.values.tensors.get(&task.value(ValueKind::NormalisedGathered));
        let input = input.map_or_else(|| self.values.tensors(task.value(ValueKind::Normalised)), Vec::as_slice);
        let x = head.classified(&context, &input[0]);
        let rows = head.chunks(x.rows).nth(chunk.0).expect("a program's chunks are the head's");
        (x, rows)
    }

    fn logits(&mut self, task: &Task, chunk: Chunk) {
        let (x, rows) = self.chunk(task, chunk);
        let (head, context) = (&self.executor.model.head, self.context(task));
        let queue = context.queue;
        let found = self.findings[task.micro.0].take().unwrap_or_else(|| Findings {
            losses: queue.tensor(1, x.rows, DType::F32),
            stats: queue.tensor(x.rows, STATS, DType::F32),
        });
        let logits = head.logits(&context, &x.row_range(rows.clone()));
        let partial = task.value(ValueKind::Stats(chunk));
        let is_partial = task.writes.contains(&partial);
        let stats =
            if is_partial { queue.tensor(rows.len(), STATS, DType::F32) } else { found.stats.row_range(rows.clone()) };
        head.stats(&context, &logits, rows, &stats);
        self.values.put(task.value(ValueKind::Logits(chunk)), vec![logits]);
        if is_partial {
            self.values.put(partial, vec![stats]);
        }
        self.findings[task.micro.0] = Some(found);
    }

    fn loss(&mut self, task: &Task, chunk: Chunk) {
        let (x, rows) = self.chunk(task, chunk);
        let (head, gradient) = (&self.executor.model.head, task.value(ValueKind::NormalisedGradient));
        if task.writes.contains(&gradient) {
            let input = &self.values.tensors(*task.reads.last().expect("losses read the input"))[0];
            let dnormalised = head.dnormalised(self.queue(), input);
            self.values.put(gradient, vec![dnormalised]);
        }
        let logits = self.values.tensors(task.value(ValueKind::Logits(chunk)))[0].clone();
        let context = self.context(task);
        let dlogits = head.dlogits(&context, &logits);
        self.write_losses(task, chunk, &logits, rows.clone(), Some(&dlogits));
        let dx = head.classified(&context, &self.values.tensors(gradient)[0]).row_range(rows.clone());
        head.backward(&context, self.executor.gradients, &x.row_range(rows), &dlogits, &dx);
    }

    fn evaluate(&mut self, task: &Task, chunk: Chunk) {
        let (_, rows) = self.chunk(task, chunk);
        let logits = &self.values.tensors(task.value(ValueKind::Logits(chunk)))[0];
        self.write_losses(task, chunk, logits, rows, None);
    }

    fn write_losses(
        &self,
        task: &Task,
        chunk: Chunk,
        logits: &Tensor,
        rows: std::ops::Range<usize>,
        dlogits: Option<&Tensor>,
    ) {
        let (head, context) = (&self.executor.model.head, self.context(task));
        let found = self.findings[task.micro.0].as_ref().expect(VERIFIED);
        let stats = found.stats.row_range(rows.clone());
        if let Some(parts) = self.values.tensors.get(&task.value(ValueKind::StatsGathered(chunk))) {
            head.merge(&context, &parts[0], &stats);
        }
        head.loss(&context, logits, &stats, rows, self.options, &found.losses, dlogits);
    }

    fn backward_input(&mut self, task: &Task) {
        let saved = self.values.saved.remove(&task.value(ValueKind::Saved)).expect(VERIFIED);
        let doutput = &self.values.tensors(task.reads[1])[0];
        let dstream = task.reads.get(2).map(|&value| &self.values.tensors(value)[0]);
        let (body, context) = (&self.executor.model.units[task.unit.0].body, self.context(task));
        let (dinputs, backward) = body.backward_input(&context, self.executor.gradients, saved, dstream, doutput);
        if task.unit.0 > 0 {
            self.values.put(task.value(ValueKind::NormalisedGradient), dinputs);
        }
        self.values.weight_inputs.insert(task.value(ValueKind::WeightInputs), backward);
    }

    fn backward_weight(&mut self, task: &Task) {
        let inputs = self.values.weight_inputs.remove(&task.value(ValueKind::WeightInputs)).expect(VERIFIED);
        let body = &self.executor.model.units[task.unit.0].body;
        body.backward_weight(&self.context(task), self.executor.gradients, inputs);
    }

    fn backward_enter(&mut self, task: &Task) {
        let entry = self.values.entries.get(&task.reads[0]).expect(VERIFIED);
        let dnormalised = self.values.tensors(task.reads[1]);
        let dstream = task.reads.get(2).map(|&value| &self.values.tensors(value)[0]);
        let (context, gradients) = (self.context(task), self.executor.gradients);
        let (dstream, doutput) =
            self.entry(task.unit).backward(context.queue, context.parameters, gradients, entry, dstream, dnormalised);
        let [stream_gradient, output_gradient] = task.writes[..] else { unreachable!("an entry has two gradients") };
        self.values.put(stream_gradient, vec![dstream]);
        self.values.put(output_gradient, vec![doutput]);
    }
}

impl Task {
    /// A value of the task's unit and micro-batch.
    fn value(&self, kind: ValueKind) -> Value {
        Value { kind, unit: self.unit, micro: self.micro }
    }
}

impl Chain {
    pub fn of(model: &Model) -> Chain {
        Chain {
            partial: model.units.iter().map(|unit| unit.is_partial).collect(),
            head_is_partial: model.head.is_partial,
            starts_stream: model.units[0].body.starts_stream(),
            splits_sequence: model.shard.split_sequence,
            sums_gradients: !model.shard.is_whole(),
        }
    }
}
