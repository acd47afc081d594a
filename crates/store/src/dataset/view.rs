//! A text file byte by byte, with `\r\n` read as `\n` and without a byte order mark.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use super::data_file::DataFile;
use crate::{Defect, Error};

const BUFFER_BYTES: usize = 1 << 16;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Each byte comes with its offset in the file. The bytes at an offset do not depend on where the view began.
pub(super) struct View<'source> {
    file: &'source DataFile,
    opened: File,
    buffer: Vec<u8>,
    next: usize,
    /// The offset of the buffer's first byte.
    buffer_begin: u64,
}

impl<'source> View<'source> {
    pub fn new(file: &'source DataFile, begin: u64) -> Result<View<'source>, Error> {
        let mut opened = file.open()?;
        opened.seek(SeekFrom::Start(begin)).map_err(|error| file.fail(Defect::Io(error)))?;
        let mut view = View { file, opened, buffer: Vec::new(), next: 0, buffer_begin: begin };
        if begin == 0 && view.peek()?.is_some() && view.buffer.starts_with(BYTE_ORDER_MARK) {
            view.next = BYTE_ORDER_MARK.len();
        }
        Ok(view)
    }

    pub fn next(&mut self) -> Result<Option<(u64, u8)>, Error> {
        let Some(byte) = self.peek()? else { return Ok(None) };
        let at = self.buffer_begin + self.next as u64;
        self.next += 1;
        if byte == b'\r' && self.peek()? == Some(b'\n') {
            self.next += 1;
            return Ok(Some((at + 1, b'\n')));
        }
        Ok(Some((at, byte)))
    }

    fn peek(&mut self) -> Result<Option<u8>, Error> {
        if self.next == self.buffer.len() {
            self.fill()?;
        }
        Ok(self.buffer.get(self.next).copied())
    }

    fn fill(&mut self) -> Result<(), Error> {
        self.buffer_begin += self.buffer.len() as u64;
        self.buffer.clear();
        self.next = 0;
        // Reads no more than was checked, even if the file grows.
        let left_bytes = self.file.size_bytes.saturating_sub(self.buffer_begin).min(BUFFER_BYTES as u64);
        let read = self.opened.by_ref().take(left_bytes).read_to_end(&mut self.buffer);
        read.map(|_| ()).map_err(|error| self.file.fail(Defect::Io(error)))
    }
}
