//! Kernels of optimizers other than AdamW against plain twins in f64.

mod support;

use evenkeel_device::DType;
use evenkeel_device::kernel::{
    Adafactor, AdafactorNorm, Combine, Factored, Lion, MuonMomentum, Normalize, Sgd, SquareSums, frozen_words,
};
use support::{DTYPES, Random, SHAPES, assert_close, framed, rounded, run, strided, tolerance, unframed, wide};

const LENGTHS: [usize; 6] = [0, 1, 16, 33, 70_003, 40_000];

/// Every third element, and the words that say so.
fn frozen(len: usize) -> (impl Fn(usize) -> bool, Vec<u32>) {
    let is_frozen = move |i: usize| i < len && i % 3 == 1;
    let bit = move |i: usize| u32::from(is_frozen(i));
    (is_frozen, (0..frozen_words(len)).map(|word| (0..32).map(|i| bit(32 * word + i) << i).sum()).collect())
}

#[test]
fn sgd_moves_weights_as_pytorch_does() {
    let mut random = Random::new(1);
    for (case, len) in LENGTHS.into_iter().enumerate() {
        for (beta, nesterov) in [(0.0f32, false), (0.9, false), (0.9, true)] {
            let lr = 0.02f32;
            let decay = 0.3f32;
            let factor = 0.5f32;
            let weights = random.numbers(len, DType::F32);
            let grads: Vec<Vec<f32>> = (0..3).map(|_| random.numbers(len, DType::F32)).collect();
            let (is_frozen, words) = frozen(len);
            let some_are_frozen = case % 2 == 1;
            let results = run(|queue| {
                let weight = queue.floats(1, len, DType::F32, &weights);
                let momentum = (beta > 0.0).then(|| queue.zeros(1, len, DType::F32));
                let copy = queue.floats(1, len, DType::Bf16, &weights);
                for grad in &grads {
                    queue.launch(Sgd {
                        weight: weight.view(),
                        grad: queue.floats(1, len, DType::F32, grad).view(),
                        momentum: momentum.as_ref().map(|momentum| momentum.view()),
                        copy: Some(copy.view()),
                        lr,
                        beta,
                        nesterov,
                        weight_decay: decay,
                        grad_factor: Some(queue.floats(1, 1, DType::F32, &[factor]).view()),
                        frozen: some_are_frozen.then(|| queue.indices(&words).view()),
                    });
                }
                [weight, copy].into_iter().chain(momentum).collect()
            });
            let mut weight = wide(&weights);
            let mut momentum = vec![0.0; len];
            let [lr, beta, decay, factor] = [lr, beta, decay, factor].map(f64::from);
            for grad in &grads {
                for i in (0..len).filter(|&i| !(some_are_frozen && is_frozen(i))) {
                    let g = grad[i] as f64 * factor + decay * weight[i];
                    momentum[i] = beta * momentum[i] + g;
                    weight[i] -= lr * if nesterov { g + beta * momentum[i] } else { momentum[i] };
                }
            }
            let what = format!("{len} elements, momentum {beta}, nesterov {nesterov}");
            assert_close(&what, &results[0], &weight, tolerance(DType::F32));
            let copy: Vec<f32> = results[0].iter().map(|&weight| rounded(weight, DType::Bf16)).collect();
            assert_eq!(results[1], copy, "{what}: the copy is the rounded weight");
            if beta > 0.0 {
                assert_close(&what, &results[2], &momentum, tolerance(DType::F32));
            }
            for i in (0..len).filter(|&i| some_are_frozen && is_frozen(i)) {
                assert_eq!(results[0][i].to_bits(), weights[i].to_bits(), "{what}: element {i} is frozen");
            }
        }
    }
}

