//! Places of records in files, for messages.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::PoisonError;

use super::data_file::DataFile;

/// The place of a record in its file. Lines and rows count from 1, bytes from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "Display says what they are")]
pub enum RecordPlace {
    Line { line: u64, byte: u64 },
    Row { row: u64 },
    WholeFile,
}

/// The file and the place in it that a record came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordOrigin {
    /// The file.
    pub file: PathBuf,
    /// The place in the file.
    pub place: RecordPlace,
}

impl RecordPlace {
    /// Counts the lines before a byte. It reads the file from the last byte counted up to there, so it is for messages only; a
    /// file that cannot be read any more has no lines.
    pub(super) fn of_byte(file: &DataFile, byte: u64) -> RecordPlace {
        let mut known = file.newlines.lock().unwrap_or_else(PoisonError::into_inner);
        let (from, before) = if known.0 <= byte { *known } else { (0, 0) };
        let newlines = file.open().ok().and_then(|opened| count_newlines(opened, from..byte).ok());
        if let Some(newlines) = newlines {
            *known = (byte, before + newlines);
        }
        RecordPlace::Line { line: newlines.map_or(0, |newlines| before + newlines + 1), byte }
    }
}

fn count_newlines(mut file: File, bytes: Range<u64>) -> io::Result<u64> {
    file.seek(SeekFrom::Start(bytes.start))?;
    let mut file = file.take(bytes.end - bytes.start);
    let mut batch = vec![0; 1 << 16];
    let mut newlines = 0;
    loop {
        match file.read(&mut batch)? {
            0 => return Ok(newlines),
            bytes => newlines += batch[..bytes].iter().filter(|&&byte| byte == b'\n').count() as u64,
        }
    }
}

impl fmt::Display for RecordPlace {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecordPlace::Line { line, byte } => write!(out, "line {line} (byte {byte})"),
            RecordPlace::Row { row } => write!(out, "row {row}"),
            RecordPlace::WholeFile => write!(out, "the whole file"),
        }
    }
}

impl fmt::Display for RecordOrigin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            RecordPlace::WholeFile => write!(out, "`{}`", self.file.display()),
            place => write!(out, "{place} of `{}`", self.file.display()),
        }
    }
}
