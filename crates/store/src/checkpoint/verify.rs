//! Compares a file with its digests.
//!
//! It reads the file instead of mapping it: a disk that loses data makes a read fail, but a map would end the process, which
//! then could not fall back to an older checkpoint.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::manifest::ListedFile;
use crate::Defect;
use crate::digest::{BLOCK_BYTES, Digest};

/// Below this a second thread costs more than it saves.
const BLOCKS_FOR_TWO: usize = 16;

/// Reads a file of the listed size, with one or two threads. An error names the first block that differs.
pub(super) fn compare(file: &File, listed: &ListedFile) -> Result<(), Defect> {
    let comparison = Comparison { file, listed, next: AtomicUsize::new(0), first_bad: Mutex::new(None) };
    thread::scope(|scope| {
        if listed.blocks.len() >= BLOCKS_FOR_TWO {
            // If no second thread starts, one is enough.
            let _ = thread::Builder::new().name("verify".to_owned()).spawn_scoped(scope, || comparison.run());
        }
        comparison.run();
    });
    let first_bad = comparison.first_bad.into_inner().unwrap_or_else(PoisonError::into_inner);
    first_bad.map_or(Ok(()), |(_, defect)| Err(defect))
}

struct Comparison<'file> {
    file: &'file File,
    listed: &'file ListedFile,
    /// Blocks are taken in order, so the disk is read in order.
    next: AtomicUsize,
    first_bad: Mutex<Option<(usize, Defect)>>,
}

impl Comparison<'_> {
    /// Takes block after block, until all are taken or one is bad. The blocks before that one are taken by then, and their
    /// threads still compare them.
    fn run(&self) {
        let mut buffer = vec![0; BLOCK_BYTES.min(usize::try_from(self.listed.bytes).unwrap_or(usize::MAX))];
        loop {
            let place = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(expected) = self.listed.blocks.get(place) else { return };
            let compared = self.compare_block(place, *expected, &mut buffer);
            let mut first_bad = self.first_bad.lock().unwrap_or_else(PoisonError::into_inner);
            match (compared, &*first_bad) {
                (Err(defect), None) => *first_bad = Some((place, defect)),
                (Err(defect), Some((earlier, _))) if place < *earlier => *first_bad = Some((place, defect)),
                _ => {}
            }
            if first_bad.is_some() {
                return;
            }
        }
    }

    fn compare_block(&self, place: usize, expected: Digest, buffer: &mut [u8]) -> Result<(), Defect> {
        let begin = place as u64 * BLOCK_BYTES as u64;
        let end = self.listed.bytes.min(begin + BLOCK_BYTES as u64);
        let bytes = &mut buffer[..(end - begin) as usize];
        self.file.read_exact_at(bytes, begin).map_err(|error| Defect::Unreadable { begin, end, error })?;
        if Digest::of(bytes) == expected { Ok(()) } else { Err(Defect::Damaged { begin, end }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::BlockDigester;

    #[test]
    fn a_file_that_cannot_be_read_to_its_end_is_an_error_that_says_where() {
        let folder = tempfile::TempDir::new().unwrap();
        for (blocks, lost_bytes, bad) in [(1, 1, 0), (3, 1, 2), (20, 3 * BLOCK_BYTES, 17), (20, 20 * BLOCK_BYTES, 0)] {
            let bytes = vec![1; blocks * BLOCK_BYTES];
            let mut digester = BlockDigester::new();
            digester.update(&bytes);
            let listed = ListedFile::new("data".to_owned(), digester.finish());
            let path = folder.path().join("data");
            std::fs::write(&path, &bytes).unwrap();
            compare(&File::open(&path).unwrap(), &listed).unwrap();
            std::fs::write(&path, &bytes[lost_bytes..]).unwrap();
            let defect = compare(&File::open(&path).unwrap(), &listed).unwrap_err();
            let expected_begin = (bad * BLOCK_BYTES) as u64;
            assert!(matches!(defect, Defect::Unreadable { begin, .. } if begin == expected_begin), "{defect}");
            assert!(defect.of(&path).is_fault());
        }
    }
}
