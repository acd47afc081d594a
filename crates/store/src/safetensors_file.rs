//! One safetensors file, checked and memory-mapped.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};

use crate::header::{self, Header};
use crate::{Defect, Error, RawTensor, regular_file};

/// A safetensors file with a checked header, whose tensors are read in place.
#[derive(Debug)]
pub struct SafeTensorsFile {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

impl SafeTensorsFile {
    /// Maps the file and checks it whole: whatever [`tensor`](Self::tensor) returns later is sound.
    ///
    /// The file must not change while it is open. Replacing it by rename is fine; truncating it ends the process.
    pub fn open(path: impl AsRef<Path>) -> Result<SafeTensorsFile, Error> {
        let path = path.as_ref();
        let (file, _) = regular_file::open(path).map_err(|defect| defect.of(path))?;
        SafeTensorsFile::of(&file, path)
    }

    /// [`open`](Self::open) for a regular file that is open already.
    pub(crate) fn of(file: &File, path: &Path) -> Result<SafeTensorsFile, Error> {
        let map = map(file).map_err(|defect| defect.of(path))?;
        let header = header::parse(&map).map_err(|defect| defect.of(path))?;
        Ok(SafeTensorsFile { path: path.to_owned(), map, header })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's own notes about itself, from `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.header.tensors.keys().map(String::as_str)
    }

    /// The tensor of this name, if the file has it.
    pub fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let (name, entry) = self.header.tensors.get_key_value(name)?;
        Some(RawTensor {
            name,
            file: &self.path,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &self.map[entry.bytes.clone()],
        })
    }

    /// Releases the memory of a tensor that was read. The next read loads it from the file again.
    pub fn release(&self, name: &str) {
        let Some(entry) = self.header.tensors.get(name) else { return };
        let (start, len) = (entry.bytes.start, entry.bytes.len());
        // If the system cannot, the memory merely stays in use. SAFETY: the map is read-only and of a file, so pages that are
        // dropped come back from there with the same bytes.
        let _ = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
    }
}

fn map(file: &File) -> Result<Mmap, Defect> {
    // SAFETY: the map is read-only and private to this file's type, which lends it out only as plain bytes. The promise
    // we cannot make is that nobody else writes to the file: a file truncated by someone else while mapped ends the
    // process by SIGBUS at the next touch of the lost pages.
    Ok(unsafe { Mmap::map(file)? })
}
