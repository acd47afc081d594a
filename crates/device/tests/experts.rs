//! Kernels of mixtures of experts against plain loops in f64.

mod support;

use std::ops::Range;

use evenkeel_device::kernel::{
    CombinePairs, GatherPairs, GroupedProduct, Kernel, Operation, Order, PairDots, Route, RouteBackward, ScalePairs,
};
use evenkeel_device::{DType, Device, Queue, Tensor};
use support::{DTYPES, Random, assert_close, framed, rounded, run, strided, tolerance, unframed, wide};

/// Tokens, experts, experts chosen for each token.
const CASES: [[usize; 3]; 11] = [
    [0, 4, 2],
    [1, 1, 1],
    [5, 1, 1],
    [7, 3, 3],
    [3, 17, 1],
    [33, 8, 2],
    [100, 40, 5],
    [64, 128, 8],
    [9, 513, 32],
    [700, 20, 4],
    [37, 70, 70],
];

/// The columns of rows that belong to tokens or pairs: less than a vector, whole vectors and a rest, more than a task.
const WIDTHS: [usize; 3] = [5, 64, 1030];

/// A plain routing.
#[derive(Clone, Debug)]
struct Routing {
    weights: Vec<f64>,
    chosen: Vec<u32>,
    pairs: Vec<u32>,
    places: Vec<u32>,
    offsets: Vec<u32>,
}

/// A token's weights for given experts.
fn weights_of(logits: &[f64], chosen: &[u32], renormalise: bool) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
    let shares: Vec<f64> = chosen.iter().map(|&expert| (logits[expert as usize] - max).exp() / sum).collect();
    let divisor = if renormalise { shares.iter().sum() } else { 1.0 };
    shares.iter().map(|share| share / divisor).collect()
}

fn route(logits: &[f32], [tokens, experts, k]: [usize; 3], renormalise: bool) -> Routing {
    let (mut weights, mut chosen) = (Vec::new(), Vec::new());
    for token in 0..tokens {
        let row = wide(&logits[token * experts..][..experts]);
        let mut order: Vec<u32> = (0..experts as u32).collect();
        // Stable: of equal logits the lower index comes first.
        order.sort_by(|&a, &b| row[b as usize].partial_cmp(&row[a as usize]).expect("numbers"));
        order.truncate(k);
        weights.extend(weights_of(&row, &order, renormalise));
        chosen.extend(order);
    }
    let (pairs, places, offsets) = sort(&chosen, experts);
    Routing { weights, chosen, pairs, places, offsets }
}

fn sort(chosen: &[u32], experts: usize) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let mut pairs: Vec<u32> = (0..chosen.len() as u32).collect();
    pairs.sort_by_key(|&pair| (chosen[pair as usize], pair));
    let mut places = vec![0; pairs.len()];
    pairs.iter().enumerate().for_each(|(place, &pair)| places[pair as usize] = place as u32);
    let before = |expert: usize| chosen.iter().filter(|&&other| (other as usize) < expert).count() as u32;
    (pairs, places, (0..=experts).map(before).collect())
}

/// Logits of which some are equal, zeros of both signs among them.
fn logits(random: &mut Random, len: usize) -> Vec<f32> {
    let number = |random: &mut Random| match random.below(3) {
        0 => (random.number() * 4.0).round(),
        _ => random.number() * 4.0,
    };
    (0..len).map(|_| number(random)).collect()
}

const FRAME_INDEX: u32 = 77;

/// A u32 tensor inside a wider one: the inner and the outer.
fn framed_indices(queue: &Queue, rows: usize, cols: usize, values: Option<&[u32]>) -> (Tensor, Tensor) {
    let width = cols + 3;
    let mut outer = vec![FRAME_INDEX; rows * width];
    for row in 0..if values.is_some() { rows } else { 0 } {
        outer[row * width + 1..][..cols].copy_from_slice(&values.expect("asked above")[row * cols..][..cols]);
    }
    let tensor = queue.tensor(rows, width, DType::U32);
    queue.write_indices(&tensor, &outer);
    (tensor.col_range(1..1 + cols), tensor)
}

