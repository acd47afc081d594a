//! Attention and its gradients against a plain twin in f64.

#[path = "support/scores.rs"]
mod scores;
mod support;
#[path = "support/attention.rs"]
mod twin;

use evenkeel_device::kernel::{Attention, AttentionBackward, Mask, Pairs, Rotary, ScoreChanges, Segments};
use evenkeel_device::{DType, Heads, Tensor};
use scores::{ALL_CHANGES, Changes, EVERYTHING, UNCHANGED};
use support::{DTYPES, assert_close, rounded, run, tolerance};
use twin::{Case, Lie};

fn masks() -> Vec<Mask> {
    let windows = [None, Some(1), Some(5), Some(1000)];
    [true, false].into_iter().flat_map(|causal| windows.map(|window| Mask { causal, window })).collect()
}

#[test]
fn every_mask_segmentation_grouping_and_layout_agrees_with_the_plain_formulas() {
    let segmentations = [vec![0, 75], vec![0, 1, 34, 34, 97, 98, 111]];
    let groupings = [(2, 2, Lie::Packed), (4, 2, Lie::Packed), (3, 1, Lie::Packed), (2, 2, Lie::Interleaved)];
    for dtype in DTYPES {
        for mask in masks() {
            for offsets in &segmentations {
                for (heads, key_heads, lie) in groupings {
                    Case {
                        heads,
                        key_heads,
                        dim: 12,
                        offsets: offsets.clone(),
                        mask,
                        lie,
                        dtype,
                        dropout: None,
                        changes: UNCHANGED,
                    }
                    .check();
                }
            }
        }
    }
}

#[test]
fn attention_and_rotation_of_no_heads_do_nothing() {
    for dtype in DTYPES {
        let results = run(|queue| {
            let tokens = 5;
            let untouched = vec![7.0; 5 * 12];
            let [around, logsum] = [dtype, DType::F32].map(|dtype| queue.floats(tokens, 12, dtype, &untouched));
            let table = queue.floats(8, 4, DType::F32, &[1.0; 32]);
            // Side by side, and in a fused projection.
            for heads in
                [|x: &Tensor| Heads::packed(&x.col_range(3..3), 0), |x: &Tensor| Heads::strided(x, 4, 0, 4, 12)]
            {
                let x = heads(&around);
                let none = Heads::packed(&around.col_range(0..0), 0);
                let segments = Segments::uniform(1, tokens);
                let mask = Mask { causal: true, window: None };
                let scale = 1.0;
                let logsum = logsum.col_range(0..0).view();
                let dropout = None;
                let q = x;
                let k = x;
                let v = x;
                let out = none;
                queue.launch(Attention {
                    q,
                    k,
                    v,
                    out,
                    logsum,
                    segments: segments.clone(),
                    mask,
                    scale,
                    dropout,
                    scores: ScoreChanges::default(),
                });
                let [dout, dq, dk, dv] = [none, x, x, x];
                queue.launch(AttentionBackward {
                    q,
                    k,
                    v,
                    out,
                    logsum,
                    dout,
                    dq,
                    dk,
                    dv,
                    segments,
                    mask,
                    scale,
                    dropout,
                    scores: ScoreChanges::default(),
                    dsinks: None,
                });
                let rotated = Heads::strided(&around, 4, 0, 4, 12);
                let positions = queue.indices(&[0, 1, 2, 3, 4]);
                let (table, positions) = (table.view(), positions.view());
                queue.launch(Rotary { x: rotated, pairs: Pairs::Halves, table, positions, inverse: false });
            }
            vec![around, logsum]
        });
        assert!(results.concat().iter().all(|&x| x == 7.0), "{dtype:?}");
    }
}

#[test]
fn every_head_dimension_up_to_512_works() {
    for dtype in DTYPES {
        for dim in [1, 10, 16, 31, 32, 48, 64, 80, 96, 100, 128, 160, 256, 320, 512] {
            for lie in [Lie::Packed, Lie::Interleaved] {
                let mask = Mask { causal: true, window: None };
                Case {
                    heads: 2,
                    key_heads: 2,
                    dim,
                    offsets: vec![0, 40, 53],
                    mask,
                    lie,
                    dtype,
                    dropout: None,
                    changes: UNCHANGED,
                }
                .check();
            }
        }
    }
}

#[test]
fn long_segments_agree_whichever_way_the_work_is_divided() {
    let causal = Mask { causal: true, window: None };
    let windowed = Mask { causal: false, window: Some(70) };
    for (heads, key_heads, offsets, mask) in [
        // One long segment: its query blocks are dealt out to many tasks.
        (1, 1, vec![0, 701], causal),
        (1, 1, vec![0, 650], windowed),
        (2, 1, vec![0, 333, 343], causal),
        // Enough heads and segments for a task each.
        (16, 16, vec![0, 150, 300], causal),
        // So many query heads that a block of queries is one tile of each.
        (16, 2, vec![0, 130], windowed),
    ] {
        for (dim, lie, dtype) in [(16, Lie::Packed, DType::F32), (40, Lie::Between, DType::Bf16)] {
            Case {
                heads,
                key_heads,
                dim,
                offsets: offsets.clone(),
                mask,
                lie,
                dtype,
                dropout: None,
                changes: UNCHANGED,
            }
            .check();
        }
    }
}

