//! The header of a safetensors file: 8 bytes of length, then JSON that says where each tensor is, then the tensors.
//!
//! The checks are our own because those of the `safetensors` crate (0.8) do not suffice for a file from a stranger: of
//! two tensors with one name the later silently wins, offsets near 2⁶⁴ overflow where overflow is checked, and most of
//! its errors do not say which tensor. Tests hold the two together: what is accepted here, the crate reads alike.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use crate::error::printable;
use crate::{Defect, FileDtype, json, limits};

const LENGTH_BYTES: usize = size_of::<u64>();
/// The one key of a header that is not a tensor.
pub(crate) const METADATA: &str = "__metadata__";
const GIT_LFS: &[u8] = b"version https://git-lfs";

#[derive(Debug)]
pub(crate) struct Header {
    pub metadata: BTreeMap<String, String>,
    pub tensors: BTreeMap<String, PlacedTensor>,
}

#[derive(Debug)]
pub(crate) struct PlacedTensor {
    pub dtype: FileDtype,
    pub shape: Vec<usize>,
    /// Counted from the start of the file.
    pub bytes: Range<usize>,
}

/// Reads and checks the header of a whole file. Length first, then bounds, then contents.
pub(crate) fn parse(file: &[u8]) -> Result<Header, Defect> {
    let (header, data) = split(file)?;
    let RawHeader { metadata, tensors } = json::parse(header)?;
    if tensors.len() > limits::TENSORS {
        return Err(Defect::TooManyTensors { found: tensors.len() });
    }
    let data_begin = file.len() - data.len();
    let mut checked = BTreeMap::new();
    for (name, entry) in tensors {
        check_name(&name)?;
        let entry = check_entry(&name, entry, data_begin, data.len())?;
        checked.insert(name, entry);
    }
    check_coverage(&checked, data_begin, data.len())?;
    Ok(Header { metadata, tensors: checked })
}

pub(crate) fn check_name(name: &str) -> Result<(), Defect> {
    if name.is_empty() || name.len() > limits::TENSOR_NAME_BYTES || name.contains(char::is_control) {
        return Err(Defect::TensorName { name: printable(name) });
    }
    Ok(())
}

/// The header's JSON and the tensors' bytes.
fn split(file: &[u8]) -> Result<(&[u8], &[u8]), Defect> {
    if file.starts_with(GIT_LFS) {
        return Err(Defect::GitLfsPointer);
    }
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(Defect::FileTooShort { found_bytes: file.len() as u64 });
    };
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > limits::HEADER_BYTES {
        return Err(Defect::HeaderTooLarge { found_bytes: header_bytes });
    }
    let Some((header, data)) = rest.split_at_checked(header_bytes as usize) else {
        return Err(Defect::HeaderBeyondFile { header_bytes, left_bytes: rest.len() as u64 });
    };
    match header.first() {
        Some(b'{') => Ok((header, data)),
        Some(&found) => Err(Defect::HeaderStart { found }),
        None => Err(Defect::HeaderEmpty),
    }
}

fn check_entry(name: &str, entry: RawEntry, data_begin: usize, data_bytes: usize) -> Result<PlacedTensor, Defect> {
    let tensor = name.to_owned();
    let RawEntry { dtype, shape, data_offsets: (begin, end) } = entry;
    let Some(dtype) = FileDtype::from_name(&dtype) else {
        return Err(Defect::UnknownDtype { tensor, found: printable(&dtype) });
    };
    if shape.len() > limits::DIMS {
        return Err(Defect::TooManyDims { tensor, found: shape.len() });
    }
    if end < begin {
        return Err(Defect::OffsetsReversed { tensor, begin, end });
    }
    if end > data_bytes {
        return Err(Defect::TensorBeyondFile { tensor, end, data_bytes });
    }
    let Some(expected_bytes) = shape.iter().try_fold(dtype.size_bytes(), |bytes, &dim| bytes.checked_mul(dim)) else {
        return Err(Defect::SizeOverflow { tensor, dtype, shape });
    };
    let found_bytes = end - begin;
    if found_bytes != expected_bytes {
        return Err(Defect::SizeMismatch { tensor, dtype, shape, expected_bytes, found_bytes });
    }
    Ok(PlacedTensor { dtype, shape, bytes: data_begin + begin..data_begin + end })
}

/// The tensors must cover the data exactly: bytes that belong to no tensor could hide a second file, bytes that belong
/// to two would let a small file unfold into a large model. Their order in the header is free.
fn check_coverage(
    tensors: &BTreeMap<String, PlacedTensor>,
    data_begin: usize,
    data_bytes: usize,
) -> Result<(), Defect> {
    let mut in_order: Vec<_> = tensors.iter().map(|(name, entry)| (entry.bytes.start, entry.bytes.end, name)).collect();
    in_order.sort_unstable();
    let mut previous_end = 0;
    for (begin, end, name) in in_order {
        let (begin, end) = (begin - data_begin, end - data_begin);
        if begin < previous_end {
            return Err(Defect::Overlap { tensor: name.clone(), begin, previous_end });
        }
        if begin > previous_end {
            return Err(Defect::Hole { tensor: name.clone(), begin, previous_end });
        }
        previous_end = end;
    }
    if previous_end < data_bytes {
        return Err(Defect::TrailingBytes { end: previous_end, data_bytes });
    }
    Ok(())
}

/// The header as written, before any check but JSON's.
struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, RawEntry>,
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an object with dtype, shape and data_offsets")]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    /// Counted from the end of the header.
    data_offsets: (usize, usize),
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader { metadata: BTreeMap::new(), tensors: BTreeMap::new() };
        while let Some(key) = entries.next_key::<String>()? {
            if key == METADATA {
                header.metadata = entries.next_value::<Option<_>>()?.unwrap_or_default();
            } else {
                header.tensors.insert(key, entries.next_value()?);
            }
        }
        Ok(header)
    }
}
