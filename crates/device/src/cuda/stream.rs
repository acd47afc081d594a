//! A kernel's means to issue work: a stream, functions by name, and working memory.

use std::sync::Arc;

use cudarc::driver::sys;

use super::attention::{AttentionCall, Cudnn};
use super::context::{Context, succeed};
use super::error::must;
use super::modules::Source;
use super::part::GreenContext;
use super::product::ProductCall;
use super::replay::{Replay, Replays};

/// One in-order queue of the device. Everything issued to it runs in order, so working memory is shared by all kernels.
pub(crate) struct Stream {
    raw: sys::CUstream,
    /// The part of the GPU that its kernels run on.
    part: Option<Arc<GreenContext>>,
    context: Arc<Context>,
    /// The address, on the GPU, of the word that a kernel writes an operand's defect to.
    defects: u64,
    scratch: u64,
    scratch_bytes: u64,
    replay: Replay,
    cudnn: Cudnn,
}

// SAFETY: a stream's handle may be used from any thread, one at a time.
unsafe impl Send for Stream {}

/// The numbers of blocks and threads, and the shared memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub blocks: [u32; 3],
    pub threads: [u32; 3],
    pub shared_bytes: u32,
}

impl Shape {
    pub fn linear(blocks: u64, threads: u32) -> Shape {
        let blocks = u32::try_from(blocks.max(1)).expect("a grid of at most 2^32 blocks");
        Shape { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared_bytes: 0 }
    }

    /// The same for each row of so many, or for as many of them as a grid can have: kernels begin again behind these.
    pub fn of_rows(mut self, rows: usize) -> Shape {
        const MOST_ROWS: usize = 65_535;
        self.blocks[1] = rows.min(MOST_ROWS) as u32;
        self
    }
}

/// The value of a kernel's argument.
#[derive(Clone, Copy)]
pub(super) struct Argument {
    words: [u64; ARGUMENT_WORDS],
    len: usize,
}

/// As large as any argument of ours.
const ARGUMENT_WORDS: usize = 16;

impl Argument {
    pub fn of<T: Copy>(value: T) -> Argument {
        const { assert!(size_of::<T>() <= ARGUMENT_WORDS * size_of::<u64>() && align_of::<T>() <= align_of::<u64>()) };
        let mut words = [0; ARGUMENT_WORDS];
        // SAFETY: the value fits, and any bytes are words.
        unsafe { words.as_mut_ptr().cast::<T>().write(value) };
        Argument { words, len: size_of::<T>().div_ceil(size_of::<u64>()) }
    }

    fn words(&self) -> &[u64] {
        &self.words[..self.len]
    }
}

/// The arguments of a kernel, in its order. Each has the size that the kernel declares: u64 for a pointer, i64, i32,
/// f32, or a `repr(C)` struct without gaps.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => { &[$($crate::cuda::stream::Argument::of($value)),*] };
}
pub(super) use arguments;

/// Scratch memory grows in steps of this.
const SCRATCH_STEP_BYTES: u64 = 64 << 20;
/// Shared memory that a block may use without an opt-in.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

impl Stream {
    pub fn new(
        context: Arc<Context>,
        part: Option<Arc<GreenContext>>,
        defects: u64,
        graph: bool,
    ) -> Result<Stream, super::CudaError> {
        let mut raw = std::ptr::null_mut();
        match &part {
            Some(part) => raw = part.stream()?,
            None => {
                // SAFETY: the context is current on this thread.
                let made = unsafe { sys::cuStreamCreate(&mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) };
                succeed("creating a stream", made)?;
            }
        }
        let replay = Replay::new(graph, part.as_ref().map_or(context.raw(), |part| part.as_context()));
        Ok(Stream { raw, part, context, defects, scratch: 0, scratch_bytes: 0, replay, cudnn: Cudnn::default() })
    }

    /// The multiprocessors of its part of the GPU; `None` for the whole GPU.
    pub(super) fn part_multiprocessors(&self) -> Option<u32> {
        self.part.as_ref().map(|part| part.multiprocessors())
    }

    /// How many multiprocessors its kernels run on.
    pub(super) fn multiprocessors(&self) -> u32 {
        self.part_multiprocessors().unwrap_or(self.context.properties().multiprocessors)
    }

    /// The raw stream. Held commands may not have been issued to it yet.
    pub(super) fn handle(&self) -> sys::CUstream {
        self.raw
    }

    /// The raw stream, after issuing all held commands to it.
    pub(super) fn raw(&mut self) -> sys::CUstream {
        // SAFETY: whoever issued it has promised that it lives; the stream does, and its context is current in a queue's call.
        unsafe { self.replay.hand_on_all(self.raw) };
        self.raw
    }

