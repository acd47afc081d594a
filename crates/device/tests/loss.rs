//! The loss kernels against a plain twin in f64.

mod support;

use evenkeel_device::DType;
use evenkeel_device::kernel::{IGNORE, LossBackward, LossMerge, LossStats, STATS_PER_TOKEN};
use support::{DTYPES, Random, assert_close, run, strided, tolerance};

struct Case {
    rows: usize,
    vocabulary: usize,
    logits: Vec<f32>,
    labels: Vec<u32>,
    smoothing: f32,
    scale: f32,
    cap: Option<f32>,
}

impl Case {
    fn new(seed: u64, rows: usize, vocabulary: usize, smoothing: f32, dtype: DType) -> Case {
        let mut random = Random::new(seed);
        // Powers of two keep the numbers exact in either dtype and make the maximum matter.
        let logits = random.numbers(rows * vocabulary, dtype).iter().map(|x| x * 16.0).collect();
        let labels = (0..rows).map(|row| if row % 5 == 3 { IGNORE } else { random.below(vocabulary) as u32 }).collect();
        Case { rows, vocabulary, logits, labels, smoothing, scale: 0.375, cap: None }
    }

    fn row(&self, row: usize) -> Vec<f64> {
        self.logits[row * self.vocabulary..][..self.vocabulary].iter().map(|&z| z as f64).collect()
    }

    /// Losses and gradients.
    fn plain(&self) -> [Vec<f64>; 2] {
        let (mut losses, mut gradients) = (Vec::new(), Vec::new());
        let (smoothing, size) = (self.smoothing as f64, self.vocabulary as f64);
        for (row, &label) in self.labels.iter().enumerate() {
            let z = self.row(row);
            let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = z.iter().map(|z| (z - max).exp()).sum();
            if label == IGNORE {
                losses.push(0.0);
                gradients.extend(z.iter().map(|_| 0.0));
                continue;
            }
            let mean = z.iter().sum::<f64>() / size;
            losses.push(max + sum.ln() - (1.0 - smoothing) * z[label as usize] - smoothing * mean);
            gradients.extend(z.iter().enumerate().map(|(i, z)| {
                let target = smoothing / size + if i == label as usize { 1.0 - smoothing } else { 0.0 };
                let slope = self.cap.map_or(1.0, |cap| 1.0 - (z / cap as f64).powi(2));
                self.scale as f64 * slope * ((z - max).exp() / sum - target)
            }));
        }
        [losses, gradients]
    }

    /// The columns of every row.
    fn columns(&self, columns: std::ops::Range<usize>) -> Vec<f32> {
        (0..self.rows).flat_map(|row| self.logits[row * self.vocabulary..][columns.clone()].iter().copied()).collect()
    }
}

#[derive(Clone, Copy, Debug)]
enum Gradient {
    InPlace,
    Apart(DType),
}

/// Statistics, losses and gradients of the case, its vocabulary cut at `cuts` over ranks; gradients rank by rank.
fn compute(case: &Case, cuts: &[usize], dtype: DType, gradient: Gradient, padding: usize) -> Vec<Vec<f32>> {
    let rows = case.rows;
    let ranks = cuts.len() - 1;
    run(|queue| {
        let labels = queue.indices(&case.labels);
        let parts = strided(queue, ranks, rows * STATS_PER_TOKEN, padding, DType::F32, &vec![0.0; ranks * rows * 4]);
        let logits: Vec<_> = cuts
            .windows(2)
            .map(|cut| strided(queue, rows, cut[1] - cut[0], padding, dtype, &case.columns(cut[0]..cut[1])))
            .collect();
        for (rank, logits) in logits.iter().enumerate() {
            let stats = parts.row_range(rank..rank + 1).reshaped(rows, STATS_PER_TOKEN);
            let first = cuts[rank] as u32;
            queue.launch(LossStats { logits: logits.view(), labels: labels.view(), first, stats: stats.view() });
        }
        let merged = queue.tensor(rows, STATS_PER_TOKEN, DType::F32);
        queue.launch(LossMerge { parts: parts.view(), stats: merged.view() });
        let losses = queue.tensor(1, rows, DType::F32);
        let mut results = vec![merged.clone(), losses.clone()];
        for (rank, logits) in logits.iter().enumerate() {
            let dlogits = match gradient {
                Gradient::InPlace => logits.clone(),
                Gradient::Apart(dtype) => queue.tensor(rows, logits.cols, dtype),
            };
            queue.launch(LossBackward {
                logits: logits.view(),
                labels: labels.view(),
                first: cuts[rank] as u32,
                stats: merged.view(),
                vocabulary: case.vocabulary,
                smoothing: case.smoothing,
                scale: case.scale,
                cap: case.cap,
                losses: losses.view(),
                dlogits: Some(dlogits.view()),
            });
            results.push(dlogits);
        }
        results
    })
}

#[test]
fn losses_and_gradients_agree_with_the_formula() {
    for dtype in DTYPES {
        for (rows, vocabulary, smoothing, padding) in
            [(1, 1, 0.0, 0), (4, 7, 0.0, 3), (6, 64, 0.1, 0), (9, 1000, 0.0, 8), (5, 4096, 0.3, 0), (7, 9001, 0.1, 5)]
        {
            let case = Case::new(rows as u64, rows, vocabulary, smoothing, dtype);
            // Logits of these cases lie within ±16.
            let case = Case { cap: (rows % 2 == 1).then_some(20.0), ..case };
            let [losses, gradients] = case.plain();
            for gradient in [Gradient::InPlace, Gradient::Apart(DType::F32), Gradient::Apart(DType::Bf16)] {
                let results = compute(&case, &[0, vocabulary], dtype, gradient, padding);
                let what = format!("{dtype:?} [{rows}, {vocabulary}] smoothing {smoothing} {gradient:?}");
                assert_close(&format!("losses, {what}"), &results[1], &losses, tolerance(DType::F32));
                let gradient_dtype = if let Gradient::Apart(apart) = gradient { apart } else { dtype };
                assert_close(&format!("gradients, {what}"), &results[2], &gradients, tolerance(gradient_dtype));
            }
        }
    }
}

