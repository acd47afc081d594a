use std::sync::Arc;

use super::part::CudaPart;

/// Where compiled kernels and measured choices are kept between runs.
///
/// What it returns is checked before it is used: an entry may be damaged, missing or of another version.
pub trait KernelCache: Send + Sync {
    fn get(&self, key: &str) -> Option<Vec<u8>>;
    /// A failure to keep it is no error: it is made again next time.
    fn put(&self, key: &str, bytes: &[u8]);
}

/// Which card a device is, and how much of it.
#[derive(Clone)]
pub struct CudaOptions {
    /// Names the device in messages.
    pub name: String,
    /// The card's number among those that the driver shows.
    pub ordinal: usize,
    /// Bytes of the arena; most of what is free if absent.
    pub memory_bytes: Option<u64>,
    /// The multiprocessors that its kernels run on; all of the card's if absent.
    pub part: Option<CudaPart>,
    pub cache: Option<Arc<dyn KernelCache>>,
    /// Whether work that repeats is replayed as CUDA graphs. It computes the same.
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
