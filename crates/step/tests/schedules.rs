//! Every schedule against the plain single rank, its counts, and whether it really overlaps.

mod support;

use std::time::Duration;

use evenkeel_comm::{Link, Options};
use evenkeel_device::DType;
use evenkeel_model::{Cut, UnitKind};
use evenkeel_step::schedule::{
    Arrangement, CROSS_PASS, CROSS_PASS_REFERENCE, Chain, ChainStages, ChainUnit, DEFAULT, DEFAULT_REFERENCE, NONE,
    OASES, PartSize, REFERENCES, SAVED_COMM, SCHEDULES, Schedule, Units, fit,
};
use evenkeel_step::{GroupIdx, Members, Program, Task, Work, verify};
use support::on_cuda;
use support::ranks::{TOLERANCE, compare, dropping, dry_peak_bytes, on_one_rank, on_ranks, timeline};

const PARTS: [usize; 4] = [1, 2, 3, 4];

fn all_arrangements() -> impl Iterator<Item = Arrangement> {
    let schedules = SCHEDULES.into_iter().chain(REFERENCES);
    schedules.flat_map(|schedule| PARTS.map(|parts| Arrangement::of(schedule).in_parts(parts)))
}

#[test]
fn every_schedule_gives_the_losses_and_gradients_of_the_single_rank_with_dropout_on() {
    for origin in dropping() {
        let (case, whole) = (origin.case, on_one_rank(&origin, DType::F32));
        assert_ne!(whole.losses, on_one_rank(case, DType::F32).losses, "{case} drops something");
        for (ranks, split_sequence) in [(1, false), (2, false), (2, true), (4, false), (4, true)] {
            let cut = Cut { split_sequence, ..Cut::even(ranks) };
            // Two ranks see every number of parts; more ranks do the same with shorter slices.
            for arrangement in all_arrangements().filter(|it| if ranks == 2 { it.parts < 4 } else { it.parts == 2 }) {
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
        for arrangement in all_arrangements() {
            let outcomes = on_ranks("llama3", &cut, DType::F32, arrangement, &Options::default());
            for (rank, outcome) in outcomes.iter().enumerate() {
                let expected = dry_peak_bytes("llama3", &cut, rank, arrangement);
                assert_eq!(outcome.peak_bytes, expected, "rank {rank}, split {split_sequence}, {arrangement:?}");
            }
        }
    }
}

const LAYERS: usize = 6;
const TOKENS: usize = 96;
const ROW_BYTES: u64 = 1024;

/// A decoder of [`LAYERS`] layers over `ranks` ranks.
fn chain(ranks: usize, splits_sequence: bool) -> Chain {
    let is_partial = ranks > 1;
    let unit = |kind| ChainUnit::of(kind, is_partial);
    let layers = (0..LAYERS).flat_map(|layer| [UnitKind::Attention(layer), UnitKind::Mlp(layer)]);
    Chain {
        units: [UnitKind::Embedding].into_iter().chain(layers).chain([UnitKind::Head]).map(unit).collect(),
        stages: ChainStages::default(),
        splits_sequence,
        row_bytes: ROW_BYTES,
        squares_bytes: 4,
        stats_bytes: 16,
        groups: vec![Members { name: "tp".to_owned(), ranks: (0..ranks).collect() }],
        data_group: None,
        pipeline_group: None,
        keepers: vec![GroupIdx(0)],
        buckets: Vec::new(),
        measures_rows: false,
        migrations: Vec::new(),
    }
}

fn program(schedule: Schedule, parts: usize, splits_sequence: bool) -> Program {
    arranged(Arrangement::of(schedule).in_parts(parts), splits_sequence)
}

fn arranged(arrangement: Arrangement, splits_sequence: bool) -> Program {
    let parts = arrangement.parts;
    let size = PartSize { tokens: TOKENS / parts, chunk_rows: vec![TOKENS / parts] };
    let program = arrangement.write(&chain(2, splits_sequence), &[vec![size; parts]]);
    assert_eq!(verify(&[program.clone(), program.clone()]), Ok(()));
    program
}

/// Whether a task is part of a layer, and not of the embedding or the head.
fn is_in_layer(task: &Task) -> bool {
    (1..=2 * LAYERS).contains(&task.unit.0)
}

/// The number of exchanges of this kind in a layer, and their bytes.
fn per_layer(program: &Program, work: Work) -> (usize, u64) {
    let of_layers = program.tasks.iter().filter(|task| task.work == work && is_in_layer(task));
    let bytes: Vec<u64> = of_layers.map(|task| task.exchange.unwrap().bytes).collect();
    assert!(bytes.len().is_multiple_of(LAYERS), "{work:?}");
    (bytes.len() / LAYERS, bytes.iter().sum::<u64>() / LAYERS as u64)
}

#[test]
fn exchanges_and_bytes_per_layer_are_those_of_the_method() {
    let stream = TOKENS as u64 * ROW_BYTES;
    // Reductions, and gathers if the stream is split: of inputs, of gradients of outputs, of inputs to recompute from.
    let cases = [
        (NONE, 1, 4, 4),
        (DEFAULT, 1, 5, 6),
        (DEFAULT_REFERENCE, 1, 6, 6),
        (SAVED_COMM, 1, 4, 6),
        (CROSS_PASS, 2, 5, 6),
        (CROSS_PASS_REFERENCE, 2, 6, 6),
        (OASES, 2, 4, 6),
        (OASES, 4, 4, 6),
    ];
    for (schedule, parts, reductions, gathers) in cases {
        let (name, whole, split) = (schedule.name, program(schedule, parts, false), program(schedule, parts, true));
        let expected = |per_part: usize| (per_part * parts, per_part as u64 * stream);
        assert_eq!(per_layer(&whole, Work::AllReduce), expected(reductions), "{name}");
        assert_eq!(per_layer(&whole, Work::AllGather), (0, 0), "{name}");
        assert_eq!(per_layer(&split, Work::ReduceScatter), expected(reductions), "{name}, split");
        assert_eq!(per_layer(&split, Work::AllGather), expected(gathers), "{name}, split");
    }
}

/// The number of exchanges whose result is never read.
fn unread(program: &Program) -> usize {
    let is_thrown_away = |task: &&Task| task.exchange.is_some() && task.writes.iter().any(|it| task.frees.contains(it));
    program.tasks.iter().filter(is_thrown_away).count()
}

#[test]
fn only_the_references_exchange_what_nobody_reads() {
    for split in [false, true] {
        for schedule in SCHEDULES {
            assert_eq!(unread(&program(schedule, 2, split)), 0, "{}, split {split}", schedule.name);
        }
        for schedule in REFERENCES {
            assert_eq!(unread(&program(schedule, 2, split)), 2 * LAYERS, "{}, split {split}", schedule.name);
        }
    }
}

/// The number of awaited exchanges of layers that have nothing to hide behind, and of all awaited ones.
fn unhidden(program: &Program) -> (usize, usize) {
    let awaited = program.awaited().into_iter().filter(|&(index, _)| is_in_layer(&program.tasks[index]));
    let hidden: Vec<bool> = awaited.map(|(_, is_hidden)| is_hidden).collect();
    (hidden.iter().filter(|is_hidden| !*is_hidden).count(), hidden.len())
}

#[test]
fn overlapped_schedules_have_something_to_compute_behind_every_exchange() {
    for (schedule, parts, split) in [
        (OASES, 2, false),
        (OASES, 3, true),
        (OASES, 4, true),
        (CROSS_PASS, 2, false),
        (CROSS_PASS, 3, true),
        (NONE, 2, false),
        (NONE, 3, true),
    ] {
        let (found, of) = unhidden(&program(schedule, parts, split));
        assert_eq!(found, 0, "{}, {parts} parts, split {split}: {found} of {of}", schedule.name);
    }
}

#[test]
fn two_parts_of_a_split_stream_leave_one_of_two_exchanges_bare_in_forward_and_none_elsewhere() {
    // Two exchanges lie between two bodies of a part, and the other part has one body to hide them behind.
    let program = program(OASES, 2, true);
    let bare =
        program.awaited().into_iter().filter(|&(index, is_hidden)| !is_hidden && is_in_layer(&program.tasks[index]));
    let bare: Vec<&Task> = bare.map(|(index, _)| &program.tasks[index]).collect();
    let (parts, units) = (2, 2 * LAYERS);
    assert_eq!(bare.len(), parts * units);
    for task in bare {
        let reads_it = |other: &&Task| other.reads.contains(&task.writes[0]);
        let reader = program.tasks.iter().find(reads_it).unwrap();
        assert!(matches!(reader.work, Work::Enter | Work::Forward), "{task}");
    }
}

#[test]
fn nothing_hides_an_exchange_where_computation_waits_for_all_of_them() {
    for arrangement in
        [Arrangement::of(DEFAULT), Arrangement::of(SAVED_COMM), Arrangement::of(OASES).in_parts(3).blocking()]
    {
        for split in [false, true] {
            let (found, of) = unhidden(&arranged(arrangement, split));
            assert_eq!(found, of, "{arrangement:?}, split {split}");
            assert!(of > 0);
        }
    }
}

#[test]
fn a_program_fits_other_sizes_as_if_it_were_written_for_them() {
    // Parts of a micro-batch by their tokens, each in three chunks, some without rows.
    let sizes = |tokens: &[usize]| -> Vec<Vec<PartSize>> {
        let part =
            |&tokens: &usize| PartSize { tokens, chunk_rows: vec![tokens.min(16); tokens.div_ceil(16)] }.in_chunks(3);
        vec![tokens.iter().map(part).collect(), tokens.iter().rev().map(part).collect()]
    };
    for (arrangement, split) in
        all_arrangements().flat_map(|arrangement| [(arrangement, false), (arrangement.ahead(), true)])
    {
        let chain = chain(2, split);
        let [first, second] = [[40, 17, 33, 24], [31, 48, 1, 20]].map(|tokens| sizes(&tokens[..arrangement.parts]));
        let (mut fitted, written) = (arrangement.write(&chain, &first), arrangement.write(&chain, &second));
        assert_ne!(fitted, written, "{arrangement:?}");
        fit(&mut fitted, &chain, &second);
        assert_eq!(fitted, written, "{arrangement:?}, split {split}");
        assert_eq!(verify(&[fitted.clone(), fitted]), Ok(()), "{arrangement:?}, split {split}");
    }
}

#[test]
fn traces_show_the_reductions_of_the_method_and_overlap_only_where_nothing_blocks() {
    if on_cuda() {
        return println!("skipped: no link is emulated between ranks on a card");
    }
    // Slow enough for every exchange to overlap with computation measurably.
    let link = Some(Link { latency: Duration::from_micros(300), bytes_per_s: 1e9 });
    let options = Options { link, ..Options::default() };
    let oases = Arrangement::of(OASES);
    // Two layers; the embedding's output and the gradient of the head's input are reduced, too.
    let per_layer = |count: usize| 2 + 2 * count;
    for (arrangement, split_sequence, reductions) in [
        (oases.in_parts(2), false, per_layer(4)),
        (oases.in_parts(3), true, per_layer(4)),
        (oases.in_parts(2).blocking(), false, per_layer(4)),
        (Arrangement::of(DEFAULT), false, per_layer(5)),
        (Arrangement::of(DEFAULT_REFERENCE), false, per_layer(6)),
    ] {
        let cut = Cut { split_sequence, ..Cut::even(2) };
        let outcomes = on_ranks("llama3", &cut, DType::F32, arrangement, &options);
        let timeline = timeline(&outcomes);
        for (rank, outcome) in outcomes.iter().enumerate() {
            let ran = |of: fn(Work) -> bool| timeline.ranks[rank].iter().filter(|span| of(span.work)).count();
            let reduced = ran(|work| matches!(work, Work::AllReduce | Work::ReduceScatter));
            let (micros, sums) = (2, ran(|work| matches!(work, Work::SumGradients(_))));
            assert_eq!(reduced, micros * arrangement.parts * reductions, "{arrangement:?}");
            let expected = if split_sequence { sums } else { sums + reduced };
            assert_eq!(outcome.all_reductions as usize, expected, "{arrangement:?}, by the groups' count");
            let overlapped = timeline.overlapped_exchanges(rank);
            assert!(
                if arrangement.overlaps() { overlapped > reduced / 2 } else { overlapped == 0 },
                "{arrangement:?}: {overlapped} of {reduced}"
            );
        }
    }
}
