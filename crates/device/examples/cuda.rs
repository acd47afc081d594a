//! Measures kernels on a GPU: `cargo run --release --example cuda`. Each runs several times on operands of a training step's
//! size; the median is printed beside the fewest bytes or operations that it needs.

use evenkeel_device::kernel::{
    Activation, AdamW, ColumnSum, Copy, Dropout, EmbedBackward, Fill, Gated, GatedBackward, Kernel, LossBackward,
    LossStats, Norm, NormBackward, NormKind, Order, Pairs, Placement, Product, RandomNormal, Rotary, SquaredNorm,
};
use evenkeel_device::{CudaOptions, DType, Device, Heads, Queue, Tensor, cuda_report};

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
    println!("{:16} {what:42} {:9.1} us {rates}", kernel.name(), seconds * 1e6);
}

fn products(device: &Device) {
    let queue = device.compute();
    let shapes =
        [[8192, 8192, 8192], [16384, 2048, 2048], [16384, 8192, 2048], [16384, 2048, 8192], [2048, 8192, 16384]];
    for [m, n, k] in shapes {
        for order in [Order::NT, Order::NN, Order::TN] {
            let (a, b) = match order {
                Order::NN => ([m, k], [k, n]),
                Order::NT => ([m, k], [n, k]),
                Order::TN => ([k, m], [k, n]),
            };
            let [a, b] = [a, b].map(|[rows, cols]| random(queue, rows, cols, DType::Bf16));
            let out = queue.tensor(m, n, DType::Bf16);
            time(device, &format!("{order:?} {m}x{n}x{k} bf16"), Product::new(order, &a, &b, &out));
            if order == Order::TN {
                let sums = queue.zeros(m, n, DType::F32);
                let kernel = Product::new(order, &a, &b, &sums).accumulating();
                time(device, &format!("{order:?} {m}x{n}x{k} bf16 += f32"), kernel);
            }
            if order == Order::NT {
                let bias = random(queue, 1, n, DType::F32);
                let kernel = Product::new(order, &a, &b, &out).with_bias(Some(bias.view()));
                time(device, &format!("{order:?} {m}x{n}x{k} bf16 with bias"), kernel);
                let activation = Some(Activation::GeluTanh);
                let before = queue.tensor(m, n, DType::Bf16);
                let kernel = Product { activation, preactivation: Some(before.view()), ..kernel };
                time(device, &format!("{order:?} {m}x{n}x{k} bf16 with bias, GELU"), kernel);
            }
        }
    }
    let [a, b] = [0, 1].map(|_| random(queue, 4096, 4096, DType::F32));
    let out = queue.tensor(4096, 4096, DType::F32);
    time(device, "NN 4096 f32", Product::new(Order::NN, &a, &b, &out));
}

