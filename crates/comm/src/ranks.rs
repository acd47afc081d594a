//! The ranks of a run as threads.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::{Communicator, Options, World};

/// The rank that ended a run first, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} failed: {message}")]
pub struct RankFailure {
    pub rank: usize,
    pub message: String,
}

/// Runs `work` once for each rank, on threads named `rank0`, `rank1`, …, and returns what they return, in order.
///
/// A panic on one rank ends the others' waits, and the error names the rank and its message. A rank that gives up without a
/// panic calls [`Communicator::abort`]; otherwise the others only learn that it has ended.
pub fn run_ranks<R: Send>(
    ranks: usize,
    options: &Options,
    work: impl Fn(Communicator) -> R + Sync,
) -> Result<Vec<R>, RankFailure> {
    assert!(ranks > 0, "a run has at least one rank");
    let communicators = World::local(ranks, options.clone());
    let world = communicators[0].handle().expect("a local one").world.clone();
    let work = &work;
    let run = |communicator: Communicator| {
        let handle = communicator.handle().expect("a local one");
        let outcome = catch_unwind(AssertUnwindSafe(|| work(communicator)));
        // While `handle` is held, the others cannot mistake this rank for one that has merely ended.
        outcome.map_err(|panic| handle.world.abort(handle.rank, &panic_message(&*panic))).ok()
    };
    let results: Vec<Option<R>> = std::thread::scope(|scope| {
        let threads: Vec<_> = communicators
            .into_iter()
            .map(|communicator| {
                let builder = std::thread::Builder::new().name(format!("rank{}", communicator.rank()));
                builder.spawn_scoped(scope, || run(communicator)).expect("the system starts a thread for each rank")
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("panics were caught")).collect()
    });
    match world.failure() {
        Some(failure) => Err(failure),
        None => Ok(results.into_iter().map(|result| result.expect("no rank has failed")).collect()),
    }
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    evenkeel_device::panic_message(panic).unwrap_or("a panic without a message").to_owned()
}
