//! The queues of a CUDA device: the host issues to two streams, and checks for failures at every call.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::sys;

use super::context::{Context, succeed};
use super::error::{CudaError, describe, must};
use super::event::{Clock, Moment, SharedEvent};
use super::modules::Defect;
use super::nccl::{NcclCommunicator, NcclTransfer};
use super::options::CudaOptions;
use super::part::GreenContext;
use super::peer;
use super::replay::Replays;
use super::staging::Staging;
use super::stream::Stream;
use crate::kernel::Kernel;
use crate::queue::{Backend, Event, Health, HostData, KernelTime, Lane, Point, Stamp, kernel_panic};
use crate::{PeerWork, View};

/// Memory left free beside the largest arena: for working memory of products and attention, and compiled kernels.
const LEAST_SPARE_BYTES: u64 = 3 << 29;

pub(crate) struct CudaBackend {
    // The streams end before the memory that their kernels use.
    lanes: [Mutex<LaneState>; Lane::ALL.len()],
    ordinal: usize,
    clock: Arc<Clock>,
    /// Kernels write to it as long as the streams live.
    _defects: Arc<DefectWord>,
    memory: DeviceMemory,
    context: Arc<Context>,
    health: Health,
    measuring: AtomicBool,
    times: Mutex<Vec<(Kernel, SharedEvent, SharedEvent)>>,
}

struct LaneState {
    stream: Stream,
    staging: Staging,
}

impl CudaBackend {
    pub fn start(options: &CudaOptions) -> Result<CudaBackend, CudaError> {
        let context = Context::of(options.ordinal, options.cache.clone())?;
        let defects = Arc::new(DefectWord::new(context.clone())?);
        let part = match &options.part {
            Some(part) => Some(Arc::new(GreenContext::new(context.clone(), part)?)),
            None => None,
        };
        let memory = DeviceMemory::take(context.clone(), options.memory_bytes)?;
        let lane = || -> Result<Mutex<LaneState>, CudaError> {
            let stream = Stream::new(context.clone(), part.clone(), defects.on_device, options.graph)?;
            Ok(Mutex::new(LaneState { stream, staging: Staging::new(context.clone()) }))
        };
        let lanes = [lane()?, lane()?, lane()?];
        let raw = lock(&lanes[0]).stream.raw();
        Ok(CudaBackend {
            lanes,
            ordinal: options.ordinal,
            clock: Arc::new(Clock::start(context.events(true), raw)),
            health: Health::watching(defects.clone()),
            _defects: defects,
            memory,
            context,
            measuring: AtomicBool::new(false),
            times: Mutex::new(Vec::new()),
        })
    }

    pub fn base_address(&self) -> u64 {
        self.memory.address
    }

    pub fn memory_bytes(&self) -> u64 {
        self.memory.bytes
    }

    pub fn measure_kernels(&self, on: bool) {
        self.measuring.store(on, Ordering::Release);
    }

    /// Everything measured must have run.
    pub fn take_kernel_times(&self) -> Vec<KernelTime> {
        let times = std::mem::take(&mut *lock(&self.times));
        let measured = times.into_iter().map(|(kernel, start, end)| {
            let duration = end.duration_since(&start).unwrap_or_default();
            KernelTime { kernel, duration }
        });
        measured.collect()
    }

    pub fn turn_replay(&self, on: bool) {
        for lane in Lane::ALL {
            self.issue(lane, |state| state.stream.turn_replay(on));
        }
    }

    pub fn replays(&self) -> Replays {
        let mut replays = Replays::default();
        self.lanes.iter().for_each(|lane| replays.add(lock(lane).stream.replays()));
        replays
    }

    /// Panics with the device's failure, if there is one.
    fn check(&self) {
        if let Some(message) = self.health.failure() {
            // The failure's message was printed; the panic hook would print it again.
            resume_unwind(Box::new(message.to_owned()));
        }
    }

    /// Runs `work` on a queue; a panic in it fails the device.
    fn issue<R>(&self, lane: Lane, work: impl FnOnce(&mut LaneState) -> R) -> R {
        self.check();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            self.context.make_current().unwrap_or_else(|error| panic!("{error}"));
            work(&mut lock(&self.lanes[lane as usize]))
        }));
        outcome.unwrap_or_else(|panic| {
            self.health.fail(kernel_panic(&*panic));
            resume_unwind(Box::new(self.health.failure().unwrap_or_default().to_owned()))
        })
    }
}

