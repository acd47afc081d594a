//! Failures between GPUs. With `EVENKEEL_TEST_NCCL`, ranks on one GPU take one another for ranks of other machines.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_comm::{ExchangeKind, Options};
use evenkeel_device::{CudaError, DType, NcclLibrary};
use support::{nccl, on_ranks, options, try_on_ranks};

fn is_tried() -> bool {
    let is_tried = support::on_cuda() && nccl::folder().is_some();
    if !is_tried {
        println!("skipped: no EVENKEEL_TEST_NCCL, or the device under test is the CPU");
    }
    is_tried
}

#[test]
fn a_rank_without_a_library_ends_those_that_wait_to_be_connected_with_it() {
    fn library_of(rank: usize) -> Result<Arc<NcclLibrary>, CudaError> {
        if rank == 1 {
            // Lets the others begin.
            std::thread::sleep(Duration::from_millis(500));
            return NcclLibrary::open("no-such-library.so.2".as_ref());
        }
        nccl::library_of_rank(rank)
    }
    if !is_tried() {
        return;
    }
    let options = Options { library_of_rank: Some(library_of), ..options() };
    let start = Instant::now();
    let outcome = try_on_ranks(3, &options, |communicator, device| {
        let x = device.comm().zeros(1, 100, DType::F32);
        communicator.group("tp", &[0, 1, 2]).all_reduce(device.comm(), &x);
        device.comm().finish();
    });
    let failure = outcome.expect_err("rank 1 has no library");
    assert_eq!(failure.rank, 1);
    assert!(failure.message.contains("NCCL (no-such-library.so.2) cannot be loaded"), "{failure}");
    println!("ended after {:?}", start.elapsed());
    assert!(start.elapsed() < options.deadline, "the others waited until their deadline");
}

#[test]
fn collectives_over_nccl_are_counted_and_stamped_like_all_others() {
    if !is_tried() {
        return;
    }
    on_ranks(2, |communicator, device| {
        let group = communicator.group("tp", &[0, 1]);
        let queue = device.comm();
        let x = queue.zeros(4, 1000, DType::Bf16);
        let before = Instant::now();
        let stamps = [group.all_reduce(queue, &x), group.barrier(queue), group.broadcast(queue, &x, 1)];
        queue.finish();
        let moments = stamps.map(|stamp| stamp.get().expect("its moment has come"));
        assert!(before <= moments[0] + Duration::from_millis(1) && moments.is_sorted(), "{moments:?}");
        let counts = communicator.counts();
        assert_eq!((counts.of(ExchangeKind::AllReduce).calls, counts.of(ExchangeKind::AllReduce).bytes), (1, 8000));
        assert_eq!((counts.of(ExchangeKind::Broadcast).calls, counts.of(ExchangeKind::Barrier).calls), (1, 1));
    });
}
