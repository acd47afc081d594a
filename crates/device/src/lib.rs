//! One device: its memory, its in-order queues, and the kernels it computes.
//!
//! A rank owns a [`Device`]. Work is issued to a [`Queue`] and runs there in order; [`Event`]s order one queue behind
//! another. Kernels are plain data ([`kernel`]); `cpu` and `cuda` compute them, `dry` only counts.
//!
//! This crate knows no ranks, no groups, no files and no models.

mod arena;
mod cpu;
mod cuda;
mod device;
mod dry;
pub mod host;
pub mod kernel;
mod libraries;
mod peer;
mod queue;
mod tensor;

pub use arena::{Arena, OutOfMemory, Usage};
pub use cpu::{CpuOptions, CpuReport, WorkingMemory, allowed_cores, core_flops_per_s, cpu_report};
pub use cuda::{
    CudaError, CudaGpu, CudaMemory, CudaOptions, CudaPart, CudaReport, CudnnReport, KernelCache, NcclCommunicator,
    NcclId, NcclLibrary, NcclTransfer, Replays, compile_all_kernels, cuda_attention_repeats, cuda_gpus, cuda_memory,
    cuda_parts, cuda_report, cudnn_report, kernel_sources,
};
pub use device::{Device, DeviceKind};
pub use dry::{Count, Counts};
pub use libraries::libraries_found;
pub use peer::{MOST_PEERS, PeerWork};
pub use queue::{Event, Health, KernelTime, Queue, Stamp, panic_message};
pub use tensor::{DType, Extent, Heads, Tensor, View};

pub use half::bf16;
