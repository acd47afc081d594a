//! CIFAR-10's binary files: images of 32 × 32, one label byte and then the planes of red, green and blue.

use std::os::unix::fs::FileExt;
use std::path::Path;

use super::chunk_index::ChunkIndex;
use super::data_file::{self, DataFile, Pattern};
use super::place::{RecordOrigin, RecordPlace};
use super::{Chunks, OnBad, Placed, Record, SourceSpec};
use crate::{Defect, Error};

pub(super) const CLASSES: [&str; 10] =
    ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

const SIDE: usize = 32;
const PIXELS: usize = SIDE * SIDE;
const IMAGE_BYTES: usize = 1 + 3 * PIXELS;
const PATTERN: Pattern =
    Pattern { is_match: |name| name.starts_with("data_batch_") && name.ends_with(".bin"), shown: "data_batch_*.bin" };

pub(super) struct CifarChunks {
    files: Vec<DataFile>,
    index: ChunkIndex,
    /// A whole number of images.
    chunk_bytes: u64,
}

impl CifarChunks {
    pub fn open(spec: &SourceSpec) -> Result<CifarChunks, Error> {
        let files = data_file::find(&spec.paths, &PATTERN)?;
        let record_bytes = IMAGE_BYTES as u64;
        for file in &files {
            if file.size_bytes == 0 || file.size_bytes % record_bytes != 0 {
                return Err(file.fail(Defect::NotWholeImages { found_bytes: file.size_bytes, record_bytes }));
            }
        }
        // No file is larger than the largest that can be read at once.
        let images = (spec.chunk_bytes.min(1 << 30) / record_bytes).max(1);
        let chunk_bytes = images * record_bytes;
        Ok(CifarChunks { index: data_file::cut(&files, chunk_bytes), files, chunk_bytes })
    }
}

impl Chunks for CifarChunks {
    fn count(&self) -> usize {
        self.index.count()
    }

    fn read(&self, chunk: usize, _: OnBad) -> Result<Vec<Placed>, Error> {
        let (file, chunk) = self.index.locate(chunk);
        let file = &self.files[file];
        let range = file.range(chunk, self.chunk_bytes);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.open()?.read_exact_at(&mut bytes, range.start).map_err(|error| file.fail(Defect::Io(error)))?;
        let first = range.start / IMAGE_BYTES as u64;
        let images = bytes.as_chunks::<IMAGE_BYTES>().0.iter();
        Ok(images.zip(first..).map(|(image, row)| (row, record(file, image, row))).collect())
    }

    fn files(&self) -> Vec<&Path> {
        data_file::paths(&self.files)
    }

    fn origin(&self, chunk: usize, position: u64) -> Result<RecordOrigin, Error> {
        let file = &self.files[self.index.locate(chunk).0];
        Ok(RecordOrigin { file: file.path.clone(), place: RecordPlace::Row { row: position + 1 } })
    }
}

fn record(file: &DataFile, image: &[u8; IMAGE_BYTES], row: u64) -> Result<Record, Error> {
    let [label, planes @ ..] = image;
    if usize::from(*label) >= CLASSES.len() {
        return Err(file.fail(Defect::UnknownLabel { place: RecordPlace::Row { row: row + 1 }, found: *label }));
    }
    let rgb = (0..PIXELS).flat_map(|pixel| [0, 1, 2].map(|plane| planes[plane * PIXELS + pixel])).collect();
    Ok(Record::Image { width: SIDE, height: SIDE, rgb, label: (*label).into() })
}
