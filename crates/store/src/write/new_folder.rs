//! A folder, written whole or not at all.

use std::path::Path;

use serde::Serialize;

use super::FileWriter;
use super::recover;
use super::target::{Target, Temporary};
use crate::disk::{self, DiskFile};
use crate::error::printable;
use crate::{Defect, Error, regular_file};

/// A folder that is being written under a temporary name beside its own. [`commit`](Self::commit) gives it its name;
/// without that, dropping it removes all of it.
///
/// Several threads may write files into it at the same time.
pub struct NewFolder {
    target: Target,
    temporary: Temporary,
}

impl NewFolder {
    /// Begins a folder that will be at `path`. Makes missing folders above it, and removes leftovers of an interrupted attempt
    /// as [`recover`](super::recover()) does.
    pub fn create(path: impl AsRef<Path>) -> Result<NewFolder, Error> {
        let target = Target::new(path.as_ref())?;
        target.make_parent()?;
        recover::recover_target(&target)?;
        let temporary = target.new_folder()?;
        Ok(NewFolder { target, temporary })
    }

    /// The final path.
    pub fn path(&self) -> &Path {
        &self.target.path
    }

    /// Writes one file and syncs it to disk. A file that fails is removed.
    pub fn file<T, E: From<Error>>(
        &self,
        name: &str,
        fill: impl FnOnce(&mut FileWriter) -> Result<T, E>,
    ) -> Result<T, E> {
        check_name(name).map_err(|defect| defect.of(&self.target.path))?;
        // Messages show the final path: the temporary one is gone when they are read.
        let shown = self.target.path.join(name);
        let path = self.temporary.path.join(name);
        let file = DiskFile::create_new(&path).map_err(|error| Defect::of_writing(error).of(&shown))?;
        let mut unfinished = Unfinished { path: &path, is_finished: false };
        let mut writer = FileWriter::new(file, &shown);
        let value = fill(&mut writer)?;
        writer.finish()?;
        unfinished.is_finished = true;
        Ok(value)
    }

    /// Writes one file of these bytes.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        self.file(name, |writer| writer.put(bytes))
    }

    /// Writes a value as JSON for people to read.
    pub fn write_json(&self, name: &str, value: &impl Serialize) -> Result<(), Error> {
        self.file(name, |writer| writer.put_json(value))
    }

    /// Gives the folder its name. When this returns, it is on disk and survives a loss of power.
    ///
    /// If the name is taken, that is an error; with `replace`, the old folder is deleted with its contents once the new one has
    /// taken its place. An interruption at any point leaves the old or the new one whole: under the name, or, between two
    /// renames, where [`recover`](super::recover()) finds it.
    pub fn commit(self, replace: bool) -> Result<(), Error> {
        let target = &self.target;
        disk::sync_folder(&self.temporary.path).map_err(|error| target.failure(error))?;
        if !regular_file::is_listed(&target.path) {
            disk::rename(&self.temporary.path, &target.path).map_err(|error| target.failure(error))?;
            return target.sync_parent();
        }
        if !replace {
            return Err(Defect::ExistsAlready.of(&target.path));
        }
        if !target.path.is_dir() {
            return Err(Defect::InTheWay.of(&target.path));
        }
        disk::rename(&self.temporary.path, &target.replacement()).map_err(|error| target.failure(error))?;
        target.sync_parent()?;
        recover::finish_replacement(target)
    }
}

/// Removes its file unless it was finished.
struct Unfinished<'path> {
    path: &'path Path,
    is_finished: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = disk::remove(self.path);
        }
    }
}

/// A name that, joined to a folder, can only be an entry of that folder.
pub(crate) fn check_name(name: &str) -> Result<(), Defect> {
    let is_plain = !matches!(name, "" | "." | "..")
        && !name.contains(|character: char| character == '/' || character.is_control());
    if is_plain { Ok(()) } else { Err(Defect::NotAFileName { name: printable(name) }) }
}
