//! A watchdog thread for transfers between GPUs.
//!
//! A host that waits for its GPU cannot watch the clock, and a kernel of NCCL that waits for another GPU waits for ever. This
//! thread ends the run when a collective takes longer than the deadline or NCCL has lost a GPU or a link. Once the run has
//! failed for any reason, it aborts transfers in flight, so that hosts return from their GPUs.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::way::End;
use crate::local::World;

/// Time between two checks.
const LOOK: Duration = Duration::from_millis(50);
/// How long the end of a run waits for NCCL to release GPUs. It may never release one whose link is broken.
const CLOSING: Duration = Duration::from_secs(10);

pub(crate) struct Watchdog {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Watched {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    ends: Vec<Weak<End>>,
    is_over: bool,
}

impl Watchdog {
    pub fn start(world: Weak<World>) -> Watchdog {
        let watched = Arc::new(Watched::default());
        let of_thread = watched.clone();
        let thread = std::thread::Builder::new().name("nccl-watch".to_owned());
        let thread = thread.spawn(move || of_thread.run(&world)).expect("the system starts a thread");
        Watchdog { watched, thread: Some(thread) }
    }

    pub fn add(&self, end: &Arc<End>) {
        self.watched.lock().ends.push(Arc::downgrade(end));
    }

    /// Makes the thread check now.
    pub fn wake(&self) {
        self.watched.changed.notify_all();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.watched.lock().is_over = true;
        self.wake();
        // The thread itself may drop the last reference to the world.
        let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id())
        else {
            return;
        };
        let since = Instant::now();
        while !thread.is_finished() && since.elapsed() < CLOSING {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

impl Watched {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn run(&self, world: &Weak<World>) {
        while !self.is_over_after(LOOK) {
            let Some(world) = world.upgrade() else { return };
            let ends = upgraded(&self.lock().ends);
            for end in &ends {
                if world.failure().is_none()
                    && let Some(message) = end.trouble(world.deadline())
                {
                    world.abort(end.rank, &message);
                }
            }
            let has_failed = world.failure().is_some();
            // The thread that drops the world waits for what follows.
            drop((ends, world));
            if has_failed {
                let ends = upgraded(&std::mem::take(&mut self.lock().ends));
                // All ends at once: aborting one returns when its GPU is idle, which can require that the others are aborted,
                // too.
                std::thread::scope(|scope| {
                    for end in &ends {
                        scope.spawn(|| end.communicator.abort());
                    }
                });
            }
        }
    }

    /// Sleeps for `time` unless woken.
    fn is_over_after(&self, time: Duration) -> bool {
        let state = self.lock();
        state.is_over || self.changed.wait_timeout(state, time).is_ok_and(|(state, _)| state.is_over)
    }
}

fn upgraded(ends: &[Weak<End>]) -> Vec<Arc<End>> {
    ends.iter().filter_map(Weak::upgrade).collect()
}