#[test]
fn the_plain_gradient_is_the_slope_of_the_plain_loss() {
    let mut case = Case::new(8, 3, 11, 0.2, DType::F32);
    let [_, gradients] = case.plain();
    for (i, &gradient) in gradients.iter().enumerate() {
        let step = 1.0 / 256.0;
        let mut loss = |change: f32| {
            case.logits[i] += change;
            let loss = case.plain()[0][i / 11];
            case.logits[i] -= change;
            loss
        };
        let slope = (loss(step) - loss(-step)) / (2.0 * step as f64) * 0.375;
        assert!((slope - gradient).abs() < 1e-5, "gradient {i}: {gradient}, slope {slope}");
    }
}

#[test]
fn a_vocabulary_cut_unevenly_gives_what_the_whole_gives() {
    for dtype in DTYPES {
        for cuts in [vec![0, 1, 640, 641, 1000], vec![0, 999, 1000], vec![0, 0, 500, 1000, 1000]] {
            let case = Case::new(7, 8, 1000, 0.1, dtype);
            let [losses, gradients] = case.plain();
            let results = compute(&case, &cuts, dtype, Gradient::Apart(DType::F32), 2);
            assert_close(&format!("losses, cut at {cuts:?}"), &results[1], &losses, tolerance(DType::F32));
            let mut joined = vec![0.0; gradients.len()];
            for (rank, cut) in cuts.windows(2).enumerate() {
                for row in 0..case.rows {
                    let width = cut[1] - cut[0];
                    joined[row * 1000 + cut[0]..row * 1000 + cut[1]]
                        .copy_from_slice(&results[2 + rank][row * width..(row + 1) * width]);
                }
            }
            assert_close(&format!("gradients, cut at {cuts:?}"), &joined, &gradients, tolerance(DType::F32));
        }
    }
}

#[test]
fn statistics_are_the_maximum_the_sums_and_the_labels_logit() {
    let case = Case::new(3, 6, 5000, 0.0, DType::F32);
    let results = compute(&case, &[0, 5000], DType::F32, Gradient::Apart(DType::F32), 0);
    for (row, stats) in results[0].chunks(STATS_PER_TOKEN).enumerate() {
        let z = case.row(row);
        let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let target = if case.labels[row] == IGNORE { 0.0 } else { z[case.labels[row] as usize] };
        assert_eq!((stats[0] as f64, stats[2] as f64), (max, target), "row {row}");
        let exponentials = z.iter().map(|z| (z - max).exp()).sum();
        assert_close("sum of exponentials", &stats[1..2], &[exponentials], tolerance(DType::F32));
        // The logits nearly cancel, so the error is judged against their size.
        let size = z.iter().map(|z| z.abs()).sum::<f64>();
        assert!((stats[3] as f64 - z.iter().sum::<f64>()).abs() < size * tolerance(DType::F32), "row {row}");
    }
}

#[test]
fn without_gradients_only_losses_are_written() {
    let case = Case::new(5, 6, 300, 0.1, DType::F32);
    let results = run(|queue| {
        let (logits, labels) = (queue.floats(6, 300, DType::F32, &case.logits), queue.indices(&case.labels));
        let (stats, losses) = (queue.tensor(6, STATS_PER_TOKEN, DType::F32), queue.tensor(1, 6, DType::F32));
        queue.launch(LossStats { logits: logits.view(), labels: labels.view(), first: 0, stats: stats.view() });
        queue.launch(LossBackward {
            logits: logits.view(),
            labels: labels.view(),
            first: 0,
            stats: stats.view(),
            vocabulary: 300,
            smoothing: case.smoothing,
            scale: case.scale,
            cap: None,
            losses: losses.view(),
            dlogits: None,
        });
        vec![losses, logits]
    });
    assert_close("losses", &results[0], &case.plain()[0], tolerance(DType::F32));
    assert_eq!(results[1], case.logits);
}

#[test]
fn masked_logits_weigh_nothing_and_broken_ones_break_the_loss() {
    let statistics = |logits: &[f32]| {
        run(|queue| {
            let (view, labels) = (queue.floats(1, logits.len(), DType::F32, logits), queue.indices(&[0]));
            let stats = queue.tensor(1, STATS_PER_TOKEN, DType::F32);
            queue.launch(LossStats { logits: view.view(), labels: labels.view(), first: 0, stats: stats.view() });
            vec![stats]
        })
        .remove(0)
    };
    let masked = |from: usize, len: usize| -> Vec<f32> {
        (0..len).map(|i| if i >= from { 1.0 } else { f32::NEG_INFINITY }).collect()
    };
    assert_eq!(statistics(&masked(5000, 5003))[..2], [1.0, 3.0]);
    assert_eq!(statistics(&masked(20, 20))[..2], [f32::NEG_INFINITY, 0.0]);
    let mut broken = vec![1.0; 50];
    broken[33] = f32::NAN;
    assert!(statistics(&broken)[1].is_nan());
}
