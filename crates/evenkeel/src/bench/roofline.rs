//! Compares the speed of each kernel in a step with the speed that this machine reaches by itself.
//!
//! A product's limit is the same product alone, again and again on the same operands. Every other kernel's limit is the lower of
//! two: a plain copy that moves as many bytes, and a large product that takes as many operations. Steps and limits are measured
//! in turns, and medians are compared, because machines change their speed from minute to minute.

use std::collections::BTreeMap;
use std::time::Duration;

use evenkeel_device::kernel::{Kernel, Order};
use evenkeel_device::{DType, Device, KernelTime};
use evenkeel_train::{PEAK, Probe, ProductShape};

use super::median;
use crate::text;

const ROUNDS: usize = 7;

/// Kernels that count as one row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    name: &'static str,
    product: Option<ProductShape>,
}

/// The launches of a row in all measured steps.
#[derive(Default)]
struct Launches {
    times: Vec<Duration>,
    flops: u64,
    bytes: u64,
}

impl Launches {
    fn count(&self) -> usize {
        self.times.len()
    }

    fn time(&self) -> Duration {
        self.times.iter().sum()
    }
}

/// Runs steps and limits in turns, and prints the table of the steps' kernels.
pub fn table(device: &Device, mut step: impl FnMut() -> Duration) -> String {
    let (_, first) = measured(device, &mut step);
    let dtype = compute_dtype(&first);
    let peak = Probe::of_product(device, PEAK, dtype);
    let mut limits: BTreeMap<Row, Probe> = BTreeMap::new();
    for time in &first {
        let row = row(&time.kernel);
        let probe = || match row.product {
            Some(shape) => Probe::of_product(device, shape, dtype),
            None => Probe::of_copy(device, time.kernel.operation().bytes()),
        };
        limits.entry(row).or_insert_with(probe);
    }
    // The operands are filled before anything is measured again.
    device.compute().finish();
    let mut peak = (peak, Vec::new());
    let mut limits: BTreeMap<Row, (Probe, Vec<Duration>)> =
        limits.into_iter().map(|(row, probe)| (row, (probe, Vec::new()))).collect();
    let mut rows: BTreeMap<Row, Launches> = BTreeMap::new();
    let mut steps = Vec::new();
    for _ in 0..ROUNDS {
        let (duration, times) = measured(device, &mut step);
        steps.push(duration);
        for time in times {
            let launches = rows.entry(row(&time.kernel)).or_default();
            launches.times.push(time.duration);
            launches.flops += time.kernel.operation().flops();
            launches.bytes += time.kernel.operation().bytes();
        }
        for (probe, times) in limits.values_mut().chain([&mut peak]) {
            times.extend(probe.measure(device));
        }
    }
    let peak_rate = rate(&peak.0, &peak.1);
    let limits = limits.into_iter().map(|(row, (probe, times))| (row, rate(&probe, &times))).collect();
    lay_out(rows, &limits, peak_rate, &steps)
}

fn lay_out(rows: BTreeMap<Row, Launches>, limits: &BTreeMap<Row, f64>, peak_rate: f64, steps: &[Duration]) -> String {
    let whole = steps.iter().sum::<Duration>().as_secs_f64();
    let per_step = |seconds: f64| format!("{:.2} ms", seconds * 1e3 / steps.len() as f64);
    let mut rows: Vec<(Row, Launches)> = rows.into_iter().collect();
    rows.sort_by_key(|(_, launches)| std::cmp::Reverse(launches.time()));
    let lines: Vec<Vec<String>> = rows
        .iter()
        .map(|(row, launches)| {
            let seconds = launches.time().as_secs_f64();
            // Launches of one product are alike; those of another kernel have many sizes.
            let typical = match row.product {
                Some(_) => median_s(&launches.times) * launches.count() as f64,
                None => seconds,
            };
            let (flops, bytes) = (launches.flops as f64 / typical / 1e9, launches.bytes as f64 / typical / 1e9);
            let limit = limits[row];
            let by_flops = row.product.is_some() || flops / peak_rate > bytes / limit;
            let (achieved, limit, unit) = match row.product {
                Some(_) => (flops, limit, "GFLOP/s"),
                None if by_flops => (flops, peak_rate, "GFLOP/s"),
                None => (bytes, limit, "GB/s"),
            };
            vec![
                describe(row),
                (launches.count() / steps.len()).to_string(),
                per_step(seconds),
                percent(seconds / whole),
                format!("{achieved:.0} {unit}"),
                format!("{limit:.0} {unit}"),
                percent(achieved / limit),
            ]
        })
        .collect();
    let time = |only_products: bool| -> f64 {
        let counted = rows.iter().filter(|(row, _)| !only_products || row.product.is_some());
        counted.map(|(_, launches)| launches.time().as_secs_f64()).sum()
    };
    // Both are medians, so a neighbour's occasional work counts on neither side.
    let products = rows.iter().filter(|(row, _)| row.product.is_some());
    let (taken, alone) = products.fold((0.0, 0.0), |(taken, alone), (row, launches)| {
        let typical = median_s(&launches.times) * launches.count() as f64;
        (taken + typical, alone + launches.flops as f64 / (limits[row] * 1e9))
    });
    let header = ["kernel", "launches", "per step", "of the step", "achieved", "limit", "share"];
    format!(
        "{}\na step takes {}: products {}, other kernels {}, between kernels {}\nproducts reach {} of what they reach alone, \
         weighted by time\n{LEGEND}",
        text::table(&header, &lines),
        per_step(whole),
        percent(time(true) / whole),
        percent((time(false) - time(true)) / whole),
        percent(1.0 - time(false) / whole),
        percent(alone / taken),
    )
}

const LEGEND: &str = "\
NN, NT, TN: which operands are transposed; rows × columns × depth; +: added to what is there. Limits are measured in turns
with the steps: of a product, the same product alone; of others, a copy of as many bytes or a large product of as many
operations, whichever is slower. Limits, and what products achieve, are medians.";

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn median_s(times: &[Duration]) -> f64 {
    median(times.iter().map(Duration::as_secs_f64))
}

/// A step's duration and its kernels.
fn measured(device: &Device, step: &mut impl FnMut() -> Duration) -> (Duration, Vec<KernelTime>) {
    device.measure_kernels(true);
    let duration = step();
    device.measure_kernels(false);
    (duration, device.take_kernel_times())
}

fn row(kernel: &Kernel) -> Row {
    let product = match kernel {
        Kernel::Product(product) => Some(ProductShape {
            order: match product.order {
                Order::NN => "NN",
                Order::NT => "NT",
                Order::TN => "TN",
            },
            dims: product.dims(),
            wide_out: product.out.dtype == DType::F32,
            accumulate: product.accumulate,
        }),
        _ => None,
    };
    Row { name: kernel.name(), product }
}

fn describe(row: &Row) -> String {
    match row.product {
        None => row.name.to_owned(),
        Some(ProductShape { order, dims: [m, n, k], accumulate, .. }) => {
            format!("{} {order} {m}×{n}×{k}{}", row.name, if accumulate { " +" } else { "" })
        }
    }
}

fn compute_dtype(times: &[KernelTime]) -> DType {
    let product = times.iter().find_map(|time| if let Kernel::Product(p) = &time.kernel { Some(p) } else { None });
    product.map_or(DType::F32, |product| product.a.dtype)
}

/// Operations or bytes per nanosecond.
fn rate(probe: &Probe, times: &[Duration]) -> f64 {
    probe.work as f64 / median_s(times) / 1e9
}
