//! Data to train on, cut in chunks by position alone.
//!
//! The number and places of chunks follow from sizes, so opening a file of any size takes no time, any order over the chunks is
//! a pure function, and reading a chunk touches no other. A record belongs to the chunk in which it begins.

mod chunk_index;
mod cifar;
mod data_file;
mod documents;
mod guard;
mod images;
mod json;
mod jsonl;
mod parquet;
mod picture;
mod place;
mod separator;
mod text;
mod view;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::Error;

pub use json::is_json_list;
pub use place::{RecordOrigin, RecordPlace};

/// The format of data files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// Documents in plain text (`*.txt`).
    Text {
        /// The text between two documents, for example an empty line, `"\n\n"`. Overlapping separators, as in a row of
        /// newlines, all separate. An empty one makes each file one document.
        separator: String,
    },
    /// One JSON object per line (`*.jsonl`, `*.ndjson`).
    Jsonl,
    /// A JSON list of objects (`*.json`).
    Json,
    /// Tables (`*.parquet`).
    Parquet,
    /// Folders of one folder per class, each with the images of that class (`*.png`, `*.jpg`, `*.jpeg`).
    Images,
    /// CIFAR-10's binary files. A folder stands for those to train on: `data_batch_*.bin`.
    Cifar10,
}

/// The data to open, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceSpec {
    /// The files' format.
    pub format: Format,
    /// Files, and folders whose files with the format's endings are taken in the order of their names.
    pub paths: Vec<PathBuf>,
    /// Bytes of a file per chunk: about as much as [`Source::read`] holds in memory.
    pub chunk_bytes: u64,
    /// The longest record; for an image, the size of its file.
    pub record_bytes: u64,
    /// The columns to read from Parquet files. Empty means all.
    pub columns: Vec<String>,
    /// Further columns, read if a Parquet file has them.
    pub optional_columns: Vec<String>,
}

/// One example to train on.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// A document.
    Text(String),
    /// A row of named columns.
    Fields(Map<String, Value>),
    /// An image and its class.
    Image {
        /// Pixels in a row.
        width: usize,
        /// Rows.
        height: usize,
        /// `[height, width, 3]`.
        rgb: Vec<u8>,
        /// The index of its class in [`Source::classes`].
        label: usize,
    },
}

/// Opened data. May be read by several threads at the same time.
pub struct Source {
    chunks: Box<dyn Chunks>,
    classes: Vec<String>,
}

/// The treatment of a record that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnBad {
    /// Stop reading the chunk.
    Fail,
    /// Keep the error in the record's place.
    Keep,
}

/// A record or its error, and its position: a byte of the file, or a row.
type Placed = (u64, Result<Record, Error>);

/// A format's way to number its chunks and to read one.
trait Chunks: Send + Sync {
    fn count(&self) -> usize;
    /// A defect of the file as a whole is an error with either `on_bad`.
    fn read(&self, chunk: usize, on_bad: OnBad) -> Result<Vec<Placed>, Error>;
    /// In reading order.
    fn files(&self) -> Vec<&Path>;
    /// The origin of the record at this position of the chunk.
    fn origin(&self, chunk: usize, position: u64) -> Result<RecordOrigin, Error>;
}

impl SourceSpec {
    /// With chunks of 1 MiB, records of up to 16 MiB and all columns.
    pub fn new(format: Format, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> SourceSpec {
        let paths = paths.into_iter().map(Into::into).collect();
        SourceSpec {
            format,
            paths,
            chunk_bytes: 1 << 20,
            record_bytes: 16 << 20,
            columns: Vec::new(),
            optional_columns: Vec::new(),
        }
    }
}

impl Source {
    /// Finds the files and their sizes. It reads the row groups' metadata of Parquet files, and reads JSON lists through once
    /// to find where chunks begin.
    ///
    /// # Panics
    /// If `spec` has no paths or empty chunks.
    pub fn open(spec: &SourceSpec) -> Result<Source, Error> {
        assert!(!spec.paths.is_empty(), "data without paths");
        assert!(spec.chunk_bytes > 0, "chunks of 0 bytes");
        let chunks: Box<dyn Chunks> = match &spec.format {
            Format::Text { separator } => Box::new(text::TextChunks::open(spec, separator)?),
            Format::Jsonl => Box::new(jsonl::JsonlChunks::open(spec)?),
            Format::Json => Box::new(json::JsonChunks::open(spec)?),
            Format::Parquet => Box::new(parquet::ParquetChunks::open(spec)?),
            Format::Images => Box::new(images::ImageChunks::open(spec)?),
            Format::Cifar10 => Box::new(cifar::CifarChunks::open(spec)?),
        };
        let classes = Source::classes_of(&spec.format, &spec.paths)?;
        Ok(Source { chunks, classes })
    }

    /// The [`classes`](Self::classes) of the data without opening it. Lists the folders of classes only.
    pub fn classes_of(format: &Format, paths: &[PathBuf]) -> Result<Vec<String>, Error> {
        match format {
            Format::Text { .. } | Format::Jsonl | Format::Json | Format::Parquet => Ok(Vec::new()),
            Format::Images => images::class_names(paths),
            Format::Cifar10 => Ok(cifar::CLASSES.map(str::to_owned).to_vec()),
        }
    }

    /// How many chunks there are.
    pub fn chunks(&self) -> usize {
        self.chunks.count()
    }

    /// The records that begin in a chunk, in order. May be none: a record can be longer than a chunk.
    ///
    /// # Panics
    /// If there is no such chunk.
    pub fn read(&self, chunk: usize) -> Result<Vec<Record>, Error> {
        self.placed(chunk, OnBad::Fail)?.into_iter().map(|(_, record)| record).collect()
    }

    /// Like [`read`](Self::read), but returns an error in place of a record that cannot be read, and reads the records after
    /// it. A defect of the file as a whole, or of a Parquet row, is an error of the chunk.
    ///
    /// # Panics
    /// If there is no such chunk.
    pub fn read_each(&self, chunk: usize) -> Result<Vec<Result<Record, Error>>, Error> {
        Ok(self.placed(chunk, OnBad::Keep)?.into_iter().map(|(_, record)| record).collect())
    }

    fn placed(&self, chunk: usize, on_bad: OnBad) -> Result<Vec<Placed>, Error> {
        assert!(chunk < self.chunks(), "chunk {chunk} of {}", self.chunks());
        self.chunks.read(chunk, on_bad)
    }

    /// The origin, for messages, of the `record`th record that [`read`](Self::read) gives of `chunk`.
    ///
    /// It reads the chunk again, which costs time only when there is an error to report.
    ///
    /// # Panics
    /// If there is no such record.
    pub fn origin(&self, chunk: usize, record: usize) -> Result<RecordOrigin, Error> {
        let records = self.placed(chunk, OnBad::Keep)?;
        self.chunks.origin(chunk, records[record].0)
    }

    /// The data's files in reading order.
    pub fn files(&self) -> Vec<&Path> {
        self.chunks.files()
    }

    /// The names of the classes that images are labelled with. Empty for text.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }
}
