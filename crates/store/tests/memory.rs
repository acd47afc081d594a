//! How much memory files of any size take. One test at a time, because each watches the process's whole memory.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use evenkeel_store::{FileDtype, NewFolder, SHARD_BYTES, TensorEntry, save_model};
use peak_alloc::PeakAlloc;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Runs something alone and says how many bytes it had at its worst.
fn peak_bytes(run: impl FnOnce()) -> usize {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone: MutexGuard<()> = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    run();
    ALLOCATOR.peak_usage().saturating_sub(before)
}

#[test]
fn a_large_tensor_is_written_without_holding_it() {
    const ROWS: usize = 4096;
    let parent = TempDir::new().unwrap();
    let row = vec![0.5f32; 4096];
    let entries = [TensorEntry { name: "a".to_owned(), dtype: FileDtype::BF16, shape: vec![ROWS, row.len()] }];
    let peak = peak_bytes(|| {
        let folder = NewFolder::create(parent.path().join("model")).unwrap();
        save_model(&folder, &entries, &BTreeMap::new(), SHARD_BYTES, |_, emit| (0..ROWS).try_for_each(|_| emit(&row)))
            .unwrap();
    });
    assert!(peak < 2 << 20, "{peak} bytes for a tensor of 32 MiB");
}
