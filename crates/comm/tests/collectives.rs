//! Every collective against a plain twin that knows all operands.

mod support;

use evenkeel_comm::{Communicator, ExchangeKind, Group};
use evenkeel_device::{DType, Queue, Tensor};
use support::{Random, bits, numbers_of, on_ranks, options, possible, sum_of, try_on_ranks};

const RANKS: [usize; 5] = [1, 2, 3, 4, 8];
const DTYPES: [DType; 2] = [DType::F32, DType::Bf16];
/// None, one, around a cache line of f32 and of bf16, around a piece, and many.
const LENGTHS: [usize; 10] = [0, 1, 15, 16, 17, 63, 64, 65, 1000, 40_003];

fn everybody(communicator: &Communicator) -> Group {
    communicator.group("all", &(0..communicator.size()).collect::<Vec<_>>())
}

/// Runs a case on every number of ranks, with every dtype.
fn on_all(case: impl Fn(&Group, &Queue, DType) + Sync) {
    for ranks in possible(&RANKS) {
        on_ranks(ranks, |communicator, device| {
            let group = everybody(communicator);
            DTYPES.into_iter().for_each(|dtype| case(&group, device.comm(), dtype));
        });
    }
}

/// Cuts of `rows` for `parts` members, some of them empty.
fn cuts(seed: u64, rows: usize, parts: usize) -> Vec<usize> {
    let mut random = Random::new(seed);
    let mut bounds: Vec<usize> = (1..parts).map(|_| random.below(rows + 1)).collect();
    bounds.extend([0, rows]);
    bounds.sort_unstable();
    bounds
}

#[test]
fn all_reduce_gives_everybody_the_sum_in_the_order_of_the_members() {
    on_all(|group, queue, dtype| {
        for (seed, len) in LENGTHS.into_iter().enumerate() {
            let x = queue.floats(1, len, dtype, &numbers_of(seed as u64, group.rank(), len, dtype));
            group.all_reduce(queue, &x);
            let expected = sum_of(seed as u64, 0..group.size(), len, dtype);
            assert_eq!(bits(&queue.read(&x)), bits(&expected), "{dtype:?}, {len} elements");
        }
    });
}

#[test]
fn a_large_all_reduce_has_the_same_bits_on_every_rank_and_every_time() {
    const LEN: usize = 1_000_003;
    let once = || {
        on_ranks(3, |communicator, device| {
            let queue = device.comm();
            let x = queue.floats(1, LEN, DType::F32, &numbers_of(7, communicator.rank(), LEN, DType::F32));
            everybody(communicator).all_reduce(queue, &x);
            bits(&queue.read(&x))
        })
    };
    let first = once();
    assert_eq!(first[0], bits(&sum_of(7, 0..3, LEN, DType::F32)));
    for again in [once(), once()] {
        assert!(again.iter().chain(&first).all(|result| result == &first[0]), "the bits differ");
    }
}

#[test]
fn reduce_scatter_gives_each_member_its_rows_of_the_sum_however_they_are_cut() {
    on_all(|group, queue, dtype| {
        for (seed, (rows, cols)) in [(0, 5), (1, 64), (13, 17), (64, 33), (300, 100)].into_iter().enumerate() {
            let seed = seed as u64;
            let len = rows * cols;
            let bounds = cuts(seed, rows, group.size());
            let mine = bounds[group.rank()]..bounds[group.rank() + 1];
            let expected = &sum_of(seed, 0..group.size(), len, dtype)[mine.start * cols..mine.end * cols];
            let values = numbers_of(seed, group.rank(), len, dtype);

            let from = queue.floats(rows, cols, dtype, &values);
            let to = queue.zeros(mine.len(), cols, dtype);
            group.reduce_scatter(queue, &from, &to, &bounds);
            assert_eq!(bits(&queue.read(&to)), bits(expected), "{dtype:?}, [{rows}, {cols}] cut at {bounds:?}");
            assert_eq!(bits(&queue.read(&from)), bits(&values), "the operand stays");

            let in_place = from.row_range(mine.clone());
            group.reduce_scatter(queue, &from, &in_place, &bounds);
            assert_eq!(bits(&queue.read(&in_place)), bits(expected), "in place");
        }
    });
}

