//! The files a source is made of.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::chunk_index::ChunkIndex;
use crate::{Defect, Error, limits, regular_file};

/// A file of data and its size when the source was opened. Each chunk opens it again: a data set can have more files than a
/// process may hold open.
#[derive(Clone, Debug)]
pub(super) struct DataFile {
    pub path: PathBuf,
    pub size_bytes: u64,
    /// The last byte up to which newlines were counted, and their number.
    pub newlines: Arc<Mutex<(u64, u64)>>,
}

/// How a folder's files are chosen.
pub(super) struct Pattern {
    pub is_match: fn(&str) -> bool,
    /// The pattern as messages show it.
    pub shown: &'static str,
}

impl DataFile {
    pub fn new(path: PathBuf) -> Result<DataFile, Error> {
        let metadata = fs::metadata(&path).map_err(|error| regular_file::absence_of_any(&path, error).of(&path))?;
        regular_file::must_be_regular(metadata.file_type()).map_err(|defect| defect.of(&path))?;
        Ok(DataFile { size_bytes: metadata.len(), path, newlines: Arc::default() })
    }

    /// Fails if the size has changed, because chunks were cut by it.
    pub fn open(&self) -> Result<File, Error> {
        let (file, found_bytes) = regular_file::open_any(&self.path).map_err(|defect| self.fail(defect))?;
        if found_bytes != self.size_bytes {
            return Err(self.fail(Defect::Changed { expected_bytes: self.size_bytes, found_bytes }));
        }
        Ok(file)
    }

    pub fn fail(&self, defect: Defect) -> Error {
        defect.of(&self.path)
    }

    pub fn range(&self, chunk: usize, chunk_bytes: u64) -> Range<u64> {
        let begin = chunk as u64 * chunk_bytes;
        begin..self.size_bytes.min(begin.saturating_add(chunk_bytes))
    }
}

/// The files of some paths: a file stands for itself, a folder for its matching files in the order of their names.
pub(super) fn find(paths: &[PathBuf], pattern: &Pattern) -> Result<Vec<DataFile>, Error> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(DataFile::new(path.clone())?);
            continue;
        }
        let before = files.len();
        for (_, entry) in list(path)?.into_iter().filter(|(name, entry)| (pattern.is_match)(name) && !entry.is_dir()) {
            files.push(DataFile::new(entry)?);
        }
        if files.len() == before {
            return Err(Defect::NoData { expected: pattern.shown }.of(path));
        }
    }
    Ok(files)
}

/// A folder's entries by name, without the hidden ones.
pub(super) fn list(folder: &Path) -> Result<Vec<(String, PathBuf)>, Error> {
    let fail = |error: io::Error| match error.kind() {
        io::ErrorKind::NotADirectory => Defect::InTheWay.of(folder),
        _ => regular_file::absence_of_any(folder, error).of(folder),
    };
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        // A name that is not UTF-8 matches no pattern; as a class it is refused.
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') {
            entries.push((name, entry.path()));
        }
        if entries.len() > limits::DATA_FILES {
            return Err(Defect::TooManyFiles { found: entries.len() }.of(folder));
        }
    }
    entries.sort();
    Ok(entries)
}

pub(super) fn paths(files: &[DataFile]) -> Vec<&Path> {
    files.iter().map(|file| file.path.as_path()).collect()
}

/// Cuts files into chunks of `chunk_bytes`.
pub(super) fn cut(files: &[DataFile], chunk_bytes: u64) -> ChunkIndex {
    ChunkIndex::new(files.iter().map(|file| file.size_bytes.div_ceil(chunk_bytes)))
}

/// Whether a file name ends in `.` and one of these, in any case.
pub(super) fn has_ending(name: &str, endings: &[&str]) -> bool {
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    ending.is_some_and(|found| endings.iter().any(|ending| ending.eq_ignore_ascii_case(found)))
}
