//! Adds migrations to a program, whatever schedule wrote it: units whose parameters a rank computes with and does not keep
//! migrate ahead of their use, and their gradients return once they are complete.

use std::collections::BTreeMap;

use smallvec::smallvec;

use super::chain::{Chain, ChainMigration};
use super::line::TENSOR;
use super::state::{WHOLE_STEP, behind_exchanges};
use crate::program::{Exchange, Task, UnitIdx, Value, ValueKind, Values};
use crate::work::Work;

/// Adds the migrations of a chain. Each unit migrates once in a step, before the first body of the migrating unit before it
/// computes, so that at least one body computes meanwhile.
pub(super) fn migrate_and_return(tasks: Vec<Task>, chain: &Chain) -> Vec<Task> {
    if chain.migrations.is_empty() {
        return tasks;
    }
    let mut migrating: Vec<Migrating> =
        chain.migrations.iter().filter_map(|migrated| Migrating::of(&tasks, migrated)).collect();
    migrating.sort_by_key(|migrating| migrating.uses[0]);
    let [mut before, mut behind]: [BTreeMap<usize, Vec<Task>>; 2] = Default::default();
    let mut ahead = 0;
    let mut out = tasks;
    for Migrating { migrated, uses, additions } in &migrating {
        let value = |kind| Value { kind, unit: UnitIdx(migrated.unit), micro: WHOLE_STEP };
        let [values, gradients] = [ValueKind::Migrated, ValueKind::MigratedGradients].map(value);
        let written = if additions.is_empty() { smallvec![values] } else { smallvec![values, gradients] };
        let fetched = task(Work::Migrate, migrated.unit, migrated.value_bytes, smallvec![], written);
        before.entry(ahead).or_default().push(fetched);
        ahead = uses[0];
        uses.iter().for_each(|&index| out[index].reads.push(values));
        additions.iter().for_each(|&index| out[index].reads.push(gradients));
        out[uses[uses.len() - 1]].frees.push(values);
        if let Some(&last) = additions.last() {
            let returned =
                task(Work::Return, migrated.unit, migrated.gradient_bytes, smallvec![gradients], smallvec![]);
            behind.entry(behind_exchanges(&out, last)).or_default().push(returned);
        }
    }
    let with_migration = |(index, task)| {
        let [fetched, returned] = [&mut before, &mut behind].map(|tasks| tasks.remove(&index).unwrap_or_default());
        fetched.into_iter().chain([task]).chain(returned)
    };
    out.into_iter().enumerate().flat_map(with_migration).collect()
}

/// The tasks of a unit that migrates, in order.
struct Migrating<'a> {
    migrated: &'a ChainMigration,
    /// The tasks that compute with its parameters.
    uses: Vec<usize>,
    /// The tasks that may add to their gradients; none if nothing is trained there or below.
    additions: Vec<usize>,
}

impl Migrating<'_> {
    fn of<'a>(tasks: &[Task], migrated: &'a ChainMigration) -> Option<Migrating<'a>> {
        let of_unit = |works: &[Work]| -> Vec<usize> {
            let is_of_unit = |task: &Task| task.unit.0 == migrated.unit && works.contains(&task.work);
            (0..tasks.len()).filter(|&index| is_of_unit(&tasks[index])).collect()
        };
        let uses = of_unit(&[Work::Forward, Work::Recompute, Work::BackwardInput]);
        let additions = of_unit(&[Work::BackwardInput, Work::BackwardWeight]);
        (!uses.is_empty()).then_some(Migrating { migrated, uses, additions })
    }
}

/// An exchange of the tensor-parallel group that frees what it reads.
fn task(work: Work, unit: usize, bytes: u64, reads: Values, writes: Values) -> Task {
    let exchange = Some(Exchange { group: TENSOR, bytes });
    Task { work, unit: UnitIdx(unit), micro: WHOLE_STEP, frees: reads.clone(), reads, writes, exchange }
}
