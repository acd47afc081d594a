//! Measures the kernels of mixtures of experts on a GPU, grouped products beside dense ones of the same operations:
//! `cargo run --release --example experts`.

use evenkeel_device::kernel::{
    Activation, CombinePairs, Copy, Gated, GatedBackward, GatherPairs, GroupedProduct, Kernel, Order, PairDots,
    Placement, Product, RandomNormal, Route, RouteBackward, ScalePairs,
};
use evenkeel_device::{CudaOptions, DType, Device, Queue, Tensor, cuda_report};

/// A layer of Qwen3-30B-A3B and four sequences of 4096 tokens.
const TOKENS: usize = 16384;
const CHOSEN: usize = 8;
const EXPERTS: usize = 128;
const HIDDEN: usize = 2048;
const COLUMNS: usize = 768;
const PAIRS: usize = TOKENS * CHOSEN;
const RUNS: usize = 10;

fn main() {
    println!("{}", cuda_report());
    let device = Device::cuda(&CudaOptions::new(0)).unwrap_or_else(|error| panic!("{error}"));
    products(&device);
    others(&device);
}

fn random(queue: &Queue, rows: usize, cols: usize, dtype: DType) -> Tensor {
    let out = queue.tensor(rows, cols, dtype);
    let placement = Placement::whole(cols);
    queue.launch(RandomNormal { out: out.view(), mean: 0.0, deviation: 1.0, seed: rows as u64, placement });
    out
}

/// The median of some runs, in seconds.
fn seconds(device: &Device, kernel: impl Into<Kernel>) -> f64 {
    let kernel = kernel.into();
    let queue = device.compute();
    (0..2).for_each(|_| queue.launch(kernel.clone()));
    queue.finish();
    device.measure_kernels(true);
    (0..RUNS).for_each(|_| queue.launch(kernel.clone()));
    let mut times = device.take_kernel_times();
    device.measure_kernels(false);
    times.sort_by_key(|time| time.duration);
    times[RUNS / 2].duration.as_secs_f64()
}

/// Where each expert's pairs begin, if experts have such shares of them.
fn offsets(shares: impl Iterator<Item = f64>) -> Vec<u32> {
    let shares: Vec<f64> = shares.collect();
    let all: f64 = shares.iter().sum();
    let mut sum = 0.0;
    let mut offsets = vec![0];
    for share in shares {
        sum += share;
        offsets.push((sum / all * PAIRS as f64).round() as u32);
    }
    offsets
}

fn products(device: &Device) {
    let queue = device.compute();
    let number = |expert: usize| (expert * 37 % EXPERTS) as f64;
    let loads = [
        ("even", offsets((0..EXPERTS).map(|_| 1.0))),
        ("0.5 to 1.5", offsets((0..EXPERTS).map(|expert| 0.5 + number(expert) / EXPERTS as f64))),
        ("1 / rank", offsets((0..EXPERTS).map(|expert| 1.0 / (8.0 + number(expert))))),
    ];
    let (all_columns, f32, bf16) = (2 * COLUMNS, DType::F32, DType::Bf16);
    // Order, columns of a, columns of the output and its type.
    let cases = [
        ("gate and up", Order::NT, HIDDEN, all_columns, bf16),
        ("down", Order::NT, COLUMNS, HIDDEN, bf16),
        ("d narrow", Order::NN, HIDDEN, COLUMNS, bf16),
        ("d x", Order::NN, all_columns, HIDDEN, bf16),
        ("d gate and up", Order::TN, all_columns, HIDDEN, f32),
        ("d down", Order::TN, HIDDEN, COLUMNS, f32),
    ];
    for (what, order, inner, n, out_dtype) in cases {
        let a = random(queue, PAIRS, inner, bf16);
        let rate = |seconds: f64| 2.0 * (PAIRS * inner * n) as f64 / seconds / 1e12;
        let (b, out, dense) = match order {
            Order::NT => {
                let (b, out) = (random(queue, EXPERTS * n, inner, bf16), queue.tensor(PAIRS, n, out_dtype));
                let dense = seconds(device, Product::new(order, &a, &b.row_range(0..n), &out));
                (b, out, vec![dense])
            }
            Order::NN => {
                let (b, out) = (random(queue, EXPERTS * inner, n, bf16), queue.tensor(PAIRS, n, out_dtype));
                let dense = seconds(device, Product::new(order, &a, &b.row_range(0..inner), &out));
                (b, out, vec![dense])
            }
            Order::TN => {
                let (b, out) = (random(queue, PAIRS, n, bf16), queue.tensor(EXPERTS * inner, n, out_dtype));
                // All pairs into one matrix, and an expert's pairs into as many rows as all experts have.
                let deep = seconds(device, Product::new(order, &a, &b, &out.row_range(0..inner)));
                let left = random(queue, PAIRS / EXPERTS, EXPERTS * inner, bf16);
                let flat = Product::new(order, &left, &b.row_range(0..PAIRS / EXPERTS), &out);
                (b, out.clone(), vec![deep, seconds(device, flat)])
            }
        };
        let rates: Vec<String> = dense.iter().map(|&seconds| format!("{:.0}", rate(seconds))).collect();
        println!("{what:14} {order:?} {inner} x {n}: dense {} TFLOP/s", rates.join(" and "));
        for (load, offsets) in &loads {
            let offsets = queue.indices(offsets);
            let (a, b, out, offsets) = (a.view(), b.view(), out.view(), offsets.view());
            for accumulate in [false, true] {
                if accumulate && order != Order::TN {
                    continue;
                }
                let time =
                    seconds(device, GroupedProduct { order, a, b, out, offsets, accumulate, expected_rows: None });
                let shares: Vec<String> = dense.iter().map(|dense| format!("{:.2}", dense / time)).collect();
                let (micros, rate, shares) = (time * 1e6, rate(time), shares.join(" and "));
                println!("    {load:12} {accumulate:5} {micros:8.0} us {rate:6.0} TFLOP/s, {shares} of dense");
            }
        }
    }
}

