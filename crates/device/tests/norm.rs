//! Norms against their definitions in f64; gradients against differences of those definitions.

mod support;

use evenkeel_device::kernel::{Norm, NormBackward, NormKind};
use evenkeel_device::{DType, Tensor};
use support::{DTYPES, Random, SHAPES, assert_close, framed, rounded, run, strided, tolerance, unframed};

const EPSILON: f32 = 1e-5;

/// Norm kinds with the weight offset, if there is a weight, and the presence of a bias that models use.
const KINDS: [(NormKind, Option<f32>, bool); 5] = [
    (NormKind::Rms, Some(0.0), false),
    (NormKind::Rms, Some(1.0), false),
    (NormKind::Rms, None, false),
    (NormKind::Layer, Some(0.0), true),
    (NormKind::Layer, Some(0.0), false),
];

struct Case {
    kind: NormKind,
    /// None without a weight: `weight` is then 1.
    offset: Option<f32>,
    shape: [usize; 2],
    dtype: DType,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Case {
    fn name(&self) -> String {
        format!(
            "{:?} offset {:?} bias {} {:?} {:?}",
            self.kind,
            self.offset,
            self.bias.is_some(),
            self.shape,
            self.dtype
        )
    }

    /// Mean and reciprocal deviation of a row.
    fn stats(&self, row: &[f64]) -> [f64; 2] {
        let mean_of = |f: &dyn Fn(f64) -> f64| row.iter().map(|&x| f(x)).sum::<f64>() / row.len() as f64;
        let mean = if self.kind == NormKind::Layer { mean_of(&|x| x) } else { 0.0 };
        [mean, 1.0 / (mean_of(&|x| (x - mean).powi(2)) + EPSILON as f64).sqrt()]
    }

    fn factor(&self, column: usize) -> f32 {
        self.offset.unwrap_or(0.0) + self.weight[column]
    }

    fn normalise(&self, row: &[f64]) -> Vec<f64> {
        let [mean, scale] = self.stats(row);
        let bias = |i: usize| self.bias.as_ref().map_or(0.0, |bias| bias[i] as f64);
        let weight = |i: usize| self.factor(i) as f64;
        row.iter().enumerate().map(|(i, x)| (x - mean) * scale * weight(i) + bias(i)).collect()
    }
}

/// Rows of various sizes about various means, as a residual stream has them.
fn for_each_case(check: impl Fn(Case, &mut Random)) {
    for (kind, offset, biased) in KINDS {
        for dtype in DTYPES {
            for shape in SHAPES {
                let mut random = Random::new(11);
                let [rows, cols] = shape;
                let mut x = Vec::new();
                for _ in 0..rows {
                    let centre = random.number();
                    let size = 2.0 + random.number();
                    x.extend((0..cols).map(|_| rounded(centre + size * random.number(), dtype)));
                }
                let weight = if offset.is_some() { random.numbers(cols, DType::F32) } else { vec![1.0; cols] };
                let bias = biased.then(|| random.numbers(cols, DType::F32));
                check(Case { kind, offset, shape, dtype, x, weight, bias }, &mut random);
            }
        }
    }
}

/// Shapes that have rows to check: a row of no elements has no statistics.
fn rows_of(case: &Case) -> impl Iterator<Item = &[f32]> {
    case.x.chunks_exact(case.shape[1].max(1))
}

#[test]
fn norm_agrees_with_its_definition() {
    for_each_case(|case, _| {
        let [rows, cols] = case.shape;
        let results = run(|queue| {
            let (out, outer) = framed(queue, rows, cols, case.dtype, &case.x);
            let (stats, stats_outer) = framed(queue, rows, 2, DType::F32, &vec![0.0; 2 * rows]);
            let bias = case.bias.as_ref().map(|bias| queue.floats(1, cols, DType::F32, bias));
            queue.launch(Norm {
                kind: case.kind,
                x: strided(queue, rows, cols, 3, case.dtype, &case.x).view(),
                add: None,
                sum: None,
                weight: case.offset.map(|_| queue.floats(1, cols, DType::F32, &case.weight).view()),
                weight_offset: case.offset.unwrap_or(0.0),
                bias: bias.as_ref().map(Tensor::view),
                epsilon: EPSILON,
                out: out.view(),
                stats: stats.view(),
            });
            vec![outer, stats_outer]
        });
        let expected: Vec<f64> = rows_of(&case).flat_map(|row| case.normalise(&support::wide(row))).collect();
        assert_close(&case.name(), &unframed(&results[0], cols), &expected, tolerance(case.dtype));
        if cols > 0 {
            let expected: Vec<f64> = rows_of(&case).flat_map(|row| case.stats(&support::wide(row))).collect();
            assert_close(&case.name(), &unframed(&results[1], 2), &expected, tolerance(DType::F32));
        }
    });
}

#[test]
fn norm_of_a_sum_normalises_the_sum_as_it_is_stored() {
    for_each_case(|case, random| {
        let [rows, cols] = case.shape;
        let add = random.numbers(rows * cols, case.dtype);
        let results = run(|queue| {
            let weight = queue.floats(1, cols, DType::F32, &case.weight);
            let bias = case.bias.as_ref().map(|bias| queue.floats(1, cols, DType::F32, bias));
            let add = strided(queue, rows, cols, 5, case.dtype, &add);
            let launch = |x: &Tensor, sum: Option<&Tensor>| {
                let (out, outer) = framed(queue, rows, cols, case.dtype, &case.x);
                let stats = queue.zeros(rows, 2, DType::F32);
                queue.launch(Norm {
                    kind: case.kind,
                    x: x.view(),
                    add: sum.map(|_| add.view()),
                    sum: sum.map(Tensor::view),
                    weight: case.offset.map(|_| weight.view()),
                    weight_offset: case.offset.unwrap_or(0.0),
                    bias: bias.as_ref().map(Tensor::view),
                    epsilon: EPSILON,
                    out: out.view(),
                    stats: stats.view(),
                });
                [outer, stats]
            };
            let x = strided(queue, rows, cols, 3, case.dtype, &case.x);
            let (sum, sum_outer) = framed(queue, rows, cols, case.dtype, &case.x);
            let (in_place, in_place_outer) = framed(queue, rows, cols, case.dtype, &case.x);
            let fused = launch(&x, Some(&sum));
            let fused_in_place = launch(&in_place, Some(&in_place));
            let separate = launch(&sum, None);
            [[sum_outer, in_place_outer].as_slice(), &fused, &fused_in_place, &separate].concat()
        });
        let expected: Vec<f32> = case.x.iter().zip(&add).map(|(x, add)| rounded(x + add, case.dtype)).collect();
        for sum in &results[..2] {
            assert_eq!(unframed(sum, cols), expected, "{}", case.name());
        }
        if cols > 0 {
            assert_eq!(results[2..4], results[6..8], "{}: fused and separate differ", case.name());
            assert_eq!(results[4..6], results[6..8], "{}: in place and separate differ", case.name());
        }
    });
}

/// The plain twin of [`NormBackward`]: its formulas in f64, because differences along every coordinate are too slow for long
/// rows. [`the_twin_of_backward_agrees_with_differences`] holds them to the definition.
fn plain_backward(case: &Case, dout: &[f64]) -> [Vec<f64>; 3] {
    let cols = case.shape[1];
    let mut dx = Vec::new();
    let mut dweight = vec![0.0; cols];
    let mut dbias = vec![0.0; cols];
    for (row, dout) in rows_of(case).zip(dout.chunks_exact(cols.max(1))) {
        let row = support::wide(row);
        let [mean, scale] = case.stats(&row);
        let normal: Vec<f64> = row.iter().map(|x| (x - mean) * scale).collect();
        let g: Vec<f64> = dout.iter().enumerate().map(|(i, dout)| dout * case.factor(i) as f64).collect();
        let mean_g = if case.kind == NormKind::Layer { g.iter().sum::<f64>() / cols as f64 } else { 0.0 };
        let mean_gx = g.iter().zip(&normal).map(|(g, x)| g * x).sum::<f64>() / cols as f64;
        for i in 0..cols {
            dx.push(scale * (g[i] - mean_g - normal[i] * mean_gx));
            dweight[i] += dout[i] * normal[i];
            dbias[i] += dout[i];
        }
    }
    [dx, dweight, dbias]
}

#[test]
fn the_twin_of_backward_agrees_with_differences() {
    for (kind, offset, _) in KINDS {
        let mut random = Random::new(12);
        let mut numbers = |len| random.numbers(len, DType::F32);
        let x = numbers(9);
        let weight = numbers(9);
        let bias = numbers(9);
        let dout = support::wide(&numbers(9));
        let case = Case { kind, offset, shape: [1, 9], dtype: DType::F32, x, weight, bias: Some(bias) };
        let loss =
            |case: &Case, row: &[f64]| -> f64 { case.normalise(row).iter().zip(&dout).map(|(y, d)| y * d).sum() };
        let [dx, dweight, dbias] = plain_backward(&case, &dout);
        for i in 0..9 {
            let h = 1e-5;
            let moved = |by: f64| {
                let mut row = support::wide(&case.x);
                row[i] += by;
                loss(&case, &row)
            };
            let difference = (moved(h) - moved(-h)) / (2.0 * h);
            assert!((dx[i] - difference).abs() < 1e-8, "{kind:?} dx[{i}] {} against {difference}", dx[i]);
            // The output is linear in weight and bias.
            let with = |weight: f32, bias: f32| {
                let mut moved =
                    Case { bias: case.bias.clone(), weight: case.weight.clone(), x: case.x.clone(), ..case };
                moved.weight[i] = weight;
                moved.bias.as_mut().expect("given")[i] = bias;
                loss(&moved, &support::wide(&moved.x))
            };
            let (weight, bias) = (case.weight[i], case.bias.as_ref().expect("given")[i]);
            assert!((dweight[i] - (with(1.0, bias) - with(0.0, bias))).abs() < 1e-9, "{kind:?} dweight");
            assert!((dbias[i] - (with(weight, 1.0) - with(weight, 0.0))).abs() < 1e-9, "{kind:?} dbias");
        }
    }
}

#[test]
fn norm_backward_agrees_with_its_twin_and_may_overwrite_its_operands() {
    for_each_case(|case, random| {
        let [rows, cols] = case.shape;
        let [dout, residual] = std::array::from_fn(|_| random.numbers(rows * cols, case.dtype));
        let before = random.numbers(cols, DType::F32);
        let stats: Vec<f32> = if cols == 0 {
            vec![0.0; 2 * rows]
        } else {
            rows_of(&case).flat_map(|row| case.stats(&support::wide(row)).map(|x| x as f32)).collect()
        };
        let results = run(|queue| {
            let fresh = |values: &[f32]| framed(queue, rows, cols, case.dtype, values);
            let weight = queue.floats(1, cols, DType::F32, &case.weight);
            let stats = strided(queue, rows, 2, 1, DType::F32, &stats);
            let x = strided(queue, rows, cols, 3, case.dtype, &case.x);
            let launch = |dout: &Tensor, residual: Option<&Tensor>, dx: &Tensor, is_trained: bool| {
                let (dweight, dweight_outer) = framed(queue, 1, cols, DType::F32, &before);
                let (dbias, dbias_outer) = framed(queue, 1, cols, DType::F32, &before);
                queue.launch(NormBackward {
                    kind: case.kind,
                    x: x.view(),
                    weight: case.offset.map(|_| weight.view()),
                    weight_offset: case.offset.unwrap_or(0.0),
                    stats: stats.view(),
                    dout: dout.view(),
                    residual: residual.map(Tensor::view),
                    dx: dx.view(),
                    dweight: case.offset.filter(|_| is_trained).map(|_| dweight.view()),
                    dbias: case.bias.as_ref().map(|_| dbias.view()),
                });
                [dweight_outer, dbias_outer]
            };
            let ((apart, apart_outer), (bare, bare_outer)) = (fresh(&dout), fresh(&dout));
            let ((in_dout, in_dout_outer), (in_residual, in_residual_outer)) = (fresh(&dout), fresh(&residual));
            let (dout, residual) = (fresh(&dout).0, fresh(&residual).0);
            let sums = [
                launch(&dout, Some(&residual), &apart, true),
                launch(&in_dout, Some(&residual), &in_dout, true),
                launch(&dout, Some(&in_residual), &in_residual, true),
                launch(&dout, None, &bare, false),
            ];
            [[apart_outer, in_dout_outer, in_residual_outer, bare_outer].as_slice(), &sums.concat()].concat()
        });
        let [dx, dweight, dbias] = plain_backward(&case, &support::wide(&dout));
        let with_residual: Vec<f64> = dx.iter().zip(&residual).map(|(dx, &residual)| dx + residual as f64).collect();
        for (place, result) in results[..3].iter().enumerate() {
            let what = format!("{} dx {place}", case.name());
            assert_close(&what, &unframed(result, cols), &with_residual, tolerance(case.dtype));
        }
        // A row of one element is its own mean: its layer norm has no gradient, and only rounding is left.
        if cols > 1 {
            let what = format!("{} dx alone", case.name());
            assert_close(&what, &unframed(&results[3], cols), &dx, tolerance(case.dtype));
        }
        let added = |sums: &[f64]| -> Vec<f64> { sums.iter().zip(&before).map(|(sum, &b)| sum + b as f64).collect() };
        for (sums, is_trained) in results[4..].chunks_exact(2).zip([true, true, true, false]) {
            let what = format!("{} sums", case.name());
            let dweight = if is_trained && case.offset.is_some() { added(&dweight) } else { support::wide(&before) };
            assert_close(&what, &unframed(&sums[0], cols), &dweight, tolerance(DType::F32));
            let dbias = if case.bias.is_some() { added(&dbias) } else { support::wide(&before) };
            assert_close(&what, &unframed(&sums[1], cols), &dbias, tolerance(DType::F32));
        }
    });
}
