//! Models cut in stages over several ranks against one rank: every loss and every gradient, for every order. Broken pipelines are
//! refused, and idle time is what formulas say.

mod support;

use evenkeel_comm::Options;
use evenkeel_device::{DType, Queue};
use evenkeel_model::{Batch, Cut, Model, Parameters, ZeroSharding};
use evenkeel_step::schedule::{Arrangement, CROSS_PASS, Chain, NONE, OASES, PartSize, SAVED_COMM};
use evenkeel_step::simulate::{Costs, simulate};
use evenkeel_step::{
    Exchange, GroupIdx, Members, Micro, PipelineOrder, Program, Task, UnitIdx, Unsound, Value, ValueKind, Work, verify,
};
use support::ranks::{
    Origin, Outcome, Stages, TOLERANCE, Way, compare_gradients, dropping, dry_peak_bytes, on_one_rank, on_ranks,
};
use support::{golden, parts};

/// A golden model with so many micro-batches.
struct Micros<'a> {
    case: &'a str,
    count: usize,
}

impl Origin for Micros<'_> {
    fn model(&self) -> Model {
        self.case.model()
    }

    fn parameters(&self, shard: &Model, dtype: DType, split: ZeroSharding, queue: &Queue) -> Parameters {
        self.case.parameters(shard, dtype, split, queue)
    }

    fn micros(&self, model: &Model, count: usize, dtype: DType, queue: &Queue) -> Vec<Vec<Batch>> {
        (0..self.count).map(|micro| parts(model, micro, count, dtype, queue)).collect()
    }
}

fn stages(pp: usize, order: PipelineOrder) -> Stages {
    Stages { pp, order, shift: 0 }
}

/// Every loss of the last stage, and every gradient of all.
fn compare(what: &str, one: &Outcome, ranks: &[Outcome], tolerance: f64) {
    let with_losses: Vec<&Outcome> = ranks.iter().filter(|rank| !rank.losses.is_empty()).collect();
    assert!(!with_losses.is_empty(), "{what}: a rank has the head");
    for rank in with_losses {
        let error = |ours: &[f32], theirs: &[f32]| {
            assert_eq!(ours.len(), theirs.len(), "{what}");
            ours.iter().zip(theirs).map(|(a, b)| ((a - b).abs() / b.abs().max(1.0)) as f64).fold(0.0, f64::max)
        };
        let off = error(&rank.losses, &one.losses).max(error(rank.evaluated(), one.evaluated()));
        assert!(off <= tolerance, "{what}: losses off by {off:e}");
    }
    compare_gradients(what, one, ranks, tolerance);
    let (ours, theirs) = (held_by_any(ranks), held_by_any(std::slice::from_ref(one)));
    assert_eq!(ours, theirs, "{what}: what the stages hold is the model");
}

/// By parameter: whether some rank has a gradient of it.
fn held_by_any(ranks: &[Outcome]) -> Vec<bool> {
    let held = |rank: &Outcome| rank.gradient_bits().iter().map(|bits| !bits.is_empty()).collect::<Vec<bool>>();
    ranks.iter().map(held).reduce(|a, b| a.iter().zip(b).map(|(a, b)| *a || b).collect()).expect("there are ranks")
}

#[test]
fn every_order_computes_what_one_rank_does() {
    for case in ["llama3", "gpt2", "gemma3", "olmo3", "qwen3_moe", "gpt_oss", "vit"] {
        for count in [1, 2, 5] {
            let origin = Micros { case, count };
            let one = on_one_rank(&origin, DType::F32);
            for (index, order) in PipelineOrder::ALL.into_iter().enumerate() {
                let units = origin.model().units.len();
                let chunks = order.usual_chunks();
                for pp in (2..=3).filter(|pp| pp * chunks <= units) {
                    let arrangement = Arrangement::of([NONE, OASES, CROSS_PASS, SAVED_COMM][(index + pp + count) % 4]);
                    let shift = (index + count) % 2;
                    let way = Way { stages: Some(Stages { pp, order, shift }), ..arrangement.into() };
                    let what = format!("{case}, {count} micro-batches, {way:?}");
                    let ranks = on_ranks(&origin, &Cut::even(1), DType::F32, way, &Options::default());
                    // A tied table's gradient is added up in another order.
                    let is_tied = origin.model().config.tied;
                    compare(&what, &one, &ranks, if is_tied { TOLERANCE } else { 0.0 });
                    assert_eq!(ranks.len(), pp, "{what}");
                }
            }
        }
    }
}

