//! Collectives of ranks on GPUs.
//!
//! Hosts meet when they issue a collective, not when the GPU reaches it. A member brings an event behind its earlier work. Once
//! all have arrived, each makes its queue wait for the others' events, issues its part, and records an event behind that, for
//! which all queues wait. So the GPU does later what a CPU's queues do when they meet, in the same parts and with the same
//! bits, and no host waits for the GPU. Ranks that share a GPU work like this; between different GPUs NCCL moves the parts
//! (`nccl`), and the events only say when all had arrived.
//!
//! Every event that a queue waits for was recorded before, so queues cannot wait in a circle, in whatever order hosts issue.
//! Hosts can: they must attend their common meetings in the same order, over all groups, pairs and exchanges of values.
//! Programs do: `verify` looks for circles of hosts, too. On a CPU a host may issue two collectives of different groups on two
//! queues in another order than its peers, or exchange values while its queue waits; on a GPU it would wait until the deadline.

use std::sync::{Arc, OnceLock};

use evenkeel_device::{Event, MOST_PEERS, Queue, Stamp};

use super::{Meeting, Post, Visit, part_of};
use crate::nccl::needs_nccl;

/// Meets the others and issues this member's part. Returns the moment when the last member's queue arrives; an error is the
/// message that ends the run.
pub(crate) fn meet_on_gpu(queue: &Queue, meeting: &Meeting, visit: &Visit<'_>, post: Post) -> Result<Stamp, String> {
    let group = visit.group;
    let call = &post.call;
    let members = visit.ranks.len();
    assert!(members <= MOST_PEERS, "{group}: {call} among {members} members, expected {MOST_PEERS} at most");
    assert!(
        visit.world.link().is_none(),
        "{group}: {call} over an emulated link\n  hint: links are emulated between ranks on a CPU's cores"
    );
    let is_touched = post.is_touched_by_others();
    let post = Post { ready: Some(queue.record()), ..post };
    let (came, others) = meeting.attend(visit, post, |posts| {
        let others = || posts.iter().enumerate().filter(|(member, _)| *member != visit.me).map(|(_, post)| post);
        others().for_each(|post| queue.wait(post.ready.as_ref().expect("all are on the GPU")));
        let came = queue.stamp();
        if needs_nccl(visit, posts) {
            meeting.way.issue(queue, visit, posts, &came);
            return (came, Vec::new());
        }
        // SAFETY: the addresses are those of contiguous tensors on this GPU, whose devices wait for it before they end; the
        // members have agreed on dtype and size; and a tensor's memory belongs to the queue that issued the collective, which
        // does nothing else from its `ready` to the last `done`; freeing it makes the other queue wait, as for a kernel.
        part_of(posts, visit.me, |work| unsafe { queue.peer(work) });
        let _ = posts[visit.me].done.set(queue.record());
        (came, others().map(|post| post.done.clone()).collect::<Vec<Arc<OnceLock<Event>>>>())
    })?;
    if is_touched {
        others.iter().for_each(|done| queue.wait(done.get().expect("all have acted")));
    }
    Ok(came)
}
