//! Memory use with files of any size. One test at a time, because each watches the process's whole memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use evenkeel_store::checkpoint::{Checkpoint, CheckpointWriter};
use evenkeel_store::{Defect, FileDtype, Format, NewFolder, SHARD_BYTES, Source, SourceSpec, TensorEntry, save_model};
use peak_alloc::PeakAlloc;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Calls `run` alone and returns its peak memory in bytes.
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
        save_model(&folder, &entries, &[], &BTreeMap::new(), SHARD_BYTES, |_, emit| {
            (0..ROWS).try_for_each(|_| emit(&row))
        })
        .unwrap();
    });
    assert!(peak < 2 << 20, "{peak} bytes for a tensor of 32 MiB");
}

#[test]
fn a_large_checkpoint_is_written_and_verified_without_holding_it() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("checkpoint");
    let piece = vec![7; 100_000];
    let peak = peak_bytes(|| {
        let writer = CheckpointWriter::create(&path).unwrap();
        writer.file("data", |file| (0..400).try_for_each(|_| file.put(&piece))).unwrap();
        writer.commit(&serde_json::json!({})).unwrap();
        Checkpoint::open(&path).unwrap().verify().unwrap();
    });
    // A buffer of a MiB for the writer, and then one for each of two threads.
    assert!(peak < 3 << 20, "{peak} bytes for a file of 40 MB");
}

#[test]
fn a_line_of_64_mib_is_refused_without_holding_it() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.jsonl");
    let mut file = BufWriter::new(File::create(&path).unwrap());
    file.write_all(b"{\"text\":\"").unwrap();
    (0..64 << 10).for_each(|_| file.write_all(&[b'x'; 1 << 10]).unwrap());
    file.write_all(b"\"}\n{}\n").unwrap();
    drop(file);
    let peak = peak_bytes(|| {
        let source = Source::open(&SourceSpec::new(Format::Jsonl, [&path])).unwrap();
        assert_eq!(source.chunks(), 65);
        let error = source.read(0).unwrap_err();
        assert!(matches!(error.defect, Defect::RecordTooLong { limit_bytes: 16_777_216, .. }), "{error}");
        // Chunks within the line have no records, and reading them does not look for its end.
        assert!((1..64).all(|chunk| source.read(chunk).unwrap().is_empty()));
        assert_eq!(source.read(64).unwrap().len(), 1);
    });
    // A vector that grows to 16 MiB has 32 MiB at its last step.
    assert!(peak < 50 << 20, "{peak} bytes");
    let peak = peak_bytes(|| {
        let spec = SourceSpec { record_bytes: 1 << 20, ..SourceSpec::new(Format::Jsonl, [&path]) };
        assert!(Source::open(&spec).unwrap().read(0).is_err());
    });
    assert!(peak < 4 << 20, "{peak} bytes");
}

#[test]
fn a_line_of_a_gigabyte_is_refused_without_holding_it() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.jsonl");
    let mut file = File::create(&path).unwrap();
    file.write_all(b"{}\n{\"text\":\"").unwrap();
    file.set_len(1 << 30).unwrap();
    let peak = peak_bytes(|| {
        let source = Source::open(&SourceSpec::new(Format::Jsonl, [&path])).unwrap();
        let error = source.read(0).unwrap_err().to_string();
        assert!(error.ends_with("the record at line 2 (byte 3) is longer than the limit of 16777216 bytes"), "{error}");
        assert!(source.read(1000).unwrap().is_empty());
    });
    assert!(peak < 50 << 20, "{peak} bytes");
}

#[test]
fn a_file_of_terabytes_opens_without_being_read() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.txt");
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let format = Format::Text { separator: "\n\n".to_owned() };
    let peak = peak_bytes(|| {
        let spec = SourceSpec { record_bytes: 1 << 10, ..SourceSpec::new(format, [&path]) };
        let source = Source::open(&spec).unwrap();
        assert_eq!(source.chunks(), 1 << 20);
        assert!(source.read(12_345).unwrap().is_empty());
        assert!(source.read(0).is_err());
    });
    assert!(peak < 1 << 20, "{peak} bytes");
}
