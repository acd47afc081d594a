//! The emulated link: how long collectives take over it, and that waiting for it costs no core.

mod support;

use std::time::{Duration, Instant};

use evenkeel_comm::{Group, Link, Options};
use evenkeel_device::{DType, Queue, Tensor};
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
    let link = Link { latency: Duration::from_millis(2), bytes_per_s: 20.0 * MIB as f64 };
    let options = Options { link: Some(link), ..support::options() };
    type Case = (fn(&Group, &Queue, &Tensor), u64);
    // One MiB takes 50 ms.
    let cases: [Case; 4] = [
        (|group, queue, x| group.all_reduce(queue, x), 4 * 2 + 66),
        (|group, queue, x| group.broadcast(queue, x, 0), 2 * 2 + 50),
        (|group, queue, x| group.all_gather(queue, &x.row_range(0..[1, 0, 0][group.rank()]), x, &[0, 1, 1, 1]), 4 + 33),
        (|group, queue, _| group.barrier(queue), 8),
    ];
    for (case, (issue, expected_ms)) in cases.into_iter().enumerate() {
        let times = try_on_ranks(3, &options, |communicator, device| {
            assert_eq!(communicator.link(), Some(link));
            let (group, queue) = (communicator.group("tp", &[0, 1, 2]), device.comm());
            let x = queue.zeros(1, MIB / 4, DType::F32);
            queue.finish();
            // The link's time runs from the last arrival on, and this one is late.
            group.exchange(0);
            let (sender, receiver) = std::sync::mpsc::channel();
            let clock = move || sender.send((Instant::now(), thread_cpu_time())).expect("somebody listens");
            queue.call(clock.clone());
            issue(&group, queue, &x);
            queue.call(clock);
            queue.finish();
            let [before, after] = [(); 2].map(|()| receiver.recv().expect("both are sent"));
            (after.0 - before.0, after.1 - before.1)
        });
        let expected = Duration::from_millis(expected_ms);
        let times = times.expect("nobody fails");
        assert!(times.iter().all(|(wall, _)| *wall >= expected.mul_f64(0.99)), "case {case}: {times:?}");
        let (fastest, _) = times.iter().min().expect("three ranks");
        assert!(
            *fastest <= expected.mul_f64(1.2) + Duration::from_millis(4),
            "case {case}: {times:?} for {expected:?}"
        );
        let busiest = times.iter().map(|(_, cpu)| *cpu).max().expect("three ranks");
        assert!(busiest < expected / 4, "case {case}: {busiest:?} of computing in {expected:?}");
    }
}
