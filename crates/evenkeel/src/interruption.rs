//! Signals that end a run.
//!
//! The first lets the step end and its state be saved. Others within [`ECHO`] of it count as the same: `timeout`, for one,
//! signals its child and then the group that the child is in. The next signal ends the process at once if every step is saved,
//! else as soon as they are; the one after that waits for nothing.

use std::io::{IsTerminal, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use crate::{Failure, Mistake};

const ECHO: Duration = Duration::from_secs(2);

/// Listens while it lives.
pub struct Interruption {
    shared: Arc<Shared>,
    signals: Handle,
    listener: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    is_asked: AtomicBool,
    heard: Mutex<Heard>,
}

/// A checkpoint is being written while this lives.
pub struct Saving {
    shared: Arc<Shared>,
    /// Steps in the checkpoint.
    steps: u64,
    is_written: bool,
}

/// The signals heard so far, and the work that they may have to wait for.
#[derive(Default)]
struct Heard {
    /// The last signal that was no echo, and when it came.
    last: Option<(i32, Instant)>,
    saves_under_way: usize,
    /// Steps made, and steps saved.
    steps: u64,
    steps_saved: u64,
    ends_when_saved: bool,
    /// Once this is set, a signal ends the process, with this message.
    released: Option<&'static str>,
}

#[derive(Debug, PartialEq)]
enum Response {
    GoOn,
    StopAfterStep,
    EndWhenSaved,
    EndNow,
}

impl Interruption {
    pub fn listen() -> Result<Interruption, Failure> {
        let unheard = |error| Mistake { what: format!("signals cannot be caught: {error}"), hint: None };
        let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(unheard)?;
        let (handle, shared) = (signals.handle(), Arc::new(Shared::default()));
        let of_thread = shared.clone();
        let listen = move || signals.forever().for_each(|signal| of_thread.hear(signal));
        let listener = std::thread::Builder::new().name("signals".to_owned()).spawn(listen);
        let listener = Some(listener.expect("the system starts a thread"));
        Ok(Interruption { shared, signals: handle, listener })
    }

    /// Set by the first signal.
    pub fn is_asked(&self) -> &AtomicBool {
        &self.shared.is_asked
    }

    /// A step was made.
    pub fn stepped(&self) {
        self.shared.heard().steps += 1;
    }

    /// A checkpoint of all steps so far is about to be written.
    pub fn saving(&self) -> Saving {
        let mut heard = self.shared.heard();
        heard.saves_under_way += 1;
        Saving { shared: self.shared.clone(), steps: heard.steps, is_written: false }
    }

    /// Nothing is left for a signal to wait for: one that came or comes ends the process, with this message.
    pub fn release(&self, what: &'static str) {
        let mut heard = self.shared.heard();
        heard.released = Some(what);
        if heard.last.is_some() {
            end(&heard, what);
        }
    }

    pub fn exit_code(&self) -> u8 {
        self.shared.heard().exit_code()
    }
}

impl Drop for Interruption {
    fn drop(&mut self) {
        self.signals.close();
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

impl Saving {
    /// The checkpoint is complete.
    pub fn done(mut self) {
        self.is_written = true;
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        let mut heard = self.shared.heard();
        let saved = self.is_written.then_some(self.steps);
        if heard.save_ended(saved) {
            end(&heard, "interrupted twice, and ended when the last step was saved");
        }
    }
}

impl Shared {
    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, signal: i32) {
        let mut heard = self.heard();
        match heard.hear(signal, Instant::now()) {
            Response::GoOn => (),
            Response::StopAfterStep => self.is_asked.store(true, Ordering::Relaxed),
            Response::EndWhenSaved => {
                eprintln!("the run ends as soon as its steps are saved; one more signal ends it at once");
            }
            Response::EndNow => end(&heard, heard.released.unwrap_or("interrupted again, and ended at once")),
        }
    }
}

impl Heard {
    fn hear(&mut self, signal: i32, now: Instant) -> Response {
        let before = self.last.map(|(_, at)| at);
        if before.is_some_and(|at| now.saturating_duration_since(at) < ECHO) {
            return Response::GoOn;
        }
        self.last = Some((signal, now));
        if self.released.is_some() {
            return Response::EndNow;
        }
        if before.is_none() {
            return Response::StopAfterStep;
        }
        if self.ends_when_saved || self.is_saved() {
            return Response::EndNow;
        }
        self.ends_when_saved = true;
        Response::EndWhenSaved
    }

    fn is_saved(&self) -> bool {
        self.saves_under_way == 0 && self.steps_saved == self.steps
    }

    /// Ends a save, by which so many steps are saved. Returns whether the process waited for that to end.
    fn save_ended(&mut self, steps: Option<u64>) -> bool {
        self.saves_under_way -= 1;
        self.steps_saved = self.steps_saved.max(steps.unwrap_or(0));
        self.ends_when_saved && self.is_saved()
    }

    /// As shells number it.
    fn exit_code(&self) -> u8 {
        128 + self.last.map_or(0, |(signal, _)| signal as u8)
    }
}

/// Ends the process without telling its other threads, which may be in the middle of a step.
fn end(heard: &Heard, what: &str) {
    if stderr().is_terminal() {
        // The progress line has no end yet.
        eprintln!();
    }
    eprintln!("error: {what}\n  hint: the same command with --resume continues from the newest checkpoint");
    signal_hook::low_level::exit(heard.exit_code().into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use Response::{EndNow, EndWhenSaved, GoOn, StopAfterStep};

    const ONE: Duration = Duration::from_millis(1);

    #[test]
    fn signals_within_two_seconds_are_one_and_the_second_ends_at_once() {
        let cases: [&[(Duration, Response)]; 4] = [
            &[(Duration::ZERO, StopAfterStep), (Duration::ZERO, GoOn), (ECHO - ONE, GoOn), (ECHO, EndNow)],
            &[(Duration::ZERO, StopAfterStep), (ECHO, EndNow)],
            // An echo does not prolong the two seconds: a key pressed again and again is heard.
            &[(Duration::ZERO, StopAfterStep), (ECHO - ONE, GoOn), (ECHO + ONE, EndNow)],
            &[(100 * ECHO, StopAfterStep), (101 * ECHO - ONE, GoOn), (200 * ECHO, EndNow)],
        ];
        let start = Instant::now();
        for case in cases {
            let mut heard = Heard::default();
            for (after, response) in case {
                assert_eq!(heard.hear(SIGTERM, start + *after), *response, "{after:?} of {case:?}");
            }
        }
    }

    /// Two steps, the first of which is saved, and two signals.
    fn waiting(saves_under_way: usize, start: Instant) -> Heard {
        let mut heard = Heard { saves_under_way, steps: 2, steps_saved: 1, ..Heard::default() };
        assert_eq!(heard.hear(SIGINT, start), StopAfterStep);
        assert_eq!(heard.hear(SIGTERM, start + ECHO), EndWhenSaved);
        assert_eq!(heard.hear(SIGTERM, start + ECHO + ONE), GoOn, "an echo of the second");
        heard
    }

    #[test]
    fn the_second_signal_waits_until_every_step_is_saved_and_the_third_for_nothing() {
        let start = Instant::now();
        let mut heard = waiting(2, start);
        assert!(!heard.save_ended(Some(1)), "of an earlier step");
        assert!(heard.save_ended(Some(2)));
        assert_eq!(heard.exit_code(), 143);
        assert!(!waiting(1, start).save_ended(None), "a checkpoint that could not be written");
        assert_eq!(waiting(0, start).hear(SIGINT, start + 2 * ECHO), EndNow);
        let mut unhurried = Heard { saves_under_way: 1, steps: 1, ..Heard::default() };
        assert_eq!(unhurried.hear(SIGINT, start), StopAfterStep);
        assert!(!unhurried.save_ended(Some(1)));
    }

    #[test]
    fn a_signal_ends_a_process_that_has_nothing_left_to_save() {
        let mut heard = Heard { steps: 3, released: Some("the model is saved"), ..Heard::default() };
        assert_eq!(heard.hear(SIGINT, Instant::now()), EndNow);
    }
}
