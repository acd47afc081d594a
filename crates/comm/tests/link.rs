//! The emulated link: how long collectives take over it, and that waits use no core.

mod support;

use std::time::{Duration, Instant};

use evenkeel_comm::{Group, Link, Options};
use evenkeel_device::{DType, Queue, Stamp, Tensor};
use support::try_on_ranks;

const MIB: usize = 1 << 20;

fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the struct it is given.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn collectives_take_the_time_of_a_ring_and_sleep_through_it() {
    if support::on_cuda() {
        return println!("skipped: no link is emulated between ranks on a GPU");
    }
    let link = Link { latency: Duration::from_millis(50), bytes_per_s: 2.0 * MIB as f64 };
    let options = Options { link: Some(link), ..support::options() };
    type Case = (fn(&Group, &Queue, &Tensor) -> Stamp, u64);
    // One MiB takes half a second.
    let cases: [Case; 4] = [
        (|group, queue, x| group.all_reduce(queue, x), 4 * 50 + 666),
        (|group, queue, x| group.broadcast(queue, x, 0), 2 * 50 + 500),
        (
            |group, queue, x| group.all_gather(queue, &x.row_range(0..[1, 0, 0][group.rank()]), x, &[0, 1, 1, 1]),
            2 * 50 + 333,
        ),
        (|group, queue, _| group.barrier(queue), 4 * 50),
    ];
    for (case, (issue, expected_ms)) in cases.into_iter().enumerate() {
        let expected = Duration::from_millis(expected_ms);
        // A busy machine wakes sleepers late, but not twenty times in a row by as long as they slept.
        let mut tries = (0..20).map(|_| {
            let times = try_on_ranks(3, &options, |communicator, device| {
                assert_eq!(communicator.link(), Some(link));
                time(&communicator.group("tp", &[0, 1, 2]), device.comm(), issue)
            });
            let times = times.expect("nobody fails");
            assert!(times.iter().all(|(wall, _)| *wall >= expected), "case {case}: {times:?} for {expected:?}");
            assert!(times.iter().all(|(_, cpu)| *cpu < expected / 4), "case {case}: {times:?}, computing second");
            times.into_iter().map(|(wall, _)| wall).max().expect("three ranks")
        });
        assert!(tries.any(|wall| wall < 2 * expected), "case {case}: always twice of {expected:?}");
    }
}

#[test]
fn a_link_between_ranks_on_a_gpu_is_refused() {
    if !support::on_cuda() {
        return println!("skipped: not on a GPU");
    }
    let options = Options { link: Some(Link { latency: Duration::ZERO, bytes_per_s: 1e9 }), ..support::options() };
    let failure = try_on_ranks(2, &options, |communicator, device| {
        communicator.group("tp", &[0, 1]).barrier(device.comm());
    });
    let message = failure.expect_err("it is refused").to_string();
    assert!(message.contains("tp: barrier on GPU 0 over an emulated link"), "{message}");
}

/// A collective's wall time and CPU time on its queue.
fn time(group: &Group, queue: &Queue, issue: fn(&Group, &Queue, &Tensor) -> Stamp) -> (Duration, Duration) {
    let x = queue.zeros(1, MIB / 4, DType::F32);
    queue.finish();
    let (sender, receiver) = std::sync::mpsc::channel();
    let clock = move || sender.send((Instant::now(), thread_cpu_time())).expect("somebody listens");
    group.exchange(0);
    queue.call(clock.clone());
    issue(group, queue, &x);
    queue.call(clock);
    let [before, after] = [(); 2].map(|()| receiver.recv().expect("both are sent"));
    (after.0 - before.0, after.1 - before.1)
}
