//! `evenkeel bench all-reduce`: sums over ranks that are threads of this process.

use std::time::{Duration, Instant};

use evenkeel_comm::{Communicator, Options, run_ranks};
use evenkeel_device::{CpuOptions, Device, allowed_cores};

use super::between;
use crate::device::Precision;
use crate::memory::check_fit;
use crate::{Failure, text};

#[derive(clap::Args)]
pub struct Arguments {
    /// Ranks, one core each.
    #[arg(long, default_value_t = 2, value_parser = between::<2, 256>)]
    ranks: usize,
    /// Sizes of the tensors that are summed, in MiB.
    #[arg(long, value_delimiter = ',', default_value = "4,64", value_parser = between::<1, 65536>)]
    mib: Vec<usize>,
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    dtype: Precision,
    /// How often the sizes take turns. In a turn a size is summed five times, and the first is not timed.
    #[arg(long, default_value_t = 10, value_parser = between::<1, 100000>)]
    turns: usize,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Sums of a size in a row. The first finds the caches full of other sizes and is not timed.
const SUMS_OF_A_TURN: usize = 5;

/// The sums of one size.
struct Measured {
    bytes: u64,
    median_s: f64,
    best_s: f64,
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    let needed = arguments.ranks as u64 * arguments.mib.iter().map(|&mib| bytes(mib)).sum::<u64>();
    check_fit("the tensors of all ranks", needed, "use fewer --ranks or smaller --mib")?;
    let options = Options { deadline: Duration::from_secs(60), ..Options::default() };
    let of_ranks = run_ranks(arguments.ranks, &options, |communicator| time_sums(arguments, &communicator))?;
    let measured: Vec<Measured> = arguments
        .mib
        .iter()
        .enumerate()
        .map(|(size, &mib)| {
            // A sum is over when the last rank has it.
            let last = |repeat: usize| of_ranks.iter().map(|times| times[size][repeat]).fold(0.0, f64::max);
            let mut seconds: Vec<f64> = (0..of_ranks[0][size].len()).map(last).collect();
            seconds.sort_by(f64::total_cmp);
            Measured { bytes: bytes(mib), median_s: seconds[seconds.len() / 2], best_s: seconds[0] }
        })
        .collect();
    Ok(if arguments.json { json(arguments, &measured) } else { report(arguments, &measured) })
}

fn bytes(mib: usize) -> u64 {
    (mib as u64) << 20
}

/// Seconds of each sum on this rank, by size: from the call to the end, the way through the queue included.
fn time_sums(arguments: &Arguments, communicator: &Communicator) -> Vec<Vec<f64>> {
    let rank = communicator.rank();
    let allowed = allowed_cores();
    let cores = if arguments.ranks <= allowed.len() { vec![allowed[rank]] } else { Vec::new() };
    let options = CpuOptions { name: format!("rank{rank}"), cores, ..CpuOptions::with_threads(1) };
    let device = Device::cpu(&options).expect("a device for each rank");
    let (queue, dtype) = (device.comm(), arguments.dtype.into());
    let group = communicator.group("all", &(0..communicator.size()).collect::<Vec<_>>());
    let len = |mib: usize| bytes(mib) as usize / evenkeel_device::DType::size_bytes(dtype);
    let tensors: Vec<_> = arguments.mib.iter().map(|&mib| queue.zeros(1, len(mib), dtype)).collect();
    let mut times = vec![Vec::new(); tensors.len()];
    for _ in 0..arguments.turns {
        for (tensor, times) in tensors.iter().zip(&mut times) {
            for sum in 0..SUMS_OF_A_TURN {
                queue.finish();
                group.exchange(0);
                let start = Instant::now();
                group.all_reduce(queue, tensor);
                queue.finish();
                if sum > 0 {
                    times.push(start.elapsed().as_secs_f64());
                }
            }
        }
    }
    times
}

fn json(arguments: &Arguments, measured: &[Measured]) -> String {
    let size = |m: &Measured| {
        let bytes_per_s = m.bytes as f64 / m.median_s;
        serde_json::json!({ "bytes": m.bytes, "median_s": m.median_s, "min_s": m.best_s, "bytes_per_s": bytes_per_s })
    };
    let sizes: Vec<_> = measured.iter().map(size).collect();
    let (ranks, dtype, turns) = (arguments.ranks, arguments.dtype.name(), arguments.turns);
    serde_json::json!({ "ranks": ranks, "dtype": dtype, "turns": turns, "sizes": sizes }).to_string()
}

fn report(arguments: &Arguments, measured: &[Measured]) -> String {
    let (ranks, dtype) = (arguments.ranks, arguments.dtype.name());
    let count = arguments.turns * (SUMS_OF_A_TURN - 1);
    let mut lines = vec![format!("all-reduce of {dtype} among {ranks} ranks of one process, {count} of each size")];
    lines.extend(measured.iter().map(|&Measured { bytes, median_s, best_s }| {
        let [median_ms, best_ms] = [median_s, best_s].map(|seconds| seconds * 1e3);
        let gb_per_s = bytes as f64 / median_s / 1e9;
        let size = text::bytes(bytes);
        format!("{size:>10}  {median_ms:8.3} ms median, {best_ms:8.3} ms best  {gb_per_s:6.1} GB/s")
    }));
    lines.join("\n")
}