fn unframed_indices(outer: &[u32], cols: usize) -> Vec<u32> {
    let mut inner = Vec::new();
    for row in outer.chunks_exact(cols + 3) {
        assert!([row[0], row[cols + 1], row[cols + 2]] == [FRAME_INDEX; 3], "a kernel wrote beside its tensor");
        inner.extend_from_slice(&row[1..=cols]);
    }
    inner
}

/// The bits of the weights, and the indices, which must be the same on all devices.
fn routed(logits: &[f32], [tokens, experts, k]: [usize; 3], renormalise: bool) -> (Vec<f32>, [Vec<u32>; 4]) {
    let mut results = Vec::new();
    for device in support::devices(1 << 30) {
        let queue = device.compute();
        let (weights, weights_outer) = framed(queue, tokens, k, DType::F32, &vec![0.0; tokens * k]);
        let (chosen, chosen_outer) = framed_indices(queue, tokens, k, None);
        let lines = [tokens * k, tokens * k, experts + 1].map(|len| framed_indices(queue, 1, len, None));
        let [pairs, places, offsets] = [0, 1, 2].map(|i: usize| lines[i].0.view());
        let logits_tensor = strided(queue, tokens, experts, 3, DType::F32, logits);
        let (logits, weights, chosen) = (logits_tensor.view(), weights.view(), chosen.view());
        queue.launch(Route { logits, renormalise, weights, chosen, pairs, places, offsets, first: 0 });
        let line = |i: usize, len| unframed_indices(&queue.read_indices(&lines[i].1), len);
        let chosen = unframed_indices(&queue.read_indices(&chosen_outer), k);
        let indices = [chosen, line(0, tokens * k), line(1, tokens * k), line(2, experts + 1)];
        let weights = queue.read(&weights_outer);
        let bits: Vec<u32> = weights.iter().map(|weight| weight.to_bits()).collect();
        results.push((bits, (unframed(&weights, k), indices)));
    }
    for other in &results[1..] {
        assert_eq!((&other.0, &other.1.1), (&results[0].0, &results[0].1.1), "the bits depend on the device");
    }
    results.swap_remove(0).1
}

#[test]
fn the_largest_logits_are_chosen_and_pairs_lie_by_expert() {
    for case in CASES {
        for renormalise in [false, true] {
            let logits = logits(&mut Random::new(case[0] as u64), case[0] * case[1]);
            let expected = route(&logits, case, renormalise);
            let (weights, indices) = routed(&logits, case, renormalise);
            let [chosen, pairs, places, offsets] = indices;
            // Not `assert_eq`, which would print thousands of numbers.
            assert!(chosen == expected.chosen, "chosen of {case:?}");
            assert!(pairs == expected.pairs && places == expected.places, "pairs of {case:?}");
            assert_eq!(offsets, expected.offsets, "{case:?}");
            assert_close(&format!("weights of {case:?}"), &weights, &expected.weights, tolerance(DType::F32));
        }
    }
}

#[test]
fn of_equal_logits_the_lower_index_is_chosen() {
    let row = [1.0, 0.0, -0.0, 2.0, 2.0, 0.0, 2.0, f32::NEG_INFINITY];
    let (weights, [chosen, ..]) = routed(&row, [1, 8, 8], true);
    assert_eq!(chosen, [3, 4, 6, 0, 1, 2, 5, 7]);
    assert_eq!(weights[7], 0.0);
    let (weights, [chosen, ..]) = routed(&[0.5; 300], [3, 100, 4], true);
    assert_eq!(chosen, [0, 1, 2, 3].repeat(3));
    assert_eq!(weights, [0.25; 12]);
}

