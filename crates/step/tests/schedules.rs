//! Every schedule against the plain single rank, its counts, and whether it really overlaps.

mod support;

use std::time::Duration;

use evenkeel_comm::{Link, Options};
use evenkeel_device::DType;
use evenkeel_model::{Cut, UnitKind};
use evenkeel_step::schedule::{
    Arrangement, CROSS_PASS, Chain, ChainUnit, DEFAULT, NONE, OASES, PartSize, SAVED_COMM, SCHEDULES, Schedule, Units,
};
use evenkeel_step::{Members, Program, Task, Work, verify};
use support::on_cuda;
use support::ranks::{TOLERANCE, compare, dropping, dry_peak_bytes, on_one_rank, on_ranks, timeline};

const PARTS: [usize; 3] = [1, 2, 4];

#[test]
fn every_schedule_gives_the_losses_and_gradients_of_the_single_rank_with_dropout_on() {
    for origin in dropping() {
        let (case, whole) = (origin.case, on_one_rank(&origin, DType::F32));
        assert_ne!(whole.losses, on_one_rank(case, DType::F32).losses, "{case} drops something");
        for (ranks, split_sequence) in [(1, false), (2, false), (2, true), (4, false), (4, true)] {
            let cut = Cut { split_sequence, ..Cut::even(ranks) };
            for arrangement in
                SCHEDULES.iter().flat_map(|&schedule| PARTS.map(|parts| Arrangement::of(schedule).in_parts(parts)))
            {
                let outcomes = on_ranks(&origin, &cut, DType::F32, arrangement, &Options::default());
                let what = format!("{case}, {ranks} ranks, split {split_sequence}, {arrangement:?}");
                compare(&what, &whole, &outcomes, TOLERANCE);
            }
        }
    }
}

#[test]
fn the_choices_of_a_schedule_make_no_difference_to_what_is_computed() {
    let whole = on_one_rank("llama3", DType::F32);
    let oases = Arrangement::of(OASES).in_parts(2);
    let choices = [
        oases.ahead(),
        oases.blocking(),
        oases.recomputing(Units::Attention),
        oases.recomputing(Units::Mlp),
        Arrangement::of(NONE).ahead(),
        Arrangement::of(CROSS_PASS).ahead(),
    ];
    for (arrangement, split_sequence) in choices.into_iter().flat_map(|choice| [(choice, false), (choice, true)]) {
        let cut = Cut { split_sequence, ..Cut::even(2) };
        let outcomes = on_ranks("llama3", &cut, DType::F32, arrangement, &Options::default());
        compare(&format!("split {split_sequence}, {arrangement:?}"), &whole, &outcomes, TOLERANCE);
    }
}

#[test]
fn memory_follows_the_program_to_the_byte() {
    for split_sequence in [false, true] {
        let cut = Cut { split_sequence, ..Cut::even(2) };
        for arrangement in
            SCHEDULES.iter().flat_map(|&schedule| PARTS.map(|parts| Arrangement::of(schedule).in_parts(parts)))
        {
            let outcomes = on_ranks("llama3", &cut, DType::F32, arrangement, &Options::default());
            for (rank, outcome) in outcomes.iter().enumerate() {
                let expected = dry_peak_bytes("llama3", &cut, rank, arrangement);
                assert_eq!(outcome.peak_bytes, expected, "rank {rank}, split {split_sequence}, {arrangement:?}");
            }
        }
    }
}

const LAYERS: usize = 6;
const TOKENS: usize = 64;
const ROW_BYTES: u64 = 1024;

/// A decoder of [`LAYERS`] layers over `ranks` ranks.
fn chain(ranks: usize, splits_sequence: bool) -> Chain {
    let is_partial = ranks > 1;
    let unit = |kind| ChainUnit { kind, is_partial, inputs: 1 };
    let layers = (0..LAYERS).flat_map(|layer| [UnitKind::Attention(layer), UnitKind::Mlp(layer)]);
    Chain {
        units: [UnitKind::Embedding].into_iter().chain(layers).map(unit).collect(),
        head_is_partial: is_partial,
        starts_stream: false,
        splits_sequence,
        row_bytes: ROW_BYTES,
        stats_bytes: 16,
        groups: vec![Members { name: "tp".to_owned(), ranks: (0..ranks).collect() }],
        data_group: None,
        buckets: Vec::new(),
        loans: Vec::new(),
    }
}

