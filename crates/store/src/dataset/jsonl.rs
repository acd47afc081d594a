//! JSON Lines: text whose documents are lines, each an object.

use std::path::Path;

use serde_json::{Map, Value};

use super::chunk_index::ChunkIndex;
use super::data_file::{self, DataFile, Pattern, has_ending};
use super::documents::{decode, documents};
use super::place::{Origin, Place};
use super::separator::Separator;
use super::{Chunks, Record, SourceSpec};
use crate::error::printable;
use crate::{Defect, Error};

const PATTERN: Pattern =
    Pattern { is_match: |name| has_ending(name, &["jsonl", "ndjson"]), shown: "*.jsonl or *.ndjson" };

pub(super) struct JsonlChunks {
    files: Vec<DataFile>,
    index: ChunkIndex,
    newline: Separator,
    chunk_bytes: u64,
    record_bytes: u64,
}

impl JsonlChunks {
    pub fn open(spec: &SourceSpec) -> Result<JsonlChunks, Error> {
        let files = data_file::find(&spec.paths, &PATTERN)?;
        let index = data_file::cut(&files, spec.chunk_bytes);
        let newline = Separator::new("\n");
        Ok(JsonlChunks { files, index, newline, chunk_bytes: spec.chunk_bytes, record_bytes: spec.record_bytes })
    }
}

impl Chunks for JsonlChunks {
    fn count(&self) -> usize {
        self.index.count()
    }

    fn read(&self, chunk: usize) -> Result<Vec<(u64, Record)>, Error> {
        let (file, chunk) = self.index.locate(chunk);
        let file = &self.files[file];
        let lines = documents(file, file.range(chunk, self.chunk_bytes), &self.newline, self.record_bytes)?;
        let to_record = |line| {
            let (begin, text) = decode(file, line)?;
            Ok((begin, Record::Fields(object(file, begin, &text)?)))
        };
        lines.into_iter().map(to_record).collect()
    }

    fn files(&self) -> Vec<&Path> {
        data_file::paths(&self.files)
    }

    fn origin(&self, chunk: usize, position: u64) -> Result<Origin, Error> {
        let file = &self.files[self.index.locate(chunk).0];
        Ok(Origin { file: file.path.clone(), place: Place::of_byte(file, position) })
    }
}

/// At most 128 levels deep. Of a key that an object has twice the later value counts, as in Python, which wrote most of
/// these files.
fn object(file: &DataFile, begin: u64, line: &str) -> Result<Map<String, Value>, Error> {
    let found = match serde_json::from_str(line) {
        Ok(Value::Object(fields)) => return Ok(fields),
        Ok(Value::Array(_)) => "a list",
        Ok(Value::String(_)) => "a text",
        Ok(Value::Number(_)) => "a number",
        Ok(Value::Bool(_)) => "a boolean",
        Ok(Value::Null) => "null",
        Err(error) => {
            // Each line is parsed by itself and is line 1 to the parser.
            let detail = printable(&error.to_string()).replace(" at line 1 column", " at column");
            return Err(file.fail(Defect::RecordNotJson { place: Place::of_byte(file, begin), detail }));
        }
    };
    Err(file.fail(Defect::RecordNotObject { place: Place::of_byte(file, begin), found }))
}
