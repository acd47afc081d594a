//! Records the operations on a folder.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use evenkeel_store::faults::{self, DiskOperation};

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
    pub fn of(operation: &DiskOperation, root: &Path) -> Recorded {
        let relative = |path: &Path| path.strip_prefix(root).unwrap().to_owned();
        match *operation {
            DiskOperation::CreateFile(path) => Recorded::CreateFile(relative(path)),
            DiskOperation::Write { file, bytes } => Recorded::Write { file: relative(file), bytes: bytes.to_vec() },
            DiskOperation::SyncFile(path) => Recorded::SyncFile(relative(path)),
            DiskOperation::CreateFolder(path) => Recorded::CreateFolder(relative(path)),
            DiskOperation::SyncFolder(path) => Recorded::SyncFolder(relative(path)),
            DiskOperation::Rename { from, to } => Recorded::Rename { from: relative(from), to: relative(to) },
            DiskOperation::RemoveFile(path) => Recorded::RemoveFile(relative(path)),
            DiskOperation::RemoveTree(path) => Recorded::RemoveTree(relative(path)),
            DiskOperation::OpenFile(path) => panic!("{} is kept and added to; no checkpoint does that", path.display()),
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
