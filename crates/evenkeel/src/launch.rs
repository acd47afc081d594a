//! The ranks of a run: which cores and which shard of the model each one has.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use evenkeel_comm::{Link, Options};
use evenkeel_device::{CpuOptions, Device, DeviceKind, Queue, cpu_report};
use evenkeel_model::{Cut, Model, Parameters, Plan, Split};
use evenkeel_step::Mesh;
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, DEFAULT, NONE, OASES, SAVED_COMM, Units};
use evenkeel_store::read_json;
use evenkeel_train::{Cost, Ranks, Trainer, TrainerOptions};
use serde_json::Value;

use crate::config::{self, Parallel, Schedule, Settings};
use crate::memory::{check_fit, check_fit_on};
use crate::{Failure, Mistake, device};

/// What every rank gets.
#[derive(Clone, Debug)]
pub struct Launch {
    pub kind: DeviceKind,
    pub cut: Cut,
    /// Shares of the data.
    pub dp: usize,
    /// ZeRO's stage: what is split over those shares.
    pub zero: usize,
    pub cores_per_rank: usize,
    /// Cores of each rank that exchanges have to themselves.
    pub comm_cores: usize,
    pub comm: Options,
}

impl Launch {
    /// As the configuration says, for this model with this config.json.
    pub fn of(settings: &Settings, model: &Model, config: &Value) -> Result<Launch, Failure> {
        let parallel = &settings.parallel;
        let weights = match &parallel.tp_weights[..] {
            [] => vec![1.0; parallel.tp],
            weights => weights.to_vec(),
        };
        let deadline = Duration::from_secs_f64(parallel.timeout_s);
        let uncut = match parallel.tp {
            1 => BTreeSet::new(),
            _ => plan(parallel.tp_plan.as_deref(), config)?.uncut(model)?,
        };
        Ok(Launch {
            kind: settings.device.kind.into(),
            cut: Cut {
                split_sequence: parallel.sequence_parallel.unwrap_or(uncut.is_empty()),
                uncut,
                ..Cut::weighted(weights)
            },
            dp: parallel.dp,
            zero: parallel.zero,
            cores_per_rank: cores_per_rank(parallel.dp * parallel.tp, parallel.cores_per_rank, settings.device.threads),
            comm_cores: parallel.comm_cores,
            comm: Options { deadline, link: link(parallel) },
        })
    }

    /// Equal ranks that share the machine's cores, or as many of them as are wanted.
    pub fn even(dp: usize, tp: usize, threads: Option<usize>) -> Launch {
        let cut = Cut { split_sequence: true, ..Cut::even(tp) };
        let cores_per_rank = cores_per_rank(dp * tp, None, threads);
        Launch { kind: DeviceKind::Cpu, cut, dp, zero: 0, cores_per_rank, comm_cores: 0, comm: Options::default() }
    }

    pub fn mesh(&self) -> Mesh {
        Mesh { dp: self.dp, tp: self.cut.weights.len() }
    }

    pub fn ranks(&self) -> usize {
        self.mesh().ranks()
    }

    /// For the line that begins a run: nothing where there is one rank.
    pub fn describe(&self) -> String {
        let Mesh { dp, tp } = self.mesh();
        let zero = if self.zero > 0 && dp > 1 { format!(", ZeRO {}", self.zero) } else { String::new() };
        let ranks = match (dp, tp) {
            (1, 1) => String::new(),
            (1, _) => format!(", tp {tp} × {} cores", self.cores_per_rank),
            (_, 1) => format!(", dp {dp}{zero} × {} cores", self.cores_per_rank),
            _ => format!(", dp {dp} × tp {tp}{zero} × {} cores", self.cores_per_rank),
        };
        let link = self.comm.link.as_ref().map_or("", |_| ", over an emulated link");
        let card = if self.kind == DeviceKind::Cuda { ", on a CUDA device" } else { "" };
        format!("{ranks}{card}{link}")
    }

    /// Starts the ranks, each with its shard; `parameters` loads or draws what a shard has.
    pub fn start(
        &self,
        shards: Vec<Model>,
        options: TrainerOptions,
        parameters: impl Fn(&Model, Split, &Queue) -> Result<Parameters, Failure> + Send + Sync + 'static,
    ) -> Result<Ranks, Failure> {
        let (launch, mesh) = (self.clone(), self.mesh());
        Ranks::start(mesh.ranks(), &self.comm, move |communicator| {
            let rank = communicator.rank();
            let device = launch.device(rank)?;
            let split = Split::zero(launch.zero, mesh.share(rank), mesh.dp);
            let parameters = parameters(&shards[mesh.shard(rank)], split, device.compute())?;
            Ok(Trainer::new(&shards, mesh, communicator, device, parameters, options))
        })
    }

