//! Programs on tables of costs, against times worked out by hand.

use evenkeel_model::UnitKind;
use evenkeel_step::schedule::{
    Arrangement, CROSS_PASS, Chain, ChainStages, ChainUnit, DEFAULT, DEFAULT_REFERENCE, OASES, PartSize, SAVED_COMM,
};
use evenkeel_step::simulate::{Contention, Costs, Unforeseen, simulate};
use evenkeel_step::trace::{Span, Timeline};
use evenkeel_step::{
    Exchange, GroupIdx, Lane, Members, Micro, Program, Task, UnitIdx, Unsound, Value, ValueKind, Values, Work,
};

const ALL: Micro = Micro { index: 0, part: 0 };
const BYTES: u64 = 1000;

fn span(work: Work, unit: usize, seconds: f64) -> Span {
    let bytes = if work.lane() == Lane::Comm { BYTES } else { 0 };
    let unit = UnitIdx(unit);
    Span { work, unit, micro: ALL, lane: work.lane(), start_s: 0.0, came_s: 0.0, end_s: seconds, bytes }
}

fn value(unit: usize, kind: ValueKind) -> Value {
    Value { kind, unit: UnitIdx(unit), micro: ALL }
}

fn task(work: Work, unit: usize, reads: &[Value], writes: &[Value]) -> Task {
    let exchange = (work.lane() == Lane::Comm).then_some(Exchange { group: GroupIdx(0), bytes: BYTES });
    let [reads, writes] = [reads, writes].map(Values::from);
    Task { work, unit: UnitIdx(unit), micro: ALL, frees: reads.clone(), reads, writes, exchange }
}

/// Computes something, sums it, computes something else meanwhile, and reads the sum.
fn program() -> Program {
    let [sent, summed, other] = [(0, ValueKind::Output), (0, ValueKind::OutputReduced), (1, ValueKind::Output)]
        .map(|(unit, kind)| value(unit, kind));
    Program {
        tasks: vec![
            task(Work::Forward, 0, &[], &[sent]),
            task(Work::AllReduce, 0, &[sent], &[summed]),
            task(Work::Forward, 1, &[], &[other]),
            task(Work::Forward, 2, &[summed, other], &[]),
        ],
        groups: vec![Members { name: "tp".to_owned(), ranks: vec![0, 1] }],
        blocking: false,
    }
}

/// Rank 0 computes twice as fast; a sum takes 4 s.
fn costs() -> Costs {
    let of_rank = |slowness: f64| {
        let forward = [1.0, 2.0, 3.0].iter().enumerate();
        let mut spans: Vec<Span> =
            forward.map(|(unit, seconds)| span(Work::Forward, unit, seconds * slowness)).collect();
        spans.push(span(Work::AllReduce, 0, 4.0));
        spans
    };
    Costs::measured(&[Timeline { ranks: vec![of_rank(1.0), of_rank(2.0)] }])
}

fn times(timeline: &Timeline, rank: usize) -> Vec<[f64; 3]> {
    timeline.ranks[rank].iter().map(|span| [span.start_s, span.came_s, span.end_s]).collect()
}

#[test]
fn queues_run_in_order_and_wait_for_values_and_peers() {
    let timeline = simulate(&[program(), program()], &costs()).unwrap();
    // Rank 0 comes to the sum at 1 and waits until rank 1 comes at 2; both have it at 6.
    assert_eq!(times(&timeline, 0), [[0.0, 0.0, 1.0], [1.0, 2.0, 6.0], [1.0, 1.0, 3.0], [6.0, 6.0, 9.0]]);
    assert_eq!(times(&timeline, 1), [[0.0, 0.0, 2.0], [2.0, 2.0, 6.0], [2.0, 2.0, 6.0], [6.0, 6.0, 12.0]]);
    assert_eq!(timeline.duration_s(), 12.0);
    let shares = timeline.shares(0);
    assert_eq!([shares.compute_s, shares.waiting_s, shares.transfer_s, shares.exposed_s], [6.0, 1.0, 4.0, 3.0]);
    assert_eq!(timeline.shares(1).exposed_s, 0.0);
}

#[test]
fn a_blocking_program_computes_nothing_beside_an_exchange() {
    let blocking = Program { blocking: true, ..program() };
    let timeline = simulate(&[blocking.clone(), blocking], &costs()).unwrap();
    assert_eq!(times(&timeline, 0), [[0.0, 0.0, 1.0], [1.0, 2.0, 6.0], [6.0, 6.0, 8.0], [8.0, 8.0, 11.0]]);
    assert_eq!([0, 1].map(|rank| timeline.overlapped_exchanges(rank)), [0, 0]);
}

