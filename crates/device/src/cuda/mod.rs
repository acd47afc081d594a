//! The CUDA device: two streams, each an in-order queue, over one piece of the GPU's memory.
//!
//! The host issues to the streams and waits for nothing inside a step; repeated work becomes CUDA graphs (`replay`). Products
//! are cuBLASLt's, attention is cuDNN's where it takes the problem; everything else is CUDA C++ under `kernels/`, compiled by
//! NVRTC for the present GPU and kept in a [`KernelCache`]. Libraries are opened at run time, so a program with this device in it
//! starts on machines without CUDA.
//!
//! Several devices may share a GPU, each with an arena and two streams of its own. All have the GPU's one context, so they
//! can read and write one another's memory; a `part` keeps a device's kernels on some of the multiprocessors. Devices on different
//! GPUs have contexts of their own, and bytes go between them by `nccl`.
//!
//! A kernel's order of additions depends on its shape alone: the same work gives the same bits.

mod backend;
mod context;
mod error;
mod event;
mod modules;
mod nccl;
mod options;
mod part;
mod peer;
mod replay;
mod report;
mod rows;
mod staging;
mod stream;
mod tensor_map;

mod activation;
mod adafactor;
mod attention;
mod balance;
mod delta;
mod elementwise;
mod embedding;
mod expert_biases;
mod experts;
mod grouped;
mod loss;
mod magnitude;
mod muon;
mod nf4;
mod norm;
mod optimizer;
mod product;
mod random;
mod rotary;
mod selected_rows;

pub(crate) use attention::WIDEST_HEAD as WIDEST_CUDA_HEAD;
pub use attention::{CudnnReport, cuda_attention_repeats, cudnn_report};
pub(crate) use backend::{CudaBackend, DefectWord};
pub use backend::{CudaMemory, cuda_memory};
pub(crate) use delta::{delta_backward_work_len, delta_work_len};
pub use error::CudaError;
pub(crate) use event::{Moment, SharedEvent};
pub use modules::{compile_all_kernels, kernel_sources};
pub use nccl::{NcclCommunicator, NcclId, NcclLibrary, NcclTransfer};
pub use options::{CudaOptions, KernelCache};
pub use part::{CudaPart, cuda_parts};
pub use replay::Replays;
pub use report::{CudaGpu, CudaReport, cuda_gpus, cuda_report};
pub(crate) use stream::Stream;

/// A kernel's computation on this device: it issues to the stream and returns.
pub(crate) trait Run {
    fn run(&self, stream: &mut Stream);
}