impl Backend for CudaBackend {
    fn launch(&self, lane: Lane, kernel: Kernel) {
        let measured = lane == Lane::Compute && self.measuring.load(Ordering::Acquire);
        self.issue(lane, |state| {
            if !measured {
                return kernel.run_on_cuda(&mut state.stream);
            }
            let events = self.context.events(true);
            let start = SharedEvent::record(events, state.stream.raw());
            kernel.run_on_cuda(&mut state.stream);
            let end = SharedEvent::record(events, state.stream.raw());
            lock(&self.times).push((kernel, start, end));
        });
    }

    fn record(&self, lane: Lane) -> Event {
        let event = self.issue(lane, |state| SharedEvent::record(self.context.events(false), state.stream.raw()));
        Event(Point::Cuda(event))
    }

    fn wait(&self, lane: Lane, event: &Event) {
        let Point::Cuda(event) = &event.0 else { panic!("a CUDA queue cannot wait for a CPU's event") };
        self.issue(lane, |state| {
            // SAFETY: the event was recorded and lives; the stream lives.
            let result = unsafe { sys::cuStreamWaitEvent(state.stream.raw(), event.raw(), 0) };
            must("waiting for an event", result);
        });
    }

    fn upload(&self, lane: Lane, view: View, data: HostData) {
        self.issue(lane, |state| state.staging.upload(state.stream.raw(), view, &data));
    }

    fn download(&self, lane: Lane, view: View) -> HostData {
        let data = self.issue(lane, |state| state.staging.download(state.stream.raw(), view));
        // An empty view waits for nothing by itself.
        if view.is_empty() {
            self.finish(lane);
        }
        self.check();
        data
    }

    fn stamp(&self, lane: Lane, stamp: Stamp) {
        let event = self.issue(lane, |state| SharedEvent::record(self.context.events(true), state.stream.raw()));
        stamp.set_later(Moment::new(self.clock.clone(), event));
    }

    fn submit(&self, lane: Lane) {
        self.issue(lane, |state| {
            state.stream.raw();
        });
    }

    fn call(&self, lane: Lane, work: Box<dyn FnOnce() + Send>) {
        self.issue(lane, |state| {
            let stream = state.stream.raw();
            let call = Box::into_raw(Box::new(HostCall { work, health: self.health.clone() }));
            // SAFETY: the call is the function's, which takes it back once.
            let result = unsafe { sys::cuLaunchHostFunc(stream, Some(run_host_call), call.cast()) };
            if result != sys::CUresult::CUDA_SUCCESS {
                // SAFETY: it was not taken, so it is still ours.
                drop(unsafe { Box::from_raw(call) });
            }
            must("calling the host", result);
        });
    }

    fn finish(&self, lane: Lane) {
        let stream = self.issue(lane, |state| state.stream.raw());
        // Without the queue's lock, so that others can issue meanwhile.
        // SAFETY: the stream lives as long as the device.
        let result = unsafe { sys::cuStreamSynchronize(stream) };
        if result != sys::CUresult::CUDA_SUCCESS {
            self.health.fail(format!("waiting for {}: {}", self.context.properties().name, describe(result)));
        }
        self.check();
    }

    fn health(&self) -> Health {
        self.health.clone()
    }

    fn gpu(&self) -> Option<usize> {
        Some(self.ordinal)
    }

    unsafe fn peer(&self, lane: Lane, work: PeerWork<'_>) {
        // SAFETY: the caller's promise.
        self.issue(lane, |state| unsafe { peer::run(work, &mut state.stream) });
    }

    unsafe fn transfer(&self, lane: Lane, way: &NcclCommunicator, transfers: &[NcclTransfer]) {
        // SAFETY: the caller's promise.
        self.issue(lane, |state| unsafe { way.issue(state.stream.raw(), transfers) });
    }
}

struct HostCall {
    work: Box<dyn FnOnce() + Send>,
    health: Health,
}

