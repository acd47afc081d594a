//! Programs are written and proved once for a shape, and what they compute does not depend on who was there before.

mod support;

use evenkeel_device::DType;
use evenkeel_model::{AdapterConfig, Model, Parameters};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, NONE, OASES};
use evenkeel_step::simulate::{Costs, simulate};
use evenkeel_step::trace::Timeline;
use evenkeel_step::{Program, Work};
use evenkeel_train::{Observe, OptimizerOptions, Ranks, Samples, Trainer, TrainerOptions, costs};
use support::{Strategy, spread, start_on, state};

const STEPS: usize = 3;

/// Its head treats few rows at a time, so that a part has several chunks.
fn model() -> Model {
    llama(1 << 18)
}

fn llama(vocabulary: usize) -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 16, "vocab_size": vocabulary, "tie_word_embeddings": true,
    });
    Model::from_json(&config).unwrap()
}

fn options() -> TrainerOptions {
    let optimizer = Some(OptimizerOptions::default());
    TrainerOptions { optimizer, label_smoothing: 0.0, longest: 128, dropout_seed: 0 }
}

fn ranks(topology: &Strategy, arrangement: Arrangement) -> Ranks {
    ranks_of(&model(), topology, arrangement)
}

fn ranks_of(model: &Model, topology: &Strategy, arrangement: Arrangement) -> Ranks {
    start_on(model, &topology.clone().arranged(arrangement), options(), |shard, split, queue| {
        Parameters::random(shard, DType::F32, split, 7, queue)
    })
}

fn documents(lengths: &[usize], seed: usize) -> Samples {
    let ids: Vec<u32> = (0..lengths.iter().sum::<usize>()).map(|i| ((i + seed) * 7919 % (1 << 18)) as u32).collect();
    Samples::Tokens { labels: ids.clone(), ids, segment_lengths: lengths.to_vec() }
}

/// As a packer fills a micro-batch of 96 tokens: with documents of any length, the last one cut off.
fn packed(seed: usize) -> Samples {
    const TOKENS: usize = 96;
    let mut lengths = vec![9 + seed * 13 % 31];
    while lengths.iter().sum::<usize>() < TOKENS {
        let next = 5 + (seed * 7 + lengths.len() * 11) % 29;
        lengths.push(next.min(TOKENS - lengths.iter().sum::<usize>()));
    }
    documents(&lengths, seed)
}

fn micros(step: usize) -> Vec<Samples> {
    (0..2).map(|micro| packed(step * 2 + micro)).collect()
}

#[test]
fn packed_documents_have_one_program_and_the_bits_of_programs_of_their_own() {
    for (topology, arrangement) in [
        (spread(1, 2, 0), Arrangement::of(OASES).in_parts(2)),
        (spread(1, 2, 0), Arrangement::of(NONE).in_parts(3).ahead()),
        (spread(2, 1, 3), Arrangement::of(CROSS_PASS).in_parts(2)),
    ] {
        let what = format!("{topology:?}, {arrangement:?}");
        let [kept, anew] = [(); 2].map(|()| ranks(&topology, arrangement));
        let rows: Vec<Vec<usize>> = (0..STEPS)
            .flat_map(micros)
            .map(|it| it.part_sizes(&model(), 2).iter().map(|part| part.tokens).collect())
            .collect();
        assert!(rows.iter().any(|parts| parts[0] != rows[0][0]), "{what}: parts differ: {rows:?}");
        assert!(packed(0).part_sizes(&model(), 2)[0].chunk_rows.len() > 1, "the head has several chunks");
        for step in 0..STEPS {
            let kept = kept.step(micros(step), 1e-3).unwrap();
            anew.with_trainers(move |trainer: &mut Trainer| trainer.rearrange(arrangement)).unwrap();
            let anew = anew.step(micros(step), 1e-3).unwrap();
            assert_eq!(kept, anew, "{what}, step {step}");
        }
        let evaluated = [&kept, &anew].map(|ranks| [1, 2].map(|seed| ranks.evaluate(packed(seed)).unwrap()));
        assert_eq!(evaluated[0], evaluated[1], "{what}");
        assert_eq!(state(&kept), state(&anew), "{what}");
        let written = |ranks: &Ranks| ranks.with_trainers(|trainer| trainer.programs_written()).unwrap()[0];
        assert_eq!([written(&kept), written(&anew)], [1 + 1, STEPS + 1], "{what}");
    }
}

