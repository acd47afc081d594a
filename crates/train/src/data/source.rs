//! What a run reads from.

pub use evenkeel_store::Record;

use super::error::Place;

/// Records in numbered chunks. Reading a chunk again gives the same records.
pub trait Source: Send + Sync {
    fn chunks(&self) -> usize;
    fn read(&self, chunk: usize) -> Result<Vec<Record>, evenkeel_store::Error>;

    /// Where a person finds a record, for messages: a line of a file, say.
    fn origin(&self, place: Place) -> String {
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

    fn origin(&self, place: Place) -> String {
        // Reading the chunk again may fail; then its number must do.
        match evenkeel_store::Source::origin(self, place.chunk, place.record) {
            Ok(origin) => origin.to_string(),
            Err(_) => place.to_string(),
        }
    }
}
