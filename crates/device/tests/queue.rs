//! Queues: order, events between them, and failing kernels.

#[path = "support/device.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use std::time::{Duration, Instant};

use evenkeel_device::kernel::{Add, Copy, Fill, GatherColumns};
use evenkeel_device::{CpuOptions, DType, Device, Tensor};

fn device() -> Device {
    support::device(2, 1 << 26)
}

#[test]
fn an_event_orders_one_queue_behind_the_other() {
    let device = device();
    let (compute, comm) = (device.compute(), device.comm());
    let x = compute.zeros(64, 1024, DType::F32);
    let received = compute.zeros(64, 1024, DType::F32);
    for round in 1..=200 {
        compute.launch(Fill { out: x.view(), value: round as f32 });
        comm.wait(&compute.record());
        comm.launch(Copy { x: x.view(), out: received.view() });
        compute.wait(&comm.record());
        compute.launch(Add { a: received.view(), b: x.view(), out: x.view() });
        if round % 50 == 0 {
            assert!(compute.read(&x).iter().all(|&value| value == 2.0 * round as f32), "round {round}");
        }
    }
}

#[test]
fn a_failed_kernel_ends_both_queues_with_its_message_and_nobody_waits_for_ever() {
    let device = device();
    let (compute, comm) = (device.compute(), device.comm());
    let x = compute.zeros(2, 4, DType::F32);
    let columns = compute.indices(&[9]);
    let out = compute.zeros(2, 1, DType::F32);
    compute.launch(GatherColumns { x: x.view(), columns: columns.view(), out: out.view() });
    let message = |result: std::thread::Result<()>| *result.unwrap_err().downcast::<String>().expect("a message");
    let first = message(catch_unwind(AssertUnwindSafe(|| compute.finish())));
    for queue in [compute, comm, compute] {
        let again = message(catch_unwind(AssertUnwindSafe(|| queue.finish())));
        assert_eq!(again, first);
    }
    assert!(first.contains('9'), "the message is the kernel's: {first}");
}

#[test]
fn host_code_runs_in_the_order_of_its_queue() {
    let device = device();
    let (compute, comm) = (device.compute(), device.comm());
    let x = compute.zeros(1, 16, DType::F32);
    let rounds = Arc::new(AtomicUsize::new(0));
    // A GPU's memory is out of the host's reach.
    let readable = !support::on_cuda();
    for round in 1..=100 {
        compute.launch(Fill { out: x.view(), value: round as f32 });
        comm.wait(&compute.record());
        let address = x.address();
        let rounds = rounds.clone();
        comm.call(move || {
            assert_eq!(rounds.fetch_add(1, Ordering::SeqCst) + 1, round);
            // SAFETY: the event keeps the tensor from being written meanwhile, in both directions.
            assert!(!readable || unsafe { *(address as *const f32) } == round as f32);
        });
        compute.wait(&comm.record());
    }
    compute.finish();
    assert_eq!(rounds.load(Ordering::SeqCst), 100);
}

#[test]
fn a_panic_in_host_code_reaches_a_host_that_is_already_waiting() {
    let message = |result: std::thread::Result<()>| *result.unwrap_err().downcast::<String>().expect("a message");
    let waits: [fn(&Device, &Tensor); 3] = [
        |device, _| device.compute().finish(),
        |device, _| device.comm().finish(),
        |device, x| drop(device.compute().read(x)),
    ];
    for wait in waits {
        let device = device();
        let x = device.compute().zeros(2, 4, DType::F32);
        let health = device.comm().health();
        assert_eq!(health.failure(), None);
        device.comm().call(|| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            panic!("the peer of call {} is gone", 7);
        });
        // On a busy machine the code may have panicked before the host waits: any call may be the one that tells.
        let said = message(catch_unwind(AssertUnwindSafe(|| {
            device.compute().wait(&device.comm().record());
            wait(&device, &x);
        })));
        assert_eq!(said, "the peer of call 7 is gone");
        assert_eq!(health.failure(), Some("the peer of call 7 is gone"));
    }
}

#[test]
fn a_dry_device_drops_host_code_without_running_it() {
    let held = std::sync::Arc::new(());
    let watched = held.clone();
    Device::dry().comm().call(move || panic!("ran with {watched:?}"));
    assert_eq!(std::sync::Arc::strong_count(&held), 1);
}

