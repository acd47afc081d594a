//! The documents that begin in a range of a text file.
//!
//! A byte is part of a separator if it lies in any occurrence of it, also where occurrences overlap; a document is a
//! longest run of other bytes. So whether a document begins at a byte can be seen from the bytes around it, wherever
//! reading began. Splitting from the front, one occurrence after the other, could not be cut in chunks: in a row of
//! newlines it matters where one starts to count.

use std::ops::Range;

use super::OnBad;
use super::data_file::DataFile;
use super::place::RecordPlace;
use super::separator::Separator;
use super::view::View;
use crate::{Defect, Error};

/// A document or its error, and the offset of its first byte.
pub(super) type Document = (u64, Result<Vec<u8>, Error>);

/// Reads from a little before the range to the end of the last document that begins in it. Skips documents of white space
/// alone.
pub(super) fn documents(
    file: &DataFile,
    range: Range<u64>,
    separator: &Separator,
    limit_bytes: u64,
    on_bad: OnBad,
) -> Result<Vec<Document>, Error> {
    let mut view = View::new(file, context_begin(range.start, separator))?;
    let mut found = Vec::new();
    let mut current = Current::default();
    let mut matched = 0;
    while let Some((at, byte)) = view.next()? {
        if current.length == 0 {
            current.begin = at;
            current.is_wanted = at >= range.start;
        }
        let is_beyond = at >= range.end;
        if is_beyond && (current.length == 0 || !current.is_wanted) {
            return Ok(found);
        }
        current.push(byte);
        matched = separator.step(matched, byte);
        if matched == separator.len() {
            current.cut(separator.len());
            current.finish(file, limit_bytes, &mut found);
        } else if current.text.len() as u64 > limit_bytes.saturating_add(separator.len() as u64) {
            if on_bad == OnBad::Fail {
                return Err(too_long(file, current.begin, limit_bytes));
            }
            current.is_too_long = true;
            current.text = Vec::new();
        }
    }
    current.finish(file, limit_bytes, &mut found);
    Ok(found)
}

/// The text of a document, or an error at the byte that is not UTF-8.
pub(super) fn decode(file: &DataFile, begin: u64, bytes: Result<Vec<u8>, Error>) -> Result<String, Error> {
    String::from_utf8(bytes?).or_else(|error| {
        let byte = offset_of(file, begin, error.utf8_error().valid_up_to())?;
        Err(file.fail(Defect::RecordNotUtf8 { place: RecordPlace::of_byte(file, byte) }))
    })
}

/// The bytes since the last separator. The last of them may be part of the next one.
#[derive(Default)]
struct Current {
    begin: u64,
    length: usize,
    /// Whether it begins in the range. If not, its bytes are dropped.
    is_wanted: bool,
    /// Its bytes are no longer kept.
    is_too_long: bool,
    text: Vec<u8>,
}

impl Current {
    fn push(&mut self, byte: u8) {
        self.length += 1;
        if self.is_wanted && !self.is_too_long {
            self.text.push(byte);
        }
    }

    /// Removes a separator from its end. A separator that began before the run removes all of it.
    fn cut(&mut self, separator_bytes: usize) {
        self.text.truncate(self.text.len().saturating_sub(separator_bytes));
    }

    fn finish(&mut self, file: &DataFile, limit_bytes: u64, found: &mut Vec<Document>) {
        let Current { begin, is_too_long, text, .. } = std::mem::take(self);
        if is_too_long || text.len() as u64 > limit_bytes {
            found.push((begin, Err(too_long(file, begin, limit_bytes))));
        } else if !text.trim_ascii().is_empty() {
            found.push((begin, Ok(text)));
        }
    }
}

/// An offset early enough to see every separator that ends at the byte before `begin` or later; each of its bytes may stand for
/// two in the file.
fn context_begin(begin: u64, separator: &Separator) -> u64 {
    begin.saturating_sub(2 * separator.len() as u64 + 1)
}

pub(super) fn too_long(file: &DataFile, begin: u64, limit_bytes: u64) -> Error {
    file.fail(Defect::RecordTooLong { place: RecordPlace::of_byte(file, begin), limit_bytes })
}

/// The offset of the `index`th byte of a view from `begin`.
fn offset_of(file: &DataFile, begin: u64, index: usize) -> Result<u64, Error> {
    let mut view = View::new(file, begin)?;
    for _ in 0..index {
        view.next()?;
    }
    Ok(view.next()?.map_or(file.size_bytes, |(at, _)| at))
}
