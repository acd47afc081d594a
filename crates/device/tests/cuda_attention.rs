//! cuDNN's attention against our own, on a GPU. Sequences together are work enough for cuDNN; each alone is not, and
//! our own kernels compute it.

mod support;

use evenkeel_device::kernel::{Attention, AttentionBackward, Mask, ScoreChanges, Segments};
use evenkeel_device::{DType, Device, Heads, Tensor, cudnn_report};
use support::{Random, assert_close, device, on_cuda, wide};

#[derive(Clone, Copy, Debug)]
struct Case {
    sequences: usize,
    len: usize,
    heads: usize,
    key_heads: usize,
    dim: usize,
    mask: Mask,
    /// q, k and v lie in one tensor, head by head.
    fused: bool,
}

const CAUSAL: Mask = Mask { causal: true, window: None };
const ALL: Mask = Mask { causal: false, window: None };

const CASES: [Case; 6] = [
    Case { sequences: 8, len: 1000, heads: 8, key_heads: 2, dim: 64, mask: CAUSAL, fused: false },
    Case { sequences: 10, len: 1024, heads: 6, key_heads: 6, dim: 64, mask: CAUSAL, fused: true },
    Case { sequences: 16, len: 197, heads: 16, key_heads: 16, dim: 128, mask: ALL, fused: false },
    Case { sequences: 6, len: 1024, heads: 4, key_heads: 2, dim: 128, mask: CAUSAL, fused: false },
    Case { sequences: 9, len: 801, heads: 12, key_heads: 4, dim: 40, mask: ALL, fused: false },
    Case {
        sequences: 12,
        len: 1500,
        heads: 8,
        key_heads: 8,
        dim: 64,
        mask: Mask { causal: true, window: Some(300) },
        fused: false,
    },
];

/// Heads in a tensor of their own, or every third.
fn heads(tensor: &Tensor, which: usize, count: usize, case: &Case) -> Heads {
    if case.fused {
        Heads::strided(tensor, which * case.dim, count, case.dim, 3 * case.dim)
    } else {
        Heads::packed(tensor, count)
    }
}

/// q, k, v and dout, each with its columns; with fused heads, one tensor for the first three.
type Operands = Vec<(usize, Vec<f32>)>;

fn operands(case: &Case) -> Operands {
    let tokens = case.sequences * case.len;
    let mut random = Random::new(tokens as u64 + case.dim as u64);
    let widths = if case.fused {
        vec![3 * case.heads * case.dim, case.heads * case.dim]
    } else {
        [case.heads, case.key_heads, case.key_heads, case.heads].map(|count| count * case.dim).to_vec()
    };
    let numbers = |width: usize| (width, random.numbers(tokens * width, DType::Bf16));
    widths.into_iter().map(numbers).collect()
}

/// out, logsum, dq, dk and dv of some sequences.
fn compute(device: &Device, case: &Case, operands: &Operands, sequences: std::ops::Range<usize>) -> Vec<Vec<f32>> {
    let queue = device.compute();
    let tokens = sequences.len() * case.len;
    let inputs: Vec<Tensor> = operands
        .iter()
        .map(|(width, numbers)| {
            let part = &numbers[sequences.start * case.len * width..sequences.end * case.len * width];
            queue.floats(tokens, *width, DType::Bf16, part)
        })
        .collect();
    let counts = [case.heads, case.key_heads, case.key_heads];
    let of_inputs = |which: usize| heads(&inputs[if case.fused { 0 } else { which }], which, counts[which], case);
    let [q, k, v] = [0, 1, 2].map(of_inputs);
    let dout = Heads::packed(&inputs[inputs.len() - 1], case.heads);
    let tensor = |count: usize| queue.tensor(tokens, count * case.dim, DType::Bf16);
    let [out, dq, dk, dv] = [case.heads, case.heads, case.key_heads, case.key_heads].map(tensor);
    let logsum = queue.tensor(tokens, case.heads, DType::F32);
    let packed = |tensor: &Tensor, count: usize| Heads::packed(tensor, count);
    let segments = Segments::uniform(sequences.len(), case.len);
    let mask = case.mask;
    let scale = 2.0 / (case.dim as f32).sqrt();
    let dropout = None;
    let out_heads = packed(&out, case.heads);
    queue.launch(Attention {
        q,
        k,
        v,
        out: out_heads,
        logsum: logsum.view(),
        segments: segments.clone(),
        mask,
        scale,
        dropout,
        scores: ScoreChanges::default(),
    });
    queue.launch(AttentionBackward {
        q,
        k,
        v,
        out: out_heads,
        logsum: logsum.view(),
        dout,
        dq: packed(&dq, case.heads),
        dk: packed(&dk, case.key_heads),
        dv: packed(&dv, case.key_heads),
        segments,
        mask,
        scale,
        dropout,
        scores: ScoreChanges::default(),
        dsinks: None,
    });
    [&out, &logsum, &dq, &dk, &dv].map(|tensor| queue.read(tensor)).into()
}

#[test]
fn cudnn_and_our_own_kernels_agree() {
    if !on_cuda() {
        println!("skipped: no CUDA device");
        return;
    }
    let device = device(1, 4 << 30);
    let found = cudnn_report();
    println!("{found}");
    for case in CASES {
        let before = cudnn_report().plans;
        let operands = operands(&case);
        let together = compute(&device, &case, &operands, 0..case.sequences);
        let plans = cudnn_report().plans - before;
        println!("{case:?}: {plans} plans");
        if matches!(found.version, Some(Ok(_))) && std::env::var_os("EVENKEEL_CUDA_ATTENTION").is_none() {
            // Gradients of odd lengths are ours where cuDNN's are known to be wrong.
            assert!(plans == 2 || (plans == 1 && case.len % 128 != 0), "{}", cudnn_report());
        }
        let mut alone = vec![Vec::new(); together.len()];
        for sequence in 0..case.sequences {
            for (all, one) in alone.iter_mut().zip(compute(&device, &case, &operands, sequence..sequence + 1)) {
                all.extend(one);
            }
        }
        // Both are rounded to bf16, and so are weights and their gradients inside.
        let tolerances = [5e-3, 2e-6, 6e-3, 6e-3, 5e-3];
        for (i, name) in ["out", "logsum", "dq", "dk", "dv"].iter().enumerate() {
            assert_close(&format!("{name} of {case:?}"), &together[i], &wide(&alone[i]), tolerances[i]);
        }
        assert_eq!(cudnn_report().plans - before, plans, "sequences alone are not cuDNN's");
    }
}
