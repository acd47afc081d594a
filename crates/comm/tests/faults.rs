//! Failures: which rank learns what, and when.

mod support;

use std::sync::{Barrier, Mutex, mpsc};
use std::time::{Duration, Instant};

use evenkeel_comm::{Communicator, Options, RankFailure};
use evenkeel_device::kernel::GatherColumns;
use evenkeel_device::{DType, Device};
use support::{options, try_on_ranks};

/// Runs ranks, at least one of which fails.
fn failure(ranks: usize, options: &Options, work: impl Fn(&Communicator, &Device) + Sync) -> RankFailure {
    try_on_ranks(ranks, options, work).expect_err("a rank fails")
}

#[track_caller]
fn assert_says(failure: &RankFailure, parts: &[&str]) {
    for part in parts {
        assert!(failure.message.contains(part), "`{part}` is not in: {failure}");
    }
}

#[test]
fn members_that_issue_different_things_are_told_both() {
    type Case = (fn(&Communicator, &Device), &'static [&'static str]);
    let cases: [Case; 6] = [
        (
            |communicator, device| {
                let group = communicator.group("tp", &[0, 1]);
                let queue = device.comm();
                let x = queue.zeros(2, 512, DType::F32);
                group.all_reduce(queue, &x);
                match communicator.rank() {
                    0 => group.all_reduce(queue, &x),
                    _ => group.all_gather(queue, &x.row_range(1..2), &x, &[0, 1, 2]),
                };
                queue.finish();
            },
            &["tp: rank ", "all-reduce of 4096 bytes", "all-gather of 4096 bytes", "2nd", "rank 0", "rank 1", "hint"],
        ),
        (
            |communicator, device| {
                let x = device.comm().zeros(1, 512 + communicator.rank(), DType::F32);
                communicator.group("tp", &[0, 1]).all_reduce(device.comm(), &x);
                device.comm().finish();
            },
            &["2048 bytes", "2052 bytes", "1st"],
        ),
        (
            |communicator, device| {
                let dtype = [DType::F32, DType::Bf16][communicator.rank()];
                let x = device.comm().zeros(1, 64 * (1 + communicator.rank()), dtype);
                communicator.group("tp", &[0, 1]).all_reduce(device.comm(), &x);
                device.comm().finish();
            },
            &["f32", "bf16"],
        ),
        (
            |communicator, device| {
                let x = device.comm().zeros(1, 64, DType::F32);
                communicator.group("tp", &[0, 1]).broadcast(device.comm(), &x, communicator.rank());
                device.comm().finish();
            },
            &["from rank 0", "from rank 1"],
        ),
        (
            |communicator, device| {
                let x = device.comm().zeros(4, 8, DType::F32);
                let cut = 1 + communicator.rank();
                let rows = [0..cut, cut..4][communicator.rank()].clone();
                let part = x.row_range(rows);
                communicator.group("tp", &[0, 1]).all_gather(device.comm(), &part, &x, &[0, cut, 4]);
                device.comm().finish();
            },
            &["[0, 1, 4]", "[0, 2, 4]"],
        ),
        (
            |communicator, device| {
                let group = communicator.group("pp", &[0, 1]);
                let queue = device.comm();
                let x = queue.zeros(1, 10 + communicator.rank(), DType::F32);
                match communicator.rank() {
                    0 => group.send(queue, &x, 1),
                    _ => group.receive(queue, &x, 0),
                };
                queue.finish();
            },
            &["pp:", "send of 40 bytes of f32 to rank 1", "receive of 44 bytes of f32 from rank 0"],
        ),
    ];
    for (work, parts) in cases {
        assert_says(&failure(2, &options(), work), parts);
    }
}

