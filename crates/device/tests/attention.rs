//! Attention and its gradients against a plain twin in f64.

mod support;

use evenkeel_device::kernel::{Attention, AttentionBackward, Mask, Segments};
use evenkeel_device::{DType, Heads, Queue, Tensor};
use support::{DTYPES, Random, assert_close, rounded, run, tolerance};

/// How heads lie in memory.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Side by side in tensors of their own, rows apart.
    Packed,
    /// q, k and v of a head together in one tensor, as GPT-NeoX has them. As many key heads as query heads.
    Interleaved,
    /// A share of more heads: others lie before and after these.
    Between,
}

#[derive(Clone, Debug)]
struct Case {
    heads: usize,
    key_heads: usize,
    dim: usize,
    offsets: Vec<usize>,
    mask: Mask,
    lie: Lie,
    dtype: DType,
}

/// q, k, v and dout, [T, heads · dim] each.
#[derive(Clone)]
struct Operands {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    dout: Vec<f32>,
}

impl Case {
    fn tokens(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    fn scale(&self) -> f32 {
        // Larger than usual, so that the softmax is not nearly even.
        2.0 / (self.dim as f32).sqrt()
    }

    fn operands(&self, seed: u64) -> Operands {
        let mut random = Random::new(seed);
        let mut numbers = |heads: usize| random.numbers(self.tokens() * heads * self.dim, self.dtype);
        Operands {
            q: numbers(self.heads),
            k: numbers(self.key_heads),
            v: numbers(self.key_heads),
            dout: numbers(self.heads),
        }
    }

    /// The query-key pairs of one head: query token, its key tokens.
    fn pairs(&self) -> Vec<(usize, std::ops::Range<usize>)> {
        let mut pairs = Vec::new();
        for segment in self.offsets.windows(2) {
            for query in segment[0]..segment[1] {
                let (place, len) = (query - segment[0], segment[1] - segment[0]);
                let sees = |key: usize| {
                    let near = self.mask.window.is_none_or(|window| place.abs_diff(key) < window);
                    near && (!self.mask.causal || key <= place)
                };
                let seen: Vec<usize> = (0..len).filter(|&key| sees(key)).collect();
                pairs.push((query, segment[0] + seen[0]..segment[0] + seen[seen.len() - 1] + 1));
            }
        }
        pairs
    }

    /// out [T, N·D] and logsum [T, N].
    fn plain_forward(&self, operands: &Operands) -> [Vec<f64>; 2] {
        let (mut out, mut logsum) = (vec![0.0; operands.q.len()], vec![0.0; self.tokens() * self.heads]);
        self.each_query(operands, |head, query, weights, total| {
            logsum[query * self.heads + head] = total;
            for &(key, weight) in weights {
                let value = self.key_row(&operands.v, head, key);
                for (d, v) in value.iter().enumerate() {
                    out[(query * self.heads + head) * self.dim + d] += weight * *v as f64;
                }
            }
        });
        [out, logsum]
    }

    /// dq, dk, dv. `out` is the forward's, as rounded as the kernel has it.
    fn plain_backward(&self, operands: &Operands, out: &[f32]) -> [Vec<f64>; 3] {
        let mut dq = vec![0.0; operands.q.len()];
        let (mut dk, mut dv) = (vec![0.0; operands.k.len()], vec![0.0; operands.k.len()]);
        let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum() };
        self.each_query(operands, |head, query, weights, _| {
            let row = (query * self.heads + head) * self.dim..(query * self.heads + head + 1) * self.dim;
            let (dout, q) = (&operands.dout[row.clone()], &operands.q[row.clone()]);
            let delta = dot(dout, &out[row.clone()]);
            for &(key, weight) in weights {
                let (k, v) = (self.key_row(&operands.k, head, key), self.key_row(&operands.v, head, key));
                let gradient = weight * (dot(dout, v) - delta) * self.scale() as f64;
                let key_start = self.key_start(head, key);
                for d in 0..self.dim {
                    dq[row.start + d] += gradient * k[d] as f64;
                    dk[key_start + d] += gradient * q[d] as f64;
                    dv[key_start + d] += weight * dout[d] as f64;
                }
            }
        });
        [dq, dk, dv]
    }

    fn key_start(&self, head: usize, key: usize) -> usize {
        (key * self.key_heads + head / (self.heads / self.key_heads)) * self.dim
    }

