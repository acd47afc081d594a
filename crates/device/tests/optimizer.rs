//! The optimizer's kernels against plain twins in f64.

mod support;

use std::ops::Range;

use evenkeel_device::kernel::{AdamW, ClipFactor, SquaredNorm, SquaredNorms, frozen_words};
use evenkeel_device::{DType, Tensor};
use support::{DTYPES, Random, assert_close, rounded, run, strided, tolerance};

struct Settings {
    lr: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    decay: f64,
    factor: Option<f32>,
}

/// `steps` updates as PyTorch's AdamW makes them: weight, mean, variance.
fn plain_adamw(weight: &[f32], grads: &[Vec<f32>], settings: &Settings) -> [Vec<f64>; 3] {
    let mut weight: Vec<f64> = weight.iter().map(|&w| w as f64).collect();
    let (mut mean, mut variance) = (vec![0.0; weight.len()], vec![0.0; weight.len()]);
    for (t, grad) in (1..).zip(grads) {
        for i in 0..weight.len() {
            let g = grad[i] as f64 * settings.factor.unwrap_or(1.0) as f64;
            weight[i] *= 1.0 - settings.lr * settings.decay;
            mean[i] = settings.beta1 * mean[i] + (1.0 - settings.beta1) * g;
            variance[i] = settings.beta2 * variance[i] + (1.0 - settings.beta2) * g * g;
            let corrected = (variance[i] / (1.0 - settings.beta2.powi(t))).sqrt();
            weight[i] -= settings.lr / (1.0 - settings.beta1.powi(t)) * mean[i] / (corrected + settings.epsilon);
        }
    }
    [weight, mean, variance]
}

#[test]
fn adamw_moves_weights_as_pytorch_does() {
    let mut random = Random::new(1);
    for (rows, cols, decay, factor, copy) in [
        (1, 1, 0.0, None, None),
        (3, 5, 0.1, None, Some(DType::Bf16)),
        (16, 16, 0.0, Some(0.25f32), Some(DType::F32)),
        (7, 33, 0.3, Some(0.5), None),
        (131, 517, 0.01, Some(2.0), Some(DType::Bf16)),
    ] {
        let len = rows * cols;
        let as_f64 = |value: f32| value as f64;
        let lr = 0.02f32;
        let beta1 = 0.9f32;
        let beta2 = 0.95f32;
        let epsilon = 1e-3f32;
        let settings = Settings {
            lr: as_f64(lr),
            beta1: as_f64(beta1),
            beta2: as_f64(beta2),
            epsilon: as_f64(epsilon),
            decay: as_f64(decay),
            factor,
        };
        let weights = random.numbers(len, DType::F32);
        let grads: Vec<Vec<f32>> = (0..3).map(|_| random.numbers(len, DType::F32)).collect();
        let results = run(|queue| {
            let weight = queue.floats(rows, cols, DType::F32, &weights);
            let (mean, variance) = (
                queue.floats(rows, cols, DType::F32, &vec![0.0; len]),
                queue.floats(rows, cols, DType::F32, &vec![0.0; len]),
            );
            let rounded_copy = copy.map(|dtype| queue.tensor(rows, cols, dtype));
            let factor = factor.map(|factor| queue.floats(1, 1, DType::F32, &[factor]));
            for (step, grad) in (1..).zip(&grads) {
                queue.launch(AdamW {
                    weight: weight.view(),
                    grad: queue.floats(rows, cols, DType::F32, grad).view(),
                    mean: mean.view(),
                    variance: variance.view(),
                    copy: rounded_copy.as_ref().map(|copy| copy.view()),
                    lr,
                    beta1,
                    beta2,
                    epsilon,
                    weight_decay: decay,
                    step,
                    grad_factor: factor.as_ref().map(|factor| factor.view()),
                    frozen: None,
                });
            }
            [weight, mean, variance].into_iter().chain(rounded_copy).collect()
        });
        let expected = plain_adamw(&weights, &grads, &settings);
        for (name, (actual, expected)) in ["weight", "mean", "variance"].iter().zip(results.iter().zip(&expected)) {
            assert_close(&format!("{name} of [{rows}, {cols}]"), actual, expected, tolerance(DType::F32));
        }
        if let Some(dtype) = copy {
            let rounded: Vec<f32> = results[0].iter().map(|&weight| rounded(weight, dtype)).collect();
            assert_eq!(results[3], rounded, "the copy is the rounded weight");
        }
    }
}

