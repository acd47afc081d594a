//! The source of a run's records.

pub use evenkeel_store::Record;

use crate::error::RecordAt;

/// Records in numbered chunks. Reading a chunk again gives the same records.
pub trait Source: Send + Sync {
    fn chunks(&self) -> usize;
    fn read(&self, chunk: usize) -> Result<Vec<Record>, evenkeel_store::Error>;

    /// As [`read`](Self::read), with the error of each record that cannot be read in its place.
    fn read_each(&self, chunk: usize) -> Result<Vec<Result<Record, evenkeel_store::Error>>, evenkeel_store::Error> {
        Ok(self.read(chunk)?.into_iter().map(Ok).collect())
    }

    /// The place of a record for people, in messages: a line of a file, say.
    fn origin(&self, place: RecordAt) -> String {
        place.to_string()
    }
}

impl Source for evenkeel_store::Source {
    fn chunks(&self) -> usize {
        evenkeel_store::Source::chunks(self)
    }

    fn read(&self, chunk: usize) -> Result<Vec<Record>, evenkeel_store::Error> {
        evenkeel_store::Source::read(self, chunk)
    }

    fn read_each(&self, chunk: usize) -> Result<Vec<Result<Record, evenkeel_store::Error>>, evenkeel_store::Error> {
        evenkeel_store::Source::read_each(self, chunk)
    }

    fn origin(&self, place: RecordAt) -> String {
        // Reading the chunk again may fail; then its number must do.
        match evenkeel_store::Source::origin(self, place.chunk, place.record) {
            Ok(origin) => origin.to_string(),
            Err(_) => place.to_string(),
        }
    }
}
