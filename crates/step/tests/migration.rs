//! Ranks that compute with another cut than the one they keep, against ranks that do not: every loss and every gradient, the
//! bytes that migrate, and when.

mod support;

use std::convert::Infallible;
use std::ops::Range;
use std::time::Duration;

use evenkeel_comm::{ExchangeKind, Link, Options, run_ranks};
use evenkeel_device::kernel::{Fill, Segments};
use evenkeel_device::{DType, Queue, Tensor};
use evenkeel_model::{
    Batch, Cut, Dim, Gradients, LossOptions, MigratedParam, Migration, Model, ParamId, Parameters, RotaryTables,
    SHARES, Shard, Slice, Widths, ZeroSharding, widths_of,
};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, Chain, NONE, OASES, SCHEDULES};
use evenkeel_step::trace::Span;
use evenkeel_step::{
    Exchange, Executor, GroupIdx, Lane, Micro, Program, Strategy, Task, UnitIdx, Value, ValueKind, Values, Work, join,
    listing,
};
use support::ranks::{
    Origin, TOLERANCE, Way, compare, compare_gradients, compare_rank_by_rank, dropping, dry_working_peak_bytes,
    gradient_error, on_one_rank, on_ranks, on_working_ranks, timeline,
};
use support::{device, on_cuda};

/// A fused and transposed qkv with biases, a parallel residual, and both with pictures.
const CASES: [&str; 4] = ["llama2", "gpt2", "gpt_neox", "vit"];

/// These groups of heads and sixteenths of the FFN's columns; the first shard also gets the columns that are left.
fn widths(model: &Model, cut: &Cut, head_groups: &[usize], sixteenths: &[usize]) -> Widths {
    let home = widths_of(&Shard::cut(&model.config, cut).unwrap());
    let mut ffn: Vec<usize> = sixteenths.iter().map(|part| model.config.ffn * part / 16).collect();
    ffn[0] += model.config.ffn - ffn.iter().sum::<usize>();
    let head_shares = head_groups.iter().map(|groups| groups * SHARES).collect();
    home.with(Dim::Heads, head_shares).with(Dim::Columns, ffn)
}

/// Groups of heads, of four, and sixteenths of the FFN for so many shards: uneven ones, and some without any.
fn works(shards: usize) -> Vec<[Vec<usize>; 2]> {
    match shards {
        2 => vec![[vec![1, 3], vec![5, 11]], [vec![4, 0], vec![0, 16]]],
        3 => vec![[vec![1, 1, 2], vec![7, 2, 7]], [vec![0, 3, 1], vec![9, 0, 7]]],
        _ => vec![[vec![2, 0, 1, 1], vec![3, 5, 0, 8]], [vec![0, 1, 2, 1], vec![6, 2, 4, 4]]],
    }
}

fn split(cut: Cut, split_sequence: bool) -> Cut {
    Cut { split_sequence, ..cut }
}

#[test]
fn losses_and_every_gradient_at_home_are_those_without_migration_for_every_schedule() {
    for case in CASES {
        let (model, whole) = (case.model(), on_one_rank(case, DType::F32));
        for (shards, split_sequence) in (2..=4).flat_map(|shards| [(shards, false), (shards, true)]) {
            let cut = split(Cut::even(shards), split_sequence);
            let uniform = on_ranks(case, &cut, DType::F32, Arrangement::default(), &Options::default());
            let arrangements = SCHEDULES.iter().flat_map(|&schedule| [1, 2].map(|parts| (schedule, parts)));
            for (index, (schedule, parts)) in arrangements.enumerate() {
                let [head_groups, sixteenths] = &works(shards)[index / 2 % 2];
                let work = widths(&model, &cut, head_groups, sixteenths);
                let arrangement = Arrangement::of(schedule).in_parts(parts);
                let ranks = on_working_ranks(case, &cut, Some(&work), DType::F32, arrangement, &Options::default());
                let what = format!("{case}, {work:?}, split {split_sequence}, {arrangement:?}");
                compare(&what, &whole, &ranks, TOLERANCE);
                compare_rank_by_rank(&what, &ranks, &uniform, TOLERANCE);
                assert!(ranks.iter().any(|rank| rank.migrated.bytes > 0), "{what}: something migrates");
            }
        }
    }
}

