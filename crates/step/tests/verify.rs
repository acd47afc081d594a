//! Programs that `verify` refuses, and those that it accepts.

use evenkeel_model::UnitKind;
use evenkeel_random::Random;
use evenkeel_step::schedule::{
    Arrangement, Chain, ChainBucket, ChainMigration, ChainStages, ChainUnit, PartSize, SCHEDULES,
};
use evenkeel_step::{
    BucketIdx, Exchange, GroupIdx, Members, Micro, Program, Task, UnitIdx, Unsound, Value, ValueKind, Values, Work,
    verify,
};

fn members(name: &str, ranks: &[usize]) -> Members {
    Members { name: name.to_owned(), ranks: ranks.to_vec() }
}

/// A chain over two ranks, or on one.
fn chain(ranks: usize, splits_sequence: bool, starts_stream: bool) -> Chain {
    let is_partial = ranks > 1;
    let migrated = |unit| ChainMigration { unit, value_bytes: 12, gradient_bytes: 24 };
    let kinds = [UnitKind::Embedding, UnitKind::Attention(0), UnitKind::Mlp(0), UnitKind::Layer(1), UnitKind::Head];
    let unit = |kind| ChainUnit {
        starts_stream: starts_stream && kind == UnitKind::Embedding,
        ..ChainUnit::of(kind, is_partial)
    };
    let sum = ChainBucket {
        users: vec![1, 2, 3, 4],
        is_shared_table: false,
        is_of_entries: true,
        is_trained: true,
        summed_in: Some(GroupIdx(0)),
        measured_in: Vec::new(),
        measures_rows: false,
        gradient_bytes: 100,
        value_bytes: 100,
        splits_gradients: false,
        splits_values: false,
        splits_update: false,
    };
    Chain {
        units: kinds.map(unit).to_vec(),
        stages: ChainStages::default(),
        splits_sequence,
        row_bytes: 8,
        squares_bytes: 4,
        stats_bytes: 16,
        groups: vec![members("tp", &(0..ranks).collect::<Vec<_>>())],
        data_group: None,
        pipeline_group: None,
        keepers: vec![GroupIdx(0)],
        buckets: if is_partial { vec![sum] } else { Vec::new() },
        measures_rows: false,
        migrations: if is_partial { [1, 3].map(migrated).to_vec() } else { Vec::new() },
    }
}

/// The programs of all schedules over two ranks and on one.
fn sound() -> Vec<Vec<Program>> {
    let size = |tokens: usize| PartSize { tokens, chunk_rows: vec![tokens.div_ceil(2), tokens / 2] };
    let micros = [vec![size(6), size(4)], vec![size(10)]];
    let chains = [chain(1, false, true), chain(2, false, true), chain(2, true, true), chain(2, true, false)];
    let mut all = Vec::new();
    for (chain, schedule) in chains.iter().flat_map(|chain| SCHEDULES.map(|schedule| (chain, schedule))) {
        for arrangement in [Arrangement::of(schedule), Arrangement::of(schedule).ahead()] {
            all.push(vec![arrangement.step(chain, &micros); chain.groups[0].ranks.len()]);
        }
    }
    all
}

#[test]
fn programs_that_lost_or_repeat_a_part_are_refused() {
    for programs in sound() {
        assert_eq!(verify(&programs), Ok(()));
        for index in 0..programs[0].tasks.len() {
            let broken = |change: fn(&mut Vec<Task>, usize)| {
                let mut programs = programs.clone();
                change(&mut programs[0].tasks, index);
                verify(&programs)
            };
            let task = &programs[0].tasks[index];
            let without = |tasks: &mut Vec<Task>, index: usize| drop(tasks.remove(index));
            assert!(broken(without).is_err(), "without `{task}`");
            let twice = |tasks: &mut Vec<Task>, index: usize| tasks.insert(index, tasks[index].clone());
            assert!(broken(twice).is_err(), "with `{task}` twice");
            if !task.frees.is_empty() {
                let unfreed = |tasks: &mut Vec<Task>, index: usize| tasks[index].frees.truncate(0);
                assert!(broken(unfreed).is_err(), "`{task}` frees less");
            }
            let is_migration = matches!(task.work, Work::Migrate | Work::Return);
            if is_migration {
                let elsewhere = |tasks: &mut Vec<Task>, index: usize| tasks[index].unit.0 += 1;
                assert!(broken(elsewhere).is_err(), "`{task}` is of another unit");
                let larger = |tasks: &mut Vec<Task>, index: usize| tasks[index].exchange.as_mut().unwrap().bytes += 4;
                assert_eq!(broken(larger), Ok(()), "of `{task}` each moves its own part");
            } else if task.exchange.is_some() && programs.len() > 1 {
                let larger = |tasks: &mut Vec<Task>, index: usize| tasks[index].exchange.as_mut().unwrap().bytes += 4;
                assert!(matches!(broken(larger), Err(Unsound::Disagree { .. })), "`{task}` moves more");
            }
        }
    }
}

