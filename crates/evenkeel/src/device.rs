//! The device that a command computes on.

use std::sync::Arc;

use evenkeel_device::{CpuOptions, CudaError, CudaOptions, DType, Device, DeviceKind, KernelCache, cpu_report};

use crate::kernel_cache::CacheFolder;
use crate::{Failure, Mistake};

/// The precisions that a command offers.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Precision {
    F32,
    Bf16,
}

impl Precision {
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        }
    }
}

impl From<Precision> for DType {
    fn from(precision: Precision) -> DType {
        match precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
        }
    }
}

/// The devices that a command offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceChoice {
    Cpu,
    #[value(alias = "gpu")]
    Cuda,
}

impl From<DeviceChoice> for DeviceKind {
    fn from(kind: DeviceChoice) -> DeviceKind {
        match kind {
            DeviceChoice::Cpu => DeviceKind::Cpu,
            DeviceChoice::Cuda => DeviceKind::Cuda,
        }
    }
}

/// The cores of this machine, or as many threads as are wanted.
pub fn start(threads: Option<usize>) -> Result<Device, Mistake> {
    let threads = threads.unwrap_or_else(|| cpu_report().cores);
    Device::cpu(&CpuOptions::with_threads(threads))
        .map_err(|error| Mistake { what: format!("the device cannot be started: {error}"), hint: None })
}

/// One device of a kind: all cores of this machine, or the first GPU.
pub fn start_kind(kind: DeviceKind, threads: Option<usize>) -> Result<Device, Failure> {
    match kind {
        DeviceKind::Cpu => Ok(start(threads)?),
        DeviceKind::Cuda => start_cuda(0),
    }
}

/// A GPU, with the kernels that were compiled for it before.
pub fn start_cuda(ordinal: usize) -> Result<Device, Failure> {
    start_cuda_with(CudaOptions::new(ordinal))
}

pub fn start_cuda_with(options: CudaOptions) -> Result<Device, Failure> {
    let cache = CacheFolder::of_user().map(|folder| Arc::new(folder) as Arc<dyn KernelCache>);
    Device::cuda(&CudaOptions { cache, ..options }).map_err(fault)
}

/// The machine is at fault.
pub fn fault(error: CudaError) -> Failure {
    Failure::Fault(mistake(&error))
}

/// The error's own hint becomes the message's.
pub fn mistake(error: &CudaError) -> Mistake {
    let text = error.to_string();
    match text.split_once("\n  hint: ") {
        Some((what, hint)) => Mistake { what: what.to_owned(), hint: Some(hint.to_owned()) },
        None => Mistake { what: text, hint: None },
    }
}
