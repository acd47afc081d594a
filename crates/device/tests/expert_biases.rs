//! The biases of experts against plain loops in f64.

mod support;

use std::ops::Range;

use evenkeel_device::DType;
use evenkeel_device::kernel::{AddBiases, BiasDots, BiasSums, Kernel};
use support::{DTYPES, Random, assert_close, framed, run, strided, tolerance, unframed, wide};

/// Rows before the first expert's, rows of each expert, and rows behind the last one's.
const SPLITS: [(usize, &[usize], usize); 7] = [
    (0, &[0], 0),
    (0, &[1], 0),
    (0, &[5, 0, 3], 0),
    (0, &[0, 33, 1, 0], 0),
    (2, &[40, 0, 65], 3),
    (0, &[130, 17, 0, 1, 64, 300], 0),
    (0, &[1, 2, 1, 1, 0, 0, 1, 3, 0, 1, 1, 1], 1),
];

const WIDTHS: [usize; 5] = [1, 5, 64, 300, 1030];

struct Rows {
    offsets: Vec<u32>,
    count: usize,
}

impl Rows {
    fn of((before, split, behind): (usize, &[usize], usize)) -> Rows {
        let mut offsets = vec![before as u32];
        split.iter().for_each(|&rows| offsets.push(offsets[offsets.len() - 1] + rows as u32));
        Rows { offsets, count: before + split.iter().sum::<usize>() + behind }
    }

    fn experts(&self) -> usize {
        self.offsets.len() - 1
    }

    fn of_expert(&self, expert: usize) -> Range<usize> {
        self.offsets[expert] as usize..self.offsets[expert + 1] as usize
    }
}

fn for_each_case(mut check: impl FnMut(&Rows, usize, DType)) {
    for split in SPLITS {
        for (width, dtype) in WIDTHS.into_iter().flat_map(|width| DTYPES.map(|dtype| (width, dtype))) {
            check(&Rows::of(split), width, dtype);
        }
    }
}

#[test]
fn each_row_gets_the_bias_of_its_expert() {
    for_each_case(|rows, width, dtype| {
        let mut random = Random::new(31);
        let x = random.numbers(rows.count * width, dtype);
        let biases = random.numbers(rows.experts() * width, DType::F32);
        let results = run(|queue| {
            let (x, outer) = framed(queue, rows.count, width, dtype, &x);
            let biases = strided(queue, rows.experts(), width, 3, DType::F32, &biases);
            let offsets = queue.indices(&rows.offsets);
            queue.launch(AddBiases { x: x.view(), biases: biases.view(), offsets: offsets.view() });
            vec![outer]
        });
        let mut expected = wide(&x);
        for expert in 0..rows.experts() {
            for (row, col) in rows.of_expert(expert).flat_map(|row| (0..width).map(move |col| (row, col))) {
                expected[row * width + col] += biases[expert * width + col] as f64;
            }
        }
        let what = format!("{:?} {width} {dtype:?}", rows.offsets);
        assert_close(&what, &unframed(&results[0], width), &expected, tolerance(dtype));
    });
}

#[test]
fn sums_of_an_experts_rows_are_added_to_what_is_there() {
    for_each_case(|rows, width, dtype| {
        let mut random = Random::new(32);
        let x = random.numbers(rows.count * width, dtype);
        let before: Vec<f32> =
            random.numbers(rows.experts() * width, DType::F32).iter().map(|number| number + 3.0).collect();
        let results = run(|queue| {
            let x = strided(queue, rows.count, width, 3, dtype, &x);
            let (out, outer) = framed(queue, rows.experts(), width, DType::F32, &before);
            let offsets = queue.indices(&rows.offsets);
            queue.launch(BiasSums { x: x.view(), offsets: offsets.view(), out: out.view() });
            vec![outer]
        });
        let mut expected = wide(&before);
        for expert in 0..rows.experts() {
            for (row, col) in rows.of_expert(expert).flat_map(|row| (0..width).map(move |col| (row, col))) {
                expected[expert * width + col] += x[row * width + col] as f64;
            }
        }
        let what = format!("{:?} {width} {dtype:?}", rows.offsets);
        assert_close(&what, &unframed(&results[0], width), &expected, tolerance(DType::F32));
    });
}

#[test]
fn dots_with_biases_are_added_at_the_pairs_places() {
    for_each_case(|rows, width, dtype| {
        let (tokens, k) = if rows.count.is_multiple_of(2) { (rows.count / 2, 2) } else { (rows.count, 1) };
        let mut random = Random::new(33);
        let x = random.numbers(rows.count * width, dtype);
        let biases = random.numbers(rows.experts() * width, DType::F32);
        let before: Vec<f32> = random.numbers(rows.count, DType::F32).iter().map(|number| number + 3.0).collect();
        // Backwards, so that a row's pair is not its number.
        let pairs: Vec<u32> = (0..rows.count as u32).rev().collect();
        let results = run(|queue| {
            let x = strided(queue, rows.count, width, 3, dtype, &x);
            let biases = strided(queue, rows.experts(), width, 1, DType::F32, &biases);
            let (out, outer) = framed(queue, tokens, k, DType::F32, &before);
            let (offsets, pairs) = (queue.indices(&rows.offsets), queue.indices(&pairs));
            queue.launch(BiasDots {
                x: x.view(),
                biases: biases.view(),
                offsets: offsets.view(),
                pairs: pairs.view(),
                out: out.view(),
            });
            vec![outer]
        });
        let mut expected = wide(&before);
        for expert in 0..rows.experts() {
            for row in rows.of_expert(expert) {
                let products = (0..width).map(|col| x[row * width + col] as f64 * biases[expert * width + col] as f64);
                expected[pairs[row] as usize] += products.sum::<f64>();
            }
        }
        let what = format!("{:?} {width} {dtype:?}", rows.offsets);
        assert_close(&what, &unframed(&results[0], k), &expected, 2.0 * tolerance(DType::F32));
    });
}

#[test]
fn rows_behind_the_matrix_end_the_queue() {
    for case in 0..3 {
        let result = std::panic::catch_unwind(|| {
            let device = support::device(1, 1 << 20);
            let queue = device.compute();
            let (x, biases) = (queue.zeros(4, 4, DType::F32), queue.zeros(2, 4, DType::F32));
            let (offsets, pairs) = (queue.indices(&[0, 2, 5]), queue.indices(&[0, 1, 2, 3]));
            let (x, biases, offsets, pairs) = (x.view(), biases.view(), offsets.view(), pairs.view());
            let out = queue.zeros(2, 2, DType::F32);
            let kernel: Kernel = match case {
                0 => AddBiases { x, biases, offsets }.into(),
                1 => BiasSums { x, offsets, out: biases }.into(),
                _ => BiasDots { x, biases, offsets, pairs, out: out.view() }.into(),
            };
            queue.launch(kernel);
            queue.finish();
        });
        assert!(result.is_err(), "case {case}");
    }
}
