//! In-order queues and the events between them.
//!
//! The host issues work and continues; a queue runs it in the order of issue. On a CPU a queue is a named thread, on a GPU it
//! is a stream. Memory is placed and freed in issue order (see `arena`), so freeing a tensor that one queue still uses and
//! handing its bytes to another queue needs an event between them.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::arena::Arena;
use crate::kernel::{Fill, Kernel};
use crate::{DType, Extent, NcclCommunicator, NcclTransfer, PeerWork, Tensor, View};

/// Which of a device's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Compute,
    Comm,
    Pass,
}

impl Lane {
    pub const ALL: [Lane; 3] = [Lane::Compute, Lane::Comm, Lane::Pass];
}

/// A device's implementation of its queues. All methods but `finish` and `download` return at once.
pub(crate) trait Backend: Send + Sync {
    fn launch(&self, lane: Lane, kernel: Kernel);
    fn record(&self, lane: Lane) -> Event;
    fn wait(&self, lane: Lane, event: &Event);
    /// Writes `data`, row by row, to `view`.
    fn upload(&self, lane: Lane, view: View, data: HostData);
    /// Reads `view` once everything issued before has run.
    fn download(&self, lane: Lane, view: View) -> HostData;
    /// Sets `stamp` when everything issued before has run.
    fn stamp(&self, lane: Lane, stamp: Stamp);
    /// Starts work that the device holds back.
    fn submit(&self, _lane: Lane) {}
    /// Runs `work` on the host, in the queue's order.
    fn call(&self, lane: Lane, work: Box<dyn FnOnce() + Send>);
    /// Blocks until everything issued so far has run.
    fn finish(&self, lane: Lane);
    fn health(&self) -> Health;
    /// Whether what is written to it can be read again.
    fn keeps_values(&self) -> bool {
        true
    }
    /// The GPU's number; `None` on a CPU.
    fn gpu(&self) -> Option<usize> {
        None
    }
    /// Works on the memory of several devices, in the queue's order.
    ///
    /// # Safety
    /// As for [`PeerWork::run`], from when the queue reaches it until it is done.
    unsafe fn peer(&self, lane: Lane, work: PeerWork<'_>) {
        match work {
            PeerWork::Sum { dtype, sources, destinations, len } => {
                let (sources, destinations) = (sources.to_vec(), destinations.to_vec());
                self.call(
                    lane,
                    Box::new(move || {
                        // SAFETY: the caller's promise.
                        unsafe { PeerWork::Sum { dtype, sources: &sources, destinations: &destinations, len }.run() }
                    }),
                );
            }
            PeerWork::Copy { from, to, rows, row_bytes, from_step, to_step } => {
                // SAFETY: the caller's promise.
                let copy = move || unsafe { PeerWork::Copy { from, to, rows, row_bytes, from_step, to_step }.run() };
                self.call(lane, Box::new(copy));
            }
        }
    }
    /// Moves bytes between GPUs, in the queue's order.
    ///
    /// # Safety
    /// As for [`Queue::transfer`].
    unsafe fn transfer(&self, _lane: Lane, _way: &NcclCommunicator, _transfers: &[NcclTransfer]) {
        panic!("NCCL moves bytes between GPUs only");
    }
}

/// Tells whether a device still runs its work. It keeps alive a GPU's context and the word that its kernels report to, but no
/// queue and no other memory.
#[derive(Clone, Debug, Default)]
pub struct Health {
    told: Arc<OnceLock<String>>,
    /// A GPU's kernels report defects of their operands here.
    defects: Option<Arc<crate::cuda::DefectWord>>,
}

impl Health {
    pub(crate) fn watching(defects: Arc<crate::cuda::DefectWord>) -> Health {
        Health { told: Arc::default(), defects: Some(defects) }
    }

    /// The message of the first kernel or call that panicked. Nothing runs on the device after that.
    pub fn failure(&self) -> Option<&str> {
        if self.told.get().is_none()
            && let Some(defect) = self.defects.as_ref().and_then(|word| word.read())
        {
            self.fail(defect.to_string());
        }
        self.told.get().map(String::as_str)
    }

    /// The first message stays.
    pub(crate) fn fail(&self, message: String) {
        let _ = self.told.set(message);
    }
}

/// Rows of numbers on their way between host and device.
#[derive(Debug)]
pub(crate) enum HostData {
    Floats(Vec<f32>),
    Indices(Vec<u32>),
}

impl HostData {
    pub fn bytes(&self) -> u64 {
        let elements = match self {
            HostData::Floats(values) => values.len(),
            HostData::Indices(values) => values.len(),
        };
        4 * elements as u64
    }
}

/// A point in a queue's work that another queue can wait for.
#[derive(Clone, Debug)]
pub struct Event(pub(crate) Point);

