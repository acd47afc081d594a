//! Errors of a GPU, its driver and its libraries, with what to do about them.

use std::fmt;

use cudarc::driver::sys::CUresult;

/// A device that could not be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// A missing library: its purpose, and how to get it.
    Missing {
        library: &'static str,
        hint: &'static str,
    },
    /// Missing NCCL, which only ranks on different GPUs need.
    NoNccl {
        file: String,
        /// The loader's message.
        error: String,
        /// The value of LD_LIBRARY_PATH.
        folders: Option<String>,
    },
    TooOld {
        what: &'static str,
        found: String,
        needed: &'static str,
    },
    NoDevice {
        ordinal: usize,
        found: usize,
    },
    /// Another process uses the GPU's memory.
    ShortOfMemory {
        planned_bytes: u64,
        free_bytes: u64,
        total_bytes: u64,
    },
    /// A GPU of an architecture that the kernels do not run on.
    Architecture {
        device: String,
        capability: (i32, i32),
    },
    /// Parts that the GPU cannot be cut in.
    Parts {
        device: String,
        multiprocessors: u32,
        wanted: Vec<u32>,
        /// Multiprocessors of a group, and the number of groups.
        group: u32,
        groups: usize,
    },
    /// A failed call with the driver's message.
    Call {
        what: String,
        error: String,
    },
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const GIB: f64 = (1u64 << 30) as f64;
        match self {
            CudaError::Missing { library, hint } => write!(f, "{library} cannot be loaded\n  hint: {hint}"),
            CudaError::NoNccl { file, error, folders } => {
                let folders = match folders {
                    Some(folders) => format!("{folders}, and in the system's folders"),
                    None => "the system's folders, for LD_LIBRARY_PATH is not set".to_owned(),
                };
                write!(
                    f,
                    "NCCL ({file}) cannot be loaded: {error}; it was looked for in {folders}\n  hint: install NCCL 2.18 or later \
                     (NVIDIA's package libnccl2, or pip's nvidia-nccl-cu12 or -cu13) and add its folder to LD_LIBRARY_PATH; or \
                     have all ranks share a GPU with device.cards"
                )
            }
            CudaError::TooOld { what, found, needed } => {
                write!(f, "the {what} is {found}, at least {needed} is needed\n  hint: install a newer one")
            }
            CudaError::NoDevice { ordinal, found: 0 } => write!(
                f,
                "no CUDA device {ordinal}: the driver shows none\n  hint: see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            ),
            CudaError::NoDevice { ordinal, found } => write!(
                f,
                "no CUDA device {ordinal}: the driver shows {found}, counted from 0\n  hint: see CUDA_VISIBLE_DEVICES"
            ),
            CudaError::ShortOfMemory { planned_bytes, free_bytes, total_bytes } => write!(
                f,
                "out of device memory: {:.2} GiB planned, {:.2} of {:.2} GiB free\n  hint: end what else uses the GPU \
                 (see `nvidia-smi`), or plan less: a smaller micro-batch, recomputation, more ranks",
                *planned_bytes as f64 / GIB,
                *free_bytes as f64 / GIB,
                *total_bytes as f64 / GIB,
            ),
            CudaError::Architecture { device, capability: (major, minor) } => write!(
                f,
                "{device} has compute capability {major}.{minor}, at least 8.0 is needed\n  hint: use the CPU device"
            ),
            CudaError::Parts { device, multiprocessors, wanted, group, groups } => write!(
                f,
                "{device} cannot be cut in parts of {wanted:?} multiprocessors: of its {multiprocessors}, parts are made of \
                 {groups} groups of {group}\n  hint: use multiples of {group} that are {} together at most",
                *group as usize * groups,
            ),
            CudaError::Call { what, error } => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for CudaError {}

impl CudaError {
    pub(super) fn call(what: impl Into<String>, result: CUresult) -> CudaError {
        CudaError::Call { what: what.into(), error: describe(result) }
    }
}

/// The driver's name and message for an error, and a remedy if there is one.
pub(super) fn describe(result: CUresult) -> String {
    use CUresult::*;
    let error = cudarc::driver::result::DriverError(result);
    let name = error.error_name().map(std::ffi::CStr::to_string_lossy).unwrap_or_default();
    let text = error.error_string().map(std::ffi::CStr::to_string_lossy).unwrap_or_default();
    let words = format!("{name} ({text})");
    let hint = match result {
        CUDA_ERROR_OUT_OF_MEMORY => "the GPU has too little memory left beside the arena; plan less memory for it",
        CUDA_ERROR_ILLEGAL_ADDRESS
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_MISALIGNED_ADDRESS
        | CUDA_ERROR_LAUNCH_FAILED
        | CUDA_ERROR_ASSERT => {
            "a kernel is wrong: with device.graph = false, CUDA_LAUNCH_BLOCKING=1 names it; compute-sanitizer shows the access"
        }
        CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_UNKNOWN
        | CUDA_ERROR_SYSTEM_NOT_READY => {
            "the GPU is lost: see `dmesg` for Xid errors, then resume from the last checkpoint on another one"
        }
        _ => return words,
    };
    format!("{words}\n  hint: {hint}")
}

/// Panics with the failed action and the driver's message. The backend turns the panic into the device's failure.
#[track_caller]
pub(super) fn must(what: &str, result: CUresult) {
    if result != CUresult::CUDA_SUCCESS {
        panic!("{what}: {}", describe(result));
    }
}
