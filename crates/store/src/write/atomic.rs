//! One file, written whole or not at all.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::recover;
use super::target::Target;
use crate::digest::{BlockDigester, FileDigests};
use crate::disk::{self, DiskFile};
use crate::{Defect, Error, regular_file};

const BUFFER_BYTES: usize = 1 << 20;

/// A file being written. It has its own way to write, whose errors say which file and what to do; as an
/// [`io::Write`] it serves code that knows nothing of this crate.
pub struct FileWriter {
    /// The name the file will have, for messages.
    path: PathBuf,
    file: BufWriter<DiskFile>,
    /// Digests of the bytes since [`begin_digests`](Self::begin_digests).
    digester: Option<BlockDigester>,
    /// A file that lacks bytes in the middle must not be finished, even if its writer continues.
    failure: Option<io::ErrorKind>,
}

/// Writes a file under a temporary name, syncs it to disk, and only then gives it its name.
///
/// Makes missing folders above it, and removes leftovers of killed writers of the same file. Until this returns, `path` is what
/// it was before. A link is replaced, not the file it points to.
pub fn write_file_atomically<T, E: From<Error>>(
    path: impl AsRef<Path>,
    fill: impl FnOnce(&mut FileWriter) -> Result<T, E>,
) -> Result<T, E> {
    let target = Target::new(path.as_ref())?;
    target.make_parent()?;
    if let Ok(metadata) = fs::metadata(&target.path) {
        // Replacing /dev/null by a file would be a lasting surprise.
        regular_file::must_be_regular(metadata.file_type()).map_err(|defect| defect.of(&target.path))?;
    }
    // A leftover that cannot be removed does no harm.
    let _ = recover::remove_temporaries(&target);
    let (temporary, file) = target.new_file()?;
    let mut writer = FileWriter::new(file, &target.path);
    let value = fill(&mut writer)?;
    writer.finish()?;
    disk::rename(&temporary.path, &target.path).map_err(|error| target.failure(error))?;
    target.sync_parent()?;
    Ok(value)
}

/// Writes a value as JSON for people to read, as [`write_file_atomically`] does.
pub fn write_json(path: impl AsRef<Path>, value: &impl Serialize) -> Result<(), Error> {
    write_file_atomically(path, |writer| writer.put_json(value))
}

impl FileWriter {
    pub(super) fn new(file: DiskFile, path: &Path) -> FileWriter {
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        FileWriter { path: path.to_owned(), file, digester: None, failure: None }
    }

    /// Appends these bytes.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.write_all(bytes).map_err(|error| Defect::of_writing(error).of(&self.path))
    }

    /// Appends a value as JSON for people to read.
    ///
    /// # Panics
    /// If the value cannot be JSON, for example a map whose keys are not text.
    pub fn put_json(&mut self, value: &impl Serialize) -> Result<(), Error> {
        let mut text = serde_json::to_vec_pretty(value).expect("the value has a form that JSON can hold");
        text.push(b'\n');
        self.put(&text)
    }

    /// The name the file will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Digests everything written from here on.
    pub(crate) fn begin_digests(&mut self) {
        self.digester = Some(BlockDigester::new());
    }

    /// The digests of the bytes since [`begin_digests`](Self::begin_digests).
    ///
    /// # Panics
    /// If that was never called.
    pub(crate) fn end_digests(&mut self) -> FileDigests {
        self.digester.take().expect("digests were begun").finish()
    }

    /// Syncs everything to disk.
    pub(super) fn finish(mut self) -> Result<(), Error> {
        let synced = match self.failure {
            Some(kind) => Err(io::Error::new(kind, "an earlier part of it could not be")),
            None => self.file.flush().and_then(|()| self.file.get_ref().sync()),
        };
        // Dropping must not retry a failed flush.
        let (_file, _unwritten) = self.file.into_parts();
        synced.map_err(|error| Defect::of_writing(error).of(&self.path))
    }
}

impl io::Write for FileWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes).inspect_err(|error| self.failure = Some(error.kind()))?;
        if let Some(digester) = &mut self.digester {
            digester.update(&bytes[..written]);
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush().inspect_err(|error| self.failure = Some(error.kind()))
    }
}