#[test]
fn groups_of_query_heads_norms_of_heads_and_uneven_homes_make_no_difference() {
    // Two groups of two query heads each.
    for case in ["llama3", "qwen3", "qwen2", "qwen3_moe", "gpt_oss", "phi3"] {
        let (model, whole) = (case.model(), on_one_rank(case, DType::F32));
        for (index, (head_groups, sixteenths)) in
            [([0, 2], [4, 12]), ([2, 0], [16, 0]), ([1, 1], [9, 7])].into_iter().enumerate()
        {
            let home = [Cut::even(2), Cut::weighted(vec![1.0, 3.0])][index % 2].clone();
            let cut = Cut { whole_experts: index < 2, ..split(home, index == 1) };
            let work = widths(&model, &cut, &head_groups, &sixteenths);
            let arrangement = Arrangement::of([OASES, CROSS_PASS, NONE][index]).in_parts(2).ahead();
            let ranks = on_working_ranks(case, &cut, Some(&work), DType::F32, arrangement, &Options::default());
            compare(&format!("{case}, {cut:?}, {work:?}"), &whole, &ranks, TOLERANCE);
        }
    }
}

/// Four groups of heads, cut anywhere: inside groups, one group among three shards, and a shard with none.
fn shared_heads(shards: usize) -> Vec<Vec<usize>> {
    match shards {
        2 => vec![vec![171, 85], vec![20, 236], vec![256, 0]],
        3 => vec![vec![100, 30, 126], vec![70, 40, 146], vec![0, 250, 6]],
        _ => vec![vec![10, 20, 30, 196], vec![65, 63, 64, 64]],
    }
}

#[test]
fn heads_that_ranks_share_by_samples_give_the_same_losses_and_gradients() {
    for (case, shards) in CASES.into_iter().flat_map(|case| [2, 3, 4].map(|shards| (case, shards))) {
        let (model, whole) = (case.model(), on_one_rank(case, DType::F32));
        for (index, head_shares) in shared_heads(shards).into_iter().enumerate() {
            let cut = split(Cut::even(shards), index == 1);
            let even = vec![16 / shards; shards];
            let work = widths(&model, &cut, &vec![0; shards], &even).with(Dim::Heads, head_shares);
            for schedule in [SCHEDULES[index], OASES] {
                let arrangement = Arrangement::of(schedule).in_parts(1 + index % 2);
                let ranks = on_working_ranks(case, &cut, Some(&work), DType::F32, arrangement, &Options::default());
                compare(&format!("{case}, {work:?}, {arrangement:?}"), &whole, &ranks, TOLERANCE);
            }
        }
    }
}

#[test]
fn whoever_computes_drops_what_the_single_rank_drops() {
    for origin in dropping().into_iter().filter(|origin| origin.model().config.kv_heads >= 4) {
        let (model, whole) = (origin.model(), on_one_rank(&origin, DType::F32));
        for (shards, arrangement) in [(2, Arrangement::of(OASES).in_parts(2)), (4, Arrangement::of(NONE))] {
            let cut = Cut::even(shards);
            for [head_groups, sixteenths] in works(shards) {
                let work = widths(&model, &cut, &head_groups, &sixteenths);
                let ranks = on_working_ranks(&origin, &cut, Some(&work), DType::F32, arrangement, &Options::default());
                compare(&format!("{}, {work:?}, {arrangement:?}", origin.case), &whole, &ranks, TOLERANCE);
            }
        }
    }
}