fn others(device: &Device) {
    let queue = device.compute();
    let tokens = 16384;
    let hidden = 2048;
    let ffn = 8192;
    let vocabulary = 32000;
    let len = 1 << 28;
    let [weight, grad, mean, variance] = [0; 4].map(|_| queue.zeros(1, len, DType::F32));
    let copy = queue.zeros(1, len, DType::Bf16);
    time(device, "f32 1 GiB", Copy { x: weight.view(), out: grad.view() });
    time(device, "f32 to bf16", Copy { x: weight.view(), out: copy.view() });
    time(device, "f32 1 GiB", Fill { out: mean.view(), value: 0.0 });
    let kernel = AdamW {
        weight: weight.view(),
        grad: grad.view(),
        mean: mean.view(),
        variance: variance.view(),
        copy: Some(copy.view()),
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 1,
        grad_factor: None,
        frozen: None,
    };
    time(device, "268 M parameters", kernel);
    let sum = queue.zeros(1, 1, DType::F32);
    time(device, "f32 1 GiB", SquaredNorm { x: grad.view(), out: sum.view(), accumulate: false });

    let dtype = DType::Bf16;
    let [x, add, out, dout] = [0; 4].map(|_| random(queue, tokens, hidden, dtype));
    let vector = random(queue, 1, hidden, DType::F32);
    let stats = queue.zeros(tokens, 2, DType::F32);
    for kind in [NormKind::Rms, NormKind::Layer] {
        let norm = Norm {
            kind,
            x: x.view(),
            add: Some(add.view()),
            sum: Some(x.view()),
            weight: Some(vector.view()),
            weight_offset: 0.0,
            bias: None,
            epsilon: 1e-6,
            out: out.view(),
            stats: stats.view(),
        };
        time(device, &format!("{kind:?} [16384, 2048] with add"), norm);
        let dweight = queue.zeros(1, hidden, DType::F32);
        let backward = NormBackward {
            kind,
            x: x.view(),
            weight: Some(vector.view()),
            weight_offset: 0.0,
            stats: stats.view(),
            dout: dout.view(),
            residual: Some(add.view()),
            dx: out.view(),
            dweight: Some(dweight.view()),
            dbias: (kind == NormKind::Layer).then(|| dweight.view()),
        };
        time(device, &format!("{kind:?} [16384, 2048]"), backward);
    }
    let sums = queue.zeros(1, hidden, DType::F32);
    time(device, "[16384, 2048]", ColumnSum { x: x.view(), out: sums.view() });
    let placement = Placement::whole(hidden);
    time(
        device,
        "[16384, 2048]",
        Dropout { x: x.view(), out: out.view(), probability: 0.1, seed: 1, placement, rows: None },
    );

    let [gate, up, act, dact] = [0; 4].map(|_| random(queue, tokens, ffn, dtype));
    let gate_view = gate.view();
    let up_view = up.view();
    let act_view = act.view();
    let activation = Activation::Silu;
    time(device, "[16384, 8192]", Gated { activation, gate: gate_view, up: up_view, out: act_view, count: None });
    let dout_view = dact.view();
    let dgate = act_view;
    let dup = dact.view();
    time(
        device,
        "[16384, 8192]",
        GatedBackward { activation, gate: gate_view, up: up_view, dout: dout_view, dgate, dup, count: None },
    );

    let ids: Vec<u32> = (0..tokens as u32).map(|token| token.wrapping_mul(2_654_435_761) % vocabulary as u32).collect();
    let indices = queue.indices(&ids);
    let dtable = queue.zeros(vocabulary, hidden, DType::F32);
    let embed = EmbedBackward { dtable: dtable.view(), indices: indices.view(), first: 0, scale: 1.0, dout: x.view() };
    time(device, "[16384, 2048] in 32000", embed);
    let single = queue.zeros(1, hidden, DType::F32);
    let zeros = queue.indices(&vec![0; tokens]);
    let embed = EmbedBackward { dtable: single.view(), indices: zeros.view(), ..embed };
    time(device, "[16384, 2048] in one row", embed);

    let table = random(queue, 2048, 64, DType::F32);
    let positions = queue.indices(&(0..tokens as u32).map(|token| token % 2048).collect::<Vec<_>>());
    let heads = Heads::packed(&x, 32);
    time(
        device,
        "32 heads of 64",
        Rotary { x: heads, pairs: Pairs::Halves, table: table.view(), positions: positions.view(), inverse: false },
    );

    let rows = 4096;
    let logits = random(queue, rows, vocabulary, dtype);
    let labels = queue.indices(&ids[..rows]);
    let (stats, losses) = (queue.zeros(rows, 4, DType::F32), queue.zeros(1, rows, DType::F32));
    let (logits, labels) = (logits.view(), labels.view());
    time(device, "[4096, 32000]", LossStats { logits, labels, first: 0, stats: stats.view() });
    let backward = LossBackward {
        logits,
        labels,
        first: 0,
        stats: stats.view(),
        vocabulary,
        smoothing: 0.0,
        scale: 1.0,
        cap: None,
        losses: losses.view(),
        dlogits: Some(logits),
    };
    time(device, "[4096, 32000] in place", backward);
    queue.finish();
}