    /// The cores that a rank has to itself, those of its exchanges last; none where there are not enough for all, or one rank
    /// may use any.
    pub fn cores(&self, rank: usize) -> Vec<usize> {
        let (allowed, each) = (evenkeel_device::allowed_cores(), self.cores_per_rank + self.comm_cores);
        let are_pinned = self.ranks() > 1 && self.ranks() * each <= allowed.len();
        if are_pinned { allowed[rank * each..][..each].to_vec() } else { Vec::new() }
    }

    fn device(&self, rank: usize) -> Result<Device, Failure> {
        if self.kind == DeviceKind::Cuda {
            assert_eq!(self.ranks(), 1, "the configuration was checked");
            return device::start_cuda(0);
        }
        let (count, mut cores) = (self.cores_per_rank, self.cores(rank));
        let comm_cores = cores.split_off(count.min(cores.len()));
        let options = CpuOptions { name: format!("rank{rank}"), cores, comm_cores, ..CpuOptions::with_threads(count) };
        Device::cpu(&options).map_err(|error| {
            let mistake = Mistake { what: format!("the device of rank {rank} cannot be started: {error}"), hint: None };
            match error.kind() {
                std::io::ErrorKind::InvalidInput => mistake.into(),
                _ => Failure::Fault(mistake),
            }
        })
    }
}

/// How a run's steps are arranged.
pub fn arrangement(parallel: &Parallel) -> Arrangement {
    let schedule = match parallel.schedule {
        None | Some(Schedule::None) => NONE,
        Some(Schedule::Default) => DEFAULT,
        Some(Schedule::SavedComm) => SAVED_COMM,
        Some(Schedule::CrossPass) => CROSS_PASS,
        Some(Schedule::Oases) => OASES,
    };
    let recompute = match parallel.recompute_units {
        config::Units::All => Units::All,
        config::Units::Attention => Units::Attention,
        config::Units::Mlp => Units::Mlp,
    };
    let arrangement = Arrangement::of(schedule).in_parts(parallel.parts.unwrap_or(1)).recomputing(recompute);
    Arrangement { ahead: parallel.ahead, ..arrangement }
}

/// How layers are cut: as a file says, else as config.json does.
pub fn plan(file: Option<&Path>, config: &Value) -> Result<Plan, Failure> {
    const MOST_BYTES: u64 = 16 << 20;
    let own = match file {
        Some(path) => Plan::from_json(&read_json(path, MOST_BYTES)?)?,
        None => Plan::default(),
    };
    Ok(own.or(Plan::of_config(config)?))
}

impl From<config::DeviceKind> for DeviceKind {
    fn from(kind: config::DeviceKind) -> DeviceKind {
        match kind {
            config::DeviceKind::Cpu => DeviceKind::Cpu,
            config::DeviceKind::Cuda => DeviceKind::Cuda,
        }
    }
}

impl Launch {
    /// Refuses steps that would not fit, and what the host keeps beside them.
    pub fn check_memory(&self, costs: &[Cost], beside_bytes: u64, hint: &str) -> Result<(), Failure> {
        if self.kind == DeviceKind::Cpu {
            return Ok(check_memory(costs, beside_bytes, hint)?);
        }
        check_fit_on(self.kind, "a step", costs.iter().map(|cost| cost.peak_bytes).sum(), hint)?;
        Ok(check_fit("a checkpoint's copy of the weights and moments", beside_bytes, "use a smaller model")?)
    }
}

/// Refuses what would not fit, with something beside it, in the memory that all ranks share.
pub fn check_memory(costs: &[Cost], beside_bytes: u64, hint: &str) -> Result<(), Mistake> {
    let needed: u64 = costs.iter().map(|cost| cost.peak_bytes).sum();
    check_fit("a step", needed + beside_bytes, hint)
}

fn cores_per_rank(ranks: usize, wanted: Option<usize>, threads: Option<usize>) -> usize {
    wanted.unwrap_or_else(|| (threads.unwrap_or_else(|| cpu_report().cores) / ranks).max(1))
}

fn link(parallel: &Parallel) -> Option<Link> {
    let bytes_per_s = parallel.link_gb_per_s? * 1e9;
    Some(Link { latency: Duration::from_secs_f64(parallel.link_latency_us * 1e-6), bytes_per_s })
}
