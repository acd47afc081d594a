//! JSON Lines: text whose documents are lines, each an object.

use std::path::Path;

use super::chunk_index::ChunkIndex;
use super::data_file::{self, DataFile, Pattern, has_ending};
use super::documents::{decode, documents};
use super::json::{begins_with, object};
use super::place::{RecordOrigin, RecordPlace};
use super::separator::Separator;
use super::{Chunks, OnBad, Placed, SourceSpec};
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

    fn read(&self, chunk: usize, on_bad: OnBad) -> Result<Vec<Placed>, Error> {
        let (file, chunk) = self.index.locate(chunk);
        let file = &self.files[file];
        let lines = documents(file, file.range(chunk, self.chunk_bytes), &self.newline, self.record_bytes, on_bad);
        let lines = lines.map_err(|error| list_or(file, error))?;
        let mut records = Vec::new();
        let mut is_good = true;
        for (begin, line) in lines {
            let record = decode(file, begin, line).and_then(|line| object(file, begin, &line));
            match record {
                Err(error) if on_bad == OnBad::Fail || is_good => {
                    let error = list_or(file, error);
                    if on_bad == OnBad::Fail || matches!(error.defect, Defect::ListNotLines) {
                        return Err(error);
                    }
                    is_good = false;
                    records.push((begin, Err(error)));
                }
                record => records.push((begin, record)),
            }
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

/// A file that is one JSON list is reported as such, not as a bad first line.
fn list_or(file: &DataFile, error: Error) -> Error {
    match begins_with(file, b'[') {
        Ok(true) => file.fail(Defect::ListNotLines),
        _ => error,
    }
}
