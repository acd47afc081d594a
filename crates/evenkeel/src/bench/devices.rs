//! What the ranks of a benchmark compute on.

use evenkeel_device::MOST_PEERS;
use evenkeel_step::{Devices, Strategy};

use super::between;
use crate::device::DeviceChoice;
use crate::strategy::on_gpus;
use crate::{Mistake, placement, text};

#[derive(clap::Args)]
pub struct DeviceArguments {
    /// Cores to compute on; all of them by default.
    #[arg(long, value_parser = between::<1, 1024>)]
    pub threads: Option<usize>,
    /// What to compute on: cores, or GPUs, one for each rank or one for all.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cpu)]
    pub device: DeviceChoice,
    /// With --device cuda: multiprocessors that each rank has for itself, such as 64,56; by default all ranks share all.
    #[arg(long, value_delimiter = ',', value_name = "COUNT")]
    pub virtual_gpus: Vec<u32>,
}

impl DeviceArguments {
    pub fn are_gpus(&self) -> bool {
        self.device == DeviceChoice::Cuda
    }

    /// Refuses options of another device, and numbers that do not suit so many ranks.
    pub fn check(&self, ranks: usize) -> Result<(), Mistake> {
        let mistake = |what: String, hint: &str| Err(Mistake { what, hint: Some(hint.to_owned()) });
        let parts = self.virtual_gpus.len();
        if parts > 0 && !self.are_gpus() {
            return mistake("--virtual-gpus are parts of a GPU".to_owned(), "use --device cuda, too");
        }
        if parts > 0 && parts != ranks {
            let what = format!("--virtual-gpus has {parts} numbers, but the number of ranks is {ranks}");
            return mistake(what, "give one for each rank");
        }
        if self.are_gpus() && self.threads.is_some() {
            return mistake("--threads are a CPU's".to_owned(), "leave it out, or use --device cpu");
        }
        if self.are_gpus() && ranks > MOST_PEERS {
            let what = format!("there are {ranks} ranks, but on GPUs there can be {MOST_PEERS} at most");
            return mistake(what, "use fewer");
        }
        Ok(())
    }

    /// The same ranks on GPUs, if these were chosen. Fewer ranks than --virtual-gpus have the first parts.
    pub fn place(&self, strategy: Strategy) -> Strategy {
        if !self.are_gpus() {
            return strategy;
        }
        let parts = strategy.ranks().min(self.virtual_gpus.len());
        on_gpus(strategy, &self.virtual_gpus[..parts], true)
    }
}

/// Follows the ranks: `tp 2 × 1 core`, `tp 2 on [64, 56] multiprocessors`.
pub fn describe(devices: &Devices) -> String {
    match devices {
        Devices::Cpu { cores_per_rank, .. } => format!(" × {}", text::cores(*cores_per_rank)),
        Devices::Cuda { gpus, multiprocessors, .. } if multiprocessors.is_empty() => {
            match placement::different(gpus).len() {
                1 => " on one GPU".to_owned(),
                count => format!(" on {count} GPUs"),
            }
        }
        Devices::Cuda { multiprocessors, .. } => format!(" on {multiprocessors:?} multiprocessors"),
    }
}