impl Event {
    /// Whether all work before this point has run.
    pub fn is_reached(&self) -> bool {
        match &self.0 {
            Point::Cpu(flag) => flag.is_up(),
            Point::Cuda(event) => event.is_reached(),
        }
    }
}

/// A point by kind of device.
#[derive(Clone, Debug)]
pub(crate) enum Point {
    Cpu(Arc<crate::cpu::Flag>),
    Cuda(crate::cuda::SharedEvent),
}

/// A moment that becomes known when it is reached.
#[derive(Clone, Debug, Default)]
pub struct Stamp(Arc<StampState>);

#[derive(Debug, Default)]
struct StampState {
    known: OnceLock<Instant>,
    /// The device's own record of the moment, read on request.
    moment: OnceLock<crate::cuda::Moment>,
}

impl Stamp {
    pub fn get(&self) -> Option<Instant> {
        self.0.known.get().copied().or_else(|| self.0.moment.get()?.resolve(&self.0.known))
    }

    /// The first moment stays.
    pub fn set(&self, moment: Instant) {
        let _ = self.0.known.set(moment);
    }

    /// Sets the moment when a GPU reaches a point of its work.
    pub(crate) fn set_later(&self, moment: crate::cuda::Moment) {
        let _ = self.0.moment.set(moment);
    }
}

/// The message of a panic, if it has one.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> Option<&str> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
}

/// The message of a kernel's panic.
pub(crate) fn kernel_panic(panic: &(dyn std::any::Any + Send)) -> String {
    panic_message(panic).unwrap_or("a kernel panicked").to_owned()
}

/// One kernel's time, measured by the device.
#[derive(Clone, Debug)]
pub struct KernelTime {
    pub kernel: Kernel,
    pub duration: Duration,
}

/// A handle to one of a device's queues. Clones issue to the same queue.
#[derive(Clone)]
pub struct Queue {
    backend: Arc<dyn Backend>,
    arena: Arena,
    lane: Lane,
}

/// Rows of a tensor with room behind them begin at multiples of this many elements: a cache line of a GPU in bf16.
const STRIDE_GRAIN: usize = 64;

/// Uploads take pieces of about this size, so loading a large tensor stages little.
const UPLOAD_CHUNK_ELEMENTS: usize = 1 << 18;

impl Queue {
    pub(crate) fn new(backend: Arc<dyn Backend>, arena: Arena, lane: Lane) -> Queue {
        Queue { backend, arena, lane }
    }

    /// Issues a kernel. Panics if its operands do not fit together, or if an earlier kernel failed.
    pub fn launch(&self, kernel: impl Into<Kernel>) {
        let kernel = kernel.into();
        kernel.operation().check();
        if !kernel.is_idle() {
            self.backend.launch(self.lane, kernel);
        }
    }

    /// A tensor whose contents are whatever was there before. Panics with [`OutOfMemory`](crate::OutOfMemory)'s message
    /// when the arena is full; a dry run tells beforehand how much a program needs.
    pub fn tensor(&self, rows: usize, cols: usize, dtype: DType) -> Tensor {
        self.tensor_with_room(rows, cols, 0, dtype)
    }

    /// The same with room for more columns behind the last one: see [`Tensor::room`].
    pub fn tensor_with_room(&self, rows: usize, cols: usize, room: usize, dtype: DType) -> Tensor {
        let stride = if room == 0 { cols } else { (cols + room).next_multiple_of(STRIDE_GRAIN) };
        let bytes = (rows as u64).checked_mul(stride as u64).and_then(|len| len.checked_mul(dtype.size_bytes() as u64));
        let bytes = bytes.expect("a tensor's size fits 64 bits");
        let block = self.arena.place(bytes).unwrap_or_else(|error| panic!("{error}"));
        Tensor::new(Arc::new(block), Extent { rows, cols, stride, dtype })
    }

    pub fn zeros(&self, rows: usize, cols: usize, dtype: DType) -> Tensor {
        let tensor = self.tensor(rows, cols, dtype);
        self.launch(Fill { out: tensor.view(), value: 0.0 });
        tensor
    }

    /// A u32 vector.
    pub fn indices(&self, indices: &[u32]) -> Tensor {
        let tensor = self.tensor(1, indices.len(), DType::U32);
        self.write_indices(&tensor, indices);
        tensor
    }

    /// Like [`Queue::indices`], for `count` values; asks for them only if the backend keeps values.
    pub fn indices_by(&self, count: usize, indices: impl FnOnce() -> Vec<u32>) -> Tensor {
        if self.backend.keeps_values() { self.indices(&indices()) } else { self.tensor(1, count, DType::U32) }
    }

    /// Overwrites a u32 tensor, row after row.
    pub fn write_indices(&self, view: impl Into<View>, indices: &[u32]) {
        let view = view.into();
        assert_eq!((view.dtype, view.len()), (DType::U32, indices.len()), "indices for {:?}", view.shape());
        if self.backend.keeps_values() {
            self.backend.upload(self.lane, view, HostData::Indices(indices.to_vec()));
        }
    }

