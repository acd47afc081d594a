//! What a member does to the members' memory once all have come.
//!
//! There is one way for all sizes. Bringing a copy of a small tensor, so that members write only their own memory and need
//! not wait until all have acted, was tried: between 64 bytes and 32 KiB it was slower back to back on two, four and eight
//! ranks, and gained a fifth only below 1 KiB behind a kernel.

use std::ops::Range;

use evenkeel_device::{View, host};

use super::Post;
use crate::call::{Call, Kind};

/// Pieces of a sum begin at multiples of a cache line, so two members never write the same one.
const LINE_BYTES: usize = 64;

/// What a member of a redistribution gives away and gets, each with the member at the other end.
#[derive(Debug, Default)]
pub(crate) struct Parcels {
    pub sent: Vec<(usize, View)>,
    pub received: Vec<(usize, View)>,
}

impl Parcels {
    /// The most bytes that travel in one direction.
    pub fn traffic_bytes(&self, me: usize) -> u64 {
        let travelling = |parcels: &[(usize, View)]| -> u64 {
            parcels.iter().filter(|(other, _)| *other != me).map(|(_, view)| view.bytes()).sum()
        };
        travelling(&self.sent).max(travelling(&self.received))
    }
}

/// Does member `me`'s part of what all members ask for.
///
/// # Safety
/// Every post's addresses are those of live contiguous tensors as its call describes them, and until all members have
/// acted nothing but this function, called by each of them, touches those tensors.
pub(crate) unsafe fn act(posts: &[Post], me: usize) {
    let call = &posts[me].call;
    let (dtype, bytes) = (call.dtype, call.bytes as usize);
    let own = &posts[me];
    // SAFETY: the members' parts of what is written are disjoint, and nobody reads what another member writes: a sum
    // reads just the pieces it writes, and copies read what nobody writes. The rest is the caller's promise.
    unsafe {
        match call.kind {
            Kind::AllReduce => {
                let piece = piece(bytes, posts.len(), me);
                let addresses = addresses(posts, piece.start);
                host::sum(dtype, &addresses, &addresses, piece.len() / dtype.size_bytes());
            }
            Kind::Reduce => {
                let piece = piece(bytes, posts.len(), me);
                let addresses = addresses(posts, piece.start);
                host::sum(dtype, &addresses, &[addresses[own.root]], piece.len() / dtype.size_bytes());
            }
            Kind::ReduceScatter => {
                let part = part(call, me);
                host::sum(dtype, &addresses(posts, part.start), &[own.to], part.len() / dtype.size_bytes());
            }
            Kind::AllGather => {
                for (member, post) in posts.iter().enumerate() {
                    let part = part(call, member);
                    host::copy(post.from, own.to + part.start as u64, part.len());
                }
            }
            Kind::Broadcast | Kind::Send | Kind::Receive => {
                if me != own.root {
                    host::copy(posts[own.root].from, own.to, bytes);
                }
            }
            Kind::Redistribute => receive_parcels(posts, me),
            Kind::Barrier | Kind::Exchange => (),
        }
    }
}

/// Copies what the members have sent to member `me`: the first parcel from a member is the first that it sent there.
///
/// # Safety
/// As for [`act`]: what is sent and what is received lies in live tensors, and nothing that is received is sent, too.
unsafe fn receive_parcels(posts: &[Post], me: usize) {
    for (member, post) in posts.iter().enumerate() {
        let to_me = |(to, view): &(usize, View)| (*to == me).then_some(*view);
        let from_member = |(from, view): &(usize, View)| (*from == member).then_some(*view);
        let sent: Vec<View> = post.parcels.sent.iter().filter_map(to_me).collect();
        let received: Vec<View> = posts[me].parcels.received.iter().filter_map(from_member).collect();
        let describe = |views: &[View]| -> Vec<_> { views.iter().map(|view| (view.shape(), view.dtype)).collect() };
        let (expected, found) = (describe(&received), describe(&sent));
        assert!(expected == found, "a redistribution: expected {expected:?} from member {member}, who sends {found:?}");
        for (from, to) in sent.iter().zip(&received) {
            let (rows, row_bytes) = if from.is_contiguous() && to.is_contiguous() {
                (1, from.bytes() as usize)
            } else {
                (from.rows, from.cols * from.dtype.size_bytes())
            };
            let [from_step, to_step] = [from, to].map(|view| (view.stride * view.dtype.size_bytes()) as u64);
            for row in 0..rows as u64 {
                // SAFETY: rows of the two views, which have the same shape.
                unsafe { host::copy(from.address() + row * from_step, to.address() + row * to_step, row_bytes) };
            }
        }
    }
}

fn addresses(posts: &[Post], skipped_bytes: usize) -> Vec<u64> {
    posts.iter().map(|post| post.from + skipped_bytes as u64).collect()
}

/// The bytes that member `me` of `members` sums.
fn piece(bytes: usize, members: usize, me: usize) -> Range<usize> {
    let size = bytes.div_ceil(members).next_multiple_of(LINE_BYTES);
    (me * size).min(bytes)..((me + 1) * size).min(bytes)
}

/// The bytes of a member's rows in the whole tensor.
fn part(call: &Call, member: usize) -> Range<usize> {
    let bounds = call.bounds.as_ref().expect("a tensor that is cut has bounds");
    let rows = *bounds.last().expect("bounds have an end");
    let row_bytes = (call.bytes as usize).checked_div(rows).unwrap_or(0);
    bounds[member] * row_bytes..bounds[member + 1] * row_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_everything_once_and_begin_at_cache_lines() {
        for bytes in [0, 2, 62, 64, 66, 1000, 4096, 1_000_006] {
            for members in 1..=9 {
                let mut end = 0;
                for me in 0..members {
                    let piece = piece(bytes, members, me);
                    assert_eq!(piece.start, end);
                    assert!(piece.is_empty() || piece.start.is_multiple_of(LINE_BYTES));
                    end = piece.end;
                }
                assert_eq!(end, bytes, "{bytes} bytes, {members} members");
            }
        }
    }
}