#[test]
fn nan_is_smallest_and_makes_the_weights_nan() {
    let nan = [f32::NAN, f32::from_bits(0xffc0_0001)];
    for renormalise in [false, true] {
        for (logits, expected) in [
            ([nan[0], 1.0, nan[1], 2.0], [3, 1, 0]),
            ([nan[1], nan[0], nan[1], nan[1]], [0, 1, 2]),
            ([f32::NEG_INFINITY, nan[0], f32::INFINITY, nan[1]], [2, 0, 1]),
        ] {
            let (weights, [chosen, pairs, _, offsets]) = routed(&logits, [1, 4, 3], renormalise);
            assert_eq!(chosen, expected, "{logits:?}");
            assert_eq!((pairs, offsets[4]), (sort(&expected, 4).0, 3), "{logits:?}");
            assert!(weights.iter().all(|weight| weight.is_nan()), "{weights:?} of {logits:?}");
        }
        // No number at all.
        let (weights, [chosen, ..]) = routed(&[f32::NEG_INFINITY; 4], [1, 4, 2], renormalise);
        assert_eq!(chosen, [0, 1]);
        assert!(weights.iter().all(|weight| weight.is_nan()), "{weights:?}");
    }
}

/// The gradient by differences of the plain weights.
fn differences(logits: &[f64], chosen: &[u32], dweights: &[f64], renormalise: bool) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let loss = |expert: usize, step: f64| -> f64 {
        let mut moved = logits.to_vec();
        moved[expert] += step;
        weights_of(&moved, chosen, renormalise).iter().zip(dweights).map(|(weight, dweight)| weight * dweight).sum()
    };
    (0..logits.len()).map(|expert| (loss(expert, STEP) - loss(expert, -STEP)) / (2.0 * STEP)).collect()
}

#[test]
fn gradients_of_logits_are_differences_of_weights() {
    for case in CASES.into_iter().filter(|case| case[0] * case[1] < 10_000) {
        let [tokens, experts, k] = case;
        for (renormalise, dtype) in [(false, DTYPES[0]), (false, DTYPES[1]), (true, DTYPES[0]), (true, DTYPES[1])] {
            let mut random = Random::new(8);
            let logits = logits(&mut random, tokens * experts);
            let dweights = random.numbers(tokens * k, DType::F32);
            let Routing { weights, chosen, .. } = route(&logits, case, renormalise);
            let weights: Vec<f32> = weights.iter().map(|&weight| weight as f32).collect();
            let results = run(|queue| {
                let floats = |cols, values: &[f32]| strided(queue, tokens, cols, 3, DType::F32, values);
                let (chosen, _) = framed_indices(queue, tokens, k, Some(&chosen));
                let (out, outer) = framed(queue, tokens, experts, dtype, &vec![0.0; tokens * experts]);
                queue.launch(RouteBackward {
                    logits: floats(experts, &logits).view(),
                    chosen: chosen.view(),
                    weights: floats(k, &weights).view(),
                    renormalise,
                    dweights: floats(k, &dweights).view(),
                    dlogits: out.view(),
                });
                vec![outer]
            });
            let expected: Vec<f64> = (0..tokens)
                .flat_map(|token| {
                    let (logits, chosen) = (&logits[token * experts..][..experts], &chosen[token * k..][..k]);
                    differences(&wide(logits), chosen, &wide(&dweights[token * k..][..k]), renormalise)
                })
                .collect();
            let what = format!("{case:?} {dtype:?} {renormalise}");
            assert_close(&what, &unframed(&results[0], experts), &expected, tolerance(dtype));
        }
    }
}

/// Rows of each expert, with rows of none before and behind them.
const SPLITS: [(usize, &[usize], usize); 9] = [
    (0, &[0], 0),
    (0, &[0, 0, 0], 0),
    (0, &[1], 0),
    (0, &[5, 0, 3], 0),
    (0, &[0, 33, 1, 0], 0),
    (2, &[40, 0, 65], 3),
    (0, &[130, 17, 0, 1, 64, 300], 0),
    (0, &[1, 2, 1, 1, 0, 0, 1, 3, 0, 1, 1, 1], 1),
    (0, &[700], 0),
];

/// The other two dimensions.
/// The last are those of adapters: ranks beside widths.
const SIDES: [[usize; 2]; 12] = [
    [1, 1],
    [3, 0],
    [17, 31],
    [40, 130],
    [130, 20],
    [64, 96],
    [72, 200],
    [136, 8],
    [8, 136],
    [200, 4],
    [4, 200],
    [16, 264],
];

