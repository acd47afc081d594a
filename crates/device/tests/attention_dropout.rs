//! Attention with dropout against the plain twin. The dropped weights depend on seed and place alone.

#[path = "support/scores.rs"]
mod scores;
mod support;
#[path = "support/attention.rs"]
mod twin;

use evenkeel_device::DType;
use evenkeel_device::kernel::{AttentionDropout, Mask};
use scores::{Changes, EVERYTHING, UNCHANGED};
use support::{DTYPES, tolerance};
use twin::{Case, Lie, Operands, distance, norm};

const DROPOUT: AttentionDropout =
    AttentionDropout { probability: 0.3, seed: 0xfeed_0000_0000_0005, first_head: 6, first_token: 1 << 33 };
const CAUSAL: Mask = Mask { causal: true, window: None };
const ALL: Mask = Mask { causal: false, window: None };

#[test]
fn every_mask_segmentation_grouping_and_dimension_agrees_with_the_plain_formulas() {
    let windows = [None, Some(1), Some(21), Some(1000)];
    let masks = [true, false].into_iter().flat_map(|causal| windows.map(|window| Mask { causal, window }));
    for (number, mask) in masks.enumerate() {
        for (offsets, dims) in [(vec![0, 75], [12, 64]), (vec![0, 1, 34, 34, 97, 98, 111], [33, 7])] {
            for (heads, key_heads, lie) in [(4, 2, Lie::Packed), (3, 1, Lie::Between), (2, 2, Lie::Interleaved)] {
                for dtype in DTYPES {
                    let offsets = offsets.clone();
                    let dim = dims[number % 2];
                    Case {
                        heads,
                        key_heads,
                        dim,
                        offsets,
                        mask,
                        lie,
                        dtype,
                        dropout: Some(DROPOUT),
                        changes: UNCHANGED,
                    }
                    .check();
                }
            }
        }
    }
}

#[test]
fn every_division_of_the_work_drops_the_same() {
    for (heads, key_heads, dim, offsets, mask) in [
        // One long segment: its query blocks are dealt out to many tasks.
        (1, 1, 16, vec![0, 701], CAUSAL),
        (16, 2, 40, vec![0, 130], Mask { causal: false, window: Some(70) }),
        (7, 1, 80, vec![0, 7, 170, 171, 260], ALL),
        // Short segments, enough to fill a GPU with a block for each.
        (4, 2, 64, (0..40).map(|i| i * (i + 9) / 2).collect(), CAUSAL),
        (2, 2, 56, (0..40).map(|i| i * 29).collect(), Mask { causal: true, window: Some(140) }),
        (2, 2, 64, vec![0, 129, 130, 500, 756].into_iter().chain((1..40).map(|i| 756 + i * 3)).collect(), ALL),
        // Too long to keep sums for: scores are computed by keys and by queries.
        (2, 1, 250, vec![0, 30, 2100, 2200], Mask { causal: false, window: Some(90) }),
    ] {
        for (dtype, probability) in [(DType::F32, 0.1), (DType::Bf16, 0.6)] {
            let lie = Lie::Packed;
            let dropout = Some(AttentionDropout { probability, ..DROPOUT });
            Case { heads, key_heads, dim, offsets: offsets.clone(), mask, lie, dtype, dropout, changes: UNCHANGED }
                .check();
        }
    }
}

#[test]
fn changed_scores_are_dropped_alike() {
    let windowed = Mask { causal: true, window: Some(21) };
    for dtype in DTYPES {
        for (heads, key_heads, dim, offsets, mask) in [
            (4, 2, 12, vec![0, 1, 34, 34, 97, 98, 111], CAUSAL),
            (7, 1, 80, vec![0, 7, 170, 171, 260], ALL),
            (5, 1, 160, vec![0, 75], windowed),
            // Enough to fill a GPU with a block for each.
            (4, 2, 64, (0..40).map(|i| i * (i + 9) / 2).collect(), CAUSAL),
            (2, 2, 64, (0..40).map(|i| i * 29).collect(), ALL),
        ] {
            let dropout = Some(DROPOUT);
            let (lie, changes) = (Lie::Between, EVERYTHING);
            Case { heads, key_heads, dim, offsets, mask, lie, dtype, dropout, changes }.check();
        }
    }
}

#[test]
fn the_plain_gradients_are_the_slopes_of_the_plain_forward() {
    for changes in [UNCHANGED, Changes { cap: Some(0.8), slopes: true, sinks: Some(-0.5) }] {
        let case = Case {
            heads: 4,
            key_heads: 2,
            dim: 3,
            offsets: vec![0, 5, 7],
            mask: Mask { causal: true, window: Some(3) },
            lie: Lie::Packed,
            dtype: DType::F32,
            dropout: Some(DROPOUT),
            changes,
        };
        check_slopes(&case);
    }
}