#[test]
fn stages_go_with_shards_replicas_parts_and_dropout() {
    let one = on_one_rank(&Micros { case: "llama_packed", count: 4 }, DType::F32);
    for (index, order) in PipelineOrder::ALL.into_iter().enumerate() {
        for (tp, dp, zero) in [(2, 1, 0), (1, 2, 0), (1, 2, 1), (2, 2, 1)] {
            let origin = Micros { case: "llama_packed", count: 4 };
            let arrangement = Arrangement::of([NONE, OASES, CROSS_PASS][index % 3]).in_parts(1 + index % 2);
            let way = Way { dp, zero, stages: Some(stages(2, order)), ..arrangement.into() };
            for split_sequence in [false, true].into_iter().take(tp) {
                let cut = Cut { split_sequence, ..Cut::even(tp) };
                let ranks = on_ranks(&origin, &cut, DType::F32, way, &Options::default());
                compare_gradients(&format!("tp {tp}, split {split_sequence}, {way:?}"), &one, &ranks, TOLERANCE);
            }
        }
    }
    for origin in dropping() {
        let one = on_one_rank(&origin, DType::F32);
        let way = Way { stages: Some(stages(3, PipelineOrder::ZbH1)), ..Arrangement::of(OASES).into() };
        let ranks = on_ranks(&origin, &Cut::even(1), DType::F32, way, &Options::default());
        compare(origin.case, &one, &ranks, TOLERANCE);
    }
}

#[test]
fn a_dry_run_foretells_every_stage_s_memory() {
    for order in PipelineOrder::ALL {
        let origin = Micros { case: "llama3", count: 4 };
        let way = Way { stages: Some(stages(2, order)), ..Arrangement::of(NONE).into() };
        let ranks = on_ranks(&origin, &Cut::even(1), DType::F32, way, &Options::default());
        for (rank, outcome) in ranks.iter().enumerate() {
            let foretold = dry_peak_bytes(&origin, &Cut::even(1), rank, way);
            assert_eq!(outcome.peak_bytes, foretold, "{order:?}, rank {rank}");
        }
    }
}

/// The programs of a deep chain of equal units over `pp` places, in `micros` micro-batches.
fn programs(pp: usize, order: PipelineOrder, micros: usize) -> Vec<Program> {
    programs_of(1, Way { stages: Some(stages(pp, order)), ..Arrangement::of(NONE).into() }, micros)
}

/// The same on so many shards.
fn programs_of(tp: usize, way: Way, micros: usize) -> Vec<Program> {
    let model = Micros { case: "llama3", count: micros }.model();
    let shards = model.cut(&Cut::even(tp)).expect("it has as many head groups");
    let chains = Chain::all(&shards, &way.strategy(&shards, DType::F32));
    let sizes = vec![vec![PartSize { tokens: 8, chunk_rows: vec![8] }]; micros];
    chains.iter().map(|chain| way.arrangement.step(chain, &sizes)).collect()
}

#[test]
fn pipelines_that_lack_a_pass_or_swap_two_are_refused() {
    for order in PipelineOrder::ALL {
        let sound = programs(2, order, 4);
        assert_eq!(verify(&sound), Ok(()), "{order:?}");
        let is_pass = |task: &Task| matches!(task.work, Work::Pass | Work::PassGradient);
        let passes: Vec<usize> = (0..sound[0].tasks.len()).filter(|&index| is_pass(&sound[0].tasks[index])).collect();
        for &index in &passes {
            let mut broken = sound.clone();
            broken[0].tasks.remove(index);
            assert!(verify(&broken).is_err(), "{order:?}: without {}", sound[0].tasks[index]);
        }
        for pair in passes.windows(2) {
            let mut broken = sound.clone();
            broken[0].tasks.swap(pair[0], pair[1]);
            let of = |index: usize| &sound[0].tasks[index];
            let group = |index: usize| of(index).exchange.expect("a pass has two members").group;
            let is_refused = verify(&broken).is_err();
            assert!(is_refused || group(pair[0]) != group(pair[1]), "{order:?}: {} and {}", of(pair[0]), of(pair[1]));
        }
    }
}

#[test]
fn sums_of_gradients_hold_up_no_exchange_that_another_place_waits_for() {
    for order in PipelineOrder::ALL {
        for tp in [1, 2] {
            let way = Way { dp: 2, stages: Some(stages(2, order)), ..Arrangement::of(NONE).into() };
            let programs = programs_of(tp, way, 4);
            assert_eq!(verify(&programs), Ok(()), "{order:?}");
            let places = programs.iter().filter_map(|Program { tasks, .. }| {
                let is_sent = |task: &Task| task.work == Work::PassGradient && !task.reads.is_empty();
                let last_sent = tasks.iter().rposition(is_sent)?;
                let sums = tasks.iter().position(|task| matches!(task.work, Work::ReduceGradients(_)));
                Some((last_sent, sums.expect("replicas sum gradients")))
            });
            let places: Vec<(usize, usize)> = places.collect();
            assert!(!places.is_empty(), "{order:?}: some place passes gradients on");
            match tp {
                // Passes have a lane of their own. Gradients of weights that are computed last are summed last.
                1 if order.splits_backward() => (),
                1 => assert!(places.iter().any(|(sent, sums)| sums < sent), "{order:?}: sums overlap with computation"),
                _ => assert!(places.iter().all(|(sent, sums)| sums > sent), "{order:?}"),
            }
        }
    }
}

#[test]
fn arrivals_beyond_the_rooms_are_refused() {
    let mut crowded = programs(2, PipelineOrder::Gpipe, 4);
    assert_eq!(verify(&crowded), Ok(()));
    crowded[1].tasks.sort_by_key(|task| task.work != Work::Pass);
    let refusal = verify(&crowded).expect_err("four arrive before one is read");
    assert!(matches!(refusal, Unsound::NoRoom { .. }), "{refusal}");
}

