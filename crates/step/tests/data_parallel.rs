//! Replicas with and without split state, against one rank that computes on all of the data.

mod support;

use evenkeel_comm::Options;
use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{Batch, Cut, Model, Parameters, ZeroSharding};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, DEFAULT, NONE, OASES};
use support::golden;
use support::ranks::{Origin, TOLERANCE, Way, compare_gradients, dry_peak_bytes, kept_elements, on_one_rank, on_ranks};

/// Meshes, stages and schedules on up to eight ranks.
fn ways() -> Vec<(usize, bool, Way)> {
    let mut ways = Vec::new();
    for (dp, tp, split_sequence) in [(2, 1, false), (2, 2, false), (2, 2, true), (2, 4, true)] {
        for (zero, arrangement) in [
            (0, Arrangement::of(NONE)),
            (1, Arrangement::of(OASES).in_parts(2)),
            (2, Arrangement::of(NONE).in_parts(2)),
            (2, Arrangement::of(DEFAULT)),
            (3, Arrangement::of(NONE)),
            (3, Arrangement::of(OASES).in_parts(2)),
            (3, Arrangement::of(CROSS_PASS).in_parts(4)),
        ] {
            ways.push((tp, split_sequence, Way { dp, zero, ..arrangement.into() }));
        }
    }
    ways
}

#[test]
fn gradients_are_those_of_all_shares_for_every_mesh_stage_and_schedule() {
    for case in ["llama3", "gemma3", "gpt2", "qwen3_moe", "gpt_oss"] {
        let whole = on_one_rank(case, DType::F32);
        for (tp, split_sequence, way) in ways() {
            let cut = Cut { split_sequence, ..Cut::even(tp) };
            let ranks = on_ranks(case, &cut, DType::F32, way, &Options::default());
            let what = format!("{case}, tp {tp}, split {split_sequence}, {way:?}");
            compare_gradients(&what, &whole, &ranks, TOLERANCE);
        }
    }
}

#[test]
fn split_state_is_kept_once() {
    let elements: usize = Model::open(&golden("llama3")).unwrap().specs.iter().map(|spec| spec.len()).sum();
    for zero in 0..=3 {
        let way = Way { dp: 2, zero, ..Arrangement::default().into() };
        let ranks = on_ranks("llama3", &Cut::even(1), DType::F32, way, &Options::default());
        assert_eq!(kept_elements(&ranks), if zero == 0 { 2 * elements } else { elements }, "stage {zero}");
    }
}

/// A random Llama with so many layers that kept values take more memory than those in flight.
struct Deep;

impl Origin for Deep {
    fn model(&self) -> Model {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 16, "num_attention_heads": 4,
            "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": false,
        });
        Model::from_json(&config).unwrap()
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        Parameters::random(shard, dtype, split, 3, queue)
    }

    fn micros(&self, _: &Model, _: usize, _: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        let micro = |first: u32| Batch::tokens(queue, &[first, 1, 2], &[1, 2, 3], Segments::uniform(1, 3));
        (0..2).map(|first| vec![micro(first)]).collect()
    }
}

#[test]
fn memory_is_what_the_dry_run_says_and_falls_with_every_stage() {
    let mut before = u64::MAX;
    for zero in 0..=3 {
        let way = Way { dp: 2, zero, ..Arrangement::default().into() };
        let ranks = on_ranks(&Deep, &Cut::even(1), DType::F32, way, &Options::default());
        let expected = [0, 1].map(|rank| dry_peak_bytes(&Deep, &Cut::even(1), rank, way));
        assert_eq!([ranks[0].peak_bytes, ranks[1].peak_bytes], expected, "stage {zero}");
        // Stage 1 splits the optimizer's state, which is not here.
        let most = if zero == 1 { before } else { before / 8 * 7 };
        assert!(expected[0] <= most, "stage {zero}: {expected:?}, before {before}");
        before = expected[0];
    }
}