#[test]
fn frozen_elements_stay_as_they_are_bit_for_bit_and_the_others_move_as_without_them() {
    let mut random = Random::new(4);
    for (len, share) in [(1, 1.0), (31, 0.5), (32, 0.3), (33, 0.9), (100, 0.0), (70_003, 0.5), (40_000, 1.0)] {
        let [weights, grads, means, variances] = [(); 4].map(|()| random.numbers(len, DType::F32));
        let variances: Vec<f32> = variances.iter().map(|variance| variance.abs()).collect();
        // A number that no arithmetic would leave alone.
        let weights: Vec<f32> = [f32::from_bits(0x7fa0_0001)].into_iter().chain(weights).take(len).collect();
        let chances = random.numbers(len, DType::F32);
        let is_frozen: Vec<bool> = (0..len).map(|i| i == 0 || (chances[i] as f64 + 1.0) / 2.0 < share).collect();
        let bit = |i: usize| u32::from(is_frozen.get(i) == Some(&true));
        let words: Vec<u32> =
            (0..frozen_words(len)).map(|word| (0..32).map(|i| bit(32 * word + i) << i).sum()).collect();
        let [frozen, free] = [Some(&words), None].map(|words| {
            run(|queue| {
                let tensor = |values: &[f32]| queue.floats(1, len, DType::F32, values);
                let state = [&weights, &means, &variances].map(|values| tensor(values));
                let copy = queue.floats(1, len, DType::Bf16, &weights);
                queue.launch(AdamW {
                    weight: state[0].view(),
                    grad: tensor(&grads).view(),
                    mean: state[1].view(),
                    variance: state[2].view(),
                    copy: Some(copy.view()),
                    lr: 0.1,
                    beta1: 0.9,
                    beta2: 0.95,
                    epsilon: 1e-3,
                    weight_decay: 0.3,
                    step: 2,
                    grad_factor: None,
                    frozen: words.map(|words| queue.indices(words).view()),
                });
                state.into_iter().chain([copy]).collect()
            })
        });
        let before = [&weights, &means, &variances];
        for (part, (frozen, free)) in frozen.iter().zip(&free).enumerate() {
            for i in 0..len {
                let expected = match before.get(part) {
                    _ if !is_frozen[i] => free[i],
                    Some(before) => before[i],
                    None => rounded(weights[i], DType::Bf16),
                };
                let what = format!("part {part}, element {i} of {len}, frozen: {}", is_frozen[i]);
                let is_same = frozen[i].to_bits() == expected.to_bits() || (part == 3 && expected.is_nan());
                assert!(is_same, "{what}: {}, expected {expected}", frozen[i]);
                assert!(is_frozen[i] || part == 3 || free[i] != before[part][i], "{what} did not move");
            }
        }
    }
}

#[test]
fn squared_norm_adds_every_square_once() {
    let mut random = Random::new(2);
    let shapes =
        [(1, 1, 0), (0, 4, 0), (3, 0, 0), (1, 4096, 0), (5, 13, 3), (1, 40_001, 0), (700, 131, 5), (2, 70_003, 1)];
    for dtype in DTYPES {
        for (rows, cols, padding) in shapes {
            let values = random.numbers(rows * cols, dtype);
            let exact: f64 = values.iter().map(|&x| (x as f64).powi(2)).sum();
            let results = run(|queue| {
                let x = strided(queue, rows, cols, padding, dtype, &values);
                let (fresh, added) =
                    (queue.floats(1, 1, DType::F32, &[f32::NAN]), queue.floats(1, 1, DType::F32, &[3.5]));
                queue.launch(SquaredNorm { x: x.view(), out: fresh.view(), accumulate: false });
                queue.launch(SquaredNorm { x: x.view(), out: added.view(), accumulate: true });
                vec![fresh, added]
            });
            let what = format!("{dtype:?} [{rows}, {cols}]");
            assert_close(&what, &results[0], &[exact], tolerance(DType::F32));
            assert_close(&what, &results[1], &[exact + 3.5], tolerance(DType::F32));
        }
    }
}

#[test]
fn squared_norms_at_once_have_the_bits_of_each_alone() {
    let values = Random::new(4).numbers(300_000, DType::F32);
    let ranges = [0..4, 8..40_008, 40_008..300_000, 17..17, 64..4_160, 3..1_003];
    let results = run(|queue| {
        let x = queue.floats(1, values.len(), DType::F32, &values);
        let outs = || queue.floats(ranges.len(), 1, DType::F32, &[2.0; 6]);
        let (together, alone) = (outs(), outs());
        let norms = |outs: &Tensor| -> Vec<SquaredNorm> {
            let norm = |(place, range): (usize, &Range<usize>)| {
                let (x, out) = (x.col_range(range.clone()).view(), outs.row_range(place..place + 1).view());
                SquaredNorm { x, out, accumulate: place % 2 == 0 }
            };
            ranges.iter().enumerate().map(norm).collect()
        };
        queue.launch(SquaredNorms(norms(&together)));
        norms(&alone).into_iter().for_each(|norm| queue.launch(norm));
        vec![together, alone]
    });
    assert_eq!(results[0], results[1]);
    let exact = |(place, range): (usize, &Range<usize>)| {
        let sum: f64 = values[range.clone()].iter().map(|&x| (x as f64).powi(2)).sum();
        if place % 2 == 0 { sum + 2.0 } else { sum }
    };
    let exact: Vec<f64> = ranges.iter().enumerate().map(exact).collect();
    assert_close("several norms", &results[0], &exact, tolerance(DType::F32));
}

#[test]
fn squared_norm_has_the_same_bits_with_and_without_gaps_between_rows() {
    let values = Random::new(3).numbers(123 * 457, DType::F32);
    let results = run(|queue| {
        [0, 7]
            .map(|padding| {
                let out = queue.tensor(1, 1, DType::F32);
                let x = strided(queue, 123, 457, padding, DType::F32, &values);
                queue.launch(SquaredNorm { x: x.view(), out: out.view(), accumulate: false });
                out
            })
            .to_vec()
    });
    assert_eq!(results[0][0].to_bits(), results[1][0].to_bits());
}

#[test]
fn clip_factor_is_one_below_the_limit_and_never_one_for_a_broken_norm() {
    let factor = |squared_norm: f32, limit: f32| {
        let results = run(|queue| {
            let norm = queue.floats(1, 1, DType::F32, &[squared_norm]);
            queue.launch(ClipFactor { squared_norm: norm.view(), limit, out: norm.view() });
            vec![norm]
        });
        results[0][0]
    };
    assert_eq!(factor(0.25, 1.0), 1.0);
    assert_eq!(factor(0.0, 1.0), 1.0);
    assert_close("clipped", &[factor(16.0, 1.0)], &[1.0 / (4.0 + 1e-6)], tolerance(DType::F32));
    assert!(factor(f32::NAN, 1.0).is_nan());
    assert_eq!(factor(f32::INFINITY, 1.0), 0.0);
}
