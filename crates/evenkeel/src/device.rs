//! The device that a command computes on.

use std::sync::Arc;

use evenkeel_device::{CpuOptions, CudaOptions, Device, KernelCache, cpu_report};

use crate::kernel_cache::CacheFolder;
use crate::{Failure, Mistake};

/// The cores of this machine, or as many threads as are wanted.
pub fn start(threads: Option<usize>) -> Result<Device, Mistake> {
    let threads = threads.unwrap_or_else(|| cpu_report().cores);
    Device::cpu(&CpuOptions::with_threads(threads))
        .map_err(|error| Mistake { what: format!("the device cannot be started: {error}"), hint: None })
}

/// A card, with the kernels that were compiled for it before.
pub fn start_cuda(ordinal: usize) -> Result<Device, Failure> {
    let cache = CacheFolder::of_user().map(|folder| Arc::new(folder) as Arc<dyn KernelCache>);
    Device::cuda(&CudaOptions { cache, ..CudaOptions::new(ordinal) }).map_err(|error| {
        let text = error.to_string();
        // Its own hint becomes the message's.
        let (what, hint) = match text.split_once("\n  hint: ") {
            Some((what, hint)) => (what.to_owned(), Some(hint.to_owned())),
            None => (text, None),
        };
        Failure::Fault(Mistake { what, hint })
    })
}
