use std::sync::Arc;

use super::part::CudaPart;

/// Keeps compiled kernels and measured choices between runs.
///
/// Callers check entries before using them: one may be damaged, missing or of another version.
pub trait KernelCache: Send + Sync {
    fn get(&self, key: &str) -> Option<Vec<u8>>;
    /// A failure to keep it is no error: the next run makes it again.
    fn put(&self, key: &str, bytes: &[u8]);
}

/// The GPU of a device, and its share of it.
#[derive(Clone)]
pub struct CudaOptions {
    /// Names the device in messages.
    pub name: String,
    /// The GPU's number in the driver's order.
    pub ordinal: usize,
    /// Bytes of the arena; most of what is free if absent.
    pub memory_bytes: Option<u64>,
    /// The multiprocessors that its kernels run on; all of the GPU's if absent.
    pub part: Option<CudaPart>,
    pub cache: Option<Arc<dyn KernelCache>>,
    /// Whether repeated work is replayed as CUDA graphs. Results are the same.
    pub graph: bool,
}

impl CudaOptions {
    pub fn new(ordinal: usize) -> CudaOptions {
        CudaOptions {
            name: format!("cuda{ordinal}"),
            ordinal,
            memory_bytes: None,
            part: None,
            cache: None,
            graph: true,
        }
    }
}
