//! Checks whether something fits in memory, this machine's or a GPU's, before any of it is taken.
//!
//! The memory of a training process is the most that it ever has resident, the system's `VmHWM`. [`Peak`] predicts it, part by
//! part; progress lines, metrics and the summary report the actual value. Files of weights are mapped and released as soon as
//! they are read, so they do not count.

use evenkeel_data::BATCHES_READY;
use evenkeel_device::{CudaMemory, Device, DeviceKind, cuda_memory};
use evenkeel_step::{Devices, Strategy, Task};
use evenkeel_train::{Cost, Samples};

use crate::{Failure, Mistake, device, placement, process, text};

/// Predicted peak memory of a process that trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// The tensors of all ranks.
    pub arena_bytes: u64,
    /// Working memory of kernels: packed operands, partial sums.
    pub kernel_bytes: u64,
    /// The programs of steps.
    pub program_bytes: u64,
    pub beside: Beside,
    /// Code, threads, the tokenizer and everything else in the process.
    pub process_bytes: u64,
}

/// Memory of training beside its ranks' tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// The copy of weights and moments that checkpoints are written from while training goes on.
    pub copy_bytes: u64,
    /// Samples that wait for their step.
    pub data_bytes: u64,
}

/// Memory that the process gains later for each rank: stacks of threads, the allocator's reserves, pieces of a file on their way.
/// Measured: 12 to 30 MiB in runs of 0.4 to 2 GiB.
const LATER_BYTES: u64 = 16 << 20;

/// A task of a program, which is copied once while it is written.
const TASK_BYTES: u64 = 2 * size_of::<Task>() as u64;

impl Peak {
    /// For this process, with ranks of so many threads each on this machine's cores.
    pub fn of(costs: &[Cost], threads: usize, beside: Beside) -> Peak {
        Peak::before(costs.len(), beside).with(costs, threads)
    }

    /// For this process, before it has started so many ranks, without what these take.
    fn before(ranks: usize, beside: Beside) -> Peak {
        let process_bytes = process::resident_bytes() + ranks as u64 * LATER_BYTES;
        Peak { beside, process_bytes, ..Peak::default() }
    }

    /// The same process with other costs.
    pub fn with(self, costs: &[Cost], threads: usize) -> Peak {
        let arena_bytes = costs.iter().map(|cost| cost.arena_bytes).sum();
        let kernel_bytes = costs.iter().map(|cost| cost.working.bytes(threads)).sum();
        let program_bytes = costs.iter().map(|cost| cost.tasks).sum::<u64>() * TASK_BYTES;
        Peak { arena_bytes, kernel_bytes, program_bytes, ..self }
    }

    /// Refuses training that this machine has too little memory for.
    pub fn check(&self, hint: &str) -> Result<(), Mistake> {
        check_fit("training", self.bytes(), hint)
    }

    pub fn bytes(&self) -> u64 {
        let Beside { copy_bytes, data_bytes } = self.beside;
        let of_steps = self.arena_bytes + self.kernel_bytes + self.program_bytes;
        of_steps + copy_bytes + data_bytes + self.process_bytes
    }

    /// `1491 MiB: tensors 745, kernels 140, …`
    pub fn describe(&self) -> String {
        let Beside { copy_bytes, data_bytes } = self.beside;
        let parts = [
            ("tensors", self.arena_bytes),
            ("kernels", self.kernel_bytes),
            ("programs", self.program_bytes),
            ("a checkpoint's copy", copy_bytes),
            ("data", data_bytes),
            ("process", self.process_bytes),
        ];
        let told = parts.iter().filter(|(_, bytes)| text::in_mib(*bytes) > 0);
        let told: Vec<String> = told.map(|(name, bytes)| format!("{name} {}", text::in_mib(*bytes))).collect();
        format!("{}: {}", text::mib(self.bytes()), told.join(", "))
    }
}

/// The memory that the ranks of a run can have.
pub enum Room {
    /// All ranks share this machine's. The peak is that of everything else in the process.
    Machine(Peak),
    /// Of its GPU, by rank.
    Gpus(Vec<u64>),
}