#[test]
fn a_home_without_heads_or_columns_computes_zeros() {
    for case in CASES {
        let (model, whole) = (case.model(), on_one_rank(case, DType::F32));
        for (index, [head_groups, sixteenths]) in works(2).into_iter().chain(works(4)).enumerate() {
            let even = split(Cut::even(head_groups.len()), index % 2 == 1);
            let home = Cut { widths: Some(widths(&model, &even, &head_groups, &sixteenths)), ..even };
            let arrangement = Arrangement::of([NONE, OASES][index % 2]);
            let ranks = on_ranks(case, &home, DType::F32, arrangement, &Options::default());
            compare(&format!("{case}, {home:?}"), &whole, &ranks, TOLERANCE);
            // Migrates from there to layouts where every rank has something, and where others have nothing.
            let shards = head_groups.len();
            let [other_groups, other_sixteenths] = &works(shards)[usize::from(index % 2 == 0)];
            let work = widths(&model, &home, other_groups, other_sixteenths);
            let ranks = on_working_ranks(case, &home, Some(&work), DType::F32, arrangement, &Options::default());
            compare(&format!("{case}, {home:?} to {work:?}"), &whole, &ranks, TOLERANCE);
        }
    }
}

#[test]
fn gradients_come_home_before_shares_of_the_data_reduce_them() {
    for case in CASES {
        let (model, whole) = (case.model(), on_one_rank(case, DType::F32));
        for (index, [head_groups, sixteenths]) in works(2).into_iter().enumerate() {
            for zero in [0, 1] {
                let cut = split(Cut::even(2), index == 1);
                let work = widths(&model, &cut, &head_groups, &sixteenths);
                let arrangement = [Arrangement::of(NONE), Arrangement::of(OASES).in_parts(2)][zero];
                let way = Way { dp: 2, zero, ..arrangement.into() };
                let ranks = on_working_ranks(case, &cut, Some(&work), DType::F32, way, &Options::default());
                compare_gradients(&format!("{case}, {work:?}, {way:?}"), &whole, &ranks, TOLERANCE);
            }
        }
    }
}

#[test]
fn bf16_is_as_far_from_f32_as_without_migration() {
    for case in CASES {
        let (cut, model, exact) = (Cut::even(2), case.model(), on_one_rank(case, DType::F32));
        let way = Arrangement::of(OASES).in_parts(2);
        for [head_groups, sixteenths] in works(2) {
            let work = widths(&model, &cut, &head_groups, &sixteenths);
            let [ours, uniform] = [Some(&work), None]
                .map(|work| on_working_ranks(case, &cut, work, DType::Bf16, way, &Options::default()))
                .map(|ranks| gradient_error(&exact, &ranks));
            assert!(ours <= 1.5 * uniform && uniform < 0.05, "{case}, {work:?}: off by {ours:e}, without {uniform:e}");
        }
    }
}

#[test]
fn only_what_is_migrated_travels() {
    let (case, cut) = ("llama2", Cut::even(4));
    let model = case.model();
    let (layers, hidden, head) = (model.config.layers.len(), model.config.hidden, model.config.head_dim);
    let home = widths_of(&Shard::cut(&model.config, &cut).unwrap());
    let home_ffn = home.of(Dim::Columns);
    for dtype in [DType::F32, DType::Bf16] {
        // A column and a row of every FFN matrix of one rank to two others; a head of another rank.
        for (head_groups, ffn) in [
            ([1, 1, 1, 1], [home_ffn[0] - 3, home_ffn[1] + 3, home_ffn[2], home_ffn[3]]),
            ([2, 0, 1, 1], [home_ffn[0], home_ffn[1], home_ffn[2], home_ffn[3]]),
            ([1, 1, 1, 1], [home_ffn[0], home_ffn[1] + 2, home_ffn[2] - 6, home_ffn[3] + 4]),
        ] {
            let head_shares = head_groups.map(|groups| groups * SHARES).to_vec();
            let work = home.clone().with(Dim::Heads, head_shares).with(Dim::Columns, ffn.to_vec());
            let moved = |dim: Dim| -> Vec<usize> {
                home.of(dim).iter().zip(work.of(dim)).map(|(home, work)| home.abs_diff(*work)).collect()
            };
            let (columns, shares) = (moved(Dim::Columns), moved(Dim::Heads));
            let ranks = on_working_ranks(case, &cut, Some(&work), dtype, Arrangement::default(), &Options::default());
            for (rank, outcome) in ranks.iter().enumerate() {
                // Gate, up and down; q, k, v and o. Once as values, once as gradients.
                let elements = layers * hidden * (3 * columns[rank] + 4 * shares[rank] / SHARES * head);
                let expected = elements * (dtype.size_bytes() + DType::F32.size_bytes());
                assert_eq!(outcome.migrated.bytes, expected as u128, "{dtype:?}, rank {rank}: {work:?}");
                let units = usize::from(shares.iter().any(|&shares| shares > 0))
                    + usize::from(columns.iter().any(|&columns| columns > 0));
                assert_eq!(outcome.migrated.calls, (2 * layers * units) as u64, "migrated and returned once a step");
            }
        }
    }
}

