//! Runs programs: each task on its queue, each value held until the program frees it.

mod migration;
mod stages;

use std::collections::{BTreeMap, HashMap, VecDeque};

use evenkeel_comm::Group;
use evenkeel_device::kernel::Add;
use evenkeel_device::{DType, Device, Event, Queue, Stamp, Tensor};
use evenkeel_model::pass::{Findings, STATS};
use evenkeel_model::{
    Batch, Body, BodyBackward, BodyState, Classified, Context, Entry, EntryState, Gradients, JoinState, LossOptions,
    Migration, Model, Parameters, Pruning, RotaryTables, in_grains,
};

use crate::gather::gather_values;
use crate::program::{Micro, Program, Task, UnitIdx, Value, ValueKind};
use crate::trace::Recording;
use crate::work::{BucketIdx, Chunk, Lane, Work};
use stages::Rooms;

/// The data that tasks work on.
pub struct Executor<'a> {
    /// The shard that this rank computes with: its work, if work migrates.
    pub model: &'a Model,
    pub device: &'a Device,
    pub parameters: &'a Parameters,
    pub tables: &'a RotaryTables,
    pub gradients: &'a Gradients,
    /// This rank's memberships, in the order of the program's groups.
    pub groups: &'a [Group],
    /// The migrations of the program.
    pub migration: Option<&'a Migration>,
    /// The columns that this rank's linear layers keep; all without it.
    pub pruning: Option<&'a Pruning>,
}

impl Executor<'_> {
    /// Runs a verified program over its micro-batches, each given in its parts, up to its tail. Returns the findings of each
    /// part, in order, if the head is here; adds to the gradients. `recording` gets the times of tasks.
    pub fn run(
        &self,
        program: &Program,
        micros: &[Vec<Batch>],
        options: LossOptions,
        recording: Option<&mut Recording>,
    ) -> Vec<Findings> {
        self.run_watched(program, micros, options, recording, |_| ())
    }

    /// The same; calls `issued` with the place of each task once it is issued.
    pub fn run_watched(
        &self,
        program: &Program,
        micros: &[Vec<Batch>],
        options: LossOptions,
        mut recording: Option<&mut Recording>,
        mut issued: impl FnMut(usize),
    ) -> Vec<Findings> {
        micros.iter().flatten().for_each(|batch| batch.check(&self.model.config));
        let mut run = Run {
            executor: self,
            micros,
            options,
            values: Values::default(),
            findings: HashMap::new(),
            arrivals: HashMap::new(),
            flights: BTreeMap::new(),
            rooms: BTreeMap::new(),
        };
        run.make_rooms(program);
        for (index, task) in program.tasks[..program.tail()].iter().enumerate() {
            let lane = task.work.lane();
            let queue = self.queue(lane);
            if !run.has_rows(task) {
                run.skip(task, program.blocking);
                continue;
            }
            run.await_inputs(task, program.blocking);
            let start = recording.is_some().then(|| queue.stamp());
            let came = match lane {
                Lane::Compute => {
                    run.compute(task);
                    None
                }
                Lane::Comm => Some(run.exchange(task)),
                Lane::Pass => Some(run.pass(task)),
            };
            if let (Some(recording), Some(start)) = (recording.as_deref_mut(), start) {
                recording.add(index, start, came, queue.stamp());
            }
            issued(index);
        }
        run.await_exchanges();
        let parts =
            micros.iter().enumerate().flat_map(|(index, parts)| (0..parts.len()).map(move |part| (index, part)));
        let mut found = run.findings;
        // Only the rank with the head has losses.
        if found.is_empty() {
            return Vec::new();
        }
        parts.map(|(index, part)| found.remove(&Micro { index, part }).expect("every part has its losses")).collect()
    }

    fn queue(&self, lane: Lane) -> &Queue {
        match lane {
            Lane::Compute => self.device.compute(),
            Lane::Comm => self.device.comm(),
            Lane::Pass => self.device.pass(),
        }
    }
}

