//! Attention to a cache against a plain twin in f64.

#[path = "support/scores.rs"]
mod scores;
mod support;

use evenkeel_device::kernel::{CachedAttention, Mask, Operation, ScoreChanges, Segments};
use evenkeel_device::{DType, Device, Heads, Queue};
use scores::{ALL_CHANGES, Changes, EVERYTHING, UNCHANGED};
use support::{DTYPES, Random, assert_close, framed, run, strided, tolerance, unframed};

/// One sequence: tokens cached before, new tokens.
type Sequence = (usize, usize);

#[derive(Clone, Debug)]
struct Case {
    heads: usize,
    key_heads: usize,
    dim: usize,
    /// From one head of q, k and v to the next, as in a fused projection.
    step: usize,
    capacity: usize,
    sequences: Vec<Sequence>,
    window: Option<usize>,
    dtype: DType,
    changes: Changes,
}

const PLAIN: Case = Case {
    heads: 4,
    key_heads: 2,
    dim: 12,
    step: 12,
    capacity: 90,
    sequences: Vec::new(),
    window: None,
    dtype: DType::F32,
    changes: UNCHANGED,
};

/// A kernel's results: the output, and the caches of keys and values.
struct Results {
    out: Vec<f32>,
    caches: [Vec<f32>; 2],
}

impl Case {
    fn tokens(&self) -> usize {
        self.sequences.iter().map(|(_, new)| new).sum()
    }

    fn scale(&self) -> f32 {
        // Larger than usual, so that the softmax is not nearly even.
        2.0 / (self.dim as f32).sqrt()
    }

    fn segments(&self) -> Segments {
        let ends = self.sequences.iter().scan(0, |end, (_, new)| {
            *end += new;
            Some(*end)
        });
        Segments::new([0].into_iter().chain(ends).collect())
    }

    fn row(&self, heads: usize) -> usize {
        (heads - 1) * self.step + self.dim
    }

    /// q, k and v of the new tokens, and the caches: NaN from each sequence's length on.
    fn operands(&self) -> ([Vec<f32>; 3], [Vec<f32>; 2]) {
        let mut random = Random::new((self.dim + self.tokens()) as u64);
        let new = [self.heads, self.key_heads, self.key_heads]
            .map(|heads| random.numbers(self.tokens() * self.row(heads), self.dtype));
        let width = self.key_heads * self.dim;
        let caches = [0, 1].map(|_| {
            let mut cache = random.numbers(self.sequences.len() * self.capacity * width, self.dtype);
            for (rows, (length, _)) in cache.chunks_exact_mut(self.capacity * width).zip(&self.sequences) {
                rows[length * width..].fill(f32::NAN);
            }
            cache
        });
        (new, caches)
    }

    fn kernel(&self, queue: &Queue, [q, k, v]: [Heads; 3], out: Heads, [cached_k, cached_v]: [Heads; 2]) {
        let (scores, _held) = self.changes.scores(queue, self.heads);
        queue.launch(CachedAttention {
            q,
            k,
            v,
            out,
            cached_k,
            cached_v,
            capacity: self.capacity,
            lengths: self.sequences.iter().map(|(length, _)| *length).collect(),
            segments: self.segments(),
            mask: Mask { causal: true, window: self.window },
            scale: self.scale(),
            scores,
        });
    }

    fn compute(&self) -> Results {
        let (new, caches) = self.operands();
        let Case { heads, key_heads, dim, step, dtype, .. } = *self;
        let tokens = self.tokens();
        let width = key_heads * dim;
        let results = run(|queue| {
            let tensors = [(0, heads), (1, key_heads), (2, key_heads)].map(|(which, count)| {
                let tensor = strided(queue, tokens, self.row(count), 3, dtype, &new[which]);
                (Heads::strided(&tensor, 0, count, dim, step), tensor)
            });
            let rows = self.sequences.len() * self.capacity;
            let cached = [0, 1].map(|which| framed(queue, rows, width, dtype, &caches[which]));
            let (out, outer) = framed(queue, tokens, heads * dim, dtype, &vec![f32::NAN; tokens * heads * dim]);
            let views = [0, 1].map(|which| Heads::packed(&cached[which].0, key_heads));
            self.kernel(queue, [0, 1, 2].map(|which| tensors[which].0), Heads::packed(&out, heads), views);
            let [(_, keys), (_, values)] = cached;
            vec![outer, keys, values]
        });
        let out = unframed(&results[0], heads * dim);
        Results { out, caches: [1, 2].map(|which| unframed(&results[which], width)) }
    }

