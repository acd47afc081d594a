//! The device that tests run on: the CPU, or a card with `EVENKEEL_TEST_DEVICE=cuda`.
#![allow(dead_code)]

use std::io::Write;

use evenkeel_device::{CpuOptions, CudaError, CudaOptions, CudaPart, Device, cuda_parts};

/// Whether a card was asked for.
pub fn on_cuda() -> bool {
    match std::env::var("EVENKEEL_TEST_DEVICE").as_deref() {
        Err(_) | Ok("cpu") => false,
        Ok("cuda") => true,
        Ok(other) => panic!("EVENKEEL_TEST_DEVICE is `{other}`, expected cpu or cuda"),
    }
}

/// A CPU of so many threads, or a card, which has no threads to choose.
pub fn device(threads: usize, memory_bytes: u64) -> Device {
    device_of_rank(0, threads, memory_bytes)
}

/// The same for one of several ranks.
pub fn device_of_rank(rank: usize, threads: usize, memory_bytes: u64) -> Device {
    if !on_cuda() {
        let options = CpuOptions { memory_bytes, ..CpuOptions::with_threads(threads) };
        return Device::cpu(&options).expect("a CPU device starts");
    }
    let (memory_bytes, part) = (Some(memory_bytes), part(rank));
    match Device::cuda(&CudaOptions { memory_bytes, part, ..CudaOptions::new(card(rank)) }) {
        Ok(device) => device,
        // There is nothing that any test of this program could try.
        Err(error @ (CudaError::NoDevice { .. } | CudaError::Missing { .. })) => {
            // Not `println`, which the test harness would keep to itself.
            let _ = writeln!(std::io::stdout(), "skipped: no CUDA device: {error}");
            std::process::exit(0);
        }
        Err(error) => panic!("{error}"),
    }
}

/// All share the first card, or with `EVENKEEL_TEST_CARDS=own` each rank has the one of its number.
fn card(rank: usize) -> usize {
    match std::env::var("EVENKEEL_TEST_CARDS").as_deref() {
        Err(_) => 0,
        Ok("own") => rank,
        Ok(other) => panic!("EVENKEEL_TEST_CARDS is `{other}`, expected own"),
    }
}

/// Of a card, a rank has its part of `EVENKEEL_TEST_PARTS`, such as `40,40,24,16` multiprocessors; without it all share the card.
fn part(rank: usize) -> Option<CudaPart> {
    let sizes = part_sizes()?;
    let parts = cuda_parts(0, &sizes).unwrap_or_else(|error| panic!("{error}"));
    Some(parts[rank % parts.len()].clone())
}

fn part_sizes() -> Option<Vec<u32>> {
    let sizes = std::env::var("EVENKEEL_TEST_PARTS").ok()?;
    Some(sizes.split(',').map(|size| size.parse().expect("a number of multiprocessors")).collect())
}

/// Whether ranks have unequal parts of a card.
pub fn parts_differ() -> bool {
    part_sizes().is_some_and(|sizes| sizes.iter().any(|size| *size != sizes[0]))
}

/// Devices of every kind that must agree to the bit: CPUs of one, two and three threads; the same card twice.
pub fn devices(memory_bytes: u64) -> Vec<Device> {
    let threads: &[usize] = if on_cuda() { &[1, 1] } else { &[1, 2, 3] };
    threads.iter().map(|&threads| device(threads, memory_bytes)).collect()
}
