//! Checkpoints whose contents follow from their version, for tests that interrupt, fail and damage them.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod model;
pub mod recording;
pub mod victim;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;

use evenkeel_store::checkpoint::{Checkpoint, CheckpointWriter, list, newest_good};
use evenkeel_store::{Error, SafeTensorsFile, recover_all};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use tempfile::TempDir;

pub const PREFIX: &str = "step-";
/// Written by two threads, the first two by one and the others by the other.
pub const FILES: [&str; 4] = ["rank-0.safetensors", "rank-1.safetensors", "rank-2.safetensors", "rank-3.safetensors"];

/// A folder in memory if there is one: thousands of saves mostly wait for the disk.
pub fn scratch() -> TempDir {
    TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).unwrap()
}

/// The folder of a run's checkpoints below `root`. It is deep, so that saves also make the folders above it.
pub fn checkpoints(root: &Path) -> PathBuf {
    root.join("runs/first/checkpoints")
}

pub fn checkpoint(root: &Path, step: u64) -> PathBuf {
    checkpoints(root).join(format!("{PREFIX}{step:08}"))
}

/// Saves a checkpoint with two threads. Its values follow from version and file.
pub fn save(path: &Path, version: u64, elements: usize) -> Result<(), Error> {
    let writer = CheckpointWriter::create(path)?;
    let write = |names: &[&str]| names.iter().try_for_each(|name| write_tensors(&writer, name, version, elements));
    thread::scope(|scope| {
        let other = scope.spawn(|| write(&FILES[2..]));
        let this = write(&FILES[..2]);
        other.join().unwrap().and(this)
    })?;
    writer.commit(&json!({ "version": version }))
}

/// In two writes, because what is torn is often torn between two.
fn write_tensors(writer: &CheckpointWriter, name: &str, version: u64, elements: usize) -> Result<(), Error> {
    let values: Vec<u8> = values(name, version, elements).into_iter().flat_map(f32::to_le_bytes).collect();
    let tensor = TensorView::new(Dtype::F32, vec![elements], &values).unwrap();
    let bytes = safetensors::serialize([("t", tensor)], None).unwrap();
    let (first, second) = bytes.split_at(bytes.len() / 2);
    writer.file(name, |file| {
        file.put(first)?;
        // If this fails, so will the end.
        let _ = file.flush();
        file.put(second)
    })
}

fn values(name: &str, version: u64, elements: usize) -> Vec<f32> {
    let seed = version * 1000 + u64::from(name.as_bytes()[5]);
    (0..elements).map(|i| (seed + i as u64) as f32).collect()
}

/// The version of a checkpoint, after checking every value.
pub fn version(checkpoint: &Checkpoint) -> u64 {
    let version = checkpoint.body()["version"].as_u64().unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), FILES);
    for name in FILES {
        let file = checkpoint.tensors(name).unwrap();
        let found = all_values(&file);
        assert!(found == values(name, version, found.len()), "{name} is not of version {version}");
    }
    version
}

fn all_values(file: &SafeTensorsFile) -> Vec<f32> {
    let tensor = file.tensor("t").unwrap();
    let mut values = vec![0.0; tensor.element_count()];
    tensor.read(0..values.len(), &mut values).unwrap();
    values
}

/// Starts as a run does, and returns the version to continue with. Every path named like a checkpoint must be one, and nothing
/// else may be left.
pub fn start(root: &Path) -> Option<u64> {
    let parent = checkpoints(root);
    recover_all(&parent, |name| name.starts_with(PREFIX)).unwrap();
    let folders = list(&parent, PREFIX).unwrap();
    for folder in &folders {
        Checkpoint::open(folder).and_then(|checkpoint| checkpoint.verify()).unwrap();
    }
    assert_eq!(names(&parent).len(), folders.len(), "something was left: {:?}", names(&parent));
    let (newest, damaged) = newest_good(&folders);
    assert!(damaged.is_empty(), "{damaged:?}");
    newest.as_ref().map(version)
}

/// The names in a folder, hidden ones too, sorted. None where there is no folder.
pub fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
