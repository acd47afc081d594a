//! The files of a run's folder: logs that grow, and checkpoints that come and go.

use std::fs::{self, FileType, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::recover;
use super::target::{self, Target};
use crate::disk::{self, DiskFile};
use crate::{Defect, Error, regular_file};

/// A file that a run appends to. Unlike everything else written here, it exists from its first line on.
pub struct LogFile {
    file: BufWriter<DiskFile>,
    path: PathBuf,
}

impl LogFile {
    /// Makes an empty file, and the folders above it.
    pub fn create(path: impl AsRef<Path>) -> Result<LogFile, Error> {
        LogFile::open(path.as_ref(), DiskFile::create_empty)
    }

    /// Opens a file to append to.
    pub fn append(path: impl AsRef<Path>) -> Result<LogFile, Error> {
        LogFile::open(path.as_ref(), DiskFile::append)
    }

    fn open(path: &Path, open: impl Fn(&Path) -> io::Result<DiskFile>) -> Result<LogFile, Error> {
        if let Some(parent) = path.parent() {
            target::make_folders(parent)?;
        }
        let file = open(path).map_err(|error| Defect::of_writing(error).of(path))?;
        Ok(LogFile { file: BufWriter::new(file), path: path.to_owned() })
    }

    /// Flushes to the system, so that other processes see it.
    pub fn publish(&mut self) -> Result<(), Error> {
        self.file.flush().map_err(|error| self.failure(error))
    }

    /// The error of a failed write to this file.
    pub fn failure(&self, error: io::Error) -> Error {
        Defect::of_writing(error).of(&self.path)
    }
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// An exclusive lock on a folder while it lives. The system releases it when the process dies.
pub struct FolderLock(#[expect(dead_code, reason = "holds the lock")] DiskFile);

impl FolderLock {
    /// `None` while another process has it.
    pub fn take(folder: impl AsRef<Path>) -> Result<Option<FolderLock>, Error> {
        let folder = folder.as_ref();
        target::make_folders(folder)?;
        let path = folder.join(".lock");
        let file = DiskFile::append(&path).map_err(|error| Defect::of_writing(error).of(&path))?;
        match file.handle().try_lock() {
            Err(TryLockError::WouldBlock) => Ok(None),
            // A file system without locks cannot tell.
            _ => Ok(Some(FolderLock(file))),
        }
    }
}

/// The names of the folders in a folder, sorted and without hidden ones; empty if there is no such folder.
pub fn subfolders(path: impl AsRef<Path>) -> Result<Vec<String>, Error> {
    entries(path.as_ref(), |kind| kind.is_dir())
}

/// The names of the regular files in a folder, like [`subfolders`].
pub fn files(path: impl AsRef<Path>) -> Result<Vec<String>, Error> {
    entries(path.as_ref(), |kind| kind.is_file())
}

fn entries(path: &Path, is_wanted: impl Fn(FileType) -> bool) -> Result<Vec<String>, Error> {
    let failure = |error| Defect::Io(error).of(path);
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failure)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failure)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') && is_wanted(entry.file_type().map_err(failure)?) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Deletes a folder or a file. It loses its name first, so that no part of it stays under that name.
pub fn remove(path: impl AsRef<Path>) -> Result<(), Error> {
    let target = Target::new(path.as_ref())?;
    let condemned = target.condemned();
    if regular_file::is_listed(&condemned) {
        // A leftover of an interrupted removal has the name needed now.
        recover::delete(&target, &condemned)?;
    }
    match disk::rename(&target.path, &condemned) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Defect::of_writing(error).of(&target.path)),
        Ok(()) => recover::delete(&target, &condemned),
    }
}

/// Whether the path exists, even as a broken link.
pub fn exists(path: impl AsRef<Path>) -> bool {
    regular_file::is_listed(path.as_ref())
}
