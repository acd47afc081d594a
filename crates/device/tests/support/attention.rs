//! Attention's plain twin in f64, and runs of both.

#![allow(dead_code, reason = "each test uses its part")]

use evenkeel_device::kernel::{Attention, AttentionBackward, AttentionDropout, Mask, Segments};
use evenkeel_device::{DType, Heads, Queue, Tensor};

use crate::scores::{Changed, Changes};
use crate::support::{Random, assert_close, run, strided, tolerance};

/// The layout of heads in memory.
#[derive(Clone, Copy, Debug)]
pub enum Lie {
    /// Side by side in tensors of their own, rows apart.
    Packed,
    /// q, k and v of a head together in one tensor, as GPT-NeoX has them. As many key heads as query heads.
    Interleaved,
    /// A share of more heads: others lie before and after these.
    Between,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub heads: usize,
    pub key_heads: usize,
    pub dim: usize,
    pub offsets: Vec<usize>,
    pub mask: Mask,
    pub lie: Lie,
    pub dtype: DType,
    pub dropout: Option<AttentionDropout>,
    pub changes: Changes,
}

/// The gradients of sinks are added to this, a power of two.
const DSINK_BEFORE: f32 = 0.125;

/// q, k, v and dout, [T, heads · dim] each.
#[derive(Clone)]
pub struct Operands {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub dout: Vec<f32>,
}

/// A key that a query sees: its token, its weight, dropout's factor, and the derivative of its changed score.
struct Weighed {
    key: usize,
    weight: f64,
    factor: f64,
    derivative: f64,
}

impl Case {
    pub fn tokens(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    fn scale(&self) -> f32 {
        // Larger than usual, so that the softmax is not nearly even.
        2.0 / (self.dim as f32).sqrt()
    }

    pub fn operands(&self, seed: u64) -> Operands {
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
                let place = query - segment[0];
                let len = segment[1] - segment[0];
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
    pub fn plain_forward(&self, operands: &Operands) -> [Vec<f64>; 2] {
        let (mut out, mut logsum) = (vec![0.0; operands.q.len()], vec![0.0; self.tokens() * self.heads]);
        self.each_query(operands, |head, query, weights, total| {
            logsum[query * self.heads + head] = total;
            for Weighed { key, weight, factor, .. } in weights {
                let value = self.key_row(&operands.v, head, *key);
                for (d, v) in value.iter().enumerate() {
                    out[(query * self.heads + head) * self.dim + d] += factor * weight * *v as f64;
                }
            }
        });
        [out, logsum]
    }

    /// dq, dk, dv, and dsinks [N] if there are sinks. `out` is the forward's, as rounded as the kernel has it.
    pub fn plain_backward(&self, operands: &Operands, out: &[f32]) -> [Vec<f64>; 4] {
        let mut dq = vec![0.0; operands.q.len()];
        let (mut dk, mut dv) = (vec![0.0; operands.k.len()], vec![0.0; operands.k.len()]);
        let mut dsinks = vec![0.0; if self.changes.sinks.is_some() { self.heads } else { 0 }];
        let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| *a as f64 * *b as f64).sum() };
        self.each_query(operands, |head, query, weights, logsum| {
            let row = (query * self.heads + head) * self.dim..(query * self.heads + head + 1) * self.dim;
            let (dout, q) = (&operands.dout[row.clone()], &operands.q[row.clone()]);
            let delta = dot(dout, &out[row.clone()]);
            if let Some(sink) = self.changes.sink(head) {
                dsinks[head] -= (sink - logsum).exp() * delta;
            }
            for &Weighed { key, weight, factor, derivative } in weights {
                let (k, v) = (self.key_row(&operands.k, head, key), self.key_row(&operands.v, head, key));
                let gradient = weight * (factor * dot(dout, v) - delta) * derivative * self.scale() as f64;
                let key_start = self.key_start(head, key);
                for d in 0..self.dim {
                    dq[row.start + d] += gradient * k[d] as f64;
                    dk[key_start + d] += gradient * q[d] as f64;
                    dv[key_start + d] += factor * weight * dout[d] as f64;
                }
            }
        });
        [dq, dk, dv, dsinks]
    }

    fn key_start(&self, head: usize, key: usize) -> usize {
        (key * self.key_heads + head / (self.heads / self.key_heads)) * self.dim
    }

