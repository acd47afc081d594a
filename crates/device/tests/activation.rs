//! Activations against their definitions in f64; gradients against differences of those definitions.

mod support;

use evenkeel_device::kernel::{Activate, ActivateBackward, Activation, Gated, GatedBackward};
use evenkeel_device::{DType, Tensor};
use support::{DTYPES, Random, SHAPES, assert_close, framed, run, strided, tolerance, unframed};

const ACTIVATIONS: [Activation; 6] = [
    Activation::Silu,
    Activation::GeluErf,
    Activation::GeluTanh,
    Activation::Relu,
    Activation::Sigmoid,
    Activation::Tanh,
];

fn plain(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Tanh => x.tanh(),
    }
}

/// By its series, good for the |x| < 4 of these tests.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

fn plain_derivative(activation: Activation, x: f64) -> f64 {
    let h = 1e-5;
    (plain(activation, x + h) - plain(activation, x - h)) / (2.0 * h)
}

/// Runs `check` for every activation, dtype and shape with operands in -4..4.
fn for_each_case(mut check: impl FnMut(Activation, DType, [usize; 2], [Vec<f32>; 3])) {
    for activation in ACTIVATIONS {
        for dtype in DTYPES {
            for (seed, shape) in SHAPES.into_iter().enumerate() {
                let mut random = Random::new(seed as u64);
                let operands = std::array::from_fn(|_| {
                    random.numbers(shape[0] * shape[1], dtype).iter().map(|value| 4.0 * value).collect()
                });
                check(activation, dtype, shape, operands);
            }
        }
    }
}

#[test]
fn activate_agrees_with_its_definition_and_may_work_in_place() {
    for_each_case(|activation, dtype, [rows, cols], [x, ..]| {
        let results = run(|queue| {
            let input = strided(queue, rows, cols, 5, dtype, &x);
            let (out, outer) = framed(queue, rows, cols, dtype, &x);
            let (in_place, in_place_outer) = framed(queue, rows, cols, dtype, &x);
            queue.launch(Activate { activation, x: input.view(), out: out.view() });
            queue.launch(Activate { activation, x: in_place.view(), out: in_place.view() });
            vec![outer, in_place_outer]
        });
        let expected: Vec<f64> = x.iter().map(|&x| plain(activation, x as f64)).collect();
        let out = unframed(&results[0], cols);
        assert_close(&format!("{activation:?} {dtype:?} [{rows}, {cols}]"), &out, &expected, tolerance(dtype));
        assert_eq!(out, unframed(&results[1], cols));
    });
}

#[test]
fn activate_backward_agrees_with_differences_and_may_overwrite_either_operand() {
    for_each_case(|activation, dtype, [rows, cols], [x, dout, _]| {
        let results = run(|queue| {
            let launch = |x: &Tensor, dout: &Tensor, dx: &Tensor| {
                queue.launch(ActivateBackward { activation, x: x.view(), dout: dout.view(), dx: dx.view() });
            };
            let (x_in, x_outer) = framed(queue, rows, cols, dtype, &x);
            let (dout_in, dout_outer) = framed(queue, rows, cols, dtype, &dout);
            let (dx, dx_outer) = framed(queue, rows, cols, dtype, &x);
            launch(&x_in, &dout_in, &dx);
            launch(&x_in, &dout_in, &dout_in);
            launch(&x_in, &strided(queue, rows, cols, 1, dtype, &dout), &x_in);
            vec![dx_outer, dout_outer, x_outer]
        });
        let expected: Vec<f64> =
            x.iter().zip(&dout).map(|(&x, &dout)| plain_derivative(activation, x as f64) * dout as f64).collect();
        let dx = unframed(&results[0], cols);
        assert_close(&format!("{activation:?} {dtype:?} [{rows}, {cols}]"), &dx, &expected, tolerance(dtype));
        assert_eq!(dx, unframed(&results[1], cols), "dx in dout");
        assert_eq!(dx, unframed(&results[2], cols), "dx in x");
    });
}

