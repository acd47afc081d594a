//! Writing a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use super::manifest::{self, ListedFile};
use crate::digest::FileDigests;
use crate::{Defect, Error, FileWriter, NewFolder};

/// A checkpoint that is being written. Nothing has its name before [`commit`](Self::commit); dropped without that, all
/// of it is removed.
///
/// Several threads may write files into it at the same time.
pub struct CheckpointWriter {
    folder: NewFolder,
    /// Every file that was begun, with its digests once it is complete.
    files: Mutex<BTreeMap<String, Option<FileDigests>>>,
}

impl CheckpointWriter {
    /// Begins a checkpoint that will be at `path`. Missing folders above it are made, and what an earlier, interrupted
    /// attempt at the same path left is cleared away as by [`recover`](crate::recover).
    pub fn create(path: impl AsRef<Path>) -> Result<CheckpointWriter, Error> {
        Ok(CheckpointWriter { folder: NewFolder::create(path)?, files: Mutex::default() })
    }

    /// Where the checkpoint will be.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Writes one file and makes sure it is on disk. A file that fails is removed again and may be written anew; as
    /// long as it is not, there will be no checkpoint.
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
    /// `body` is for the caller to say what the files are.
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
        // Each change is one insertion, so nobody can leave it half changed.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
