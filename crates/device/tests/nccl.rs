//! NCCL moves bytes between devices: on different GPUs, or on one GPU with `EVENKEEL_TEST_NCCL`.

#[path = "support/nccl.rs"]
mod nccl;
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_device::{
    CudaOptions, DType, Device, NcclCommunicator, NcclId, NcclLibrary, NcclTransfer, Queue, cuda_gpus,
};

/// Two devices and the library of each; `None` if this machine cannot have them.
fn pair() -> Option<[(Device, Arc<NcclLibrary>); 2]> {
    if !support::on_cuda() {
        println!("skipped: NCCL connects GPUs, and the device under test is the CPU");
        return None;
    }
    let on_one_gpu = nccl::folder().is_some();
    let gpus = cuda_gpus().unwrap_or(0);
    if !on_one_gpu && gpus < 2 {
        println!("skipped: {gpus} GPUs, two are needed");
        return None;
    }
    let end = |rank: usize| {
        let ordinal = if on_one_gpu { 0 } else { rank };
        let options = CudaOptions { memory_bytes: Some(1 << 26), ..CudaOptions::new(ordinal) };
        let device = Device::cuda(&options).unwrap_or_else(|error| panic!("{error}"));
        let library = if on_one_gpu { nccl::library_of_rank(rank) } else { NcclLibrary::find() };
        (device, library.unwrap_or_else(|error| panic!("{error}")))
    };
    Some([0, 1].map(end))
}

/// The ends of a communicator between both.
fn connected(pair: &[(Device, Arc<NcclLibrary>); 2]) -> [NcclCommunicator; 2] {
    let id = NcclId::new(&pair[0].1).unwrap_or_else(|error| panic!("{error}"));
    let begun = [0, 1].map(|me| {
        let (device, library) = &pair[me];
        NcclCommunicator::begin(library.clone(), device.comm(), id, 2, me, 1 << 20)
    });
    let ends = begun.map(|end| end.unwrap_or_else(|error| panic!("{error}")));
    ends.iter().for_each(nccl::wait_until_idle);
    ends
}

fn transfer(queue: &Queue, end: &NcclCommunicator, transfers: &[NcclTransfer]) {
    // SAFETY: the tests' tensors live until their queue is done.
    unsafe { queue.transfer(end, transfers) };
}

#[test]
fn bytes_go_between_devices_in_both_directions_at_once() {
    let Some(pair) = pair() else { return };
    let ends = connected(&pair);
    for len in [1, 1000, 3_000_001] {
        let queues = [pair[0].0.comm(), pair[1].0.comm()];
        let values = |me: usize| -> Vec<f32> { (0..len).map(|i| (i * 2 + me) as f32).collect() };
        let sent = [0, 1].map(|me| queues[me].floats(1, len, DType::F32, &values(me)));
        let received = [0, 1].map(|me| queues[me].zeros(1, len, DType::F32));
        queues.iter().for_each(|queue| queue.finish());
        for me in [0, 1] {
            let bytes = 4 * len;
            let other = 1 - me;
            let send = NcclTransfer::Send { address: sent[me].address(), bytes, to: other };
            let receive = NcclTransfer::Receive { address: received[me].address(), bytes, from: other };
            transfer(queues[me], &ends[me], &[send, receive]);
        }
        ends.iter().for_each(nccl::wait_until_idle);
        for me in [0, 1] {
            assert!(queues[me].read(&received[me]) == values(1 - me), "{len} numbers from {}", 1 - me);
        }
    }
}

#[test]
fn a_device_that_waits_for_another_comes_back_when_its_end_is_aborted() {
    let Some(pair) = pair() else { return };
    let ends = connected(&pair);
    let queue = pair[0].0.comm();
    let bytes = 4000;
    let tensor = queue.zeros(1, 1000, DType::F32);
    let others = pair[1].0.comm().zeros(1, 1000, DType::F32);
    // Once in order, so that the GPUs are connected.
    transfer(pair[1].0.comm(), &ends[1], &[NcclTransfer::Send { address: others.address(), bytes, to: 0 }]);
    let receive = [NcclTransfer::Receive { address: tensor.address(), bytes, from: 1 }];
    transfer(queue, &ends[0], &receive);
    ends.iter().for_each(nccl::wait_until_idle);
    queue.finish();
    // And once more than is sent.
    transfer(queue, &ends[0], &receive);
    nccl::wait_until_idle(&ends[0]);
    let point = queue.record();
    std::thread::sleep(Duration::from_millis(300));
    assert!(!point.is_reached(), "nothing was sent, and yet it came");
    let aborted = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| ends[0].abort());
        queue.finish();
    });
    println!("came back {:?} after it was aborted", aborted.elapsed());
    assert_eq!(ends[0].is_idle(), Err("it was ended".to_owned()));
}
