//! Events: points in a stream's work, with or without a time.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::error::must;

/// Unused events of one kind.
pub(crate) struct EventPool {
    context: sys::CUcontext,
    timed: bool,
    idle: Mutex<Vec<sys::CUevent>>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for EventPool {}
// SAFETY: as above; the list is behind a lock.
unsafe impl Sync for EventPool {}

impl EventPool {
    pub fn new(context: sys::CUcontext, timed: bool) -> Arc<EventPool> {
        Arc::new(EventPool { context, timed, idle: Mutex::new(Vec::new()) })
    }

    fn take(&self) -> sys::CUevent {
        if let Some(event) = self.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).pop() {
            return event;
        }
        use sys::CUevent_flags_enum::{CU_EVENT_DEFAULT, CU_EVENT_DISABLE_TIMING};
        let flags = if self.timed { CU_EVENT_DEFAULT } else { CU_EVENT_DISABLE_TIMING };
        let mut event = std::ptr::null_mut();
        // SAFETY: the context is current wherever events are recorded.
        must("creating an event", unsafe { sys::cuEventCreate(&mut event, flags as u32) });
        event
    }
}

/// A recorded point. The last handle returns it to its pool, so a waiter waits for this record and not for a later one.
#[derive(Clone)]
pub(crate) struct SharedEvent(Arc<Recorded>);

struct Recorded {
    event: sys::CUevent,
    pool: Arc<EventPool>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.pool.idle.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(self.event);
    }
}

impl std::fmt::Debug for SharedEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedEvent({:?})", self.0.event)
    }
}

impl SharedEvent {
    /// A point behind everything that was issued to the stream.
    pub fn record(pool: &Arc<EventPool>, stream: sys::CUstream) -> SharedEvent {
        let event = SharedEvent(Arc::new(Recorded { event: pool.take(), pool: pool.clone() }));
        // SAFETY: the event is this one's alone, and the stream lives.
        must("recording an event", unsafe { sys::cuEventRecord(event.0.event, stream) });
        event
    }

    pub fn raw(&self) -> sys::CUevent {
        self.0.event
    }

    /// Whether the point was reached.
    pub fn is_reached(&self) -> bool {
        // SAFETY: the event was recorded; the context is made current for threads that only look.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.0.pool.context);
            sys::cuEventQuery(self.0.event) == sys::CUresult::CUDA_SUCCESS
        }
    }

    pub fn wait(&self) {
        // SAFETY: the event was recorded.
        must("waiting for an event", unsafe { sys::cuEventSynchronize(self.0.event) });
    }

    /// Milliseconds from `start` to this point; none if either was not reached.
    fn milliseconds_since(&self, start: &SharedEvent) -> Option<f64> {
        let mut milliseconds = 0f32;
        // SAFETY: both events were recorded, with times.
        let result = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, start.0.event, self.0.event) };
        (result == sys::CUresult::CUDA_SUCCESS).then_some(milliseconds as f64)
    }

    pub fn duration_since(&self, start: &SharedEvent) -> Option<Duration> {
        Some(Duration::from_secs_f64(self.milliseconds_since(start)?.max(0.0) / 1e3))
    }
}

/// Turns points of a GPU's work into moments of the host's clock.
pub(crate) struct Clock {
    base: Mutex<(SharedEvent, Instant)>,
}

/// The driver reports times in f32 milliseconds. After this many the clock takes a new base, so that they stay exact to a
/// microsecond.
const REBASE_MILLISECONDS: f64 = 2000.0;

impl Clock {
    /// Waits for the stream once.
    pub fn start(pool: &Arc<EventPool>, stream: sys::CUstream) -> Clock {
        let event = SharedEvent::record(pool, stream);
        event.wait();
        Clock { base: Mutex::new((event, Instant::now())) }
    }

    fn moment_of(&self, event: &SharedEvent) -> Option<Instant> {
        if !event.is_reached() {
            return None;
        }
        let mut base = self.base.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let milliseconds = event.milliseconds_since(&base.0)?;
        let distance = Duration::from_secs_f64(milliseconds.abs() / 1e3);
        let moment = if milliseconds < 0.0 { base.1.checked_sub(distance)? } else { base.1 + distance };
        if milliseconds > REBASE_MILLISECONDS {
            *base = (event.clone(), moment);
        }
        Some(moment)
    }
}

/// A moment of a GPU's work, looked up on request.
#[derive(Clone)]
pub(crate) struct Moment {
    clock: Arc<Clock>,
    event: SharedEvent,
}

impl std::fmt::Debug for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Moment({:?})", self.event)
    }
}

impl Moment {
    pub fn new(clock: Arc<Clock>, event: SharedEvent) -> Moment {
        Moment { clock, event }
    }

    pub fn resolve(&self, known: &OnceLock<Instant>) -> Option<Instant> {
        if let Some(moment) = self.clock.moment_of(&self.event) {
            let _ = known.set(moment);
        }
        known.get().copied()
    }
}
