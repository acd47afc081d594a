//! Every change that this crate makes to a disk: nothing is made, written, synced, renamed or removed elsewhere. With the
//! feature `faults`, which only tests turn on, each call is announced before it is made and can be failed (`faults`). Without
//! the feature the calls are those of `std::fs` and nothing else.

#[cfg(feature = "faults")]
pub mod faults;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

#[cfg(feature = "faults")]
use faults::announce;

/// A change about to be made.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "faults"), allow(dead_code, reason = "only tests look at it"))]
pub enum DiskOperation<'call> {
    /// A file begins to exist, or becomes empty.
    CreateFile(&'call Path),
    /// A file is opened for writing with its contents kept; it begins to exist if it did not.
    OpenFile(&'call Path),
    /// Bytes are added at the end of a file.
    Write {
        /// The name under which the file was created or opened.
        file: &'call Path,
        /// The bytes added.
        bytes: &'call [u8],
    },
    /// A file's contents are made to last.
    SyncFile(&'call Path),
    /// A folder begins to exist.
    CreateFolder(&'call Path),
    /// The names in a folder are made to last.
    SyncFolder(&'call Path),
    /// Something gets another name in the same folder.
    Rename {
        /// Its name before.
        from: &'call Path,
        /// Its name afterwards.
        to: &'call Path,
    },
    /// A file or a link loses its name.
    RemoveFile(&'call Path),
    /// A folder and all that is in it lose their names, one after the other.
    RemoveTree(&'call Path),
}

#[cfg(not(feature = "faults"))]
#[inline(always)]
fn announce(_: DiskOperation) -> io::Result<()> {
    Ok(())
}

/// A file that is open for writing.
pub(crate) struct DiskFile {
    file: File,
    #[cfg(feature = "faults")]
    path: std::path::PathBuf,
}

impl DiskFile {
    /// A file that did not exist.
    pub fn create_new(path: &Path) -> io::Result<DiskFile> {
        announce(DiskOperation::CreateFile(path))?;
        DiskFile::open(path, OpenOptions::new().write(true).create_new(true))
    }

    /// A file that is empty now, whether it existed or not.
    pub fn create_empty(path: &Path) -> io::Result<DiskFile> {
        announce(DiskOperation::CreateFile(path))?;
        DiskFile::open(path, OpenOptions::new().write(true).create(true).truncate(true))
    }

    /// A file to be added to, made if it did not exist.
    pub fn append(path: &Path) -> io::Result<DiskFile> {
        announce(DiskOperation::OpenFile(path))?;
        DiskFile::open(path, OpenOptions::new().append(true).create(true))
    }

    fn open(path: &Path, options: &OpenOptions) -> io::Result<DiskFile> {
        Ok(DiskFile {
            file: options.open(path)?,
            #[cfg(feature = "faults")]
            path: path.to_owned(),
        })
    }

    pub fn sync(&self) -> io::Result<()> {
        #[cfg(feature = "faults")]
        announce(DiskOperation::SyncFile(&self.path))?;
        self.file.sync_all()
    }

    /// For locks and reads.
    pub fn handle(&self) -> &File {
        &self.file
    }
}

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        #[cfg(feature = "faults")]
        announce(DiskOperation::Write { file: &self.path, bytes })?;
        // All or an error, because exactly the announced write must happen.
        self.file.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

pub(crate) fn create_folder(path: &Path) -> io::Result<()> {
    announce(DiskOperation::CreateFolder(path))?;
    fs::create_dir(path)
}

pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    announce(DiskOperation::SyncFolder(path))?;
    match File::open(path)?.sync_all() {
        // File systems that cannot sync a folder say so, and have nothing to sync.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        synced => synced,
    }
}

pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    announce(DiskOperation::Rename { from, to })?;
    fs::rename(from, to)
}

/// Removes a file, a link or a folder with its contents. It may be gone already.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            announce(DiskOperation::RemoveTree(path)).and_then(|()| fs::remove_dir_all(path))
        }
        Ok(_) => announce(DiskOperation::RemoveFile(path)).and_then(|()| fs::remove_file(path)),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
