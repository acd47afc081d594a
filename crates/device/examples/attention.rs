//! Measures attention: milliseconds and GFLOP/s of forward and backward, the best of some rounds.
//!
//! ```sh
//! cargo run --release --example attention -- [threads, or cuda] [rounds] [percent dropped]
//! ```
//!
//! On a GPU, `EVENKEEL_CUDA_ATTENTION=own` measures our own kernels where cuDNN's would be used.

use evenkeel_device::kernel::{Attention, AttentionBackward, AttentionDropout, Mask, ScoreChanges, Segments};
use evenkeel_device::{CpuOptions, CudaOptions, DType, Device, Heads, Tensor, cudnn_report};

#[derive(Clone, Copy, Debug)]
struct Shape {
    sequences: usize,
    tokens: usize,
    heads: usize,
    key_heads: usize,
    dim: usize,
    causal: bool,
}

const fn causal(sequences: usize, tokens: usize, heads: usize, key_heads: usize, dim: usize) -> Shape {
    Shape { sequences, tokens, heads, key_heads, dim, causal: true }
}

const CPU_SHAPES: [Shape; 5] = [
    causal(4, 256, 8, 4, 64),
    causal(4, 1024, 16, 8, 64),
    causal(1, 4096, 4, 2, 128),
    causal(16, 100, 8, 8, 80),
    causal(1, 16384, 2, 1, 64),
];

/// Those of a Llama of 1.0B parameters, GPT-2, a ViT of 1.2B and a Llama of 8B.
const CUDA_SHAPES: [Shape; 4] = [
    causal(8, 2048, 32, 8, 64),
    causal(32, 1024, 12, 12, 64),
    Shape { sequences: 64, tokens: 197, heads: 16, key_heads: 16, dim: 128, causal: false },
    causal(4, 4096, 32, 8, 128),
];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let on = arguments.next().unwrap_or_else(|| "1".to_owned());
    let mut numbers = arguments.map(|argument| argument.parse::<usize>().expect("a number"));
    let rounds = numbers.next().unwrap_or(10);
    let probability = numbers.next().unwrap_or(0) as f32 / 100.0;
    let (device, shapes, dtypes): (Device, &[Shape], &[DType]) = if on == "cuda" {
        let options = CudaOptions { memory_bytes: Some(8 << 30), ..CudaOptions::new(0) };
        (Device::cuda(&options).unwrap_or_else(|error| panic!("{error}")), &CUDA_SHAPES, &[DType::Bf16])
    } else {
        let threads = on.parse().expect("a number of threads, or cuda");
        let options = CpuOptions { memory_bytes: 2 << 30, ..CpuOptions::with_threads(threads) };
        (Device::cpu(&options).expect("a CPU device starts"), &CPU_SHAPES, &[DType::F32, DType::Bf16])
    };
    for &shape in shapes {
        println!("{shape:?} on {on}");
        for &dtype in dtypes {
            let ([forward, backward], pairs) = (measure(&device, shape, dtype, rounds, probability), pairs(shape));
            let speed = |products: f64, seconds: f64| 2.0 * products * pairs / seconds / 1e9;
            println!(
                "  {dtype:?} forward {:8.3} ms {:6.0} GFLOP/s, backward {:8.3} ms {:6.0} GFLOP/s",
                forward * 1e3,
                speed(2.0, forward),
                backward * 1e3,
                speed(5.0, backward)
            );
        }
    }
    if on == "cuda" {
        println!("{}", cudnn_report());
    }
}

/// Pairs of a query and a key, times heads and their dimension.
fn pairs(Shape { sequences, tokens, heads, dim, causal, .. }: Shape) -> f64 {
    let seen = if causal { tokens * (tokens + 1) / 2 } else { tokens * tokens };
    (sequences * seen * heads * dim) as f64
}

/// Seconds of forward and of backward.
fn measure(device: &Device, shape: Shape, dtype: DType, rounds: usize, probability: f32) -> [f64; 2] {
    let Shape { sequences, tokens: len, heads, key_heads, dim, causal } = shape;
    let queue = device.compute();
    let tokens = sequences * len;
    let tensor = |heads: usize| -> Tensor {
        let numbers: Vec<f32> = (0..tokens * heads * dim).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect();
        queue.floats(tokens, heads * dim, dtype, &numbers)
    };
    let [q, out, dout, dq] = [0; 4].map(|_| tensor(heads));
    let [k, v, dk, dv] = [0; 4].map(|_| tensor(key_heads));
    let [q, out, dout, dq] = [&q, &out, &dout, &dq].map(|x| Heads::packed(x, heads));
    let [k, v, dk, dv] = [&k, &v, &dk, &dv].map(|x| Heads::packed(x, key_heads));
    let logsum_tensor = queue.tensor(tokens, heads, DType::F32);
    let logsum = logsum_tensor.view();
    let segments = Segments::uniform(sequences, len);
    let mask = Mask { causal, window: None };
    let scale = 1.0 / (dim as f32).sqrt();
    let dropout = Some(AttentionDropout { probability, seed: 0, first_head: 0, first_token: 0 });
    let mut best = [f64::INFINITY; 2];
    for _ in 0..rounds {
        device.measure_kernels(true);
        queue.launch(Attention {
            q,
            k,
            v,
            out,
            logsum,
            segments: segments.clone(),
            mask,
            scale,
            dropout,
            scores: ScoreChanges::default(),
        });
        let segments = segments.clone();
        queue.launch(AttentionBackward {
            q,
            k,
            v,
            out,
            logsum,
            dout,
            dq,
            dk,
            dv,
            segments,
            mask,
            scale,
            dropout,
            scores: ScoreChanges::default(),
            dsinks: None,
        });
        let times = device.take_kernel_times();
        device.measure_kernels(false);
        for (best, time) in best.iter_mut().zip(&times) {
            *best = best.min(time.duration.as_secs_f64());
        }
    }
    best
}
