//! Meetings: members arrive, act on one another's memory, and leave.
//!
//! A member posts its call and the addresses of its tensors, waits until all have posted, acts, and waits until all have acted.
//! So no member touches another's memory before it has arrived or after it has left. A member whose memory the others do not
//! need leaves as soon as it has acted.
//!
//! A member that gives up cannot wait for the others, and its memory may vanish with its device. It closes the meeting: no
//! member begins to act after that, and it leaves when those that had begun are done. They finish without waiting for anyone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use evenkeel_device::{Event, Health};

use super::World;
use super::signal::Signal;
use super::transfer::Parcels;
use crate::call::{Call, ExchangeKind, ordinal};
use crate::nccl::Way;
use crate::ranks::panic_message;

/// A failed device wakes nobody, so sleepers check theirs this often.
const LOOK_AT_DEVICE: Duration = Duration::from_millis(50);

/// The bit of `acting` that lets no further member begin.
const CLOSED: usize = 1 << (usize::BITS - 1);

pub(crate) struct Meeting {
    /// Posts and acts so far, of all members. No member posts for meeting k + 1 before all have acted in meeting k, so all have
    /// posted for meeting k when this is k times the number of members.
    posted: AtomicU64,
    acted: AtomicU64,
    /// The number of members acting now, and [`CLOSED`].
    acting: AtomicUsize,
    signal: Signal,
    members: Box<[Member]>,
    /// Connects the members' GPUs, if they differ.
    pub way: Way,
}

#[derive(Default)]
struct Member {
    issued: AtomicU64,
    /// The last meetings that this member has posted for and acted in. For messages.
    posted: AtomicU64,
    acted: AtomicU64,
    post: Mutex<Option<Post>>,
}

/// A member's call and the addresses of its tensors.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    pub call: Call,
    /// Addresses to read from and write to.
    pub from: u64,
    pub to: u64,
    /// The member that alone sends or receives, if one does.
    pub root: usize,
    /// For an exchange.
    pub value: u64,
    /// For a redistribution.
    pub parcels: Arc<Parcels>,
    /// Set on arrival.
    pub arrived: Instant,
    /// On a GPU: behind the member's earlier work, and behind its part.
    pub ready: Option<Event>,
    pub done: Arc<OnceLock<Event>>,
}

impl Post {
    pub fn new(call: Call, from: u64, to: u64) -> Post {
        Post {
            call,
            from,
            to,
            root: 0,
            value: 0,
            parcels: Arc::default(),
            arrived: Instant::now(),
            ready: None,
            done: Arc::default(),
        }
    }

    pub fn is_touched_by_others(&self) -> bool {
        !matches!(self.call.kind, ExchangeKind::Barrier | ExchangeKind::Exchange)
    }
}

/// One member's attendance of one meeting.
pub(crate) struct Visit<'a> {
    pub world: &'a World,
    pub group: &'a str,
    /// The members' world ranks.
    pub ranks: &'a [usize],
    /// The visitor's index among them.
    pub me: usize,
    /// The number that [`Meeting::issue`] gave.
    pub number: u64,
    /// The health of the device whose queue waits here.
    pub health: Option<&'a Health>,
}

impl Meeting {
    pub fn new(members: usize) -> Meeting {
        Meeting {
            posted: AtomicU64::new(0),
            acted: AtomicU64::new(0),
            acting: AtomicUsize::new(0),
            signal: Signal::default(),
            members: (0..members).map(|_| Member::default()).collect(),
            way: Way::new(members),
        }
    }