#[test]
fn lion_moves_weights_by_signs_and_not_at_all_where_there_is_none() {
    let mut random = Random::new(2);
    for (case, len) in LENGTHS.into_iter().enumerate() {
        let lr = 0.02f32;
        let beta1 = 0.9f32;
        let beta2 = 0.99f32;
        let decay = 0.3f32;
        let factor = 0.5f32;
        let weights = random.numbers(len, DType::F32);
        let mut grads: Vec<Vec<f32>> = (0..3).map(|_| random.numbers(len, DType::F32)).collect();
        grads.iter_mut().for_each(|grad| grad.iter_mut().step_by(7).for_each(|g| *g = 0.0));
        let (is_frozen, words) = frozen(len);
        let some_are_frozen = case % 2 == 1;
        let results = run(|queue| {
            let [weight, mean] = [&weights, &vec![0.0; len]].map(|values| queue.floats(1, len, DType::F32, values));
            let copy = queue.floats(1, len, DType::Bf16, &weights);
            for grad in &grads {
                queue.launch(Lion {
                    weight: weight.view(),
                    grad: queue.floats(1, len, DType::F32, grad).view(),
                    mean: mean.view(),
                    copy: Some(copy.view()),
                    lr,
                    beta1,
                    beta2,
                    weight_decay: decay,
                    grad_factor: Some(queue.floats(1, 1, DType::F32, &[factor]).view()),
                    frozen: some_are_frozen.then(|| queue.indices(&words).view()),
                });
            }
            vec![weight, mean, copy]
        });
        let mut weight = wide(&weights);
        let mut mean = vec![0.0; len];
        let [lr, beta1, beta2, decay, factor] = [lr, beta1, beta2, decay, factor].map(f64::from);
        for grad in &grads {
            for i in (0..len).filter(|&i| !(some_are_frozen && is_frozen(i))) {
                let g = grad[i] as f64 * factor;
                let direction = beta1 * mean[i] + (1.0 - beta1) * g;
                let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
                weight[i] -= lr * (sign + decay * weight[i]);
                mean[i] = beta2 * mean[i] + (1.0 - beta2) * g;
            }
        }
        let what = format!("{len} elements");
        assert_close(&what, &results[0], &weight, tolerance(DType::F32));
        assert_close(&what, &results[1], &mean, tolerance(DType::F32));
        let copy: Vec<f32> = results[0].iter().map(|&weight| rounded(weight, DType::Bf16)).collect();
        assert_eq!(results[2], copy, "{what}: the copy is the rounded weight");
    }
}

#[test]
fn muons_momentum_replaces_the_gradient() {
    let mut random = Random::new(3);
    for [rows, cols] in SHAPES {
        for nesterov in [false, true] {
            let [grads, momenta] = [(); 2].map(|()| random.numbers(rows * cols, DType::F32));
            let (beta, factor) = (0.95f32, 0.25f32);
            let results = run(|queue| {
                let (grad, grad_outer) = framed(queue, rows, cols, DType::F32, &grads);
                let momentum = queue.floats(rows, cols, DType::F32, &momenta);
                queue.launch(MuonMomentum {
                    grad: grad.view(),
                    momentum: momentum.view(),
                    beta,
                    nesterov,
                    grad_factor: Some(queue.floats(1, 1, DType::F32, &[factor]).view()),
                });
                vec![grad_outer, momentum]
            });
            let [beta, factor] = [beta, factor].map(f64::from);
            let both = grads.iter().zip(&momenta).map(|(&grad, &momentum)| {
                let grad = grad as f64 * factor;
                let momentum = beta * momentum as f64 + (1.0 - beta) * grad;
                (if nesterov { (1.0 - beta) * grad + beta * momentum } else { momentum }, momentum)
            });
            let (directions, momenta): (Vec<f64>, Vec<f64>) = both.unzip();
            let what = format!("[{rows}, {cols}], nesterov {nesterov}");
            assert_close(&what, &unframed(&results[0], cols), &directions, tolerance(DType::F32));
            assert_close(&what, &results[1], &momenta, tolerance(DType::F32));
        }
    }
}

