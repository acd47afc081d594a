//! Scaled columns and the gradients of their factors against plain loops.

mod support;

use evenkeel_device::DType;
use evenkeel_device::kernel::{ColumnDot, ScaleColumns};
use support::{DTYPES, Random, SHAPES, assert_close, framed, rounded, run, strided, tolerance, unframed, wide};

/// Squares that are positive, but for every seventh, which is zero.
fn squares(random: &mut Random, cols: usize) -> Vec<f32> {
    let square = |col| if col % 7 == 3 { 0.0 } else { random.number().powi(2) + 0.1 };
    (0..cols).map(square).collect()
}

fn over_root(value: f64, square: f32) -> f64 {
    if square == 0.0 { 0.0 } else { value / f64::from(square).sqrt() }
}

#[test]
fn columns_are_scaled_with_a_bias_or_added_to_what_is_there() {
    for [rows, cols] in SHAPES.into_iter().chain([[5000, 33], [129, 2000]]) {
        for (dtype, way) in DTYPES.into_iter().flat_map(|dtype| [0, 1, 2].map(|way| (dtype, way))) {
            let (has_bias, accumulate) = (way == 1, way == 2);
            let mut random = Random::new(4);
            let (x, before) = (random.numbers(rows * cols, dtype), random.numbers(rows * cols, dtype));
            let (scale, bias) = (random.numbers(cols, DType::F32), random.numbers(cols, DType::F32));
            let squares = squares(&mut random, cols);
            let results = run(|queue| {
                let vector = |values: &[f32]| strided(queue, 1, cols, 1, DType::F32, values);
                let (scale, squares, bias) = (vector(&scale), vector(&squares), vector(&bias));
                let launch = |x: &evenkeel_device::Tensor, out: &evenkeel_device::Tensor| {
                    queue.launch(ScaleColumns {
                        x: x.view(),
                        scale: scale.view(),
                        squares: squares.view(),
                        bias: has_bias.then(|| bias.view()),
                        out: out.view(),
                        accumulate,
                    });
                };
                let (out, outer) = framed(queue, rows, cols, dtype, &before);
                launch(&strided(queue, rows, cols, 3, dtype, &x), &out);
                let (own, own_outer) = framed(queue, rows, cols, dtype, &x);
                if !accumulate {
                    launch(&own, &own);
                }
                vec![outer, own_outer]
            });
            let expected: Vec<f64> = (0..rows * cols)
                .map(|i| {
                    let scaled = f64::from(x[i]) * over_root(f64::from(scale[i % cols]), squares[i % cols]);
                    let addend = [0.0, bias[i % cols], before[i]][way];
                    scaled + f64::from(addend)
                })
                .collect();
            let what = format!("[{rows}, {cols}] {dtype:?}, bias {has_bias}, accumulate {accumulate}");
            for result in results.iter().take(if accumulate { 1 } else { 2 }) {
                assert_close(&what, &unframed(result, cols), &expected, tolerance(dtype));
            }
        }
    }
}

/// A new adapter's magnitudes are the norms themselves: the factor is one, to the bit.
#[test]
fn a_scale_that_is_the_root_changes_no_bit() {
    let mut random = Random::new(8);
    for dtype in DTYPES {
        let x = random.numbers(50 * 70, dtype);
        let squares: Vec<f32> = (0..70).map(|_| random.number().powi(2) + 1e-3).collect();
        let roots: Vec<f32> = squares.iter().map(|square| square.sqrt()).collect();
        let results = run(|queue| {
            let out = queue.zeros(50, 70, dtype);
            queue.launch(ScaleColumns {
                x: queue.floats(50, 70, dtype, &x).view(),
                scale: queue.floats(1, 70, DType::F32, &roots).view(),
                squares: queue.floats(1, 70, DType::F32, &squares).view(),
                bias: None,
                out: out.view(),
                accumulate: false,
            });
            vec![out]
        });
        assert_eq!(results[0], x.iter().map(|&x| rounded(x, dtype)).collect::<Vec<_>>());
    }
}

#[test]
fn dots_of_columns_are_added_to_what_is_there() {
    for [rows, cols] in SHAPES.into_iter().chain([[5000, 33], [129, 2000]]) {
        for dtype in DTYPES {
            let mut random = Random::new(5);
            let (a, b) = (random.numbers(rows * cols, dtype), random.numbers(rows * cols, dtype));
            let (before, squares) = (random.numbers(cols, DType::F32), squares(&mut random, cols));
            let results = run(|queue| {
                let (out, outer) = framed(queue, 1, cols, DType::F32, &before);
                queue.launch(ColumnDot {
                    a: strided(queue, rows, cols, 3, dtype, &a).view(),
                    b: strided(queue, rows, cols, 0, dtype, &b).view(),
                    squares: strided(queue, 1, cols, 1, DType::F32, &squares).view(),
                    out: out.view(),
                });
                vec![outer]
            });
            let mut expected = wide(&before);
            for (i, (&a, &b)) in a.iter().zip(&b).enumerate() {
                expected[i % cols] += over_root(f64::from(a) * f64::from(b), squares[i % cols]);
            }
            let what = format!("[{rows}, {cols}] {dtype:?}");
            assert_close(&what, &unframed(&results[0], cols), &expected, tolerance(DType::F32));
        }
    }
}
