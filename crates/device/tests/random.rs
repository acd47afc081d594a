//! Random numbers: their distribution, and that they depend on seed and place alone.

mod support;

use evenkeel_device::kernel::{Dropout, Placement, RandomNormal};
use evenkeel_device::{DType, Queue, Tensor};
use support::{DTYPES, Random, SHAPES, framed, rounded, run, strided, unframed};

/// Rows × cols standard normal numbers.
fn normal(queue: &Queue, rows: usize, cols: usize, seed: u64) -> Tensor {
    let out = queue.tensor(rows, cols, DType::F32);
    let placement = Placement::whole(cols);
    queue.launch(RandomNormal { out: out.view(), mean: 0.0, deviation: 1.0, seed, placement });
    out
}

/// Rows × cols of 0 where dropped and 1 where kept.
fn kept(queue: &Queue, rows: usize, cols: usize, probability: f32, seed: u64) -> Tensor {
    let x = queue.tensor(rows, cols, DType::F32);
    queue.launch(evenkeel_device::kernel::Fill { out: x.view(), value: 1.0 - probability });
    let placement = Placement::whole(cols);
    queue.launch(Dropout { x: x.view(), out: x.view(), probability, seed, placement, rows: None });
    x
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let len = values.len() as f64;
    values.sum::<f64>() / len
}

#[test]
fn normal_numbers_have_the_moments_and_tails_of_the_normal_distribution() {
    for seed in [0, 1, u64::MAX] {
        let values = support::wide(&run(|queue| vec![normal(queue, 1000, 1000, seed)])[0]);
        let moment = |power| mean(values.iter().map(|value| value.powi(power)));
        // Five standard deviations of each mean of a million.
        for (power, expected, bound) in [(1, 0.0, 0.005), (2, 1.0, 0.0071), (3, 0.0, 0.0194), (4, 3.0, 0.049)] {
            assert!((moment(power) - expected).abs() < bound, "moment {power} is {}", moment(power));
        }
        for (beyond, probability) in
            [(0.5, 0.617_075), (1.0, 0.317_311), (2.0, 0.045_500), (3.0, 0.002_700), (4.0, 6.334e-5)]
        {
            let count = values.iter().filter(|value| value.abs() > beyond).count() as f64;
            let (expected, deviation): (f64, f64) =
                (1e6 * probability, f64::sqrt(1e6 * probability * (1.0 - probability)));
            assert!((count - expected).abs() < 5.0 * deviation, "{count} of {expected} beyond {beyond}");
        }
        assert!(values.iter().all(|value| value.abs() < 6.7));
    }
}

#[test]
fn neighbours_rows_and_seeds_are_uncorrelated() {
    let (rows, cols) = (1000, 1000);
    let results = run(|queue| (0..3).map(|seed| normal(queue, rows, cols, seed)).collect());
    let [first, second, third] = std::array::from_fn(|seed| support::wide(&results[seed]));
    let correlation = |a: &[f64], b: &[f64]| mean(a.iter().zip(b).map(|(a, b)| a * b));
    let len = first.len();
    for lag in [1, 2, 3, 4, 8, 16, 17, 64, cols - 1, cols, cols + 1, 2 * cols, 64 * cols] {
        let value = correlation(&first[..len - lag], &first[lag..]);
        assert!(value.abs() < 0.0055, "lag {lag}: {value}");
        let squares: Vec<f64> = first.iter().map(|x| x * x - 1.0).collect();
        let value = correlation(&squares[..len - lag], &squares[lag..]) / 2.0;
        assert!(value.abs() < 0.0055, "lag {lag} of the squares: {value}");
    }
    for (a, b) in [(&first, &second), (&first, &third), (&second, &third)] {
        assert!(correlation(a, b).abs() < 0.005);
    }
}

#[test]
fn dropped_neighbours_are_independent() {
    // How often each pattern of 8 neighbours, along rows and along columns, occurs: chi-square of 255 degrees of freedom.
    let (rows, cols) = (800, 800);
    let values = &run(|queue| vec![kept(queue, rows, cols, 0.5, 4)])[0];
    for (step, other) in [(1, cols), (cols, 1)] {
        let mut counts = [0f64; 256];
        for (i, j) in (0..rows).flat_map(|i| (0..cols / 8).map(move |j| (i, j))) {
            let pattern = (0..8).fold(0, |pattern, k| 2 * pattern + values[i * other + (8 * j + k) * step] as usize);
            counts[pattern] += 1.0;
        }
        let expected = (rows * cols / 8) as f64 / 256.0;
        let chi: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
        assert!((145.0..385.0).contains(&chi), "chi-square {chi}");
    }
}

