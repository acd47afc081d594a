//! Sums, copies, fills and selected columns against plain loops.

mod support;

use evenkeel_device::kernel::{Add, ColumnSum, Copy, Fill, GatherColumns, Multiply, ScatterColumns, SoftCap};
use evenkeel_device::{DType, Tensor};
use support::{DTYPES, Random, SHAPES, assert_close, framed, rounded, run, strided, tolerance, unframed};

#[test]
fn add_takes_any_mixture_of_dtypes_and_may_overwrite_an_operand() {
    for [rows, cols] in SHAPES {
        for dtypes in 0..8 {
            let [a_type, b_type, out_type] = std::array::from_fn(|i| DTYPES[dtypes >> i & 1]);
            let mut random = Random::new(dtypes as u64);
            let (a, b) = (random.numbers(rows * cols, a_type), random.numbers(rows * cols, b_type));
            let results = run(|queue| {
                let launch = |a: &Tensor, b: &Tensor, out: &Tensor| {
                    queue.launch(Add { a: a.view(), b: b.view(), out: out.view() });
                };
                let (a_in, b_in) =
                    (strided(queue, rows, cols, 3, a_type, &a), strided(queue, rows, cols, 0, b_type, &b));
                let (out, outer) = framed(queue, rows, cols, out_type, &vec![0.0; rows * cols]);
                launch(&a_in, &b_in, &out);
                let (a_own, a_outer) = framed(queue, rows, cols, a_type, &a);
                launch(&a_own, &b_in, &a_own);
                let (b_own, b_outer) = framed(queue, rows, cols, b_type, &b);
                launch(&a_in, &b_own, &b_own);
                vec![outer, a_outer, b_outer]
            });
            for (result, dtype) in results.iter().zip([out_type, a_type, b_type]) {
                let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| rounded(a + b, dtype)).collect();
                assert_eq!(unframed(result, cols), expected, "[{rows}, {cols}] {a_type:?} + {b_type:?} in {dtype:?}");
            }
        }
    }
}

#[test]
fn copy_widens_and_rounds() {
    for [rows, cols] in SHAPES {
        for (x_type, out_type) in DTYPES.into_iter().flat_map(|x| DTYPES.map(|out| (x, out))) {
            let x = Random::new(1).numbers(rows * cols, x_type);
            let results = run(|queue| {
                let (out, outer) = framed(queue, rows, cols, out_type, &vec![0.0; rows * cols]);
                queue.launch(Copy { x: strided(queue, rows, cols, 3, x_type, &x).view(), out: out.view() });
                vec![outer]
            });
            let expected: Vec<f32> = x.iter().map(|&x| rounded(x, out_type)).collect();
            assert_eq!(unframed(&results[0], cols), expected, "[{rows}, {cols}] {x_type:?} to {out_type:?}");
        }
    }
}

#[test]
fn scale_multiplies_and_may_overwrite() {
    for [rows, cols] in SHAPES {
        for (x_type, out_type) in DTYPES.into_iter().flat_map(|x| DTYPES.map(|out| (x, out))) {
            let x = Random::new(2).numbers(rows * cols, x_type);
            let results = run(|queue| {
                let (out, outer) = framed(queue, rows, cols, out_type, &vec![0.0; rows * cols]);
                let (own, own_outer) = framed(queue, rows, cols, x_type, &x);
                queue.launch(Multiply { x: own.view(), factor: 0.22, by: None, out: out.view() });
                let by = Some(queue.floats(1, 1, DType::F32, &[0.5]).view());
                queue.launch(Multiply { x: own.view(), factor: 0.44, by, out: own.view() });
                vec![outer, own_outer]
            });
            for (result, dtype) in results.iter().zip([out_type, x_type]) {
                let expected: Vec<f32> = x.iter().map(|&x| rounded(0.22 * x, dtype)).collect();
                assert_eq!(unframed(result, cols), expected, "[{rows}, {cols}] {x_type:?} to {dtype:?}");
            }
        }
    }
}

#[test]
fn soft_caps_bound_numbers_smoothly() {
    for [rows, cols] in SHAPES {
        for dtype in DTYPES {
            let x: Vec<f32> = Random::new(4).numbers(rows * cols, dtype).iter().map(|x| 64.0 * x).collect();
            let results = run(|queue| {
                let (own, outer) = framed(queue, rows, cols, dtype, &x);
                queue.launch(SoftCap { x: own.view(), cap: 30.0, out: own.view() });
                vec![outer]
            });
            let expected: Vec<f64> = x.iter().map(|&x| 30.0 * (x as f64 / 30.0).tanh()).collect();
            assert_close("capped", &unframed(&results[0], cols), &expected, tolerance(dtype));
        }
    }
}

#[test]
fn copied_indices_choose_the_same_columns() {
    let indices: Vec<u32> = (0..20).rev().collect();
    let results = run(|queue| {
        let copy = queue.tensor(1, 20, DType::U32);
        queue.launch(Copy { x: queue.indices(&indices).view(), out: copy.view() });
        let x = queue.floats(1, 20, DType::F32, &(0..20).map(|i| i as f32).collect::<Vec<_>>());
        let out = queue.zeros(1, 20, DType::F32);
        queue.launch(GatherColumns { x: x.view(), columns: copy.view(), out: out.view() });
        vec![out]
    });
    assert_eq!(results[0], (0..20).rev().map(|i| i as f32).collect::<Vec<_>>());
}

