//! Models with adapters, cut in every way, against one rank; model's tests compare that one with PEFT.

mod support;

use std::path::Path;

use evenkeel_comm::Options;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{
    AdapterFolder, AdapterValues, Batch, Cut, Dim, Model, Parameters, SHARES, Shard, ZeroSharding, widths_of,
};
use evenkeel_step::PipelineOrder;
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, NONE, OASES, SCHEDULES, Units};
use support::ranks::{
    Origin, Stages, TOLERANCE, Way, compare, compare_gradients, noisy, on_one_rank, on_ranks, on_working_ranks,
};

/// A golden adapter on its base.
#[derive(Clone, Copy)]
struct Adapted {
    case: &'static str,
    base: &'static str,
}

const ORIGINS: [Adapted; 18] = [
    Adapted { case: "llama_lora", base: "llama3" },
    Adapted { case: "qwen2_rslora", base: "qwen2" },
    Adapted { case: "gpt2_lora", base: "gpt2" },
    Adapted { case: "vit_lora_old", base: "vit" },
    Adapted { case: "llama_layers", base: "llama_odd" },
    Adapted { case: "llama_saved_tied", base: "llama3" },
    Adapted { case: "qwen2_saved_tied", base: "qwen2" },
    Adapted { case: "llama_dropout", base: "llama3" },
    Adapted { case: "gpt_oss_lora", base: "gpt_oss" },
    Adapted { case: "qwen3_moe_experts", base: "qwen3_moe" },
    Adapted { case: "gpt_oss_experts", base: "gpt_oss" },
    Adapted { case: "llama_dora", base: "llama2" },
    Adapted { case: "gemma3_dora", base: "gemma3" },
    Adapted { case: "gpt2_dora", base: "gpt2" },
    Adapted { case: "llama_qlora", base: "llama_nf4" },
    Adapted { case: "llama_qdora", base: "llama_nf4" },
    Adapted { case: "bert_lora", base: "bert" },
    Adapted { case: "roberta_lora", base: "roberta" },
];

impl Adapted {
    fn saved(&self) -> AdapterFolder {
        let package = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo or a bundle's script runs the tests");
        let path = Path::new(&package).join("../../golden/adapters").join(self.case);
        AdapterFolder::open(&path).expect("golden folders are sound")
    }
}

impl Origin for Adapted {
    fn model(&self) -> Model {
        self.base.model().adapted(self.saved().config).expect("golden adapters fit")
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        let (folder, saved) = (support::golden(self.base), self.saved());
        shard.load_adapted(&folder, &AdapterValues::Saved(&saved), dtype, split, queue).expect("golden adapters fit")
    }

    fn micros(&self, model: &Model, parts: usize, dtype: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        noisy(self.base.micros(model, parts, dtype, queue))
    }
}

/// Even and uneven cuts, with the stream whole and split. Three and four shards share the heads of keys and values.
fn cuts(shards: usize) -> Vec<Cut> {
    let uneven: Vec<f64> = (0..shards).map(|shard| 1.0 + 0.7 * shard as f64).collect();
    let split = |cut: Cut| Cut { split_sequence: true, ..cut };
    let (even, uneven) = (Cut::even(shards), Cut::weighted(uneven));
    vec![even.clone(), uneven.clone(), split(even), split(uneven)]
}

#[test]
fn every_cut_computes_the_gradients_of_one_rank() {
    for origin in ORIGINS {
        let one = on_one_rank(&origin, DType::F32);
        let has_experts = origin.model().config.experts.is_some();
        let cuts = [2, 3, 4].into_iter().flat_map(cuts);
        let of_experts = cuts.clone().filter(|_| has_experts).map(|cut| Cut { whole_experts: true, ..cut });
        for cut in cuts.chain(of_experts) {
            if origin.model().cut(&cut).is_err() {
                continue;
            }
            let ranks = on_ranks(&origin, &cut, DType::F32, Arrangement::default(), &Options::default());
            compare(&format!("{}, {cut:?}", origin.case), &one, &ranks, TOLERANCE);
        }
    }
}