impl Room {
    /// Before the ranks start.
    pub fn of(strategy: &Strategy, beside: Beside) -> Room {
        let Devices::Cuda { gpus, .. } = &strategy.devices else {
            return Room::Machine(Peak::before(strategy.ranks(), beside));
        };
        let sharing = ranks_per_gpu(gpus);
        // Checks of memory report a GPU that cannot be asked.
        let of_rank = |gpu: &usize| cuda_memory(*gpu).map_or(u64::MAX, |memory| memory.arena_bytes_of(sharing));
        Room::Gpus(gpus.iter().map(of_rank).collect())
    }

    /// By rank: what steps need over what there is.
    pub fn fullness(&self, strategy: &Strategy, costs: &[Cost]) -> Vec<f64> {
        match self {
            Room::Machine(others) => {
                let needed_bytes = others.with(costs, strategy.devices.cores_per_rank()).bytes();
                vec![needed_bytes as f64 / evenkeel_device::cpu_report().memory_bytes as f64; costs.len()]
            }
            Room::Gpus(bytes) => {
                costs.iter().zip(bytes).map(|(cost, has)| cost.arena_bytes as f64 / *has as f64).collect()
            }
        }
    }
}

/// Refuses steps, and the host's memory beside them, that would not fit. Predicts the process's peak if its ranks are on cores.
pub fn check_steps(strategy: &Strategy, costs: &[Cost], beside: Beside, hint: &str) -> Result<Option<Peak>, Failure> {
    match &strategy.devices {
        Devices::Cpu { cores_per_rank, .. } => {
            let peak = Peak::of(costs, *cores_per_rank, beside);
            peak.check(hint)?;
            Ok(Some(peak))
        }
        Devices::Cuda { gpus, .. } => {
            let most = costs.iter().map(|cost| cost.arena_bytes).max().unwrap_or(0);
            check_fit_on_gpus(gpus, "a step", most, hint)?;
            check_fit("a checkpoint's copy of the weights and moments", beside.copy_bytes, "use a smaller model")?;
            Ok(None)
        }
    }
}

/// Refuses a need that is too large for one of the ranks on these GPUs.
pub fn check_fit_on_gpus(gpus: &[usize], what: &str, needed_bytes: u64, hint: &str) -> Result<(), Failure> {
    let ranks = ranks_per_gpu(gpus);
    placement::different(gpus).into_iter().try_for_each(|gpu| check_fit_on_gpu(gpu, ranks, what, needed_bytes, hint))
}

/// Ranks have a GPU each, or all share one.
fn ranks_per_gpu(gpus: &[usize]) -> usize {
    if placement::different(gpus).len() > 1 { 1 } else { gpus.len() }
}

/// Refuses a need that is too large for a device of this kind.
pub fn check_fit_on(kind: DeviceKind, what: &str, needed_bytes: u64, hint: &str) -> Result<(), Failure> {
    match kind {
        DeviceKind::Cpu => Ok(check_fit(what, needed_bytes, hint)?),
        DeviceKind::Cuda => check_fit_on_gpu(0, 1, what, needed_bytes, hint),
    }
}

/// Refuses a need that is too large for one of so many ranks that share a GPU.
fn check_fit_on_gpu(gpu: usize, ranks: usize, what: &str, needed_bytes: u64, hint: &str) -> Result<(), Failure> {
    Ok(check_card(ranks, what, needed_bytes, &cuda_memory(gpu).map_err(device::fault)?, hint)?)
}

