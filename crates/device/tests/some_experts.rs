//! Kernels of a device that has some of the experts: the same as with all of them, for the pairs of those.

mod support;

use evenkeel_device::kernel::{
    Activation, ClampedGate, ClampedGateBackward, CombinePairs, Gated, GatedBackward, GatherPairs, PairDots, Route,
    RowCount, ScalePairs,
};
use evenkeel_device::{DType, Queue, Tensor, View};
use support::{DTYPES, Random, run};

/// Tokens, experts, experts chosen for each token, and those that are here.
const CASES: [([usize; 3], std::ops::Range<usize>); 6] = [
    ([33, 8, 2], 2..5),
    ([33, 8, 2], 7..8),
    ([100, 40, 5], 0..20),
    ([64, 128, 8], 120..128),
    ([700, 20, 4], 3..6),
    ([5, 3, 3], 1..3),
];
const WIDTHS: [usize; 3] = [6, 64, 1030];

/// The routing of random logits.
struct Routed {
    weights: Tensor,
    chosen: Tensor,
    pairs: Tensor,
    places: Tensor,
    offsets: Tensor,
}

impl Routed {
    fn count(&self, held: usize) -> RowCount {
        RowCount { at: self.offsets.view().col_range(held..held + 1), expected: 0 }
    }
}

fn route(queue: &Queue, [tokens, experts, k]: [usize; 3], first: usize) -> Routed {
    let logits = Random::new(3).numbers(tokens * experts, DType::F32);
    let x = queue.floats(tokens, experts, DType::F32, &logits);
    let indices = |rows, cols| queue.tensor(rows, cols, DType::U32);
    let routed = Routed {
        weights: queue.tensor(tokens, k, DType::F32),
        chosen: indices(tokens, k),
        pairs: indices(1, tokens * k),
        places: indices(1, tokens * k),
        offsets: indices(1, experts + 1),
    };
    queue.launch(Route {
        logits: x.view(),
        renormalise: true,
        weights: routed.weights.view(),
        chosen: routed.chosen.view(),
        first,
        pairs: routed.pairs.view(),
        places: routed.places.view(),
        offsets: routed.offsets.view(),
    });
    routed
}

#[test]
fn pairs_of_the_first_expert_come_first_and_the_others_follow_in_turn() {
    for (case, held) in CASES {
        for device in support::devices(1 << 30) {
            let queue = device.compute();
            let [all, turned] = [0, held.start].map(|first| {
                let Routed { chosen, pairs, places, offsets, .. } = route(queue, case, first);
                [chosen, pairs, places, offsets].map(|tensor| queue.read_indices(&tensor))
            });
            let [chosen, mut pairs, _, offsets] = all;
            pairs.rotate_left(offsets[held.start] as usize);
            assert!(turned[0] == chosen && turned[1] == pairs, "{case:?} from {held:?} on");
            assert!((0..pairs.len()).all(|place| turned[2][pairs[place] as usize] as usize == place), "{case:?}");
            for expert in held.clone() {
                assert_eq!(turned[3][expert - held.start], offsets[expert] - offsets[held.start], "{case:?} {expert}");
            }
            assert_eq!(turned[3][held.len()], offsets[held.end] - offsets[held.start], "{case:?}");
            assert_eq!(*turned[3].last().unwrap() as usize, pairs.len());
        }
    }
}

/// Launches a kernel on an operand and a result, with a count or without.
type Launch<'a> = &'a dyn Fn(&Queue, &Routed, View, View, Option<RowCount>);

/// What kernels that count rows do to the first rows of a matrix, without a count and with one: rows that are not there hold NaN
/// before and after.
fn compare(
    what: &str,
    case: [usize; 3],
    held: &std::ops::Range<usize>,
    [width, out_width]: [usize; 2],
    dtype: DType,
    launch: Launch,
) {
    let [tokens, _, k] = case;
    let rows = tokens * k.min(held.len());
    run(|queue| {
        let routed = route(queue, case, held.start);
        let count = queue.read_indices(&routed.offsets)[held.len()] as usize;
        let numbers = Random::new(4).numbers(rows * width, dtype);
        let here: Vec<f32> =
            numbers.iter().enumerate().map(|(i, x)| if i / width < count { *x } else { f32::NAN }).collect();
        let [whole, some] = [&numbers, &here].map(|numbers| queue.floats(rows, width, dtype, numbers));
        let outs = [0, 1].map(|_| queue.floats(rows, out_width, dtype, &vec![f32::NAN; rows * out_width]));
        launch(queue, &routed, whole.view(), outs[0].view(), None);
        let there = routed.count(held.len());
        launch(queue, &routed, some.view(), outs[1].view(), Some(there));
        let [expected, found] = outs.each_ref().map(|out| queue.read(out));
        let end = count * out_width;
        assert!(count > 0 && expected[..end] == found[..end], "{what}, {case:?} {held:?}: other numbers");
        assert!(found[end..].iter().all(|x| x.is_nan()), "{what}, {case:?} {held:?}: rows that are not there");
        outs.into()
    });
}