fn below(random: &mut Random, limit: usize) -> usize {
    random.below(limit as u64) as usize
}

fn value(unit: usize, kind: ValueKind) -> Value {
    Value { kind, unit: UnitIdx(unit), micro: Micro { index: 0, part: 0 } }
}

fn task(
    work: Work,
    unit: usize,
    reads: Vec<Value>,
    writes: Vec<Value>,
    frees: Vec<Value>,
    group: Option<usize>,
) -> Task {
    let exchange = group.map(|group| Exchange { group: GroupIdx(group), bytes: 8 * unit as u64 });
    let [reads, writes, frees] = [reads, writes, frees].map(Values::from);
    Task { work, unit: UnitIdx(unit), micro: Micro { index: 0, part: 0 }, reads, writes, frees, exchange }
}

/// Programs that are sound by construction: a random list of exchanges over random groups, which every member goes through in
/// order. Each exchange sends a value computed before it, and its result is read later.
fn generated(random: &mut Random) -> Vec<Program> {
    let ranks = 2 + below(random, 4);
    let groups: Vec<Members> = (0..1 + below(random, 4))
        .map(|group| {
            let mut members_of: Vec<usize> = (0..ranks).filter(|_| below(random, 3) > 0).collect();
            if members_of.len() < 2 {
                members_of = vec![0, 1];
            }
            members(&format!("group {group}"), &members_of)
        })
        .collect();
    let mut programs =
        vec![Program { tasks: Vec::new(), groups: groups.clone(), blocking: below(random, 3) == 0 }; ranks];
    let mut unread: Vec<Vec<Value>> = vec![Vec::new(); ranks];
    for unit in 0..5 + below(random, 30) {
        let group = below(random, groups.len());
        for &rank in &groups[group].ranks {
            let (output, reduced) = (value(unit, ValueKind::Output), value(unit, ValueKind::OutputReduced));
            let late = unread[rank].len().saturating_sub(below(random, 4));
            let read: Vec<Value> = unread[rank].drain(..late).collect();
            let tasks = &mut programs[rank].tasks;
            tasks.push(task(Work::Forward, unit, read.clone(), vec![output], read, None));
            tasks.push(task(Work::AllReduce, unit, vec![output], vec![reduced], vec![output], Some(group)));
            unread[rank].push(reduced);
        }
    }
    for (program, unread) in programs.iter_mut().zip(unread) {
        program.tasks.push(task(Work::BackwardWeight, 0, unread.clone(), Vec::new(), unread, None));
    }
    programs
}

/// Breaks a program in a way that must be noticed; `None` if this way does not apply.
fn broken(mut programs: Vec<Program>, random: &mut Random) -> Option<(String, Vec<Program>)> {
    let rank = below(random, programs.len());
    let tasks = &mut programs[rank].tasks;
    let index = below(random, tasks.len());
    let what = match below(random, 8) {
        0 => {
            // A rank without exchanges has nothing to miss.
            tasks.remove(index).writes.first()?;
            "a task is missing"
        }
        1 => {
            tasks[index].reads.push(value(1000, ValueKind::Saved));
            "a value comes from nowhere"
        }
        2 => {
            tasks[index].frees.pop()?;
            "a value is not freed"
        }
        3 => {
            let freed = *tasks[..tasks.len() - 1].get(index)?.frees.first()?;
            tasks.last_mut()?.reads.push(freed);
            "a value is read after it was freed"
        }
        4 => {
            tasks[index].exchange.as_mut()?.bytes += 1;
            "a size differs"
        }
        5 => {
            tasks[index].exchange.as_mut()?;
            tasks[index].work = Work::AllGather;
            "a collective differs"
        }
        6 => {
            // The exchange comes before the value that it sends.
            tasks[index].exchange?;
            tasks.swap(index.checked_sub(1)?, index);
            "a value is sent before it is computed"
        }
        _ => {
            let other = tasks[index + 1..].iter().position(|task| {
                task.exchange.is_some() && tasks[index].exchange.is_some() && task.exchange != tasks[index].exchange
            })?;
            let other = index + 1 + other;
            let same_group = tasks[index].exchange?.group == tasks[other].exchange?.group;
            if !same_group {
                return None;
            }
            let later = tasks.remove(other);
            tasks.insert(index, later);
            "exchanges of a group change places"
        }
    };
    Some((format!("rank {rank}, task {index}: {what}"), programs))
}

