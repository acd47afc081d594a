use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Checks of a condition between two looks at the clock.
const LOOKS: usize = 16;

/// Threads wait here until a condition over atomics holds. The thread that makes it hold calls [`Signal::wake`] afterwards.
#[derive(Default)]
pub(crate) struct Signal {
    /// The number of sleepers. Waking is a system call even without any.
    sleepers: Mutex<usize>,
    woken: Condvar,
}

impl Signal {
    pub fn wake(&self) {
        if *self.sleepers.lock().expect("no panic under this lock") > 0 {
            self.woken.notify_all();
        }
    }

    /// Waits until `ready`, awake for `spin` and then asleep. Before it sleeps, it asks `rest` how long it may do so without
    /// checking again; an error ends the wait.
    pub fn wait<E>(
        &self,
        spin: Duration,
        ready: impl Fn() -> bool,
        mut rest: impl FnMut() -> Result<Duration, E>,
    ) -> Result<(), E> {
        if ready() {
            return Ok(());
        }
        let start = Instant::now();
        while start.elapsed() < spin {
            for _ in 0..LOOKS {
                std::hint::spin_loop();
                if ready() {
                    return Ok(());
                }
            }
        }
        // The count rises before the check, both under the lock, so a waker that the check missed sees this sleeper.
        let mut sleepers = self.sleepers.lock().expect("no panic under this lock");
        *sleepers += 1;
        let outcome = loop {
            if ready() {
                break Ok(());
            }
            match rest() {
                Ok(time) => sleepers = self.woken.wait_timeout(sleepers, time).expect("no panic under this lock").0,
                Err(error) => break Err(error),
            }
        };
        *sleepers -= 1;
        outcome
    }
}