    fn key_row<'a>(&self, rows: &'a [f32], head: usize, key: usize) -> &'a [f32] {
        &rows[self.key_start(head, key)..][..self.dim]
    }

    /// Dropout's factor of one weight, written from the kernels' documentation.
    fn factor(&self, head: usize, query: usize, key_in_segment: usize) -> f64 {
        let Some(dropout) = self.dropout else { return 1.0 };
        let mixed = |mut x: u64| {
            for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)] {
                x = (x ^ x >> shift).wrapping_mul(factor);
            }
            x ^ x >> 31
        };
        let numbered =
            |seed: u64, number: u64| mixed(seed.wrapping_add((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let of_head = numbered(dropout.seed, dropout.first_head + head as u64);
        let of_query = numbered(of_head, dropout.first_token + query as u64);
        let pair = key_in_segment / 16 * 8 + key_in_segment % 8;
        let mut word = (of_query as u32).wrapping_add(pair as u32);
        for (shift, factor, added) in [(16, 0x7feb_352d, (of_query >> 32) as u32), (15, 0x846c_a68b, 0)] {
            word = (word ^ word >> shift).wrapping_mul(factor).wrapping_add(added);
        }
        let (upper, lower) = (word >> 16, word & 0xffff);
        let bits = if key_in_segment % 16 < 8 { upper } else { upper ^ lower };
        let probability = dropout.probability as f64;
        if (bits as f64) < probability * 65536.0 { 0.0 } else { 1.0 / (1.0 - probability) }
    }

    fn segment_start(&self, token: usize) -> usize {
        *self.offsets.iter().rfind(|&&offset| offset <= token).expect("offsets begin at 0")
    }

    /// `each(head, query, its keys, logsum)`
    fn each_query(&self, operands: &Operands, mut each: impl FnMut(usize, usize, &[Weighed], f64)) {
        for (query, keys) in self.pairs() {
            for head in 0..self.heads {
                let q = &operands.q[(query * self.heads + head) * self.dim..][..self.dim];
                let scores: Vec<Changed> = keys
                    .clone()
                    .map(|key| {
                        let k = self.key_row(&operands.k, head, key);
                        let product: f64 = q.iter().zip(k).map(|(q, k)| *q as f64 * *k as f64).sum();
                        self.changes.apply(head, product * self.scale() as f64, key as f64 - query as f64)
                    })
                    .collect();
                let of_sink = self.changes.sink(head).map_or(0.0, f64::exp);
                let logsum = (scores.iter().map(|changed| changed.score.exp()).sum::<f64>() + of_sink).ln();
                let weights = keys.clone().zip(&scores).map(|(key, changed)| Weighed {
                    key,
                    weight: (changed.score - logsum).exp(),
                    factor: self.factor(head, query, key - self.segment_start(query)),
                    derivative: changed.derivative,
                });
                let weights: Vec<Weighed> = weights.collect();
                each(head, query, &weights, logsum);
            }
        }
    }

    /// out, logsum, dq, dk, dv, and dsinks if there are sinks, as the device computes them.
    pub fn compute(&self, operands: &Operands) -> Vec<Vec<f32>> {
        let (tokens, dim) = (self.tokens(), self.dim);
        let segments = Segments::new(self.offsets.clone());
        let mask = self.mask;
        let scale = self.scale();
        let dropout = self.dropout;
        let results = run(|queue| {
            let counts = [self.heads, self.key_heads, self.key_heads];
            let ([q, k, v], inputs) =
                self.place(queue, [&operands.q, &operands.k, &operands.v].map(|x| Some(&x[..])), counts);
            let ([dq, dk, dv], gradients) = self.place(queue, [None; 3], counts);
            let ([out, dout, _], outs) = self.place(queue, [None, Some(&operands.dout[..]), None], [self.heads; 3]);
            let logsum = queue.tensor(tokens, self.heads, DType::F32);
            let logsum_view = logsum.view();
            let segments = segments.clone();
            let (scores, _held) = self.changes.scores(queue, self.heads);
            let ones = vec![DSINK_BEFORE; self.heads];
            let dsinks = scores.sinks.map(|_| queue.floats(1, self.heads, DType::F32, &ones));
            queue.launch(Attention {
                q,
                k,
                v,
                out,
                logsum: logsum_view,
                segments: segments.clone(),
                mask,
                scale,
                dropout,
                scores: scores.clone(),
            });
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
                dropout,
                scores,
                dsinks: dsinks.as_ref().map(Tensor::view),
            });
            [logsum].into_iter().chain(inputs).chain(gradients).chain(outs).chain(dsinks).collect()
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
        let added = results[1 + 3 * tensors_each..].concat();
        let dsinks = added.iter().map(|dsink| dsink - DSINK_BEFORE).collect();
        vec![out, results[0].clone(), dq, take(1, 1, key_heads), take(1, 2, key_heads), dsinks]
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
                    strided(queue, tokens, counts[which] * dim, 3, self.dtype, &flat)
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
                let heads = counts[0];
                let width = 3 * counts[0] * dim;
                let flat: Vec<f32> =
                    (0..tokens * width).map(|i| at(i / dim % 3, i / width, i % width / (3 * dim), i % dim)).collect();
                let tensor = strided(queue, tokens, width, 5, self.dtype, &flat);
                ([0, 1, 2].map(|which| Heads::strided(&tensor, which * dim, heads, dim, 3 * dim)), vec![tensor])
            }
        }
    }

    pub fn check(&self) {
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
            ("dsinks", &results[5], &gradients[3]),
        ] {
            // A query that sees one key has no gradient: what is left of dq and dk then is judged by the size of dv.
            let alone = self.mask.window == Some(1) && matches!(name, "dq" | "dk");
            let error = distance(actual, expected) / norm(if alone { &gradients[2] } else { expected });
            // Sums over all tokens, whose terms cancel.
            let least = if name == "dsinks" { 1e-5 } else { 0.0 };
            let tolerance = tolerance(self.dtype).max(least);
            assert!(
                expected.is_empty() || error <= tolerance,
                "{name} of {self:?}: error {error:.2e} above {tolerance:.0e}"
            );
        }
    }
}

pub fn distance(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    norm(&actual.iter().zip(expected).map(|(a, e)| *a as f64 - e).collect::<Vec<f64>>())
}

pub fn norm(numbers: &[f64]) -> f64 {
    numbers.iter().map(|number| number * number).sum::<f64>().sqrt()
}