    /// A tensor with the given rows in it, rounded to `dtype`.
    pub fn floats(&self, rows: usize, cols: usize, dtype: DType, values: &[f32]) -> Tensor {
        assert_eq!(values.len(), rows * cols, "{} values for {:?}", values.len(), [rows, cols]);
        let tensor = self.tensor(rows, cols, dtype);
        self.backend.upload(self.lane, tensor.view(), HostData::Floats(values.to_vec()));
        tensor
    }

    /// Fills a tensor from the host, a few rows at a time: `fill(first_row, rows)` writes whole rows one after another. A dry device
    /// asks for none.
    pub fn write_rows<E>(
        &self,
        view: impl Into<View>,
        mut fill: impl FnMut(usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let view = view.into();
        if !self.backend.keeps_values() {
            return Ok(());
        }
        let rows_per_chunk = (UPLOAD_CHUNK_ELEMENTS / view.cols.max(1)).max(1);
        for first in (0..view.rows).step_by(rows_per_chunk) {
            let rows = rows_per_chunk.min(view.rows - first);
            let mut chunk = vec![0.0; rows * view.cols];
            fill(first, &mut chunk)?;
            self.backend.upload(self.lane, view.row_range(first..first + rows), HostData::Floats(chunk));
        }
        Ok(())
    }

    /// The tensor's values, row after row, once everything issued before has run.
    pub fn read(&self, view: impl Into<View>) -> Vec<f32> {
        match self.backend.download(self.lane, view.into()) {
            HostData::Floats(values) => values,
            HostData::Indices(_) => panic!("read of a tensor of indices"),
        }
    }

    /// The sum of a tensor's numbers. A dry device has none to add up.
    pub fn read_sum(&self, view: impl Into<View>) -> f64 {
        if self.backend.keeps_values() { self.read(view).into_iter().map(f64::from).sum() } else { 0.0 }
    }

    /// Like [`Queue::read`], for a tensor of indices.
    pub fn read_indices(&self, view: impl Into<View>) -> Vec<u32> {
        match self.backend.download(self.lane, view.into()) {
            HostData::Indices(values) => values,
            HostData::Floats(_) => panic!("read of a tensor of numbers as indices"),
        }
    }

    /// A point behind everything issued so far.
    pub fn record(&self) -> Event {
        self.backend.record(self.lane)
    }

    /// Everything issued from here on runs after `event`.
    pub fn wait(&self, event: &Event) {
        self.backend.wait(self.lane, event);
    }

    /// The moment when everything issued so far has run. A dry device has no moments.
    pub fn stamp(&self) -> Stamp {
        let stamp = Stamp::default();
        self.backend.stamp(self.lane, stamp.clone());
        stamp
    }

    /// Starts everything issued so far. A device may hold work back to issue it together. Waiting for work also starts it, so
    /// callers need this only before they turn to other things.
    pub fn submit(&self) {
        self.backend.submit(self.lane);
    }

    /// Runs host code in the queue's order, like a kernel. A panic in it fails the device with its message. A failed or dry
    /// device drops `work` without running it.
    pub fn call(&self, work: impl FnOnce() + Send + 'static) {
        self.backend.call(self.lane, Box::new(work));
    }

    /// The GPU's number; `None` on a CPU.
    pub fn gpu(&self) -> Option<usize> {
        self.backend.gpu()
    }

    /// Works on the memory of several devices, in the queue's order; on a GPU, of devices on the same GPU.
    ///
    /// # Safety
    /// As for [`PeerWork::run`], from when the queue reaches it until it is done.
    pub unsafe fn peer(&self, work: PeerWork<'_>) {
        if !work.is_idle() {
            // SAFETY: the caller's promise.
            unsafe { self.backend.peer(self.lane, work) };
        }
    }

    /// Moves bytes between this queue's GPU and others, all transfers at once, in the queue's order. NCCL may still be issuing
    /// them when this returns: callers issue nothing to this queue and nothing else over this communicator before
    /// [`NcclCommunicator::is_idle`].
    ///
    /// # Safety
    /// Sources are readable and destinations writable, in the GPU's memory, from when the queue reaches them until they are
    /// done, and no one else accesses them meanwhile. The other ends issue the matching transfers.
    pub unsafe fn transfer(&self, way: &NcclCommunicator, transfers: &[NcclTransfer]) {
        if !transfers.is_empty() {
            // SAFETY: the caller's promise.
            unsafe { self.backend.transfer(self.lane, way, transfers) };
        }
    }

    pub fn health(&self) -> Health {
        self.backend.health()
    }

    /// Blocks until everything issued so far has run. Panics if a kernel failed.
    pub fn finish(&self) {
        self.backend.finish(self.lane);
    }
}
