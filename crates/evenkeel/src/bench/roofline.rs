//! What each kernel of a step reaches, beside what this machine reaches by itself.
//!
//! A product's limit is the same product alone, again and again on the same operands. Every other kernel's limit is the
//! lower of two: a plain copy that moves as many bytes, and a large product that takes as many operations. Steps and
//! limits are measured in turns, and medians are compared, for machines change their speed from minute to minute.

use std::collections::BTreeMap;
use std::time::Duration;

use evenkeel_device::kernel::{Copy, Kernel, Order, Placement, Product, RandomNormal};
use evenkeel_device::{DType, Device, DeviceKind, KernelTime, Tensor, Usage};

use super::median;
use crate::text;

const ROUNDS: usize = 7;
/// How often a limit is measured in each round.
const PROBES_PER_ROUND: usize = 3;

/// Kernels that count as one row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    name: &'static str,
    product: Option<Shape>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    order: &'static str,
    dims: [usize; 3],
    wide_out: bool,
    accumulate: bool,
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

/// Operations per second of a large product: what this machine has, measured in some milliseconds.
pub fn peak_flops_per_s(device: &Device, dtype: DType) -> f64 {
    let dims = if device.kind() == DeviceKind::Cuda { [card_side(&device.usage()); 3] } else { PEAK.dims };
    let probe = Probe::of_product(device, Shape { dims, ..PEAK }, dtype);
    // Of many, since others may be using the machine.
    let times = (0..5).flat_map(|_| probe.measure(device));
    let best = times.min().expect("several runs");
    probe.work as f64 / best.as_secs_f64()
}

/// A GPU has more multiprocessors than a small product has tiles, but a rank that shares one may have little memory left.
fn card_side(usage: &Usage) -> usize {
    let room_bytes = usage.capacity_bytes.saturating_sub(usage.live_bytes);
    let bytes = |side: usize| (3 * side * side * size_of::<f32>()) as u64;
    [8192, 4096, 2048].into_iter().find(|&side| bytes(side) <= room_bytes / 2).unwrap_or(1024)
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
    let peak_rate = peak.0.rate(&peak.1);
    let limits = limits.into_iter().map(|(row, (probe, times))| (row, probe.rate(&times))).collect();
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
    // Both in medians, so that what a neighbour takes now and then counts on neither side.
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
        Kernel::Product(product) => Some(Shape {
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
        Some(Shape { order, dims: [m, n, k], accumulate, .. }) => {
            format!("{} {order} {m}×{n}×{k}{}", row.name, if accumulate { " +" } else { "" })
        }
    }
}

fn compute_dtype(times: &[KernelTime]) -> DType {
    let product = times.iter().find_map(|time| if let Kernel::Product(p) = &time.kernel { Some(p) } else { None });
    product.map_or(DType::F32, |product| product.a.dtype)
}

/// A product large enough to reach what the machine has.
const PEAK: Shape = Shape { order: "NN", dims: [1024, 1024, 1024], wide_out: true, accumulate: false };
const COPY_COLS: usize = 1024;

/// A kernel that shows a limit, with its operands.
struct Probe {
    kernel: Kernel,
    /// Operations or bytes.
    work: u64,
    _operands: Vec<Tensor>,
}

impl Probe {
    fn of_product(device: &Device, shape: Shape, dtype: DType) -> Probe {
        let queue = device.compute();
        let [m, n, k] = shape.dims;
        let (order, a, b) = match shape.order {
            "NN" => (Order::NN, [m, k], [k, n]),
            "NT" => (Order::NT, [m, k], [n, k]),
            _ => (Order::TN, [k, m], [k, n]),
        };
        let operand = |[rows, cols]: [usize; 2]| {
            let tensor = queue.tensor(rows, cols, dtype);
            // Numbers with all their digits: constants draw less power, and so run at a higher clock.
            let (out, placement) = (tensor.view(), Placement::whole(cols));
            queue.launch(RandomNormal { out, mean: 0.0, deviation: 1.0, seed: rows as u64, placement });
            tensor
        };
        let out = queue.zeros(m, n, if shape.wide_out { DType::F32 } else { dtype });
        let (a, b) = (operand(a), operand(b));
        let product = Product { accumulate: shape.accumulate, ..Product::new(order, &a, &b, &out) };
        Probe { kernel: product.into(), work: 2 * (m * n * k) as u64, _operands: vec![a, b, out] }
    }

    fn of_copy(device: &Device, bytes: u64) -> Probe {
        let queue = device.compute();
        let (rows, cols) = ((bytes as usize / (8 * COPY_COLS)).max(1), COPY_COLS);
        let (x, out) = (queue.zeros(rows, cols, DType::F32), queue.zeros(rows, cols, DType::F32));
        let kernel = Copy { x: x.view(), out: out.view() };
        Probe { kernel: kernel.into(), work: (8 * rows * cols) as u64, _operands: vec![x, out] }
    }

    /// Several runs; a first one that warms the caches does not count. Each begins anew: a product right behind another
    /// with the same operand would not pack it.
    fn measure(&self, device: &Device) -> Vec<Duration> {
        let run = |_| {
            device.compute().launch(self.kernel.clone());
            device.compute().finish();
        };
        run(0);
        device.measure_kernels(true);
        (0..PROBES_PER_ROUND).for_each(run);
        let times = device.take_kernel_times();
        device.measure_kernels(false);
        times.iter().map(|time| time.duration).collect()
    }

    /// Operations or bytes per nanosecond.
    fn rate(&self, times: &[Duration]) -> f64 {
        self.work as f64 / median_s(times) / 1e9
    }
}