struct Grouped {
    order: Order,
    offsets: Vec<u32>,
    rows: usize,
    /// a's columns and those of the output.
    sides: [usize; 2],
}

impl Grouped {
    fn shapes(&self) -> [[usize; 2]; 3] {
        let ([a, n], rows, experts) = (self.sides, self.rows, self.offsets.len() - 1);
        match self.order {
            Order::NT => [[rows, a], [experts * n, a], [rows, n]],
            Order::NN => [[rows, a], [experts * a, n], [rows, n]],
            Order::TN => [[rows, a], [rows, n], [experts * a, n]],
        }
    }

    /// The plain twin: adds to `out`, whose rows of experts are zero unless it accumulates.
    fn add(&self, a: &[f32], b: &[f32], out: &mut [f64]) {
        let [inner, n] = self.sides;
        for expert in 0..self.offsets.len() - 1 {
            for row in self.rows_of(expert) {
                for i in 0..inner {
                    let left = a[row * inner + i] as f64;
                    for j in 0..n {
                        let (to, right) = match self.order {
                            Order::NT => (row * n + j, b[(expert * n + j) * inner + i]),
                            Order::NN => (row * n + j, b[(expert * inner + i) * n + j]),
                            Order::TN => ((expert * inner + i) * n + j, b[row * n + j]),
                        };
                        out[to] += left * right as f64;
                    }
                }
            }
        }
    }

    fn rows_of(&self, expert: usize) -> Range<usize> {
        self.offsets[expert] as usize..self.offsets[expert + 1] as usize
    }

    /// Rows of no expert may hold anything.
    fn poison_others(&self, values: &mut [f32], [rows, cols]: [usize; 2]) {
        let (first, end) = (self.offsets[0] as usize, self.offsets[self.offsets.len() - 1] as usize);
        values[..first * cols].fill(f32::NAN);
        values[end * cols..rows * cols].fill(f32::NAN);
    }

    fn check(&self, dtype: DType, out_dtype: DType, accumulate: bool) {
        let [a_shape, b_shape, out_shape] = self.shapes();
        let len = |[rows, cols]: [usize; 2]| rows * cols;
        let mut random = Random::new(9);
        let (mut a, mut b) = (random.numbers(len(a_shape), dtype), random.numbers(len(b_shape), dtype));
        self.poison_others(&mut a, a_shape);
        if self.order == Order::TN {
            self.poison_others(&mut b, b_shape);
        }
        // Away from zero, so that a single sum does not cancel.
        let before: Vec<f32> =
            random.numbers(len(out_shape), out_dtype).iter().map(|x| rounded(x + 3.0, out_dtype)).collect();
        let results = run(|queue| {
            let [a, b] = [(a_shape, &a), (b_shape, &b)]
                .map(|([rows, cols], values)| strided(queue, rows, cols, 3, dtype, values));
            let (out, outer) = framed(queue, out_shape[0], out_shape[1], out_dtype, &before);
            let offsets = queue.indices(&self.offsets);
            queue.launch(GroupedProduct {
                order: self.order,
                a: a.view(),
                b: b.view(),
                out: out.view(),
                offsets: offsets.view(),
                accumulate,
                expected_rows: None,
            });
            vec![outer]
        });
        let mut expected = wide(&before);
        if !accumulate {
            let written = self.rows_of(0).start..self.rows_of(self.offsets.len() - 2).end;
            let written = if self.order == Order::TN { 0..out_shape[0] } else { written };
            expected[written.start * out_shape[1]..written.end * out_shape[1]].fill(0.0);
        }
        self.add(&a, &b, &mut expected);
        let found = unframed(&results[0], out_shape[1]);
        let what = format!("{:?} {:?} {:?} {dtype:?} {out_dtype:?} {accumulate}", self.order, self.offsets, self.sides);
        // A GPU adds up hundreds of products one after the other.
        assert_close(&what, &found, &expected, 2.0 * tolerance(out_dtype));
    }
}

