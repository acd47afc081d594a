//! Plain text.

use std::path::Path;

use super::chunk_index::ChunkIndex;
use super::data_file::{self, DataFile, Pattern, has_ending};
use super::documents::{Document, decode, documents};
use super::place::{RecordOrigin, RecordPlace};
use super::separator::Separator;
use super::view::View;
use super::{Chunks, OnBad, Placed, Record, SourceSpec};
use crate::{Defect, Error};

const PATTERN: Pattern = Pattern { is_match: |name| has_ending(name, &["txt"]), shown: "*.txt" };

pub(super) struct TextChunks {
    files: Vec<DataFile>,
    index: ChunkIndex,
    /// `None`: each file is one document and one chunk.
    separator: Option<Separator>,
    chunk_bytes: u64,
    record_bytes: u64,
}

impl TextChunks {
    pub fn open(spec: &SourceSpec, separator: &str) -> Result<TextChunks, Error> {
        let files = data_file::find(&spec.paths, &PATTERN)?;
        let separator = (!separator.is_empty()).then(|| Separator::new(separator));
        let index = match separator {
            Some(_) => data_file::cut(&files, spec.chunk_bytes),
            None => ChunkIndex::new(files.iter().map(|file| file.size_bytes.min(1))),
        };
        Ok(TextChunks { files, index, separator, chunk_bytes: spec.chunk_bytes, record_bytes: spec.record_bytes })
    }

    /// A file as one document.
    fn whole(&self, file: &DataFile) -> Result<Vec<Document>, Error> {
        if file.size_bytes > self.record_bytes {
            let limit_bytes = self.record_bytes;
            return Err(file.fail(Defect::FileTooLarge { found_bytes: file.size_bytes, limit_bytes }));
        }
        let mut view = View::new(file, 0)?;
        let mut text = Vec::new();
        while let Some((_, byte)) = view.next()? {
            text.push(byte);
        }
        Ok(if text.trim_ascii().is_empty() { vec![] } else { vec![(0, Ok(text))] })
    }
}

impl Chunks for TextChunks {
    fn count(&self) -> usize {
        self.index.count()
    }

    fn read(&self, chunk: usize, on_bad: OnBad) -> Result<Vec<Placed>, Error> {
        let (file, chunk) = self.index.locate(chunk);
        let file = &self.files[file];
        let found = match &self.separator {
            Some(separator) => {
                documents(file, file.range(chunk, self.chunk_bytes), separator, self.record_bytes, on_bad)?
            }
            None => self.whole(file)?,
        };
        let to_record = |(begin, bytes): Document| (begin, decode(file, begin, bytes).map(Record::Text));
        Ok(found.into_iter().map(to_record).collect())
    }

    fn files(&self) -> Vec<&Path> {
        data_file::paths(&self.files)
    }

    fn origin(&self, chunk: usize, position: u64) -> Result<RecordOrigin, Error> {
        let file = &self.files[self.index.locate(chunk).0];
        Ok(RecordOrigin { file: file.path.clone(), place: RecordPlace::of_byte(file, position) })
    }
}
