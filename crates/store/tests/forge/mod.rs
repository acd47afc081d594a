//! Writes safetensors files byte by byte, the valid and the forged alike.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs;
use std::path::Path;

use evenkeel_store::{Error, SafeTensorsFile};
use tempfile::TempDir;

pub fn file(header: &str, data: &[u8]) -> Vec<u8> {
    file_announcing(header.len() as u64, header.as_bytes(), data)
}

pub fn file_announcing(header_bytes: u64, header: &[u8], data: &[u8]) -> Vec<u8> {
    [&header_bytes.to_le_bytes(), header, data].concat()
}

/// A header of these entries.
pub fn header(entries: &[String]) -> String {
    format!("{{{}}}", entries.join(","))
}

pub fn entry(name: &str, dtype: &str, shape: &[usize], begin: usize, end: usize) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
}

/// A file with these tensors of zeros and as many bytes of data as asked for.
pub fn zeros(entries: &[String], data_bytes: usize) -> Vec<u8> {
    file(&header(entries), &vec![0; data_bytes])
}

/// A file with the named vectors of F32, each `[1.0, 2.0]`.
pub fn vectors(names: &[&str]) -> Vec<u8> {
    let entries: Vec<String> =
        names.iter().enumerate().map(|(i, name)| entry(name, "F32", &[2], i * 8, i * 8 + 8)).collect();
    let vector = [1f32.to_le_bytes(), 2f32.to_le_bytes()].concat();
    file(&header(&entries), &vector.repeat(names.len()))
}

pub fn open(bytes: impl AsRef<[u8]>) -> Result<SafeTensorsFile, Error> {
    // The map outlives the folder: an unlinked file stays until it is unmapped.
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("forged.safetensors");
    fs::write(&path, bytes).unwrap();
    SafeTensorsFile::open(&path)
}

/// A folder of these files.
pub fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// The text after the folder's own path, which differs from run to run.
pub fn message(error: &Error, folder: &Path) -> String {
    error.to_string().replace(&format!("{}/", folder.display()), "")
}
