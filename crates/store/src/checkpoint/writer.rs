//! Writing a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use super::manifest::{self, ListedFile};
use crate::digest::FileDigests;
use crate::{Defect, Error, FileWriter, NewFolder};

/// A checkpoint being written. Its name appears with [`commit`](Self::commit); dropping the writer before removes everything.
///
/// Several threads may write files into it at the same time.
pub struct CheckpointWriter {
    folder: NewFolder,
    /// Every file begun, with its digests once it is complete.
    files: Mutex<BTreeMap<String, Option<FileDigests>>>,
}

impl CheckpointWriter {
    /// Begins a checkpoint that will be at `path`. Makes missing folders above it, and removes leftovers of an interrupted
    /// attempt at the same path as [`recover`](crate::recover) does.
    pub fn create(path: impl AsRef<Path>) -> Result<CheckpointWriter, Error> {
        Ok(CheckpointWriter { folder: NewFolder::create(path)?, files: Mutex::default() })
    }

    /// The final path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes one file and syncs it to disk. A file that fails is removed and may be written again; until it is, the checkpoint
    /// cannot be committed.
    pub fn file<E: From<Error>>(
        &self,
        name: &str,
        fill: impl FnOnce(&mut FileWriter) -> Result<(), E>,
    ) -> Result<(), E> {
        manifest::check_file_name(name).map_err(|defect| defect.of(self.path()))?;
        self.files().entry(name.to_owned()).or_default();
        let digests = self.folder.file(name, |writer| {
            writer.begin_digests();
            fill(writer)?;
            Ok::<_, E>(writer.end_digests())
        })?;
        self.files().insert(name.to_owned(), Some(digests));
        Ok(())
    }

    /// Writes the manifest and gives the checkpoint its name. When this returns, it is on disk and survives a loss of
    /// power. A folder that has the name already is replaced, as by [`NewFolder::commit`].
    ///
    /// `body` is the caller's description of the files.
    pub fn commit(self, body: &Value) -> Result<(), Error> {
        let path = self.folder.path();
        let mut files = Vec::new();
        for (name, digests) in std::mem::take(&mut *self.files()) {
            let Some(digests) = digests else { return Err(Defect::FileNotCompleted { name }.of(path)) };
            files.push(ListedFile::new(name, digests));
        }
        let text = manifest::write(body, &files).map_err(|defect| defect.of(&path.join(manifest::NAME)))?;
        self.folder.write(manifest::NAME, &text)?;
        self.folder.commit(true)
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<String, Option<FileDigests>>> {
        // Each change is one insertion, so a panic cannot leave it half changed.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
