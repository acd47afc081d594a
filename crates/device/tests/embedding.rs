//! Embedding and its gradient against plain loops.

mod support;

use evenkeel_device::DType;
use evenkeel_device::kernel::{Embed, EmbedBackward, IGNORE};
use support::{DTYPES, Random, assert_close, framed, run, strided, tolerance, unframed};

/// Tokens, vocabulary rows held, first row, features.
const CASES: [[usize; 4]; 8] = [
    [0, 4, 0, 8],
    [3, 4, 0, 0],
    [1, 1, 0, 1],
    [9, 5, 0, 16],
    [40, 7, 3, 33],
    [100, 300, 1000, 130],
    [700, 50, 20, 257],
    [3, 5, 1, 40_000],
];

/// Indices in the table, around it, and the one that stands for nothing.
fn some_indices(random: &mut Random, [tokens, rows, first, _]: [usize; 4]) -> Vec<u32> {
    let index = |random: &mut Random| match random.below(8) {
        0 => IGNORE,
        1 => random.below(first + 1) as u32,
        2 => (first + rows + random.below(5)) as u32,
        _ => (first + random.below(rows)) as u32,
    };
    (0..tokens).map(|_| index(random)).collect()
}

fn row_of(index: u32, [_, rows, first, _]: [usize; 4]) -> Option<usize> {
    (index as usize).checked_sub(first).filter(|&row| row < rows)
}

#[test]
fn embed_reads_rows_of_a_table_of_any_dtype_and_zero_outside_it() {
    for case in CASES {
        let [tokens, rows, first, cols] = case;
        for mixture in 0..8 {
            let table_type = DTYPES[mixture & 1];
            let dtype = DTYPES[mixture >> 1 & 1];
            let accumulate = mixture >> 2 == 1;
            let mut random = Random::new(7);
            let indices = some_indices(&mut random, case);
            let (table, before) = (random.numbers(rows * cols, table_type), random.numbers(tokens * cols, dtype));
            let results = run(|queue| {
                let table = strided(queue, rows, cols, 3, table_type, &table);
                let indices = queue.indices(&indices);
                let (out, outer) = framed(queue, tokens, cols, dtype, &before);
                queue.launch(Embed {
                    table: table.view(),
                    indices: indices.view(),
                    first: first as u32,
                    scale: 1.7,
                    out: out.view(),
                    accumulate,
                });
                vec![outer]
            });
            let expected: Vec<f64> = (0..tokens * cols)
                .map(|i| {
                    let row = row_of(indices[i / cols], case);
                    let value = row.map_or(0.0, |row| table[row * cols + i % cols] as f64 * 1.7f32 as f64);
                    value + if accumulate { before[i] as f64 } else { 0.0 }
                })
                .collect();
            let what = format!("{case:?} {table_type:?} to {dtype:?} accumulate {accumulate}");
            assert_close(&what, &unframed(&results[0], cols), &expected, tolerance(dtype));
        }
    }
}

#[test]
fn embed_backward_adds_every_token_to_its_row() {
    for case in CASES {
        let [tokens, rows, first, cols] = case;
        for dtype in DTYPES {
            let mut random = Random::new(8);
            let indices = some_indices(&mut random, case);
            let (dout, before) = (random.numbers(tokens * cols, dtype), random.numbers(rows * cols, DType::F32));
            let results = run(|queue| {
                let dout = strided(queue, tokens, cols, 3, dtype, &dout);
                let indices = queue.indices(&indices);
                let (dtable, outer) = framed(queue, rows, cols, DType::F32, &before);
                queue.launch(EmbedBackward {
                    dtable: dtable.view(),
                    indices: indices.view(),
                    first: first as u32,
                    scale: 1.7,
                    dout: dout.view(),
                });
                vec![outer]
            });
            let mut expected = support::wide(&before);
            for (i, &dout) in dout.iter().enumerate() {
                if let Some(row) = row_of(indices[i / cols], case) {
                    expected[row * cols + i % cols] += dout as f64 * 1.7f32 as f64;
                }
            }
            let what = format!("{case:?} {dtype:?}");
            assert_close(&what, &unframed(&results[0], cols), &expected, tolerance(DType::F32));
        }
    }
}

#[test]
fn ignore_is_no_row_even_of_a_table_that_reaches_the_last_index() {
    let results = run(|queue| {
        let (table, out) = (queue.floats(2, 1, DType::F32, &[1.0, 2.0]), queue.zeros(2, 1, DType::F32));
        let indices = queue.indices(&[IGNORE - 1, IGNORE]);
        let first = IGNORE - 1;
        let scale = 1.0;
        let table = table.view();
        let indices = indices.view();
        let out_view = out.view();
        queue.launch(Embed { table, indices, first, scale, out: out_view, accumulate: false });
        vec![out]
    });
    assert_eq!(results[0], [1.0, 0.0]);
}
