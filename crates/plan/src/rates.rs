//! What tasks and exchanges take by the figures of a cluster's description, for devices that one does not have.

use std::cell::RefCell;
use std::collections::HashMap;

use evenkeel_comm::ExchangeKind;
use evenkeel_device::{Counts, DType};
use evenkeel_model::ZeroStage;
use evenkeel_step::{Strategy, Task, Work};

use crate::cluster::{Cluster, ClusterDevice, LinkRates};
use crate::counted::Counted;
use crate::prices::Prices;

/// The devices of a run's ranks, as a cluster describes them.
pub struct Published<'a> {
    cluster: &'a Cluster,
    /// By rank.
    devices: Vec<ClusterDevice<'a>>,
    dtype: DType,
    /// Whether each replica keeps a part of the gradients' sums.
    splits_gradients: bool,
    /// By the members of a group.
    links: RefCell<HashMap<Vec<usize>, Option<&'a LinkRates>>>,
}

/// The host's and the device's time for a kernel, however small.
const LAUNCH_S: f64 = 2e-6;

impl<'a> Published<'a> {
    /// The ranks of a strategy, on those with these numbers among all of the cluster.
    pub fn new(
        cluster: &'a Cluster,
        all: &[ClusterDevice<'a>],
        numbers: &[usize],
        strategy: &Strategy,
    ) -> Published<'a> {
        let devices = numbers.iter().map(|&number| all[number]).collect();
        let splits_gradients = strategy.zero >= ZeroStage::Gradients;
        Published { cluster, devices, dtype: strategy.dtype, splits_gradients, links: RefCell::default() }
    }
}

impl Prices for Published<'_> {
    fn place(&self, rank: usize) -> String {
        self.devices[rank].device.to_owned()
    }

    /// Every kernel takes as long as its operations or its bytes, whichever takes longer.
    fn task_s(&self, rank: usize, _task: &Task, kernels: &Counts) -> Option<f64> {
        let rates = &self.cluster.devices[self.devices[rank].device];
        let tflops = if self.dtype == DType::F32 { rates.f32_tflops } else { rates.bf16_tflops };
        let flops_per_s = 1e12 * tflops * rates.efficiency;
        let bytes_per_s = 1e9 * rates.memory_gb_per_s;
        let of_kernel = |count: &evenkeel_device::Count| {
            let work_s = (count.flops as f64 / flops_per_s).max(count.bytes as f64 / bytes_per_s);
            work_s + count.launches as f64 * LAUNCH_S
        };
        Some(kernels.0.values().map(of_kernel).sum())
    }

    /// Rings at the speed of the slowest link between members; messages of latency as in a tree.
    fn exchange_s(&self, _rank: usize, work: Work, bytes: u64, members: &[usize]) -> Option<f64> {
        if members.len() == 1 {
            return Some(0.0);
        }
        let known = self.links.borrow().get(members).copied();
        let link = known.unwrap_or_else(|| {
            let devices: Vec<ClusterDevice> = members.iter().map(|&rank| self.devices[rank]).collect();
            let link = self.cluster.link_among(&devices);
            self.links.borrow_mut().insert(members.to_vec(), link);
            link
        })?;
        let kind = match work {
            Work::ReduceGradients(_) if self.splits_gradients => ExchangeKind::ReduceScatter,
            _ => work.exchange_kind(),
        };
        Some(link.exchange_s(kind, members.len(), bytes))
    }

    fn whole_step_s(&self, _counted: &[Counted], programs_s: f64) -> f64 {
        programs_s
    }

    fn least_step_s(&self, _rank: usize, programs_s: f64) -> f64 {
        programs_s
    }
}