#[test]
fn grouped_products_are_the_experts_products() {
    for (before, split, behind) in SPLITS {
        let mut offsets = vec![before as u32];
        split.iter().for_each(|&rows| offsets.push(offsets[offsets.len() - 1] + rows as u32));
        let rows = before + split.iter().sum::<usize>() + behind;
        for (sides, order) in SIDES.into_iter().flat_map(|sides| [Order::NN, Order::NT, Order::TN].map(|o| (sides, o)))
        {
            let grouped = Grouped { order, offsets: offsets.clone(), rows, sides };
            for accumulate in [false, true] {
                grouped.check(DType::F32, DType::F32, accumulate);
                grouped.check(DType::Bf16, DType::Bf16, accumulate);
                grouped.check(DType::Bf16, DType::F32, accumulate);
            }
        }
    }
}

#[test]
fn deep_grouped_products_are_the_experts_products() {
    for order in [Order::NN, Order::NT, Order::TN] {
        let grouped = Grouped { order, offsets: vec![0, 3, 1500, 1500, 1600], rows: 1600, sides: [33, 66] };
        grouped.check(DType::Bf16, DType::F32, false);
        let grouped = Grouped { order, offsets: vec![0, 20, 20, 170], rows: 170, sides: [1100, 70] };
        grouped.check(DType::F32, DType::F32, true);
        grouped.check(DType::Bf16, DType::Bf16, false);
    }
}

/// With aligned rows, these are products by warpgroups on a GPU that has them.
#[test]
fn grouped_products_of_many_tiles_are_the_experts_products() {
    let splits: [(usize, &[usize], usize); 4] = [
        (0, &[128, 256], 0),
        (0, &[0, 129, 64, 0, 300, 1, 128, 5, 0], 0),
        (3, &[200, 63, 0, 191], 70),
        (130, &[15, 16, 17, 48, 65], 1),
    ];
    // Some whole tiles; a part of one, across, along and in both; the width of a narrower tile.
    let sides = [[128, 256], [64, 520], [328, 136], [200, 384], [72, 8]];
    for (before, split, behind) in splits {
        let mut offsets = vec![before as u32];
        split.iter().for_each(|&rows| offsets.push(offsets[offsets.len() - 1] + rows as u32));
        let rows = before + split.iter().sum::<usize>() + behind;
        for (sides, order) in sides.into_iter().flat_map(|sides| [Order::NN, Order::NT, Order::TN].map(|o| (sides, o)))
        {
            let grouped = Grouped { order, offsets: offsets.clone(), rows, sides };
            grouped.check(DType::Bf16, DType::Bf16, false);
            grouped.check(DType::Bf16, DType::F32, false);
            grouped.check(DType::Bf16, DType::F32, true);
        }
    }
}

#[test]
fn deep_grouped_products_of_many_tiles_are_the_experts_products() {
    for order in [Order::NN, Order::NT, Order::TN] {
        let grouped = Grouped { order, offsets: vec![2, 3, 1503, 1503, 1603], rows: 1650, sides: [136, 264] };
        grouped.check(DType::Bf16, DType::F32, false);
        grouped.check(DType::Bf16, DType::Bf16, true);
        let grouped = Grouped { order, offsets: vec![0, 20, 20, 170], rows: 170, sides: [1096, 72] };
        grouped.check(DType::Bf16, DType::Bf16, false);
        grouped.check(DType::Bf16, DType::F32, true);
    }
}

/// More tiles than blocks, in every order: each block takes several experts' tiles.
#[test]
fn grouped_products_of_more_tiles_than_multiprocessors_are_the_experts_products() {
    let mut random = Random::new(21);
    let mut offsets = vec![0];
    for _ in 0..160 {
        let rows = random.below(40) * random.below(2);
        offsets.push(offsets[offsets.len() - 1] + rows as u32);
    }
    let rows = offsets[offsets.len() - 1] as usize;
    for order in [Order::NN, Order::NT, Order::TN] {
        let grouped = Grouped { order, offsets: offsets.clone(), rows, sides: [144, 296] };
        grouped.check(DType::Bf16, DType::Bf16, false);
        grouped.check(DType::Bf16, DType::F32, true);
    }
}

