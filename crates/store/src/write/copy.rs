//! Copies files into a folder unchanged: tokenizers, licences, configs.

use std::io::Read;
use std::path::Path;

use super::NewFolder;
use crate::{Defect, Error, regular_file};

const BATCH_BYTES: usize = 1 << 18;

/// Copies a regular file of any size into a new folder, under this name.
pub fn copy_file(from: impl AsRef<Path>, folder: &NewFolder, name: &str) -> Result<(), Error> {
    let from = from.as_ref();
    let (mut file, _) = regular_file::open_any(from).map_err(|defect| defect.of(from))?;
    folder.file(name, |writer| {
        let mut batch = vec![0; BATCH_BYTES];
        loop {
            match file.read(&mut batch).map_err(|error| Defect::Io(error).of(from))? {
                0 => return Ok(()),
                bytes => writer.put(&batch[..bytes])?,
            }
        }
    })
}
