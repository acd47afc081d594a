use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use evenkeel_device::{CudaError, NcclLibrary};

use super::Meeting;
use crate::Communicator;
use crate::link::Link;
use crate::nccl::{End, Watchdog};
use crate::ranks::RankFailure;

/// The NCCL that a rank uses.
pub type LibraryOfRank = fn(usize) -> Result<Arc<NcclLibrary>, CudaError>;

/// Options of the ranks' waits and transports.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a member waits for the others before it ends the run.
    pub deadline: Duration,
    /// A slower link to emulate between the ranks.
    pub link: Option<Link>,
    /// For tests of NCCL between ranks that share a GPU: each rank loads its own library, which takes the others for ranks of
    /// another machine. With `None`, ranks on one GPU exchange in its memory, and ranks on different GPUs use the installed
    /// NCCL.
    pub library_of_rank: Option<LibraryOfRank>,
}

impl Default for Options {
    fn default() -> Options {
        Options { deadline: Duration::from_secs(300), link: None, library_of_rank: None }
    }
}

/// How long a member spins for the others before it sleeps. Measured with two ranks on two cores of an idle machine: waking a
/// sleeper takes 6 to 10 µs; spinning for less than 10 µs doubled the time of a small all-reduce behind a kernel, and spinning
/// for more than 20 µs gained nothing.
const SPIN: Duration = Duration::from_micros(20);
/// If ranks outnumber cores, a spinning rank keeps another from arriving. Measured on four ranks: spinning for 10 µs made
/// small all-reduces twice as slow as 2 µs, and 40 µs eight times.
const SPIN_ON_SHARED_CORES: Duration = Duration::from_micros(2);

/// State that the ranks of a run share.
pub struct World {
    pub(super) ranks: usize,
    pub(super) options: Options,
    pub(super) spin: Duration,
    aborted: AtomicBool,
    failure: Mutex<Option<Failure>>,
    left: Vec<AtomicBool>,
    /// Started when GPUs are connected. It ends before the connections, which belong to the groups.
    watch: OnceLock<Watchdog>,
    groups: Mutex<BTreeMap<GroupKey, Arc<Shared>>>,
    own: Weak<World>,
}

/// A group's name and its ranks.
type GroupKey = (String, Vec<usize>);

struct Failure {
    first: RankFailure,
    /// The rank's own message may still replace this one.
    provisional: bool,
}

impl World {
    /// The communicators of `ranks` ranks that are threads of this process, one for each.
    pub fn local(ranks: usize, options: Options) -> Vec<Communicator> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let world = Arc::new_cyclic(|own| World {
            ranks,
            options,
            spin: if ranks <= cores { SPIN } else { SPIN_ON_SHARED_CORES },
            aborted: AtomicBool::new(false),
            failure: Mutex::new(None),
            left: (0..ranks).map(|_| AtomicBool::new(false)).collect(),
            watch: OnceLock::new(),
            groups: Mutex::new(BTreeMap::new()),
            own: own.clone(),
        });
        (0..ranks).map(|rank| Communicator::local(Arc::new(RankHandle { world: world.clone(), rank }))).collect()
    }

    pub(crate) fn size(&self) -> usize {
        self.ranks
    }

    pub(crate) fn link(&self) -> Option<Link> {
        self.options.link
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.options.deadline
    }

    pub(crate) fn has_library_of_rank(&self) -> bool {
        self.options.library_of_rank.is_some()
    }

    pub(crate) fn nccl_library(&self, rank: usize) -> Result<Arc<NcclLibrary>, CudaError> {
        self.options.library_of_rank.map_or_else(NcclLibrary::find, |library_of| library_of(rank))
    }

    /// Has the watchdog look after the transfers of this end.
    pub(crate) fn watch(&self, end: &Arc<End>) {
        self.watch.get_or_init(|| Watchdog::start(self.own.clone())).add(end);
    }

    pub(crate) fn group(&self, name: &str, ranks: &[usize]) -> Arc<Shared> {
        let mut groups = lock(&self.groups);
        groups.entry((name.to_owned(), ranks.to_vec())).or_insert_with(|| Arc::new(Shared::new(ranks.len()))).clone()
    }

    /// Ends every wait. The first message stays.
    pub(crate) fn abort(&self, rank: usize, message: &str) {
        self.record(rank, message, false);
    }

    /// Ends every wait, on behalf of a rank whose own message may follow.
    pub(crate) fn abort_for(&self, rank: usize, message: &str) {
        self.record(rank, message, true);
    }

    fn record(&self, rank: usize, message: &str, provisional: bool) {
        let mut failure = lock(&self.failure);
        let replaces = match &*failure {
            None => true,
            Some(Failure { first, provisional }) => *provisional && first.rank == rank,
        };
        if replaces {
            *failure = Some(Failure { first: RankFailure { rank, message: message.to_owned() }, provisional });
        }
        drop(failure);
        self.aborted.store(true, Ordering::SeqCst);
        self.wake_everybody();
    }

    /// Why the run ends, if it does.
    pub(crate) fn failure(&self) -> Option<RankFailure> {
        if !self.aborted.load(Ordering::SeqCst) {
            return None;
        }
        lock(&self.failure).as_ref().map(|failure| failure.first.clone())
    }

    /// Whether a rank has dropped everything that could still issue a collective.
    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.left[rank].load(Ordering::SeqCst)
    }

    fn wake_everybody(&self) {
        if let Some(watch) = self.watch.get() {
            watch.wake();
        }
        for group in lock(&self.groups).values() {
            group.meetings().iter().for_each(|meeting| meeting.wake());
        }
    }
}

/// A rank's share of the world. Its communicator, its groups and its calls in flight hold it; when the last of them drops it,
/// the rank has left.
pub(crate) struct RankHandle {
    pub world: Arc<World>,
    pub rank: usize,
}

impl Drop for RankHandle {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.world.abort_for(self.rank, "the rank panicked");
        }
        self.world.left[self.rank].store(true, Ordering::SeqCst);
        self.world.wake_everybody();
    }
}

/// State that the members of a group share.
pub(crate) struct Shared {
    /// For collectives on queues.
    pub collectives: Arc<Meeting>,
    /// For hosts, whose exchanges must not mix with collectives in flight.
    pub exchanges: Arc<Meeting>,
    /// For a sender and a receiver, by their indices in the group.
    pairs: Mutex<BTreeMap<[usize; 2], Arc<Meeting>>>,
}

impl Shared {
    fn new(members: usize) -> Shared {
        let meeting = || Arc::new(Meeting::new(members));
        Shared { collectives: meeting(), exchanges: meeting(), pairs: Mutex::new(BTreeMap::new()) }
    }

    pub fn pair(&self, from: usize, to: usize) -> Arc<Meeting> {
        lock(&self.pairs).entry([from, to]).or_insert_with(|| Arc::new(Meeting::new(2))).clone()
    }

    fn meetings(&self) -> Vec<Arc<Meeting>> {
        let pairs = lock(&self.pairs).values().cloned().collect::<Vec<_>>();
        [self.collectives.clone(), self.exchanges.clone()].into_iter().chain(pairs).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic under this lock")
}