    /// The caches as they should be afterwards.
    fn plain_caches(&self) -> [Vec<f32>; 2] {
        let (new, mut caches) = self.operands();
        let (width, row) = (self.key_heads * self.dim, self.row(self.key_heads));
        for (cache, new) in caches.iter_mut().zip(&new[1..]) {
            let mut tokens = new.chunks_exact(row);
            for (sequence, &(length, count)) in self.sequences.iter().enumerate() {
                for (place, token) in (length..).zip(tokens.by_ref().take(count)) {
                    let to = &mut cache[(sequence * self.capacity + place) * width..][..width];
                    for (head, to) in to.chunks_exact_mut(self.dim).enumerate() {
                        to.copy_from_slice(&token[head * self.step..][..self.dim]);
                    }
                }
            }
        }
        caches
    }

    fn plain_out(&self) -> Vec<f64> {
        let ([q, ..], [keys, values]) = (self.operands().0, self.plain_caches());
        let Case { heads, key_heads, dim, .. } = *self;
        let mut queries = q.chunks_exact(self.row(heads));
        let mut out = Vec::new();
        for (sequence, &(length, new)) in self.sequences.iter().enumerate() {
            for (position, query) in (length..).zip(queries.by_ref().take(new)) {
                for head in 0..heads {
                    let q = &query[head * self.step..][..dim];
                    let at =
                        |key: usize| ((sequence * self.capacity + key) * key_heads + head / (heads / key_heads)) * dim;
                    let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
                    let score = |key: usize| -> f64 {
                        let products = q.iter().zip(&keys[at(key)..]).map(|(&q, &k)| q as f64 * k as f64);
                        let product = products.sum::<f64>() * self.scale() as f64;
                        self.changes.apply(head, product, key as f64 - position as f64).score.exp()
                    };
                    let weights: Vec<f64> = (first..=position).map(score).collect();
                    let total = weights.iter().sum::<f64>() + self.changes.sink(head).map_or(0.0, f64::exp);
                    out.extend((0..dim).map(|i| {
                        let weighted = weights.iter().zip(first..).map(|(w, key)| w * values[at(key) + i] as f64);
                        weighted.sum::<f64>() / total
                    }));
                }
            }
        }
        out
    }

    fn check(&self) {
        let results = self.compute();
        for (which, expected) in self.plain_caches().iter().enumerate() {
            let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|value| value.to_bits()).collect() };
            assert!(bits(&results.caches[which]) == bits(expected), "cache {which} of {self:?}");
        }
        assert_close(&format!("{self:?}"), &results.out, &self.plain_out(), tolerance(self.dtype));
    }
}

#[test]
fn every_window_grouping_and_mixture_of_sequences_agrees_with_the_plain_formula() {
    let mixtures: [&[Sequence]; 6] = [
        &[(0, 1)],
        &[(70, 1)],
        &[(3, 1), (0, 1), (89, 1)],
        &[(0, 40), (0, 7)],
        &[(0, 0), (20, 31), (5, 0), (64, 1)],
        &[],
    ];
    for dtype in DTYPES {
        for window in [None, Some(1), Some(5), Some(1000)] {
            for (heads, key_heads) in [(1, 1), (2, 2), (4, 2), (3, 1), (8, 1)] {
                for sequences in mixtures {
                    Case { heads, key_heads, window, dtype, sequences: sequences.to_vec(), ..PLAIN }.check();
                }
            }
        }
    }
}

#[test]
fn every_head_dimension_and_stride_works() {
    for dtype in DTYPES {
        for dim in [1, 10, 16, 31, 64, 80, 128, 256] {
            for step in [dim, 3 * dim] {
                Case { dim, step, dtype, sequences: vec![(33, 2), (0, 5)], ..PLAIN }.check();
            }
        }
    }
}

