//! Opening a path as a regular file, and nothing else.

use std::fs::{self, File, FileType};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use crate::Defect;

/// Opens `path` and says how many bytes it has. Links are followed, since the Hugging Face cache is made of them.
pub(crate) fn open(path: &Path) -> Result<(File, u64), Defect> {
    // Before opening, because opening a pipe waits for a writer and opening a device can act on it.
    let metadata = fs::metadata(path).map_err(|error| absence(path, error))?;
    must_be_regular(metadata.file_type())?;
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    must_be_regular(metadata.file_type())?;
    Ok((file, metadata.len()))
}

/// [`open`] for a file that need not be part of a model.
pub(crate) fn open_any(path: &Path) -> Result<(File, u64), Defect> {
    open(path).map_err(of_any)
}

/// The whole of a file that need not be part of a model.
pub(crate) fn read_any(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, Defect> {
    read_opened(open_any(path)?, limit_bytes)
}

pub(crate) fn read(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, Defect> {
    read_opened(open(path)?, limit_bytes)
}

pub(crate) fn absence_of_any(path: &Path, error: io::Error) -> Defect {
    of_any(absence(path, error))
}

/// The hint of a missing file is about models.
fn of_any(defect: Defect) -> Defect {
    match defect {
        Defect::Missing => Defect::NotThere,
        other => other,
    }
}

fn read_opened((file, found_bytes): (File, u64), limit_bytes: u64) -> Result<Vec<u8>, Defect> {
    if found_bytes > limit_bytes {
        return Err(Defect::FileTooLarge { found_bytes, limit_bytes });
    }
    let mut bytes = Vec::new();
    // Reads no more than was checked, even if the file grows.
    file.take(found_bytes).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether the folder has this entry, even as a broken link.
pub(crate) fn is_listed(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

pub(crate) fn absence(path: &Path, error: io::Error) -> Defect {
    match error.kind() {
        io::ErrorKind::NotFound if is_listed(path) => Defect::BrokenLink,
        io::ErrorKind::NotFound => Defect::Missing,
        _ => Defect::Io(error),
    }
}

pub(crate) fn must_be_regular(found: FileType) -> Result<(), Defect> {
    let found = match found {
        found if found.is_file() => return Ok(()),
        found if found.is_dir() => "a folder",
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    Err(Defect::NotARegularFile { found })
}