#[test]
fn all_gather_puts_everybodys_rows_in_order_however_they_are_cut() {
    on_all(|group, queue, dtype| {
        for (seed, (rows, cols)) in [(0, 5), (1, 64), (13, 17), (64, 33), (300, 100)].into_iter().enumerate() {
            let seed = seed as u64;
            let bounds = cuts(seed, rows, group.size());
            let part = |rank: usize| numbers_of(seed, rank, (bounds[rank + 1] - bounds[rank]) * cols, dtype);
            let expected: Vec<f32> = (0..group.size()).flat_map(part).collect();
            let mine = bounds[group.rank()]..bounds[group.rank() + 1];

            let from = queue.floats(mine.len(), cols, dtype, &part(group.rank()));
            let to = queue.zeros(rows, cols, dtype);
            group.all_gather(queue, &from, &to, &bounds);
            assert_eq!(bits(&queue.read(&to)), bits(&expected), "{dtype:?}, [{rows}, {cols}] cut at {bounds:?}");

            let mut own = vec![0.0; rows * cols];
            own[mine.start * cols..mine.end * cols].copy_from_slice(&part(group.rank()));
            let to = queue.floats(rows, cols, dtype, &own);
            group.all_gather(queue, &to.row_range(mine), &to, &bounds);
            assert_eq!(bits(&queue.read(&to)), bits(&expected), "in place");
        }
    });
}

#[test]
fn reduce_gives_the_root_the_sum_and_leaves_the_others_theirs() {
    on_all(|group, queue, dtype| {
        for (len, root) in LENGTHS.into_iter().flat_map(|len| [0, group.size() - 1].map(|root| (len, root))) {
            let values = numbers_of(len as u64, group.rank(), len, dtype);
            let x = queue.floats(1, len, dtype, &values);
            group.reduce(queue, &x, root);
            let sum = sum_of(len as u64, 0..group.size(), len, dtype);
            let expected = if group.rank() == root { sum } else { values };
            assert_eq!(bits(&queue.read(&x)), bits(&expected), "{dtype:?}, {len} elements to {root}");
        }
    });
}

#[test]
fn broadcast_gives_everybody_the_roots_tensor() {
    on_all(|group, queue, dtype| {
        for (len, root) in LENGTHS.into_iter().flat_map(|len| [0, group.size() - 1].map(|root| (len, root))) {
            let x = queue.floats(1, len, dtype, &numbers_of(len as u64, group.rank(), len, dtype));
            group.broadcast(queue, &x, root);
            assert_eq!(bits(&queue.read(&x)), bits(&numbers_of(len as u64, root, len, dtype)), "{dtype:?}, {len}");
        }
    });
}

#[test]
fn what_is_sent_around_a_ring_comes_back() {
    on_all(|group, queue, dtype| {
        let (me, size) = (group.rank(), group.size());
        if size == 1 {
            return;
        }
        for len in LENGTHS {
            let x = queue.floats(1, len, dtype, &numbers_of(len as u64, 0, len, dtype));
            let received = queue.zeros(1, len, dtype);
            if me == 0 {
                group.send(queue, &x, 1);
                group.receive(queue, &received, size - 1);
            } else {
                group.receive(queue, &received, me - 1);
                group.send(queue, &received, (me + 1) % size);
            }
            assert_eq!(bits(&queue.read(&received)), bits(&numbers_of(len as u64, 0, len, dtype)), "{dtype:?}, {len}");
        }
    });
}

