//! Selected rows against plain loops.

mod support;

use evenkeel_device::DType;
use evenkeel_device::kernel::{GatherRows, ScatterRows};
use support::{DTYPES, Random, framed, rounded, run, strided, unframed};

/// Rows, columns, and how many rows are selected.
const CASES: [[usize; 3]; 8] =
    [[1, 1, 1], [9, 0, 4], [9, 4, 0], [40, 5, 17], [64, 16, 64], [515, 130, 300], [7, 40_000, 3], [9000, 3, 5000]];

/// `count` distinct rows of `rows`, in no order.
fn distinct_rows(random: &mut Random, rows: usize, count: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..rows as u32).collect();
    (0..rows).for_each(|row| all.swap(row, random.below(rows)));
    all.truncate(count);
    all
}

#[test]
fn gathered_rows_are_those_asked_for() {
    for [rows, cols, count] in CASES {
        for dtype in DTYPES {
            let mut random = Random::new(5);
            let mut selected = distinct_rows(&mut random, rows, count);
            // A row may be asked for twice.
            if count > 1 {
                selected[0] = selected[count - 1];
            }
            let x = random.numbers(rows * cols, dtype);
            let results = run(|queue| {
                let (out, outer) = framed(queue, count, cols, dtype, &vec![0.0; count * cols]);
                let x = strided(queue, rows, cols, 3, dtype, &x);
                queue.launch(GatherRows { x: x.view(), rows: queue.indices(&selected).view(), out: out.view() });
                vec![outer]
            });
            let row = |&row: &u32| x[row as usize * cols..][..cols].to_vec();
            let expected: Vec<f32> = selected.iter().flat_map(row).collect();
            assert_eq!(unframed(&results[0], cols), expected, "{count} rows of [{rows}, {cols}] {dtype:?}");
        }
    }
}

#[test]
fn scattered_rows_replace_or_add_and_leave_the_others() {
    for [rows, cols, count] in CASES {
        for (dtype, accumulate) in DTYPES.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
            let mut random = Random::new(6);
            let selected = distinct_rows(&mut random, rows, count);
            let (x, before) = (random.numbers(count * cols, dtype), random.numbers(rows * cols, dtype));
            let results = run(|queue| {
                let (out, outer) = framed(queue, rows, cols, dtype, &before);
                let x = strided(queue, count, cols, 3, dtype, &x);
                let rows = queue.indices(&selected);
                queue.launch(ScatterRows { x: x.view(), rows: rows.view(), out: out.view(), accumulate });
                vec![outer]
            });
            let mut expected = before.clone();
            for (i, &x) in x.iter().enumerate() {
                let place = &mut expected[selected[i / cols] as usize * cols + i % cols];
                *place = if accumulate { rounded(*place + x, dtype) } else { x };
            }
            assert_eq!(unframed(&results[0], cols), expected, "{count} rows of [{rows}, {cols}] {dtype:?}");
        }
    }
}

#[test]
fn a_row_outside_the_matrix_ends_the_queue() {
    for scatter in [false, true] {
        let result = std::panic::catch_unwind(|| {
            let device = support::device(1, 1 << 20);
            let queue = device.compute();
            let (tall, short) = (queue.zeros(8, 2, DType::F32), queue.zeros(3, 2, DType::F32));
            let rows = queue.indices(&[0, 8, 1]);
            let tall = tall.view();
            let short = short.view();
            let rows = rows.view();
            if scatter {
                queue.launch(ScatterRows { x: short, rows, out: tall, accumulate: false });
            } else {
                queue.launch(GatherRows { x: tall, rows, out: short });
            }
            queue.finish();
        });
        let message = result.expect_err("the queue has ended");
        let message = message.downcast_ref::<String>().expect("a message");
        assert!(support::on_cuda() || message.contains("row 8 of a matrix of 8 rows"), "{message}");
    }
}
