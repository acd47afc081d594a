//! A member's part of a collective, as plain data.
//!
//! All members have the same number of transfers, some of them empty, and the receiver takes in its k-th what the sender sends
//! in its k-th. So members cannot wait in a circle.

use std::ops::Range;

use evenkeel_device::{DType, NcclTransfer, View};

use crate::call::ExchangeKind;
use crate::local::{Post, parcels, piece, rows_of};

/// A member's working memory for parts that it receives or packs to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    pub address: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Transfers that run at once.
    Transfer(Vec<NcclTransfer>),
    /// As [`PeerWork::Sum`](evenkeel_device::PeerWork::Sum), to one destination.
    Sum { dtype: DType, sources: Vec<u64>, destination: u64, len: usize },
    /// As [`PeerWork::Copy`](evenkeel_device::PeerWork::Copy).
    Copy { from: u64, to: u64, rows: usize, row_bytes: usize, from_step: usize, to_step: usize },
}

/// Stretches in scratch memory begin at multiples of this, so kernels can read and write vectors.
const ALIGNMENT_BYTES: u64 = 256;
/// Parts of a redistribution that are smaller, or have gaps, are packed and sent together.
const LEAST_DIRECT_BYTES: u64 = 256 << 10;

/// Member `me`'s steps in order. The members' calls agree, and all have as much scratch memory.
pub(crate) fn steps(posts: &[Post], me: usize, scratch: Scratch) -> Vec<Step> {
    let own = &posts[me];
    let bytes = posts[me].call.bytes as usize;
    let mut member = Member { posts, me, scratch, steps: Vec::new() };
    let pieces = || -> Vec<_> { (0..posts.len()).map(|other| piece(bytes, posts.len(), other)).collect() };
    let rows = || -> Vec<_> { (0..posts.len()).map(|other| rows_of(&own.call, other)).collect() };
    match own.call.kind {
        ExchangeKind::AllReduce => {
            let pieces = pieces();
            member.sum(&pieces, Destination::Own(own.to + pieces[me].start as u64));
            member.gather(own.to + pieces[me].start as u64, &pieces);
        }
        ExchangeKind::Reduce => member.sum(&pieces(), Destination::Root(own.root)),
        ExchangeKind::ReduceScatter => member.sum(&rows(), Destination::Own(own.to)),
        ExchangeKind::AllGather => member.gather(own.from, &rows()),
        ExchangeKind::Broadcast if bytes > 0 => {
            member.steps.push(Step::Transfer(vec![NcclTransfer::Broadcast { address: own.to, bytes, root: own.root }]));
        }
        ExchangeKind::Send | ExchangeKind::Receive if bytes > 0 => {
            member.steps.push(Step::Transfer(vec![match me == own.root {
                true => NcclTransfer::Send { address: own.from, bytes, to: 1 - me },
                false => NcclTransfer::Receive { address: own.to, bytes, from: 1 - me },
            }]))
        }
        ExchangeKind::Redistribute => member.redistribute(),
        ExchangeKind::Broadcast
        | ExchangeKind::Send
        | ExchangeKind::Receive
        | ExchangeKind::Barrier
        | ExchangeKind::Exchange => (),
    }
    member.steps
}

/// The destination of a member's part of a sum.
#[derive(Clone, Copy)]
enum Destination {
    Own(u64),
    /// To the same bytes of the root's tensor.
    Root(usize),
}

struct Member<'a> {
    posts: &'a [Post],
    me: usize,
    scratch: Scratch,
    steps: Vec<Step>,
}