#[test]
fn memory_is_what_the_dry_run_says() {
    for case in ["llama2", "gpt2"] {
        let model = case.model();
        for (shards, split_sequence) in [(2, false), (3, true)] {
            let cut = split(Cut::even(shards), split_sequence);
            for (index, [head_groups, sixteenths]) in works(shards).into_iter().enumerate() {
                let work = widths(&model, &cut, &head_groups, &sixteenths);
                for schedule in SCHEDULES {
                    let arrangement = Arrangement::of(schedule).in_parts(1 + index);
                    let ranks = on_working_ranks(case, &cut, Some(&work), DType::F32, arrangement, &Options::default());
                    for (rank, outcome) in ranks.iter().enumerate() {
                        let expected = dry_working_peak_bytes(case, &cut, Some(&work), rank, arrangement);
                        assert_eq!(outcome.peak_bytes, expected, "{case}, rank {rank}, {work:?}, {arrangement:?}");
                    }
                }
            }
        }
    }
}

/// A random Llama whose bodies take long enough to overlap measurably.
struct Wide;

impl Origin for Wide {
    fn model(&self) -> Model {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 2048, "vocab_size": 64, "tie_word_embeddings": true,
        });
        Model::from_json(&config).unwrap()
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        Parameters::random(shard, dtype, split, 3, queue)
    }

    fn micros(&self, _: &Model, parts: usize, _: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        let ids: Vec<u32> = (0..192).map(|token| token * 7 % 64).collect();
        let part = || Batch::tokens(queue, &ids, &ids, Segments::uniform(4, 48));
        vec![(0..parts).map(|_| part()).collect()]
    }
}

#[test]
fn migrations_are_on_the_comm_queue_beside_computation() {
    if on_cuda() {
        return println!("skipped: no link is emulated between ranks on a card");
    }
    // Slow enough for every exchange to overlap with computation measurably.
    let link = Some(Link { latency: Duration::from_micros(300), bytes_per_s: 1e9 });
    let options = Options { link, ..Options::default() };
    let cut = Cut::even(2);
    let work = widths(&Wide.model(), &cut, &[1, 3], &[5, 11]);
    for arrangement in [Arrangement::of(OASES).in_parts(2), Arrangement::of(NONE), Arrangement::of(NONE).blocking()] {
        let ranks = on_working_ranks(&Wide, &cut, Some(&work), DType::F32, arrangement, &options);
        let timeline = timeline(&ranks);
        for migrated in [Work::Migrate, Work::Return] {
            let mut beside = 0;
            for spans in &timeline.ranks {
                let migrations: Vec<&Span> = spans.iter().filter(|span| span.work == migrated).collect();
                assert_eq!(migrations.len(), 4, "of two layers");
                assert!(migrations.iter().all(|span| span.lane == Lane::Comm && span.bytes > 0));
                let is_beside = |migrated: &&&Span| {
                    let mut computed = spans.iter().filter(|span| span.lane == Lane::Compute);
                    computed.any(|task| task.start_s < migrated.end_s && migrated.start_s < task.end_s)
                };
                beside += migrations.iter().filter(is_beside).count();
            }
            assert_eq!(beside > 0, !arrangement.blocking, "{migrated:?}: {beside} of 8, {arrangement:?}");
        }
        let names = ["embedding", "attention 0", "mlp 0", "attention 1", "mlp 1"].map(str::to_owned);
        let text = listing(&ranks[0].program, &names);
        for name in ["migrate attention 0", "migrate mlp 1", "return attention 1", "return mlp 0"] {
            assert!(text.contains(name), "{name}:\n{text}");
        }
    }
}