#[test]
fn what_another_stage_sends_waits_for_room() {
    let passed = |index: usize| Value { kind: ValueKind::Passed, unit: UnitIdx(1), micro: Micro { index, part: 0 } };
    let of_micro = |work: Work, index: usize, reads: &[Value], writes: &[Value]| {
        let exchange = (work == Work::Pass).then_some(Exchange { group: GroupIdx(0), bytes: BYTES });
        Task { exchange, micro: passed(index).micro, ..task(work, 1, reads, writes) }
    };
    let join = |index: usize| of_micro(Work::Join, index, &[], &[passed(index)]);
    let send = |index: usize| of_micro(Work::Pass, index, &[passed(index)], &[]);
    let receive = |index: usize| of_micro(Work::Pass, index, &[], &[passed(index)]);
    let read = |index: usize| of_micro(Work::Arrive, index, &[passed(index)], &[]);
    let of_rank = |tasks: Vec<Task>| Program { tasks, ..program() };
    let sender = of_rank((0..3).flat_map(|index| [join(index), send(index)]).collect());
    let reader = of_rank(vec![receive(0), receive(1), read(0), receive(2), read(1), read(2)]);
    let programs = [sender, reader];
    let costs = Costs::of_tasks(&programs, |_, _, task| if task.work == Work::Arrive { 10.0 } else { 1.0 });
    let timeline = simulate(&programs, &costs).unwrap();
    let passes = |rank: usize| {
        let spans = timeline.ranks[rank].iter().filter(|span| span.lane == Lane::Pass);
        spans.map(|span| [span.start_s, span.came_s, span.end_s]).collect::<Vec<_>>()
    };
    // There is room for the first two; the third waits until the first has been read at 12.
    assert_eq!(passes(0), [[1.0, 1.0, 2.0], [2.0, 2.0, 3.0], [3.0, 12.0, 13.0]]);
    assert_eq!(passes(1), [[0.0, 1.0, 2.0], [2.0, 2.0, 3.0], [12.0, 12.0, 13.0]]);
}

#[test]
fn contention_slows_what_runs_beside_something_else() {
    let mut costs = costs();
    costs.contention = Contention { compute: 1.0, exchange: 0.0 };
    let timeline = simulate(&[program(), program()], &costs).unwrap();
    // The first of rank 0's 2 s runs alone until the sum begins at 2; rank 1 does 2 of its 4 s beside the sum.
    assert_eq!(times(&timeline, 0)[2], [1.0, 1.0, 4.0]);
    assert_eq!(times(&timeline, 1)[2], [2.0, 2.0, 8.0]);
    let measured = Costs::measured(&[simulate(&[program(), program()], &self::costs()).unwrap()]);
    let learnt = measured.with_contention(&[timeline]).unwrap().contention;
    assert!((learnt.compute - 1.0).abs() < 1e-9, "{learnt:?}");
    assert_eq!(learnt.exchange, 0.0);
}

#[test]
fn what_would_wait_for_ever_is_refused() {
    let mut other = program();
    other.tasks.remove(1);
    assert!(matches!(simulate(&[program(), other], &costs()), Err(Unforeseen::Unsound(Unsound::ReadsNothing { .. }))));
    let mut other = program();
    other.tasks[1].exchange = Some(Exchange { group: GroupIdx(0), bytes: BYTES + 1 });
    assert!(matches!(simulate(&[program(), other], &costs()), Err(Unforeseen::Unsound(Unsound::Disagree { .. }))));
}

#[test]
fn tasks_that_nobody_has_measured_are_refused_and_take_no_time_for_free() {
    let without = |work: Work, unit: usize| {
        let mut program = program();
        program.tasks.retain(|task| (task.work, task.unit.0) != (work, unit));
        Costs::of_tasks(&[program.clone(), program], |_, _, _| 1.0)
    };
    for (work, unit, task) in [(Work::Forward, 1, "Forward(1, 0.0)"), (Work::AllReduce, 0, "AllReduce(0, 0.0)")] {
        let refused = Unforeseen::NoCost { rank: 0, task: task.to_owned() };
        assert_eq!(simulate(&[program(), program()], &without(work, unit)), Err(refused.clone()));
        let overlapped = simulate(&[program(), program()], &costs()).unwrap();
        assert_eq!(without(work, unit).with_contention(&[overlapped]), Err(refused));
    }
    // An exchange of no bytes says nothing about the cost of bytes.
    let empty = |bytes: u64| {
        let mut program = program();
        program.tasks[1].exchange = Some(Exchange { group: GroupIdx(0), bytes });
        [program.clone(), program]
    };
    let costs = Costs::of_tasks(&empty(0), |_, _, _| 1.0);
    assert!(simulate(&empty(0), &costs).is_ok());
    assert!(matches!(simulate(&empty(1), &costs), Err(Unforeseen::NoCost { .. })));
}