/// The values that a running program holds.
#[derive(Default)]
struct Values {
    tensors: HashMap<Value, Vec<Tensor>>,
    /// By stream, for all units but the first.
    entries: HashMap<Value, EntryState>,
    saved: HashMap<Value, BodyState>,
    joined: HashMap<Value, JoinState>,
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
        self.joined.remove(value);
        self.weight_inputs.remove(value);
    }
}

const VERIFIED: &str = "a verified program writes what it reads";

/// A running program.
struct Run<'a> {
    executor: &'a Executor<'a>,
    micros: &'a [Vec<Batch>],
    options: LossOptions,
    values: Values,
    findings: HashMap<Micro, Findings>,
    /// The exchange that brings each value that other queues write.
    arrivals: HashMap<Value, Arrival>,
    flights: BTreeMap<Lane, Flight>,
    /// By the pass that brings it: the rooms for what arrives from other stages.
    rooms: BTreeMap<(Work, UnitIdx), Rooms>,
}

/// An exchange that brings a value, and the event behind it.
struct Arrival {
    lane: Lane,
    number: u64,
    event: Event,
}

/// The exchanges of a lane.
#[derive(Default)]
struct Flight {
    /// Exchanges issued, and the number of them that the compute queue has waited for.
    issued: u64,
    awaited: u64,
    /// Tensors that exchanges read. They may be freed once the compute queue, which may reuse their memory, waits for those
    /// exchanges.
    held: VecDeque<(u64, Vec<Tensor>)>,
}

impl<'a> Run<'a> {
    /// Makes the task's queue wait for other queues' work before it.
    fn await_inputs(&mut self, task: &Task, blocking: bool) {
        match task.work.lane() {
            Lane::Comm => {
                // Gradients that nothing was added to are zeroed before they are summed.
                if let Work::SumGradients(bucket) | Work::ReduceGradients(bucket) = task.work {
                    self.executor.gradients.whole(self.queue(), bucket.0);
                }
                if task.work == Work::Return {
                    self.complete_migrated(task.unit);
                }
                self.executor.device.comm().wait(&self.queue().record());
            }
            Lane::Pass if task.receives() => self.await_room(task),
            Lane::Pass => self.executor.device.pass().wait(&self.queue().record()),
            Lane::Compute => {
                if blocking {
                    self.await_lane(Lane::Comm);
                }
                task.reads.iter().for_each(|value| self.await_arrival(value));
            }
        }
    }

    fn await_arrival(&mut self, value: &Value) {
        if let Some(Arrival { lane, number, event }) = self.arrivals.remove(value) {
            self.await_exchange(lane, number, &event);
        }
    }

    fn await_exchange(&mut self, lane: Lane, number: u64, event: &Event) {
        self.queue().wait(event);
        let flight = self.flights.entry(lane).or_default();
        flight.awaited = number;
        while flight.held.front().is_some_and(|&(held, _)| held <= number) {
            flight.held.pop_front();
        }
    }

    /// Makes the compute queue wait for all exchanges so far.
    fn await_exchanges(&mut self) {
        Lane::ALL.into_iter().for_each(|lane| self.await_lane(lane));
    }

    fn await_lane(&mut self, lane: Lane) {
        let Flight { issued, awaited, .. } = *self.flights.entry(lane).or_default();
        if awaited < issued {
            self.await_exchange(lane, issued, &self.executor.queue(lane).record());
        }
    }

    /// Has the compute tasks that read a value wait for the exchange that was just issued.
    fn await_later(&mut self, value: Value, lane: Lane) {
        let (number, event) = (self.flights.entry(lane).or_default().issued, self.executor.queue(lane).record());
        self.arrivals.insert(value, Arrival { lane, number, event });
    }