#[test]
fn gated_agrees_with_its_definition() {
    for_each_case(|activation, dtype, [rows, cols], [gate, up, _]| {
        let results = run(|queue| {
            // Gate and up side by side, as a fused projection leaves them.
            let both: Vec<f32> = (0..rows)
                .flat_map(|row| [&gate, &up].map(|half| &half[row * cols..(row + 1) * cols]).concat())
                .collect();
            let both = queue.floats(rows, 2 * cols, dtype, &both);
            let (out, outer) = framed(queue, rows, cols, dtype, &gate);
            let (gate, up) = (both.col_range(0..cols).view(), both.col_range(cols..2 * cols).view());
            queue.launch(Gated { activation, gate, up, out: out.view(), count: None });
            vec![outer]
        });
        let expected: Vec<f64> =
            gate.iter().zip(&up).map(|(&gate, &up)| plain(activation, gate as f64) * up as f64).collect();
        let out = unframed(&results[0], cols);
        assert_close(&format!("{activation:?} {dtype:?} [{rows}, {cols}]"), &out, &expected, tolerance(dtype));
    });
}

#[test]
fn gated_backward_agrees_with_differences_and_may_overwrite_its_operands() {
    for_each_case(|activation, dtype, [rows, cols], [gate, up, dout]| {
        let results = run(|queue| {
            let fresh = |values: &[f32]| framed(queue, rows, cols, dtype, values);
            let launch = |gate: &Tensor, up: &Tensor, dout: &Tensor, dgate: &Tensor, dup: &Tensor| {
                let [gate, up, dout, dgate, dup] = [gate, up, dout, dgate, dup].map(Tensor::view);
                queue.launch(GatedBackward { activation, gate, up, dout, dgate, dup, count: None });
            };
            let (dgate, dgate_outer) = fresh(&up);
            let (dup, dup_outer) = fresh(&up);
            launch(&fresh(&gate).0, &fresh(&up).0, &fresh(&dout).0, &dgate, &dup);
            let ((gate_1, gate_outer), (up_1, up_outer)) = (fresh(&gate), fresh(&up));
            launch(&gate_1, &up_1, &fresh(&dout).0, &gate_1, &up_1);
            let ((up_2, dup_2_outer), (dout_2, dout_2_outer)) = (fresh(&up), fresh(&dout));
            launch(&fresh(&gate).0, &up_2, &dout_2, &dout_2, &up_2);
            let ((gate_3, gate_3_outer), (dout_3, dout_3_outer)) = (fresh(&gate), fresh(&dout));
            launch(&gate_3, &fresh(&up).0, &dout_3, &gate_3, &dout_3);
            let dgates = [dgate_outer, gate_outer, dout_2_outer, gate_3_outer];
            let dups = [dup_outer, up_outer, dup_2_outer, dout_3_outer];
            dgates.into_iter().chain(dups).collect()
        });
        let twin = |partial: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
            let operands = gate.iter().zip(&up).zip(&dout);
            operands.map(|((&gate, &up), &dout)| partial(gate as f64, up as f64, dout as f64)).collect()
        };
        let expected = [
            twin(&|gate, up, dout| plain_derivative(activation, gate) * up * dout),
            twin(&|gate, _, dout| plain(activation, gate) * dout),
        ];
        let what = format!("{activation:?} {dtype:?} [{rows}, {cols}]");
        for (places, expected) in results.chunks_exact(4).zip(expected) {
            let values = unframed(&places[0], cols);
            assert_close(&what, &values, &expected, tolerance(dtype));
            for place in &places[1..] {
                assert_eq!(values, unframed(place, cols), "{what}: in place of an operand");
            }
        }
    });
}

#[test]
fn more_rows_than_a_grid_has_are_all_computed() {
    const ROWS: usize = 65_541;
    const COLS: usize = 257;
    let x = Random::new(3).numbers(COLS, DType::F32);
    let results = run(|queue| {
        let out = queue.floats(ROWS, COLS, DType::F32, &x.repeat(ROWS));
        queue.launch(Activate { activation: Activation::Silu, x: out.view(), out: out.view() });
        vec![out]
    });
    let rows: Vec<&[f32]> = results[0].chunks(COLS).collect();
    let expected: Vec<f64> = x.iter().map(|&x| plain(Activation::Silu, x as f64)).collect();
    assert_close("the first row", rows[0], &expected, tolerance(DType::F32));
    for row in [1, 65_534, 65_535, ROWS - 1] {
        assert_eq!(rows[row], rows[0], "row {row}");
    }
}
