//! How fast attention is: milliseconds and GFLOP/s of forward and backward, the best of some rounds.
//!
//!     cargo run --release --example attention -- [threads] [rounds] [percent dropped]

use evenkeel_device::kernel::{Attention, AttentionBackward, AttentionDropout, Mask, Segments};
use evenkeel_device::{CpuOptions, DType, Device, Heads, Tensor};

/// Sequences, tokens of each, query heads, key heads, head dimension.
const SHAPES: [[usize; 5]; 5] =
    [[4, 256, 8, 4, 64], [4, 1024, 16, 8, 64], [1, 4096, 4, 2, 128], [16, 100, 8, 8, 80], [1, 16384, 2, 1, 64]];

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>().expect("a number"));
    let threads = arguments.next().unwrap_or(1);
    let rounds = arguments.next().unwrap_or(10);
    let probability = arguments.next().unwrap_or(0) as f32 / 100.0;
    let options = CpuOptions { memory_bytes: 2 << 30, ..CpuOptions::with_threads(threads) };
    let device = Device::cpu(&options).expect("a CPU device starts");
    for shape in SHAPES {
        println!("[sequences, tokens, heads, key heads, dimension] {shape:?}, {threads} threads");
        for dtype in [DType::F32, DType::Bf16] {
            let ([forward, backward], pairs) = (measure(&device, shape, dtype, rounds, probability), pairs(shape));
            let speed = |products: f64, seconds: f64| 2.0 * products * pairs / seconds / 1e9;
            println!(
                "  {dtype:?} forward {:8.3} ms {:5.0} GFLOP/s, backward {:8.3} ms {:5.0} GFLOP/s",
                forward * 1e3,
                speed(2.0, forward),
                backward * 1e3,
                speed(5.0, backward)
            );
        }
    }
}

/// Pairs of a query and a key, times heads and their dimension.
fn pairs([sequences, tokens, heads, _, dim]: [usize; 5]) -> f64 {
    (sequences * tokens * (tokens + 1) / 2 * heads * dim) as f64
}

/// Seconds of forward and of backward.
fn measure(
    device: &Device,
    [sequences, len, heads, key_heads, dim]: [usize; 5],
    dtype: DType,
    rounds: usize,
    probability: f32,
) -> [f64; 2] {
    let (queue, tokens) = (device.compute(), sequences * len);
    let tensor = |heads: usize| -> Tensor {
        let numbers: Vec<f32> = (0..tokens * heads * dim).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect();
        queue.floats(tokens, heads * dim, dtype, &numbers)
    };
    let [q, out, dout, dq] = [0; 4].map(|_| tensor(heads));
    let [k, v, dk, dv] = [0; 4].map(|_| tensor(key_heads));
    let [q, out, dout, dq] = [&q, &out, &dout, &dq].map(|x| Heads::packed(x, heads));
    let [k, v, dk, dv] = [&k, &v, &dk, &dv].map(|x| Heads::packed(x, key_heads));
    let logsum_tensor = queue.tensor(tokens, heads, DType::F32);
    let (logsum, segments) = (logsum_tensor.view(), Segments::uniform(sequences, len));
    let (mask, scale) = (Mask { causal: true, window: None }, 1.0 / (dim as f32).sqrt());
    let dropout = Some(AttentionDropout { probability, seed: 0, first_head: 0, first_token: 0 });
    let mut best = [f64::INFINITY; 2];
    for _ in 0..rounds {
        device.measure_kernels(true);
        queue.launch(Attention { q, k, v, out, logsum, segments: segments.clone(), mask, scale, dropout });
        let segments = segments.clone();
        queue.launch(AttentionBackward { q, k, v, out, logsum, dout, dq, dk, dv, segments, mask, scale, dropout });
        let times = device.take_kernel_times();
        device.measure_kernels(false);
        for (best, time) in best.iter_mut().zip(&times) {
            *best = best.min(time.duration.as_secs_f64());
        }
    }
    best
}
