//! Reading a checkpoint.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::manifest::{self, ListedFile, Manifest};
use super::verify;
use crate::error::printable;
use crate::{Defect, Error, SafeTensorsFile, regular_file};

/// A checkpoint with a sound manifest whose files all exist in the listed sizes.
///
/// Files that the manifest does not list are ignored: network file systems and file managers leave theirs anywhere.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// Reads the manifest and checks that all files exist. It does not read their contents.
    ///
    /// After a crash, call [`recover`](crate::recover) or [`recover_all`](crate::recover_all) first.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint, Error> {
        let path = path.as_ref();
        let manifest_path = path.join(manifest::NAME);
        let manifest = manifest::read(&manifest_path).map_err(|defect| match defect {
            Defect::NotThere if regular_file::is_listed(path) => Defect::NoManifest.of(path),
            Defect::NotThere => Defect::NotThere.of(path),
            other => other.of(&manifest_path),
        })?;
        let checkpoint = Checkpoint { path: path.to_owned(), manifest };
        checkpoint.manifest.files.iter().try_for_each(|file| checkpoint.open_file(file).map(drop))?;
        Ok(checkpoint)
    }

    /// The checkpoint's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The writer's own part of the manifest.
    pub fn body(&self) -> &Value {
        &self.manifest.body
    }

    /// The names of its files without the manifest.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.manifest.files.iter().map(|file| file.name.as_str())
    }

    /// Opens one of its safetensors files, after comparing all of it with the manifest's digests.
    pub fn tensors(&self, name: &str) -> Result<SafeTensorsFile, Error> {
        let Some(listed) = self.manifest.files.iter().find(|file| file.name == name) else {
            return Err(Defect::NotListed { name: printable(name) }.of(&self.path.join(manifest::NAME)));
        };
        let file = self.verified(listed)?;
        SafeTensorsFile::of(&file, &self.path.join(name))
    }

    /// Reads every file, whatever its kind, and compares it with the manifest's digests.
    pub fn verify(&self) -> Result<(), Error> {
        self.manifest.files.iter().try_for_each(|file| self.verified(file).map(drop))
    }

    fn verified(&self, listed: &ListedFile) -> Result<File, Error> {
        let file = self.open_file(listed)?;
        verify::compare(&file, listed).map_err(|defect| defect.of(&self.path.join(&listed.name)))?;
        Ok(file)
    }

    fn open_file(&self, listed: &ListedFile) -> Result<File, Error> {
        let path = self.path.join(&listed.name);
        let (file, found_bytes) = regular_file::open_any(&path).map_err(|defect| match defect {
            Defect::NotThere => Defect::ListedButMissing.of(&path),
            other => other.of(&path),
        })?;
        match listed.bytes {
            expected_bytes if expected_bytes != found_bytes => {
                Err(Defect::NotAsListed { expected_bytes, found_bytes }.of(&path))
            }
            _ => Ok(file),
        }
    }
}