#[test]
fn every_change_of_scores_agrees_with_the_plain_formula() {
    let mixtures: [&[Sequence]; 4] =
        [&[(0, 1)], &[(3, 1), (0, 1), (89, 1)], &[(0, 0), (20, 31), (5, 0), (64, 1)], &[(0, 40), (0, 7)]];
    for dtype in DTYPES {
        for changes in ALL_CHANGES {
            for (window, heads, key_heads, dim) in
                [(None, 4, 2, 12), (Some(1), 3, 1, 64), (Some(5), 8, 1, 33), (None, 5, 5, 80), (Some(40), 6, 2, 256)]
            {
                for sequences in mixtures {
                    let sequences = sequences.to_vec();
                    Case { heads, key_heads, dim, step: dim, window, dtype, sequences, changes, ..PLAIN }.check();
                }
            }
        }
    }
}

#[test]
fn changed_scores_of_a_long_prompt_agree() {
    for window in [None, Some(70)] {
        let case = Case { heads: 6, key_heads: 2, capacity: 300, window, changes: EVERYTHING, ..PLAIN };
        Case { sequences: vec![(0, 291)], ..case.clone() }.check();
        Case { sequences: vec![(150, 100), (299, 1)], ..case }.check();
    }
}

#[test]
fn a_sink_of_minus_infinity_is_none() {
    for dtype in DTYPES {
        let case = Case { sequences: vec![(20, 31), (64, 1)], dtype, ..PLAIN };
        let infinite = Case { changes: Changes { sinks: Some(f32::NEG_INFINITY), ..UNCHANGED }, ..case.clone() };
        let expected = support::wide(&case.compute().out);
        assert_close(&format!("{dtype:?}"), &infinite.compute().out, &expected, tolerance(dtype));
    }
}

#[test]
fn a_long_prompt_agrees_whichever_way_its_rows_are_divided() {
    for window in [None, Some(70)] {
        let case = Case { heads: 6, key_heads: 2, capacity: 300, window, ..PLAIN };
        Case { sequences: vec![(0, 291)], ..case.clone() }.check();
        Case { sequences: vec![(150, 100), (299, 1)], ..case }.check();
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let device = support::device(1, 1 << 24);
    let queue = device.compute();
    let case = Case { heads: 1, key_heads: 1, dim: 2, capacity: 2, sequences: vec![(0, 2)], ..PLAIN };
    // ScoreChanges of the second token: 1e4 and 4e4 times the scale.
    let [q, k, v] = [[100.0, 0.0, 100.0, 0.0], [100.0, 0.0, 400.0, 0.0], [1.0, 2.0, 3.0, 4.0]]
        .map(|x| queue.floats(2, 2, DType::F32, &x));
    let [out, cached_k, cached_v] = [0; 3].map(|_| queue.tensor(2, 2, DType::F32));
    let heads = |tensor| Heads::packed(tensor, 1);
    case.kernel(queue, [&q, &k, &v].map(heads), heads(&out), [&cached_k, &cached_v].map(heads));
    assert_eq!(queue.read(&out), [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn costs_count_the_pairs_seen_and_the_rows_moved() {
    let device = Device::dry();
    let case = Case { sequences: vec![(10, 2), (0, 1), (7, 0)], window: Some(4), ..PLAIN };
    let queue = device.compute();
    let tensor = |rows, heads| Heads::packed(&queue.tensor(rows, heads * 12, DType::F32), heads);
    let [q, out, k, v] = [4, 4, 2, 2].map(|heads| tensor(3, heads));
    let kernel = CachedAttention {
        q,
        k,
        v,
        out,
        cached_k: tensor(270, 2),
        cached_v: tensor(270, 2),
        capacity: 90,
        lengths: [10, 0, 7].into(),
        segments: case.segments(),
        mask: Mask { causal: true, window: case.window },
        scale: 1.0,
        scores: ScoreChanges::default(),
    };
    // Two tokens see four keys each, one sees itself: nine pairs, two products of 48 numbers.
    assert_eq!(kernel.flops(), 2 * 2 * 9 * 48);
    // Three rows of q and out, three of k and v read and written, three older ones of each read.
    assert_eq!(kernel.bytes(), 4 * (2 * 3 * 48 + 2 * 2 * 3 * 24 + 2 * 3 * 24));
}

#[test]
#[should_panic(expected = "89 + 2 tokens in a cache of 90")]
fn more_tokens_than_the_cache_holds_are_refused() {
    Case { sequences: vec![(89, 2)], ..PLAIN }.compute();
}
