//! Profiles learnt from steps of short models, against steps of whole ones by other strategies, on a machine whose costs are known.

mod support;

use evenkeel_device::{Counts, DType};
use evenkeel_model::{Input, Model};
use evenkeel_plan::{Counted, NotKnown, Profile, Representatives, foretell};
use evenkeel_step::schedule::{Arrangement, NONE, OASES};
use evenkeel_step::simulate::{Costs, simulate};
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Pipeline, PipelineOrder, Program, Strategy};
use evenkeel_train::{OptimizerOptions, Samples, TrainerOptions, costs, costs_and_tasks};
use support::spread;

const SEQUENCE: usize = 16;

fn model(layers: usize) -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128, "tie_word_embeddings": false,
    });
    Model::from_json(&config).unwrap()
}

fn options() -> TrainerOptions {
    TrainerOptions {
        optimizer: Some(OptimizerOptions::default()),
        label_smoothing: 0.0,
        longest: SEQUENCE,
        dropout_seed: 0,
    }
}

fn micros(strategy: &Strategy) -> Vec<Samples> {
    vec![
        Samples::blank(Input::Tokens { learned_positions: None }, strategy.micro_batch, SEQUENCE);
        strategy.micros_per_step()
    ]
}

fn counted(layers: usize, strategy: &Strategy) -> Vec<Counted> {
    counted_of(layers, strategy, &(0..strategy.ranks()).collect::<Vec<_>>())
}

fn counted_of(layers: usize, strategy: &Strategy, ranks: &[usize]) -> Vec<Counted> {
    let shards = model(layers).cut(&strategy.cut).unwrap();
    let found = costs_and_tasks(&shards, strategy, options(), &micros(strategy), ranks);
    found.into_iter().map(|(_, counted)| counted).collect()
}

/// A step on a machine that takes so long for every kernel and exchange.
fn truth(counted: &[Counted]) -> Timeline {
    let compute_s = |counts: &Counts| -> f64 {
        let of_kind = |(name, count): (&&str, &evenkeel_device::Count)| {
            let flops_per_s = if *name == "Product" { 4e9 } else { 1e9 };
            1e-6 * count.launches as f64 + count.flops as f64 / flops_per_s + count.bytes as f64 / 2e10
        };
        counts.0.iter().map(of_kind).sum()
    };
    let of_rank = |Counted { program, counts, .. }: &Counted| {
        let of_task = |(index, task): (usize, &evenkeel_step::Task)| match task.exchange {
            Some(exchange) => 2e-5 + exchange.bytes as f64 / 1e9,
            None => compute_s(&counts[index]),
        };
        program.tasks.iter().enumerate().map(of_task).collect()
    };
    let programs: Vec<Program> = counted.iter().map(|counted| counted.program.clone()).collect();
    simulate(&programs, &Costs::one_by_one(counted.iter().map(of_rank).collect())).unwrap()
}

fn places(strategy: &Strategy) -> Vec<String> {
    vec!["somewhere".to_owned(); strategy.ranks()]
}

fn learn(profile: &mut Profile, layers: usize, strategy: &Strategy) {
    let counted = counted(layers, strategy);
    let step = truth(&counted);
    let step_s = step.duration_s();
    profile.learn(&places(strategy), &counted, &[step], [step_s, 0.0]).unwrap();
}

fn staged(layers: usize, order: PipelineOrder, accumulate: usize) -> Strategy {
    let stages = 2 * order.usual_chunks();
    let cuts = (1..stages).map(|stage| 1 + 2 * (stage * layers / stages)).collect();
    Strategy { accumulate, ..spread(1, 1, 0) }.in_stages(2, Pipeline { cuts, order })
}

#[test]
fn whole_models_in_other_strategies_are_foretold_from_short_ones() {
    let of =
        |strategy: Strategy, micro_batch: usize, accumulate: usize| Strategy { micro_batch, accumulate, ..strategy };
    let mut profile = Profile::default();
    let oases = |parts: usize| Arrangement::of(OASES).in_parts(parts);
    for strategy in [
        of(spread(1, 1, 0), 2, 2),
        of(spread(1, 1, 0), 4, 2),
        of(spread(2, 1, 0), 2, 2),
        of(spread(2, 1, 2), 2, 2),
        of(spread(1, 2, 0), 2, 2),
        of(spread(1, 2, 0), 2, 2).arranged(oases(2)),
        of(spread(1, 2, 0), 4, 2).arranged(oases(2)),
        Strategy { micro_batch: 2, ..staged(2, PipelineOrder::OneForwardOneBackward, 4) },
    ] {
        learn(&mut profile, 2, &strategy);
    }
    // Tasks of other sizes than those measured cost a little more or less than their share.
    for (strategy, tolerance) in [
        (of(spread(1, 1, 0), 2, 6), 0.005),
        (of(spread(2, 1, 0), 2, 5), 0.005),
        (of(spread(2, 1, 2), 2, 5), 0.005),
        (of(spread(2, 2, 0), 2, 3), 0.01),
        (of(spread(1, 2, 0), 2, 5).arranged(oases(1)), 0.03),
        (of(spread(1, 2, 0), 2, 5).arranged(Arrangement::of(NONE).in_parts(2)), 0.005),
        (Strategy { micro_batch: 2, ..staged(6, PipelineOrder::Gpipe, 6) }, 0.005),
        (Strategy { micro_batch: 2, ..staged(6, PipelineOrder::ZbH1, 6) }, 0.005),
        (of(spread(1, 1, 0), 3, 4), 0.05),
    ] {
        let counted = counted(6, &strategy);
        let foretold =
            foretell(&profile.on(&places(&strategy)), &counted).unwrap_or_else(|error| panic!("{strategy}: {error}"));
        let truth_s = truth(&counted).duration_s();
        let off = foretold.step_s / truth_s - 1.0;
        assert!(off.abs() < tolerance, "{strategy}: off by {off}");
    }
}