/// A part of a GPU's memory is left to libraries and compiled kernels.
fn check_card(ranks: usize, what: &str, needed_bytes: u64, card: &CudaMemory, hint: &str) -> Result<(), Mistake> {
    let usable_bytes = card.arena_bytes_of(ranks);
    if needed_bytes <= usable_bytes {
        return Ok(());
    }
    let [needed, usable, free, total] =
        [needed_bytes, usable_bytes, card.free_bytes, card.total_bytes].map(text::bytes);
    let (name, of_rank) = (&card.name, if ranks > 1 { format!(" each of {ranks} ranks") } else { String::new() });
    let what =
        format!("{what} needs {needed} of memory, {name} has {usable} to give{of_rank}: {free} of {total} are free");
    let is_busy = needed_bytes <= card.total_bytes / 20 * 19 / ranks as u64;
    let others = if is_busy { "; or end what else uses the GPU, see `nvidia-smi`" } else { "" };
    Err(Mistake { what, hint: Some(format!("{hint}{others}")) })
}

/// Refuses a need that is too large for the machine. `what` begins the sentence.
pub fn check_fit(what: &str, needed_bytes: u64, hint: &str) -> Result<(), Mistake> {
    let machine_bytes = evenkeel_device::cpu_report().memory_bytes;
    if needed_bytes <= machine_bytes {
        return Ok(());
    }
    let (needed, machine) = (text::bytes(needed_bytes), text::bytes(machine_bytes));
    let what = format!("{what} needs {needed} of memory, this machine has {machine}");
    Err(Mistake { what, hint: Some(hint.to_owned()) })
}

/// The peak memory of `run` on a device of this kind with so many threads, from a dry run.
pub fn peak_bytes(kind: DeviceKind, threads: usize, run: impl FnOnce(&Device)) -> u64 {
    let device = Device::dry();
    run(&device);
    let arena_bytes = device.usage().extent_bytes;
    match kind {
        DeviceKind::Cpu => arena_bytes + device.working_memory().bytes(threads),
        DeviceKind::Cuda => arena_bytes,
    }
}

/// Bytes of samples on the host at a time: the micro-batches of a step, the ranks' part of them, and those that are ready.
pub fn samples_bytes(micro: &Samples, strategy: &Strategy) -> u64 {
    (strategy.micros_per_step() + strategy.ranks() + BATCHES_READY + 1) as u64 * micro.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_peak_are_told_apart_and_those_of_nothing_are_left_out() {
        let beside = Beside { copy_bytes: 520 << 20, data_bytes: 0 };
        let peak = Peak {
            arena_bytes: 745 << 20,
            kernel_bytes: 140 << 20,
            beside,
            process_bytes: 45 << 20,
            ..Peak::default()
        };
        assert_eq!(peak.describe(), "1450 MiB: tensors 745, kernels 140, a checkpoint's copy 520, process 45");
    }

    #[test]
    fn a_card_that_is_too_small_or_too_busy_is_refused_with_what_was_planned_and_what_is_there() {
        const GIB: u64 = 1 << 30;
        let card = |free: u64| CudaMemory { name: "a card".to_owned(), free_bytes: free * GIB, total_bytes: 80 * GIB };
        let told = |needed: u64, free: u64| check_card(1, "a step", needed * GIB, &card(free), "train less");
        assert_eq!(told(70, 78), Ok(()));
        let expected = "a step needs 70.0 GiB of memory, a card has 26.0 GiB to give: 30.0 GiB of 80.0 GiB are free";
        let hint = "train less; or end what else uses the GPU, see `nvidia-smi`";
        assert_eq!(told(70, 30), Err(Mistake { what: expected.to_owned(), hint: Some(hint.to_owned()) }));
        let expected = "a step needs 90.0 GiB of memory, a card has 74.0 GiB to give: 78.0 GiB of 80.0 GiB are free";
        assert_eq!(told(90, 78), Err(Mistake { what: expected.to_owned(), hint: Some("train less".to_owned()) }));
        let of_four = |needed: u64| check_card(4, "a step", needed * GIB, &card(70), "train less");
        assert_eq!(of_four(16), Ok(()));
        let expected = "a step needs 17.0 GiB of memory, a card has 16.0 GiB to give each of 4 ranks: 70.0 GiB of 80.0 GiB \
                        are free";
        assert_eq!(of_four(17).map_err(|mistake| mistake.what), Err(expected.to_owned()));
    }
}
