use std::sync::{Arc, Mutex};

use crate::counts::Counts;
use crate::group::Group;
use crate::link::Link;
use crate::local::Place;
use crate::ranks::RankFailure;

/// A rank's place among the ranks of a run. Clones are the same place.
#[derive(Clone)]
pub struct Communicator {
    rank: usize,
    size: usize,
    counts: Arc<Mutex<Counts>>,
    /// None where nothing is moved.
    place: Option<Arc<Place>>,
}

impl Communicator {
    pub(crate) fn local(place: Arc<Place>) -> Communicator {
        let (rank, size) = (place.rank, place.world.size());
        Communicator { rank, size, counts: Arc::default(), place: Some(place) }
    }

    /// A rank without peers: its collectives are checked and counted and move nothing.
    pub fn dry(rank: usize, size: usize) -> Communicator {
        assert!(rank < size, "rank {rank} of {size}");
        Communicator { rank, size, counts: Arc::default(), place: None }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// The link that is emulated, if one is; results measured over it must say so.
    pub fn link(&self) -> Option<Link> {
        self.place.as_ref().and_then(|place| place.world.link())
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
        Group::new(name, ranks, me, self.counts.clone(), self.place.clone())
    }

    /// What this rank has issued so far.
    pub fn counts(&self) -> Counts {
        self.counts.lock().expect("no panic under this lock").clone()
    }

    /// Ends the run: every rank's wait ends within a second and says that this rank failed with `message`. Of several
    /// messages the first counts.
    pub fn abort(&self, message: &str) {
        if let Some(place) = &self.place {
            place.world.abort(self.rank, message);
        }
    }

    /// Why the run ends, if it does. What was computed since may lack what other ranks would have sent.
    pub fn failure(&self) -> Option<RankFailure> {
        self.place.as_ref().and_then(|place| place.world.failure())
    }

    pub(crate) fn place(&self) -> Option<Arc<Place>> {
        self.place.clone()
    }
}