#[test]
fn every_schedule_and_stage_of_zero_computes_the_gradients_of_one_rank() {
    for origin in ORIGINS {
        let one = on_one_rank(&origin, DType::F32);
        let units = [Units::All, Units::Mlp].map(|units| Arrangement::of(OASES).in_parts(2).recomputing(units));
        let arrangements = SCHEDULES.map(|schedule| Arrangement::of(schedule).in_parts(2)).into_iter().chain(units);
        for (index, arrangement) in arrangements.enumerate() {
            let cut = Cut { split_sequence: index % 2 == 0, ..Cut::weighted(vec![1.0, 1.7]) };
            let ranks = on_ranks(&origin, &cut, DType::F32, arrangement, &Options::default());
            compare(&format!("{}, tp 2, {arrangement:?}", origin.case), &one, &ranks, TOLERANCE);
        }
        let ways = [(2, 0, NONE), (2, 1, OASES), (2, 2, NONE), (2, 3, OASES), (2, 3, CROSS_PASS), (1, 3, NONE)];
        for (tp, zero, schedule) in ways {
            let way = Way { dp: 2, zero, ..Arrangement::of(schedule).into() };
            let ranks = on_ranks(&origin, &Cut::even(tp), DType::F32, way, &Options::default());
            compare_gradients(&format!("{}, tp {tp}, {way:?}", origin.case), &one, &ranks, TOLERANCE);
        }
    }
}

#[test]
fn every_order_of_stages_computes_the_gradients_of_one_rank() {
    for (index, origin) in ORIGINS.into_iter().enumerate() {
        let one = on_one_rank(&origin, DType::F32);
        let order = PipelineOrder::ALL[index % PipelineOrder::ALL.len()];
        let arrangement = Arrangement::of([NONE, OASES, CROSS_PASS][index % 3]);
        for (tp, dp, zero) in [(1, 1, 0), (2, 1, 0), (1, 2, 1)] {
            let stages = Some(Stages { pp: 2, order, shift: index % 2 });
            let way = Way { dp, zero, stages, ..arrangement.into() };
            let ranks = on_ranks(&origin, &Cut::even(tp), DType::F32, way, &Options::default());
            compare_gradients(&format!("{}, tp {tp}, {way:?}", origin.case), &one, &ranks, TOLERANCE);
        }
    }
}

#[test]
fn ranks_compute_adapted_units_for_one_another() {
    let cases = ["llama_lora", "qwen2_rslora", "gpt2_lora", "llama_dropout", "llama_dora", "gpt2_dora"];
    for origin in ORIGINS.into_iter().filter(|origin| cases.contains(&origin.case)) {
        let (one, model) = (on_one_rank(&origin, DType::F32), origin.model());
        let cut = Cut::even(2);
        let home = widths_of(&Shard::cut(&model.config, &cut).unwrap());
        let (ffn, groups) = (model.config.ffn, model.config.kv_heads);
        // The second time a group of heads is shared by samples.
        for (schedule, shared) in [(NONE, 0), (OASES, 0), (OASES, SHARES / 2)] {
            let head_shares = vec![SHARES * (groups - 1) + shared, SHARES - shared];
            let work = home.clone().with(Dim::Columns, vec![ffn - ffn / 4, ffn / 4]).with(Dim::Heads, head_shares);
            let arrangement = Arrangement::of(schedule).in_parts(2);
            let ranks = on_working_ranks(&origin, &cut, Some(&work), DType::F32, arrangement, &Options::default());
            let what = format!("{}, {arrangement:?}", origin.case);
            assert!(ranks.iter().any(|rank| rank.migrated.calls > 0), "{what}: nothing migrates");
            compare_gradients(&what, &one, &ranks, TOLERANCE);
        }
    }
}
