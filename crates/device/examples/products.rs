//! Measures products: GFLOP/s of each role of some linear layers, beside the `gemm-f32` crate on one thread.
//!
//! ```sh
//! cargo run --release --example products -- [threads] [rounds]
//! ```
//!
//! Machines are shared and clocks vary, so everything is measured in turns and the best of all rounds is printed.

use std::time::Instant;

use evenkeel_device::kernel::{Order, Product};
use evenkeel_device::{CpuOptions, DType, Device, Tensor};

/// Tokens, inputs and outputs of a layer.
const LAYERS: [[usize; 3]; 10] = [
    [1024, 512, 512],
    [1024, 512, 256],
    [1024, 512, 1408],
    [1024, 1408, 512],
    [1024, 512, 4096],
    [4096, 1024, 1024],
    [4096, 1024, 512],
    [4096, 1024, 2816],
    [4096, 2816, 1024],
    [4096, 1024, 4096],
];

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>().expect("a number"));
    let threads = arguments.next().unwrap_or(1);
    let rounds = arguments.next().unwrap_or(10);
    let options = CpuOptions { memory_bytes: 2 << 30, ..CpuOptions::with_threads(threads) };
    let device = Device::cpu(&options).expect("a CPU device starts");
    println!("{threads} threads, GFLOP/s      gemm ×1     f32    bf16");
    for [tokens, inputs, outputs] in LAYERS {
        let roles = [
            ("forward", Order::NT, [tokens, outputs, inputs]),
            ("input gradient", Order::NN, [tokens, inputs, outputs]),
            ("weight gradient", Order::TN, [outputs, inputs, tokens]),
        ];
        println!("{tokens} tokens, {inputs} -> {outputs}");
        for (role, order, dims) in roles {
            let [gemm, f32, bf16] = measure(&device, order, dims, rounds);
            println!("  {role:20} {order:?} {gemm:8.0} {f32:7.0} {bf16:7.0}");
        }
    }
}

/// GFLOP/s of `gemm-f32` alone, of our f32 and of our bf16.
fn measure(device: &Device, order: Order, [m, n, k]: [usize; 3], rounds: usize) -> [f64; 3] {
    let [f32, bf16] = [DType::F32, DType::Bf16].map(|dtype| operands(device, order, [m, n, k], dtype));
    let mut host = Host { a: vec![0.5; m * k], b: vec![0.25; k * n], out: vec![0.0; m * n] };
    let mut best = [f64::INFINITY; 3];
    for _ in 0..rounds {
        let times = [host.seconds(order, [m, n, k]), seconds(device, order, &f32), seconds(device, order, &bf16)];
        best = std::array::from_fn(|i| best[i].min(times[i]));
    }
    best.map(|seconds| 2.0 * (m * n * k) as f64 / seconds / 1e9)
}

fn operands(device: &Device, order: Order, [m, n, k]: [usize; 3], dtype: DType) -> [Tensor; 3] {
    let (a, b) = match order {
        Order::NN => ([m, k], [k, n]),
        Order::NT => ([m, k], [n, k]),
        Order::TN => ([k, m], [k, n]),
    };
    let out = if order == Order::TN { DType::F32 } else { dtype };
    let queue = device.compute();
    let filled = |[rows, cols]: [usize; 2], dtype, value| queue.floats(rows, cols, dtype, &vec![value; rows * cols]);
    [filled(a, dtype, 0.5), filled(b, dtype, 0.25), filled([m, n], out, 0.0)]
}

/// Three products one after the other, as in training, so that the team is awake; the fastest counts.
fn seconds(device: &Device, order: Order, [a, b, out]: &[Tensor; 3]) -> f64 {
    device.measure_kernels(true);
    for _ in 0..3 {
        let product = Product::new(order, a, b, out);
        device.compute().launch(if order == Order::TN { product.accumulating() } else { product });
    }
    let times = device.take_kernel_times();
    device.measure_kernels(false);
    times.iter().map(|time| time.duration.as_secs_f64()).fold(f64::INFINITY, f64::min)
}

struct Host {
    a: Vec<f32>,
    b: Vec<f32>,
    out: Vec<f32>,
}

impl Host {
    fn seconds(&mut self, order: Order, [m, n, k]: [usize; 3]) -> f64 {
        let (a_col, a_row) = if order == Order::TN { (m, 1) } else { (1, k) };
        let (b_col, b_row) = if order == Order::NT { (k, 1) } else { (1, n) };
        let start = Instant::now();
        // Transposed, since the library stores columns.
        // SAFETY: the strides are those of whole matrices of these sizes.
        unsafe {
            gemm_f32::gemm::f32::get_gemm_fn()(
                n,
                m,
                k,
                self.out.as_mut_ptr(),
                n as isize,
                1,
                order == Order::TN,
                self.b.as_ptr(),
                b_row as isize,
                b_col as isize,
                self.a.as_ptr(),
                a_row as isize,
                a_col as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
            );
        }
        start.elapsed().as_secs_f64()
    }
}