#[test]
fn generated_programs_pass_and_broken_ones_do_not() {
    let mut random = Random::new(&[0x1234_5678_9abc_def1]);
    let mut seen = 0;
    for round in 0..400 {
        let programs = generated(&mut random);
        assert_eq!(verify(&programs), Ok(()), "round {round}");
        for _ in 0..20 {
            let Some((what, broken)) = broken(programs.clone(), &mut random) else { continue };
            assert!(verify(&broken).is_err(), "round {round}, {what}");
            seen += 1;
        }
    }
    assert!(seen > 4000, "only {seen} programs were broken");
}

#[test]
fn exchanges_in_two_orders_are_refused_with_the_cycle() {
    let groups = vec![members("rows", &[0, 1]), members("columns", &[0, 1])];
    let sum = |group: usize| task(Work::SumGradients(BucketIdx(group)), group, vec![], vec![], vec![], Some(group));
    let program =
        |order: [usize; 2]| Program { tasks: order.map(sum).to_vec(), groups: groups.clone(), blocking: false };
    assert_eq!(verify(&[program([0, 1]), program([0, 1])]), Ok(()));
    let refusal = verify(&[program([0, 1]), program([1, 0])]).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "these tasks wait for one another, so none of them would ever run:\n  \
         SumGradients(BucketIdx(1))(1, 0.0) in group `columns`, task 1 of rank 0 and task 0 of rank 1, waits for \
         SumGradients(BucketIdx(0))(0, 0.0) in group `rows`, task 0 of rank 0 and task 1 of rank 1,\n  \
         SumGradients(BucketIdx(0))(0, 0.0) in group `rows`, task 0 of rank 0 and task 1 of rank 1, waits for \
         SumGradients(BucketIdx(1))(1, 0.0) in group `columns`, task 1 of rank 0 and task 0 of rank 1,"
    );
}

#[test]
fn a_computation_that_waits_for_an_exchange_behind_a_peers_is_refused() {
    // Rank 0 sends a value computed from the sum; rank 1 takes part in the sum only after it has received that value.
    let groups = vec![members("sum", &[0, 1]), members("parts", &[0, 1])];
    let (sent, summed) = (value(0, ValueKind::Output), value(0, ValueKind::OutputReduced));
    let (second, gathered) = (value(1, ValueKind::Output), value(1, ValueKind::OutputReduced));
    let sum = task(Work::AllReduce, 0, vec![sent], vec![summed], vec![sent], Some(0));
    let gather = task(Work::AllGather, 1, vec![second], vec![gathered], vec![second], Some(1));
    let compute = |unit, reads: Vec<Value>, writes| task(Work::Forward, unit, reads.clone(), writes, reads, None);
    let first = vec![
        compute(0, vec![], vec![sent]),
        sum.clone(),
        compute(1, vec![summed], vec![second]),
        gather.clone(),
        compute(2, vec![gathered], vec![]),
    ];
    let other = vec![
        compute(1, vec![], vec![second]),
        gather,
        compute(0, vec![gathered], vec![sent]),
        sum,
        compute(2, vec![summed], vec![]),
    ];
    let program = |tasks| Program { tasks, groups: groups.clone(), blocking: false };
    let refusal = verify(&[program(first), program(other)]).unwrap_err();
    assert!(matches!(&refusal, Unsound::Cycle(waits) if waits.len() == 4), "{refusal}");
}

#[test]
fn memory_that_an_exchange_still_writes_to_cannot_be_freed() {
    let (sent, summed) = (value(0, ValueKind::Output), value(0, ValueKind::OutputReduced));
    let program = |reads: Vec<Value>| Program {
        tasks: vec![
            task(Work::Forward, 0, vec![], vec![sent], vec![], None),
            task(Work::AllReduce, 0, vec![sent], vec![summed], vec![sent], Some(0)),
            task(Work::Forward, 1, reads, vec![], vec![summed], None),
        ],
        groups: vec![members("tp", &[0])],
        blocking: false,
    };
    assert_eq!(verify(&[program(vec![summed])]), Ok(()));
    assert!(matches!(verify(&[program(vec![])]), Err(Unsound::FreesNothing { .. })));
}

#[test]
fn a_refusal_names_the_rank_the_task_and_the_value() {
    let mut programs = sound().swap_remove(0);
    programs[0].tasks.remove(0);
    let refusal = verify(&programs).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "rank 0, task 0, `Enter(1, 0.0)  reads Stream(0, 0.0) Output(0, 0.0)  writes Stream(1, 0.0) Normalised(1, 0.0)  \
         frees Output(0, 0.0) Stream(0, 0.0)`, reads Stream(0, 0.0), which nothing has written or which is freed"
    );
}