#[test]
fn what_nobody_has_measured_is_told_and_not_free() {
    let mut profile = Profile::default();
    let alone = Strategy { accumulate: 2, ..spread(1, 1, 0) };
    learn(&mut profile, 2, &alone);
    let shared = spread(1, 2, 0);
    let Err(NotKnown::NotMeasured(missing)) = foretell(&profile.on(&places(&shared)), &counted(2, &shared)) else {
        panic!("nobody has measured shards")
    };
    assert_eq!(missing.place, "somewhere");
    assert!(missing.tasks.contains("all-gather") && missing.tasks.contains("reduce-scatter"), "{missing}");
    let elsewhere = vec!["elsewhere".to_owned()];
    assert!(matches!(foretell(&profile.on(&elsewhere), &counted(2, &alone)), Err(NotKnown::NotMeasured(_))));
}

#[test]
fn tasks_are_counted_in_the_same_dry_step_that_measures_memory() {
    for strategy in [spread(1, 1, 0), spread(2, 2, 3)] {
        let strategy = Strategy { micro_batch: 2, accumulate: 2, dtype: DType::Bf16, ..strategy };
        let shards = model(3).cut(&strategy.cut).unwrap();
        let ranks: Vec<usize> = (0..strategy.ranks()).collect();
        let both = costs_and_tasks(&shards, &strategy, options(), &micros(&strategy), &ranks);
        let alone = costs(&shards, &strategy, options(), &micros(&strategy));
        assert_eq!(both.iter().map(|(cost, _)| *cost).collect::<Vec<_>>(), alone, "{strategy}");
        for (cost, Counted { program, counts, .. }) in &both {
            assert_eq!(program.tasks.len(), counts.len());
            let counted: u128 = counts.iter().map(|counts| counts.flops()).sum();
            // The rest is work between tasks: sums of norms and losses.
            assert!(counted <= cost.flops && counted as f64 > 0.99 * cost.flops as f64, "{counted} of {}", cost.flops);
        }
    }
}

#[test]
fn one_replica_and_one_shard_stand_for_all_in_time_and_memory() {
    let of = |strategy: Strategy, accumulate: usize| Strategy { micro_batch: 2, accumulate, ..strategy };
    let staged = |dp: usize, tp: usize| {
        let pipeline = Pipeline { cuts: vec![4], order: PipelineOrder::OneForwardOneBackward };
        of(spread(dp, tp, 1), 3).in_stages(2, pipeline)
    };
    let strategies =
        [of(spread(4, 1, 0), 2), of(spread(3, 1, 3), 2), of(spread(2, 2, 2), 2), staged(2, 2), staged(3, 1)];
    for strategy in strategies {
        let shards = model(3).cut(&strategy.cut).unwrap();
        let few = Representatives::new(strategy.mesh(), |_, _| true);
        assert_eq!(few.ranks.len(), strategy.pp);
        let mut profile = Profile::default();
        learn(&mut profile, 3, &strategy);
        let step_s = |ranks: &[usize]| {
            let counted = counted_of(3, &strategy, ranks);
            foretell(&profile.on(&places(&strategy)), &counted).unwrap().step_s
        };
        let (all_s, few_s) = (step_s(&(0..strategy.ranks()).collect::<Vec<_>>()), step_s(&few.ranks));
        assert!((few_s / all_s - 1.0).abs() < 1e-6, "{strategy}: {few_s} of {all_s}");
        let all = costs(&shards, &strategy, options(), &micros(&strategy));
        let of_few = costs_and_tasks(&shards, &strategy, options(), &micros(&strategy), &few.ranks);
        for (rank, cost) in all.iter().enumerate() {
            let representative = of_few[few.of[rank]].0;
            // Later replicas may keep a few elements less of what ZeRO splits.
            let less = representative.arena_bytes.checked_sub(cost.arena_bytes);
            assert!(less.is_some_and(|less| less < 4096), "{strategy}, rank {rank}: {less:?}");
        }
    }
}