#[test]
fn units_migrate_a_body_ahead_and_returned_behind_their_last_addition() {
    let (case, cut) = ("llama2", Cut::even(2));
    let work = widths(&case.model(), &cut, &[1, 3], &[5, 11]);
    for arrangement in SCHEDULES.iter().flat_map(|&of| [1, 2].map(|parts| Arrangement::of(of).in_parts(parts))) {
        let ranks = on_working_ranks(case, &cut, Some(&work), DType::F32, arrangement, &Options::default());
        let tasks = &ranks[0].program.tasks;
        let units = 2 * case.model().config.layers.len();
        for migrated in [Work::Migrate, Work::Return] {
            assert_eq!(
                tasks.iter().filter(|task| task.work == migrated).count(),
                units,
                "{arrangement:?}: {migrated:?}"
            );
        }
        for (index, task) in tasks.iter().enumerate() {
            let is_of_unit = |other: &&Task| other.unit == task.unit;
            match task.work {
                Work::Migrate => {
                    let before =
                        tasks[index..].iter().take_while(|other| !(is_of_unit(other) && other.work == Work::Forward));
                    let bodies = before.filter(|other| other.work == Work::Forward).count();
                    assert!(bodies >= 1, "{arrangement:?}: {bodies} bodies behind `{task}`");
                }
                Work::Return => {
                    let adds = |other: &&Task| matches!(other.work, Work::BackwardInput | Work::BackwardWeight);
                    assert_eq!(tasks[index..].iter().filter(is_of_unit).filter(adds).count(), 0);
                    let before = tasks[..index].iter().rposition(|other| other.exchange.is_none()).unwrap();
                    assert_eq!(tasks[before].unit, task.unit, "{arrangement:?}: `{task}` waits for nothing else");
                }
                _ => (),
            }
        }
    }
}

fn llama(ffn: usize) -> Model {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": ffn, "vocab_size": 12,
    });
    Model::from_json(&config).unwrap()
}

/// A program of one exchange.
fn lone(work: Work, migration: &Migration, shard: usize) -> Program {
    let [value_bytes, gradient_bytes] = migration.bytes(2, shard, DType::F32);
    let value = |kind| Value { kind, unit: UnitIdx(2), micro: Micro { index: 0, part: 0 } };
    let (bytes, writes) = match work {
        Work::Migrate => (value_bytes, Values::from([ValueKind::Migrated, ValueKind::MigratedGradients].map(value))),
        _ => (gradient_bytes, Values::new()),
    };
    let exchange = Some(Exchange { group: GroupIdx(0), bytes });
    let (unit, micro) = (UnitIdx(2), Micro { index: 0, part: 0 });
    let task = Task { work, unit, micro, reads: Values::new(), writes, frees: Values::new(), exchange };
    Program { tasks: vec![task], ..Program::default() }
}

/// Each rank's summand of the gradient of row `row`.
fn computed(rank: usize, row: usize) -> f32 {
    (1 + rank) as f32 * 1000.0 + row as f32
}

