//! Files small enough to be read whole: run configs, manifests, tokenizers, records of a run.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::{Defect, Error, json, regular_file};

/// Reads a file of at most `limit_bytes`.
pub fn read_bytes(path: impl AsRef<Path>, limit_bytes: u64) -> Result<Vec<u8>, Error> {
    let path = path.as_ref();
    regular_file::read_any(path, limit_bytes).map_err(|defect| defect.of(path))
}

/// Reads a text file of at most `limit_bytes`.
pub fn read_text(path: impl AsRef<Path>, limit_bytes: u64) -> Result<String, Error> {
    let path = path.as_ref();
    let bytes = read_bytes(path, limit_bytes)?;
    String::from_utf8(bytes).map_err(|error| Defect::NotText { at: error.utf8_error().valid_up_to() }.of(path))
}

/// Reads a JSON file of at most `limit_bytes`, at most 128 levels deep, in which no object has a key twice.
pub fn read_json<T: DeserializeOwned>(path: impl AsRef<Path>, limit_bytes: u64) -> Result<T, Error> {
    let path = path.as_ref();
    let bytes = read_bytes(path, limit_bytes)?;
    json::parse(&bytes).map_err(|defect| defect.of(path))
}
