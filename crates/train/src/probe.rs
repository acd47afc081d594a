//! Measures this machine's own speed on a kernel, in some milliseconds.

use std::time::Duration;

use evenkeel_device::kernel::{Copy, Kernel, Order, Placement, Product, RandomNormal};
use evenkeel_device::{DType, Device, DeviceKind, Tensor, Usage};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProductShape {
    pub order: &'static str,
    pub dims: [usize; 3],
    pub wide_out: bool,
    pub accumulate: bool,
}

/// Operations per second of a large product.
pub fn peak_flops_per_s(device: &Device, dtype: DType) -> f64 {
    let dims = if device.kind() == DeviceKind::Cuda { [largest_side(&device.usage()); 3] } else { PEAK.dims };
    let probe = Probe::of_product(device, ProductShape { dims, ..PEAK }, dtype);
    // The best of many, since others may be using the machine.
    let times = (0..5).flat_map(|_| probe.measure(device));
    let best = times.min().expect("several runs");
    probe.work as f64 / best.as_secs_f64()
}

/// A GPU has more multiprocessors than a small product has tiles, but a rank that shares one may have little memory left.
fn largest_side(usage: &Usage) -> usize {
    let room_bytes = usage.capacity_bytes.saturating_sub(usage.live_bytes);
    let bytes = |side: usize| (3 * side * side * size_of::<f32>()) as u64;
    [8192, 4096, 2048].into_iter().find(|&side| bytes(side) <= room_bytes / 2).unwrap_or(1024)
}

/// A product large enough to reach the machine's peak.
pub const PEAK: ProductShape =
    ProductShape { order: "NN", dims: [1024, 1024, 1024], wide_out: true, accumulate: false };
const COPY_COLS: usize = 1024;
/// Repetitions of a measurement.
const REPEATS: usize = 3;

/// A kernel that shows a limit, with its operands.
pub struct Probe {
    kernel: Kernel,
    /// Operations or bytes.
    pub work: u64,
    _operands: Vec<Tensor>,
}

impl Probe {
    pub fn of_product(device: &Device, shape: ProductShape, dtype: DType) -> Probe {
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

    pub fn of_copy(device: &Device, bytes: u64) -> Probe {
        let queue = device.compute();
        let (rows, cols) = ((bytes as usize / (8 * COPY_COLS)).max(1), COPY_COLS);
        let (x, out) = (queue.zeros(rows, cols, DType::F32), queue.zeros(rows, cols, DType::F32));
        let kernel = Copy { x: x.view(), out: out.view() };
        Probe { kernel: kernel.into(), work: (8 * rows * cols) as u64, _operands: vec![x, out] }
    }

    /// Several runs, after one that warms the caches and does not count. Each begins anew: a product right behind another with
    /// the same operand would not pack it.
    pub fn measure(&self, device: &Device) -> Vec<Duration> {
        let run = |_| {
            device.compute().launch(self.kernel.clone());
            device.compute().finish();
        };
        run(0);
        device.measure_kernels(true);
        (0..REPEATS).for_each(run);
        let times = device.take_kernel_times();
        device.measure_kernels(false);
        times.iter().map(|time| time.duration).collect()
    }
}
