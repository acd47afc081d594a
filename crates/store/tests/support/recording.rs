//! Records the operations on a folder.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use evenkeel_store::faults::{self, Operation};

/// An operation that was made, its paths counted from the recorded folder.
#[derive(Clone, Debug)]
pub enum Recorded {
    CreateFile(PathBuf),
    Write { file: PathBuf, bytes: Vec<u8> },
    SyncFile(PathBuf),
    CreateFolder(PathBuf),
    SyncFolder(PathBuf),
    Rename { from: PathBuf, to: PathBuf },
    RemoveFile(PathBuf),
    RemoveTree(PathBuf),
}

impl Recorded {
    pub fn of(operation: &Operation, root: &Path) -> Recorded {
        let relative = |path: &Path| path.strip_prefix(root).unwrap().to_owned();
        match *operation {
            Operation::CreateFile(path) => Recorded::CreateFile(relative(path)),
            Operation::Write { file, bytes } => Recorded::Write { file: relative(file), bytes: bytes.to_vec() },
            Operation::SyncFile(path) => Recorded::SyncFile(relative(path)),
            Operation::CreateFolder(path) => Recorded::CreateFolder(relative(path)),
            Operation::SyncFolder(path) => Recorded::SyncFolder(relative(path)),
            Operation::Rename { from, to } => Recorded::Rename { from: relative(from), to: relative(to) },
            Operation::RemoveFile(path) => Recorded::RemoveFile(relative(path)),
            Operation::RemoveTree(path) => Recorded::RemoveTree(relative(path)),
            Operation::OpenFile(path) => panic!("{} is kept and added to; no checkpoint does that", path.display()),
        }
    }
}

/// Everything that `run` does to `root`.
pub fn record(root: &Path, run: impl FnOnce()) -> Vec<Recorded> {
    let operations = Arc::new(Mutex::new(Vec::new()));
    let (list, folder) = (operations.clone(), root.to_owned());
    let watch = faults::watch(root, move |operation| {
        list.lock().unwrap().push(Recorded::of(operation, &folder));
        Ok(())
    });
    run();
    drop(watch);
    std::mem::take(&mut *operations.lock().unwrap())
}