impl Member<'_> {
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.me;
        (0..self.posts.len()).filter(move |&other| other != me)
    }

    /// Each member sums its part, as many bytes at a time as scratch memory has room for from all others.
    fn sum(&mut self, parts: &[Range<usize>], destination: Destination) {
        let others = self.posts.len() - 1;
        let room = self.scratch.bytes / others as u64 / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
        let chunk = room.max(ALIGNMENT_BYTES) as usize;
        let longest = parts.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        for skipped in (0..longest).step_by(chunk) {
            let stretches: Vec<Range<usize>> = parts
                .iter()
                .map(|part| (part.start + skipped).min(part.end)..(part.start + skipped + chunk).min(part.end))
                .collect();
            self.sum_stretch(&stretches, chunk, skipped, destination);
        }
    }

    /// `stretches` are the bytes that each member sums; those that the others send here lie `chunk` bytes apart in scratch
    /// memory.
    fn sum_stretch(&mut self, stretches: &[Range<usize>], chunk: usize, skipped: usize, destination: Destination) {
        let me = self.me;
        let own = &self.posts[self.me];
        let dtype = self.posts[self.me].call.dtype;
        let mine = &stretches[me];
        let place = |other: usize| self.scratch.address + ((other - usize::from(other > me)) * chunk) as u64;
        let mut transfers = Vec::new();
        for other in self.others() {
            push_send(&mut transfers, own.from + stretches[other].start as u64, stretches[other].len(), other);
            push_receive(&mut transfers, place(other), mine.len(), other);
        }
        let at_home = own.from + mine.start as u64;
        let sources = (0..self.posts.len()).map(|member| if member == me { at_home } else { place(member) }).collect();
        let first_place = place(self.others().next().expect("a group has several members"));
        let sum_at = match destination {
            Destination::Own(address) => address + skipped as u64,
            Destination::Root(root) if root == me => at_home,
            // Overwrites a summand; the root receives it from there.
            Destination::Root(_) => first_place,
        };
        self.steps.push(Step::Transfer(transfers));
        if !mine.is_empty() {
            let len = mine.len() / dtype.size_bytes();
            self.steps.push(Step::Sum { dtype, sources, destination: sum_at, len });
        }
        if let Destination::Root(root) = destination {
            let mut transfers = Vec::new();
            if root == me {
                for other in self.others() {
                    let stretch = &stretches[other];
                    push_receive(&mut transfers, own.to + stretch.start as u64, stretch.len(), other);
                }
            } else {
                push_send(&mut transfers, sum_at, mine.len(), root);
            }
            self.steps.push(Step::Transfer(transfers));
        }
    }

    /// Sends every member's part to every member; this member's is at `from`.
    fn gather(&mut self, from: u64, parts: &[Range<usize>]) {
        let to = self.posts[self.me].to;
        let mine = &parts[self.me];
        let mut transfers = Vec::new();
        for other in self.others() {
            push_send(&mut transfers, from, mine.len(), other);
            push_receive(&mut transfers, to + parts[other].start as u64, parts[other].len(), other);
        }
        self.steps.push(Step::Transfer(transfers));
        let home = to + mine.start as u64;
        if home != from && !mine.is_empty() {
            let bytes = mine.len();
            self.steps.push(Step::Copy { from, to: home, rows: 1, row_bytes: bytes, from_step: bytes, to_step: bytes });
        }
    }

    /// Every member goes through the parcels of all members, so all form the same rounds.
    fn redistribute(&mut self) {
        let members = self.posts.len();
        let most_bytes = self.scratch.bytes / 4;
        let mut round = Round::new(members);
        for (from, to) in (0..members).flat_map(|from| (0..members).map(move |to| (from, to))) {
            for (sent, received) in parcels(self.posts, from, to).filter(|(sent, _)| !sent.is_empty()) {
                if from == to {
                    if from == self.me {
                        self.steps.push(copy(&sent, received.address(), step_bytes(&received)));
                    }
                    continue;
                }
                for (sent, received) in stretches(sent, received, most_bytes) {
                    let packed = packed_bytes(&sent, &received, most_bytes);
                    let parcel = Parcel { from, to, sent, received, packed };
                    if !round.has_room(&parcel, self.scratch.bytes) {
                        std::mem::replace(&mut round, Round::new(members)).close(self);
                    }
                    round.add(parcel);
                }
            }
        }
        round.close(self);
    }
}

fn push_send(transfers: &mut Vec<NcclTransfer>, address: u64, bytes: usize, to: usize) {
    if bytes > 0 {
        transfers.push(NcclTransfer::Send { address, bytes, to });
    }
}

fn push_receive(transfers: &mut Vec<NcclTransfer>, address: u64, bytes: usize, from: usize) {
    if bytes > 0 {
        transfers.push(NcclTransfer::Receive { address, bytes, from });
    }
}

