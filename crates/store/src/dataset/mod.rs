//! Data to train on, cut in chunks by position alone.
//!
//! How many chunks there are and where they lie follows from sizes, so opening a file of any size takes no time, any
//! order over the chunks is a pure function, and a chunk is read without touching the others. A record belongs to the
//! chunk in which it begins.

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
pub use place::{Origin, Place};

/// What files of data hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// Documents in plain text (`*.txt`).
    Text {
        /// What stands between two documents, for example an empty line, `"\n\n"`. Where separators overlap, as in
        /// a row of newlines, all of them separate. An empty one makes each file one document.
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
    /// CIFAR-10's binary files. Of a folder, those to train on: `data_batch_*.bin`.
    Cifar10,
}

/// Which data to open, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceSpec {
    /// What the files hold.
    pub format: Format,
    /// Files, and folders whose files with the format's endings are taken in the order of their names.
    pub paths: Vec<PathBuf>,
    /// How much of a file is one chunk: about as much as [`Source::read`] holds in memory.
    pub chunk_bytes: u64,
    /// The longest record. Of an image, the size of its file.
    pub record_bytes: u64,
    /// The columns wanted of Parquet files. None means all of them.
    pub columns: Vec<String>,
    /// Columns that are wanted where a Parquet file has them.
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
        /// The place of its class in [`Source::classes`].
        label: usize,
    },
}

/// Opened data. May be read by several threads at the same time.
pub struct Source {
    chunks: Box<dyn Chunks>,
    classes: Vec<String>,
}

/// What becomes of a chunk with a record that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnBad {
    /// Reading ends there.
    Fail,
    /// The record's place holds the error.
    Keep,
}

/// A record, or why it cannot be read, and its position: a byte of the file, a row.
type Placed = (u64, Result<Record, Error>);

/// A format's way to number its chunks and to read one.
trait Chunks: Send + Sync {
    fn count(&self) -> usize;
    /// Fails for what is wrong with the file as a whole, whatever is to become of bad records.
    fn read(&self, chunk: usize, on_bad: OnBad) -> Result<Vec<Placed>, Error>;
    /// In the order in which they are read.
    fn files(&self) -> Vec<&Path>;
    /// Where a record of this chunk and position came from.
    fn origin(&self, chunk: usize, position: u64) -> Result<Origin, Error>;
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
    /// Finds the files and looks at their sizes. Of Parquet files the list of their row groups is read; JSON lists are read
    /// through once, to find where chunks of their elements begin.
    ///
    /// # Panics
    /// If there are no paths, or chunks of no bytes are asked for.
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

    /// What [`classes`](Self::classes) of the opened data will be. Looks at the folders of classes, and not at what is in
    /// them.
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

    /// As [`read`](Self::read), but a record that cannot be read is its error, and those behind it are read all the same. What is
    /// wrong with the file as a whole, or with a Parquet row, is an error of the chunk.
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

    /// Where a record came from, for messages: the `record`th that [`read`](Self::read) gives of `chunk`.
    ///
    /// It reads the chunk again, which costs only those who have something to complain about.
    ///
    /// # Panics
    /// If there is no such record.
    pub fn origin(&self, chunk: usize, record: usize) -> Result<Origin, Error> {
        let records = self.placed(chunk, OnBad::Keep)?;
        self.chunks.origin(chunk, records[record].0)
    }

    /// The files that the data are in, in the order in which they are read.
    pub fn files(&self) -> Vec<&Path> {
        self.chunks.files()
    }

    /// The names of the classes that images are labelled with. Empty for text.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }
}
