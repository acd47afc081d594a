//! Queues: order, events between them, and what a failing kernel leaves behind.

use std::panic::{AssertUnwindSafe, catch_unwind};

use evenkeel_device::kernel::{Add, Copy, Fill, GatherColumns};
use evenkeel_device::{CpuOptions, DType, Device};

fn device() -> Device {
    Device::cpu(&CpuOptions { memory_bytes: 1 << 26, ..CpuOptions::with_threads(2) }).expect("a CPU device starts")
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
