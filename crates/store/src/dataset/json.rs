//! JSON files that are one list of objects.
//!
//! Finding where an element begins needs everything before it, so opening a file reads it through once. It keeps where chunks
//! begin: a few bytes for each MiB.

use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use super::chunk_index::ChunkIndex;
use super::data_file::{self, DataFile, Pattern, has_ending};
use super::documents::{Document, decode, too_long};
use super::place::{RecordOrigin, RecordPlace};
use super::view::View;
use super::{Chunks, OnBad, Placed, Record, SourceSpec};
use crate::error::printable;
use crate::{Defect, Error};

const PATTERN: Pattern = Pattern { is_match: |name| has_ending(name, &["json"]), shown: "*.json" };

pub(super) struct JsonChunks {
    files: Vec<DataFile>,
    /// By file: the offsets where chunks begin, and where the last one ends.
    bounds: Vec<Vec<u64>>,
    index: ChunkIndex,
    record_bytes: u64,
}

impl JsonChunks {
    pub fn open(spec: &SourceSpec) -> Result<JsonChunks, Error> {
        let files = data_file::find(&spec.paths, &PATTERN)?;
        let cut = |file: &DataFile| cut(file, spec.chunk_bytes, spec.record_bytes);
        let bounds: Vec<Vec<u64>> = files.iter().map(cut).collect::<Result<_, _>>()?;
        let index = ChunkIndex::new(bounds.iter().map(|bounds| bounds.len() as u64 - 1));
        Ok(JsonChunks { files, bounds, index, record_bytes: spec.record_bytes })
    }
}

impl Chunks for JsonChunks {
    fn count(&self) -> usize {
        self.index.count()
    }

    fn read(&self, chunk: usize, _: OnBad) -> Result<Vec<Placed>, Error> {
        let (place, chunk) = self.index.locate(chunk);
        let (file, bounds) = (&self.files[place], &self.bounds[place]);
        let mut elements = Elements::new(file, bounds[chunk]..bounds[chunk + 1], self.record_bytes)?;
        let mut records = Vec::new();
        while let Some((begin, element)) = elements.next()? {
            records.push((begin, decode(file, begin, element).and_then(|text| object(file, begin, &text))));
        }
        Ok(records)
    }

    fn files(&self) -> Vec<&Path> {
        data_file::paths(&self.files)
    }

    fn origin(&self, chunk: usize, position: u64) -> Result<RecordOrigin, Error> {
        let file = &self.files[self.index.locate(chunk).0];
        Ok(RecordOrigin { file: file.path.clone(), place: RecordPlace::of_byte(file, position) })
    }
}

/// A JSON object, at most 128 levels deep. The later of two equal keys wins, as in Python, which wrote most of these files.
pub(super) fn object(file: &DataFile, begin: u64, text: &str) -> Result<Record, Error> {
    let found = match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => return Ok(Record::Fields(fields)),
        Ok(Value::Array(_)) => "a list",
        Ok(Value::String(_)) => "a text",
        Ok(Value::Number(_)) => "a number",
        Ok(Value::Bool(_)) => "a boolean",
        Ok(Value::Null) => "null",
        Err(error) => {
            // The parser sees each record alone and calls its line 1.
            let detail = printable(&error.to_string()).replace(" at line 1 column", " at column");
            return Err(file.fail(Defect::RecordNotJson { place: RecordPlace::of_byte(file, begin), detail }));
        }
    };
    Err(file.fail(Defect::RecordNotObject { place: RecordPlace::of_byte(file, begin), found }))
}

/// Whether a file seems to be one JSON list; false if it cannot be read.
pub fn is_json_list(path: &Path) -> bool {
    DataFile::new(path.to_owned()).and_then(|file| begins_with(&file, b'[')).unwrap_or(false)
}

/// Whether the first byte that is not white space is `first`.
pub(super) fn begins_with(file: &DataFile, first: u8) -> Result<bool, Error> {
    Ok(skip_space(&mut View::new(file, 0)?)?.is_some_and(|(_, byte)| byte == first))
}

