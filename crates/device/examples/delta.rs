//! Measures linear attention on a GPU: `cargo run --release --example delta`. Each kernel runs several times on operands of a training
//! step's size; the median is printed beside the bytes and operations that it needs at least.

use evenkeel_device::kernel::{
    DeltaGates, DeltaRule, DeltaRuleBackward, DynamicConv, DynamicConvBackward, GatedNorm, GatedNormBackward, Kernel,
    Placement, RandomNormal, Segments, ShortConv, ShortConvBackward,
};
use evenkeel_device::{CudaOptions, DType, Device, Heads, Queue, Tensor};

const RUNS: usize = 10;

/// Heads of a rule over sequences of equal lengths.
#[derive(Clone, Copy, Debug)]
struct Shape {
    sequences: usize,
    tokens: usize,
    key_heads: usize,
    value_heads: usize,
    key: usize,
    value: usize,
}

const fn shape(
    [sequences, tokens]: [usize; 2],
    [key_heads, value_heads]: [usize; 2],
    [key, value]: [usize; 2],
) -> Shape {
    Shape { sequences, tokens, key_heads, value_heads, key, value }
}

/// The first is that of small models of the Qwen3.5 kind, the next that of large ones; then few heads, also those of Jet-Nemotron-2B,
/// wide ones, and generation.
const SHAPES: [Shape; 6] = [
    shape([8, 2048], [16, 16], [128, 128]),
    shape([2, 4096], [16, 48], [128, 128]),
    shape([1, 8192], [8, 8], [128, 128]),
    shape([1, 4096], [12, 12], [96, 192]),
    shape([8, 2048], [8, 8], [256, 256]),
    shape([64, 1], [16, 32], [128, 128]),
];

fn main() {
    let options = CudaOptions { memory_bytes: Some(32 << 30), ..CudaOptions::new(0) };
    let device = Device::cuda(&options).unwrap_or_else(|error| panic!("{error}"));
    for shape in SHAPES {
        rule(&device, shape);
    }
    around(&device);
}

fn random(queue: &Queue, rows: usize, cols: usize, dtype: DType) -> Tensor {
    let out = queue.tensor(rows, cols, dtype);
    let placement = Placement::whole(cols);
    queue.launch(RandomNormal { out: out.view(), mean: 0.0, deviation: 1.0, seed: rows as u64, placement });
    out
}

fn time(device: &Device, what: &str, kernel: impl Into<Kernel>) {
    let kernel = kernel.into();
    let queue = device.compute();
    queue.launch(kernel.clone());
    queue.finish();
    device.measure_kernels(true);
    (0..RUNS).for_each(|_| queue.launch(kernel.clone()));
    let mut times = device.take_kernel_times();
    device.measure_kernels(false);
    times.sort_by_key(|time| time.duration);
    let seconds = times[RUNS / 2].duration.as_secs_f64();
    let (flops, bytes) = (kernel.operation().flops() as f64, kernel.operation().bytes() as f64);
    let rates = format!("{:8.1} GB/s {:8.1} TFLOP/s", bytes / seconds / 1e9, flops / seconds / 1e12);
    println!("{:20} {what:42} {:9.1} us {rates}", kernel.name(), seconds * 1e6);
}

fn rule(device: &Device, shape: Shape) {
    let Shape { sequences, tokens, key_heads, value_heads, key, value } = shape;
    let queue = device.compute();
    let rows = sequences * tokens;
    let heads = |count: usize, dim: usize| random(queue, rows, count * dim, DType::Bf16);
    let [q, k, dq, dk] = [0; 4].map(|_| heads(key_heads, key));
    let [v, out, dv] = [0; 3].map(|_| heads(value_heads, value));
    let [fade, take, dfade, dtake] = [0; 4].map(|_| heads(value_heads, 1));
    let [log_rate, bias, dlog_rate, dbias] = [0; 4].map(|_| random(queue, 1, value_heads, DType::F32));
    let states = queue.zeros(sequences * value_heads * key, value, DType::F32);
    let gates = DeltaGates { fade: fade.view(), take: take.view(), log_rate: log_rate.view(), bias: bias.view() };
    let segments = Segments::uniform(sequences, tokens);
    let [q, k, dq, dk] = [&q, &k, &dq, &dk].map(|heads| Heads::packed(heads, key_heads));
    let [v, out, dv] = [&v, &out, &dv].map(|heads| Heads::packed(heads, value_heads));
    let what = format!("{sequences}x{tokens} heads {key_heads}/{value_heads} of {key}/{value}");
    let states = (tokens == 1).then(|| states.view());
    let mut forward = DeltaRule { q, k, v, gates, segments: segments.clone(), out, states, work: None };
    let work = queue.tensor(1, forward.work_len(), DType::F32);
    forward.work = Some(work.view());
    time(device, &what, forward);
    if tokens == 1 {
        return;
    }
    let mut backward = DeltaRuleBackward {
        q,
        k,
        v,
        gates,
        segments,
        dout: out,
        dq,
        dk,
        dv,
        dfade: dfade.view(),
        dtake: dtake.view(),
        dlog_rate: Some(dlog_rate.view()),
        dbias: Some(dbias.view()),
        work: None,
    };
    let work = queue.tensor(1, backward.work_len(), DType::F32);
    backward.work = Some(work.view());
    println!("working memory of backward: {} MB", backward.work_len() * 4 / 1_000_000);
    time(device, &what, backward);
}

fn around(device: &Device) {
    let queue = device.compute();
    let (sequences, tokens, heads, dim, taps) = (8, 2048, 16, 128, 4);
    let rows = sequences * tokens;
    let segments = Segments::uniform(sequences, tokens);
    let cols = 3 * heads * dim;
    let what = format!("{rows}x{cols} bf16");
    let [x, out, dx] = [0; 3].map(|_| random(queue, rows, cols, DType::Bf16));
    let weight = random(queue, cols, taps, DType::Bf16);
    let dweight = queue.zeros(cols, taps, DType::F32);
    let [x, out, dx, weight] = [&x, &out, &dx, &weight].map(Tensor::view);
    time(device, &what, ShortConv { x, weight, segments: segments.clone(), out, past: None });
    let dweight = Some(dweight.view());
    time(device, &what, ShortConvBackward { x, weight, segments: segments.clone(), dout: out, dx, dweight });

    let cols = heads * dim;
    let what = format!("{rows}x{cols} bf16");
    let [x, out, dx] = [0; 3].map(|_| random(queue, rows, cols, DType::Bf16));
    let [weights, dweights] = [0; 2].map(|_| random(queue, rows, cols * taps, DType::Bf16));
    let [x, out, dx, weights, dweights] = [&x, &out, &dx, &weights, &dweights].map(Tensor::view);
    time(device, &what, DynamicConv { x, weights, segments: segments.clone(), out, past: None });
    time(device, &what, DynamicConvBackward { x, weights, segments, dout: out, dx, dweights });

    let what = format!("{}x{dim} bf16", rows * heads);
    let [x, gate, out, dx, dgate] = [0; 5].map(|_| random(queue, rows * heads, dim, DType::Bf16));
    let [weight, dweight] = [0; 2].map(|_| random(queue, 1, dim, DType::F32));
    let [x, gate, out, dx, dgate, weight] = [&x, &gate, &out, &dx, &dgate, &weight].map(Tensor::view);
    let epsilon = 1e-6;
    time(device, &what, GatedNorm { x, gate, weight, epsilon, out });
    let dweight = Some(dweight.view());
    time(device, &what, GatedNormBackward { x, gate, weight, epsilon, dout: out, dx, dgate, dweight });
}
