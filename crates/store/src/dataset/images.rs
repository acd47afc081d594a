//! Folders of images, one folder per class.

use std::path::{Path, PathBuf};

use super::data_file::{has_ending, list};
use super::place::{RecordOrigin, RecordPlace};
use super::{Chunks, OnBad, Placed, Record, SourceSpec, picture};
use crate::{Defect, Error, limits, regular_file};

/// Decoded images are much larger than their files, so a chunk has few. This is a number and not a size because listing a
/// million files is quick but asking for their sizes is slow.
const IMAGES_PER_CHUNK: usize = 8;

pub(super) struct ImageChunks {
    /// Each image and the index of its class.
    images: Vec<(PathBuf, usize)>,
    record_bytes: u64,
}

impl ImageChunks {
    /// Numbers classes by name over all folders. A class without images counts, so that training and test folders agree.
    pub fn open(spec: &SourceSpec) -> Result<ImageChunks, Error> {
        let folders = class_folders(&spec.paths)?;
        let classes = names(&folders);
        let mut images = Vec::new();
        for (name, folder) in folders {
            let label = classes.binary_search(&name).expect("every folder's name is a class");
            let files = list(&folder)?.into_iter().filter(|(name, _)| has_ending(name, &["png", "jpg", "jpeg"]));
            images.extend(files.map(|(_, path)| (path, label)));
            if images.len() > limits::DATA_FILES {
                return Err(Defect::TooManyFiles { found: images.len() }.of(&folder));
            }
        }
        if images.is_empty() {
            return Err(Defect::NoData { expected: "folder with *.png, *.jpg or *.jpeg in it" }.of(&spec.paths[0]));
        }
        Ok(ImageChunks { images, record_bytes: spec.record_bytes })
    }
}

/// The names of the classes in some folders, in the order of their labels.
pub(super) fn class_names(paths: &[PathBuf]) -> Result<Vec<String>, Error> {
    class_folders(paths).map(|folders| names(&folders))
}

fn class_folders(paths: &[PathBuf]) -> Result<Vec<(String, PathBuf)>, Error> {
    let mut folders = Vec::new();
    for path in paths {
        for (name, entry) in list(path)?.into_iter().filter(|(_, entry)| entry.is_dir()) {
            if entry.file_name().and_then(|name| name.to_str()).is_none() {
                return Err(Defect::NameNotUtf8.of(&entry));
            }
            folders.push((name, entry));
        }
    }
    Ok(folders)
}

fn names(folders: &[(String, PathBuf)]) -> Vec<String> {
    let mut names: Vec<String> = folders.iter().map(|(name, _)| name.clone()).collect();
    names.sort();
    names.dedup();
    names
}

impl Chunks for ImageChunks {
    fn count(&self) -> usize {
        self.images.len().div_ceil(IMAGES_PER_CHUNK)
    }

    fn read(&self, chunk: usize, _: OnBad) -> Result<Vec<Placed>, Error> {
        let first = chunk * IMAGES_PER_CHUNK;
        let images = self.images.iter().enumerate().skip(first).take(IMAGES_PER_CHUNK);
        let read = |path: &PathBuf, label: usize| {
            let bytes = regular_file::read_any(path, self.record_bytes).map_err(|defect| defect.of(path))?;
            let (width, height, rgb) = picture::decode(&bytes).map_err(|defect| defect.of(path))?;
            Ok(Record::Image { width, height, rgb, label })
        };
        Ok(images.map(|(position, (path, label))| (position as u64, read(path, *label))).collect())
    }

    fn files(&self) -> Vec<&Path> {
        self.images.iter().map(|(path, _)| path.as_path()).collect()
    }

    fn origin(&self, _: usize, position: u64) -> Result<RecordOrigin, Error> {
        Ok(RecordOrigin { file: self.images[position as usize].0.clone(), place: RecordPlace::WholeFile })
    }
}