#[test]
#[cfg(target_os = "linux")]
fn the_comm_thread_keeps_to_the_cores_of_its_rank() {
    let allowed = || {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("a status");
        let line = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).expect("a list of cores");
        line.split_whitespace().nth(1).expect("a list of cores").to_owned()
    };
    let all = allowed();
    let options = CpuOptions { cores: vec![0], memory_bytes: 1 << 20, ..CpuOptions::with_threads(1) };
    for (options, expected) in [(options.clone(), "0"), (CpuOptions { cores: Vec::new(), ..options }, all.as_str())] {
        let device = Device::cpu(&options).expect("a CPU device starts");
        let (sender, receiver) = std::sync::mpsc::channel();
        device.comm().call(move || sender.send(allowed()).expect("somebody listens"));
        assert_eq!(receiver.recv().expect("an answer"), expected);
    }
}

#[test]
fn tensors_are_given_back_in_issue_order() {
    let device = device();
    let queue = device.compute();
    let before = device.usage().live_bytes;
    let x = queue.zeros(16, 16, DType::F32);
    assert_eq!(device.usage().live_bytes, before + 1024);
    let part = x.row_range(0..4);
    drop(x);
    assert_eq!(device.usage().live_bytes, before + 1024, "a slice keeps the block");
    drop(part);
    assert_eq!(device.usage().live_bytes, before);
}

#[test]
fn stamps_are_moments_in_the_order_of_the_work() {
    let device = device();
    let queue = device.compute();
    let x = queue.zeros(64, 1024, DType::F32);
    let before = Instant::now();
    let stamps: Vec<_> = (0..10)
        .map(|round| {
            queue.launch(Fill { out: x.view(), value: round as f32 });
            queue.stamp()
        })
        .collect();
    queue.finish();
    let after = Instant::now();
    let moments: Vec<Instant> = stamps.iter().map(|stamp| stamp.get().expect("the work has run")).collect();
    assert!(moments.is_sorted(), "{moments:?}");
    // A GPU's clock differs from the host's; the device compares them once when it starts.
    let slack = Duration::from_millis(1);
    assert!(moments[0] + slack >= before && moments[9] <= after + slack, "{before:?} {moments:?} {after:?}");
}

#[test]
fn measured_kernels_are_told_in_order_with_their_times() {
    let device = device();
    let queue = device.compute();
    let x = queue.zeros(64, 1024, DType::F32);
    queue.finish();
    device.measure_kernels(true);
    queue.launch(Fill { out: x.view(), value: 1.0 });
    queue.launch(Add { a: x.view(), b: x.view(), out: x.view() });
    let times = device.take_kernel_times();
    let names: Vec<&str> = times.iter().map(|time| time.kernel.name()).collect();
    assert_eq!(names, ["Fill", "Add"]);
    assert!(times.iter().all(|time| time.duration > Duration::ZERO && time.duration < Duration::from_secs(10)));
    device.measure_kernels(false);
    queue.launch(Fill { out: x.view(), value: 1.0 });
    assert!(device.take_kernel_times().is_empty());
}

#[test]
fn uploads_larger_than_any_staging_memory_arrive_whole() {
    let device = device();
    let queue = device.compute();
    for dtype in [DType::F32, DType::Bf16] {
        let values: Vec<f32> = (0..3_000_001).map(|i| (i % 251) as f32).collect();
        let whole = queue.floats(1, values.len(), dtype, &values);
        assert!(queue.read(&whole) == values, "one long row of {dtype:?}");
        let wide = queue.zeros(1000, 900, dtype);
        let inner = wide.col_range(7..507);
        let filled = queue.write_rows(&inner, |first, rows| -> Result<(), ()> {
            rows.iter_mut().enumerate().for_each(|(i, value)| *value = ((first * 500 + i) % 251) as f32);
            Ok(())
        });
        assert_eq!(filled, Ok(()));
        let read = queue.read(&wide);
        for (i, &value) in read.iter().enumerate() {
            let (row, col) = (i / 900, i % 900);
            let expected = if (7..507).contains(&col) { ((row * 500 + col - 7) % 251) as f32 } else { 0.0 };
            assert_eq!(value, expected, "row {row}, column {col} of {dtype:?}");
        }
    }
}
