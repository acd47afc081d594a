//! A member's part of a collective: sums and copies in the members' memory.
//!
//! All sizes take the same path. Posting a copy of a small tensor, so that members write only their own memory and need not
//! wait until all have acted, was measured: between 64 bytes and 32 KiB it was slower back to back on two, four and eight
//! ranks, and gained a fifth only below 1 KiB behind a kernel.

use std::ops::Range;

use evenkeel_device::{PeerWork, View};

use super::Post;
use crate::call::{Call, ExchangeKind};

/// Pieces of a sum begin at multiples of a cache line, so two members never write the same one.
const LINE_BYTES: usize = 64;

/// The parts that a member of a redistribution sends and receives, each with the member at the other end.
#[derive(Debug, Default)]
pub(crate) struct Parcels {
    pub sent: Vec<(usize, View)>,
    pub received: Vec<(usize, View)>,
}

impl Parcels {
    /// The larger of the bytes sent and the bytes received.
    pub fn traffic_bytes(&self, me: usize) -> u64 {
        let travelling = |parcels: &[(usize, View)]| -> u64 {
            parcels.iter().filter(|(other, _)| *other != me).map(|(_, view)| view.bytes()).sum()
        };
        travelling(&self.sent).max(travelling(&self.received))
    }
}

/// Describes member `me`'s part of the collective. The caller who runs it must guarantee that the posts' addresses are those of
/// live contiguous tensors as their calls describe them, and that until all members have acted only such parts touch those
/// tensors.
///
/// The members write disjoint parts, and no member reads what another writes: a sum reads only the pieces it writes, and copies
/// read memory that no member writes.
pub(crate) fn part_of(posts: &[Post], me: usize, mut part: impl FnMut(PeerWork<'_>)) {
    let call = &posts[me].call;
    let (dtype, bytes) = (call.dtype, call.bytes as usize);
    let own = &posts[me];
    let mut sum = |sources: &[u64], destinations: &[u64], bytes: usize| {
        part(PeerWork::Sum { dtype, sources, destinations, len: bytes / dtype.size_bytes() });
    };
    match call.kind {
        ExchangeKind::AllReduce => {
            let piece = piece(bytes, posts.len(), me);
            let addresses = addresses(posts, piece.start);
            sum(&addresses, &addresses, piece.len());
        }
        ExchangeKind::Reduce => {
            let piece = piece(bytes, posts.len(), me);
            let addresses = addresses(posts, piece.start);
            sum(&addresses, &[addresses[own.root]], piece.len());
        }
        ExchangeKind::ReduceScatter => {
            let rows = rows_of(call, me);
            sum(&addresses(posts, rows.start), &[own.to], rows.len());
        }
        ExchangeKind::AllGather => {
            for (member, post) in posts.iter().enumerate() {
                let rows = rows_of(call, member);
                part(PeerWork::copy(post.from, own.to + rows.start as u64, rows.len()));
            }
        }
        ExchangeKind::Broadcast | ExchangeKind::Send | ExchangeKind::Receive => {
            if me != own.root {
                part(PeerWork::copy(posts[own.root].from, own.to, bytes));
            }
        }
        ExchangeKind::Redistribute => receive_parcels(posts, me, part),
        ExchangeKind::Barrier | ExchangeKind::Exchange => (),
    }
}

/// The parcels from one member to another, each with its destination, in the order of sending. Both ends must describe them
/// alike.
pub(crate) fn parcels(posts: &[Post], from: usize, to: usize) -> impl Iterator<Item = (View, View)> {
    let of = |parcels: &[(usize, View)], other: usize| -> Vec<View> {
        parcels.iter().filter(|(member, _)| *member == other).map(|(_, view)| *view).collect()
    };
    let (sent, received) = (of(&posts[from].parcels.sent, to), of(&posts[to].parcels.received, from));
    let describe = |views: &[View]| -> Vec<_> { views.iter().map(|view| (view.shape(), view.dtype)).collect() };
    let (expected, found) = (describe(&received), describe(&sent));
    assert!(expected == found, "a redistribution: expected {expected:?} from member {from}, who sends {found:?}");
    sent.into_iter().zip(received)
}

/// Copies the parcels for member `me`.
fn receive_parcels(posts: &[Post], me: usize, mut part: impl FnMut(PeerWork<'_>)) {
    for member in 0..posts.len() {
        for (from, to) in parcels(posts, member, me) {
            if from.is_contiguous() && to.is_contiguous() {
                part(PeerWork::copy(from.address(), to.address(), from.bytes() as usize));
                continue;
            }
            let [from_step, to_step] = [&from, &to].map(|view| view.stride * view.dtype.size_bytes());
            let (from_address, to_address) = (from.address(), to.address());
            let (rows, row_bytes) = (from.rows, from.cols * from.dtype.size_bytes());
            part(PeerWork::Copy { from: from_address, to: to_address, rows, row_bytes, from_step, to_step });
        }
    }
}

fn addresses(posts: &[Post], skipped_bytes: usize) -> Vec<u64> {
    posts.iter().map(|post| post.from + skipped_bytes as u64).collect()
}

/// The bytes that member `me` of `members` sums.
pub(crate) fn piece(bytes: usize, members: usize, me: usize) -> Range<usize> {
    let size = bytes.div_ceil(members).next_multiple_of(LINE_BYTES);
    (me * size).min(bytes)..((me + 1) * size).min(bytes)
}

/// The bytes of a member's rows in the whole tensor.
pub(crate) fn rows_of(call: &Call, member: usize) -> Range<usize> {
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