#[test]
fn a_loan_takes_as_long_as_whoever_moves_most() {
    let migrated = value(1, ValueKind::Migrated);
    let program = |bytes: u64| {
        let exchange = Some(Exchange { group: GroupIdx(0), bytes });
        let migrate = Task { exchange, ..task(Work::Migrate, 1, &[], &[migrated]) };
        let tasks = vec![migrate, task(Work::Forward, 0, &[], &[]), task(Work::Forward, 1, &[migrated], &[])];
        Program { tasks, ..self::program() }
    };
    // A thousand bytes take 4 s, also for ranks with nothing to move.
    let spans = |bytes: u64| {
        let migrate = Span { bytes, ..span(Work::Migrate, 1, 4.0) };
        vec![migrate, span(Work::Forward, 0, 1.0), span(Work::Forward, 1, 2.0)]
    };
    let costs = Costs::measured(&[Timeline { ranks: vec![spans(0), spans(BYTES)] }]);
    for (bytes, migration_s) in [([0, BYTES], 4.0), ([BYTES, 0], 4.0), ([BYTES / 2, BYTES], 4.0), ([0, BYTES / 2], 2.0)]
    {
        let timeline = simulate(&bytes.map(program), &costs).unwrap();
        for rank in [0, 1] {
            let expected = [[0.0, 0.0, migration_s], [0.0, 0.0, 1.0], [migration_s, migration_s, migration_s + 2.0]];
            assert_eq!(times(&timeline, rank), expected, "{bytes:?}");
        }
    }
}

const LAYERS: usize = 12;

/// The step of a decoder over two ranks in which every body takes 1 s, its two gradients as long, and a layer's reductions, as
/// many as in the published default, as long as its computation. If the stream is split, each half of a reduction takes half of
/// its time.
fn step_s(arrangement: Arrangement, splits_sequence: bool) -> f64 {
    let unit = |kind| ChainUnit::of(kind, true);
    let layers = (0..LAYERS).flat_map(|layer| [UnitKind::Attention(layer), UnitKind::Mlp(layer)]);
    let chain = Chain {
        units: [UnitKind::Embedding].into_iter().chain(layers).chain([UnitKind::Head]).map(unit).collect(),
        stages: ChainStages::default(),
        splits_sequence,
        row_bytes: 1000,
        squares_bytes: 4,
        stats_bytes: 0,
        groups: vec![Members { name: "tp".to_owned(), ranks: vec![0, 1] }],
        data_group: None,
        pipeline_group: None,
        keepers: vec![GroupIdx(0)],
        buckets: Vec::new(),
        measures_rows: false,
        migrations: Vec::new(),
    };
    let parts = arrangement.parts;
    let size = PartSize { tokens: 48 / parts, chunk_rows: vec![48 / parts] };
    let program = arrangement.write(&chain, &[vec![size; parts]]);
    let seconds = |task: &Task| match task.work {
        Work::Forward | Work::Recompute | Work::BackwardInput | Work::BackwardWeight => 1.0,
        Work::AllReduce => 8.0 / 6.0,
        Work::ReduceScatter => 4.0 / 6.0,
        Work::AllGather if task.unit.0 <= 2 * LAYERS => 4.0 / 6.0,
        _ => 0.0,
    };
    let spans = program.tasks.iter().map(|task| {
        let end_s = seconds(task) / parts as f64;
        let bytes = task.exchange.map_or(0, |exchange| exchange.bytes);
        Span { end_s, micro: task.micro, bytes, ..span(task.work, task.unit.0, 0.0) }
    });
    let costs = Costs::measured(&[Timeline { ranks: vec![spans.collect::<Vec<_>>(); 2] }]);
    simulate(&[program.clone(), program], &costs).unwrap().duration_s()
}

#[test]
fn schedules_take_what_their_overlap_promises() {
    let (bodies_s, reductions_s) = (8.0 * LAYERS as f64, 8.0 * LAYERS as f64);
    // Embedding, head and the first and last reductions, which nothing hides.
    let ends_s = 8.0;
    for (schedule, reductions) in [(DEFAULT_REFERENCE, 6.0), (DEFAULT, 5.0), (SAVED_COMM, 4.0)] {
        let took_s = step_s(Arrangement::of(schedule), false);
        let promised_s = bodies_s + reductions_s * reductions / 6.0;
        assert!((took_s - promised_s).abs() < ends_s, "{}: {took_s}, expected {promised_s}", schedule.name);
    }
    for (schedule, parts, split) in [
        (CROSS_PASS, 2, false),
        (OASES, 2, false),
        (OASES, 4, false),
        (CROSS_PASS, 3, true),
        (OASES, 3, true),
        (OASES, 4, true),
    ] {
        let overlapped_s = step_s(Arrangement::of(schedule).in_parts(parts), split);
        // With all reductions, forward alone has more to exchange than to compute.
        let bound_s = bodies_s * if schedule == CROSS_PASS { 1.15 } else { 1.1 };
        assert!(overlapped_s < bound_s + ends_s, "{} in {parts}, split {split}: {overlapped_s}", schedule.name);
        let blocking_s = step_s(Arrangement::of(schedule).in_parts(parts).blocking(), split);
        assert!(blocking_s > 1.4 * overlapped_s, "{} in {parts}, split {split}, blocking: {blocking_s}", schedule.name);
    }
    // If the stream is split, two parts leave two exchanges of each of forward's units bare; some of them overlap with others.
    let [two_s, three_s] = [2, 3].map(|parts| step_s(Arrangement::of(OASES).in_parts(parts), true));
    let bare_s = 2.0 * LAYERS as f64 * 4.0 / 6.0;
    assert!(two_s > three_s + bare_s / 3.0, "in two parts {two_s}, in three {three_s}");
}