fn others(device: &Device) {
    let queue = device.compute();
    let report = |what: &str, kernel: Kernel| {
        let bytes = kernel.operation().bytes() as f64;
        let seconds = seconds(device, kernel);
        println!("{what:24} {:8.0} us {:6.0} GB/s", seconds * 1e6, bytes / seconds / 1e9);
    };
    let [pairs_x, others_x] = [0; 2].map(|_| random(queue, PAIRS, HIDDEN, DType::Bf16));
    report("copy", Copy { x: pairs_x.view(), out: others_x.view() }.into());
    let [x, out] = [0; 2].map(|_| random(queue, TOKENS, HIDDEN, DType::Bf16));
    let logits = random(queue, TOKENS, EXPERTS, DType::F32);
    let [weights, dweights] = [0; 2].map(|_| queue.tensor(TOKENS, CHOSEN, DType::F32));
    let chosen = queue.tensor(TOKENS, CHOSEN, DType::U32);
    let [pairs, places] = [0; 2].map(|_| queue.tensor(1, PAIRS, DType::U32));
    let offsets = queue.tensor(1, EXPERTS + 1, DType::U32);
    let (weights, chosen, pairs, places) = (weights.view(), chosen.view(), pairs.view(), places.view());
    let route = Route {
        logits: logits.view(),
        renormalise: true,
        weights,
        chosen,
        pairs,
        places,
        offsets: offsets.view(),
        first: 0,
    };
    report("route", route.into());
    let weighted = [None, Some(weights)];
    for weights in weighted {
        let gather =
            GatherPairs { x: x.view(), pairs, chosen_per_token: CHOSEN, weights, out: others_x.view(), count: None };
        report(if weights.is_some() { "gather, weighted" } else { "gather" }, gather.into());
    }
    for weights in weighted {
        for accumulate in [false, true] {
            let combine = CombinePairs { x: pairs_x.view(), places, weights, out: out.view(), accumulate, count: None };
            let name = if weights.is_some() { "combine, weighted" } else { "combine" };
            report(&format!("{name}{}", if accumulate { ", adding" } else { "" }), combine.into());
        }
    }
    let wide = random(queue, PAIRS, 2 * COLUMNS, DType::Bf16);
    let [gate, up] = [0, 1].map(|i| wide.col_range(i * COLUMNS..(i + 1) * COLUMNS).view());
    let [narrow, dnarrow] = [0; 2].map(|_| random(queue, PAIRS, COLUMNS, DType::Bf16));
    let activation = Activation::Silu;
    report("gated", Gated { activation, gate, up, out: narrow.view(), count: None }.into());
    report(
        "pair dots",
        PairDots { a: narrow.view(), b: dnarrow.view(), pairs: Some(pairs), out: dweights.view(), count: None }.into(),
    );
    report(
        "scale pairs",
        ScalePairs { x: dnarrow.view(), pairs: Some(pairs), weights, out: dnarrow.view(), count: None }.into(),
    );
    report(
        "gated backward",
        GatedBackward { activation, gate, up, dout: dnarrow.view(), dgate: gate, dup: up, count: None }.into(),
    );
    let dlogits = random(queue, TOKENS, EXPERTS, DType::Bf16);
    let backward = RouteBackward {
        logits: logits.view(),
        chosen,
        weights,
        renormalise: true,
        dweights: dweights.view(),
        dlogits: dlogits.view(),
    };
    report("route backward", backward.into());
}
