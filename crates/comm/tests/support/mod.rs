//! Ranks with a small device each, and random operands.
#![allow(dead_code)]

#[path = "../../../device/tests/support/device.rs"]
mod under_test;

#[path = "../../../device/tests/support/nccl.rs"]
pub mod nccl;

use std::time::Duration;

use evenkeel_comm::{Communicator, Options, RankFailure, run_ranks};
use evenkeel_device::{CpuOptions, DType, Device, bf16};

/// Long enough for a busy machine, short enough that a hanging test says why.
pub fn options() -> Options {
    Options { deadline: Duration::from_secs(120), ..with_transport() }
}

/// The transport under test: with `EVENKEEL_TEST_NCCL` that between different GPUs.
pub fn with_transport() -> Options {
    let library_of_rank = nccl::folder().map(|_| nccl::library_of_rank as fn(usize) -> _);
    Options { library_of_rank, ..Options::default() }
}

/// The numbers of ranks that this machine can run.
pub fn possible(ranks: &[usize]) -> Vec<usize> {
    let most = if nccl::folder().is_some() { nccl::MOST_RANKS } else { usize::MAX };
    ranks.iter().copied().filter(|ranks| *ranks <= most).collect()
}

pub use under_test::on_cuda;

pub fn device(rank: usize) -> Device {
    if on_cuda() {
        let device = under_test::device_of_rank(rank, 1, 1 << 26);
        if nccl::folder().is_some() {
            [device.compute(), device.comm()].into_iter().for_each(nccl::load_kernels);
        }
        return device;
    }
    let name = format!("rank{rank}");
    Device::cpu(&CpuOptions { name, memory_bytes: 1 << 26, ..CpuOptions::with_threads(1) }).expect("a device starts")
}

/// Runs `work` on `ranks` ranks, each with its own device.
pub fn try_on_ranks<R: Send>(
    ranks: usize,
    options: &Options,
    work: impl Fn(&Communicator, &Device) -> R + Sync,
) -> Result<Vec<R>, RankFailure> {
    run_ranks(ranks, options, |communicator| {
        let device = device(communicator.rank());
        work(&communicator, &device)
    })
}

pub fn on_ranks<R: Send>(ranks: usize, work: impl Fn(&Communicator, &Device) -> R + Sync) -> Vec<R> {
    try_on_ranks(ranks, &options(), work).unwrap_or_else(|failure| panic!("{failure}"))
}

/// A small seeded generator.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }

    /// Numbers of very different sizes, so that a sum in another order has other bits.
    pub fn numbers(&mut self, len: usize, dtype: DType) -> Vec<f32> {
        let mut number = || {
            let fraction = (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            fraction * [1.0, 64.0, 4096.0, 1e-3][self.next() as usize % 4]
        };
        (0..len).map(|_| rounded(number(), dtype)).collect()
    }
}

pub fn rounded(value: f32, dtype: DType) -> f32 {
    if dtype == DType::Bf16 { bf16::from_f32(value).to_f32() } else { value }
}

/// The same numbers for the same seed and rank.
pub fn numbers_of(seed: u64, rank: usize, len: usize, dtype: DType) -> Vec<f32> {
    Random::new(seed * 1000 + rank as u64).numbers(len, dtype)
}

/// The sum in the order of the ranks, in f32, rounded once.
pub fn sum_of(seed: u64, ranks: impl IntoIterator<Item = usize>, len: usize, dtype: DType) -> Vec<f32> {
    let parts = ranks.into_iter().map(|rank| numbers_of(seed, rank, len, dtype));
    let sum = parts.reduce(|sum, part| sum.iter().zip(&part).map(|(sum, part)| sum + part).collect());
    sum.expect("at least one rank").into_iter().map(|sum| rounded(sum, dtype)).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
