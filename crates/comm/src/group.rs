//! A rank's membership in a group, and the collectives it can issue there.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex};

use evenkeel_device::kernel::Copy;
use evenkeel_device::{DType, Health, Queue, Stamp, Tensor, View};

use crate::call::{Call, ExchangeKind};
use crate::counts::Counts;
use crate::local::{self, Meeting, Parcels, Post, RankHandle, Shared, Visit};

/// A rank's membership in a group of ranks. All members issue the same collectives in the same order.
///
/// A collective is issued on a queue and runs there in order. On a CPU it returns at once; on a GPU, once the other members
/// have issued it. As with kernels, the caller may drop a tensor then, and the other queue may use its memory only behind an
/// event. Tensors are contiguous; sums take f32 or bf16, moves also u32. `root`, `to` and `from` are indices in the group. The
/// returned stamp is the moment when the last member arrived.
#[derive(Clone)]
pub struct Group {
    membership: Arc<Membership>,
}

struct Membership {
    name: String,
    ranks: Vec<usize>,
    me: usize,
    counts: Arc<Mutex<Counts>>,
    /// `None` for a dry rank.
    local: Option<Local>,
}

struct Local {
    handle: Arc<RankHandle>,
    shared: Arc<Shared>,
}

impl Group {
    pub(crate) fn new(
        name: &str,
        ranks: &[usize],
        me: usize,
        counts: Arc<Mutex<Counts>>,
        handle: Option<Arc<RankHandle>>,
    ) -> Group {
        let local = handle.map(|handle| Local { shared: handle.world.group(name, ranks), handle });
        Group { membership: Arc::new(Membership { name: name.to_owned(), ranks: ranks.to_vec(), me, counts, local }) }
    }

    /// This rank's index in the group.
    pub fn rank(&self) -> usize {
        self.membership.me
    }

    pub fn size(&self) -> usize {
        self.membership.ranks.len()
    }

    /// The members, as ranks of the world.
    pub fn ranks(&self) -> &[usize] {
        &self.membership.ranks
    }

    pub fn name(&self) -> &str {
        &self.membership.name
    }

    /// Every member's tensor becomes the sum of all.
    pub fn all_reduce(&self, queue: &Queue, tensor: &Tensor) -> Stamp {
        let call = self.call(ExchangeKind::AllReduce, tensor);
        self.issue(queue, call, tensor, tensor, 0)
    }

    /// Rows `bounds[i]..bounds[i + 1]` of the sum of all `from` go to member i's `to`, which may be those rows of `from`.
    pub fn reduce_scatter(&self, queue: &Queue, from: &Tensor, to: &Tensor, bounds: &[usize]) -> Stamp {
        self.check_bounds(ExchangeKind::ReduceScatter, from, to, bounds);
        let call = Call { bounds: Some(bounds.into()), ..self.call(ExchangeKind::ReduceScatter, from) };
        self.issue(queue, call, from, to, 0)
    }

    /// Member i's `from` comes to rows `bounds[i]..bounds[i + 1]` of every `to`; `from` may be those rows of `to`.
    pub fn all_gather(&self, queue: &Queue, from: &Tensor, to: &Tensor, bounds: &[usize]) -> Stamp {
        self.check_bounds(ExchangeKind::AllGather, to, from, bounds);
        let call = Call { bounds: Some(bounds.into()), ..self.call(ExchangeKind::AllGather, to) };
        self.issue(queue, call, from, to, 0)
    }

    /// The root's tensor becomes the sum of all; the others keep theirs.
    pub fn reduce(&self, queue: &Queue, tensor: &Tensor, root: usize) -> Stamp {
        let call = self.rooted(ExchangeKind::Reduce, tensor, root);
        self.issue(queue, call, tensor, tensor, root)
    }

    /// Every member's tensor becomes the root's.
    pub fn broadcast(&self, queue: &Queue, tensor: &Tensor, root: usize) -> Stamp {
        let call = self.rooted(ExchangeKind::Broadcast, tensor, root);
        self.issue(queue, call, tensor, tensor, root)
    }

