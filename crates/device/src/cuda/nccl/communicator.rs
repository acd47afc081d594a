//! One card's end of a way between several cards.

use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::library::{BYTES, Config, IN_PROGRESS, NcclLibrary, RawCommunicator, RawId, SUCCESS};
use crate::Queue;
use crate::cuda::CudaError;
use crate::cuda::context::{Context, succeed};

/// How long an end that is let go of waits for what is on its way.
const CLOSING: Duration = Duration::from_secs(10);

/// By what the ends of a way find one another. One of them asks for it and tells the others.
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

/// Bytes that go from one card to another, or to all. `to`, `from` and `root` are places among the ends.
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
    /// The root's bytes come to everybody's.
    Broadcast {
        address: u64,
        bytes: usize,
        root: usize,
    },
}

/// One card's end of a way between `members` cards, and working memory for what is moved over it. Dropping it waits for what is
/// on its way, or ends that after a failure.
pub struct NcclCommunicator {
    library: Arc<NcclLibrary>,
    context: Arc<Context>,
    /// None once it has been ended.
    raw: Mutex<Option<Handle>>,
    scratch: Scratch,
}

#[derive(Clone, Copy)]
struct Handle(RawCommunicator);

// SAFETY: NCCL's handles may be used from any thread, one at a time, which the lock around this sees to.
unsafe impl Send for Handle {}

impl NcclCommunicator {
    /// Begins to connect the card of `queue` with the others, which do the same. [`is_idle`](Self::is_idle) says when it is done.
    pub fn begin(
        library: Arc<NcclLibrary>,
        queue: &Queue,
        id: NcclId,
        members: usize,
        me: usize,
        scratch_bytes: u64,
    ) -> Result<NcclCommunicator, CudaError> {
        let ordinal = queue.card().expect("only cards are connected by NCCL");
        let context = Context::of(ordinal, None)?;
        let scratch = Scratch::take(context.clone(), scratch_bytes)?;
        let (mut raw, mut config) = (std::ptr::null_mut(), Config::that_does_not_block());
        // SAFETY: the card's context is current, which is how NCCL knows the card; the pointers are to variables of their types.
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

    /// Whether NCCL has done what it was asked last, as far as the host is concerned: the cards are connected, or transfers are on
    /// their stream. An error is NCCL's, of then or since: a card or a link that was lost.
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

    /// Issues transfers, which run at once and in the stream's order. Panics with NCCL's words.
    ///
    /// # Safety
    /// As for [`Queue::transfer`].
    pub(crate) unsafe fn issue(&self, stream: sys::CUstream, transfers: &[NcclTransfer]) {
        let held = self.lock();
        let Some(Handle(raw)) = *held else { panic!("transfers over a way that was ended") };
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

    /// Ends what is on its way, on this card: kernels that wait for other cards return without what they waited for.
    /// It returns when the card has done so.
    pub fn abort(&self) {
        // Nobody finds it any more, and whoever looks need not wait for NCCL.
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
        // A way that is still being made, or whose other ends are gone, cannot be closed in order.
        if self.is_idle() != Ok(true) {
            return self.abort();
        }
        let Some(Handle(raw)) = self.lock().take() else { return };
        let _ = self.context.make_current();
        let functions = &self.library.functions;
        // SAFETY: a live communicator that nobody has any more.
        unsafe {
            let begun = (functions.finalize)(raw);
            let (mut told, since) = (begun, Instant::now());
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

/// Memory of the card that other cards may write to: not that of a stream's pool, which they cannot reach.
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
        // SAFETY: freeing waits for the card, so nothing uses it any more: what did was issued before.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}