fn skip_space(view: &mut View) -> Result<Option<(u64, u8)>, Error> {
    loop {
        match view.next()? {
            Some((_, byte)) if byte.is_ascii_whitespace() => {}
            other => return Ok(other),
        }
    }
}

/// The offsets where chunks begin, each at the first element after `chunk_bytes` of the one before, and where the list ends.
fn cut(file: &DataFile, chunk_bytes: u64, record_bytes: u64) -> Result<Vec<u64>, Error> {
    let open = match skip_space(&mut View::new(file, 0)?)? {
        Some((at, b'[')) => at,
        Some((_, b'{')) => return Err(file.fail(Defect::ObjectNotList)),
        _ => return Err(file.fail(Defect::NotJson { detail: "expected a list of objects".to_owned() })),
    };
    let mut bounds = Vec::new();
    let mut elements = Elements::new(file, open + 1..u64::MAX, record_bytes)?;
    while let Some((begin, _)) = elements.next()? {
        if bounds.last().is_none_or(|&last| begin - last >= chunk_bytes) {
            bounds.push(begin);
        }
    }
    let unfinished = |detail: &str| Err(file.fail(Defect::NotJson { detail: detail.to_owned() }));
    let Some(end) = elements.end else { return unfinished("its list does not end") };
    if skip_space(&mut View::new(file, end + 1)?)?.is_some() {
        return unfinished("something follows its list");
    }
    bounds.push(end);
    Ok(bounds)
}

/// The elements of a list that begin in a range.
struct Elements<'source> {
    file: &'source DataFile,
    view: View<'source>,
    range: Range<u64>,
    record_bytes: u64,
    /// The offset of the list's closing bracket, once seen.
    end: Option<u64>,
}

impl<'source> Elements<'source> {
    fn new(file: &'source DataFile, range: Range<u64>, record_bytes: u64) -> Result<Elements<'source>, Error> {
        Ok(Elements { file, view: View::new(file, range.start)?, range, record_bytes, end: None })
    }

    fn next(&mut self) -> Result<Option<Document>, Error> {
        let Some((begin, first)) = skip_space(&mut self.view)? else { return Ok(None) };
        if begin >= self.range.end || self.end.is_some() {
            return Ok(None);
        }
        let mut element = Vec::new();
        let mut nesting = Nesting::default();
        let mut next = Some((begin, first));
        while let Some((at, byte)) = next {
            if nesting.is_outside() && matches!(byte, b',' | b']') {
                if byte == b']' {
                    self.end = Some(at);
                }
                // An empty list, or a comma too many, which Python does not write.
                let is_empty = element.is_empty() && byte == b']';
                return Ok((!is_empty).then(|| (begin, self.finished(begin, element))));
            }
            nesting.step(byte);
            // Bytes beyond the limit are counted, not kept.
            if element.len() as u64 <= self.record_bytes {
                element.push(byte);
            }
            next = self.view.next()?;
        }
        Ok(None)
    }

    fn finished(&self, begin: u64, element: Vec<u8>) -> Result<Vec<u8>, Error> {
        if element.len() as u64 > self.record_bytes {
            return Err(too_long(self.file, begin, self.record_bytes));
        }
        Ok(element)
    }
}

/// The depth of a byte within brackets and quotes.
#[derive(Default)]
struct Nesting {
    brackets: u64,
    in_text: bool,
    is_escaped: bool,
}

impl Nesting {
    fn is_outside(&self) -> bool {
        self.brackets == 0 && !self.in_text
    }

    fn step(&mut self, byte: u8) {
        if self.in_text {
            self.in_text = self.is_escaped || byte != b'"';
            self.is_escaped = !self.is_escaped && byte == b'\\';
            return;
        }
        match byte {
            b'"' => self.in_text = true,
            b'{' | b'[' => self.brackets += 1,
            b'}' | b']' => self.brackets = self.brackets.saturating_sub(1),
            _ => {}
        }
    }
}