    /// Holds tensors until the exchange that was just issued has been awaited.
    fn hold(&mut self, tensors: Vec<Tensor>, lane: Lane) {
        let flight = self.flights.entry(lane).or_default();
        flight.held.push_back((flight.issued, tensors));
    }

    fn compute(&mut self, task: &Task) {
        match task.work {
            Work::Enter => self.enter(task),
            Work::Arrive => self.arrive(task),
            Work::Join => self.join(task),
            Work::Forward => self.forward(task),
            Work::Normalise => self.normalise(task),
            Work::Recompute => self.recompute(task),
            Work::Logits(chunk) => self.logits(task, chunk),
            Work::Loss(chunk) => self.loss(task, chunk),
            Work::Evaluate(chunk) => self.evaluate(task, chunk),
            Work::BackwardInput => self.backward_input(task),
            Work::BackwardWeight => self.backward_weight(task),
            Work::BackwardEnter => self.backward_enter(task),
            Work::BackwardJoin => self.backward_join(task),
            other => unreachable!("{other:?} is an exchange or of the tail"),
        }
        self.free(task);
    }

    /// Whether there is anything to do: a program may have more chunks than a batch. Ranks that share a batch agree on its
    /// chunks.
    fn has_rows(&self, task: &Task) -> bool {
        let (Work::Logits(chunk) | Work::GatherStats(chunk) | Work::Loss(chunk) | Work::Evaluate(chunk)) = task.work
        else {
            return true;
        };
        let head = self.executor.model.head();
        chunk.0 == 0 || head.chunks(head.rows(self.batch(task))).nth(chunk.0).is_some()
    }

    /// Waits and frees as if the task were computed.
    fn skip(&mut self, task: &Task, blocking: bool) {
        if task.work.lane() == Lane::Compute {
            self.await_inputs(task, blocking);
            self.free(task);
        }
    }

    fn free(&mut self, task: &Task) {
        for value in &task.frees {
            self.values.free(value);
            self.free_room(value);
            if let ValueKind::ParametersGathered(bucket) = value.kind {
                self.executor.parameters.set_values(bucket.0, None);
            }
            if value.kind == ValueKind::Migrated {
                self.forget_migrated(value.unit);
            }
        }
    }

    /// Returns the stamp of the moment when the last of the group's members has come.
    fn exchange(&mut self, task: &Task) -> Stamp {
        let Executor { device, groups, .. } = *self.executor;
        let exchange = task.exchange.expect("a task on the comm lane is an exchange");
        let (comm, group) = (device.comm(), &groups[exchange.group.0]);
        self.flights.entry(Lane::Comm).or_default().issued += 1;
        match task.work {
            Work::SumGradients(bucket) => return self.sum_gradients(bucket, group),
            Work::ReduceGradients(bucket) => return self.reduce_gradients(task, bucket, group),
            Work::GatherParameters(bucket) => return self.gather_parameters(task, bucket, group),
            Work::Migrate => return self.migrate(task, group),
            Work::Return => return self.return_gradients(task, group),
            _ => (),
        }
        let (&[from], &[to]) = (&task.reads[..], &task.writes[..]) else { unreachable!("an exchange moves one value") };
        let mut tensors = self.values.tensors.remove(&from).expect(VERIFIED);
        let bounds = match task.work {
            // Every rank has its statistics of all rows.
            Work::GatherStats(_) => (0..=group.size()).map(|rank| rank * tensors[0].rows).collect(),
            _ => self.row_bounds(task),
        };
        let (mut came, mut bytes) = (None, 0);
        let received = tensors.iter().map(|tensor| {
            let like_tensor = |rows| comm.tensor(rows, tensor.cols, tensor.dtype);
            let (received, stamp) = match task.work {
                Work::AllReduce => (tensor.clone(), group.all_reduce(comm, tensor)),
                Work::ReduceScatter => {
                    let received = like_tensor(bounds[group.rank() + 1] - bounds[group.rank()]);
                    let stamp = group.reduce_scatter(comm, tensor, &received, &bounds);
                    (received, stamp)
                }
                Work::AllGather | Work::GatherStats(_) => {
                    let received = like_tensor(bounds[group.size()]);
                    let stamp = group.all_gather(comm, tensor, &received, &bounds);
                    (received, stamp)
                }
                other => unreachable!("{other:?} is no exchange of values"),
            };
            bytes += tensor.bytes().max(received.bytes());
            came.get_or_insert(stamp);
            received
        });
        let received: Vec<Tensor> = received.collect();
        assert_eq!(bytes, exchange.bytes, "`{task}`");
        if task.frees.contains(&to) {
            tensors.extend(received);
        } else {
            self.values.put(to, received);
            self.await_later(to, Lane::Comm);
        }
        self.hold(tensors, Lane::Comm);
        came.expect("a value has a tensor")
    }

