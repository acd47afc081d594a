//! The clamped gate against its definition in f64; its gradient against differences of that definition.

mod support;

use evenkeel_device::kernel::{ClampedGate, ClampedGateBackward};
use evenkeel_device::{DType, Tensor};
use support::{DTYPES, Random, SHAPES, assert_close, framed, run, strided, tolerance, unframed};

const LIMIT: f32 = 2.0;

fn plain(gate: f64, up: f64) -> f64 {
    let limit = LIMIT as f64;
    let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
    (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
}

/// Operands of which about half are clamped, none at the limit itself.
fn operands(random: &mut Random, len: usize, dtype: DType) -> Vec<f32> {
    let number = |x: f32| if (x.abs() - LIMIT).abs() < 0.01 { 0.5 } else { x };
    random.numbers(len, dtype).into_iter().map(|x| number(4.0 * x)).collect()
}

#[test]
fn a_clamped_gate_agrees_with_its_definition() {
    for (dtype, [rows, cols]) in DTYPES.into_iter().flat_map(|dtype| SHAPES.map(|shape| (dtype, shape))) {
        let x = operands(&mut Random::new(21), rows * 2 * cols, dtype);
        let results = run(|queue| {
            let input = strided(queue, rows, 2 * cols, 5, dtype, &x);
            let (out, outer) = framed(queue, rows, cols, dtype, &vec![0.0; rows * cols]);
            queue.launch(ClampedGate { x: input.view(), limit: LIMIT, out: out.view(), count: None });
            vec![outer]
        });
        let expected: Vec<f64> = x.chunks_exact(2).map(|pair| plain(pair[0] as f64, pair[1] as f64)).collect();
        assert_close(&format!("{dtype:?} [{rows}, {cols}]"), &unframed(&results[0], cols), &expected, tolerance(dtype));
    }
}

#[test]
fn gradients_of_a_clamped_gate_are_differences_and_may_overwrite_its_operand() {
    const STEP: f64 = 1e-5;
    for (dtype, [rows, cols]) in DTYPES.into_iter().flat_map(|dtype| SHAPES.map(|shape| (dtype, shape))) {
        let mut random = Random::new(22);
        let x = operands(&mut random, rows * 2 * cols, dtype);
        let dout = random.numbers(rows * cols, dtype);
        let results = run(|queue| {
            let launch = |x: &Tensor, dout: &Tensor, dx: &Tensor| {
                let (x, dout, dx) = (x.view(), dout.view(), dx.view());
                queue.launch(ClampedGateBackward { x, limit: LIMIT, dout, dx, count: None });
            };
            let dout = strided(queue, rows, cols, 3, dtype, &dout);
            let (own, own_outer) = framed(queue, rows, 2 * cols, dtype, &x);
            let (dx, outer) = framed(queue, rows, 2 * cols, dtype, &vec![0.0; x.len()]);
            launch(&own, &dout, &dx);
            launch(&own, &dout, &own);
            vec![outer, own_outer]
        });
        let slopes = x.chunks_exact(2).zip(&dout).flat_map(|(pair, &dout)| {
            let (gate, up) = (pair[0] as f64, pair[1] as f64);
            let dgate = plain(gate + STEP, up) - plain(gate - STEP, up);
            let dup = plain(gate, up + STEP) - plain(gate, up - STEP);
            [dgate, dup].map(|difference| dout as f64 * difference / (2.0 * STEP))
        });
        let expected: Vec<f64> = slopes.collect();
        let found = unframed(&results[0], 2 * cols);
        assert_close(&format!("{dtype:?} [{rows}, {cols}]"), &found, &expected, tolerance(dtype));
        assert_eq!(found, unframed(&results[1], 2 * cols));
    }
}

#[test]
fn a_clamped_gate_keeps_what_is_no_number() {
    let results = run(|queue| {
        let x = strided(queue, 2, 2, 0, DType::F32, &[f32::NAN, 1.0, 1.0, f32::NAN]);
        let out = queue.zeros(2, 1, DType::F32);
        queue.launch(ClampedGate { x: x.view(), limit: LIMIT, out: out.view(), count: None });
        // Not the values, whose bits may differ from device to device.
        assert!(queue.read(&out).iter().all(|value| value.is_nan()));
        vec![]
    });
    assert!(results.is_empty());
}
