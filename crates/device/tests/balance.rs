//! The balance of experts against plain loops in f64; its gradient against differences.

mod support;

use evenkeel_device::DType;
use evenkeel_device::kernel::{BalanceBackward, BalanceTally};
use support::{DTYPES, Random, assert_close, framed, rounded, run, strided, tolerance, unframed, wide};

/// Tokens, experts, experts chosen for each token.
const CASES: [[usize; 3]; 8] =
    [[0, 4, 2], [1, 1, 1], [5, 3, 2], [33, 8, 2], [100, 40, 5], [64, 128, 8], [9, 513, 32], [700, 20, 4]];

struct Case {
    shape: [usize; 3],
    logits: Vec<f32>,
    chosen: Vec<u32>,
    counted: Vec<u32>,
}

impl Case {
    fn new(shape: [usize; 3]) -> Case {
        let ([tokens, experts, k], mut random) = (shape, Random::new(41));
        let logits = random.numbers(tokens * experts, DType::F32).iter().map(|x| 4.0 * x).collect();
        // Neighbours from anywhere on, so that none is chosen twice.
        let chosen = (0..tokens).flat_map(|_| {
            let first = random.below(experts);
            (0..k).map(move |slot| ((first + slot) % experts) as u32).collect::<Vec<_>>()
        });
        let chosen = chosen.collect();
        let counted = (0..tokens).map(|token| u32::from(token % 5 != 3)).collect();
        Case { shape, logits, chosen, counted }
    }

    fn counted_tokens(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.shape[0]).filter(|&token| self.counted[token] != 0)
    }

    fn shares(&self, token: usize, change: impl Fn(usize) -> f64) -> Vec<f64> {
        let experts = self.shape[1];
        let row: Vec<f64> = (0..experts).map(|i| self.logits[token * experts + i] as f64 + change(i)).collect();
        let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
        row.iter().map(|logit| logit.exp() / sum).collect()
    }
}

#[test]
fn a_tally_has_the_pairs_and_the_shares_of_tokens_that_count() {
    for shape in CASES {
        let ([tokens, experts, k], case) = (shape, Case::new(shape));
        let results = run(|queue| {
            let logits = strided(queue, tokens, experts, 3, DType::F32, &case.logits);
            let chosen = queue.tensor(tokens, k, DType::U32);
            queue.write_indices(&chosen, &case.chosen);
            let (out, outer) = framed(queue, 2, experts, DType::F32, &vec![7.0; 2 * experts]);
            let counted = queue.indices(&case.counted);
            queue.launch(BalanceTally {
                logits: logits.view(),
                chosen: chosen.view(),
                counted: counted.view(),
                out: out.view(),
            });
            vec![outer]
        });
        let (mut pairs, mut shares) = (vec![0.0; experts], vec![0.0; experts]);
        for token in case.counted_tokens() {
            case.chosen[token * k..][..k].iter().for_each(|&expert| pairs[expert as usize] += 1.0);
            shares.iter_mut().zip(case.shares(token, |_| 0.0)).for_each(|(sum, share)| *sum += share);
        }
        let found = unframed(&results[0], experts);
        assert_eq!(wide(&found[..experts]), pairs, "{shape:?}");
        assert_close(&format!("{shape:?}"), &found[experts..], &shares, tolerance(DType::F32));
    }
}

#[test]
fn gradients_of_the_balance_are_differences_and_are_added() {
    const STEP: f64 = 1e-5;
    const LAYERS: usize = 3;
    const FACTOR: f32 = 0.25;
    for (shape, dtype) in CASES.into_iter().flat_map(|shape| DTYPES.map(|dtype| (shape, dtype))) {
        let ([tokens, experts, _], case) = (shape, Case::new(shape));
        let mut random = Random::new(42);
        let tallies: Vec<f32> =
            random.numbers(2 * LAYERS * experts, DType::F32).iter().map(|x| (8.0 * x).round()).collect();
        let before: Vec<f32> =
            random.numbers(tokens * experts, dtype).iter().map(|x| rounded(x + 3.0, dtype)).collect();
        let results = run(|queue| {
            let logits = strided(queue, tokens, experts, 3, DType::F32, &case.logits);
            let tallies = strided(queue, 2 * LAYERS, experts, 1, DType::F32, &tallies);
            let (out, outer) = framed(queue, tokens, experts, dtype, &before);
            let counted = queue.indices(&case.counted);
            queue.launch(BalanceBackward {
                logits: logits.view(),
                tallies: tallies.view(),
                counted: counted.view(),
                factor: FACTOR,
                dlogits: out.view(),
            });
            vec![outer]
        });
        let pairs: Vec<f64> =
            (0..experts).map(|i| (0..LAYERS).map(|layer| tallies[2 * layer * experts + i] as f64).sum()).collect();
        let loss = |token: usize, moved: usize, step: f64| -> f64 {
            let shares = case.shares(token, |i| if i == moved { step } else { 0.0 });
            shares.iter().zip(&pairs).map(|(share, pairs)| FACTOR as f64 * share * pairs).sum()
        };
        let mut expected = wide(&before);
        for token in case.counted_tokens() {
            // Differences of every logit take long where there are many.
            for i in 0..experts {
                let slope = if experts < 200 {
                    (loss(token, i, STEP) - loss(token, i, -STEP)) / (2.0 * STEP)
                } else {
                    let shares = case.shares(token, |_| 0.0);
                    let mean: f64 = shares.iter().zip(&pairs).map(|(share, pairs)| share * pairs).sum();
                    FACTOR as f64 * shares[i] * (pairs[i] - mean)
                };
                expected[token * experts + i] += slope;
            }
        }
        let what = format!("{shape:?} {dtype:?}");
        assert_close(&what, &unframed(&results[0], experts), &expected, tolerance(dtype));
    }
}