#[test]
fn a_member_that_never_comes_is_named_when_the_deadline_has_passed() {
    // NCCL connects its members in their first exchange, which takes a second or more.
    let deadline = Duration::from_secs(if support::nccl::folder().is_some() { 20 } else { 3 });
    let options = Options { deadline, ..support::with_transport() };
    let all_are_made = Barrier::new(3);
    let (sender, others_end) = mpsc::channel();
    let others_end = Mutex::new(others_end);
    let failure = failure(3, &options, |communicator, device| {
        let x = device.comm().zeros(1, 1024, DType::F32);
        let group = communicator.group("tp", &[0, 1, 2]);
        all_are_made.wait();
        group.all_reduce(device.comm(), &x);
        if communicator.rank() == 1 {
            // It stays until the other has given up on it.
            others_end.lock().unwrap().recv().unwrap();
            return;
        }
        let ended = || sender.send(()).unwrap();
        let _on_the_way_out = OnDrop(&ended);
        group.all_reduce(device.comm(), &x);
        device.comm().finish();
    });
    assert_ne!(failure.rank, 1);
    let waited = format!("{} ms", deadline.as_millis());
    assert_says(&failure, &["tp: all-reduce of 4096 bytes of f32", "2nd", &waited, "for rank 1\n", "hint"]);
}

#[test]
fn a_member_that_has_ended_is_not_waited_for() {
    let failure = failure(2, &options(), |communicator, device| {
        let group = communicator.group("tp", &[0, 1]);
        if communicator.rank() == 0 {
            group.barrier(device.comm());
            device.comm().finish();
        }
    });
    assert_eq!(failure.rank, 0);
    assert_says(&failure, &["barrier", "rank 1, which has ended"]);
}

/// Ranks 0 and 2 wait for rank 1 in different ways while it fails; returns the run's failure.
fn while_others_wait(fail: impl Fn(&Communicator, &Device) + Sync) -> RankFailure {
    let failed_at = Mutex::new(None);
    let ended_at = Mutex::new(Vec::new());
    let outcome = try_on_ranks(4, &options(), |communicator, device| {
        let all = communicator.group("all", &[0, 1, 2, 3]);
        let x = device.compute().zeros(1, 10_000, DType::F32);
        all.exchange(0);
        let ended = || ended_at.lock().unwrap().push(Instant::now());
        let _on_the_way_out = OnDrop(&ended);
        match communicator.rank() {
            1 => {
                std::thread::sleep(Duration::from_millis(50));
                *failed_at.lock().unwrap() = Some(Instant::now());
                fail(communicator, device);
            }
            2 => drop(all.exchange(1)),
            3 => drop(communicator.group("pair", &[1, 3]).receive(device.compute(), &x, 0)),
            _ => drop(all.all_reduce(device.comm(), &x)),
        }
        device.finish();
    });
    let failed_at = failed_at.into_inner().unwrap().expect("rank 1 failed");
    let slowest = ended_at.into_inner().unwrap().into_iter().max().expect("ranks ended");
    // No rank waited for the deadline, however busy the machine is.
    assert!(slowest - failed_at < options().deadline / 2, "the last ended {:?} after the failure", slowest - failed_at);
    outcome.expect_err("a rank fails")
}

struct OnDrop<'a>(&'a dyn Fn());

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[test]
fn a_panic_on_one_rank_ends_the_others_and_is_what_the_run_reports() {
    let failure = while_others_wait(|_, _| panic!("no space left on device {}", 5));
    assert_eq!(failure, RankFailure { rank: 1, message: "no space left on device 5".to_owned() });
}

#[test]
fn a_panic_while_its_own_collective_waits_ends_everybody_too() {
    if support::on_cuda() {
        return println!("skipped: on a GPU, it is the host that waits, and does nothing else meanwhile");
    }
    let failure = while_others_wait(|communicator, device| {
        let x = device.comm().zeros(1, 8, DType::F32);
        communicator.group("nobody else asks", &[0, 1]).all_reduce(device.comm(), &x);
        panic!("too late");
    });
    assert_eq!(failure, RankFailure { rank: 1, message: "too late".to_owned() });
}

