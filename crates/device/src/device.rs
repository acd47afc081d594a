use std::sync::Arc;

use crate::WorkingMemory;
use crate::arena::{Arena, Usage};
use crate::cpu::{CpuBackend, CpuOptions};
use crate::cuda::{CudaBackend, CudaError, CudaOptions, Replays, WIDEST_CUDA_HEAD};
use crate::dry::{Counts, DryBackend};
use crate::queue::{Backend, KernelTime, Lane, Queue};

/// A rank's memory and queues: one computes, one exchanges, one passes streams between stages. Clones share the device.
#[derive(Clone)]
pub struct Device {
    arena: Arena,
    /// By lane.
    queues: [Queue; Lane::ALL.len()],
    backend: AnyBackend,
}

/// The kind of hardware, for planning. A dry device stands for either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Cuda,
}

impl DeviceKind {
    /// Bytes of f32 logits to compute at a time: near the size of a CPU's caches, or enough rows to keep a GPU's products busy.
    /// Measured: in pieces of 32 MiB, GPT-2's head took 46 of a step's 110 ms on an H200.
    pub fn logit_bytes(self) -> usize {
        match self {
            DeviceKind::Cpu => 32 << 20,
            DeviceKind::Cuda => 512 << 20,
        }
    }

    /// The most elements that a head of attention may have, if there is a limit.
    pub fn widest_head(self) -> Option<usize> {
        match self {
            DeviceKind::Cpu => None,
            DeviceKind::Cuda => Some(WIDEST_CUDA_HEAD),
        }
    }
}

/// The backend by kind of device.
#[derive(Clone)]
enum AnyBackend {
    Cpu(Arc<CpuBackend>),
    Cuda(Arc<CudaBackend>),
    Dry(Arc<DryBackend>),
}

impl Device {
    pub fn cpu(options: &CpuOptions) -> std::io::Result<Device> {
        let backend = Arc::new(CpuBackend::start(options)?);
        let arena = Arena::new(backend.base_address(), options.memory_bytes);
        Ok(Device::new(backend.clone(), arena, AnyBackend::Cpu(backend)))
    }

    /// A GPU, or an error that says what is missing and what to do.
    pub fn cuda(options: &CudaOptions) -> Result<Device, CudaError> {
        let backend = Arc::new(CudaBackend::start(options)?);
        let arena = Arena::new(backend.base_address(), backend.memory_bytes());
        Ok(Device::new(backend.clone(), arena, AnyBackend::Cuda(backend)))
    }

    /// A device that computes nothing and counts everything, with unlimited memory.
    pub fn dry() -> Device {
        let backend = Arc::new(DryBackend::default());
        let arena = Arena::new(0, u64::MAX / 2);
        Device::new(backend.clone(), arena, AnyBackend::Dry(backend))
    }

    fn new(queued: Arc<impl Backend + 'static>, arena: Arena, backend: AnyBackend) -> Device {
        let queues = Lane::ALL.map(|lane| Queue::new(queued.clone(), arena.clone(), lane));
        Device { arena, queues, backend }
    }

    /// A dry device counts as a CPU.
    pub fn kind(&self) -> DeviceKind {
        match self.backend {
            AnyBackend::Cpu(_) | AnyBackend::Dry(_) => DeviceKind::Cpu,
            AnyBackend::Cuda(_) => DeviceKind::Cuda,
        }
    }

    pub fn compute(&self) -> &Queue {
        &self.queues[Lane::Compute as usize]
    }

    pub fn comm(&self) -> &Queue {
        &self.queues[Lane::Comm as usize]
    }

    /// The queue of what goes from stage to stage, which nothing else waits behind.
    pub fn pass(&self) -> &Queue {
        &self.queues[Lane::Pass as usize]
    }

    /// Waits until all queues are done.
    pub fn finish(&self) {
        self.queues.iter().for_each(Queue::finish);
    }

    pub fn usage(&self) -> Usage {
        self.arena.usage()
    }

    pub fn reset_peak(&self) {
        self.arena.reset_peak();
    }

    /// A dry device's counts since they were last taken; empty on others.
    pub fn take_counts(&self) -> Counts {
        match &self.backend {
            AnyBackend::Dry(backend) => backend.take_counts(),
            AnyBackend::Cpu(_) | AnyBackend::Cuda(_) => Counts::default(),
        }
    }

    /// The working memory beside the arena that a dry device's kernels would need on this machine's CPU; zero on others.
    pub fn working_memory(&self) -> WorkingMemory {
        match &self.backend {
            AnyBackend::Dry(backend) => backend.working_memory(),
            AnyBackend::Cpu(_) | AnyBackend::Cuda(_) => WorkingMemory::default(),
        }
    }

    /// Makes a GPU replay repeated work as CUDA graphs, or issue commands one by one. Results are the same.
    /// [`CudaOptions::graph`] sets the start.
    pub fn replay_graphs(&self, on: bool) {
        if let AnyBackend::Cuda(backend) = &self.backend {
            backend.turn_replay(on);
        }
    }

    /// Counts of a GPU's graphs; zero on others.
    pub fn replays(&self) -> Replays {
        match &self.backend {
            AnyBackend::Cuda(backend) => backend.replays(),
            AnyBackend::Cpu(_) | AnyBackend::Dry(_) => Replays::default(),
        }
    }

    /// Turns the timing of single kernels on or off.
    pub fn measure_kernels(&self, on: bool) {
        match &self.backend {
            AnyBackend::Cpu(backend) => backend.measure_kernels(on),
            AnyBackend::Cuda(backend) => backend.measure_kernels(on),
            AnyBackend::Dry(_) => (),
        }
    }

    /// Emulates a slow device: every kernel of the compute queue takes `factor` times as long, by useless work after it. One is
    /// full speed. A dry device ignores it.
    pub fn throttle(&self, factor: f64) {
        if let AnyBackend::Cpu(backend) = &self.backend {
            backend.throttle(factor);
        }
    }

    /// The kernels run on the compute queue since measuring began or since the last call, in order.
    pub fn take_kernel_times(&self) -> Vec<KernelTime> {
        match &self.backend {
            AnyBackend::Cpu(backend) => {
                self.compute().finish();
                backend.take_kernel_times()
            }
            AnyBackend::Cuda(backend) => {
                self.compute().finish();
                backend.take_kernel_times()
            }
            AnyBackend::Dry(_) => Vec::new(),
        }
    }
}