const MICRO: Micro = Micro { index: 0, part: 0 };

fn value(kind: ValueKind) -> Value {
    Value { kind, unit: UnitIdx(1), micro: MICRO }
}

/// A task that frees what it reads.
fn task(work: Work, reads: &[Value], writes: &[Value], group: Option<usize>) -> Task {
    Task {
        work,
        unit: UnitIdx(1),
        micro: MICRO,
        reads: reads.into(),
        writes: writes.into(),
        frees: reads.into(),
        exchange: group.map(|group| Exchange { group: GroupIdx(group), bytes: 4 }),
    }
}

fn of_two_ranks(tasks: [Vec<Task>; 2]) -> [Program; 2] {
    let groups = ["tp", "pp 1"].map(|name| Members { name: name.to_owned(), ranks: vec![0, 1] });
    tasks.map(|tasks| Program { tasks, groups: groups.to_vec(), blocking: false })
}

#[test]
fn a_pass_that_both_sides_receive_is_refused() {
    let passed = value(ValueKind::Passed);
    let tasks = vec![task(Work::Pass, &[], &[passed], Some(1)), task(Work::Arrive, &[passed], &[], None)];
    let refusal = verify(&of_two_ranks([tasks.clone(), tasks])).expect_err("nobody sends");
    assert!(matches!(refusal, Unsound::NotOneWay { .. }), "{refusal}");
}

/// Rank 0 computes with what rank 1 passes and gives it to a sum; rank 1 passes what it computes from that sum.
#[test]
fn a_cycle_through_two_lanes_is_refused() {
    let [passed, output, reduced] = [ValueKind::Passed, ValueKind::Output, ValueKind::OutputReduced].map(value);
    let ending = |mut task: Task| {
        task.frees.extend(task.writes.clone());
        task
    };
    let of_rank = [
        vec![
            task(Work::Pass, &[], &[passed], Some(1)),
            task(Work::Arrive, &[passed], &[output], None),
            ending(task(Work::AllReduce, &[output], &[reduced], Some(0))),
        ],
        vec![
            task(Work::Forward, &[], &[output], None),
            task(Work::AllReduce, &[output], &[reduced], Some(0)),
            task(Work::Join, &[reduced], &[passed], None),
            task(Work::Pass, &[passed], &[], Some(1)),
        ],
    ];
    let refusal = verify(&of_two_ranks(of_rank)).expect_err("each waits for the other");
    assert!(matches!(refusal, Unsound::Cycle(_)), "{refusal}");
}

/// Seconds of a step whose stages take 1 s for the forward of a micro-batch and 1 s for each half of its backward.
fn step_s(pp: usize, order: PipelineOrder, micros: usize) -> f64 {
    let programs = programs(pp, order, micros);
    let chunks = order.usual_chunks();
    // The first task of each block takes all of its time.
    let costs = Costs::of_tasks(&programs, |rank, _, task| {
        let program = &programs[rank].tasks;
        let is_first = |work: Work| {
            let of_block = |other: &&Task| other.work == work && other.micro == task.micro;
            let same = program.iter().filter(of_block).filter(|other| same_stage(pp * chunks, other, task));
            same.map(|other| other.unit).min() == Some(task.unit)
        };
        match task.work {
            Work::Forward | Work::BackwardInput | Work::BackwardWeight if is_first(task.work) => 1.0 / chunks as f64,
            _ => 0.0,
        }
    });
    simulate(&programs, &costs).expect("all costs are known").duration_s()
}

fn same_stage(stages: usize, a: &Task, b: &Task) -> bool {
    let units = golden_units();
    let stage = |unit: usize| (1..stages).filter(|stage| stage * units / stages <= unit).count();
    stage(a.unit.0) == stage(b.unit.0)
}

fn golden_units() -> usize {
    Model::open(&golden("llama3")).expect("a known architecture").units.len()
}

#[test]
fn idle_time_is_what_the_formulas_say() {
    for (pp, micros) in [(2, 4), (2, 8), (3, 6), (3, 9)] {
        let (p, m) = (pp as f64, micros as f64);
        let busy = 3.0 * m;
        let expected = [
            (PipelineOrder::Gpipe, 3.0 * (p - 1.0)),
            (PipelineOrder::OneForwardOneBackward, 3.0 * (p - 1.0)),
            (PipelineOrder::ZbH1, p - 1.0),
        ];
        for (order, idle) in expected {
            let found = step_s(pp, order, micros) - busy;
            assert!(
                (found - idle).abs() < 1e-9,
                "{order:?}, {pp} places, {micros} micro-batches: idle {found}, not {idle}"
            );
        }
    }
    // Two stages at each place.
    for (order, idle) in [(PipelineOrder::Interleaved, 1.5), (PipelineOrder::ZbV, 0.5)] {
        let found = step_s(2, order, 8) - 24.0;
        assert!((found - idle).abs() < 1e-9, "{order:?}: idle {found}, not {idle}");
    }
}