#[test]
fn fill_writes_every_element_and_nothing_else() {
    for [rows, cols] in SHAPES {
        for dtype in DTYPES {
            let results = run(|queue| {
                let (out, outer) = framed(queue, rows, cols, dtype, &vec![0.0; rows * cols]);
                queue.launch(Fill { out: out.view(), value: 0.3 });
                vec![outer]
            });
            assert_eq!(unframed(&results[0], cols), vec![rounded(0.3, dtype); rows * cols]);
        }
    }
}

#[test]
fn column_sums_are_added_to_what_is_there() {
    for [rows, cols] in SHAPES.into_iter().chain([[5000, 33], [129, 2000]]) {
        for dtype in DTYPES {
            let mut random = Random::new(3);
            let (x, before) = (random.numbers(rows * cols, dtype), random.numbers(cols, DType::F32));
            let results = run(|queue| {
                let (out, outer) = framed(queue, 1, cols, DType::F32, &before);
                queue.launch(ColumnSum { x: strided(queue, rows, cols, 3, dtype, &x).view(), out: out.view() });
                vec![outer]
            });
            let mut expected = support::wide(&before);
            for (i, &x) in x.iter().enumerate() {
                expected[i % cols] += x as f64;
            }
            let what = format!("[{rows}, {cols}] {dtype:?}");
            assert_close(&what, &unframed(&results[0], cols), &expected, tolerance(DType::F32));
        }
    }
}

/// `count` distinct columns of `cols`, in no order; where many are wanted, with runs of neighbours.
fn distinct_columns(random: &mut Random, cols: usize, count: usize) -> Vec<u32> {
    let mut columns: Vec<u32> = (0..cols as u32).collect();
    for _ in 0..cols.div_ceil(8) {
        columns.swap(random.below(cols), random.below(cols));
    }
    columns.truncate(count);
    columns
}

const COLUMN_CASES: [[usize; 3]; 7] =
    [[3, 1, 1], [0, 9, 4], [4, 9, 0], [5, 40, 17], [9, 64, 64], [200, 515, 300], [3, 70_000, 40_000]];

#[test]
fn gathered_columns_are_those_asked_for() {
    for [rows, cols, count] in COLUMN_CASES {
        for dtype in DTYPES {
            let mut random = Random::new(5);
            let mut columns = distinct_columns(&mut random, cols, count);
            // A column may be asked for twice.
            if count > 1 {
                columns[0] = columns[count - 1];
            }
            let x = random.numbers(rows * cols, dtype);
            let results = run(|queue| {
                let (out, outer) = framed(queue, rows, count, dtype, &vec![0.0; rows * count]);
                let x = strided(queue, rows, cols, 3, dtype, &x);
                queue.launch(GatherColumns { x: x.view(), columns: queue.indices(&columns).view(), out: out.view() });
                vec![outer]
            });
            let expected: Vec<f32> = (0..rows)
                .flat_map(|row| columns.iter().map(|&column| x[row * cols + column as usize]).collect::<Vec<_>>())
                .collect();
            assert_eq!(unframed(&results[0], count), expected, "{count} columns of [{rows}, {cols}] {dtype:?}");
        }
    }
}

#[test]
fn scattered_columns_replace_or_add_and_leave_the_others() {
    for [rows, cols, count] in COLUMN_CASES {
        for (dtype, accumulate) in DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
            let mut random = Random::new(6);
            let columns = distinct_columns(&mut random, cols, count);
            let (x, before) = (random.numbers(rows * count, dtype), random.numbers(rows * cols, dtype));
            let results = run(|queue| {
                let (out, outer) = framed(queue, rows, cols, dtype, &before);
                let x = strided(queue, rows, count, 3, dtype, &x);
                let columns = queue.indices(&columns);
                queue.launch(ScatterColumns { x: x.view(), columns: columns.view(), out: out.view(), accumulate });
                vec![outer]
            });
            let mut expected = before.clone();
            for (i, &x) in x.iter().enumerate() {
                let place = &mut expected[i / count * cols + columns[i % count] as usize];
                *place = if accumulate { rounded(*place + x, dtype) } else { x };
            }
            assert_eq!(unframed(&results[0], cols), expected, "{count} columns of [{rows}, {cols}] {dtype:?}");
        }
    }
}

#[test]
fn a_column_outside_the_matrix_ends_the_queue() {
    for scatter in [false, true] {
        let result = std::panic::catch_unwind(|| {
            let device = support::device(1, 1 << 20);
            let queue = device.compute();
            let (wide, narrow) = (queue.zeros(2, 8, DType::F32), queue.zeros(2, 3, DType::F32));
            let columns = queue.indices(&[0, 8, 1]);
            let wide = wide.view();
            let narrow = narrow.view();
            let columns = columns.view();
            if scatter {
                queue.launch(ScatterColumns { x: narrow, columns, out: wide, accumulate: false });
            } else {
                queue.launch(GatherColumns { x: wide, columns, out: narrow });
            }
            queue.finish();
        });
        assert!(result.is_err());
    }
}