#[test]
fn matrices_are_normalised_and_combined_in_any_dtype() {
    let mut random = Random::new(4);
    for [rows, cols] in SHAPES {
        for (dtype, out_dtype) in DTYPES.into_iter().flat_map(|dtype| DTYPES.map(|out| (dtype, out))) {
            let [a, b] = [(); 2].map(|()| random.numbers(rows * cols, dtype));
            for (squared_norm, least) in [(9.0f32, 1e-7f32), (0.0, 0.5)] {
                let results = run(|queue| {
                    let x = strided(queue, rows, cols, 3, dtype, &a);
                    let norm = queue.floats(1, 1, DType::F32, &[squared_norm]);
                    let (out, outer) = framed(queue, rows, cols, out_dtype, &vec![0.0; rows * cols]);
                    queue.launch(Normalize { x: x.view(), squared_norm: norm.view(), least, out: out.view() });
                    let (sum, sum_outer) = framed(queue, rows, cols, out_dtype, &vec![0.0; rows * cols]);
                    let b = strided(queue, rows, cols, 5, dtype, &b);
                    queue.launch(Combine { a: x.view(), b: b.view(), alpha: -4.5, beta: 2.25, out: sum.view() });
                    vec![outer, sum_outer]
                });
                let divisor = (squared_norm as f64).sqrt().max(least as f64);
                let normalised: Vec<f64> = a.iter().map(|&a| a as f64 / divisor).collect();
                let combined: Vec<f64> = a.iter().zip(&b).map(|(&a, &b)| -4.5 * a as f64 + 2.25 * b as f64).collect();
                let what = format!("[{rows}, {cols}] {dtype:?} to {out_dtype:?}");
                assert_close(&what, &unframed(&results[0], cols), &normalised, tolerance(out_dtype));
                assert_close(&what, &unframed(&results[1], cols), &combined, tolerance(out_dtype));
            }
        }
    }
}

#[test]
fn squares_are_summed_along_rows_and_columns() {
    let mut random = Random::new(5);
    for [rows, cols] in SHAPES {
        let values = random.numbers(rows * cols, DType::F32);
        let [before_rows, before_cols] = [rows, cols].map(|len| random.numbers(len, DType::F32));
        let factor = 0.5f32;
        let row_scale = 0.25f32;
        let col_scale = 2.0f32;
        let results = run(|queue| {
            let x = strided(queue, rows, cols, 3, DType::F32, &values);
            let factor = queue.floats(1, 1, DType::F32, &[factor]);
            let row_sums = queue.floats(1, rows, DType::F32, &before_rows);
            let [col_sums, of_vector] = [(); 2].map(|()| queue.floats(1, cols, DType::F32, &before_cols));
            for (rows, cols) in [(Some(row_sums.view()), col_sums.view()), (None, of_vector.view())] {
                queue.launch(SquareSums { x: x.view(), factor: Some(factor.view()), rows, cols, row_scale, col_scale });
            }
            vec![row_sums, col_sums, of_vector]
        });
        let (mut row_sums, mut col_sums) = (wide(&before_rows), wide(&before_cols));
        for (i, &x) in values.iter().enumerate() {
            let square = (x as f64 * factor as f64).powi(2);
            row_sums[i / cols] += row_scale as f64 * square;
            col_sums[i % cols] += col_scale as f64 * square;
        }
        let what = format!("[{rows}, {cols}]");
        assert_close(&what, &results[0], &row_sums, tolerance(DType::F32));
        assert_close(&what, &results[1], &col_sums, tolerance(DType::F32));
        assert_close(&what, &results[2], &col_sums, tolerance(DType::F32));
    }
}

