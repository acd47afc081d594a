use std::sync::{Arc, Mutex};

use crate::counts::Counts;
use crate::group::Group;
use crate::link::Link;
use crate::local::RankHandle;
use crate::ranks::RankFailure;

/// A rank's access to the other ranks of a run. Clones share it.
#[derive(Clone)]
pub struct Communicator {
    rank: usize,
    size: usize,
    counts: Arc<Mutex<Counts>>,
    /// `None` for a dry rank.
    handle: Option<Arc<RankHandle>>,
}

impl Communicator {
    pub(crate) fn local(handle: Arc<RankHandle>) -> Communicator {
        let (rank, size) = (handle.rank, handle.world.size());
        Communicator { rank, size, counts: Arc::default(), handle: Some(handle) }
    }

    /// A rank without peers: its collectives are checked and counted and move nothing.
    pub fn dry(rank: usize, size: usize) -> Communicator {
        assert!(rank < size, "rank {rank} of {size}");
        Communicator { rank, size, counts: Arc::default(), handle: None }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// The emulated link, if any; results measured over it must say so.
    pub fn link(&self) -> Option<Link> {
        self.handle.as_ref().and_then(|handle| handle.world.link())
    }

    /// The group of these ranks, in increasing order and this one among them. Messages call it `name`. Every member asks
    /// for it under the same name; none waits for another.
    pub fn group(&self, name: &str, ranks: &[usize]) -> Group {
        assert!(
            ranks.is_sorted_by(|a, b| a < b) && ranks.last().is_some_and(|&last| last < self.size),
            "group {name}: ranks {ranks:?}, expected increasing ones below {}",
            self.size
        );
        let me = ranks.binary_search(&self.rank);
        let me = me.unwrap_or_else(|_| panic!("group {name}: rank {} is not among {ranks:?}", self.rank));
        Group::new(name, ranks, me, self.counts.clone(), self.handle.clone())
    }

    /// The collectives that this rank has issued so far.
    pub fn counts(&self) -> Counts {
        self.counts.lock().expect("no panic under this lock").clone()
    }

    /// Ends the run: every rank's wait ends within a second and says that this rank failed with `message`. The first message
    /// wins.
    pub fn abort(&self, message: &str) {
        if let Some(handle) = &self.handle {
            handle.world.abort(self.rank, message);
        }
    }

    /// Why the run ends, if it does. Results computed since may lack other ranks' contributions.
    pub fn failure(&self) -> Option<RankFailure> {
        self.handle.as_ref().and_then(|handle| handle.world.failure())
    }

    pub(crate) fn handle(&self) -> Option<Arc<RankHandle>> {
        self.handle.clone()
    }
}
