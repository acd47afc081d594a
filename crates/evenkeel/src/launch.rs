//! Starts the ranks of a run, each on its device and with its shard of the model.

use std::time::Duration;

use evenkeel_comm::{Link, Options};
use evenkeel_device::{
    CpuOptions, CudaError, CudaOptions, CudaPart, Device, DeviceKind, NcclLibrary, Queue, cuda_memory, cuda_parts,
};
use evenkeel_model::{Model, Parameters, ZeroSharding};
use evenkeel_step::{Devices, Strategy};
use evenkeel_train::{Ranks, Trainer, TrainerOptions};

use crate::config::Parallel;
use crate::{Failure, Mistake, device, text};

/// A strategy, and how its ranks communicate on this machine.
#[derive(Clone, Debug)]
pub struct Launch {
    pub strategy: Strategy,
    pub comm: Options,
    /// The memory that each rank takes of its GPU; equal shares of what is free if empty.
    pub arena_bytes: Vec<u64>,
}

impl From<Strategy> for Launch {
    fn from(strategy: Strategy) -> Launch {
        Launch { strategy, comm: Options::default(), arena_bytes: Vec::new() }
    }
}

impl Launch {
    pub fn new(strategy: Strategy, parallel: &Parallel) -> Launch {
        let deadline = Duration::from_secs_f64(parallel.timeout_s);
        let comm = Options { deadline, link: link(parallel), ..Options::default() };
        Launch { comm, ..Launch::from(strategy) }
    }

    /// Whether a rank can be timed while the others work: those that share a GPU's multiprocessors take turns on them.
    pub fn keeps_ranks_apart(&self) -> bool {
        match &self.strategy.devices {
            Devices::Cpu { .. } => true,
            devices @ Devices::Cuda { multiprocessors, .. } => {
                !multiprocessors.is_empty() || devices.are_separate_gpus()
            }
        }
    }

    /// For the line that begins a run; empty for one rank on cores.
    pub fn describe(&self) -> String {
        let link = self.comm.link.as_ref().map(|_| "over an emulated link".to_owned());
        let parts = [Some(self.strategy.to_string()).filter(|strategy| !strategy.is_empty()), link];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// Starts the ranks; `parameters` loads or draws a shard's weights.
    pub fn start(
        &self,
        shards: Vec<Model>,
        options: TrainerOptions,
        parameters: impl Fn(&Model, ZeroSharding, &Queue) -> Result<Parameters, Failure> + Send + Sync + 'static,
    ) -> Result<Ranks, Failure> {
        let (launch, shared) = (self.clone(), self.shared_gpu()?);
        tracing::info!(strategy = ?self.strategy, link = ?self.comm.link, "starts the ranks");
        Ranks::start(self.strategy.ranks(), &self.comm, move |communicator| {
            let rank = communicator.rank();
            let strategy = &launch.strategy;
            let device = launch.device(rank, &shared)?;
            tracing::debug!(rank, cores = ?launch.cores(rank), "started a device");
            let own = strategy.model(&shards, rank);
            let parameters = parameters(&own, strategy.zero_sharding(rank), device.compute())?;
            Ok(Trainer::new(&shards, strategy, communicator, device, parameters, options))
        })
    }

    /// The cores that a rank has to itself, those of its exchanges last; empty if there are too few for all, or if one rank may
    /// use any.
    pub fn cores(&self, rank: usize) -> Vec<usize> {
        let (allowed, ranks, each) = (evenkeel_device::allowed_cores(), self.strategy.ranks(), self.cores_of_each());
        let are_pinned = ranks > 1 && ranks * each <= allowed.len();
        if are_pinned { allowed[rank * each..][..each].to_vec() } else { Vec::new() }
    }

    /// A warning if ranks have more cores than there are.
    pub fn crowding(&self) -> Option<String> {
        let (ranks, each) = (self.strategy.ranks(), self.cores_of_each());
        let cores = evenkeel_device::allowed_cores().len();
        let is_crowded = self.strategy.devices.kind() == DeviceKind::Cpu && ranks * each > cores;
        is_crowded.then(|| {
            let each = text::cores(each);
            format!("{ranks} ranks with {each} each share the {cores} there are, and wait for one another")
        })
    }

    fn cores_of_each(&self) -> usize {
        match self.strategy.devices {
            Devices::Cpu { cores_per_rank, comm_cores } => cores_per_rank + comm_cores,
            Devices::Cuda { .. } => 0,
        }
    }

    /// How the ranks share a GPU, if they do.
    pub fn shared_gpu(&self) -> Result<SharedGpu, Failure> {
        let Devices::Cuda { gpus, multiprocessors, .. } = &self.strategy.devices else {
            return Ok(SharedGpu::default());
        };
        if self.strategy.devices.are_separate_gpus() {
            // A missing library is reported before any rank starts.
            NcclLibrary::find().map_err(device::fault)?;
            return Ok(SharedGpu::default());
        }
        let parts = match &multiprocessors[..] {
            [] => Vec::new(),
            sizes => cuda_parts(gpus[0], sizes).map_err(|error| match error {
                CudaError::Parts { .. } => device::mistake(&error).into(),
                _ => device::fault(error),
            })?,
        };
        // Each rank takes its share, whichever starts first. A lone rank takes what is free.
        let ranks = self.strategy.ranks();
        let memory = if ranks > 1 { Some(cuda_memory(gpus[0]).map_err(device::fault)?) } else { None };
        Ok(SharedGpu { parts, share_bytes: memory.map(|memory| memory.arena_bytes_of(ranks)) })
    }

    /// Starts the device of a rank.
    pub fn device(&self, rank: usize, shared: &SharedGpu) -> Result<Device, Failure> {
        let name = format!("rank{rank}");
        let count = match &self.strategy.devices {
            Devices::Cuda { gpus, graph, .. } => {
                return device::start_cuda_with(CudaOptions {
                    name,
                    memory_bytes: self.arena_bytes.get(rank).copied().or(shared.share_bytes),
                    part: shared.parts.get(rank).cloned(),
                    graph: *graph,
                    ..CudaOptions::new(gpus[rank])
                });
            }
            Devices::Cpu { cores_per_rank, .. } => *cores_per_rank,
        };
        let mut cores = self.cores(rank);
        let comm_cores = cores.split_off(count.min(cores.len()));
        let options = CpuOptions { name, cores, comm_cores, ..CpuOptions::with_threads(count) };
        Device::cpu(&options).map_err(|error| {
            let mistake = Mistake { what: format!("the device of rank {rank} cannot be started: {error}"), hint: None };
            match error.kind() {
                std::io::ErrorKind::InvalidInput => mistake.into(),
                _ => Failure::Fault(mistake),
            }
        })
    }
}

/// The parts and memory of ranks that share a GPU; empty if they are on cores or each has its own.
#[derive(Default)]
pub struct SharedGpu {
    /// By rank; empty if all share all multiprocessors.
    parts: Vec<CudaPart>,
    /// Memory of each rank; a lone rank takes what is free.
    share_bytes: Option<u64>,
}

fn link(parallel: &Parallel) -> Option<Link> {
    let bytes_per_s = parallel.link_gb_per_s? * 1e9;
    Some(Link { latency: Duration::from_secs_f64(parallel.link_latency_us * 1e-6), bytes_per_s })
}
