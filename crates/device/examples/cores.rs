//! Measures grouped products and the delta rule on cores, each beside a dense product:
//!
//! ```sh
//! cargo run --release --example cores -- [threads] [rounds] [part of a name]
//! ```
//!
//! The dense product beside a grouped one has as many operations: all rows by one expert's matrix, or an expert's rows into all
//! matrices. The one beside the delta rule has 1024 rows, columns and summands. Machines are shared and clocks vary, so everything
//! is measured in turns and the best of all rounds is printed.

use evenkeel_device::kernel::{
    DeltaGates, DeltaRule, DeltaRuleBackward, GroupedProduct, Kernel, Order, Placement, Product, RandomNormal, Segments,
};
use evenkeel_device::{CpuOptions, DType, Device, Heads, Queue, Tensor, View};

/// Experts, tokens of each, inputs and columns.
const EXPERTS: [[usize; 4]; 4] = [[32, 128, 512, 192], [32, 512, 512, 192], [8, 512, 1024, 768], [8, 500, 1024, 768]];
/// Sequences, tokens of each, heads of keys and of values, and their elements.
const RULES: [[usize; 5]; 2] = [[4, 512, 4, 4, 128], [2, 1024, 4, 8, 64]];

/// A kernel that is measured, and the product beside it.
struct Case {
    what: String,
    kernel: Kernel,
    dense: Product,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().map_or(default, |argument| argument.parse().expect("a number"));
    let (threads, rounds): (usize, usize) = (number(1), number(10));
    let part = arguments.next().unwrap_or_default();
    for dtype in [DType::F32, DType::Bf16] {
        let options = CpuOptions { memory_bytes: 4 << 30, ..CpuOptions::with_threads(threads) };
        let device = Device::cpu(&options).expect("a CPU device starts");
        let mut operands = Operands { queue: device.compute(), dtype, kept: Vec::new() };
        let other = operands.square(64);
        let mut cases: Vec<Case> = EXPERTS.iter().flat_map(|&shape| operands.grouped(shape)).collect();
        cases.extend(RULES.iter().flat_map(|&shape| operands.rule(shape)));
        cases.retain(|case| case.what.contains(&part));
        let mut best = vec![[f64::INFINITY; 2]; cases.len()];
        for _ in 0..rounds {
            for (best, Case { kernel, dense, .. }) in best.iter_mut().zip(&cases) {
                for (best, kernel) in best.iter_mut().zip([kernel.clone(), (*dense).into()]) {
                    *best = best.min(seconds(&device, other, kernel));
                }
            }
        }
        println!("{dtype:?}, {threads} threads       GFLOP/s: dense, this, its share");
        for (Case { what, kernel, dense }, [own, of_dense]) in cases.iter().zip(best) {
            let own = kernel.operation().flops() as f64 / own / 1e9;
            let of_dense = Kernel::from(*dense).operation().flops() as f64 / of_dense / 1e9;
            println!("  {what:56} {of_dense:6.0} {own:6.0} {:5.2}", own / of_dense);
        }
    }
}

/// How long a kernel takes after another product, whose operands are not its own.
fn seconds(device: &Device, other: Product, kernel: Kernel) -> f64 {
    device.compute().finish();
    device.measure_kernels(true);
    device.compute().launch(other);
    device.compute().launch(kernel);
    let times = device.take_kernel_times();
    device.measure_kernels(false);
    times.last().expect("two kernels ran").duration.as_secs_f64()
}

/// Random operands, which live as long as this.
struct Operands<'a> {
    queue: &'a Queue,
    dtype: DType,
    kept: Vec<Tensor>,
}