    fn key_row<'a>(&self, rows: &'a [f32], head: usize, key: usize) -> &'a [f32] {
        &rows[self.key_start(head, key)..][..self.dim]
    }

    /// `each(head, query, weights of its keys, logsum)`
    fn each_query(&self, operands: &Operands, mut each: impl FnMut(usize, usize, &[(usize, f64)], f64)) {
        for (query, keys) in self.pairs() {
            for head in 0..self.heads {
                let q = &operands.q[(query * self.heads + head) * self.dim..][..self.dim];
                let scores: Vec<f64> = keys
                    .clone()
                    .map(|key| {
                        let k = self.key_row(&operands.k, head, key);
                        q.iter().zip(k).map(|(q, k)| *q as f64 * *k as f64).sum::<f64>() * self.scale() as f64
                    })
                    .collect();
                let logsum = scores.iter().map(|score| score.exp()).sum::<f64>().ln();
                let weights: Vec<_> = keys.clone().zip(scores.iter().map(|score| (score - logsum).exp())).collect();
                each(head, query, &weights, logsum);
            }
        }
    }

    /// out, logsum, dq, dk, dv as the device computes them.
    fn compute(&self, operands: &Operands) -> Vec<Vec<f32>> {
        let (tokens, dim) = (self.tokens(), self.dim);
        let segments = Segments::new(self.offsets.clone());
        let (mask, scale) = (self.mask, self.scale());
        let results = run(|queue| {
            let counts = [self.heads, self.key_heads, self.key_heads];
            let ([q, k, v], inputs) =
                self.place(queue, [&operands.q, &operands.k, &operands.v].map(|x| Some(&x[..])), counts);
            let ([dq, dk, dv], gradients) = self.place(queue, [None; 3], counts);
            let ([out, dout, _], outs) = self.place(queue, [None, Some(&operands.dout[..]), None], [self.heads; 3]);
            let logsum = queue.tensor(tokens, self.heads, DType::F32);
            let forward = Attention { q, k, v, out, logsum: logsum.view(), segments: segments.clone(), mask, scale };
            queue.launch(forward);
            let (logsum_view, segments) = (logsum.view(), segments.clone());
            queue.launch(AttentionBackward {
                q,
                k,
                v,
                out,
                logsum: logsum_view,
                dout,
                dq,
                dk,
                dv,
                segments,
                mask,
                scale,
            });
            [logsum].into_iter().chain(inputs).chain(gradients).chain(outs).collect()
        });
        let tensors_each = if let Lie::Interleaved = self.lie { 1 } else { 3 };
        let take = |tensors: usize, which: usize, heads: usize| -> Vec<f32> {
            let values = &results[1 + tensors * tensors_each..][..tensors_each];
            let (values, first, step, width) = match self.lie {
                Lie::Packed | Lie::Between => (&values[which], 0, dim, heads * dim),
                Lie::Interleaved => (&values[0], which * dim, 3 * dim, 3 * heads * dim),
            };
            let starts = (0..tokens).flat_map(|token| (0..heads).map(move |head| token * width + first + head * step));
            starts.flat_map(|start| values[start..start + dim].iter().copied()).collect()
        };
        let (heads, key_heads) = (self.heads, self.key_heads);
        let [out, dq] = [take(2, 0, heads), take(1, 0, heads)];
        vec![out, results[0].clone(), dq, take(1, 1, key_heads), take(1, 2, key_heads)]
    }

    /// Three operands as heads, with their values or NaN, and the tensors that hold them.
    fn place(&self, queue: &Queue, values: [Option<&[f32]>; 3], counts: [usize; 3]) -> ([Heads; 3], Vec<Tensor>) {
        let (tokens, dim) = (self.tokens(), self.dim);
        let at = |which: usize, token: usize, head: usize, d: usize| {
            values[which].map_or(f32::NAN, |values| values[(token * counts[which] + head) * dim + d])
        };
        match self.lie {
            Lie::Packed => {
                let tensors = [0, 1, 2].map(|which| {
                    let flat: Vec<f32> = (0..tokens * counts[which] * dim)
                        .map(|i| at(which, i / dim / counts[which], i / dim % counts[which], i % dim))
                        .collect();
                    support::strided(queue, tokens, counts[which] * dim, 3, self.dtype, &flat)
                });
                ([0, 1, 2].map(|which| Heads::packed(&tensors[which], counts[which])), tensors.to_vec())
            }
            Lie::Between => {
                // Two strange heads before and one after, all NaN.
                let tensors = [0, 1, 2].map(|which| {
                    let count = counts[which];
                    let flat: Vec<f32> = (0..tokens * (count + 3) * dim)
                        .map(|i| (i / dim / (count + 3), i / dim % (count + 3), i % dim))
                        .map(
                            |(token, head, d)| {
                                if (2..count + 2).contains(&head) { at(which, token, head - 2, d) } else { f32::NAN }
                            },
                        )
                        .collect();
                    queue.floats(tokens, (count + 3) * dim, self.dtype, &flat).col_range(2 * dim..(count + 2) * dim)
                });
                ([0, 1, 2].map(|which| Heads::packed(&tensors[which], counts[which])), tensors.to_vec())
            }
            Lie::Interleaved => {
                let (heads, width) = (counts[0], 3 * counts[0] * dim);
                let flat: Vec<f32> =
                    (0..tokens * width).map(|i| at(i / dim % 3, i / width, i % width / (3 * dim), i % dim)).collect();
                let tensor = support::strided(queue, tokens, width, 5, self.dtype, &flat);
                ([0, 1, 2].map(|which| Heads::strided(&tensor, which * dim, heads, dim, 3 * dim)), vec![tensor])
            }
        }
    }

    fn check(&self) {
        let operands = self.operands(self.dim as u64 + self.tokens() as u64);
        let results = self.compute(&operands);
        let [out, logsum] = self.plain_forward(&operands);
        let gradients = self.plain_backward(&operands, &results[0]);
        assert_close(&format!("logsum of {self:?}"), &results[1], &logsum, tolerance(DType::F32));
        for (name, actual, expected) in [
            ("out", &results[0], &out),
            ("dq", &results[2], &gradients[0]),
            ("dk", &results[3], &gradients[1]),
            ("dv", &results[4], &gradients[2]),
        ] {
            // A query that sees one key has no gradient: what is left of dq and dk then is judged by the size of dv.
            let alone = self.mask.window == Some(1) && matches!(name, "dq" | "dk");
            let error = distance(actual, expected) / norm(if alone { &gradients[2] } else { expected });
            let tolerance = tolerance(self.dtype);
            assert!(
                expected.is_empty() || error <= tolerance,
                "{name} of {self:?}: error {error:.2e} above {tolerance:.0e}"
            );
        }
    }
}