    pub(super) fn turn_replay(&mut self, on: bool) {
        // SAFETY: as above.
        unsafe { self.replay.turn(on, self.raw) };
    }

    pub(super) fn replays(&self) -> &Replays {
        self.replay.counts()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The address where a kernel reports an operand's defect, see `modules::Defect`.
    pub(super) fn defects(&self) -> u64 {
        self.defects
    }

    /// The address of at least `bytes` bytes of device memory, aligned to 256, whose contents are undefined. They are the
    /// caller's until it returns: the next kernel on this stream is given the same ones.
    pub(super) fn scratch(&mut self, bytes: u64) -> u64 {
        if bytes > self.scratch_bytes {
            let wanted = bytes.next_multiple_of(SCRATCH_STEP_BYTES);
            let raw = self.raw();
            // SAFETY: what uses the old memory was issued to this stream, behind which it is freed.
            unsafe {
                self.free_scratch();
                must("taking working memory", sys::cuMemAllocAsync(&mut self.scratch, wanted as usize, raw));
            }
            self.scratch_bytes = wanted;
        }
        self.scratch
    }

    fn free_scratch(&mut self) {
        if self.scratch_bytes > 0 {
            // SAFETY: allocated by `scratch`, and freed behind everything that uses it.
            let result = unsafe { sys::cuMemFreeAsync(self.scratch, self.raw) };
            self.scratch = 0;
            self.scratch_bytes = 0;
            must("giving working memory back", result);
        }
    }

    /// Launches the kernel `name` of `source`.
    ///
    /// # Safety
    /// The arguments are those that the kernel declares, and what they point to lives until the kernel has run.
    pub(super) unsafe fn launch(&mut self, source: &'static Source, name: &str, shape: Shape, arguments: &[Argument]) {
        let function = self.function(source, name, shape);
        // SAFETY: the caller's promise.
        unsafe { self.replay.kernel(function, shape, arguments.iter().map(Argument::words), self.raw) };
    }

    /// Launches a kernel of one argument that is too large to be copied about: up to 4 KiB, whole words and without gaps.
    ///
    /// # Safety
    /// As for [`launch`](Stream::launch).
    pub(super) unsafe fn launch_with<T: Copy>(
        &mut self,
        source: &'static Source,
        name: &str,
        shape: Shape,
        argument: &T,
    ) {
        const { assert!(size_of::<T>().is_multiple_of(size_of::<u64>()) && align_of::<T>() == align_of::<u64>()) };
        let function = self.function(source, name, shape);
        // SAFETY: the argument is whole words, and the caller's promise.
        unsafe {
            let words =
                std::slice::from_raw_parts(std::ptr::from_ref(argument).cast(), size_of::<T>() / size_of::<u64>());
            self.replay.kernel(function, shape, std::iter::once(words), self.raw);
        }
    }

    fn function(&self, source: &'static Source, name: &str, shape: Shape) -> sys::CUfunction {
        self.context.function(source, name, shape.shared_bytes > PLAIN_SHARED_BYTES)
    }

    /// Lets cuDNN issue to this stream.
    pub(super) fn with_cudnn<R>(&mut self, work: impl FnOnce(&mut Cudnn, &mut Stream) -> R) -> R {
        let mut cudnn = std::mem::take(&mut self.cudnn);
        let result = work(&mut cudnn, self);
        self.cudnn = cudnn;
        result
    }

    /// # Safety
    /// The call's operands live until it has run.
    pub(super) unsafe fn product(&mut self, call: ProductCall) {
        // SAFETY: the caller's promise.
        unsafe { self.replay.product(call, self.raw) };
    }

    /// # Safety
    /// The call's operands live until it has run.
    pub(super) unsafe fn attention(&mut self, call: AttentionCall) {
        // SAFETY: the caller's promise.
        unsafe { self.replay.attention(call, self.raw) };
    }

    /// Sets bytes of device memory, in the stream's order.
    ///
    /// # Safety
    /// The bytes are the caller's to write.
    pub(super) unsafe fn set_bytes(&mut self, address: u64, value: u8, bytes: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.replay.set_bytes(address, value, bytes, self.raw) };
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.make_current();
        // SAFETY: nobody else has the handle. Errors were told to whoever waited.
        unsafe {
            let _ = sys::cuStreamSynchronize(self.raw);
            if self.scratch_bytes > 0 {
                let _ = sys::cuMemFreeAsync(self.scratch, self.raw);
                let _ = sys::cuStreamSynchronize(self.raw);
            }
            // Graphs name plans of cuDNN, whose handle names the stream.
            self.replay.forget();
            self.cudnn = Cudnn::default();
            let _ = sys::cuStreamDestroy_v2(self.raw);
        }
    }
}
