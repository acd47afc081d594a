//! What a run keeps in its folder: logs that grow, and checkpoints that come and go.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::target;
use crate::{Defect, Error};

/// A file that a run adds to. Unlike everything else that is written here, it is there from the first line on.
pub struct LogFile {
    file: BufWriter<File>,
    path: PathBuf,
}

impl LogFile {
    /// An empty file, with the folders above it.
    pub fn create(path: impl AsRef<Path>) -> Result<LogFile, Error> {
        LogFile::open(path.as_ref(), OpenOptions::new().write(true).create(true).truncate(true))
    }

    /// The file as it is, to be added to.
    pub fn append(path: impl AsRef<Path>) -> Result<LogFile, Error> {
        LogFile::open(path.as_ref(), OpenOptions::new().append(true).create(true))
    }

    fn open(path: &Path, options: &OpenOptions) -> Result<LogFile, Error> {
        if let Some(parent) = path.parent() {
            target::make_folders(parent)?;
        }
        let file = options.open(path).map_err(|error| Defect::of_writing(error).of(path))?;
        Ok(LogFile { file: BufWriter::new(file), path: path.to_owned() })
    }

    /// Hands everything to the system, so that others see it.
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

/// The right to write to a folder, as long as it lives. The system takes it back from a process that dies.
pub struct FolderLock(#[expect(dead_code, reason = "holds the lock")] File);

impl FolderLock {
    /// None while another process has it.
    pub fn take(folder: impl AsRef<Path>) -> Result<Option<FolderLock>, Error> {
        let folder = folder.as_ref();
        target::make_folders(folder)?;
        let path = folder.join(".lock");
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(|error| Defect::of_writing(error).of(&path))?;
        match file.try_lock() {
            Err(std::fs::TryLockError::WouldBlock) => Ok(None),
            // A file system without locks cannot tell.
            _ => Ok(Some(FolderLock(file))),
        }
    }
}

/// The names of the folders in a folder, sorted; none where there is no such folder. Hidden ones are left out.
pub fn subfolders(path: impl AsRef<Path>) -> Result<Vec<String>, Error> {
    entries(path.as_ref(), |kind| kind.is_dir())
}

/// The names of the regular files in a folder, as [`subfolders`] gives those of folders.
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

/// Deletes a folder or a file that the run no longer needs. It loses its name first, so that none is there in part.
pub fn remove(path: impl AsRef<Path>) -> Result<(), Error> {
    let path = path.as_ref();
    let outgoing = target::Target::new(path)?.outgoing();
    match fs::rename(path, &outgoing).and_then(|()| target::remove(&outgoing)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Defect::of_writing(error).of(path)),
        _ => Ok(()),
    }
}

/// Whether something has this name.
pub fn exists(path: impl AsRef<Path>) -> bool {
    crate::regular_file::is_listed(path.as_ref())
}
