//! Collectives of ranks on cards.
//!
//! Hosts meet when a collective is issued, not when the card comes to it. A member brings an event behind what it issued
//! before; once all have come, each has its queue wait for the others' events, issues its part, and leaves an event behind that,
//! for which all queues wait. So the card does in its own time what a CPU's queues do when they meet, in the same parts and
//! with the same bits, and no host waits for the card. This is what ranks that share a card do; between cards of their own the
//! parts are NCCL's to bring together (`nccl`), and the events say only when all had come.
//!
//! Every event that a queue is told to wait for was recorded before, so queues cannot wait for one another in a circle, in
//! whatever order hosts issue. Hosts can: they must come to the meetings that they share in the same order, those of all
//! groups, pairs and exchanges of values together. Programs do, for they have one comm queue, on which `verify` finds such
//! circles. On a CPU a host may issue two collectives of different groups on its two queues in another order than its peers,
//! or exchange values while its queue waits; on a card it waits until the deadline.

use std::sync::{Arc, OnceLock};

use evenkeel_device::{Event, MOST_PEERS, Queue, Stamp};

use super::{Meeting, Post, Visit, part_of};
use crate::nccl::needs_nccl;

/// Meets the others and issues this member's part. Returns when the last member's queue will have come; an error is the
/// message of whatever ends the run.
pub(crate) fn meet_on_card(queue: &Queue, meeting: &Meeting, visit: &Visit<'_>, post: Post) -> Result<Stamp, String> {
    let (group, call, members) = (visit.group, &post.call, visit.ranks.len());
    assert!(members <= MOST_PEERS, "{group}: {call} among {members} members, expected {MOST_PEERS} at most");
    assert!(
        visit.world.link().is_none(),
        "{group}: {call} over an emulated link\n  hint: links are emulated between ranks on a CPU's cores"
    );
    let is_touched = post.is_touched_by_others();
    let post = Post { ready: Some(queue.record()), ..post };
    let (came, others) = meeting.attend(visit, post, |posts| {
        let others = || posts.iter().enumerate().filter(|(member, _)| *member != visit.me).map(|(_, post)| post);
        others().for_each(|post| queue.wait(post.ready.as_ref().expect("all are on the card")));
        let came = queue.stamp();
        if needs_nccl(visit, posts) {
            meeting.way.issue(queue, visit, posts, &came);
            return (came, Vec::new());
        }
        // SAFETY: the addresses are those of contiguous tensors on this card, whose devices wait for it before they end; the
        // members have agreed on dtype and size; and a tensor's memory belongs to the queue that issued the collective, which
        // does nothing else from its `ready` to the last `done`: whoever frees it has the other queue wait, as for a kernel.
        part_of(posts, visit.me, |work| unsafe { queue.peer(work) });
        let _ = posts[visit.me].done.set(queue.record());
        (came, others().map(|post| post.done.clone()).collect::<Vec<Arc<OnceLock<Event>>>>())
    })?;
    if is_touched {
        others.iter().for_each(|done| queue.wait(done.get().expect("all have acted")));
    }
    Ok(came)
}