    /// Moves parts of tensors between the members: each of `sent` goes to the member named with it, each of `received` comes
    /// from the member named with it. Parts from one member to another arrive in the order and shapes in which they are sent.
    /// Parts need not be contiguous, a member may send to itself, and no part may be both sent and received.
    pub fn redistribute(&self, queue: &Queue, sent: &[(usize, View)], received: &[(usize, View)]) -> Stamp {
        let parcels = Parcels { sent: sent.to_vec(), received: received.to_vec() };
        let call = Call { bytes: parcels.traffic_bytes(self.rank()), ..Call::of(ExchangeKind::Redistribute) };
        self.count(&call);
        match self.with_others() {
            Some(local) => {
                let meeting = local.shared.collectives.clone();
                let post = Post { parcels: Arc::new(parcels), ..Post::new(call, 0, 0) };
                self.enqueue(queue, meeting, &self.membership.ranks, self.rank(), post)
            }
            None => {
                if self.size() == 1 {
                    assert_eq!(sent.len(), received.len(), "{}: what a lone member sends it receives", self.name());
                    let moved = sent.iter().zip(received);
                    moved.for_each(|((_, x), (_, out))| queue.launch(Copy { x: *x, out: *out }));
                }
                Stamp::default()
            }
        }
    }

    /// Sends a tensor to another member. The queue continues once the receiver has it, so two members that both send first wait
    /// until the deadline.
    pub fn send(&self, queue: &Queue, tensor: &Tensor, to: usize) -> Stamp {
        let call = self.rooted(ExchangeKind::Send, tensor, to);
        self.transfer(queue, call, tensor, [self.rank(), to])
    }

    pub fn receive(&self, queue: &Queue, tensor: &Tensor, from: usize) -> Stamp {
        let call = self.rooted(ExchangeKind::Receive, tensor, from);
        self.transfer(queue, call, tensor, [from, self.rank()])
    }

    /// The queue continues when every member has arrived.
    pub fn barrier(&self, queue: &Queue) -> Stamp {
        let call = Call::of(ExchangeKind::Barrier);
        self.count(&call);
        let Some(local) = self.with_others() else { return Stamp::default() };
        let meeting = local.shared.collectives.clone();
        self.enqueue(queue, meeting, &self.membership.ranks, self.rank(), Post::new(call, 0, 0))
    }

    /// All members' values, in their order. The host waits for them, whatever its queues do.
    pub fn exchange(&self, value: u64) -> Vec<u64> {
        let call = Call::of(ExchangeKind::Exchange);
        self.count(&call);
        let Some(local) = self.with_others() else { return vec![value; self.size()] };
        let meeting = &local.shared.exchanges;
        let visit = Visit {
            world: &local.handle.world,
            group: self.name(),
            ranks: self.ranks(),
            me: self.rank(),
            number: meeting.issue(self.rank()),
            health: None,
        };
        let post = Post { value, ..Post::new(call, 0, 0) };
        let values = meeting.attend(&visit, post, |posts| posts.iter().map(|post| post.value).collect());
        values.unwrap_or_else(|message| resume_unwind(Box::new(message)))
    }

    fn call(&self, kind: ExchangeKind, whole: &Tensor) -> Call {
        let is_sum = matches!(kind, ExchangeKind::AllReduce | ExchangeKind::ReduceScatter | ExchangeKind::Reduce);
        assert!(
            whole.is_contiguous() && !(is_sum && whole.dtype == DType::U32),
            "{}: {kind} of {:?} {:?} with rows {} apart, expected {} without gaps",
            self.name(),
            whole.dtype,
            whole.shape(),
            whole.stride,
            if is_sum { "f32 or bf16" } else { "a tensor" },
        );
        Call { dtype: whole.dtype, bytes: whole.bytes(), ..Call::of(kind) }
    }

    fn rooted(&self, kind: ExchangeKind, tensor: &Tensor, root: usize) -> Call {
        let rank = self.ranks().get(root).copied();
        let rank = rank.unwrap_or_else(|| panic!("{}: {kind} with member {root} of {}", self.name(), self.size()));
        Call { root: Some(rank), ..self.call(kind, tensor) }
    }

    /// `part` is this member's rows of `whole`, or a separate tensor.
    fn check_bounds(&self, kind: ExchangeKind, whole: &Tensor, part: &Tensor, bounds: &[usize]) {
        let name = self.name();
        let me = self.rank();
        assert!(
            bounds.len() == self.size() + 1
                && bounds.first() == Some(&0)
                && bounds.is_sorted()
                && bounds.last() == Some(&whole.rows),
            "{name}: {kind} of {} rows among {} members, cut at {bounds:?}",
            whole.rows,
            self.size(),
        );
        let rows = bounds[me]..bounds[me + 1];
        assert!(
            part.shape() == [rows.len(), whole.cols] && part.dtype == whole.dtype && part.is_contiguous(),
            "{name}: {kind} of {:?} {:?}, whose rows {rows:?} are this member's, with {:?} {:?} with rows {} apart",
            whole.dtype,
            whole.shape(),
            part.dtype,
            part.shape(),
            part.stride,
        );
        let apart =
            part.address() + part.bytes() <= whole.address() || whole.address() + whole.bytes() <= part.address();
        let in_place = part.address() == whole.row_range(rows).address();
        assert!(apart || in_place || part.is_empty(), "{name}: {kind} between tensors that overlap elsewhere");
    }