/// A routing of random experts, some of which nobody chooses.
fn random_routing(random: &mut Random, [tokens, experts, k]: [usize; 3]) -> Routing {
    let logits: Vec<f32> =
        (0..tokens * experts).map(|i| if k < experts && i % experts == 0 { -9.0 } else { random.number() }).collect();
    route(&logits, [tokens, experts, k], true)
}

#[test]
fn gathered_pairs_are_their_tokens() {
    for case in CASES {
        let [tokens, _, k] = case;
        for (width, dtype) in WIDTHS.into_iter().flat_map(|width| DTYPES.map(|dtype| (width, dtype))) {
            let mut random = Random::new(10);
            let pairs = random_routing(&mut random, case).pairs;
            let x = random.numbers(tokens * width, dtype);
            let weights = random.numbers(tokens * k, DType::F32);
            let results = run(|queue| {
                let x = strided(queue, tokens, width, 3, dtype, &x);
                let weights = strided(queue, tokens, k, 3, DType::F32, &weights);
                let pairs = queue.indices(&pairs);
                let gather = |weights| {
                    let (x, pairs) = (x.view(), pairs.view());
                    let (out, outer) = framed(queue, pairs.cols, width, dtype, &vec![0.0; pairs.cols * width]);
                    queue.launch(GatherPairs { x, pairs, chosen_per_token: k, weights, out: out.view(), count: None });
                    outer
                };
                vec![gather(None), gather(Some(weights.view()))]
            });
            let rows = pairs.iter().map(|&pair| (pair as usize, &x[pair as usize / k * width..][..width]));
            let plain: Vec<f32> = rows.clone().flat_map(|(_, row)| row.to_vec()).collect();
            let weighted = rows.flat_map(|(pair, row)| row.iter().map(move |x| (pair, x)));
            let weighted: Vec<f32> = weighted.map(|(pair, x)| rounded(weights[pair] * x, dtype)).collect();
            for (result, expected) in results.iter().zip([plain, weighted]) {
                assert_eq!(unframed(result, width), expected, "{case:?} {width} {dtype:?}");
            }
        }
    }
}

#[test]
fn combined_pairs_are_sums_in_the_order_of_the_slots() {
    for case in CASES {
        let [tokens, _, k] = case;
        for (width, dtypes) in WIDTHS.into_iter().flat_map(|width| (0..4).map(move |dtypes| (width, dtypes))) {
            let (x_type, out_type) = (DTYPES[dtypes & 1], DTYPES[dtypes >> 1]);
            let mut random = Random::new(11);
            let places = random_routing(&mut random, case).places;
            let x = random.numbers(places.len() * width, x_type);
            let weights = random.numbers(tokens * k, DType::F32);
            let before = random.numbers(tokens * width, out_type);
            let ways = [(false, false), (false, true), (true, false), (true, true)];
            let results = run(|queue| {
                let x = strided(queue, places.len(), width, 3, x_type, &x);
                let weights = strided(queue, tokens, k, 3, DType::F32, &weights);
                let places = queue.indices(&places);
                let combine = |(weighted, accumulate): (bool, bool)| {
                    let (out, outer) = framed(queue, tokens, width, out_type, &before);
                    let (weights, out) = (weighted.then_some(weights.view()), out.view());
                    queue.launch(CombinePairs {
                        x: x.view(),
                        places: places.view(),
                        weights,
                        out,
                        accumulate,
                        count: None,
                    });
                    outer
                };
                ways.map(combine).to_vec()
            });
            for (result, (weighted, accumulate)) in results.iter().zip(ways) {
                let mut expected = if accumulate { wide(&before) } else { vec![0.0; tokens * width] };
                for (pair, &place) in places.iter().enumerate() {
                    let weight = if weighted { weights[pair] as f64 } else { 1.0 };
                    for col in 0..width {
                        expected[pair / k * width + col] += weight * x[place as usize * width + col] as f64;
                    }
                }
                let what = format!("{case:?} {width} {x_type:?} {out_type:?} {weighted} {accumulate}");
                assert_close(&what, &unframed(result, width), &expected, tolerance(out_type));
            }
        }
    }
}

