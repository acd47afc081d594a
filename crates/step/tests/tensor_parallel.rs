//! A model cut over ranks against the whole on one: every loss and every gradient.

#[path = "../../../golden/cases.rs"]
mod cases;
mod support;

use cases::CASES;
use evenkeel_comm::Options;
use evenkeel_device::kernel::Segments;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{Batch, Cut, Model, Parameters, ZeroSharding};
use evenkeel_step::schedule::{Arrangement, NONE, OASES};
use support::golden;
use support::ranks::{Origin, TOLERANCE, compare, dropping, on_one_rank, on_ranks};

/// A random Llama on so many tokens.
struct Random {
    vocabulary: usize,
    tokens: usize,
}

impl Origin for Random {
    fn model(&self) -> Model {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": self.vocabulary,
            "tie_word_embeddings": true, "initializer_range": 0.5,
        });
        Model::from_json(&config).unwrap()
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        Parameters::random(shard, dtype, split, 3, queue)
    }

    fn micros(&self, _: &Model, _: usize, _: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        let ids: Vec<u32> = (0..self.tokens).map(|token| (token * 7919 % self.vocabulary) as u32).collect();
        vec![vec![Batch::tokens(queue, &ids, &ids, Segments::uniform(1, self.tokens))]]
    }
}

fn cuts(shards: usize) -> Vec<Cut> {
    let uneven: Vec<f64> = (0..shards).map(|shard| 1.0 + 0.7 * shard as f64).collect();
    let split = |cut: Cut| Cut { split_sequence: true, ..cut };
    let (even, uneven) = (Cut::even(shards), Cut::weighted(uneven));
    vec![even.clone(), uneven.clone(), split(even), split(uneven)]
}

#[test]
fn losses_and_every_gradient_equal_the_single_rank_for_every_cut() {
    for case in CASES {
        let whole = on_one_rank(case, DType::F32);
        // One of the models has three heads.
        let config = Model::open(&golden(case)).unwrap().config;
        for shards in (1..=4).filter(|&shards| shards <= config.heads) {
            let may_split = config.whole_parts(shards).is_empty();
            let cuts = cuts(shards).into_iter().filter(|cut| may_split || !cut.split_sequence);
            for (index, cut) in cuts.enumerate() {
                let arrangement = Arrangement::of([NONE, OASES][index % 2]);
                let ranks = on_ranks(case, &cut, DType::F32, arrangement, &Options::default());
                compare(&format!("{case}, {cut:?}, {arrangement:?}"), &whole, &ranks, TOLERANCE);
            }
        }
    }
}

#[test]
fn experts_that_shards_have_whole_make_no_difference() {
    let has_experts = |case: &&&str| Model::open(&golden(case)).unwrap().config.experts.is_some();
    for case in CASES.iter().filter(has_experts) {
        let whole = on_one_rank(*case, DType::F32);
        let config = Model::open(&golden(case)).unwrap().config;
        let may_split = |shards: usize| config.whole_parts(shards).is_empty();
        for cut in [2, 3]
            .into_iter()
            .flat_map(|shards| cuts(shards).into_iter().filter(move |cut| may_split(shards) || !cut.split_sequence))
        {
            let cut = Cut { whole_experts: true, ..cut };
            let ranks = on_ranks(*case, &cut, DType::F32, Arrangement::of(OASES).in_parts(2), &Options::default());
            compare(&format!("{case}, {cut:?}"), &whole, &ranks, TOLERANCE);
        }
    }
}

#[test]
fn a_head_in_several_chunks_and_fewer_tokens_than_ranks_make_no_difference() {
    for (origin, shards) in [
        (Random { vocabulary: 1 << 20, tokens: 20 }, 2),
        (Random { vocabulary: 50, tokens: 2 }, 4),
        (Random { vocabulary: 50, tokens: 1 }, 3),
    ] {
        let whole = on_one_rank(&origin, DType::F32);
        for cut in cuts(shards) {
            let ranks = on_ranks(&origin, &cut, DType::F32, Arrangement::default(), &Options::default());
            compare(&format!("{} tokens, {cut:?}", origin.tokens), &whole, &ranks, TOLERANCE);
        }
    }
}

/// A golden mixture of experts whose balance is a part of the loss.
struct Balanced(&'static str);

impl Origin for Balanced {
    fn model(&self) -> Model {
        let mut config = golden(self.0).config().clone();
        config["output_router_logits"] = true.into();
        config["router_aux_loss_coef"] = 0.5.into();
        Model::of_folder(&config, &golden(self.0)).unwrap()
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        self.0.parameters(shard, dtype, split, queue)
    }

    fn micros(&self, model: &Model, parts: usize, dtype: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        assert_eq!(parts, 1, "the balance is that of whole micro-batches");
        let balanced = |batch: Batch| batch.with_tallies(queue, &model.config, 0.5);
        let micros = self.0.micros(model, 1, dtype, queue).into_iter();
        micros.map(|parts| parts.into_iter().map(balanced).collect()).collect()
    }
}

#[test]
fn the_balance_among_experts_is_that_of_the_single_rank_for_every_cut() {
    for case in ["mixtral", "qwen3_moe", "gpt_oss"] {
        let whole = on_one_rank(&Balanced(case), DType::F32);
        for (shards, cut) in
            [2, 3].into_iter().flat_map(|shards| cuts(shards).into_iter().map(move |cut| (shards, cut)))
        {
            for cut in [Cut { whole_experts: true, ..cut.clone() }, cut] {
                let ranks = on_ranks(&Balanced(case), &cut, DType::F32, Arrangement::of(NONE), &Options::default());
                compare(&format!("{case} on {shards}, {cut:?}"), &whole, &ranks, TOLERANCE);
            }
        }
    }
}

#[test]
fn every_cut_drops_what_the_single_rank_drops() {
    for origin in dropping() {
        let whole = on_one_rank(&origin, DType::F32);
        for shards in [2, 4] {
            for (index, cut) in cuts(shards).into_iter().enumerate() {
                let arrangement = Arrangement { parts: 1 + index % 2, ..Arrangement::of([NONE, OASES][index / 2]) };
                let ranks = on_ranks(&origin, &cut, DType::F32, arrangement, &Options::default());
                compare(&format!("{}, {cut:?}, {arrangement:?}", origin.case), &whole, &ranks, TOLERANCE);
            }
        }
    }
}