fn check_slopes(case: &Case) {
    let operands = case.operands(4);
    let out: Vec<f32> = case.plain_forward(&operands)[0].iter().map(|&x| x as f32).collect();
    let gradients = case.plain_backward(&operands, &out);
    let value = |case: &Case, operands: &Operands| -> f64 {
        let [out, _] = case.plain_forward(operands);
        out.iter().zip(&operands.dout).map(|(out, dout)| out * *dout as f64).sum()
    };
    let step = 1.0 / 1024.0;
    let assert_slope = |what: &str, moved: &dyn Fn(f32) -> f64, gradient: f64| {
        let slope = (moved(step) - moved(-step)) / (2.0 * step as f64);
        assert!((slope - gradient).abs() < 1e-5, "{what} of {case:?}: {gradient}, slope {slope}");
    };
    type Field = fn(&mut Operands) -> &mut Vec<f32>;
    let fields: [Field; 3] = [|operands| &mut operands.q, |operands| &mut operands.k, |operands| &mut operands.v];
    for (which, field) in fields.into_iter().enumerate() {
        for (i, &gradient) in gradients[which].iter().enumerate() {
            let moved = |by: f32| {
                let mut moved = operands.clone();
                field(&mut moved)[i] += by;
                value(case, &moved)
            };
            assert_slope(&format!("operand {which}, number {i}"), &moved, gradient);
        }
    }
    // All heads' sinks move together.
    if let Some(sink) = case.changes.sinks {
        let moved = |by: f32| {
            let changes = Changes { sinks: Some(sink + by), ..case.changes };
            value(&Case { changes, ..case.clone() }, &operands)
        };
        assert_slope("sinks", &moved, gradients[3].iter().sum());
    }
}

/// The kept weights, a row for each query and head: with zero queries all weights are equal, and values from an identity matrix
/// show each weight by itself.
fn kept(tokens: usize, heads: usize, dropout: AttentionDropout, dtype: DType) -> Vec<Vec<bool>> {
    let lie = Lie::Packed;
    let offsets = vec![0, tokens];
    let case = Case {
        heads,
        key_heads: 1,
        dim: tokens,
        offsets,
        mask: ALL,
        lie,
        dtype,
        dropout: Some(dropout),
        changes: UNCHANGED,
    };
    let zeros = vec![0.0; tokens * heads * tokens];
    let identity = (0..tokens * tokens).map(|i| if i / tokens == i % tokens { 1.0 } else { 0.0 }).collect();
    let results =
        case.compute(&Operands { q: zeros.clone(), k: zeros[..tokens * tokens].to_vec(), v: identity, dout: zeros });
    let whole = 1.0 / tokens as f32 / (1.0 - dropout.probability);
    for &weight in &results[0] {
        let is_right = weight == 0.0 || (weight / whole - 1.0).abs() < 2.0 * tolerance(dtype) as f32;
        assert!(is_right, "a weight of {weight}, expected 0 or {whole}");
    }
    for &logsum in &results[1] {
        assert!((logsum - (tokens as f32).ln()).abs() < 1e-5, "the sum of weights is {}", logsum.exp());
    }
    results[0].chunks_exact(tokens).map(|row| row.iter().map(|&weight| weight > 0.0).collect()).collect()
}

#[test]
fn the_right_share_is_kept_and_heads_queries_seeds_and_keys_are_independent() {
    let (tokens, heads) = (250, 4);
    let share_of = |hits: usize, all: usize| hits as f64 / all as f64;
    for (probability, dtype) in [(0.1, DType::F32), (0.5, DType::Bf16), (0.9, DType::F32)] {
        let dropout = AttentionDropout { probability, ..DROPOUT };
        let rows = kept(tokens, heads, dropout, dtype);
        let keep = 1.0 - probability as f64;
        let all = tokens * heads * tokens;
        let deviation = |share: f64, count: usize| (share * (1.0 - share) / count as f64).sqrt();
        let share = share_of(rows.iter().flatten().filter(|&&kept| kept).count(), all);
        assert!((share - keep).abs() < 5.0 * deviation(keep, all), "{share} kept of {probability}");
        // How often two that differ in one coordinate are both kept.
        let other = kept(tokens, heads, AttentionDropout { seed: dropout.seed + 1, ..dropout }, dtype);
        let pairs = |a: &[Vec<bool>], b: &[Vec<bool>], lag: usize| -> f64 {
            let both = a.iter().zip(b).flat_map(|(a, b)| a.iter().zip(&b[lag..]));
            let (hits, count) = both.fold((0, 0), |(hits, count), (a, b)| (hits + usize::from(*a && *b), count + 1));
            (share_of(hits, count) - keep * keep).abs() / deviation(keep * keep, count)
        };
        for (what, distance) in [
            ("heads", pairs(&rows, &rows[1..], 0)),
            ("queries", pairs(&rows, &rows[heads..], 0)),
            ("keys", pairs(&rows, &rows, 1)),
            ("keys that share a word", pairs(&rows, &rows, 8)),
            ("seeds", pairs(&rows, &other, 0)),
        ] {
            assert!(distance < 5.0, "neighbouring {what} are both kept {distance} deviations off, {probability}");
        }
    }
}