#[test]
fn a_step_says_in_how_few_parts_a_micro_batch_was_cut() {
    let ranks = ranks(&spread(1, 2, 0), Arrangement::of(OASES).in_parts(2));
    let parts = |micros: Vec<Samples>| ranks.step(micros, 1e-3).unwrap().parts;
    assert_eq!(parts(vec![packed(1), packed(2)]), 2);
    assert_eq!(parts(vec![packed(1), documents(&[96], 2)]), 1);
    assert_eq!(parts(vec![packed(3)]), 2);
}

#[test]
fn shares_with_split_gradients_cut_as_the_one_with_the_fewest_documents_and_fit_where_that_was_foreseen() {
    let (topology, arrangement) = (spread(2, 2, 2), Arrangement::of(OASES).in_parts(2));
    let ranks = ranks(&topology, arrangement);
    // The first two micro-batches meet, and the last two: one of a single document, and one that none is missing of.
    let uneven = vec![packed(1), documents(&[96], 2), packed(3), packed(4)];
    let outcome = ranks.step(uneven.clone(), 1e-3).unwrap();
    assert_eq!(outcome.parts, 1);
    let of = |trainer: &mut Trainer| {
        let parts = trainer.program().tasks.iter().map(|task| (task.micro.index, task.micro.part));
        let most = |micro: usize| parts.clone().filter(|&(index, _)| index == micro).map(|(_, part)| part + 1).max();
        ([most(0), most(1)], trainer.device.usage().peak_bytes)
    };
    let shards = model().cut(&topology.cut).unwrap();
    let foreseen = costs(&shards, &topology.arranged(arrangement), options(), &uneven);
    for (rank, (parts, peak_bytes)) in ranks.with_trainers(of).unwrap().into_iter().enumerate() {
        assert_eq!(parts, [Some(1), Some(2)], "rank {rank}: the other micro-batch still overlaps");
        assert!(peak_bytes <= foreseen[rank].peak_bytes, "rank {rank}: {peak_bytes} of {:?}", foreseen[rank]);
    }
}

/// The names of a tail's first tasks, in order.
fn tail(dp: usize, tp: usize, zero: usize) -> Vec<&'static str> {
    let splits_state = dp > 1 && zero > 0;
    let sums = usize::from(tp > 1) + usize::from(splits_state);
    let mut tail = vec!["measure norm"];
    tail.extend(vec!["sum norm"; sums]);
    tail.push("update");
    tail
}

#[test]
fn a_trace_and_a_simulation_cover_the_whole_step() {
    for (dp, tp, zero) in [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 1), (2, 1, 3)] {
        let what = format!("dp {dp}, tp {tp}, ZeRO {zero}");
        let ranks = ranks_of(&llama(64), &spread(dp, tp, zero), Arrangement::of(OASES));
        let epoch = std::time::Instant::now();
        let traced = ranks.with_trainers(move |trainer: &mut Trainer| {
            let mut prepared = trainer.prepare(&support::micros(&trainer.model, 0)).unwrap();
            let step = trainer.step_on(&mut prepared, 1e-3, Observe::Tasks { epoch });
            (step.spans, trainer.program().clone(), trainer.parameters.buckets.len())
        });
        let mut timeline = Timeline::default();
        let mut programs: Vec<Program> = Vec::new();
        for (spans, program, buckets) in traced.unwrap() {
            let names: Vec<&str> =
                spans.iter().filter(|span| span.work.is_of_tail()).map(|span| span.work.row().name).collect();
            let expected = tail(dp, tp, zero);
            assert_eq!(names[..expected.len()], expected, "{what}");
            let gathers = names.len() - expected.len();
            let most = if dp > 1 && zero > 0 { buckets } else { 0 };
            assert!(names[expected.len()..].iter().all(|name| *name == "gather updated") && gathers <= most, "{what}");
            assert!(zero != 1 || gathers == buckets, "{what}: every bucket is gathered");
            let ends = spans.iter().map(|span| span.end_s).fold(0.0, f64::max);
            let update = spans.iter().find(|span| span.work == Work::Update).expect("found above");
            assert!(
                spans.iter().all(|span| span.work.is_of_tail() || span.start_s <= update.start_s)
                    && update.end_s <= ends
            );
            timeline.ranks.push(spans);
            programs.push(program);
        }
        assert_eq!(programs[0].tasks.len(), timeline.ranks[0].len(), "{what}");
        let foretold = simulate(&programs, &Costs::measured(&[timeline])).unwrap();
        assert!(foretold.ranks.iter().flatten().any(|span| span.work == Work::Update), "{what}");
    }
}