fn distance(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    norm(&actual.iter().zip(expected).map(|(a, e)| *a as f64 - e).collect::<Vec<f64>>())
}

fn norm(numbers: &[f64]) -> f64 {
    numbers.iter().map(|number| number * number).sum::<f64>().sqrt()
}

fn masks() -> Vec<Mask> {
    let windows = [None, Some(1), Some(5), Some(1000)];
    [true, false].into_iter().flat_map(|causal| windows.map(|window| Mask { causal, window })).collect()
}

#[test]
fn every_mask_segmentation_grouping_and_layout_agrees_with_the_plain_formulas() {
    let segmentations = [vec![0, 75], vec![0, 1, 34, 34, 97, 98, 111]];
    let groupings = [(2, 2, Lie::Packed), (4, 2, Lie::Packed), (3, 1, Lie::Packed), (2, 2, Lie::Interleaved)];
    for dtype in DTYPES {
        for mask in masks() {
            for offsets in &segmentations {
                for (heads, key_heads, lie) in groupings {
                    Case { heads, key_heads, dim: 12, offsets: offsets.clone(), mask, lie, dtype }.check();
                }
            }
        }
    }
}

#[test]
fn every_head_dimension_up_to_256_works() {
    for dtype in DTYPES {
        for dim in [1, 10, 16, 31, 32, 48, 64, 80, 96, 100, 128, 160, 256] {
            for lie in [Lie::Packed, Lie::Interleaved] {
                let mask = Mask { causal: true, window: None };
                Case { heads: 2, key_heads: 2, dim, offsets: vec![0, 40, 53], mask, lie, dtype }.check();
            }
        }
    }
}

#[test]
fn long_segments_agree_whichever_way_the_work_is_divided() {
    let causal = Mask { causal: true, window: None };
    let windowed = Mask { causal: false, window: Some(70) };
    for (heads, key_heads, offsets, mask) in [
        // One long segment: its query blocks are dealt out to many tasks.
        (1, 1, vec![0, 701], causal),
        (1, 1, vec![0, 650], windowed),
        (2, 1, vec![0, 333, 343], causal),
        // Enough heads and segments for a task each.
        (16, 16, vec![0, 150, 300], causal),
        // So many query heads that a block of queries is one tile of each.
        (16, 2, vec![0, 130], windowed),
    ] {
        for (dim, lie, dtype) in [(16, Lie::Packed, DType::F32), (40, Lie::Between, DType::Bf16)] {
            Case { heads, key_heads, dim, offsets: offsets.clone(), mask, lie, dtype }.check();
        }
    }
}

