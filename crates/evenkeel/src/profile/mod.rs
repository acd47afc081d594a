//! `evenkeel profile`: this machine as a host of a cluster, measured without any model; and several such hosts as one cluster.

mod found;
mod measure;
mod merge;

use std::path::{Path, PathBuf};

use evenkeel_device::{DeviceKind, MOST_PEERS, cpu_report};
use evenkeel_model::Cut;
use evenkeel_plan::Cluster;
use evenkeel_step::{Devices, Strategy};
use evenkeel_store::{exists, write_file_atomically};

use crate::device::DeviceChoice;
use crate::launch::Launch;
use crate::strategy::on_gpus;
use crate::{Failure, Mistake, device, text};
use found::MeasuredHost;

#[derive(clap::Args)]
pub struct Arguments {
    /// What to measure: cores, or GPUs.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Cores that count as one device; 1 by default.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    cores_per_rank: Option<u16>,
    /// With --device cuda: parts of the first GPU to measure, by multiprocessors, such as 64,56, instead of every GPU.
    #[arg(long, value_delimiter = ',', value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    virtual_gpus: Vec<u32>,
    /// Write to this file instead of the standard output.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace the file if it exists.
    #[arg(long, requires = "output")]
    overwrite: bool,
    /// Measure nothing, but join the hosts of these files to one cluster.
    #[arg(long, num_args = 1.., value_name = "FILE", conflicts_with_all = ["device", "cores_per_rank", "virtual_gpus"])]
    merge: Vec<PathBuf>,
    /// The network between hosts that have none yet, such as ethernet=1.25,30.
    #[arg(long, value_name = "NAME=GB_PER_S,LATENCY_US", requires = "merge")]
    network: Option<String>,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    if let Some(path) = arguments.output.as_deref().filter(|path| exists(path) && !arguments.overwrite) {
        let what = format!("`{}` exists already", path.display());
        return Err(Mistake { what, hint: Some("choose another --output, or --overwrite it".to_owned()) }.into());
    }
    let written = match &arguments.merge[..] {
        [] => measured(arguments)?,
        files => merge::merged(files, arguments.network.as_deref())?,
    };
    match &arguments.output {
        Some(path) => {
            write_file_atomically(path, |file| file.put(written.as_bytes()))?;
            Ok(describe_use(path))
        }
        None => Ok(written.trim_end().to_owned()),
    }
}

fn describe_use(path: &Path) -> String {
    let path = path.display();
    format!("written to `{path}`; to plan a run on it: evenkeel plan FILE --cluster {path}")
}

/// This machine's host as a description of a cluster. Tells people on the way what was found.
fn measured(arguments: &Arguments) -> Result<String, Failure> {
    let strategy = ranks(arguments)?;
    let host = MeasuredHost::of(&strategy)?;
    let measured = measure::measure(&Launch::from(strategy))?;
    eprintln!("{}", host.table(&measured));
    let (cluster, comments) = host.cluster(&measured);
    let written = cluster.to_toml(&comments);
    // A clock that stands still, or a machine that is beyond all others, shows here.
    Cluster::parse(&written).map_err(|error| Failure::fault(format!("what was measured cannot be: {error}")))?;
    Ok(written)
}

/// A rank for each device.
fn ranks(arguments: &Arguments) -> Result<Strategy, Failure> {
    let mistake = |what: String, hint: &str| Err(Mistake { what, hint: Some(hint.to_owned()) }.into());
    let parts = &arguments.virtual_gpus;
    let replicas = |ranks: usize| Strategy { dp: ranks, ..Strategy::of(Cut::even(1)) };
    match DeviceKind::from(arguments.device) {
        DeviceKind::Cpu => {
            let (cores, each) = (cpu_report().cores, usize::from(arguments.cores_per_rank.unwrap_or(1)));
            if !parts.is_empty() {
                return mistake("--virtual-gpus are parts of a GPU".to_owned(), "use --device cuda, too");
            }
            if each > cores {
                let what = format!("--cores-per-rank is {each}, but there are {}", text::cores(cores));
                return mistake(what, "use fewer");
            }
            let devices = Devices::Cpu { cores_per_rank: each, comm_cores: 0 };
            Ok(Strategy { devices, ..replicas(cores / each) })
        }
        DeviceKind::Cuda => {
            if arguments.cores_per_rank.is_some() {
                return mistake("--cores-per-rank are a CPU's".to_owned(), "leave it out, or use --device cpu");
            }
            let gpus = evenkeel_device::cuda_gpus().map_err(device::fault)?;
            let ranks = if parts.is_empty() { gpus } else { parts.len() };
            if ranks > MOST_PEERS {
                let what = format!("there are {ranks} ranks, but on GPUs there can be {MOST_PEERS} at most");
                return mistake(what, "set CUDA_VISIBLE_DEVICES, or give fewer --virtual-gpus");
            }
            if ranks == 0 {
                return mistake("the driver shows no GPU".to_owned(), "see `evenkeel doctor`");
            }
            Ok(on_gpus(replicas(ranks), parts, true))
        }
    }
}