/// # Safety
/// `call` is a [`HostCall`] of its own.
unsafe extern "C" fn run_host_call(call: *mut c_void) {
    // SAFETY: the caller's promise.
    let HostCall { work, health } = *unsafe { Box::from_raw(call.cast::<HostCall>()) };
    if health.failure().is_some() {
        return;
    }
    if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
        health.fail(kernel_panic(&*panic));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under a queue's lock fails the device, after which nothing is issued.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The arena's memory.
struct DeviceMemory {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
}

/// A GPU's memory for arenas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaMemory {
    /// The GPU's name.
    pub name: String,
    pub free_bytes: u64,
    pub total_bytes: u64,
}

impl CudaMemory {
    /// The arena of each of `devices` that share the GPU. Each also has its own working memory.
    pub fn arena_bytes_of(&self, devices: usize) -> u64 {
        let devices = devices.max(1) as u64;
        let spare_bytes = (devices * LEAST_SPARE_BYTES).max(self.total_bytes / 20);
        self.free_bytes.saturating_sub(spare_bytes) / devices
    }
}

/// Opens a GPU for this process and reads its memory.
pub fn cuda_memory(ordinal: usize) -> Result<CudaMemory, CudaError> {
    let context = Context::of(ordinal, None)?;
    memory_of(&context)
}

/// The context is current.
fn memory_of(context: &Context) -> Result<CudaMemory, CudaError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the context is current.
    succeed("asking for free memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
    let (free_bytes, total_bytes) = (free as u64, total as u64);
    Ok(CudaMemory { name: context.properties().name.clone(), free_bytes, total_bytes })
}

impl DeviceMemory {
    fn take(context: Arc<Context>, wanted: Option<u64>) -> Result<DeviceMemory, CudaError> {
        let memory = memory_of(&context)?;
        let planned_bytes = wanted.unwrap_or(memory.arena_bytes_of(1)).max(1);
        let CudaMemory { free_bytes, total_bytes, .. } = memory;
        let short = CudaError::ShortOfMemory { planned_bytes, free_bytes, total_bytes };
        if planned_bytes > free_bytes {
            return Err(short);
        }
        let mut address = 0;
        // SAFETY: as above.
        match unsafe { sys::cuMemAlloc_v2(&mut address, planned_bytes as usize) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(short),
            result => succeed("taking the arena's memory", result).map(|()| DeviceMemory {
                context,
                address,
                bytes: planned_bytes,
            }),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: the streams that used it have ended. Others on the GPU may have begun to use it for a collective that this
        // device gave up; freeing waits for them. (cuCtxSynchronize would break the graphs that other ranks capture meanwhile, and
        // has crashed.)
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// A word of the host's memory that kernels write defects of their operands to.
pub(crate) struct DefectWord {
    context: Arc<Context>,
    on_host: *mut u64,
    on_device: u64,
}

// SAFETY: one word of memory, read atomically.
unsafe impl Send for DefectWord {}
// SAFETY: as above.
unsafe impl Sync for DefectWord {}

impl DefectWord {
    fn new(context: Arc<Context>) -> Result<DefectWord, CudaError> {
        let mut memory = std::ptr::null_mut();
        let mut on_device = 0;
        // SAFETY: the context is current.
        unsafe {
            let taken = sys::cuMemHostAlloc(&mut memory, size_of::<u64>(), sys::CU_MEMHOSTALLOC_DEVICEMAP);
            succeed("taking pinned memory", taken)?;
            let on_host = memory.cast::<u64>();
            on_host.write(0);
            let mapped = sys::cuMemHostGetDevicePointer_v2(&mut on_device, memory, 0);
            succeed("mapping pinned memory", mapped)?;
            Ok(DefectWord { context, on_host, on_device })
        }
    }

    pub fn read(&self) -> Option<Defect> {
        // SAFETY: aligned memory that lives as long as this; kernels write it as a whole.
        Defect::decode(unsafe { self.on_host.read_volatile() })
    }
}

impl std::fmt::Debug for DefectWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DefectWord({:?})", self.read())
    }
}

impl Drop for DefectWord {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: the streams whose kernels write it have ended.
        let _ = unsafe { sys::cuMemFreeHost(self.on_host.cast()) };
    }
}