    fn issue(&self, queue: &Queue, call: Call, from: &Tensor, to: &Tensor, root: usize) -> Stamp {
        self.count(&call);
        match self.with_others() {
            Some(local) => {
                let meeting = local.shared.collectives.clone();
                let post = Post { root, ..Post::new(call, from.address(), to.address()) };
                self.enqueue(queue, meeting, &self.membership.ranks, self.rank(), post)
            }
            None => {
                // A group of one still copies its tensor if `from` and `to` differ.
                if self.size() == 1 && from.address() != to.address() {
                    queue.launch(Copy { x: from.view(), out: to.view() });
                }
                Stamp::default()
            }
        }
    }

    fn transfer(&self, queue: &Queue, call: Call, tensor: &Tensor, [from, to]: [usize; 2]) -> Stamp {
        assert_ne!(from, to, "{}: {} to or from itself", self.name(), call.kind);
        self.count(&call);
        let Some(local) = self.with_others() else { return Stamp::default() };
        let meeting = local.shared.pair(from, to);
        let ranks = [self.ranks()[from], self.ranks()[to]];
        let me = usize::from(self.rank() == to);
        let post = Post::new(call, tensor.address(), tensor.address());
        self.enqueue(queue, meeting, &ranks, me, post)
    }

    /// `None` if this member is alone.
    fn with_others(&self) -> Option<&Local> {
        self.membership.local.as_ref().filter(|_| self.size() > 1)
    }

    fn count(&self, call: &Call) {
        if self.size() > 1 {
            self.membership.counts.lock().expect("no panic under this lock").add(call.kind, call.bytes);
        }
    }

    fn enqueue(&self, queue: &Queue, meeting: Arc<Meeting>, ranks: &[usize], me: usize, mut post: Post) -> Stamp {
        let number = meeting.issue(me);
        post.call.gpu = queue.gpu();
        if post.call.gpu.is_some() {
            let group = self.name();
            let health = queue.health();
            let local = self.membership.local.as_ref().expect("only groups that move something come here");
            let visit = Visit { world: &local.handle.world, group, ranks, me, number, health: Some(&health) };
            let came = local::meet_on_gpu(queue, &meeting, &visit, post);
            return came.unwrap_or_else(|message| resume_unwind(Box::new(message)));
        }
        let membership = self.membership.clone();
        let ranks = ranks.to_vec();
        let health = queue.health();
        let came = Stamp::default();
        let errand = Errand { membership, meeting, ranks, me, number, post: Some(post), health, came: came.clone() };
        queue.call(move || errand.run());
        came
    }
}

/// A collective on its way through a queue.
struct Errand {
    membership: Arc<Membership>,
    meeting: Arc<Meeting>,
    ranks: Vec<usize>,
    me: usize,
    number: u64,
    /// Taken when the errand runs.
    post: Option<Post>,
    health: Health,
    came: Stamp,
}

impl Errand {
    fn run(mut self) {
        let post = self.post.take().expect("an errand is run once");
        let local = self.membership.local.as_ref().expect("only groups that move something have errands");
        let visit = Visit {
            world: &local.handle.world,
            group: &self.membership.name,
            ranks: &self.ranks,
            me: self.me,
            number: self.number,
            health: Some(&self.health),
        };
        let outcome = self.meeting.attend(&visit, post, |posts| {
            self.came.set(posts.iter().map(|post| post.arrived).max().expect("a meeting has members"));
            // SAFETY: the addresses are those of contiguous tensors, whose device lives as long as its queues run; the members
            // have agreed on dtype and size; and a tensor's memory belongs to the queue that the errand runs on, which does
            // nothing else until all members have acted; freeing it makes other queues wait, as for a kernel.
            local::part_of(posts, self.me, |work| unsafe { work.run() });
        });
        if let Err(message) = outcome {
            // The device reports the message; the hook of a panic would print it once more for every rank.
            resume_unwind(Box::new(message));
        }
    }
}

impl Drop for Errand {
    /// A failed device drops its commands. The other members must not wait for it.
    fn drop(&mut self) {
        if self.post.is_some()
            && let Some(Local { handle, .. }) = &self.membership.local
        {
            let reason = self.health.failure().unwrap_or("its device does not run collectives");
            handle.world.abort_for(handle.rank, reason);
        }
    }
}
