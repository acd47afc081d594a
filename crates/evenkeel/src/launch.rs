//! The ranks of a run: which cores and which shard of the model each one has.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use evenkeel_comm::{Link, Options};
use evenkeel_device::{
    CpuOptions, CudaError, CudaOptions, CudaPart, Device, DeviceKind, NcclLibrary, Queue, cpu_report, cuda_memory,
    cuda_parts,
};
use evenkeel_model::{Cut, Model, Parameters, Part, Plan, Split};
use evenkeel_step::Mesh;
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, DEFAULT, NONE, OASES, SAVED_COMM, Units};
use evenkeel_store::read_json;
use evenkeel_train::{Cost, Ranks, Trainer, TrainerOptions};
use serde_json::Value;

use crate::config::{self, Parallel, Schedule, Settings};
use crate::memory::{Beside, Peak, check_fit, check_fit_on_card};
use crate::placement::Placement;
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
    /// The card's multiprocessors that each rank has for itself; none where all share it.
    pub virtual_gpus: Vec<u32>,
    /// The memory that each rank takes of its card; equal shares of what is free where there are none.
    pub arena_bytes: Vec<u64>,
    /// Whether a card replays work as CUDA graphs.
    pub graph: bool,
    pub placement: Placement,
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
        let (kind, virtual_gpus) = (settings.device.kind.into(), settings.device.virtual_gpus.clone());
        let wanted = &settings.device.cards;
        let placement = placement(kind, parallel.dp * parallel.tp, wanted, &virtual_gpus);
        if !wanted.is_empty()
            && let Ok(found) = evenkeel_device::cuda_gpus()
            && let Some(card) = wanted.iter().find(|card| **card as usize >= found)
        {
            let what = format!("`device.cards` names GPU {card}, but the driver shows {found}, counted from 0");
            return Err(Mistake { what, hint: Some("see `nvidia-smi` and CUDA_VISIBLE_DEVICES".to_owned()) }.into());
        }
        if kind == DeviceKind::Cuda {
            check_alike(&uncut, &virtual_gpus, &names_of(&placement), evenkeel_device::cuda_attention_repeats())?;
        }
        Ok(Launch {
            kind,
            cut: Cut {
                split_sequence: parallel.sequence_parallel.unwrap_or(uncut.is_empty()),
                uncut,
                ..Cut::weighted(weights)
            },
            dp: parallel.dp,
            zero: parallel.zero,
            cores_per_rank: cores_per_rank(parallel.dp * parallel.tp, parallel.cores_per_rank, settings.device.threads),
            comm_cores: parallel.comm_cores,
            comm: Options { deadline, link: link(parallel), ..Options::default() },
            virtual_gpus,
            arena_bytes: Vec::new(),
            graph: settings.device.graph.unwrap_or(true),
            placement,
        })
    }

    /// Equal ranks that share the machine's cores, or as many of them as are wanted.
    pub fn even(dp: usize, tp: usize, threads: Option<usize>) -> Launch {
        let cut = Cut { split_sequence: true, ..Cut::even(tp) };
        let cores_per_rank = cores_per_rank(dp * tp, None, threads);
        let (kind, comm, virtual_gpus) = (DeviceKind::Cpu, Options::default(), Vec::new());
        let placement = Placement::default();
        let arena_bytes = Vec::new();
        Launch {
            kind,
            cut,
            dp,
            zero: 0,
            cores_per_rank,
            comm_cores: 0,
            comm,
            virtual_gpus,
            arena_bytes,
            graph: true,
            placement,
        }
    }

    /// The same on cards: a card for each where there are as many, else one that all share, whole or in parts.
    pub fn on_cards(self, virtual_gpus: &[u32]) -> Launch {
        let (kind, virtual_gpus) = (DeviceKind::Cuda, virtual_gpus.to_vec());
        let placement = placement(kind, self.ranks(), &[], &virtual_gpus);
        Launch { kind, virtual_gpus, placement, ..self }
    }

    pub fn mesh(&self) -> Mesh {
        Mesh { dp: self.dp, tp: self.cut.weights.len() }
    }

    pub fn ranks(&self) -> usize {
        self.mesh().ranks()
    }

    /// Whether a rank can be timed while the others work: those that share a card's multiprocessors take turns on them.
    pub fn keeps_ranks_apart(&self) -> bool {
        self.kind == DeviceKind::Cpu || !self.virtual_gpus.is_empty() || self.placement.is_each_on_its_own()
    }

    /// For the line that begins a run: nothing where there is one rank.
    pub fn describe(&self) -> String {
        let Mesh { dp, tp } = self.mesh();
        let zero = if self.zero > 0 && dp > 1 { format!(", ZeRO {}", self.zero) } else { String::new() };
        let ranks = match (dp, tp) {
            (1, 1) => String::new(),
            (1, _) => format!(", tp {tp}"),
            (_, 1) => format!(", dp {dp}{zero}"),
            _ => format!(", dp {dp} × tp {tp}{zero}"),
        };
        let link = self.comm.link.as_ref().map_or("", |_| ", over an emulated link");
        let of_each = match self.kind {
            DeviceKind::Cpu if ranks.is_empty() => String::new(),
            DeviceKind::Cpu => format!(" × {} cores", self.cores_per_rank),
            DeviceKind::Cuda if self.placement.is_each_on_its_own() => ", each rank on a CUDA device".to_owned(),
            DeviceKind::Cuda if self.virtual_gpus.is_empty() => ", on a CUDA device".to_owned(),
            DeviceKind::Cuda => format!(", on parts of {:?} multiprocessors of a CUDA device", self.virtual_gpus),
        };
        format!("{ranks}{of_each}{link}")
    }

    /// Starts the ranks, each with its shard; `parameters` loads or draws what a shard has.
    pub fn start(
        &self,
        shards: Vec<Model>,
        options: TrainerOptions,
        parameters: impl Fn(&Model, Split, &Queue) -> Result<Parameters, Failure> + Send + Sync + 'static,
    ) -> Result<Ranks, Failure> {
        let (launch, mesh, card) = (self.clone(), self.mesh(), self.card()?);
        Ranks::start(mesh.ranks(), &self.comm, move |communicator| {
            let rank = communicator.rank();
            let device = launch.device(rank, card.as_ref())?;
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

    /// Where ranks are given more cores than there are.
    pub fn crowding(&self) -> Option<String> {
        let (ranks, each) = (self.ranks(), self.cores_per_rank + self.comm_cores);
        let cores = evenkeel_device::allowed_cores().len();
        let is_crowded = self.kind == DeviceKind::Cpu && ranks * each > cores;
        is_crowded.then(|| {
            format!("{ranks} ranks with {each} cores each share the {cores} there are, and wait for one another")
        })
    }

    /// How cards are divided among the ranks, where they are on any.
    fn card(&self) -> Result<Option<Card>, Failure> {
        if self.kind == DeviceKind::Cpu {
            return Ok(None);
        }
        if self.placement.is_each_on_its_own() {
            // Missing, it is told before any rank starts.
            NcclLibrary::find().map_err(device::fault)?;
            return Ok(Some(Card { parts: Vec::new(), share_bytes: None }));
        }
        let number = self.placement.card_of(0);
        let parts = match &self.virtual_gpus[..] {
            [] => Vec::new(),
            sizes => cuda_parts(number, sizes).map_err(|error| match error {
                CudaError::Parts { .. } => device::mistake(&error).into(),
                _ => device::fault(error),
            })?,
        };
        // Each takes its share, whoever comes first. A lone rank takes what is free.
        let shared = self.ranks() > 1;
        let memory = if shared { Some(cuda_memory(number).map_err(device::fault)?) } else { None };
        Ok(Some(Card { parts, share_bytes: memory.map(|memory| memory.arena_bytes_of(self.ranks())) }))
    }

    fn device(&self, rank: usize, card: Option<&Card>) -> Result<Device, Failure> {
        if let Some(Card { parts, share_bytes }) = card {
            let (name, part) = (format!("rank{rank}"), parts.get(rank).cloned());
            return device::start_cuda_with(CudaOptions {
                name,
                memory_bytes: self.arena_bytes.get(rank).copied().or(*share_bytes),
                part,
                graph: self.graph,
                ..CudaOptions::new(self.placement.card_of(rank))
            });
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

/// What a rank has of its card.
struct Card {
    /// By rank; none where all share all multiprocessors.
    parts: Vec<CudaPart>,
    /// Each rank's share of its memory; what is free where it is alone.
    share_bytes: Option<u64>,
}

/// Ranks that compute the same must come to the same bits, or what they hold of it would drift apart.
fn check_alike(
    uncut: &BTreeSet<Part>,
    virtual_gpus: &[u32],
    cards: &[String],
    attention_repeats: bool,
) -> Result<(), Mistake> {
    let has_attention = uncut.iter().any(|part| matches!(part, Part::Attention(_)));
    let (why, hint) = if !uncut.is_empty() && virtual_gpus.iter().any(|size| *size != virtual_gpus[0]) {
        ("`device.virtual_gpus` of different sizes round differently", "make them equal, or cut the whole model")
    } else if !uncut.is_empty() && cards.iter().any(|name| *name != cards[0]) {
        ("GPUs of different kinds round differently", "choose equal ones with device.cards, or cut the whole model")
    } else if has_attention && !attention_repeats {
        let hint = "set EVENKEEL_CUDA_ATTENTION=repeatable in the environment, or cut attention, too";
        ("cuDNN's gradients of attention are rounded differently each time", hint)
    } else {
        return Ok(());
    };
    let what = format!("the plan leaves {} parts of the model whole on every rank, but {why}", uncut.len());
    Err(Mistake { what, hint: Some(hint.to_owned()) })
}

/// A machine that shows no cards says so when one is started.
fn placement(kind: DeviceKind, ranks: usize, wanted: &[u32], virtual_gpus: &[u32]) -> Placement {
    match kind {
        DeviceKind::Cpu => Placement::default(),
        DeviceKind::Cuda => {
            Placement::on_cards(ranks, wanted, !virtual_gpus.is_empty(), evenkeel_device::cuda_gpus().unwrap_or(0))
        }
    }
}

/// What the ranks' cards are called, as far as the driver shows them; nothing where there is one.
fn names_of(placement: &Placement) -> Vec<String> {
    if !placement.is_each_on_its_own() {
        return Vec::new();
    }
    let found = evenkeel_device::cuda_report().gpus;
    placement.cards().into_iter().filter_map(|card| Some(found.get(card)?.name.clone())).collect()
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
    /// Refuses steps that would not fit, and what the host keeps beside them. Foretells the process's peak where its ranks are on
    /// cores.
    pub fn check_memory(&self, costs: &[Cost], beside: Beside, hint: &str) -> Result<Option<Peak>, Failure> {
        if self.kind == DeviceKind::Cpu {
            let peak = Peak::of(costs, self.cores_per_rank, beside);
            peak.check(hint)?;
            return Ok(Some(peak));
        }
        let most = costs.iter().map(|cost| cost.arena_bytes).max().unwrap_or(0);
        self.check_fit_on_cards("a step", most, hint)?;
        check_fit("a checkpoint's copy of the weights and moments", beside.copy_bytes, "use a smaller model")?;
        Ok(None)
    }
}

impl Launch {
    /// Refuses what one of the ranks has too little memory for on its card.
    pub fn check_fit_on_cards(&self, what: &str, needed_bytes: u64, hint: &str) -> Result<(), Failure> {
        let ranks = self.placement.ranks_on_each();
        self.placement.cards().into_iter().try_for_each(|card| check_fit_on_card(card, ranks, what, needed_bytes, hint))
    }
}

fn cores_per_rank(ranks: usize, wanted: Option<usize>, threads: Option<usize>) -> usize {
    wanted.unwrap_or_else(|| (threads.unwrap_or_else(|| cpu_report().cores) / ranks).max(1))
}

fn link(parallel: &Parallel) -> Option<Link> {
    let bytes_per_s = parallel.link_gb_per_s? * 1e9;
    Some(Link { latency: Duration::from_secs_f64(parallel.link_latency_us * 1e-6), bytes_per_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_every_rank_computes_whole_needs_parts_and_attention_that_come_out_alike() {
        type Case<'a> = (&'a [Part], &'a [u32], &'a [&'a str], bool, Option<&'a str>);
        let cases: [Case; 10] = [
            (&[], &[40, 24], &[], false, None),
            (&[Part::Mlp(0)], &[], &[], false, None),
            (&[Part::Mlp(0)], &[24, 24], &[], false, None),
            (&[Part::Mlp(0)], &[40, 24], &[], true, Some("different sizes")),
            (&[Part::Attention(1)], &[24, 24], &[], false, Some("cuDNN's gradients")),
            (&[Part::Attention(1)], &[24, 24], &[], true, None),
            (&[Part::Attention(1), Part::Head], &[], &[], false, Some("the plan leaves 2 parts")),
            (&[Part::Mlp(0)], &[], &["H200", "H200"], false, None),
            (&[Part::Mlp(0)], &[], &["H200", "A100"], true, Some("GPUs of different kinds")),
            (&[], &[], &["H200", "A100"], true, None),
        ];
        for (uncut, virtual_gpus, cards, repeats, expected) in cases {
            let cards: Vec<String> = cards.iter().map(|name| (*name).to_owned()).collect();
            let found = check_alike(&uncut.iter().copied().collect(), virtual_gpus, &cards, repeats);
            let said = found.err().map(|mistake| mistake.what);
            let is_expected = match expected {
                Some(words) => said.as_ref().is_some_and(|said| said.contains(words)),
                None => said.is_none(),
            };
            assert!(is_expected, "{uncut:?} on {virtual_gpus:?}: {said:?}");
        }
    }
}