#[test]
fn a_share_of_the_heads_in_groups_of_any_size_agrees() {
    let causal = Mask { causal: true, window: None };
    let windowed = Mask { causal: true, window: Some(50) };
    for dtype in DTYPES {
        for (heads, key_heads, dim, mask) in [
            (3, 1, 64, causal),
            (5, 1, 48, windowed),
            (6, 2, 24, causal),
            (7, 1, 80, Mask { causal: false, window: None }),
            (12, 4, 33, windowed),
            (9, 3, 128, causal),
        ] {
            let offsets = vec![0, 7, 170, 171, 260];
            Case { heads, key_heads, dim, offsets, mask, lie: Lie::Between, dtype, dropout: None, changes: UNCHANGED }
                .check();
        }
    }
}

#[test]
fn segments_too_long_to_keep_sums_for_agree() {
    for (heads, key_heads, dim, offsets, mask) in [
        (1, 1, 256, vec![0, 2500], Mask { causal: true, window: Some(600) }),
        (2, 1, 250, vec![0, 30, 2100, 2200], Mask { causal: false, window: Some(90) }),
    ] {
        for dtype in DTYPES {
            Case {
                heads,
                key_heads,
                dim,
                offsets: offsets.clone(),
                mask,
                lie: Lie::Packed,
                dtype,
                dropout: None,
                changes: UNCHANGED,
            }
            .check();
        }
    }
}

#[test]
fn every_change_of_scores_agrees_with_the_plain_formulas() {
    let segmentations = [vec![0, 75], vec![0, 1, 34, 34, 97, 98, 111]];
    let groupings = [(4, 2, Lie::Packed), (5, 1, Lie::Between), (3, 3, Lie::Interleaved)];
    for (number, changes) in ALL_CHANGES.into_iter().enumerate() {
        for mask in masks() {
            for dtype in DTYPES {
                let (heads, key_heads, lie) = groupings[number % groupings.len()];
                for offsets in segmentations.clone() {
                    Case { heads, key_heads, dim: 12, offsets, mask, lie, dtype, dropout: None, changes }.check();
                }
            }
        }
    }
}

#[test]
fn changed_scores_of_every_head_dimension_agree() {
    let causal = Mask { causal: true, window: None };
    let windowed = Mask { causal: false, window: Some(21) };
    for dtype in DTYPES {
        for dim in [1, 10, 31, 64, 80, 100, 128, 160, 256, 320, 512] {
            for (mask, lie) in [(causal, Lie::Between), (windowed, Lie::Packed)] {
                let offsets = vec![0, 150, 193];
                let changes = EVERYTHING;
                Case { heads: 4, key_heads: 2, dim, offsets, mask, lie, dtype, dropout: None, changes }.check();
            }
        }
    }
}

#[test]
fn changed_scores_agree_whichever_way_the_work_is_divided() {
    let causal = Mask { causal: true, window: None };
    let windowed = Mask { causal: false, window: Some(70) };
    let uneven = (0..40).map(|i| i * (i + 9) / 2).collect();
    for (heads, key_heads, dim, offsets, mask) in [
        // One long segment: its query blocks are dealt out to many tasks.
        (1, 1, 16, vec![0, 701], causal),
        (2, 1, 40, vec![0, 333, 343], windowed),
        (16, 2, 64, vec![0, 130], causal),
        (7, 1, 80, vec![0, 7, 170, 171, 260], Mask { causal: false, window: None }),
        // Short segments, enough to fill a GPU with a block for each.
        (4, 2, 64, uneven, causal),
        (2, 2, 56, (0..40).map(|i| i * 29).collect(), Mask { causal: true, window: Some(140) }),
        (6, 2, 64, vec![0, 129, 130, 500, 756].into_iter().chain((1..40).map(|i| 756 + i * 3)).collect(), windowed),
        // Too long to keep sums for: scores are computed by keys and by queries.
        (2, 1, 250, vec![0, 30, 2100, 2200], windowed),
    ] {
        for (dtype, changes) in [
            (DType::F32, EVERYTHING),
            (DType::Bf16, EVERYTHING),
            (DType::Bf16, Changes { sinks: Some(-1.0), ..UNCHANGED }),
        ] {
            let lie = Lie::Between;
            let offsets = offsets.clone();
            Case { heads, key_heads, dim, offsets, mask, lie, dtype, dropout: None, changes }.check();
        }
    }
}