#[test]
fn adafactor_divides_by_what_rows_and_columns_say() {
    let mut random = Random::new(6);
    for [rows, cols] in SHAPES {
        for (is_vector, size, copy) in [(false, 1.0f32, true), (true, 1.0, false), (false, 1e-9, true)] {
            let [grads, weights] = [(); 2].map(|()| random.numbers(rows * cols, DType::F32));
            let mut mean_squares =
                |len| random.numbers(len, DType::F32).iter().map(|x| size * x * x).collect::<Vec<_>>();
            let (of_rows, of_cols) = (mean_squares(rows), mean_squares(cols));
            // The whole parameter is larger than the part.
            let row_sum = 3.0 * size * rows as f32 + size;
            let row_count = 2 * rows + 1;
            let count = 3 * rows * cols + 7;
            let factor = 0.5f32;
            let epsilon = 1e-4f32;
            let lr = 0.02f32;
            let rate = 0.01f32;
            let decay = 0.3f32;
            let least_scale = 1e-3f32;
            let most_rms = 1.0f32;
            let squared_weight = 5.5f32;
            let results = run(|queue| {
                let scalar = |value: f32| queue.floats(1, 1, DType::F32, &[value]);
                let (row_sums, col_sums) =
                    (queue.floats(1, rows, DType::F32, &of_rows), queue.floats(1, cols, DType::F32, &of_cols));
                let grad = strided(queue, rows, cols, 3, DType::F32, &grads);
                let [factor, row_sum, squared_weight] = [factor, row_sum, squared_weight].map(scalar);
                let factored = Factored {
                    grad: grad.view(),
                    grad_factor: Some(factor.view()),
                    rows: (!is_vector).then(|| row_sums.view()),
                    cols: col_sums.view(),
                    row_sum: row_sum.view(),
                    row_count,
                    epsilon,
                };
                let squared_update = scalar(2.5);
                queue.launch(AdafactorNorm { factored, out: squared_update.view() });
                let (weight, outer) = framed(queue, rows, cols, DType::F32, &weights);
                let rounded = queue.floats(rows, cols, DType::Bf16, &weights);
                queue.launch(Adafactor {
                    factored,
                    weight: weight.view(),
                    copy: copy.then(|| rounded.view()),
                    squared_weight: squared_weight.view(),
                    squared_update: squared_update.view(),
                    count,
                    lr,
                    rate,
                    weight_decay: decay,
                    least_scale,
                    most_rms,
                });
                vec![squared_update, outer, rounded]
            });
            let [epsilon, factor, lr, rate, decay] = [epsilon, factor, lr, rate, decay].map(f64::from);
            let mean = (row_sum as f64 / row_count as f64).max(epsilon);
            let update = |i: usize| {
                let of_col = of_cols[i % cols] as f64;
                let variance = if is_vector { of_col } else { of_rows[i / cols] as f64 * of_col / mean };
                grads[i] as f64 * factor / variance.max(epsilon * epsilon).sqrt()
            };
            let updates: Vec<f64> = (0..rows * cols).map(update).collect();
            let squared_update = 2.5 + updates.iter().map(|u| u * u).sum::<f64>();
            let what = format!("[{rows}, {cols}], vector: {is_vector}, size {size}");
            assert_close(&what, &results[0], &[squared_update], tolerance(DType::F32));
            let rms = |squares: f64| (squares / count as f64).sqrt();
            let scale = rms(squared_weight as f64).max(least_scale as f64);
            let excess = (rms(squared_update) / most_rms as f64).max(1.0);
            let moved = weights.iter().zip(&updates);
            let expected: Vec<f64> =
                moved.map(|(&w, u)| w as f64 * (1.0 - lr * decay) - rate * scale / excess * u).collect();
            let found = unframed(&results[1], cols);
            assert_close(&what, &found, &expected, tolerance(DType::F32));
            if copy {
                let copy: Vec<f32> = found.iter().map(|&weight| rounded(weight, DType::Bf16)).collect();
                assert_eq!(results[2], copy, "{what}: the copy is the rounded weight");
            }
        }
    }
}
