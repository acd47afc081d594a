//! The device that a command computes on.

use evenkeel_device::{CpuOptions, Device, cpu_report};

use crate::Mistake;

/// The cores of this machine, or as many threads as are wanted.
pub fn start(threads: Option<usize>) -> Result<Device, Mistake> {
    let threads = threads.unwrap_or_else(|| cpu_report().cores);
    Device::cpu(&CpuOptions::with_threads(threads))
        .map_err(|error| Mistake { what: format!("the device cannot be started: {error}"), hint: None })
}
