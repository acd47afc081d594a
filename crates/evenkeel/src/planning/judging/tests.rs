//! Foretold steps, bounds and memory beside whole simulations and dry runs.

use std::borrow::Cow;
use std::collections::BTreeSet;

use evenkeel_model::{Cut, ZeroStage};
use evenkeel_step::schedule::Schedule;
use evenkeel_step::{Pipeline, PipelineOrder};
use evenkeel_train::{OptimizerOptions, TrainerOptions};

use super::*;
use crate::memory::Beside;

#[test]
fn few_micro_batches_stand_for_many_where_further_ones_need_no_memory() {
    let staged = |order: PipelineOrder, accumulate: usize| {
        let cuts = (1..4 * order.usual_chunks()).map(|stage| 2 * stage).collect();
        Strategy { accumulate, ..Strategy::of(Cut::even(1)) }.in_stages(4, Pipeline { cuts, order })
    };
    assert_eq!(extension(&staged(PipelineOrder::OneForwardOneBackward, 64), 4), Some(([16, 20], 11.0)));
    assert_eq!(extension(&staged(PipelineOrder::OneForwardOneBackward, 24), 4), None);
    assert_eq!(extension(&staged(PipelineOrder::Gpipe, 64), 4), None);
    assert_eq!(extension(&Strategy { accumulate: 9, ..Strategy::of(Cut::even(1)) }, 4), Some(([2, 3], 6.0)));
    for order in PipelineOrder::ALL {
        if let Some(([few, more], often)) = extension(&staged(order, 61), 4) {
            assert_eq!((more - few, more as f64 + often * 4.0), (4, 61.0), "{order:?}");
        }
    }
}

fn model(layers: usize) -> evenkeel_model::Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 512, "tie_word_embeddings": false,
    });
    evenkeel_model::Model::from_json(&config).unwrap()
}

fn job(model: &evenkeel_model::Model) -> Job<'_> {
    let options = TrainerOptions {
        optimizer: Some(OptimizerOptions::default()),
        label_smoothing: 0.0,
        longest: 128,
        dropout_seed: 0,
    };
    Job {
        model: Cow::Borrowed(model),
        options,
        sequence: 128,
        beside: &|_| Beside::default(),
        uncut: BTreeSet::new(),
        may_use_all_gpus: false,
        axes: [None; 3],
        seen: Seen::default(),
    }
}

fn cluster() -> Cluster {
    Cluster::parse(include_str!("../../../../../examples/clusters/8-h200.toml")).unwrap()
}

/// So many micro-batches of four sequences on one device, on two shards, on four replicas, and in two places in all orders.
fn strategies(accumulate: usize, units: usize) -> Vec<Strategy> {
    let on = |count: usize| Devices::Cuda { gpus: (0..count).collect(), multiprocessors: Vec::new(), graph: true };
    let of = |cut: Cut, count: usize| {
        let strategy = Strategy::of(Cut { split_sequence: count > 1, ..cut });
        Strategy { accumulate, micro_batch: 4, devices: on(count), ..strategy }
    };
    let alone = of(Cut::even(1), 1);
    let recomputed = |tp: usize| Arrangement::of(Schedule::usual(true, tp));
    let mut strategies = vec![
        alone.clone(),
        alone.clone().arranged(recomputed(1)),
        of(Cut::even(2), 2),
        of(Cut::weighted(vec![1.5, 0.5]), 2),
        of(Cut::even(2), 2).arranged(alone.arrangement.in_parts(2)),
        of(Cut::even(2), 2).arranged(recomputed(2).in_parts(2)),
    ];
    for zero in ZeroStage::ALL {
        strategies.push(Strategy { devices: on(4), ..alone.clone() }.with_replicas(4, zero));
    }
    for order in PipelineOrder::ALL {
        let stages = 2 * order.usual_chunks();
        let cuts = (1..stages).map(|stage| 1 + stage * (units - 2) / stages).collect();
        let pipeline = Pipeline { cuts, order };
        strategies.push(Strategy { devices: on(2), ..alone.clone() }.in_stages(2, pipeline.clone()));
        for parts in [1, 2] {
            let sharded = of(Cut::even(2), 8).with_replicas(2, ZeroStage::State).in_stages(2, pipeline.clone());
            strategies.push(sharded.clone().arranged(sharded.arrangement.in_parts(parts)));
        }
    }
    strategies
}