#[test]
fn the_tail_of_dora_measures_rows_behind_the_update_and_sums_them_over_shards() {
    let adapter = AdapterConfig { is_dora: true, rank: 2, ..AdapterConfig::default() };
    let plain = llama(64);
    let models = [plain.adapted(adapter.clone()).unwrap(), plain.packed().adapted(adapter).unwrap()];
    let meshes = [(1, 1, 0), (1, 2, 0), (2, 1, 1), (2, 2, 2), (2, 1, 3), (2, 2, 3)];
    for (model, (dp, tp, zero)) in models.iter().flat_map(|model| meshes.map(|mesh| (model, mesh))) {
        // Blocks of 4-bit numbers cannot be cut.
        if tp > 1 && model.is_packed() {
            continue;
        }
        let what = format!("dp {dp}, tp {tp}, ZeRO {zero}, packed {}", model.is_packed());
        let strategy = spread(dp, tp, zero).arranged(Arrangement::of(OASES));
        let ranks = ranks_of(model, &strategy, strategy.arrangement);
        let epoch = std::time::Instant::now();
        let traced = ranks.with_trainers(move |trainer: &mut Trainer| {
            let mut prepared = trainer.prepare(&support::micros(&trainer.model, 0)).unwrap();
            let step = trainer.step_on(&mut prepared, 1e-3, Observe::Tasks { epoch });
            (step.spans, trainer.program().clone(), trainer.device.usage().peak_bytes)
        });
        let foreseen = costs(&model.cut(&strategy.cut).unwrap(), &strategy, options(), &support::micros(model, 0));
        let (mut timeline, mut programs) = (Timeline::default(), Vec::new());
        for (rank, (spans, program, peak_bytes)) in traced.unwrap().into_iter().enumerate() {
            let names: Vec<&str> =
                spans.iter().filter(|span| span.work.is_of_tail()).map(|span| span.work.row().name).collect();
            let update = names.iter().position(|name| *name == "update").unwrap();
            let behind: Vec<&str> =
                names[update + 1..].iter().copied().filter(|name| *name != "gather updated").collect();
            // Over shards, those of layers whose inputs are cut; over replicas that split values, all of them.
            let sums = match (tp > 1, zero == 3) {
                (cut, false) => usize::from(cut),
                (cut, true) => {
                    if cut {
                        3
                    } else {
                        1
                    }
                }
            };
            let expected: &[&str] = &["measure rows", "sum rows", "sum rows", "sum rows"][..1 + sums];
            assert_eq!((&behind[..], names.ends_with(expected)), (expected, true), "{what}: {names:?}");
            assert_eq!(program.tasks.len(), spans.len(), "{what}");
            assert_eq!(peak_bytes, foreseen[rank].peak_bytes, "{what}");
            timeline.ranks.push(spans);
            programs.push(program);
        }
        let foretold = simulate(&programs, &Costs::measured(&[timeline])).unwrap();
        assert!(foretold.ranks.iter().flatten().any(|span| span.work == Work::MeasureRows), "{what}");
    }
}