    /// The number of a member's next meeting, counted from 1.
    pub fn issue(&self, me: usize) -> u64 {
        self.members[me].issued.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn wake(&self) {
        self.signal.wake();
    }

    /// Attends a meeting: acts once all have arrived, and leaves once all have acted. An error is the message that ends the
    /// run; the world knows it by then.
    pub fn attend<T>(&self, visit: &Visit<'_>, post: Post, act: impl FnOnce(&[Post]) -> T) -> Result<T, String> {
        let call = post.call.clone();
        self.attend_or_say_why(visit, post, act).map_err(|reason| {
            match reason {
                Reason::Aborted => (),
                Reason::Device(message) => visit.world.abort_for(visit.rank(), &message),
                Reason::Ours(message) => visit.world.abort(visit.rank(), &message),
                Reason::Late(phase) => visit.world.abort(visit.rank(), &self.lateness(visit, &call, phase)),
                Reason::Left(rank) => {
                    let what = visit.describe(&call);
                    visit.world.abort(visit.rank(), &format!("{what} waits for rank {rank}, which has ended"));
                }
            }
            self.close();
            let failure = visit.world.failure().expect("aborted above or by another rank");
            if failure.rank == visit.rank() { failure.message } else { failure.to_string() }
        })
    }

    fn attend_or_say_why<T>(&self, visit: &Visit<'_>, post: Post, act: impl FnOnce(&[Post]) -> T) -> Result<T, Reason> {
        let (me, size) = (&self.members[visit.me], self.members.len() as u64);
        // The others, or this member's other queue, may still be at the previous call.
        self.wait(visit, &self.acted, (visit.number - 1) * size, Phase::Turn)?;
        *me.post.lock().expect("no panic under this lock") = Some(Post { arrived: Instant::now(), ..post });
        me.posted.store(visit.number, Ordering::Relaxed);
        self.arrive(&self.posted, visit.number * size);
        self.wait(visit, &self.posted, visit.number * size, Phase::Come)?;
        let posts = self.posts(visit)?;
        let result = self.act(|| act(&posts))?;
        me.acted.store(visit.number, Ordering::Relaxed);
        self.arrive(&self.acted, visit.number * size);
        if posts[visit.me].is_touched_by_others() {
            self.wait(visit, &self.acted, visit.number * size, Phase::Act)?;
        }
        self.linger(visit, &posts)?;
        Ok(result)
    }

    /// Counts a member; the last one wakes the others.
    fn arrive(&self, counter: &AtomicU64, all: u64) {
        if counter.fetch_add(1, Ordering::SeqCst) + 1 == all {
            self.signal.wake();
        }
    }

    fn wait(&self, visit: &Visit<'_>, counter: &AtomicU64, all: u64, phase: Phase) -> Result<(), Reason> {
        let mut since = None;
        let ready = || counter.load(Ordering::SeqCst) >= all;
        self.signal.wait(visit.world.spin, ready, || {
            let since = since.get_or_insert_with(Instant::now);
            visit.check()?;
            // Check who has left before who is missing: a member may arrive, act and leave between two checks.
            let mut left = self.missing(visit, phase, |rank| visit.world.has_left(rank));
            if let Some(rank) = left.next() {
                return Err(Reason::Left(rank));
            }
            let remaining = visit.world.options.deadline.saturating_sub(since.elapsed());
            if remaining.is_zero() { Err(Reason::Late(phase)) } else { Ok(remaining.min(LOOK_AT_DEVICE)) }
        })
    }

    /// All members' posts, once they are found to agree.
    fn posts(&self, visit: &Visit<'_>) -> Result<Vec<Post>, Reason> {
        let post = |member: &Member| member.post.lock().expect("no panic under this lock").clone();
        let posts: Vec<Post> = self.members.iter().map(|member| post(member).expect("all have posted")).collect();
        let mine = &posts[visit.me].call;
        match posts.iter().position(|post| !post.call.agrees_with(mine)) {
            None => Ok(posts),
            Some(other) => {
                let rank = visit.ranks[other];
                let call = &posts[other].call;
                Err(Reason::Ours(format!(
                    "{}: rank {rank} issued {call} as its {} call, rank {} {mine}\n  \
                     hint: all members of a group issue the same collectives in the same order",
                    visit.group,
                    ordinal(visit.number),
                    visit.rank(),
                )))
            }
        }
    }

    fn act<T>(&self, act: impl FnOnce() -> T) -> Result<T, Reason> {
        let closed = self.acting.fetch_add(1, Ordering::SeqCst) & CLOSED != 0;
        let result = if closed { None } else { Some(catch_unwind(AssertUnwindSafe(act))) };
        self.acting.fetch_sub(1, Ordering::SeqCst);
        match result {
            None => Err(Reason::Aborted),
            Some(result) => result.map_err(|panic| Reason::Ours(panic_message(&*panic))),
        }
    }

    /// Lets no further member act, and waits for those that have begun.
    fn close(&self) {
        self.acting.fetch_or(CLOSED, Ordering::SeqCst);
        while self.acting.load(Ordering::SeqCst) != CLOSED {
            std::thread::yield_now();
        }
    }

    /// Sleeps as long as the emulated link would take.
    fn linger(&self, visit: &Visit<'_>, posts: &[Post]) -> Result<(), Reason> {
        let Some(link) = visit.world.options.link else { return Ok(()) };
        let last = posts.iter().map(|post| post.arrived).max().expect("a meeting has members");
        let call = &posts[visit.me].call;
        let deadline = visit.world.options.deadline;
        // Members of a redistribution move different amounts but leave together.
        let duration = posts.iter().map(|post| link.duration(&post.call, posts.len())).max().unwrap_or_default();
        if duration > deadline {
            let what = visit.describe(call);
            let takes_s = duration.as_secs_f64();
            let deadline_ms = deadline.as_millis();
            return Err(Reason::Ours(format!(
                "{what} takes {takes_s:.3} s on the emulated link, the deadline is {deadline_ms} ms\n  \
                 hint: emulate a faster link, or allow more time"
            )));
        }
        let remaining = || duration.saturating_sub(last.elapsed());
        self.signal.wait(
            Duration::ZERO,
            || remaining().is_zero(),
            || {
                visit.check()?;
                Ok(remaining().min(LOOK_AT_DEVICE))
            },
        )
    }

    /// The given ranks that the visitor still waits for.
    fn missing<'a>(
        &'a self,
        visit: &'a Visit<'_>,
        phase: Phase,
        is_in_question: impl Fn(usize) -> bool + 'a,
    ) -> impl Iterator<Item = usize> + 'a {
        let is_missing = move |member: &Member| match phase {
            Phase::Turn => member.acted.load(Ordering::Relaxed) < visit.number - 1,
            Phase::Come => member.posted.load(Ordering::Relaxed) < visit.number,
            Phase::Act => member.acted.load(Ordering::Relaxed) < visit.number,
        };
        let members = self.members.iter().zip(visit.ranks.iter().copied());
        members.filter(move |&(member, rank)| is_in_question(rank) && is_missing(member)).map(|(_, rank)| rank)
    }

    fn lateness(&self, visit: &Visit<'_>, call: &Call, phase: Phase) -> String {
        let missing: Vec<String> = self.missing(visit, phase, |_| true).map(|rank| rank.to_string()).collect();
        let deadline_ms = visit.world.options.deadline.as_millis();
        let what = visit.describe(call);
        let missing = missing.join(", ");
        format!(
            "{what} waited {deadline_ms} ms for rank {missing}\n  \
             hint: it is stuck, slower than the deadline, or runs another program"
        )
    }
}

/// The event that a visitor waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The visitor's previous call is over.
    Turn,
    /// All members have arrived.
    Come,
    /// All members have acted.
    Act,
}

/// Why a meeting ends early.
enum Reason {
    /// Another rank has ended the run.
    Aborted,
    /// The visitor's device has failed, with this message.
    Device(String),
    /// The visitor found a mistake.
    Ours(String),
    Late(Phase),
    Left(usize),
}

impl Visit<'_> {
    /// Why the visitor must give up, if it must.
    pub fn trouble(&self) -> Option<String> {
        match self.check().err()? {
            Reason::Device(message) => Some(message),
            _ => self.world.failure().map(|failure| failure.to_string()),
        }
    }

    pub fn rank(&self) -> usize {
        self.ranks[self.me]
    }

    fn check(&self) -> Result<(), Reason> {
        if self.world.failure().is_some() {
            return Err(Reason::Aborted);
        }
        match self.health.and_then(Health::failure) {
            Some(message) => Err(Reason::Device(message.to_owned())),
            None => Ok(()),
        }
    }

    pub fn describe(&self, call: &Call) -> String {
        format!("{}: {call}, the {} call of rank {},", self.group, ordinal(self.number), self.rank())
    }
}