/// Pairs by expert, or in their own order, where they need not be listed.
fn pairs_in_some_order(random: &mut Random, case: [usize; 3]) -> (Vec<u32>, bool) {
    let pairs = random_routing(random, case).pairs;
    let are_listed = case[0].is_multiple_of(2);
    (if are_listed { pairs } else { (0..pairs.len() as u32).collect() }, are_listed)
}

#[test]
fn dots_of_pairs_go_to_their_places() {
    for case in CASES {
        let [tokens, _, k] = case;
        for (width, dtypes) in WIDTHS.into_iter().chain([0]).flat_map(|width| (0..4).map(move |dtypes| (width, dtypes)))
        {
            let (a_type, b_type) = (DTYPES[dtypes & 1], DTYPES[dtypes >> 1]);
            let mut random = Random::new(12);
            let (pairs, are_listed) = pairs_in_some_order(&mut random, case);
            let (a, b) = (random.numbers(pairs.len() * width, a_type), random.numbers(pairs.len() * width, b_type));
            let results = run(|queue| {
                let (out, outer) = framed(queue, tokens, k, DType::F32, &vec![5.0; tokens * k]);
                let a = strided(queue, pairs.len(), width, 3, a_type, &a);
                let b = strided(queue, pairs.len(), width, 1, b_type, &b);
                let listed = queue.indices(&pairs);
                let pairs = are_listed.then(|| listed.view());
                queue.launch(PairDots { a: a.view(), b: b.view(), pairs, out: out.view(), count: None });
                vec![outer]
            });
            let mut expected = vec![0.0; pairs.len()];
            for (row, &pair) in pairs.iter().enumerate() {
                let products = (row * width..(row + 1) * width).map(|i| a[i] as f64 * b[i] as f64);
                expected[pair as usize] = products.sum();
            }
            let what = format!("{case:?} {width} {a_type:?} {b_type:?}");
            assert_close(&what, &unframed(&results[0], k), &expected, tolerance(DType::F32));
        }
    }
}

#[test]
fn scaled_pairs_may_overwrite_what_they_are_made_of() {
    for case in CASES {
        let [tokens, _, k] = case;
        for (width, dtypes) in WIDTHS.into_iter().flat_map(|width| (0..4).map(move |dtypes| (width, dtypes))) {
            let (x_type, out_type) = (DTYPES[dtypes & 1], DTYPES[dtypes >> 1]);
            let mut random = Random::new(13);
            let (pairs, are_listed) = pairs_in_some_order(&mut random, case);
            let x = random.numbers(pairs.len() * width, x_type);
            let weights = random.numbers(tokens * k, DType::F32);
            let results = run(|queue| {
                let weights = strided(queue, tokens, k, 3, DType::F32, &weights);
                let (own, own_outer) = framed(queue, pairs.len(), width, x_type, &x);
                let (out, outer) = framed(queue, pairs.len(), width, out_type, &vec![0.0; x.len()]);
                let listed = queue.indices(&pairs);
                for out in [out, own.clone()] {
                    let (x, pairs, weights) = (own.view(), are_listed.then(|| listed.view()), weights.view());
                    queue.launch(ScalePairs { x, pairs, weights, out: out.view(), count: None });
                }
                vec![outer, own_outer]
            });
            for (result, dtype) in results.iter().zip([out_type, x_type]) {
                let scaled = |(i, x): (usize, &f32)| rounded(weights[pairs[i / width] as usize] * x, dtype);
                let expected: Vec<f32> = x.iter().enumerate().map(scaled).collect();
                assert_eq!(unframed(result, width), expected, "{case:?} {width} {x_type:?} {dtype:?}");
            }
        }
    }
}

