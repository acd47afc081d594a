//! Migrations: parameters of a unit that a rank computes with and others keep, and the return of their gradients.

use evenkeel_comm::Group;
use evenkeel_device::kernel::{Add, Fill};
use evenkeel_device::{DType, Stamp, Tensor, View};
use evenkeel_model::{MigratedParam, Region};

use super::{Executor, Run};
use crate::program::{Task, UnitIdx, ValueKind};
use crate::work::Lane;

/// Parts of tensors with the member that they go to or come from.
type Parcels = Vec<(usize, View)>;

impl<'a> Run<'a> {
    fn migrations(&self, unit: UnitIdx) -> &'a [MigratedParam] {
        let migration = self.executor.migration.expect("a program with migrations is run with them");
        &migration.units[&unit.0]
    }

    /// Each rank receives the values that it computes with and does not keep. It uses its own in place if the part it computes
    /// with is one rectangle of them, and copies them otherwise.
    pub(super) fn migrate(&mut self, task: &Task, group: &Group) -> Stamp {
        let Executor { device, parameters, gradients, .. } = *self.executor;
        let (comm, me) = (device.comm(), group.rank());
        let (mut sent, mut received): (Parcels, Parcels) = Default::default();
        let mut held = Vec::new();
        let [values, gradient] = [ValueKind::Migrated, ValueKind::MigratedGradients].map(|kind| task.value(kind));
        let has_gradients = task.writes.contains(&gradient);
        for migrated in self.migrations(task.unit) {
            let kept = parameters.kept_value(migrated.id);
            let value = match &migrated.own {
                Some(region) => region.of(&kept),
                None => comm.tensor(migrated.matrix[0], migrated.matrix[1], kept.dtype),
            };
            let is_moved = |shard: usize| shard != me || migrated.own.is_none();
            sent.extend(parcels(&migrated.home_parts, &kept, is_moved));
            received.extend(parcels(&migrated.work_parts, &value, is_moved));
            if has_gradients && migrated.is_trained {
                gradients.work_on(device.compute(), migrated.id, migrated.matrix, migrated.gradient_in_place());
            }
            parameters.set_work_value(migrated.id, Some(value.clone()));
            held.push(value);
        }
        let stamp = self.redistribute(task, group, &sent, &received);
        self.values.put(values, held);
        if has_gradients {
            self.values.put(gradient, Vec::new());
        }
        self.await_later(values, Lane::Comm);
        stamp
    }

    pub(super) fn forget_migrated(&self, unit: UnitIdx) {
        self.migrations(unit).iter().for_each(|migrated| self.executor.parameters.set_work_value(migrated.id, None));
    }

    /// Gradients that nothing was added to are zeroed before they are returned.
    pub(super) fn complete_migrated(&self, unit: UnitIdx) {
        let Executor { gradients, .. } = *self.executor;
        self.trained_migrations(unit).for_each(|migrated| drop(gradients.sum(self.queue(), migrated.id)));
    }

    fn trained_migrations(&self, unit: UnitIdx) -> impl Iterator<Item = &'a MigratedParam> + use<'a> {
        self.migrations(unit).iter().filter(|migrated| migrated.is_trained)
    }

    pub(super) fn return_gradients(&mut self, task: &Task, group: &Group) -> Stamp {
        let comm = self.executor.device.comm();
        let mut returned = Returned::default();
        for migrated in self.trained_migrations(task.unit) {
            returned.add(migrated, self.executor, group.rank());
        }
        let stamp = self.redistribute(task, group, &returned.sent, &returned.received);
        for Summand { from, to } in &returned.summands {
            comm.launch(Add { a: to.view(), b: from.view(), out: to.view() });
        }
        let rooms = returned.summands.into_iter().map(|summand| summand.from);
        self.hold(rooms.chain(returned.given).collect(), Lane::Comm);
        task.frees.iter().for_each(|value| self.values.free(value));
        stamp
    }

    fn redistribute(&self, task: &Task, group: &Group, sent: &Parcels, received: &Parcels) -> Stamp {
        let travelling = |parcels: &Parcels| -> u64 {
            parcels.iter().filter(|(member, _)| *member != group.rank()).map(|(_, view)| view.bytes()).sum()
        };
        let bytes = task.exchange.map(|exchange| exchange.bytes);
        assert_eq!(Some(travelling(sent).max(travelling(received))), bytes, "`{task}`");
        group.redistribute(self.executor.device.comm(), sent, received)
    }
}

fn parcels(parts: &[(usize, Region)], held: &Tensor, is_moved: impl Fn(usize) -> bool) -> Parcels {
    let moved = parts.iter().filter(|(shard, _)| is_moved(*shard));
    moved.map(|(shard, region)| (*shard, region.of(held).view())).collect()
}

/// Gradients that return to their home.
#[derive(Default)]
struct Returned {
    /// The gradients that this rank has computed.
    given: Vec<Tensor>,
    sent: Parcels,
    received: Parcels,
    /// In the order of the shards.
    summands: Vec<Summand>,
}

struct Summand {
    from: Tensor,
    to: Tensor,
}

impl Returned {
    /// If every kept element has one summand and no sum yet, summands are received in place. Otherwise they get their own room
    /// and are added in the order of the shards.
    fn add(&mut self, migrated: &MigratedParam, executor: &Executor, me: usize) {
        let (compute, comm) = (executor.device.compute(), executor.device.comm());
        let (given, kept, accumulate) = executor.gradients.return_work(compute, migrated.id);
        let (is_in_place, is_added) = (migrated.gradient_in_place().is_some(), migrated.is_summed || accumulate);
        if is_added && !accumulate {
            comm.launch(Fill { out: kept.view(), value: 0.0 });
        }
        let is_moved = |shard: usize| shard != me || !(is_in_place || is_added);
        self.sent.extend(parcels(&migrated.work_parts, &given, is_moved));
        self.given.push(given.clone());
        if !is_added {
            return self.received.extend(parcels(&migrated.home_parts, &kept, is_moved));
        }
        let mut own = migrated.work_parts.iter().filter(|(shard, _)| *shard == me).map(|(_, region)| region.of(&given));
        for (shard, region) in migrated.home_parts.iter().filter(|(shard, _)| *shard != me || !is_in_place) {
            let from = if *shard == me {
                own.next().expect("what a shard keeps and computes with is in both lists")
            } else {
                let room = comm.tensor(region.rows.len(), region.cols.len(), DType::F32);
                self.received.push((*shard, room.view()));
                room
            };
            self.summands.push(Summand { from, to: region.of(&kept) });
        }
    }
}