/// Three ranks keep four rows each of a matrix of 12 and compute with the rows `work`. Returns the gradients that each keeps
/// after all were returned once, and after they were returned once more and added.
fn migrate(work: &[Range<usize>; 3]) -> Vec<[Vec<f32>; 2]> {
    let shards = llama(12).cut(&Cut::even(3)).unwrap();
    let id = ParamId(shards[0].specs.iter().position(|spec| spec.name.contains("gate_proj")).unwrap());
    let home: Vec<&Slice> = shards.iter().map(|shard| &shard.specs[id.0].slice).collect();
    let slices = work.clone().map(|rows| Slice::of_rows(rows, 8));
    let found = run_ranks(3, &Options::default(), |communicator| {
        let (me, device) = (communicator.rank(), device(communicator.rank()));
        let (model, queue) = (&shards[me], device.compute());
        let parameters = Parameters::random(model, DType::F32, ZeroSharding::NONE, 3, queue);
        let (gradients, tables) = (Gradients::new(&parameters, queue), RotaryTables::new(&model.config, queue, 4));
        // Gradients that an earlier step left must not be added to.
        let (left, _) = gradients.overwrite_or_add(queue, id);
        queue.launch(Fill { out: left.view(), value: f32::NAN });
        gradients.clear();
        let migrated = MigratedParam::new(id, false, &home, &slices.each_ref(), me);
        let migration = Migration { units: [(2, vec![migrated])].into() };
        let groups = join(&communicator, &Chain::of(model, &Strategy::of(Cut::even(3)), me).groups);
        let run = |kind: Work| {
            let (device, parameters, tables, gradients) = (&device, &parameters, &tables, &gradients);
            let (groups, migrations, pruning) = (&groups[..], Some(&migration), None);
            let executor =
                Executor { model, device, parameters, tables, gradients, groups, migration: migrations, pruning };
            executor.run(&lone(kind, &migration, me), &[], LossOptions { smoothing: 0.0, scale: 1.0 }, None);
        };
        let mut migrated = Vec::new();
        let gradients = [(); 2].map(|()| {
            run(Work::Migrate);
            migrated = queue.read(&parameters.value(id));
            let (gradient, accumulate): (Tensor, bool) = gradients.overwrite_or_add(queue, id);
            let before = if accumulate { queue.read(&gradient) } else { vec![0.0; gradient.len()] };
            let fill = |first: usize, out: &mut [f32]| -> Result<(), Infallible> {
                let row = |i: usize| work[me].start + first + i / 8;
                out.iter_mut().enumerate().for_each(|(i, x)| *x = before[first * 8 + i] + computed(me, row(i)));
                Ok(())
            };
            queue.write_rows(&gradient, fill).unwrap();
            run(Work::Return);
            parameters.set_work_value(id, None);
            queue.read(&gradients.sum(queue, id))
        });
        assert_eq!(communicator.counts().of(ExchangeKind::Redistribute).calls, 4);
        let kept = queue.read(&parameters.value(id));
        (kept, migrated, gradients)
    });
    let found = found.unwrap();
    let values: Vec<f32> = found.iter().flat_map(|(kept, _, _)| kept.clone()).collect();
    for (rows, (_, migrated, _)) in work.iter().zip(&found) {
        assert_eq!(migrated, &values[rows.start * 8..rows.end * 8], "{rows:?} of {work:?}");
    }
    found.into_iter().map(|(_, _, gradients)| gradients).collect()
}

#[test]
fn summands_of_several_ranks_are_added_at_home_to_what_is_there() {
    for work in [
        // Rows that one, two and three ranks compute with.
        [0..6, 3..7, 5..12],
        [0..4, 0..4, 3..12],
        // One rank for each row: the first and the last add up in place.
        [0..2, 2..9, 9..12],
        [0..12, 12..12, 12..12],
    ] {
        for (rank, gradients) in migrate(&work).into_iter().enumerate() {
            for (times, gradient) in gradients.iter().enumerate() {
                for (i, &sum) in gradient.iter().enumerate() {
                    let row = rank * 4 + i / 8;
                    let of_rank = |rank: usize| work[rank].contains(&row).then(|| computed(rank, row));
                    let once: f32 = (0..3).filter_map(of_rank).sum();
                    assert_eq!(sum, once * (times + 1) as f32, "{work:?}, rank {rank}, row {row}, time {times}");
                }
            }
        }
    }
}