#[test]
fn tasks_follow_from_those_of_a_short_chain() {
    let model = model(14);
    let job = job(&model);
    for strategy in strategies(3, model.units.len()) {
        let places = vec![String::new(); strategy.ranks()];
        let tasks = job.tasks(&strategy, &places);
        let ranks: Vec<usize> = tasks.iter().map(|counted| counted.rank).collect();
        let are_unequal = strategy.cut.weights.iter().any(|weight| *weight != strategy.cut.weights[0]);
        assert_eq!(
            ranks.contains(&1),
            are_unequal || strategy.pp > 1 && strategy.ranks() == 2,
            "{strategy}: {ranks:?}"
        );
        for (one, (_, other)) in tasks.iter().zip(&job.counted(&strategy, &ranks)) {
            assert_eq!((one.rank, &one.program), (other.rank, &other.program), "{strategy}");
            for (index, task) in one.program.tasks.iter().enumerate().filter(|(_, task)| task.exchange.is_none()) {
                let [one, other] = [one, other].map(|it| &it.counts[index]);
                match task.work.is_of_tail() {
                    false => assert_eq!(one, other, "{strategy}: {task}"),
                    true => {
                        let off = one.bytes() as f64 / other.bytes() as f64 - 1.0;
                        // A narrow shard has a larger share of what every shard has.
                        let tolerance = if are_unequal { 0.03 } else { 0.02 };
                        assert!(off.abs() < tolerance, "{strategy}, {:?}: {task}: {off}", strategy.pipeline.order);
                    }
                }
            }
        }
    }
}

#[test]
fn unequal_places_are_foretold_from_even_chains() {
    let cluster = Cluster::parse(include_str!("../../../../../examples/clusters/mixed.toml")).unwrap();
    let model = model(40);
    let job = job(&model);
    let mut judging = Judging::new(&job, Source::Cluster(&cluster), &|_| ());
    for order in PipelineOrder::ALL {
        for gpus in [vec![0, 1, 2, 3], vec![0, 2, 4, 6]] {
            let cuts = vec![0; 4 * order.usual_chunks() - 1];
            let devices = Devices::Cuda { gpus: gpus.clone(), multiprocessors: Vec::new(), graph: true };
            let strategy = Strategy { accumulate: 64, micro_batch: 4, devices, ..Strategy::of(Cut::even(1)) };
            let Bounded { strategy, step_s, .. } = judging.cut(strategy.in_stages(4, Pipeline { cuts, order }));
            let timed = judging.time(strategy.clone()).unwrap();
            let whole_s = judging.timeline(&strategy).unwrap().duration_s();
            let off = timed.step_s / whole_s - 1.0;
            assert!(off.abs() < 0.001, "{order:?}, {:?}: off by {off}", strategy.pipeline.cuts);
            assert!(step_s <= whole_s, "{order:?}: {step_s} and {whole_s}");
        }
    }
}

#[test]
fn steps_of_many_micro_batches_follow_from_steps_of_few_and_take_no_less_than_their_bounds() {
    let (model, cluster) = (model(30), cluster());
    let job = job(&model);
    let mut judging = Judging::new(&job, Source::Cluster(&cluster), &|_| ());
    for strategy in strategies(40, model.units.len()) {
        let Bounded { strategy, step_s, fullness } = judging.cut(strategy);
        let timed = judging.time(strategy.clone()).unwrap();
        let whole_s = judging.timeline(&strategy).unwrap().duration_s();
        assert!(step_s <= whole_s, "{strategy:?}: {step_s} and {whole_s}");
        let least = judging.least(&strategy);
        assert!(least.step_s <= whole_s && least.fullness <= fullness, "{strategy}: {least:?} and {fullness}");
        let off = timed.step_s / whole_s - 1.0;
        assert!(off.abs() < 0.02, "{strategy}, {:?}: off by {off}", strategy.pipeline.order);
        let (about, (exact, exact_fullness)) = (judging.costs(&strategy), judging.memory(&strategy));
        assert!(fullness <= exact_fullness, "{strategy}: {fullness} and {exact_fullness}");
        let off = about[0].arena_bytes as f64 / exact[0].arena_bytes as f64 - 1.0;
        // Gaps between tensors differ.
        assert!((-0.02..0.15).contains(&off), "{strategy}, {:?}: bytes are off by {off}", strategy.pipeline.order);
    }
}
