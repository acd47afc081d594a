//! How members come together, act on one another's memory, and part.
//!
//! A member posts what it asks for and where its tensors lie, waits until all have posted, acts, and waits until all have
//! acted. So nobody touches a member's memory before it has come or after it has gone on. Where the others have no need
//! of its memory, it goes on as soon as it has acted.
//!
//! A member that gives up cannot wait for the others, and its memory may vanish with its device. It closes the meeting:
//! nobody begins to act after that, and it leaves when those that had begun are done, which takes no wait of theirs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use evenkeel_device::{Event, Health};

use super::World;
use super::signal::Signal;
use super::transfer::Parcels;
use crate::call::{Call, Kind, ordinal};
use crate::nccl::Way;
use crate::ranks::panic_message;

/// A sleeper looks this often whether its own device has failed, which wakes nobody.
const LOOK_AT_DEVICE: Duration = Duration::from_millis(50);

/// The bit of `acting` that says that nobody may begin any more.
const CLOSED: usize = 1 << (usize::BITS - 1);

pub(crate) struct Meeting {
    /// How often a member has posted, and how often one has acted. Nobody posts for meeting k + 1 before all have acted
    /// in meeting k, so all have posted for meeting k when this is k times the number of members.
    posted: AtomicU64,
    acted: AtomicU64,
    /// How many members act right now, and [`CLOSED`].
    acting: AtomicUsize,
    signal: Signal,
    members: Box<[Member]>,
    /// Between the members' cards, where they have different ones.
    pub way: Way,
}

#[derive(Default)]
struct Member {
    issued: AtomicU64,
    /// The last meeting this member has posted for, and the last it has acted in. For messages.
    posted: AtomicU64,
    acted: AtomicU64,
    post: Mutex<Option<Post>>,
}

/// What a member brings to a meeting.
#[derive(Clone, Debug)]
pub(crate) struct Post {
    pub call: Call,
    /// Addresses of what is read and what is written.
    pub from: u64,
    pub to: u64,
    /// The member that alone sends or receives, where one does.
    pub root: usize,
    /// For an exchange.
    pub value: u64,
    /// For a redistribution.
    pub parcels: Arc<Parcels>,
    /// Set anew on arrival.
    pub arrived: Instant,
    /// On a card: behind what the member issued before, and behind what it did here.
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
        !matches!(self.call.kind, Kind::Barrier | Kind::Exchange)
    }
}

/// Who comes to a meeting, and to which.
pub(crate) struct Visit<'a> {
    pub world: &'a World,
    pub group: &'a str,
    /// The world's ranks of the members of this meeting.
    pub ranks: &'a [usize],
    /// The visitor's place among them.
    pub me: usize,
    /// The number that [`Meeting::issue`] gave.
    pub number: u64,
    /// Of the device whose queue the visitor keeps waiting.
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

    /// Comes to a meeting, acts there once all have come, and leaves once all have acted. An error is the message of
    /// whatever ends the run, of which the world knows by then.
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
        // The others may still be at the previous call, and so may this member, on its other queue.
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
            // Who has left comes before who is missing: a member may come, act and leave between two looks.
            let mut left = self.missing(visit, phase, |rank| visit.world.has_left(rank));
            if let Some(rank) = left.next() {
                return Err(Reason::Left(rank));
            }
            let remaining = visit.world.options.deadline.saturating_sub(since.elapsed());
            if remaining.is_zero() { Err(Reason::Late(phase)) } else { Ok(remaining.min(LOOK_AT_DEVICE)) }
        })
    }

    /// Everybody's post, once all ask for the same.
    fn posts(&self, visit: &Visit<'_>) -> Result<Vec<Post>, Reason> {
        let post = |member: &Member| member.post.lock().expect("no panic under this lock").clone();
        let posts: Vec<Post> = self.members.iter().map(|member| post(member).expect("all have posted")).collect();
        let mine = &posts[visit.me].call;
        match posts.iter().position(|post| !post.call.agrees_with(mine)) {
            None => Ok(posts),
            Some(other) => {
                let (rank, call) = (visit.ranks[other], &posts[other].call);
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

    /// Lets nobody begin to act, and waits for those that have begun.
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
        let (call, deadline) = (&posts[visit.me].call, visit.world.options.deadline);
        // Members of a redistribution have different amounts to move, and leave together.
        let duration = posts.iter().map(|post| link.duration(&post.call, posts.len())).max().unwrap_or_default();
        if duration > deadline {
            let (what, takes_s) = (visit.describe(call), duration.as_secs_f64());
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

    /// Those of the ranks in question that the visitor waits for.
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
        let (what, missing) = (visit.describe(call), missing.join(", "));
        format!(
            "{what} waited {deadline_ms} ms for rank {missing}\n  \
             hint: it is stuck, slower than the deadline, or runs another program"
        )
    }
}

/// What is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The visitor's previous call is over.
    Turn,
    /// All have come.
    Come,
    /// All have acted.
    Act,
}

/// Why a meeting ends early.
enum Reason {
    /// The run has been ended by somebody.
    Aborted,
    /// The visitor's device has failed, with this message.
    Device(String),
    /// The visitor found a mistake.
    Ours(String),
    Late(Phase),
    Left(usize),
}

impl Visit<'_> {
    /// Why the visitor has to end, if it has to.
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
