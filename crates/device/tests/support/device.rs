//! The device that tests run on: the CPU, or a GPU with `EVENKEEL_TEST_DEVICE=cuda`.
#![allow(dead_code)]

use std::io::Write;

use evenkeel_device::{CpuOptions, CudaError, CudaOptions, CudaPart, Device, cuda_parts};

/// Whether a GPU was asked for.
pub fn on_cuda() -> bool {
    match std::env::var("EVENKEEL_TEST_DEVICE").as_deref() {
        Err(_) | Ok("cpu") => false,
        Ok("cuda") => true,
        Ok(other) => panic!("EVENKEEL_TEST_DEVICE is `{other}`, expected cpu or cuda"),
    }
}

/// A CPU of `threads` threads, or a GPU, which ignores them.
pub fn device(threads: usize, memory_bytes: u64) -> Device {
    device_of_rank(0, threads, memory_bytes)
}

/// The same for one of several ranks.
pub fn device_of_rank(rank: usize, threads: usize, memory_bytes: u64) -> Device {
    if !on_cuda() {
        let options = CpuOptions { memory_bytes, ..CpuOptions::with_threads(threads) };
        return Device::cpu(&options).expect("a CPU device starts");
    }
    let memory_bytes = Some(memory_bytes);
    let part = part(rank);
    match Device::cuda(&CudaOptions { memory_bytes, part, ..CudaOptions::new(gpu(rank)) }) {
        Ok(device) => device,
        // No test of this program can run.
        Err(error @ (CudaError::NoDevice { .. } | CudaError::Missing { .. })) => {
            // Not `println`, which the test harness captures.
            let _ = writeln!(std::io::stdout(), "skipped: no CUDA device: {error}");
            std::process::exit(0);
        }
        Err(error) => panic!("{error}"),
    }
}

/// All ranks share the first GPU; with `EVENKEEL_TEST_CARDS=own`, each has the GPU of its number.
fn gpu(rank: usize) -> usize {
    match std::env::var("EVENKEEL_TEST_CARDS").as_deref() {
        Err(_) => 0,
        Ok("own") => rank,
        Ok(other) => panic!("EVENKEEL_TEST_CARDS is `{other}`, expected own"),
    }
}

/// A rank's part of a GPU by `EVENKEEL_TEST_PARTS`, such as `40,40,24,16` multiprocessors; without it all ranks share the GPU.
fn part(rank: usize) -> Option<CudaPart> {
    let sizes = part_sizes()?;
    let parts = cuda_parts(0, &sizes).unwrap_or_else(|error| panic!("{error}"));
    Some(parts[rank % parts.len()].clone())
}

fn part_sizes() -> Option<Vec<u32>> {
    let sizes = std::env::var("EVENKEEL_TEST_PARTS").ok()?;
    Some(sizes.split(',').map(|size| size.parse().expect("a number of multiprocessors")).collect())
}

/// Whether ranks have unequal parts of a GPU.
pub fn parts_differ() -> bool {
    part_sizes().is_some_and(|sizes| sizes.iter().any(|size| *size != sizes[0]))
}

/// Devices of every kind that must agree to the bit: CPUs of one, two and three threads; the same GPU twice.
pub fn devices(memory_bytes: u64) -> Vec<Device> {
    let threads: &[usize] = if on_cuda() { &[1, 1] } else { &[1, 2, 3] };
    threads.iter().map(|&threads| device(threads, memory_bytes)).collect()
}