#[test]
fn a_sink_far_above_or_below_the_scores_agrees() {
    for dtype in DTYPES {
        for sink in [-1e4, -60.0, 30.0] {
            let mask = Mask { causal: true, window: None };
            let changes = Changes { sinks: Some(sink), ..UNCHANGED };
            let (offsets, lie) = (vec![0, 100, 177], Lie::Packed);
            let case = Case { heads: 3, key_heads: 1, dim: 24, offsets, mask, lie, dtype, dropout: None, changes };
            let operands = case.operands(5);
            let results = case.compute(&operands);
            let [out, logsum] = case.plain_forward(&operands);
            let gradients = case.plain_backward(&operands, &results[0]);
            assert_close(&format!("logsum of {case:?}"), &results[1], &logsum, tolerance(DType::F32));
            // A difference of thirty has an error of its own, which exponentials multiply.
            let tolerance = tolerance(dtype).max(1e-5);
            let expected = [&out, &gradients[0], &gradients[1], &gradients[2]];
            for ((name, which), expected) in ["out", "dq", "dk", "dv"].into_iter().zip([0, 2, 3, 4]).zip(expected) {
                assert_close(&format!("{name} of {case:?}"), &results[which], expected, tolerance);
            }
        }
    }
}

#[test]
fn a_sink_of_minus_infinity_is_none() {
    let mask = Mask { causal: true, window: None };
    for dtype in DTYPES {
        let (offsets, lie) = (vec![0, 100, 177], Lie::Packed);
        let changes = UNCHANGED;
        let none = Case { heads: 4, key_heads: 2, dim: 24, offsets, mask, lie, dtype, dropout: None, changes };
        let infinite = Case { changes: Changes { sinks: Some(f32::NEG_INFINITY), ..UNCHANGED }, ..none.clone() };
        let operands = none.operands(6);
        let (expected, actual) = (none.compute(&operands), infinite.compute(&operands));
        for (which, name) in ["out", "logsum", "dq", "dk", "dv"].into_iter().enumerate() {
            let expected = support::wide(&expected[which]);
            assert_close(&format!("{name}, {dtype:?}"), &actual[which], &expected, tolerance(dtype));
        }
        assert_eq!(actual[5], [0.0; 4]);
    }
}

#[test]
fn no_tokens_and_empty_segments_are_nothing_to_do() {
    for offsets in [vec![0], vec![0, 0], vec![0, 0, 0], vec![0, 0, 2, 2]] {
        let mask = Mask { causal: true, window: None };
        Case {
            heads: 2,
            key_heads: 1,
            dim: 8,
            offsets,
            mask,
            lie: Lie::Packed,
            dtype: DType::F32,
            dropout: None,
            changes: UNCHANGED,
        }
        .check();
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let mask = Mask { causal: true, window: None };
    let case = Case {
        heads: 1,
        key_heads: 1,
        dim: 64,
        offsets: vec![0, 100],
        mask,
        lie: Lie::Packed,
        dtype: DType::F32,
        dropout: None,
        changes: UNCHANGED,
    };
    let mut operands = case.operands(1);
    operands.q.iter_mut().for_each(|q| *q *= 64.0);
    let results = case.compute(&operands);
    let [out, _] = case.plain_forward(&operands);
    // ScoreChanges of a thousand have an error of their own, which exponentials multiply.
    assert_close("out", &results[0], &out, 1e-4);
    assert!(results.iter().flatten().all(|value| value.is_finite()));
}

#[test]
fn scores_that_rise_from_key_to_key_are_weighed_against_the_highest() {
    for (causal, dtype) in [(true, DType::F32), (true, DType::Bf16), (false, DType::F32), (false, DType::Bf16)] {
        let mask = Mask { causal, window: None };
        let case = Case {
            heads: 2,
            key_heads: 1,
            dim: 64,
            offsets: vec![0, 310],
            mask,
            lie: Lie::Packed,
            dtype,
            dropout: None,
            changes: UNCHANGED,
        };
        let mut operands = case.operands(9);
        // ScoreChanges of a hundred and more at the end, some ten above those of the block before.
        operands.q.iter_mut().for_each(|q| *q = q.abs());
        for (i, k) in operands.k.iter_mut().enumerate() {
            *k = rounded((1.0 + k.abs()) * (i / case.dim) as f32 / 60.0, dtype);
        }
        let results = case.compute(&operands);
        let [out, logsum] = case.plain_forward(&operands);
        assert_close(&format!("logsum of {case:?}"), &results[1], &logsum, tolerance(DType::F32));
        // ScoreChanges of a hundred have an error of their own, which exponentials multiply.
        assert_close(&format!("out of {case:?}"), &results[0], &out, tolerance(dtype).max(1e-4));
    }
}
