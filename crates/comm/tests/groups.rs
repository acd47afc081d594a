//! Several groups at a time, values between hosts, and ranks that only count.

mod support;

use evenkeel_comm::{Communicator, Count, ExchangeKind};
use evenkeel_device::{DType, Device};
use support::{bits, numbers_of, on_ranks, sum_of};

#[test]
fn subgroups_work_side_by_side_without_hearing_one_another() {
    const LEN: usize = 3000;
    on_ranks(4, |communicator, device| {
        let me = communicator.rank();
        let row = [me / 2 * 2, me / 2 * 2 + 1];
        let column = [me % 2, me % 2 + 2];
        let (tp, dp) = (communicator.group("tp", &row), communicator.group("dp", &column));
        let queue = device.comm();
        for seed in 0..50 {
            let x = queue.floats(1, LEN, DType::F32, &numbers_of(seed, me, LEN, DType::F32));
            tp.all_reduce(queue, &x);
            let sum_of_row = |row: usize| sum_of(seed, [2 * row, 2 * row + 1], LEN, DType::F32);
            if seed % 10 == 0 {
                assert_eq!(bits(&queue.read(&x)), bits(&sum_of_row(me / 2)));
            }
            dp.all_reduce(queue, &x);
            let total: Vec<f32> = sum_of_row(0).iter().zip(sum_of_row(1)).map(|(a, b)| a + b).collect();
            if seed % 10 == 0 {
                assert_eq!(bits(&queue.read(&x)), bits(&total));
            }
        }
    });
}

#[test]
fn a_group_asked_for_twice_is_the_same_group() {
    on_ranks(2, |communicator, device| {
        let queue = device.comm();
        let x = queue.floats(1, 10, DType::F32, &[1.0; 10]);
        communicator.group("tp", &[0, 1]).all_reduce(queue, &x);
        communicator.group("tp", &[0, 1]).all_reduce(queue, &x);
        assert_eq!(queue.read(&x), [4.0; 10]);
    });
}

#[test]
fn hosts_exchange_values_while_their_queues_wait_for_one_another() {
    if support::on_cuda() {
        return println!("skipped: on a GPU, hosts meet for what they issue, so they wait themselves");
    }
    let values = on_ranks(3, |communicator, device| {
        let all = communicator.group("all", &[0, 1, 2]);
        if communicator.rank() > 0 {
            all.barrier(device.comm());
        }
        let first = all.exchange(10 * communicator.rank() as u64);
        let second = all.exchange(communicator.rank() as u64);
        if communicator.rank() == 0 {
            all.barrier(device.comm());
        }
        device.comm().finish();
        (first, second)
    });
    assert_eq!(values, vec![(vec![0, 10, 20], vec![0, 1, 2]); 3]);
}

#[test]
fn ranks_may_end_right_after_their_last_call() {
    for round in 0..300 {
        let values = evenkeel_comm::run_ranks(3, &support::options(), |communicator| {
            communicator.group("all", &[0, 1, 2]).exchange(round + communicator.rank() as u64)
        });
        assert_eq!(values, Ok(vec![vec![round, round + 1, round + 2]; 3]));
    }
}

#[test]
fn a_dry_rank_counts_what_a_real_one_issues() {
    fn issue(communicator: &Communicator, device: &Device) {
        let queue = device.comm();
        let x = queue.zeros(8, 16, DType::Bf16);
        let group = communicator.group("tp", &[0, 1]);
        let mine = 4 * group.rank()..4 * group.rank() + 4;
        group.all_reduce(queue, &x);
        group.all_reduce(queue, &x);
        group.all_gather(queue, &x.row_range(mine.clone()), &x, &[0, 4, 8]);
        group.reduce_scatter(queue, &x, &x.row_range(mine), &[0, 4, 8]);
        match group.rank() {
            0 => group.send(queue, &x, 1),
            _ => group.receive(queue, &x, 0),
        };
        group.barrier(queue);
        assert_eq!(group.exchange(5), [5, 5]);
        communicator.group("alone", &[communicator.rank()]).all_reduce(queue, &x);
        queue.finish();
    }
    let real = on_ranks(2, |communicator, device| {
        issue(communicator, device);
        communicator.counts()
    });
    for (rank, real) in real.into_iter().enumerate() {
        let dry = Communicator::dry(rank, 2);
        issue(&dry, &Device::dry());
        assert_eq!(dry.counts(), real, "rank {rank}");
        assert_eq!(real.of(ExchangeKind::AllReduce), Count { calls: 2, bytes: 512 });
        assert_eq!(real.of([ExchangeKind::Send, ExchangeKind::Receive][rank]), Count { calls: 1, bytes: 256 });
        assert_eq!(real.bytes(), 512 + 256 * 3);
        assert_eq!(dry.link(), None);
    }
}

#[test]
fn a_group_of_one_keeps_its_tensors_and_brings_rows_where_they_belong() {
    on_ranks(2, |communicator, device| {
        let queue = device.comm();
        let alone = communicator.group("alone", &[communicator.rank()]);
        let values = numbers_of(3, communicator.rank(), 12, DType::F32);
        let x = queue.floats(3, 4, DType::F32, &values);
        let (gathered, scattered) = (queue.zeros(3, 4, DType::F32), queue.zeros(3, 4, DType::F32));
        alone.all_reduce(queue, &x);
        alone.all_gather(queue, &x, &gathered, &[0, 3]);
        alone.reduce_scatter(queue, &x, &scattered, &[0, 3]);
        for tensor in [&x, &gathered, &scattered] {
            assert_eq!(queue.read(tensor), values);
        }
        assert_eq!(alone.exchange(9), [9]);
    });
}
