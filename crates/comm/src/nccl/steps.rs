//! What a member does for a collective, as plain data.
//!
//! Every member has as many transfers as the others, some of them empty, and what one sends in its k-th the other receives in its
//! k-th. So none waits for another that waits for it.

use std::ops::Range;

use evenkeel_device::{DType, NcclTransfer, View};

use crate::call::Kind;
use crate::local::{Post, parcels, piece, rows_of};

/// Where a member may put what it has received or is about to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    pub address: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// All at once.
    Transfer(Vec<NcclTransfer>),
    /// As [`PeerWork::Sum`](evenkeel_device::PeerWork::Sum), to one destination.
    Sum { dtype: DType, sources: Vec<u64>, destination: u64, len: usize },
    /// As [`PeerWork::Copy`](evenkeel_device::PeerWork::Copy).
    Copy { from: u64, to: u64, rows: usize, row_bytes: usize, from_step: usize, to_step: usize },
}

/// Stretches in scratch memory begin at multiples of this, so that kernels can read and write vectors.
const ALIGNMENT_BYTES: u64 = 256;
/// A part of a redistribution that is smaller than this, or has gaps, is sent together with others.
const LEAST_DIRECT_BYTES: u64 = 256 << 10;

/// Member `me`'s steps, in their order. The members' calls agree, and all have as much scratch memory.
pub(crate) fn steps(posts: &[Post], me: usize, scratch: Scratch) -> Vec<Step> {
    let (own, bytes) = (&posts[me], posts[me].call.bytes as usize);
    let mut member = Member { posts, me, scratch, steps: Vec::new() };
    let pieces = || -> Vec<_> { (0..posts.len()).map(|other| piece(bytes, posts.len(), other)).collect() };
    let rows = || -> Vec<_> { (0..posts.len()).map(|other| rows_of(&own.call, other)).collect() };
    match own.call.kind {
        Kind::AllReduce => {
            let pieces = pieces();
            member.sum(&pieces, Destination::Own(own.to + pieces[me].start as u64));
            member.gather(own.to + pieces[me].start as u64, &pieces);
        }
        Kind::Reduce => member.sum(&pieces(), Destination::Root(own.root)),
        Kind::ReduceScatter => member.sum(&rows(), Destination::Own(own.to)),
        Kind::AllGather => member.gather(own.from, &rows()),
        Kind::Broadcast if bytes > 0 => {
            member.steps.push(Step::Transfer(vec![NcclTransfer::Broadcast { address: own.to, bytes, root: own.root }]));
        }
        Kind::Send | Kind::Receive if bytes > 0 => member.steps.push(Step::Transfer(vec![match me == own.root {
            true => NcclTransfer::Send { address: own.from, bytes, to: 1 - me },
            false => NcclTransfer::Receive { address: own.to, bytes, from: 1 - me },
        }])),
        Kind::Redistribute => member.redistribute(),
        Kind::Broadcast | Kind::Send | Kind::Receive | Kind::Barrier | Kind::Exchange => (),
    }
    member.steps
}

/// Where a member's part of a sum goes.
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

    /// Everybody sums its part, as many bytes at a time as scratch memory has room for from all others.
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

    /// `stretches` are what each member sums; the others' of this member's lie `chunk` bytes apart in scratch memory.
    fn sum_stretch(&mut self, stretches: &[Range<usize>], chunk: usize, skipped: usize, destination: Destination) {
        let (me, own, dtype) = (self.me, &self.posts[self.me], self.posts[self.me].call.dtype);
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
            // Over one of the summands, from where it is sent.
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

    /// Everybody's part, this member's of which is at `from`, to everybody.
    fn gather(&mut self, from: u64, parts: &[Range<usize>]) {
        let (to, mine) = (self.posts[self.me].to, &parts[self.me]);
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

    /// Every member goes through all parcels of all, so that all come to the same rounds.
    fn redistribute(&mut self) {
        let (members, most_bytes) = (self.posts.len(), self.scratch.bytes / 4);
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

/// Rows of a parcel, as many at a time as may lie in scratch memory; all where none of it has to.
fn stretches(sent: View, received: View, most_bytes: u64) -> impl Iterator<Item = (View, View)> {
    let row_bytes = (sent.cols * sent.dtype.size_bytes()) as u64;
    let is_direct = packed_bytes(&sent, &received, most_bytes) == 0;
    let rows = if is_direct { sent.rows } else { (most_bytes / row_bytes).max(1) as usize };
    (0..sent.rows).step_by(rows.max(1)).map(move |first| {
        let range = first..(first + rows).min(sent.rows);
        (sent.row_range(range.clone()), received.row_range(range))
    })
}

/// The bytes that a parcel takes of scratch memory, on both sides alike. A row that has no room there has no gaps.
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
    /// What it takes of scratch memory; nothing where it is sent from where it lies.
    packed: u64,
}

/// Parcels that travel together. Those between the same two members that lie in scratch memory are one message.
struct Round {
    parcels: Vec<Parcel>,
    /// Of each member's scratch memory.
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

    /// Adds the steps of one member.
    fn close(self, member: &mut Member<'_>) {
        let (me, mut next) = (member.me, member.scratch.address);
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
