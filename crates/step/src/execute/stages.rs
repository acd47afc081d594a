//! What goes from stage to stage: additions, passes, and the rooms for what arrives.

use std::collections::{BTreeMap, HashMap};

use evenkeel_device::kernel::Copy;
use evenkeel_device::{Event, Stamp, Tensor};

use super::{Executor, Run, VERIFIED};
use crate::program::{Program, ROOMS, Task, UnitIdx, Value, ValueKind};
use crate::work::{Lane, Work};

/// The rooms for what arrives over a boundary, one way: memory that nothing else uses while a program runs.
#[derive(Default)]
pub(super) struct Rooms {
    /// By room and part of a micro-batch.
    tensors: [Vec<Tensor>; ROOMS],
    /// The micro-batches that arrive, in order: each takes the room behind that of the one before.
    micros: Vec<usize>,
    /// By micro-batch: the event behind the task that freed it.
    freed: HashMap<usize, Event>,
}

impl Rooms {
    /// A micro-batch's place in the order of arrival.
    fn place(&self, micro: usize) -> usize {
        self.micros.iter().position(|other| *other == micro).expect("its room was made")
    }
}

impl Run<'_> {
    /// Takes the memory for what arrives in a program.
    pub(super) fn make_rooms(&mut self, program: &Program) {
        let mut rows: BTreeMap<(Work, UnitIdx), [Vec<usize>; ROOMS]> = BTreeMap::new();
        for task in program.tasks.iter().filter(|task| task.receives()) {
            let rooms = self.rooms.entry((task.work, task.unit)).or_default();
            if rooms.micros.last() != Some(&task.micro.index) {
                rooms.micros.push(task.micro.index);
            }
            let room = (rooms.micros.len() - 1) % ROOMS;
            let parts = &mut rows.entry((task.work, task.unit)).or_default()[room];
            parts.resize(parts.len().max(task.micro.part + 1), 0);
            parts[task.micro.part] = parts[task.micro.part].max(self.own_rows(task).len());
        }
        let Executor { device, model, parameters, .. } = *self.executor;
        for (rooms, rows) in self.rooms.values_mut().zip(rows.into_values()) {
            let tensor = |rows| device.pass().tensor(rows, model.config.hidden, parameters.dtype());
            rooms.tensors = rows.map(|parts| parts.into_iter().map(tensor).collect());
        }
        // Their memory may have been the compute queue's before.
        if !self.rooms.is_empty() {
            device.pass().wait(&device.compute().record());
        }
    }

    /// Makes the queue wait until what arrives has room.
    pub(super) fn await_room(&mut self, task: &Task) {
        let rooms = self.rooms.get_mut(&(task.work, task.unit)).expect("its rooms were made");
        let before = rooms.place(task.micro.index).checked_sub(ROOMS).map(|place| rooms.micros[place]);
        if let Some(event) = before.and_then(|before| rooms.freed.get(&before)) {
            self.executor.device.pass().wait(event);
        }
    }

    /// Notes that what arrived has been read.
    pub(super) fn free_room(&mut self, value: &Value) {
        let Some(pass) = value.arrives_by() else { return };
        let event = self.queue().record();
        if let Some(rooms) = self.rooms.get_mut(&(pass, value.unit)) {
            rooms.freed.insert(value.micro.index, event);
        }
    }

    pub(super) fn pass(&mut self, task: &Task) -> Stamp {
        let Executor { device, groups, .. } = *self.executor;
        let exchange = task.exchange.expect("a pass is an exchange");
        let group = &groups[exchange.group.0];
        let other = 1 - group.rank();
        self.flights.entry(Lane::Pass).or_default().issued += 1;
        if let [sent] = task.reads[..] {
            let tensors = self.values.tensors.remove(&sent).expect(VERIFIED);
            let stamp = group.send(device.pass(), &tensors[0], other);
            self.hold(tensors, Lane::Pass);
            return stamp;
        }
        let [value] = task.writes[..] else { unreachable!("a pass sends or receives one value") };
        let rooms = &self.rooms[&(task.work, task.unit)];
        let room = &rooms.tensors[rooms.place(task.micro.index) % ROOMS][task.micro.part];
        let arriving = room.row_range(0..self.own_rows(task).len());
        let stamp = group.receive(device.pass(), &arriving, other);
        self.values.put(value, vec![arriving]);
        self.await_later(value, Lane::Pass);
        stamp
    }

    /// What has arrived, out of its room; what comes from a stage of this rank is in none.
    fn arrived(&self, value: Value) -> Tensor {
        let arrived = &self.values.tensors(value)[0];
        let pass = value.arrives_by().expect("it comes from another stage");
        if !self.rooms.contains_key(&(pass, value.unit)) {
            return arrived.clone();
        }
        let copy = self.queue().tensor(arrived.rows, arrived.cols, arrived.dtype);
        self.queue().launch(Copy { x: arrived.view(), out: copy.view() });
        copy
    }

    pub(super) fn arrive(&mut self, task: &Task) {
        let stream = self.arrived(task.value(ValueKind::Passed));
        let mut entry = self.entry(task.unit).resume(&self.context(task), &stream);
        self.values.put(task.value(ValueKind::Normalised), std::mem::take(&mut entry.normalised));
        self.values.entries.insert(task.value(ValueKind::Stream), entry);
    }

    /// The addition behind a stage.
    pub(super) fn join(&mut self, task: &Task) {
        let (stream, output) = self.summands(task);
        let exit = self.executor.model.exit(task.unit.0);
        let (leaving, state) = exit.forward(&self.context(task), self.own_rows(task).start, stream, output);
        self.values.put(task.value(ValueKind::Passed), vec![leaving]);
        let joined = task.value(ValueKind::Joined);
        if task.writes.contains(&joined) {
            self.values.joined.insert(joined, state);
        }
    }

    pub(super) fn backward_join(&mut self, task: &Task) {
        let arrived = self.arrived(task.value(ValueKind::PassedGradient));
        let state = &self.values.joined[&task.value(ValueKind::Joined)];
        let (context, first_row) = (self.context(task), self.own_rows(task).start);
        let exit = self.executor.model.exit(task.unit.0);
        let (dstream, doutput) = exit.backward(&context, first_row, self.executor.gradients, state, arrived);
        for (&value, gradient) in task.writes.iter().zip([dstream, doutput]) {
            self.values.put(value, vec![gradient]);
        }
    }
}
