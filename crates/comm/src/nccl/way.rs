//! The connection between the GPUs of a meeting's members.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use evenkeel_device::{Event, NcclCommunicator, NcclId, NcclLibrary, PeerWork, Queue, Stamp};

use super::steps::{Scratch, Step, steps};
use crate::local::{Post, Visit};

/// Each end's working memory. With eight members, sums then take 9 MiB from each of the others at a time, which takes NVLink
/// longer than a host needs to issue the next ones.
const SCRATCH_BYTES: u64 = 64 << 20;
/// NCCL has at least this long to connect GPUs, even if the deadline is shorter.
const LEAST_CONNECTING: Duration = Duration::from_secs(120);
/// NCCL's own thread usually issues within this time; after it the host sleeps between checks.
const AWAKE: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(50);

/// Connects the members of one meeting when they first need it.
pub(crate) struct Way {
    id: Mutex<Option<NcclId>>,
    ends: Box<[Mutex<Option<Arc<End>>>]>,
}

/// One member's end.
pub(crate) struct End {
    pub(super) communicator: NcclCommunicator,
    pub(super) rank: usize,
    group: String,
    /// Behind the last step of the last collective on either queue: both use the same scratch memory.
    last: Mutex<Option<Event>>,
    underway: Mutex<VecDeque<Underway>>,
}

/// A collective issued to the GPU.
struct Underway {
    what: String,
    came: Stamp,
    done: Event,
}

/// Whether the members have different GPUs. Panics if only some of them share one.
pub(crate) fn needs_nccl(visit: &Visit<'_>, posts: &[Post]) -> bool {
    if visit.world.has_library_of_rank() {
        return true;
    }
    let mut gpus: Vec<usize> = posts.iter().filter_map(|post| post.call.gpu).collect();
    gpus.sort_unstable();
    gpus.dedup();
    assert!(
        gpus.len() == 1 || gpus.len() == posts.len(),
        "{}: its {} members are on GPUs {gpus:?}\n  hint: all members share a GPU, or each has its own",
        visit.group,
        posts.len()
    );
    gpus.len() > 1
}

impl Way {
    pub fn new(members: usize) -> Way {
        Way { id: Mutex::new(None), ends: (0..members).map(|_| Mutex::new(None)).collect() }
    }

    /// Issues this member's part of the agreed call; `came` is the moment when all had arrived. All members do so at the same
    /// time. Panics with the message that ends the run.
    pub fn issue(&self, queue: &Queue, visit: &Visit<'_>, posts: &[Post], came: &Stamp) {
        if !posts[visit.me].is_touched_by_others() {
            return;
        }
        let end = self.end(queue, visit);
        let (address, bytes) = end.communicator.scratch();
        let steps = steps(posts, visit.me, Scratch { address, bytes });
        if let Some(last) = lock(&end.last).take() {
            queue.wait(&last);
        }
        for step in &steps {
            end.issue(queue, step, visit);
        }
        let done = queue.record();
        *lock(&end.last) = Some(done.clone());
        let mut underway = lock(&end.underway);
        drop_done(&mut underway);
        underway.push_back(Underway { what: visit.describe(&posts[visit.me].call), came: came.clone(), done });
    }

    /// This member's end, connected.
    fn end(&self, queue: &Queue, visit: &Visit<'_>) -> Arc<End> {
        let mut end = lock(&self.ends[visit.me]);
        if let Some(end) = &*end {
            return end.clone();
        }
        let library = visit.world.nccl_library(visit.rank()).unwrap_or_else(|error| fail(error.to_string()));
        let connecting = format!("{}: connecting the GPUs of ranks {:?}", visit.group, visit.ranks);
        let made = self.id(&library).and_then(|id| {
            NcclCommunicator::begin(library.clone(), queue, id, visit.ranks.len(), visit.me, SCRATCH_BYTES)
        });
        let communicator = made.unwrap_or_else(|error| fail(format!("{connecting}: {error}")));
        let made = Arc::new(End {
            communicator,
            rank: visit.rank(),
            group: visit.group.to_owned(),
            last: Mutex::default(),
            underway: Mutex::default(),
        });
        visit.world.watch(&made);
        made.wait_until_idle(visit, &connecting, visit.world.deadline().max(LEAST_CONNECTING));
        end.insert(made).clone()
    }

    /// The first member to arrive makes it.
    fn id(&self, library: &NcclLibrary) -> Result<NcclId, evenkeel_device::CudaError> {
        let mut id = lock(&self.id);
        if id.is_none() {
            *id = Some(NcclId::new(library)?);
        }
        Ok(id.expect("just made"))
    }
}

impl End {
    fn issue(&self, queue: &Queue, step: &Step, visit: &Visit<'_>) {
        // SAFETY: addresses are those of contiguous tensors or parcels on this queue's GPU, or of this end's scratch memory, which
        // the queue has to itself behind `last`; a tensor's memory belongs to the queue that issued the collective, until the
        // steps are done. The members have agreed on the call, so their steps belong together.
        unsafe {
            match step {
                Step::Sum { dtype, sources, destination, len } => {
                    let destinations = &[*destination];
                    queue.peer(PeerWork::Sum { dtype: *dtype, sources, destinations, len: *len });
                }
                &Step::Copy { from, to, rows, row_bytes, from_step, to_step } => {
                    queue.peer(PeerWork::Copy { from, to, rows, row_bytes, from_step, to_step });
                }
                Step::Transfer(transfers) => queue.transfer(&self.communicator, transfers),
            }
        }
        if matches!(step, Step::Transfer(transfers) if !transfers.is_empty()) {
            let limit = visit.world.deadline().max(LEAST_CONNECTING);
            self.wait_until_idle(visit, &format!("{}: issuing transfers", self.group), limit);
        }
    }

    /// NCCL also connects GPUs when bytes first go from one to the other, so issuing can take a while. The wait ends with the
    /// run.
    fn wait_until_idle(&self, visit: &Visit<'_>, what: &str, limit: Duration) {
        let since = Instant::now();
        loop {
            match self.communicator.is_idle() {
                Ok(true) => return,
                Ok(false) => (),
                Err(words) => fail(visit.trouble().unwrap_or_else(|| format!("{what}: {words}"))),
            }
            if let Some(message) = visit.trouble() {
                fail(message);
            }
            let waited = since.elapsed();
            if waited > limit {
                fail(format!("{what}: NCCL was not done after {} ms", limit.as_millis()));
            }
            if waited < AWAKE { std::hint::spin_loop() } else { std::thread::sleep(NAP) }
        }
    }

    /// The defect of this end, if any: NCCL reports one, or a collective has missed the deadline.
    pub(super) fn trouble(&self, deadline: Duration) -> Option<String> {
        if let Err(words) = self.communicator.is_idle() {
            return Some(format!("{}: {words}", self.group));
        }
        let mut underway = lock(&self.underway);
        drop_done(&mut underway);
        let Underway { what, came, .. } = underway.front()?;
        let is_late = came.get().is_some_and(|came| came.elapsed() > deadline);
        is_late.then(|| {
            let deadline_ms = deadline.as_millis();
            format!(
                "{what} has not ended {deadline_ms} ms after all members had come to it\n  \
                 hint: a GPU or a link between GPUs is stuck or slower than the deadline; NCCL_DEBUG=INFO says how they are \
                 connected"
            )
        })
    }
}

fn drop_done(underway: &mut VecDeque<Underway>) {
    while underway.front().is_some_and(|first| first.done.is_reached()) {
        underway.pop_front();
    }
}

/// Ends the meeting with a message for all members.
fn fail(message: String) -> ! {
    resume_unwind(Box::new(message))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