#[test]
fn a_share_of_the_heads_in_groups_of_any_size_agrees() {
    let causal = Mask { causal: true, window: None };
    let windowed = Mask { causal: true, window: Some(50) };
    for dtype in DTYPES {
        for (heads, key_heads, dim, mask) in [
            (3, 1, 64, causal),
            (5, 1, 48, windowed),
            (6, 2, 24, causal),
            (7, 1, 80, Mask { causal: false, window: None }),
            (12, 4, 33, windowed),
            (9, 3, 128, causal),
        ] {
            let offsets = vec![0, 7, 170, 171, 260];
            Case { heads, key_heads, dim, offsets, mask, lie: Lie::Between, dtype }.check();
        }
    }
}

#[test]
fn segments_too_long_to_keep_sums_for_agree() {
    for (heads, key_heads, dim, offsets, mask) in [
        (1, 1, 256, vec![0, 2500], Mask { causal: true, window: Some(600) }),
        (2, 1, 250, vec![0, 30, 2100, 2200], Mask { causal: false, window: Some(90) }),
    ] {
        for dtype in DTYPES {
            Case { heads, key_heads, dim, offsets: offsets.clone(), mask, lie: Lie::Packed, dtype }.check();
        }
    }
}

#[test]
fn no_tokens_and_empty_segments_are_nothing_to_do() {
    for offsets in [vec![0], vec![0, 0], vec![0, 0, 0], vec![0, 0, 2, 2]] {
        let mask = Mask { causal: true, window: None };
        Case { heads: 2, key_heads: 1, dim: 8, offsets, mask, lie: Lie::Packed, dtype: DType::F32 }.check();
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let mask = Mask { causal: true, window: None };
    let case =
        Case { heads: 1, key_heads: 1, dim: 64, offsets: vec![0, 100], mask, lie: Lie::Packed, dtype: DType::F32 };
    let mut operands = case.operands(1);
    operands.q.iter_mut().for_each(|q| *q *= 64.0);
    let results = case.compute(&operands);
    let [out, _] = case.plain_forward(&operands);
    // Scores of a thousand have an error of their own, which exponentials multiply.
    assert_close("out", &results[0], &out, 1e-4);
    assert!(results.iter().flatten().all(|value| value.is_finite()));
}

#[test]
fn scores_that_rise_from_key_to_key_are_weighed_against_the_highest() {
    for (causal, dtype) in [(true, DType::F32), (true, DType::Bf16), (false, DType::F32), (false, DType::Bf16)] {
        let mask = Mask { causal, window: None };
        let case = Case { heads: 2, key_heads: 1, dim: 64, offsets: vec![0, 310], mask, lie: Lie::Packed, dtype };
        let mut operands = case.operands(9);
        // Scores of a hundred and more at the end, some ten above those of the block before.
        operands.q.iter_mut().for_each(|q| *q = q.abs());
        for (i, k) in operands.k.iter_mut().enumerate() {
            *k = rounded((1.0 + k.abs()) * (i / case.dim) as f32 / 60.0, dtype);
        }
        let results = case.compute(&operands);
        let [out, logsum] = case.plain_forward(&operands);
        assert_close(&format!("logsum of {case:?}"), &results[1], &logsum, tolerance(DType::F32));
        // Scores of a hundred have an error of their own, which exponentials multiply.
        assert_close(&format!("out of {case:?}"), &results[0], &out, tolerance(dtype).max(1e-4));
    }
}

#[test]
fn the_plain_gradients_are_the_slopes_of_the_plain_forward() {
    let mask = Mask { causal: true, window: Some(3) };
    let case =
        Case { heads: 4, key_heads: 2, dim: 3, offsets: vec![0, 5, 7], mask, lie: Lie::Packed, dtype: DType::F32 };
    let operands = case.operands(4);
    let out: Vec<f32> = case.plain_forward(&operands)[0].iter().map(|&x| x as f32).collect();
    let gradients = case.plain_backward(&operands, &out);
    let value = |operands: &Operands| -> f64 {
        let [out, _] = case.plain_forward(operands);
        out.iter().zip(&operands.dout).map(|(out, dout)| out * *dout as f64).sum()
    };
    type Field = fn(&mut Operands) -> &mut Vec<f32>;
    let fields: [Field; 3] = [|operands| &mut operands.q, |operands| &mut operands.k, |operands| &mut operands.v];
    for (which, field) in fields.into_iter().enumerate() {
        for (i, &gradient) in gradients[which].iter().enumerate() {
            let step = 1.0 / 1024.0;
            let moved = |by: f32| {
                let mut moved = operands.clone();
                field(&mut moved)[i] += by;
                value(&moved)
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * step as f64);
            assert!((slope - gradient).abs() < 1e-5, "operand {which}, number {i}: {gradient}, slope {slope}");
        }
    }
}
