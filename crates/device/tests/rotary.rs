//! Rotary embedding against the plain rotation of pairs.

mod support;

use evenkeel_device::kernel::{Pairs, Rotary};
use evenkeel_device::{DType, Heads};
use support::{DTYPES, Random, assert_close, framed, run, strided, tolerance, unframed};

struct Case {
    tokens: usize,
    heads: usize,
    dim: usize,
    step: usize,
    rotated: usize,
}

const CASES: [Case; 8] = [
    Case { tokens: 0, heads: 2, dim: 8, step: 8, rotated: 8 },
    Case { tokens: 3, heads: 1, dim: 2, step: 2, rotated: 2 },
    Case { tokens: 5, heads: 3, dim: 64, step: 64, rotated: 64 },
    Case { tokens: 7, heads: 2, dim: 20, step: 27, rotated: 20 },
    Case { tokens: 4, heads: 3, dim: 80, step: 80, rotated: 32 },
    Case { tokens: 6, heads: 2, dim: 21, step: 50, rotated: 0 },
    Case { tokens: 300, heads: 5, dim: 96, step: 200, rotated: 74 },
    // More tokens than a grid has rows.
    Case { tokens: 65_541, heads: 1, dim: 2, step: 2, rotated: 2 },
];
const POSITIONS: usize = 50;

/// Cosines, then sines, of angles that differ by position and pair.
fn table(rotated: usize) -> Vec<f32> {
    let half = rotated / 2;
    let angle = |position: usize, i: usize| position as f64 * 1000f64.powf(-(i as f64) / half as f64);
    let row = |position| {
        let cosines = (0..half).map(move |i| angle(position, i).cos() as f32);
        cosines.chain((0..half).map(move |i| angle(position, i).sin() as f32))
    };
    (0..POSITIONS).flat_map(row).collect()
}

fn rotate(
    case: &Case,
    pairs: Pairs,
    cols: usize,
    x: &[f32],
    table: &[f32],
    positions: &[u32],
    inverse: bool,
) -> Vec<f64> {
    let mut out = support::wide(x);
    let half = case.rotated / 2;
    for token in 0..case.tokens {
        let row = &table[positions[token] as usize * case.rotated..][..case.rotated];
        for (head, i) in (0..case.heads).flat_map(|head| (0..half).map(move |i| (head, i))) {
            let cos = row[i] as f64;
            let sin = if inverse { -row[half + i] } else { row[half + i] } as f64;
            let [first, second] = match pairs {
                Pairs::Halves => [i, half + i],
                Pairs::Neighbours => [2 * i, 2 * i + 1],
            }
            .map(|element| token * cols + head * case.step + element);
            let (a, b) = (x[first] as f64, x[second] as f64);
            out[first] = a * cos - b * sin;
            out[second] = b * cos + a * sin;
        }
    }
    out
}

#[test]
fn pairs_are_rotated_by_their_angle_and_nothing_else_is_touched() {
    for case in CASES {
        let Case { tokens, heads, dim, step, rotated } = case;
        let cols = (heads - 1) * step + dim;
        let kinds =
            [(Pairs::Halves, false), (Pairs::Halves, true), (Pairs::Neighbours, false), (Pairs::Neighbours, true)];
        for (dtype, (pairs, inverse)) in DTYPES.into_iter().flat_map(|dtype| kinds.map(|kind| (dtype, kind))) {
            let mut random = Random::new(9);
            let x = random.numbers(tokens * cols, dtype);
            let table = table(rotated);
            let positions: Vec<u32> = (0..tokens).map(|_| random.below(POSITIONS) as u32).collect();
            let results = run(|queue| {
                let (inner, outer) = framed(queue, tokens, cols, dtype, &x);
                let x = Heads::strided(&inner, 0, heads, dim, step);
                let table = strided(queue, POSITIONS, rotated, 3, DType::F32, &table);
                let positions = queue.indices(&positions);
                queue.launch(Rotary { x, pairs, table: table.view(), positions: positions.view(), inverse });
                vec![outer]
            });
            let actual = unframed(&results[0], cols);
            let what = format!("{tokens} tokens, {heads} heads of {dim}, {rotated} rotated, {pairs:?}, {dtype:?}");
            assert_close(
                &what,
                &actual,
                &rotate(&case, pairs, cols, &x, &table, &positions, inverse),
                tolerance(dtype),
            );
            for (i, (actual, x)) in actual.iter().zip(&x).enumerate() {
                assert!(i % cols % step < rotated || actual == x, "{what}: element {i} was not to be rotated");
            }
        }
    }
}

#[test]
fn the_inverse_rotates_back() {
    let x = Random::new(10).numbers(40 * 64, DType::F32);
    let results = run(|queue| {
        let out = queue.floats(40, 64, DType::F32, &x);
        let table = queue.floats(POSITIONS, 32, DType::F32, &table(32));
        let positions = queue.indices(&(0..40).collect::<Vec<_>>());
        for (pairs, inverse) in
            [Pairs::Halves, Pairs::Neighbours].into_iter().flat_map(|pairs| [(pairs, false), (pairs, true)])
        {
            let (table, positions) = (table.view(), positions.view());
            queue.launch(Rotary { x: Heads::packed(&out, 2), pairs, table, positions, inverse });
        }
        vec![out]
    });
    assert_close("there and back", &results[0], &support::wide(&x), tolerance(DType::F32));
}

#[test]
fn a_position_outside_the_table_ends_the_queue() {
    let result = std::panic::catch_unwind(|| {
        let device = support::device(1, 1 << 20);
        let queue = device.compute();
        let (x, table) = (queue.zeros(2, 8, DType::F32), queue.zeros(4, 8, DType::F32));
        let positions = queue.indices(&[3, 4]);
        let (table, positions) = (table.view(), positions.view());
        queue.launch(Rotary { x: Heads::packed(&x, 1), pairs: Pairs::Halves, table, positions, inverse: false });
        queue.finish();
    });
    assert!(result.is_err());
}