#[test]
fn a_probability_of_zero_drops_nothing() {
    for dtype in DTYPES {
        let none = Case {
            heads: 4,
            key_heads: 2,
            dim: 20,
            offsets: vec![0, 33, 90],
            mask: CAUSAL,
            lie: Lie::Packed,
            dtype,
            dropout: None,
            changes: UNCHANGED,
        };
        let zero = Case { dropout: Some(AttentionDropout { probability: 0.0, ..DROPOUT }), ..none.clone() };
        let operands = none.operands(3);
        assert_eq!(none.compute(&operands), zero.compute(&operands));
    }
}

/// Some tokens and heads of a tensor of heads.
fn part(x: &[f32], all: usize, tokens: std::ops::Range<usize>, heads: std::ops::Range<usize>, dim: usize) -> Vec<f32> {
    let rows = tokens.flat_map(|token| heads.clone().map(move |head| token * all + head));
    rows.flat_map(|row| x[row * dim..(row + 1) * dim].iter().copied()).collect()
}

/// Computes some segments and heads by themselves, and compares with their part of the whole.
fn check_part(whole: &Case, segments: std::ops::Range<usize>, key_heads: std::ops::Range<usize>) {
    let (group, dim) = (whole.heads / whole.key_heads, whole.dim);
    let tokens = whole.offsets[segments.start]..whole.offsets[segments.end];
    let heads = key_heads.start * group..key_heads.end * group;
    let dropout = whole.dropout.map(|dropout| AttentionDropout {
        first_head: dropout.first_head + heads.start as u64,
        first_token: dropout.first_token + tokens.start as u64,
        ..dropout
    });
    let offsets = whole.offsets[segments.start..=segments.end].iter().map(|offset| offset - tokens.start).collect();
    let apart = Case { heads: heads.len(), key_heads: key_heads.len(), offsets, dropout, ..whole.clone() };
    let operands = whole.operands(8);
    let of_queries = |x: &[f32]| part(x, whole.heads, tokens.clone(), heads.clone(), dim);
    let of_keys = |x: &[f32]| part(x, whole.key_heads, tokens.clone(), key_heads.clone(), dim);
    let Operands { q, k, v, dout } = &operands;
    let part_operands = Operands { q: of_queries(q), k: of_keys(k), v: of_keys(v), dout: of_queries(dout) };
    let (together, apart_results) = (whole.compute(&operands), apart.compute(&part_operands));
    let what = format!("{tokens:?}, {heads:?} of {whole:?}");
    assert_eq!(apart_results[0], of_queries(&together[0]), "out of {what}");
    for (which, expected) in [(2, of_queries(&together[2])), (3, of_keys(&together[3])), (4, of_keys(&together[4]))] {
        // Tasks may be divided otherwise, and then sums have another order.
        let expected: Vec<f64> = support::wide(&expected);
        let error = distance(&apart_results[which], &expected) / norm(&expected);
        assert!(error <= 2.0 * tolerance(whole.dtype), "result {which} of {what}: error {error:.1e}");
    }
}

#[test]
fn some_segments_or_heads_by_themselves_drop_what_the_whole_drops() {
    for (dtype, mask) in [(DType::F32, CAUSAL), (DType::Bf16, CAUSAL), (DType::F32, ALL)] {
        let offsets = vec![0, 40, 41, 130, 210];
        let dropout = Some(DROPOUT);
        let whole = Case {
            heads: 6,
            key_heads: 3,
            dim: 24,
            offsets,
            mask,
            lie: Lie::Packed,
            dtype,
            dropout,
            changes: UNCHANGED,
        };
        for (segments, key_heads) in [(0..2, 0..3), (2..4, 0..3), (0..4, 0..1), (0..4, 1..3), (3..4, 2..3)] {
            check_part(&whole, segments, key_heads);
        }
    }
}

#[test]
fn query_heads_that_share_a_key_head_may_be_apart() {
    for dtype in DTYPES {
        let offsets = vec![0, 50, 77];
        let dropout = Some(DROPOUT);
        let lie = Lie::Packed;
        let whole =
            Case { heads: 4, key_heads: 1, dim: 16, offsets, mask: CAUSAL, lie, dtype, dropout, changes: UNCHANGED };
        let operands = whole.operands(2);
        let tokens = whole.tokens();
        let together = whole.compute(&operands);
        let mut summed = [vec![0.0; operands.k.len()], vec![0.0; operands.k.len()]];
        for heads in [0..1, 1..4] {
            let of_queries = |x: &[f32]| part(x, 4, 0..tokens, heads.clone(), whole.dim);
            let dropout = Some(AttentionDropout { first_head: DROPOUT.first_head + heads.start as u64, ..DROPOUT });
            let apart = Case { heads: heads.len(), dropout, ..whole.clone() };
            let (q, dout) = (of_queries(&operands.q), of_queries(&operands.dout));
            let results = apart.compute(&Operands { q, dout, ..operands.clone() });
            assert_eq!(results[0], of_queries(&together[0]), "out of {heads:?}");
            for (sum, part) in summed.iter_mut().zip(&results[3..]) {
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += *part as f64);
            }
        }
        for (sum, together) in summed.iter().zip(&together[3..]) {
            assert!(distance(together, sum) <= 2.0 * tolerance(dtype) * norm(sum));
        }
    }
}
