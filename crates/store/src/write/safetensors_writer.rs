//! Writes a safetensors file tensor by tensor and never holds it in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::FileWriter;
use super::round::{self, Stopped};
use crate::{Defect, Error, FileDtype, header, limits};

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// The Hugging Face name.
    pub name: String,
    /// The type of its elements in the file.
    pub dtype: FileDtype,
    /// Its dims; none for a scalar.
    pub shape: Vec<usize>,
}

/// Writes a header at once and then takes the tensors' elements, in the order of [`entries`](Self::entries).
pub struct SafeTensorsWriter<'file> {
    file: &'file mut FileWriter,
    /// In the file's order, each with its size.
    entries: Vec<TensorEntry>,
    sizes_bytes: Vec<usize>,
    /// The tensor that the next bytes belong to, and its bytes so far.
    current: usize,
    written_bytes: usize,
}

impl TensorEntry {
    /// Bytes of all its elements; `None` on overflow.
    pub fn size_bytes(&self) -> Option<usize> {
        self.shape.iter().try_fold(self.dtype.size_bytes(), |bytes, &dim| bytes.checked_mul(dim))
    }
}

impl<'file> SafeTensorsWriter<'file> {
    /// Checks the entries as a reader will, and writes the header.
    ///
    /// The tensors lie in the file as the `safetensors` crate lays them: the largest dtype first, then by name.
    pub fn new(
        file: &'file mut FileWriter,
        entries: &[TensorEntry],
        metadata: &BTreeMap<String, String>,
    ) -> Result<SafeTensorsWriter<'file>, Error> {
        let mut entries = entries.to_vec();
        entries.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
        let sizes_bytes = check(&entries).map_err(|defect| defect.of(file.path()))?;
        let header = header_of(&entries, &sizes_bytes, metadata).map_err(|defect| defect.of(file.path()))?;
        file.put(&(header.len() as u64).to_le_bytes())?;
        file.put(header.as_bytes())?;
        let mut writer = SafeTensorsWriter { file, entries, sizes_bytes, current: 0, written_bytes: 0 };
        writer.advance();
        Ok(writer)
    }

    /// The tensors in the order in which their elements must be written.
    pub fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// Appends elements to the current tensor, rounded to its dtype: F32, BF16 or F16.
    pub fn write_f32(&mut self, values: &[f32]) -> Result<(), Error> {
        if values.is_empty() {
            return Ok(());
        }
        let dtype = self.entries.get(self.current).map_or(FileDtype::F32, |entry| entry.dtype);
        if !round::is_writable(dtype) {
            return Err(self.fail(Defect::CannotWriteAs { tensor: self.entries[self.current].name.clone(), dtype }));
        }
        self.reserve(values.len().saturating_mul(dtype.size_bytes()))?;
        match round::round(values, dtype, |bytes| self.file.put(bytes)) {
            Ok(()) => {}
            Err(Stopped::Failed(error)) => return Err(error),
            Err(Stopped::Beyond(value)) => {
                let tensor = self.entries[self.current].name.clone();
                return Err(self.fail(Defect::BeyondDtype { tensor, value, dtype }));
            }
        }
        self.advance();
        Ok(())
    }

    /// Appends elements to the current tensor as they are to be in the file: row-major, little-endian.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.reserve(bytes.len())?;
        self.file.put(bytes)?;
        self.advance();
        Ok(())
    }

    /// Checks that every tensor got all of its bytes.
    pub fn finish(self) -> Result<(), Error> {
        self.expect_written(self.entries.len())
    }

    /// Checks that the first `count` tensors got all of their bytes.
    pub(super) fn expect_written(&self, count: usize) -> Result<(), Error> {
        if self.current >= count {
            return Ok(());
        }
        Err(self.wrong_size(self.written_bytes))
    }

    /// Counts bytes, if the current tensor still needs that many.
    fn reserve(&mut self, bytes: usize) -> Result<(), Error> {
        let Some(size_bytes) = self.sizes_bytes.get(self.current) else {
            return Err(self.fail(Defect::BeyondLastTensor { found_bytes: bytes }));
        };
        let written_bytes = self.written_bytes.saturating_add(bytes);
        if written_bytes > *size_bytes {
            return Err(self.wrong_size(written_bytes));
        }
        self.written_bytes = written_bytes;
        Ok(())
    }

    /// Goes on to the next tensor that needs bytes, once the current one has all.
    fn advance(&mut self) {
        while self.sizes_bytes.get(self.current) == Some(&self.written_bytes) {
            self.current += 1;
            self.written_bytes = 0;
        }
    }

    fn wrong_size(&self, found_bytes: usize) -> Error {
        self.fail(Defect::TensorIncomplete {
            tensor: self.entries[self.current].name.clone(),
            expected_bytes: self.sizes_bytes[self.current],
            found_bytes,
        })
    }

    fn fail(&self, defect: Defect) -> Error {
        defect.of(self.file.path())
    }
}

/// The tensors' sizes, if a reader will accept the header.
fn check(entries: &[TensorEntry]) -> Result<Vec<usize>, Defect> {
    if entries.len() > limits::TENSORS {
        return Err(Defect::TooManyTensors { found: entries.len() });
    }
    let mut names = BTreeSet::new();
    let mut sizes_bytes = Vec::new();
    let mut total_bytes = 0usize;
    for entry in entries {
        let tensor = entry.name.clone();
        header::check_name(&tensor)?;
        if tensor == header::METADATA {
            return Err(Defect::TensorName { name: tensor });
        }
        if entry.shape.len() > limits::DIMS {
            return Err(Defect::TooManyDims { tensor, found: entry.shape.len() });
        }
        let size_bytes = entry.size_bytes();
        let Some((size_bytes, total)) = size_bytes.and_then(|size| Some((size, total_bytes.checked_add(size)?))) else {
            return Err(Defect::SizeOverflow { tensor, dtype: entry.dtype, shape: entry.shape.clone() });
        };
        if !names.insert(&entry.name) {
            return Err(Defect::DuplicateKey { key: tensor });
        }
        total_bytes = total;
        sizes_bytes.push(size_bytes);
    }
    Ok(sizes_bytes)
}

fn header_of(
    entries: &[TensorEntry],
    sizes_bytes: &[usize],
    metadata: &BTreeMap<String, String>,
) -> Result<String, Defect> {
    let mut parts = Vec::new();
    if !metadata.is_empty() {
        parts.push(format!("\"{}\":{}", header::METADATA, serde_json::json!(metadata)));
    }
    let mut begin = 0;
    for (TensorEntry { name, dtype, shape }, size_bytes) in entries.iter().zip(sizes_bytes) {
        let name = serde_json::json!(name);
        let shape = serde_json::json!(shape);
        let end = begin + size_bytes;
        parts.push(format!(r#"{name}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#));
        begin = end;
    }
    let mut header = format!("{{{}}}", parts.join(","));
    let padding = header.len().next_multiple_of(8) - header.len();
    write!(header, "{:padding$}", "").expect("a String takes any text");
    if header.len() as u64 > limits::HEADER_BYTES {
        return Err(Defect::HeaderTooLarge { found_bytes: header.len() as u64 });
    }
    Ok(header)
}
