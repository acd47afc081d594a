//! NCCL between ranks that share a GPU. NCCL refuses that to ranks of one machine, so each rank has its own copy of the
//! library, which is told that it is on its own machine. The copies are `libnccl.so.0`, `libnccl.so.1`, … in the folder that
//! `EVENKEEL_TEST_NCCL` names; `run-gpu-tests.sh` puts them there.
#![allow(dead_code)]

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use evenkeel_device::{CudaError, CudaOptions, DType, Device, NcclCommunicator, NcclId, NcclLibrary, PeerWork, Queue};

/// The number of copies.
pub const MOST_RANKS: usize = 4;

/// The folder of the copies, if NCCL is under test.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os("EVENKEEL_TEST_NCCL").map(PathBuf::from)
}

/// A rank's copy. The first call makes every copy read the name of its machine, before any is used.
pub fn library_of_rank(rank: usize) -> Result<Arc<NcclLibrary>, CudaError> {
    static COPIES: Mutex<Vec<Arc<NcclLibrary>>> = Mutex::new(Vec::new());
    let mut copies = COPIES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if copies.is_empty() {
        let folder = folder().expect("asked for only where it is set");
        let device = Device::cuda(&CudaOptions { memory_bytes: Some(1 << 20), ..CudaOptions::new(0) })?;
        for copy in 0..MOST_RANKS {
            // SAFETY: other threads of the test wait for the lock before they come to NCCL, which is who reads this.
            unsafe { std::env::set_var("NCCL_HOSTID", format!("machine {copy}")) };
            let library = NcclLibrary::open(&folder.join(format!("libnccl.so.{copy}")))?;
            let alone = connect(library.clone(), device.comm(), NcclId::new(&library)?, 1, 0)?;
            drop(alone);
            copies.push(library);
        }
    }
    Ok(copies[rank].clone())
}

/// A connected end of a communicator.
pub fn connect(
    library: Arc<NcclLibrary>,
    queue: &Queue,
    id: NcclId,
    members: usize,
    me: usize,
) -> Result<NcclCommunicator, CudaError> {
    let end = NcclCommunicator::begin(library, queue, id, members, me, 1 << 20)?;
    wait_until_idle(&end);
    Ok(end)
}

pub fn wait_until_idle(end: &NcclCommunicator) {
    let since = Instant::now();
    while !end.is_idle().unwrap_or_else(|words| panic!("{words}")) {
        assert!(since.elapsed() < Duration::from_secs(60), "NCCL is not done");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Loads every kernel that a member of a collective launches. Loading one waits for the GPU's context; if another rank shares
/// it, whose NCCL kernel waits for this rank, this rank would wait for itself.
pub fn load_kernels(queue: &Queue) {
    let words = queue.tensor(1, 256, DType::F32);
    let address = words.address();
    for (dtype, first) in [(DType::F32, 0), (DType::F32, 4), (DType::Bf16, 0), (DType::Bf16, 2)] {
        let sources = &[address + first];
        // SAFETY: a live tensor that nobody else has.
        unsafe { queue.peer(PeerWork::Sum { dtype, sources, destinations: sources, len: 64 }) };
    }
    for first in [16, 4, 2] {
        // SAFETY: as above.
        unsafe { queue.peer(PeerWork::copy(address, address + 512 + first, 64)) };
    }
    queue.finish();
}