impl Operands<'_> {
    fn random(&mut self, rows: usize, cols: usize, dtype: DType) -> View {
        let out = self.queue.tensor(rows, cols, dtype);
        let (view, placement) = (out.view(), Placement::whole(cols));
        self.queue.launch(RandomNormal { out: view, mean: 0.0, deviation: 1.0, seed: rows as u64, placement });
        self.kept.push(out);
        view
    }

    fn square(&mut self, side: usize) -> Product {
        let [a, b, out] = [0; 3].map(|_| self.random(side, side, self.dtype));
        Product::new(Order::NT, a, b, out)
    }

    /// The products of a layer of experts.
    fn grouped(&mut self, [experts, tokens, inputs, columns]: [usize; 4]) -> Vec<Case> {
        let (pairs, dtype) = (experts * tokens, self.dtype);
        let ends: Vec<u32> = (0..=experts).map(|expert| (expert * tokens) as u32).collect();
        let indices = self.queue.indices(&ends);
        let offsets = indices.view();
        self.kept.push(indices);
        let [x, narrow, wide] = [inputs, columns, 2 * columns].map(|cols| self.random(pairs, cols, dtype));
        let shapes = [[experts * 2 * columns, inputs], [experts * inputs, columns]];
        let [gate_up, down] = shapes.map(|[rows, cols]| self.random(rows, cols, dtype));
        let [dgate_up, ddown] = shapes.map(|[rows, cols]| self.random(rows, cols, DType::F32));
        let [flat_wide, flat_x] = [2 * columns, inputs].map(|cols| self.random(tokens, experts * cols, dtype));
        let one = |view: View| view.row_range(0..view.rows / experts);
        let of_one_expert = |view: View| view.row_range(0..tokens);
        let cases = [
            ("gate and up", Order::NT, [x, gate_up, wide], [x, one(gate_up)], false),
            ("down", Order::NT, [narrow, down, x], [narrow, one(down)], false),
            ("gradient of down's input", Order::NN, [x, down, narrow], [x, one(down)], false),
            ("gradient of the input", Order::NN, [wide, gate_up, x], [wide, one(gate_up)], false),
            ("gradient of gate and up", Order::TN, [wide, x, dgate_up], [flat_wide, of_one_expert(x)], false),
            ("gradient of down", Order::TN, [x, narrow, ddown], [flat_x, of_one_expert(narrow)], false),
            ("gradient of down, added", Order::TN, [x, narrow, ddown], [flat_x, of_one_expert(narrow)], true),
        ];
        let case =
            |(what, order, [a, b, out], [dense_a, dense_b], accumulate): (&str, _, [View; 3], [View; 2], _)| Case {
                what: format!("{experts} x {tokens}, {inputs} x {columns}: {what}"),
                kernel: GroupedProduct { order, a, b, out, offsets, accumulate, expected_rows: None }.into(),
                dense: Product { accumulate, ..Product::new(order, dense_a, dense_b, out) },
            };
        cases.map(case).into()
    }

    fn rule(&mut self, [sequences, tokens, key_heads, value_heads, dim]: [usize; 5]) -> [Case; 2] {
        let (rows, dtype) = (sequences * tokens, self.dtype);
        let mut heads = |count: usize| Heads::packed(self.random(rows, count * dim, dtype), count);
        let [q, k, dq, dk] = [0; 4].map(|_| heads(key_heads));
        let [v, out, dv] = [0; 3].map(|_| heads(value_heads));
        let [fade, take, dfade, dtake] = [0; 4].map(|_| self.random(rows, value_heads, dtype));
        let [log_rate, bias, dlog_rate, dbias] = [0; 4].map(|_| self.random(1, value_heads, DType::F32));
        let gates = DeltaGates { fade, take, log_rate, bias };
        let segments = Segments::uniform(sequences, tokens);
        let forward = DeltaRule { q, k, v, gates, segments: segments.clone(), out, states: None, work: None };
        let backward = DeltaRuleBackward {
            q,
            k,
            v,
            gates,
            segments,
            dout: out,
            dq,
            dk,
            dv,
            dfade,
            dtake,
            dlog_rate: Some(dlog_rate),
            dbias: Some(dbias),
            work: None,
        };
        let dense = self.square(1024);
        let what = |which: &str| format!("{sequences} x {tokens}, heads {key_heads}/{value_heads} of {dim}: {which}");
        [
            Case { what: what("delta rule"), kernel: forward.into(), dense },
            Case { what: what("its gradient"), kernel: backward.into(), dense },
        ]
    }
}
