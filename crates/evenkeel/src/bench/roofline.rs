//! What each kernel of a step reaches, beside what this machine reaches on the same work by itself.
//!
//! A product's limit is the same product alone, again and again on the same operands. Every other kernel's limit is a
//! plain copy that moves as many bytes.

use std::collections::BTreeMap;
use std::time::Duration;

use evenkeel_device::kernel::{Copy, Fill, Kernel, Order, Product};
use evenkeel_device::{DType, Device, KernelTime};

use crate::text;

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

#[derive(Default)]
struct Total {
    launches: usize,
    time: Duration,
    flops: u64,
    bytes: u64,
}

/// The table of the given steps' kernels.
pub fn table(device: &Device, times: &[KernelTime], steps: &[Duration]) -> String {
    let mut rows: BTreeMap<Row, Total> = BTreeMap::new();
    for time in times {
        let total = rows.entry(row(&time.kernel)).or_default();
        total.launches += 1;
        total.time += time.duration;
        total.flops += time.kernel.operation().flops();
        total.bytes += time.kernel.operation().bytes();
    }
    let whole = steps.iter().sum::<Duration>().as_secs_f64();
    let per_step = |seconds: f64| format!("{:.2} ms", seconds * 1e3 / steps.len() as f64);
    let mut rows: Vec<(Row, Total)> = rows.into_iter().collect();
    rows.sort_by_key(|(_, total)| std::cmp::Reverse(total.time));
    let dtype = compute_dtype(times);
    let mut lines: Vec<Vec<String>> = Vec::new();
    for (row, total) in &rows {
        let seconds = total.time.as_secs_f64();
        let (achieved, limit, unit) = match row.product {
            Some(shape) => (total.flops as f64 / seconds / 1e9, product_limit(device, shape, dtype), "GFLOP/s"),
            None => {
                (total.bytes as f64 / seconds / 1e9, copy_limit(device, total.bytes / total.launches as u64), "GB/s")
            }
        };
        lines.push(vec![
            describe(row),
            (total.launches / steps.len()).to_string(),
            per_step(seconds),
            percent(seconds / whole),
            format!("{achieved:.0} {unit}"),
            format!("{limit:.0} {unit}"),
            percent(achieved / limit),
        ]);
    }
    let time = |only_products: bool| -> f64 {
        let counted = rows.iter().filter(|(row, _)| !only_products || row.product.is_some());
        counted.map(|(_, total)| total.time.as_secs_f64()).sum()
    };
    let header = ["kernel", "launches", "per step", "of the step", "achieved", "alone", "share"];
    format!(
        "{}\na step takes {}: products {}, other kernels {}, between kernels {}",
        text::table(&header, &lines),
        per_step(whole),
        percent(time(true) / whole),
        percent((time(false) - time(true)) / whole),
        percent(1.0 - time(false) / whole),
    )
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
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

/// The best of many runs of one kernel, in operations or bytes per nanosecond.
fn best_rate(device: &Device, kernel: impl Into<Kernel>, work: u64) -> f64 {
    let kernel = kernel.into();
    device.compute().finish();
    device.measure_kernels(true);
    (0..15).for_each(|_| device.compute().launch(kernel.clone()));
    let times = device.take_kernel_times();
    device.measure_kernels(false);
    let best = times.iter().map(|time| time.duration).min().expect("several runs");
    work as f64 / best.as_secs_f64() / 1e9
}

fn product_limit(device: &Device, shape: Shape, dtype: DType) -> f64 {
    let queue = device.compute();
    let [m, n, k] = shape.dims;
    let (order, a, b) = match shape.order {
        "NN" => (Order::NN, [m, k], [k, n]),
        "NT" => (Order::NT, [m, k], [n, k]),
        _ => (Order::TN, [k, m], [k, n]),
    };
    let operand = |[rows, cols]: [usize; 2]| {
        let tensor = queue.tensor(rows, cols, dtype);
        queue.launch(Fill { out: tensor.view(), value: 0.5 });
        tensor
    };
    let out = queue.zeros(m, n, if shape.wide_out { DType::F32 } else { dtype });
    let (a, b) = (operand(a), operand(b));
    let product = Product { accumulate: shape.accumulate, ..Product::new(order, &a, &b, &out) };
    best_rate(device, product, 2 * (m * n * k) as u64)
}

const COPY_COLS: usize = 1024;

fn copy_limit(device: &Device, bytes: u64) -> f64 {
    let queue = device.compute();
    let (rows, cols) = ((bytes as usize / (8 * COPY_COLS)).max(1), COPY_COLS);
    let (x, out) = (queue.zeros(rows, cols, DType::F32), queue.zeros(rows, cols, DType::F32));
    best_rate(device, Copy { x: x.view(), out: out.view() }, (8 * rows * cols) as u64)
}
