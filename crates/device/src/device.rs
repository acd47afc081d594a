use std::sync::Arc;

use crate::WorkingMemory;
use crate::arena::{Arena, Usage};
use crate::cpu::{CpuBackend, CpuOptions};
use crate::cuda::{CudaBackend, CudaError, CudaOptions, Replays};
use crate::dry::{Counts, DryBackend};
use crate::queue::{KernelTime, Lane, Queue};

/// What a rank computes on: memory, a compute queue and a comm queue. Clones are the same device.
#[derive(Clone)]
pub struct Device {
    arena: Arena,
    compute: Queue,
    comm: Queue,
    kind: Kind,
}

/// What computes, as far as others plan for it. A dry device stands for either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Cuda,
}

impl DeviceKind {
    /// How many bytes of f32 logits are worth having at a time: what a CPU's caches are not far from, or enough rows for a card's
    /// products to be busy with. GPT-2's head on an H200 took 46 ms of a step of 110 by 32 MiB.
    pub fn logit_bytes(self) -> usize {
        match self {
            DeviceKind::Cpu => 32 << 20,
            DeviceKind::Cuda => 512 << 20,
        }
    }
}

#[derive(Clone)]
enum Kind {
    Cpu(Arc<CpuBackend>),
    Cuda(Arc<CudaBackend>),
    Dry(Arc<DryBackend>),
}

impl Device {
    pub fn cpu(options: &CpuOptions) -> std::io::Result<Device> {
        let backend = Arc::new(CpuBackend::start(options)?);
        let arena = Arena::new(backend.base_address(), options.memory_bytes);
        Ok(Device {
            compute: Queue::new(backend.clone(), arena.clone(), Lane::Compute),
            comm: Queue::new(backend.clone(), arena.clone(), Lane::Comm),
            arena,
            kind: Kind::Cpu(backend),
        })
    }

    /// A card, or an error that says what is missing and what to do.
    pub fn cuda(options: &CudaOptions) -> Result<Device, CudaError> {
        let backend = Arc::new(CudaBackend::start(options)?);
        let arena = Arena::new(backend.base_address(), backend.memory_bytes());
        Ok(Device {
            compute: Queue::new(backend.clone(), arena.clone(), Lane::Compute),
            comm: Queue::new(backend.clone(), arena.clone(), Lane::Comm),
            arena,
            kind: Kind::Cuda(backend),
        })
    }

    /// A device that computes nothing and counts everything, with memory without end.
    pub fn dry() -> Device {
        let backend = Arc::new(DryBackend::default());
        let arena = Arena::new(0, u64::MAX / 2);
        Device {
            compute: Queue::new(backend.clone(), arena.clone(), Lane::Compute),
            comm: Queue::new(backend.clone(), arena.clone(), Lane::Comm),
            arena,
            kind: Kind::Dry(backend),
        }
    }

    /// A dry device counts as a CPU.
    pub fn kind(&self) -> DeviceKind {
        match self.kind {
            Kind::Cpu(_) | Kind::Dry(_) => DeviceKind::Cpu,
            Kind::Cuda(_) => DeviceKind::Cuda,
        }
    }

    pub fn compute(&self) -> &Queue {
        &self.compute
    }

    pub fn comm(&self) -> &Queue {
        &self.comm
    }

    pub fn usage(&self) -> Usage {
        self.arena.usage()
    }

    pub fn reset_peak(&self) {
        self.arena.reset_peak();
    }

    /// What a dry device has counted; empty on others.
    pub fn counts(&self) -> Counts {
        match &self.kind {
            Kind::Dry(backend) => backend.counts(),
            Kind::Cpu(_) | Kind::Cuda(_) => Counts::default(),
        }
    }

    /// What the kernels that a dry device was given work with beside the arena, on this machine's CPU; nothing on others.
    pub fn working_memory(&self) -> WorkingMemory {
        match &self.kind {
            Kind::Dry(backend) => backend.working_memory(),
            Kind::Cpu(_) | Kind::Cuda(_) => WorkingMemory::default(),
        }
    }

    /// Has a card replay work that repeats as CUDA graphs, or issue it one by one, as [`CudaOptions::graph`] does from the start.
    /// It computes the same.
    pub fn replay_graphs(&self, on: bool) {
        if let Kind::Cuda(backend) = &self.kind {
            backend.turn_replay(on);
        }
    }

    /// What a card replayed as graphs; nothing on others.
    pub fn replays(&self) -> Replays {
        match &self.kind {
            Kind::Cuda(backend) => backend.replays(),
            Kind::Cpu(_) | Kind::Dry(_) => Replays::default(),
        }
    }

    /// Turns the timing of single kernels on or off.
    pub fn measure_kernels(&self, on: bool) {
        match &self.kind {
            Kind::Cpu(backend) => backend.measure_kernels(on),
            Kind::Cuda(backend) => backend.measure_kernels(on),
            Kind::Dry(_) => (),
        }
    }

    /// Has every kernel of the compute queue take so many times as long, by working for nothing behind it: an emulated slow device. One is
    /// as fast as it is. A dry device has no speed.
    pub fn throttle(&self, factor: f64) {
        if let Kind::Cpu(backend) = &self.kind {
            backend.throttle(factor);
        }
    }

    /// The kernels run on the compute queue since measuring began or since the last call, in order.
    pub fn take_kernel_times(&self) -> Vec<KernelTime> {
        match &self.kind {
            Kind::Cpu(backend) => {
                self.compute.finish();
                backend.take_kernel_times()
            }
            Kind::Cuda(backend) => {
                self.compute.finish();
                backend.take_kernel_times()
            }
            Kind::Dry(_) => Vec::new(),
        }
    }
}
