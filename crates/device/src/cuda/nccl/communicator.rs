//! One GPU's end of an NCCL communicator.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::library::{BYTES, Config, IN_PROGRESS, NcclLibrary, RawCommunicator, RawId, SUCCESS};
use crate::Queue;
use crate::cuda::CudaError;
use crate::cuda::context::{Context, succeed};

/// How long dropping an end waits for transfers in flight.
const CLOSING: Duration = Duration::from_secs(10);

/// Identifies a communicator. One end creates it and gives it to the others.
#[derive(Clone, Copy)]
pub struct NcclId(RawId);

impl NcclId {
    pub fn new(library: &NcclLibrary) -> Result<NcclId, CudaError> {
        let mut id = RawId([0 as c_char; _]);
        // SAFETY: room for an id.
        match unsafe { (library.functions.get_unique_id)(&mut id) } {
            SUCCESS => Ok(NcclId(id)),
            result => Err(failure("beginning to connect GPUs", library, result, std::ptr::null_mut())),
        }
    }
}

/// A transfer from one GPU to another, or to all. `to`, `from` and `root` are indices of ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NcclTransfer {
    Send {
        address: u64,
        bytes: usize,
        to: usize,
    },
    Receive {
        address: u64,
        bytes: usize,
        from: usize,
    },
    /// Every end receives the root's bytes.
    Broadcast {
        address: u64,
        bytes: usize,
        root: usize,
    },
}

/// One GPU's end of a communicator of `members` GPUs, with working memory for its transfers. Dropping it waits for transfers in
/// flight, or aborts them after a failure.
pub struct NcclCommunicator {
    library: Arc<NcclLibrary>,
    context: Arc<Context>,
    /// `None` after it has been closed or aborted.
    raw: Mutex<Option<Handle>>,
    scratch: Scratch,
}

#[derive(Clone, Copy)]
struct Handle(RawCommunicator);

// SAFETY: NCCL's handles may be used from any thread, one at a time, which the lock around this sees to.
unsafe impl Send for Handle {}

impl NcclCommunicator {
    /// Begins to connect the GPU of `queue` with the others, which do the same. [`is_idle`](Self::is_idle) tells when that is
    /// done.
    pub fn begin(
        library: Arc<NcclLibrary>,
        queue: &Queue,
        id: NcclId,
        members: usize,
        me: usize,
        scratch_bytes: u64,
    ) -> Result<NcclCommunicator, CudaError> {
        let ordinal = queue.gpu().expect("only GPUs are connected by NCCL");
        let context = Context::of(ordinal, None)?;
        let scratch = Scratch::take(context.clone(), scratch_bytes)?;
        let mut raw = std::ptr::null_mut();
        let mut config = Config::that_does_not_block();
        // SAFETY: the GPU's context is current, which is how NCCL knows the GPU; the pointers are to variables of their types.
        let result = unsafe { (library.functions.init)(&mut raw, members as c_int, id.0, me as c_int, &mut config) };
        if !matches!(result, SUCCESS | IN_PROGRESS) {
            return Err(failure(&format!("connecting GPU {ordinal}"), &library, result, std::ptr::null_mut()));
        }
        Ok(NcclCommunicator { library, context, raw: Mutex::new(Some(Handle(raw))), scratch })
    }

    /// The address and the size of the working memory.
    pub fn scratch(&self) -> (u64, u64) {
        (self.scratch.address, self.scratch.bytes)
    }

    /// Whether NCCL has finished the host's part of the last request: the GPUs are connected, or transfers are on their stream.
    /// An error is NCCL's, of that request or since, such as a lost GPU or link.
    pub fn is_idle(&self) -> Result<bool, String> {
        let held = self.lock();
        let Some(Handle(raw)) = *held else { return Err("it was ended".to_owned()) };
        let mut told = SUCCESS;
        // SAFETY: a live communicator.
        let asked = unsafe { (self.library.functions.async_error)(raw, &mut told) };
        match if asked == SUCCESS { told } else { asked } {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            result => Err(self.library.words(result, raw)),
        }
    }

    /// Issues transfers, which run together and in the stream's order. Panics with NCCL's message.
    ///
    /// # Safety
    /// As for [`Queue::transfer`].
    pub(crate) unsafe fn issue(&self, stream: sys::CUstream, transfers: &[NcclTransfer]) {
        let held = self.lock();
        let Some(Handle(raw)) = *held else { panic!("transfers over a closed communicator") };
        let functions = &self.library.functions;
        // SAFETY: a live communicator, which is idle; the caller's promise.
        let result = unsafe {
            let mut result = (functions.group_start)();
            for transfer in transfers {
                let issued = match *transfer {
                    NcclTransfer::Send { address, bytes, to } => {
                        (functions.send)(address as *const c_void, bytes, BYTES, to as c_int, raw, stream)
                    }
                    NcclTransfer::Receive { address, bytes, from } => {
                        (functions.receive)(address as *mut c_void, bytes, BYTES, from as c_int, raw, stream)
                    }
                    NcclTransfer::Broadcast { address, bytes, root } => {
                        let (from, to) = (address as *const c_void, address as *mut c_void);
                        (functions.broadcast)(from, to, bytes, BYTES, root as c_int, raw, stream)
                    }
                };
                result = if issued == SUCCESS { result } else { issued };
            }
            let ended = (functions.group_end)();
            if matches!(result, SUCCESS | IN_PROGRESS) { ended } else { result }
        };
        if !matches!(result, SUCCESS | IN_PROGRESS) {
            panic!("moving bytes between GPUs: {}", self.library.words(result, raw));
        }
    }

    /// Aborts transfers in flight on this GPU: kernels that wait for other GPUs return without their data. It returns when the
    /// GPU is idle.
    pub fn abort(&self) {
        // Taken out first, so that other threads neither use it nor wait for NCCL.
        let taken = self.lock().take();
        if let Some(Handle(raw)) = taken {
            let _ = self.context.make_current();
            // SAFETY: a live communicator that nobody has any more.
            let _ = unsafe { (self.library.functions.abort)(raw) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        self.raw.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        // A communicator that is still connecting, or whose other ends are gone, cannot be closed in order.
        if self.is_idle() != Ok(true) {
            return self.abort();
        }
        let Some(Handle(raw)) = self.lock().take() else { return };
        let _ = self.context.make_current();
        let functions = &self.library.functions;
        // SAFETY: a live communicator that nobody has any more.
        unsafe {
            let begun = (functions.finalize)(raw);
            let mut told = begun;
            let since = Instant::now();
            while told == IN_PROGRESS && since.elapsed() < CLOSING {
                std::thread::sleep(Duration::from_micros(100));
                let asked = (functions.async_error)(raw, &mut told);
                told = if asked == SUCCESS { told } else { asked };
            }
            let _ = if told == SUCCESS { (functions.destroy)(raw) } else { (functions.abort)(raw) };
        }
    }
}

fn failure(what: &str, library: &NcclLibrary, result: c_int, raw: RawCommunicator) -> CudaError {
    CudaError::Call { what: what.to_owned(), error: library.words(result, raw) }
}

/// Memory of the GPU that other GPUs can write to; they cannot reach a stream's pool.
struct Scratch {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
}

impl Scratch {
    /// The context is current.
    fn take(context: Arc<Context>, bytes: u64) -> Result<Scratch, CudaError> {
        let mut address = 0;
        // SAFETY: the context is current.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1) as usize) };
        succeed("taking working memory for transfers between GPUs", result)?;
        Ok(Scratch { context, address, bytes })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: freeing waits for the GPU, so nothing uses it any more: what did was issued before.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}