    fn sum_gradients(&mut self, bucket: BucketIdx, group: &Group) -> Stamp {
        let Executor { device, gradients, .. } = *self.executor;
        group.all_reduce(device.comm(), &gradients.whole(device.compute(), bucket.0))
    }

    /// Reduces over the data-parallel group: each rank gets all sums or, if state or gradients are split, those of its own part.
    fn reduce_gradients(&mut self, task: &Task, bucket: BucketIdx, group: &Group) -> Stamp {
        let Executor { device, gradients, parameters, .. } = *self.executor;
        let (compute, comm, split) = (device.compute(), device.comm(), parameters.split);
        let bounds = parameters.buckets[bucket.0].grain_bounds(group.size());
        let Some((whole, own, has_sums)) = gradients.take(compute, bucket.0) else {
            let whole = gradients.whole(compute, bucket.0);
            if !split.splits_state() {
                return group.all_reduce(comm, &whole);
            }
            let whole = in_grains(&whole);
            let own = whole.row_range(bounds[group.rank()]..bounds[group.rank() + 1]);
            return group.reduce_scatter(comm, &whole, &own, &bounds);
        };
        let received = if has_sums { comm.tensor(1, own.len(), own.dtype) } else { own.clone() };
        let stamp = group.reduce_scatter(comm, &in_grains(&whole), &in_grains(&received), &bounds);
        if has_sums {
            comm.launch(Add { a: own.view(), b: received.view(), out: own.view() });
        }
        let [reduced] = task.writes[..] else { unreachable!("split gradients say when they are reduced") };
        if !task.frees.contains(&reduced) {
            self.values.put(reduced, Vec::new());
            self.await_later(reduced, Lane::Comm);
        }
        self.hold(vec![whole, received], Lane::Comm);
        stamp
    }

    fn gather_parameters(&mut self, task: &Task, bucket: BucketIdx, group: &Group) -> Stamp {
        let Executor { device, parameters, .. } = *self.executor;
        let stamp = gather_values(parameters, bucket.0, group, device.comm());
        let [gathered] = task.writes[..] else { unreachable!("a gather writes one value") };
        self.values.put(gathered, parameters.values(bucket.0).into_iter().collect());
        self.await_later(gathered, Lane::Comm);
        stamp
    }

    /// The first row of each rank in the stream, and the end.
    fn row_bounds(&self, task: &Task) -> Vec<usize> {
        self.executor.model.shard.row_bounds(self.batch(task).token_count())
    }

