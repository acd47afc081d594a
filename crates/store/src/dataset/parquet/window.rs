//! A Parquet file for its reader, which gets no more bytes than the file has.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};

use crate::limits;

const MAGIC: &[u8] = b"PAR1";
/// A length of 4 bytes, and the magic.
const TAIL_BYTES: usize = 8;

/// The crate's own way to read files allocates what a header claims before it looks at the file's size, and its readers
/// share one position. These read at theirs.
pub(super) struct Window {
    file: Arc<File>,
    size_bytes: u64,
}

pub(super) struct WindowReader {
    file: Arc<File>,
    next: u64,
    end: u64,
}

impl Window {
    pub fn new(file: File, size_bytes: u64) -> Window {
        Window { file: Arc::new(file), size_bytes }
    }

    /// The file's metadata, if it ends as a Parquet file does.
    pub fn footer(&self) -> Result<Option<Bytes>> {
        let Some(tail_begin) = self.size_bytes.checked_sub(TAIL_BYTES as u64) else { return Ok(None) };
        let tail = self.get_bytes(tail_begin, TAIL_BYTES)?;
        let (length, magic) = tail.split_at(MAGIC.len());
        let footer_bytes = u32::from_le_bytes(length.try_into().expect("a tail is a length and a mark"));
        if magic != MAGIC || u64::from(footer_bytes) > limits::PARQUET_FOOTER_BYTES {
            return Ok(None);
        }
        let Some(begin) = tail_begin.checked_sub(footer_bytes.into()) else { return Ok(None) };
        self.get_bytes(begin, footer_bytes as usize).map(Some)
    }
}

impl Length for Window {
    fn len(&self) -> u64 {
        self.size_bytes
    }
}

impl ChunkReader for Window {
    type T = io::BufReader<WindowReader>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        const HEADER_BYTES: usize = 4096;
        let reader = WindowReader { file: self.file.clone(), next: start, end: self.size_bytes };
        Ok(io::BufReader::with_capacity(HEADER_BYTES, reader))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.size_bytes) {
            let size_bytes = self.size_bytes;
            return Err(ParquetError::EOF(format!("{length} bytes from byte {start} on, the file has {size_bytes}")));
        }
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes.into())
    }
}

impl Read for WindowReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left_bytes = self.end.saturating_sub(self.next).min(into.len() as u64) as usize;
        let read = self.file.read_at(&mut into[..left_bytes], self.next)?;
        self.next += read as u64;
        Ok(read)
    }
}