#[test]
fn a_redistribution_brings_every_part_to_its_place_whatever_lies_between_them() {
    const ROWS: usize = 6;
    on_all(|group, queue, dtype| {
        // Every member sends slice i of its matrix to member i.
        let me = group.rank();
        let size = group.size();
        let width = 5;
        let values = |rank: usize| numbers_of(3, rank, ROWS * width * size, dtype);
        let from = queue.floats(ROWS, width * size, dtype, &values(me));
        let to = queue.zeros(ROWS, width * size, dtype);
        let of = |tensor: &Tensor| -> Vec<_> {
            (0..size).map(|other| (other, tensor.col_range(other * width..(other + 1) * width).view())).collect()
        };
        group.redistribute(queue, &of(&from), &of(&to));
        let column = |row: usize, member: usize, col: usize| values(member)[(row * size + me) * width + col];
        let places =
            (0..ROWS).flat_map(|row| (0..size).flat_map(move |member| (0..width).map(move |col| (row, member, col))));
        let expected: Vec<f32> = places.map(|(row, member, col)| column(row, member, col)).collect();
        assert_eq!(bits(&queue.read(&to)), bits(&expected), "{dtype:?}, {size} members");
    });
}

#[test]
fn members_who_disagree_about_a_redistribution_are_told() {
    let outcome = try_on_ranks(2, &options(), |communicator, device| {
        let group = everybody(communicator);
        let queue = device.comm();
        let me = communicator.rank();
        let tensor = queue.zeros(2, 3 + me, DType::F32);
        let (sent, received) = ([(1 - me, tensor.row_range(0..1).view())], [(1 - me, tensor.row_range(1..2).view())]);
        group.redistribute(queue, &sent, &received);
        queue.finish();
    });
    let message = outcome.expect_err("shapes differ").to_string();
    assert!(message.contains("a redistribution: expected"), "{message}");
}

#[test]
fn indices_can_be_moved_but_not_summed() {
    let sums = on_ranks(2, |communicator, device| {
        let group = everybody(communicator);
        let queue = device.comm();
        let mine: Vec<u32> = (0..5).map(|i| u32::MAX - 10 * communicator.rank() as u32 - i).collect();
        let from = queue.indices(&mine).reshaped(5, 1);
        let to = queue.indices(&[0; 10]).reshaped(10, 1);
        group.all_gather(queue, &from, &to, &[0, 5, 10]);
        group.broadcast(queue, &from, 1);
        let of = |rank: u32| (0..5).map(move |i| u32::MAX - 10 * rank - i);
        assert_eq!(queue.read_indices(&to), of(0).chain(of(1)).collect::<Vec<_>>());
        assert_eq!(queue.read_indices(&from), of(1).collect::<Vec<_>>());
        let sum = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| group.all_reduce(queue, &from)));
        sum.is_err()
    });
    assert_eq!(sums, [true, true]);
}

#[test]
fn a_thousand_small_all_reduces_back_to_back_keep_their_order() {
    for ranks in [2, 4] {
        on_ranks(ranks, |communicator, device| {
            let group = everybody(communicator);
            let queue = device.comm();
            let number = |round: usize, rank: usize| (10 * round + rank) as f32;
            let tensors: Vec<Tensor> = (0..1000)
                .map(|round| queue.floats(1, 24, DType::F32, &[number(round, communicator.rank()); 24]))
                .collect();
            for x in &tensors {
                group.all_reduce(queue, x);
            }
            for (round, x) in tensors.iter().enumerate() {
                let expected: f32 = (0..ranks).map(|rank| number(round, rank)).sum();
                assert_eq!(queue.read(x), [expected; 24], "round {round}");
            }
            assert_eq!(communicator.counts().of(ExchangeKind::AllReduce).calls, 1000);
        });
    }
}

#[test]
fn both_queues_of_a_rank_can_issue_to_one_group() {
    on_ranks(2, |communicator, device| {
        let group = everybody(communicator);
        let queues = [device.compute(), device.comm()];
        let tensors = queues.map(|queue| queue.floats(1, 100, DType::F32, &[1.0; 100]));
        for round in 0..20 {
            // The first queue differs by round and rank; only the order of issue orders them.
            let first = (round + communicator.rank()) % 2;
            for i in [first, 1 - first] {
                group.all_reduce(queues[i], &tensors[i]);
            }
        }
        for (queue, tensor) in queues.into_iter().zip(&tensors) {
            assert_eq!(queue.read(tensor), [1048576.0; 100]);
        }
    });
}