#[test]
fn an_index_outside_its_matrix_ends_the_queue() {
    let launches: [fn(&Queue) -> Kernel; 7] = [
        |queue| {
            GatherPairs {
                x: queue.zeros(2, 4, DType::F32).view(),
                pairs: queue.indices(&[0, 4, 1, 2]).view(),
                chosen_per_token: 2,
                weights: None,
                out: queue.zeros(4, 4, DType::F32).view(),
                count: None,
            }
            .into()
        },
        |queue| {
            CombinePairs {
                x: queue.zeros(4, 4, DType::F32).view(),
                places: queue.indices(&[0, 4, 1, 2]).view(),
                weights: None,
                out: queue.zeros(2, 4, DType::F32).view(),
                accumulate: false,
                count: None,
            }
            .into()
        },
        |queue| {
            PairDots {
                a: queue.zeros(4, 4, DType::F32).view(),
                b: queue.zeros(4, 4, DType::F32).view(),
                pairs: Some(queue.indices(&[0, 4, 1, 2]).view()),
                out: queue.zeros(2, 2, DType::F32).view(),
                count: None,
            }
            .into()
        },
        |queue| {
            ScalePairs {
                x: queue.zeros(4, 4, DType::F32).view(),
                pairs: Some(queue.indices(&[0, 4, 1, 2]).view()),
                weights: queue.zeros(2, 2, DType::F32).view(),
                out: queue.zeros(4, 4, DType::F32).view(),
                count: None,
            }
            .into()
        },
        |queue| {
            RouteBackward {
                logits: queue.zeros(1, 4, DType::F32).view(),
                chosen: queue.indices(&[1, 4]).view(),
                weights: queue.zeros(1, 2, DType::F32).view(),
                renormalise: true,
                dweights: queue.zeros(1, 2, DType::F32).view(),
                dlogits: queue.zeros(1, 4, DType::F32).view(),
            }
            .into()
        },
        |queue| {
            GroupedProduct {
                order: Order::NT,
                a: queue.zeros(4, 4, DType::F32).view(),
                b: queue.zeros(8, 4, DType::F32).view(),
                out: queue.zeros(4, 4, DType::F32).view(),
                offsets: queue.indices(&[0, 2, 5]).view(),
                accumulate: false,
                expected_rows: None,
            }
            .into()
        },
        |queue| {
            GroupedProduct {
                order: Order::TN,
                a: queue.zeros(4, 8, DType::Bf16).view(),
                b: queue.zeros(4, 8, DType::Bf16).view(),
                out: queue.zeros(16, 8, DType::Bf16).view(),
                offsets: queue.indices(&[0, 4, 3]).view(),
                accumulate: false,
                expected_rows: None,
            }
            .into()
        },
    ];
    for (i, launch) in launches.iter().enumerate() {
        let result = std::panic::catch_unwind(|| {
            let device = support::device(1, 1 << 20);
            let queue = device.compute();
            queue.launch(launch(queue));
            queue.finish();
        });
        assert!(result.is_err(), "case {i}");
    }
}

#[test]
fn a_dry_device_counts_grouped_products_by_shape() {
    let device = Device::dry();
    let queue = device.compute();
    let [a, b, out, offsets] = [
        queue.tensor(1000, 48, DType::Bf16),
        queue.tensor(8 * 96, 48, DType::Bf16),
        queue.tensor(1000, 96, DType::F32),
        queue.tensor(1, 9, DType::U32),
    ];
    let product = |order, a: &Tensor, b: &Tensor, out: &Tensor| GroupedProduct {
        order,
        a: a.view(),
        b: b.view(),
        out: out.view(),
        offsets: offsets.view(),
        accumulate: false,
        expected_rows: None,
    };
    let all = [product(Order::NT, &a, &b, &out), product(Order::TN, &a, &a, &queue.tensor(8 * 48, 48, DType::F32))];
    assert_eq!(all.map(|product| product.flops()), [2 * 1000 * 48 * 96, 2 * 1000 * 48 * 48]);
    all.into_iter().for_each(|product| queue.launch(product));
    let none = queue.tensor(0, 48, DType::Bf16);
    queue.launch(product(Order::NT, &none, &b, &queue.tensor(0, 96, DType::F32)));
}
