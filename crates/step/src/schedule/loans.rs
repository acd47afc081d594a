//! What migration adds to a program, whatever schedule wrote it: units whose parameters a rank computes with and does not
//! keep are borrowed ahead of their use, and their gradients are returned once they are complete.

use std::collections::BTreeMap;

use super::chain::{Chain, ChainLoan};
use super::line::TENSOR;
use super::state::{WHOLE_STEP, behind_exchanges};
use crate::program::{Exchange, Task, UnitIdx, Value, ValueKind};
use crate::work::Work;

/// Adds the loans of a chain. Each unit is borrowed once in a step, before the first body of the borrowing unit before it
/// computes, so that it travels beside a body at least.
pub(super) fn borrow_and_return(tasks: Vec<Task>, chain: &Chain) -> Vec<Task> {
    let mut borrowed: Vec<Borrowed> = chain.loans.iter().filter_map(|loan| Borrowed::of(&tasks, loan)).collect();
    borrowed.sort_by_key(|borrowed| borrowed.uses[0]);
    let [mut before, mut behind]: [BTreeMap<usize, Vec<Task>>; 2] = Default::default();
    let mut ahead = 0;
    let mut out = tasks;
    for Borrowed { loan, uses, additions } in &borrowed {
        let value = |kind| Value { kind, unit: UnitIdx(loan.unit), micro: WHOLE_STEP };
        let [values, gradients] = [ValueKind::Borrowed, ValueKind::BorrowedGradients].map(value);
        let written = if additions.is_empty() { vec![values] } else { vec![values, gradients] };
        let borrow = task(Work::Borrow, loan.unit, loan.value_bytes, vec![], written);
        before.entry(ahead).or_default().push(borrow);
        ahead = uses[0];
        uses.iter().for_each(|&index| out[index].reads.push(values));
        additions.iter().for_each(|&index| out[index].reads.push(gradients));
        out[uses[uses.len() - 1]].frees.push(values);
        if let Some(&last) = additions.last() {
            let returned = task(Work::Return, loan.unit, loan.gradient_bytes, vec![gradients], vec![]);
            behind.entry(behind_exchanges(&out, last)).or_default().push(returned);
        }
    }
    let with_loans = |(index, task)| {
        let [borrowed, returned] = [&mut before, &mut behind].map(|tasks| tasks.remove(&index).unwrap_or_default());
        borrowed.into_iter().chain([task]).chain(returned)
    };
    out.into_iter().enumerate().flat_map(with_loans).collect()
}

/// The tasks of a unit that is borrowed, in order.
struct Borrowed<'a> {
    loan: &'a ChainLoan,
    /// Those that compute with its parameters.
    uses: Vec<usize>,
    /// Those that may add to their gradients; none if nothing is trained there or below.
    additions: Vec<usize>,
}

impl Borrowed<'_> {
    fn of<'a>(tasks: &[Task], loan: &'a ChainLoan) -> Option<Borrowed<'a>> {
        let of_unit = |works: &[Work]| -> Vec<usize> {
            let is_of_unit = |task: &Task| task.unit.0 == loan.unit && works.contains(&task.work);
            (0..tasks.len()).filter(|&index| is_of_unit(&tasks[index])).collect()
        };
        let uses = of_unit(&[Work::Forward, Work::Recompute, Work::BackwardInput]);
        let additions = of_unit(&[Work::BackwardInput, Work::BackwardWeight]);
        (!uses.is_empty()).then_some(Borrowed { loan, uses, additions })
    }
}

/// What it reads it frees.
fn task(work: Work, unit: usize, bytes: u64, reads: Vec<Value>, writes: Vec<Value>) -> Task {
    let exchange = Some(Exchange { group: TENSOR, bytes });
    Task { work, unit: UnitIdx(unit), micro: WHOLE_STEP, frees: reads.clone(), reads, writes, exchange }
}