#[test]
fn a_failing_kernel_ends_everybody_with_its_message() {
    let failure = while_others_wait(|communicator, device| {
        let queue = device.compute();
        let x = queue.zeros(2, 4, DType::F32);
        let columns = queue.indices(&[99]);
        let out = queue.zeros(2, 1, DType::F32);
        queue.launch(GatherColumns { x: x.view(), columns: columns.view(), out: out.view() });
        device.comm().wait(&queue.record());
        communicator.group("all", &[0, 1, 2, 3]).all_reduce(device.comm(), &x);
        queue.finish();
    });
    assert_eq!(failure.rank, 1);
    assert_says(&failure, &["99"]);
}

#[test]
fn a_collective_that_a_failed_device_drops_ends_everybody_though_its_host_waits_elsewhere() {
    let failure = while_others_wait(|communicator, device| {
        let queue = device.compute();
        let x = queue.zeros(1, 10_000, DType::F32);
        queue.call(|| {
            std::thread::sleep(Duration::from_millis(20));
            panic!("an unreadable page");
        });
        device.comm().wait(&queue.record());
        communicator.group("all", &[0, 1, 2, 3]).all_reduce(device.comm(), &x);
        communicator.group("nobody else asks", &[0, 1]).exchange(0);
    });
    assert_eq!(failure.rank, 1);
    assert_says(&failure, &["an unreadable page"]);
}

#[test]
fn an_abort_ends_everybody_and_its_first_message_counts() {
    let failure = while_others_wait(|communicator, _| {
        communicator.abort("the loss is not finite");
        communicator.abort("second thoughts");
        panic!("and then this");
    });
    assert_eq!(failure, RankFailure { rank: 1, message: "the loss is not finite".to_owned() });
}

/// Peers act on a rank's memory; a failing rank must not free it meanwhile.
#[test]
fn ranks_that_fail_amid_large_collectives_leave_nobody_with_lost_memory() {
    // Each round connects the GPUs anew.
    let rounds = if support::nccl::folder().is_some() { 4 } else { 20 };
    for round in 0..rounds {
        let failure = failure(3, &options(), |communicator, device| {
            let group = communicator.group("all", &[0, 1, 2]);
            let x = device.comm().zeros(1000, 1000, DType::F32);
            for _ in 0..20 {
                group.all_reduce(device.comm(), &x);
            }
            std::thread::sleep(Duration::from_micros(300 * round));
            assert_ne!(communicator.rank(), 1, "round {round}");
            device.comm().finish();
        });
        assert_eq!(failure.rank, 1, "{failure}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_when_issued() {
    type Case = (fn(&Communicator, &Device), &'static str);
    let cases: [Case; 6] = [
        (
            |communicator, device| {
                let x = device.comm().zeros(4, 8, DType::F32).col_range(0..4);
                communicator.group("tp", &[0, 1]).all_reduce(device.comm(), &x);
            },
            "8 apart",
        ),
        (
            |communicator, device| {
                let x = device.comm().zeros(4, 8, DType::F32);
                communicator.group("tp", &[0, 1]).all_gather(device.comm(), &x, &x, &[0, 2, 4]);
            },
            "this member's",
        ),
        (
            |communicator, device| {
                let x = device.comm().zeros(4, 8, DType::F32);
                let part = x.row_range(1..3);
                communicator.group("tp", &[0, 1]).reduce_scatter(device.comm(), &x, &part, &[0, 2, 4]);
            },
            "overlap",
        ),
        (
            |communicator, device| {
                let x = device.comm().zeros(4, 8, DType::F32);
                communicator.group("tp", &[0, 1]).reduce_scatter(device.comm(), &x, &x, &[0, 4]);
            },
            "cut at [0, 4]",
        ),
        (
            |communicator, device| {
                let x = device.comm().zeros(4, 8, DType::F32);
                communicator.group("tp", &[0, 1]).broadcast(device.comm(), &x, 2);
            },
            "member 2 of 2",
        ),
        (|communicator, _| drop(communicator.group("tp", &[1, 0])), "ranks [1, 0]"),
    ];
    for (work, expected) in cases {
        assert_says(&failure(2, &options(), work), &[expected]);
    }
}