#[test]
fn normal_numbers_are_scaled_shifted_and_rounded() {
    for [rows, cols] in SHAPES {
        for dtype in DTYPES {
            let results = run(|queue| {
                let (out, outer) = framed(queue, rows, cols, dtype, &vec![0.0; rows * cols]);
                let placement = Placement::whole(cols);
                queue.launch(RandomNormal { out: out.view(), mean: 0.5, deviation: 0.25, seed: 3, placement });
                vec![outer, normal(queue, rows, cols, 3)]
            });
            let expected: Vec<f32> = results[1].iter().map(|x| rounded(x.mul_add(0.25, 0.5), dtype)).collect();
            assert_eq!(unframed(&results[0], cols), expected, "[{rows}, {cols}] {dtype:?}");
        }
    }
}

#[test]
fn a_matrix_filled_in_slices_is_the_matrix_filled_whole() {
    let (rows, cols) = (37, 301);
    let fill = |queue: &Queue, cuts_down: &[usize], cuts_across: &[usize]| {
        let x = Random::new(1).numbers(rows * cols, DType::F32);
        let (normals, dropped) = (queue.tensor(rows, cols, DType::F32), queue.floats(rows, cols, DType::F32, &x));
        for (down, across) in
            cuts_down.windows(2).flat_map(|down| cuts_across.windows(2).map(move |across| (down, across)))
        {
            let placement = Placement { first_row: down[0] as u64, first_col: across[0] as u64, cols: cols as u64 };
            let slice = |tensor: &Tensor| tensor.row_range(down[0]..down[1]).col_range(across[0]..across[1]).view();
            queue.launch(RandomNormal { out: slice(&normals), mean: 0.0, deviation: 1.0, seed: 9, placement });
            let x = slice(&dropped);
            queue.launch(Dropout { x, out: x, probability: 0.3, seed: 9, placement, rows: None });
        }
        [normals, dropped]
    };
    let results = run(|queue| {
        let whole = fill(queue, &[0, rows], &[0, cols]);
        let pieces = fill(queue, &[0, 1, 20, rows], &[0, 7, 150, 299, cols]);
        [whole, pieces].concat()
    });
    assert_eq!(results[..2], results[2..]);
}

#[test]
fn dropout_scales_what_it_keeps_and_keeps_the_right_share() {
    for probability in [0.0, 0.1, 0.5, 0.9] {
        let values = &run(|queue| vec![kept(queue, 1000, 500, probability, 5)])[0];
        let share = mean(values.iter().map(|&value| value as f64));
        let deviation = (probability as f64 * (1.0 - probability as f64) / 5e5).sqrt();
        assert!((share - 1.0 + probability as f64).abs() <= 5.0 * deviation + 1e-7, "{share} kept of {probability}");
    }
    for [rows, cols] in SHAPES {
        for dtype in DTYPES {
            let x = Random::new(2).numbers(rows * cols, dtype);
            let results = run(|queue| {
                let input = strided(queue, rows, cols, 3, dtype, &x);
                let (out, outer) = framed(queue, rows, cols, dtype, &x);
                let (own, own_outer) = framed(queue, rows, cols, dtype, &x);
                for (x, out) in [(&input, &out), (&own, &own)] {
                    let x = x.view();
                    let out = out.view();
                    let placement = Placement::whole(cols);
                    queue.launch(Dropout { x, out, probability: 0.25, seed: 6, placement, rows: None });
                }
                vec![outer, own_outer, kept(queue, rows, cols, 0.25, 6)]
            });
            let expected: Vec<f32> =
                x.iter().zip(&results[2]).map(|(x, kept)| rounded(x * kept * (1.0 / 0.75), dtype)).collect();
            for place in &results[..2] {
                assert_eq!(unframed(place, cols), expected, "[{rows}, {cols}] {dtype:?}");
            }
        }
    }
}

#[test]
fn rows_with_places_of_their_own_drop_what_they_drop_in_the_whole() {
    let (rows, cols) = (40, 301);
    let places: [u32; 5] = [0, 3, 4, 17, 39];
    let results = run(|queue| {
        let picked = queue.floats(places.len(), cols, DType::F32, &vec![1.0; places.len() * cols]);
        let placement = Placement { first_row: 0, ..Placement::whole(cols) };
        let rows_of = Some(queue.indices(&places).view());
        let x = picked.view();
        queue.launch(Dropout { x, out: x, probability: 0.3, seed: 9, placement, rows: rows_of });
        vec![kept(queue, rows, cols, 0.3, 9), picked]
    });
    for (row, &place) in places.iter().enumerate() {
        let whole = results[0][place as usize * cols..][..cols].iter().map(|kept| kept * (1.0 / 0.7));
        let close = whole.zip(&results[1][row * cols..]).all(|(whole, picked)| (whole - picked).abs() < 1e-6);
        assert!(close, "row {row}");
    }
}

#[test]
fn a_dropped_nan_is_gone() {
    let results = run(|queue| {
        let x = queue.floats(1, 100, DType::F32, &[f32::NAN; 100]);
        let placement = Placement::whole(100);
        queue.launch(Dropout { x: x.view(), out: x.view(), probability: 0.5, seed: 1, placement, rows: None });
        vec![x]
    });
    assert!(results[0].contains(&0.0) && results[0].iter().any(|x| x.is_nan()));
}