    fn batch(&self, task: &Task) -> &'a Batch {
        &self.micros[task.micro.index][task.micro.part]
    }

    fn queue(&self) -> &'a Queue {
        self.executor.device.compute()
    }

    fn context(&self, task: &Task) -> Context<'a> {
        let Executor { device, parameters, tables, pruning, .. } = *self.executor;
        Context { queue: device.compute(), parameters, tables, batch: self.batch(task), pruning }
    }

    /// The first tensor of the value of these kinds that a task reads, if any.
    fn read(&self, task: &Task, kinds: &[ValueKind]) -> Option<&Tensor> {
        task.read(kinds).map(|value| &self.values.tensors(value)[0])
    }

    fn entry(&self, unit: UnitIdx) -> &'a Entry {
        self.executor.model.unit(unit.0).entry.as_ref().expect("a program enters units that have an entry")
    }

    /// The stream, if there is one yet, and the output that an addition adds to it.
    fn summands(&self, task: &Task) -> (Option<&Tensor>, &Tensor) {
        let stream = task.read(&[ValueKind::Stream]).map(|value| match self.values.entries.get(&value) {
            Some(entry) => &entry.stream,
            None => &self.values.tensors(value)[0],
        });
        let output = self.read(task, &[ValueKind::OutputReduced, ValueKind::Output]);
        (stream, output.expect("an addition reads an output"))
    }

    fn enter(&mut self, task: &Task) {
        let (stream, output) = self.summands(task);
        let context = self.context(task);
        let first_row = self.own_rows(task).start;
        let mut entry = self.entry(task.unit).forward(&context, first_row, stream, output);
        self.values.put(task.value(ValueKind::Normalised), std::mem::take(&mut entry.normalised));
        self.values.entries.insert(task.value(ValueKind::Stream), entry);
    }

    fn normalise(&mut self, task: &Task) {
        let mut entry = self.values.entries.remove(&task.value(ValueKind::Stream)).expect(VERIFIED);
        let context = self.context(task);
        self.entry(task.unit).recompute(&context, &mut entry);
        self.values.put(task.value(ValueKind::Normalised), std::mem::take(&mut entry.normalised));
        self.values.entries.insert(task.value(ValueKind::Stream), entry);
    }

    /// The inputs of the body that a task runs.
    fn inputs(&self, task: &Task) -> &[Tensor] {
        let input = task.read(&[ValueKind::NormalisedGathered, ValueKind::Normalised]);
        input.map_or(&[], |input| self.values.tensors(input))
    }

    fn body(&self, task: &Task) -> &'a Body {
        self.executor.model.unit(task.unit.0).body()
    }

    fn forward(&mut self, task: &Task) {
        let (stream, output, saved) = self.body(task).forward(&self.context(task), self.inputs(task));
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
            return 0..self.batch(task).token_count();
        }
        let (bounds, rank) = (self.row_bounds(task), self.executor.groups[0].rank());
        bounds[rank]..bounds[rank + 1]
    }

    fn recompute(&mut self, task: &Task) {
        let (body, context, inputs) = (self.body(task), self.context(task), self.inputs(task));
        let output = task.value(ValueKind::Output);
        let saved = if task.writes.contains(&output) {
            let (_, computed, saved) = body.forward(&context, inputs);
            self.values.put(output, vec![computed]);
            saved
        } else {
            body.recompute(&context, inputs)
        };
        self.values.saved.insert(task.value(ValueKind::Saved), saved);
    }

    /// The range of a chunk among the rows that the head treats.
    fn chunk_rows(&self, task: &Task, chunk: Chunk) -> std::ops::Range<usize> {
        let head = self.executor.model.head();
        head.chunks(head.rows(self.batch(task))).nth(chunk.0).expect("a program's chunks are the head's")
    }

    /// The rows that the head treats, and the range of a chunk among them.
    fn chunk(&self, task: &Task, chunk: Chunk) -> (Classified, std::ops::Range<usize>) {
        let classified = self.executor.model.head().classified(&self.context(task), self.head_input(task));
        (classified, self.chunk_rows(task, chunk))
    }

    fn head_input(&self, task: &Task) -> &Tensor {
        self.read(task, &[ValueKind::NormalisedGathered, ValueKind::Normalised]).expect("the head reads its input")
    }

    fn logits(&mut self, task: &Task, chunk: Chunk) {
        let (classified, rows) = self.chunk(task, chunk);
        let (head, context, x) = (self.executor.model.head(), self.context(task), &classified.rows);
        let queue = context.queue;
        let found = self.findings.remove(&task.micro).unwrap_or_else(|| Findings {
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
        self.findings.insert(task.micro, found);
    }

    fn loss(&mut self, task: &Task, chunk: Chunk) {
        let (classified, rows) = self.chunk(task, chunk);
        let (head, gradient) = (self.executor.model.head(), task.value(ValueKind::NormalisedGradient));
        if task.writes.contains(&gradient) {
            let dnormalised = head.dnormalised(self.queue(), self.head_input(task));
            self.values.put(gradient, vec![dnormalised]);
        }
        let logits = self.values.tensors(task.value(ValueKind::Logits(chunk)))[0].clone();
        let context = self.context(task);
        let dlogits = head.dlogits(&context, &logits);
        self.write_losses(task, chunk, &logits, rows.clone(), Some(&dlogits));
        let dnormalised = &self.values.tensors(gradient)[0];
        head.backward(&context, self.executor.gradients, &classified, rows, &dlogits, dnormalised);
    }

    fn evaluate(&mut self, task: &Task, chunk: Chunk) {
        let rows = self.chunk_rows(task, chunk);
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
        let (head, context) = (self.executor.model.head(), self.context(task));
        let found = self.findings.get(&task.micro).expect(VERIFIED);
        let stats = found.stats.row_range(rows.clone());
        if let Some(parts) = self.values.tensors.get(&task.value(ValueKind::StatsGathered(chunk))) {
            head.merge(&context, &parts[0], &stats);
        }
        head.loss(&context, logits, &stats, rows, self.options, &found.losses, dlogits);
    }

    fn backward_input(&mut self, task: &Task) {
        let saved = self.values.saved.remove(&task.value(ValueKind::Saved)).expect(VERIFIED);
        let doutput = [ValueKind::OutputGradientGathered, ValueKind::OutputGradient];
        let doutput = self.read(task, &doutput).expect("a body's output has a gradient");
        let dstream = self.read(task, &[ValueKind::StreamGradientGathered, ValueKind::StreamGradient]);
        let (body, context) = (self.body(task), self.context(task));
        let (dinputs, backward) = body.backward_input(&context, self.executor.gradients, saved, dstream, doutput);
        let gradient = task.value(ValueKind::NormalisedGradient);
        if task.writes.contains(&gradient) {
            self.values.put(gradient, dinputs);
        }
        self.values.weight_inputs.insert(task.value(ValueKind::WeightInputs), backward);
    }

    fn backward_weight(&mut self, task: &Task) {
        let inputs = self.values.weight_inputs.remove(&task.value(ValueKind::WeightInputs)).expect(VERIFIED);
        let body = self.body(task);
        body.backward_weight(&self.context(task), self.executor.gradients, inputs);
    }

    fn backward_enter(&mut self, task: &Task) {
        let entry = self.values.entries.get(&task.value(ValueKind::Stream)).expect(VERIFIED);
        let dnormalised = task.read(&[ValueKind::NormalisedGradientReduced, ValueKind::NormalisedGradient]);
        let dnormalised = self.values.tensors(dnormalised.expect("a normalised stream has a gradient"));
        let dstream = self.read(task, &[ValueKind::StreamGradient]);
        let (context, gradients, first_row) = (self.context(task), self.executor.gradients, self.own_rows(task).start);
        if self.entry(task.unit).begins_stage() {
            let leaving = self.entry(task.unit).backward_norms(&context, gradients, entry, dstream, dnormalised);
            task.writes.iter().for_each(|&value| self.values.put(value, vec![leaving.clone()]));
            return;
        }
        let (dstream, doutput) =
            self.entry(task.unit).backward(&context, first_row, gradients, entry, dstream, dnormalised);
        // The lowest trained unit writes none of them: nothing reads them.
        for (&value, gradient) in task.writes.iter().zip([dstream, doutput]) {
            self.values.put(value, vec![gradient]);
        }
    }
}
