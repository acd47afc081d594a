//! Observes disk operations and makes them fail. For tests only.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

pub use super::DiskOperation;

/// Called before each operation. An error prevents the operation and goes to its caller.
pub type Observer = dyn Fn(&DiskOperation) -> io::Result<()> + Send + Sync;

type Watched = (PathBuf, Arc<Observer>);

// By folder and not by thread, because tests run side by side and a save has several threads.
static WATCHED: RwLock<Vec<Watched>> = RwLock::new(Vec::new());

/// Watches a folder until it is dropped.
#[must_use = "nothing is watched once it is dropped"]
pub struct DiskWatch(Arc<Observer>);

/// Calls an observer before every operation on a folder or below it, on any thread.
pub fn watch(
    folder: impl Into<PathBuf>,
    observer: impl Fn(&DiskOperation) -> io::Result<()> + Send + Sync + 'static,
) -> DiskWatch {
    let observer: Arc<Observer> = Arc::new(observer);
    WATCHED.write().unwrap_or_else(PoisonError::into_inner).push((folder.into(), observer.clone()));
    DiskWatch(observer)
}

impl Drop for DiskWatch {
    fn drop(&mut self) {
        let mut watched = WATCHED.write().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|(_, observer)| !Arc::ptr_eq(observer, &self.0));
    }
}

pub(super) fn announce(operation: DiskOperation) -> io::Result<()> {
    let path = operation.path();
    let told = {
        let watched = WATCHED.read().unwrap_or_else(PoisonError::into_inner);
        watched.iter().find(|(folder, _)| path.starts_with(folder)).map(|(_, observer)| observer.clone())
    };
    told.map_or(Ok(()), |observer| observer(&operation))
}

impl DiskOperation<'_> {
    /// The path it changes; for a rename, the old name.
    pub fn path(&self) -> &Path {
        match self {
            DiskOperation::CreateFile(path)
            | DiskOperation::OpenFile(path)
            | DiskOperation::Write { file: path, .. }
            | DiskOperation::SyncFile(path)
            | DiskOperation::CreateFolder(path)
            | DiskOperation::SyncFolder(path)
            | DiskOperation::Rename { from: path, .. }
            | DiskOperation::RemoveFile(path)
            | DiskOperation::RemoveTree(path) => path,
        }
    }
}