/// Rows of a parcel, as many at a time as fit in scratch memory; all at once if it needs none.
fn stretches(sent: View, received: View, most_bytes: u64) -> impl Iterator<Item = (View, View)> {
    let row_bytes = (sent.cols * sent.dtype.size_bytes()) as u64;
    let is_direct = packed_bytes(&sent, &received, most_bytes) == 0;
    let rows = if is_direct { sent.rows } else { (most_bytes / row_bytes).max(1) as usize };
    (0..sent.rows).step_by(rows.max(1)).map(move |first| {
        let range = first..(first + rows).min(sent.rows);
        (sent.row_range(range.clone()), received.row_range(range))
    })
}

/// The scratch memory that a parcel takes, the same on both sides. A row that does not fit has no gaps.
fn packed_bytes(sent: &View, received: &View, most_bytes: u64) -> u64 {
    let has_gaps = !sent.is_contiguous() || !received.is_contiguous();
    let is_direct = !has_gaps && sent.bytes() > LEAST_DIRECT_BYTES.min(most_bytes);
    if is_direct { 0 } else { sent.bytes().next_multiple_of(ALIGNMENT_BYTES) }
}

fn step_bytes(view: &View) -> usize {
    view.stride * view.dtype.size_bytes()
}

fn copy(from: &View, to: u64, to_step: usize) -> Step {
    let (rows, row_bytes) = (from.rows, from.cols * from.dtype.size_bytes());
    Step::Copy { from: from.address(), to, rows, row_bytes, from_step: step_bytes(from), to_step }
}

struct Parcel {
    from: usize,
    to: usize,
    sent: View,
    received: View,
    /// Bytes of scratch memory; zero if it is sent in place.
    packed: u64,
}

/// Parcels that travel together. Packed parcels between the same two members are one message.
struct Round {
    parcels: Vec<Parcel>,
    /// Scratch memory in use, by member.
    used_bytes: Vec<u64>,
}

impl Round {
    fn new(members: usize) -> Round {
        Round { parcels: Vec::new(), used_bytes: vec![0; members] }
    }

    fn has_room(&self, parcel: &Parcel, scratch_bytes: u64) -> bool {
        [parcel.from, parcel.to].iter().all(|&member| self.used_bytes[member] + parcel.packed <= scratch_bytes)
    }

    fn add(&mut self, parcel: Parcel) {
        self.used_bytes[parcel.from] += parcel.packed;
        self.used_bytes[parcel.to] += parcel.packed;
        self.parcels.push(parcel);
    }

    /// Adds one member's steps.
    fn close(self, member: &mut Member<'_>) {
        let me = member.me;
        let mut next = member.scratch.address;
        let (mut unpacked, mut transfers) = (Vec::new(), Vec::new());
        for (other, is_sent) in member.others().flat_map(|other| [(other, true), (other, false)]) {
            let begin = next;
            let is_mine =
                |parcel: &&Parcel| [parcel.from, parcel.to] == if is_sent { [me, other] } else { [other, me] };
            for Parcel { sent, received, packed, .. } in self.parcels.iter().filter(is_mine) {
                let bytes = sent.bytes() as usize;
                let row_bytes = sent.cols * sent.dtype.size_bytes();
                match (packed, is_sent) {
                    (0, true) => push_send(&mut transfers, sent.address(), bytes, other),
                    (0, false) => push_receive(&mut transfers, received.address(), bytes, other),
                    (_, true) => member.steps.push(copy(sent, next, row_bytes)),
                    (_, false) => unpacked.push(Step::Copy {
                        from: next,
                        to: received.address(),
                        rows: received.rows,
                        row_bytes,
                        from_step: row_bytes,
                        to_step: step_bytes(received),
                    }),
                }
                next += packed;
            }
            let packed = (next - begin) as usize;
            if is_sent {
                push_send(&mut transfers, begin, packed, other);
            } else {
                push_receive(&mut transfers, begin, packed, other);
            }
        }
        member.steps.push(Step::Transfer(transfers));
        member.steps.append(&mut unpacked);
    }
}

#[cfg(test)]
mod tests;