fn program(schedule: Schedule, parts: usize, splits_sequence: bool) -> Program {
    let size = PartSize { tokens: TOKENS / parts, chunk_rows: vec![TOKENS / parts] };
    let arrangement = Arrangement::of(schedule).in_parts(parts);
    let program = arrangement.write(&chain(2, splits_sequence), &[vec![size; parts]]);
    assert_eq!(verify(&[program.clone(), program.clone()]), Ok(()));
    program
}

/// Whether a task is part of a layer, and not of the embedding or the head.
fn is_in_layer(task: &Task) -> bool {
    (1..=2 * LAYERS).contains(&task.unit.0)
}

/// How many exchanges of this kind a layer has, and their bytes.
fn per_layer(program: &Program, work: Work) -> (usize, u64) {
    let of_layers = program.tasks.iter().filter(|task| task.work == work && is_in_layer(task));
    let bytes: Vec<u64> = of_layers.map(|task| task.exchange.unwrap().bytes).collect();
    assert!(bytes.len().is_multiple_of(LAYERS), "{work:?}");
    (bytes.len() / LAYERS, bytes.iter().sum::<u64>() / LAYERS as u64)
}

#[test]
fn reductions_and_bytes_per_layer_are_those_of_the_method() {
    let stream = TOKENS as u64 * ROW_BYTES;
    let cases = [
        (NONE, 1, 4, 4 * stream),
        (DEFAULT, 1, 6, 6 * stream),
        (SAVED_COMM, 1, 4, 4 * stream),
        (CROSS_PASS, 2, 12, 6 * stream),
        (OASES, 2, 8, 4 * stream),
        (OASES, 4, 16, 4 * stream),
    ];
    for (schedule, parts, count, bytes) in cases {
        let name = schedule.name;
        assert_eq!(per_layer(&program(schedule, parts, false), Work::AllReduce), (count, bytes), "{name}");
        // Split by tokens, a reduction is a reduce-scatter; what it left to others is gathered behind it.
        assert_eq!(per_layer(&program(schedule, parts, true), Work::ReduceScatter), (count, bytes), "{name}, split");
    }
}

/// How often an exchange's value is read by the compute task that follows it, so that nothing hides it.
fn unhidden(program: &Program) -> usize {
    let exchanges = program.tasks.windows(2).filter(|pair| pair[0].exchange.is_some() && is_in_layer(&pair[0]));
    exchanges.filter(|pair| pair[0].writes.iter().any(|value| pair[1].reads.contains(value))).count()
}

#[test]
fn overlapped_schedules_have_something_to_compute_behind_every_reduction() {
    for (schedule, parts, expected) in [(DEFAULT, 1, true), (CROSS_PASS, 2, false), (OASES, 2, false), (NONE, 2, false)]
    {
        let program = program(schedule, parts, false);
        assert_eq!(unhidden(&program) > 0, expected, "{}:\n{program}", schedule.name);
    }
}

#[test]
fn traces_show_the_same_reductions_and_overlap_only_where_nothing_blocks() {
    if on_cuda() {
        return println!("skipped: no link is emulated between ranks on a card");
    }
    // Slow enough for every exchange to be caught beside what is computed.
    let link = Some(Link { latency: Duration::from_micros(300), bytes_per_s: 1e9 });
    let options = Options { link, ..Options::default() };
    let oases = Arrangement::of(OASES).in_parts(2);
    for arrangement in [oases, oases.blocking(), Arrangement::of(DEFAULT)] {
        let outcomes = on_ranks("llama3", &Cut::even(2), DType::F32, arrangement, &options);
        let timeline = timeline(&outcomes);
        for (rank, outcome) in outcomes.iter().enumerate() {
            let works = |work: Work| outcome.program.tasks.iter().filter(|task| task.work == work).count();
            let ran = timeline.ranks[rank].iter().filter(|span| span.work == Work::AllReduce).count();
            assert_eq!(ran, works(Work::AllReduce));
            let overlapped = timeline.overlapped_exchanges(rank);
            let is_blocking = outcome.program.blocking;
            assert!(
                if is_blocking { overlapped == 0 } else { overlapped > ran / 2 },
                "{arrangement:?}: {overlapped} of {ran}"
            );
        }
    }
}