#[test]
fn rows_of_other_experts_are_left_alone() {
    for (case, held) in CASES {
        for (width, dtype) in WIDTHS.into_iter().flat_map(|width| DTYPES.map(|dtype| (width, dtype))) {
            let k = case[2];
            let compare = |what: &str, widths, launch: Launch| {
                compare(what, case, &held, widths, dtype, launch);
            };
            compare("GatherPairs", [width, width], &|queue, routed, _, out, count| {
                let x = queue.floats(case[0], width, dtype, &Random::new(5).numbers(case[0] * width, dtype));
                let pairs = routed.pairs.view().col_range(0..out.rows);
                let weights = Some(routed.weights.view());
                queue.launch(GatherPairs { x: x.view(), pairs, chosen_per_token: k, weights, count, out });
            });
            // Without a count there must be a weight for each row.
            if k <= held.len() {
                compare("ScalePairs", [width, width], &|queue, routed, x, out, count| {
                    let (pairs, weights) = (Some(routed.pairs.view()), routed.weights.view());
                    queue.launch(ScalePairs { x, pairs, count, weights, out });
                });
            }
            let activation = Activation::Silu;
            compare("Gated", [2 * width, width], &|queue, _, x, out, count| {
                let [gate, up] = [x.col_range(0..width), x.col_range(width..2 * width)];
                queue.launch(Gated { activation, gate, up, out, count });
            });
            compare("GatedBackward", [3 * width, 2 * width], &|queue, _, x, out, count| {
                let [gate, up, dout] = [0, 1, 2].map(|i| x.col_range(i * width..(i + 1) * width));
                let [dgate, dup] = [0, 1].map(|i| out.col_range(i * width..(i + 1) * width));
                queue.launch(GatedBackward { activation, gate, up, dout, dgate, dup, count });
            });
            let limit = 0.5;
            compare("ClampedGate", [2 * width, width], &|queue, _, x, out, count| {
                queue.launch(ClampedGate { x, limit, out, count });
            });
            compare("ClampedGateBackward", [3 * width, 2 * width], &|queue, _, x, dx, count| {
                let (x, dout) = (x.col_range(0..2 * width), x.col_range(2 * width..3 * width));
                queue.launch(ClampedGateBackward { x, limit, dout, dx, count });
            });
        }
    }
}

#[test]
fn sums_and_dots_are_those_of_the_pairs_that_are_here() {
    for (case, held) in CASES {
        let [tokens, _, k] = case;
        let (rows, width) = (tokens * k.min(held.len()), 70);
        for (dtype, accumulate) in
            DTYPES.into_iter().flat_map(|dtype| [false, true].map(|accumulate| (dtype, accumulate)))
        {
            let numbers = Random::new(6).numbers(rows * width, dtype);
            let before = Random::new(7).numbers(tokens * width, DType::F32);
            run(|queue| {
                let routed = route(queue, case, held.start);
                let there = routed.count(held.len());
                let count = queue.read_indices(&routed.offsets)[held.len()] as usize;
                let poisoned = numbers.iter().enumerate().map(|(i, x)| if i / width < count { *x } else { f32::NAN });
                let x = queue.floats(rows, width, dtype, &poisoned.collect::<Vec<f32>>());
                let out = queue.floats(tokens, width, DType::F32, &before);
                let dots = queue.floats(tokens, k, DType::F32, &vec![5.0; tokens * k]);
                let (places, weights, x) = (routed.places.view(), Some(routed.weights.view()), x.view());
                queue.launch(CombinePairs { x, places, count: Some(there), weights, out: out.view(), accumulate });
                let pairs = Some(routed.pairs.view().col_range(0..rows));
                queue.launch(PairDots { a: x, b: x, pairs, count: Some(there), out: dots.view() });
                let places = queue.read_indices(&routed.places);
                let weights = queue.read(&routed.weights);
                let (found, found_dots) = (queue.read(&out), queue.read(&dots));
                for pair in 0..tokens * k {
                    let place = places[pair] as usize;
                    if place >= count {
                        assert_eq!(found_dots[pair], 5.0, "{case:?} {held:?}: a pair that is not here");
                        continue;
                    }
                    let row = &numbers[place * width..][..width];
                    let dot: f32 = row.iter().map(|x| x * x).sum();
                    assert!(
                        (found_dots[pair] - dot).abs() < 1e-3 * dot,
                        "{case:?} {held:?}: {} {dot}",
                        found_dots[pair]
                    );
                }
                for (token, col) in (0..tokens).flat_map(|token| (0..width).map(move |col| (token, col))) {
                    let begin = if accumulate { before[token * width + col] } else { 0.0 };
                    let here = (token * k..(token + 1) * k).filter(|&pair| (places[pair] as usize) < count);
                    let summands = here.map(|pair| weights[pair] * numbers[places[pair] as usize * width + col]);
                    let (sum, found) = (begin + summands.sum::<f32>(), found[token * width + col]);
                    assert!((sum - found).abs() < 1e-4, "{case:?} {held:?} {dtype:?}: {found} instead of {sum}");
                }
                vec![out, dots]
            });
        }
    }
}
