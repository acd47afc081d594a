//! The weights of a model folder: one safetensors file, or shards and their index, named as transformers names them.

use std::collections::BTreeMap;

use super::{NewFolder, SafeTensorsWriter, TensorEntry};
use crate::{Defect, Error, RawTensor};

/// The size of a shard in most published checkpoints.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// One file of a model's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightShard {
    /// `model.safetensors` or `model-00001-of-00002.safetensors`.
    pub file_name: String,
    /// In the caller's order, which is not the file's.
    pub entries: Vec<TensorEntry>,
}

/// Assigns tensors to files. Like transformers, it fills one shard after the other and never splits a tensor; one larger than a
/// shard gets its own file.
///
/// Tensors whose size overflows count as `u64::MAX` bytes; writing them is refused.
pub fn cut_in_shards(entries: &[TensorEntry], shard_bytes: u64) -> Vec<WeightShard> {
    let mut shards: Vec<Vec<TensorEntry>> = Vec::new();
    let mut open = Vec::new();
    let mut open_bytes = 0u64;
    for entry in entries {
        let size_bytes = entry.size_bytes().map_or(u64::MAX, |bytes| bytes as u64);
        if size_bytes > shard_bytes {
            shards.push(vec![entry.clone()]);
            continue;
        }
        if open_bytes.saturating_add(size_bytes) > shard_bytes {
            shards.push(std::mem::take(&mut open));
            open_bytes = 0;
        }
        open.push(entry.clone());
        open_bytes += size_bytes;
    }
    if !open.is_empty() || shards.is_empty() {
        shards.push(open);
    }
    let count = shards.len();
    let name = |place: usize| match count {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", place + 1),
    };
    shards.into_iter().enumerate().map(|(place, entries)| WeightShard { file_name: name(place), entries }).collect()
}

/// Writes a model's weights into a folder.
///
/// `fill` is called for one tensor after the other, shard by shard and within a shard in the file's order (dtype, then
/// name); it hands on the tensor's elements, row-major, in pieces of any size. Nothing is held in memory but the piece. The tensors
/// in `carried` are copied as they are.
pub fn save_model<E: From<Error>>(
    folder: &NewFolder,
    entries: &[TensorEntry],
    carried: &[RawTensor],
    metadata: &BTreeMap<String, String>,
    shard_bytes: u64,
    mut fill: impl FnMut(&str, &mut dyn FnMut(&[f32]) -> Result<(), Error>) -> Result<(), E>,
) -> Result<(), E> {
    let entries: Vec<TensorEntry> = entries.iter().cloned().chain(carried.iter().map(entry_of)).collect();
    let carried: BTreeMap<&str, &RawTensor> = carried.iter().map(|tensor| (tensor.name(), tensor)).collect();
    let shards = cut_in_shards(&entries, shard_bytes);
    check_names(folder, &entries)?;
    for shard in &shards {
        write_tensors(folder, shard, metadata, |name, writer| match carried.get(name) {
            Some(tensor) => Ok(writer.write_bytes(tensor.bytes())?),
            None => fill(name, &mut |values| writer.write_f32(values)),
        })?;
    }
    if shards.len() > 1 {
        folder.write_json("model.safetensors.index.json", &index_of(&shards))?;
    }
    Ok(())
}

/// Writes tensors as one file. `fill(name, put)` passes the values of one to `put`, in order.
pub fn save_tensors<E: From<Error>>(
    folder: &NewFolder,
    file_name: &str,
    entries: &[TensorEntry],
    metadata: &BTreeMap<String, String>,
    mut fill: impl FnMut(&str, &mut dyn FnMut(&[f32]) -> Result<(), Error>) -> Result<(), E>,
) -> Result<(), E> {
    let file = WeightShard { file_name: file_name.to_owned(), entries: entries.to_vec() };
    write_tensors(folder, &file, metadata, |name, writer| fill(name, &mut |values| writer.write_f32(values)))
}

fn entry_of(tensor: &RawTensor) -> TensorEntry {
    TensorEntry { name: tensor.name().to_owned(), dtype: tensor.dtype(), shape: tensor.shape().to_vec() }
}

fn write_tensors<E: From<Error>>(
    folder: &NewFolder,
    file: &WeightShard,
    metadata: &BTreeMap<String, String>,
    mut write: impl FnMut(&str, &mut SafeTensorsWriter) -> Result<(), E>,
) -> Result<(), E> {
    folder.file(&file.file_name, |stream| {
        let mut writer = SafeTensorsWriter::new(stream, &file.entries, metadata)?;
        for place in 0..writer.entries().len() {
            let name = writer.entries()[place].name.clone();
            write(&name, &mut writer)?;
            writer.expect_written(place + 1)?;
        }
        writer.finish().map_err(E::from)
    })
}

/// The writer of a file checks its own names; across files the later tensor would hide the earlier.
fn check_names(folder: &NewFolder, entries: &[TensorEntry]) -> Result<(), Error> {
    let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Defect::DuplicateKey { key: crate::error::printable(pair[0]) }.of(folder.path())),
        None => Ok(()),
    }
}

fn index_of(shards: &[WeightShard]) -> serde_json::Value {
    let mut weight_map = BTreeMap::new();
    let mut total_size = 0u64;
    for shard in shards {
        for entry in &shard.entries {
            weight_map.insert(&entry.name, &shard.file_name);
            total_size += entry.size_bytes().map_or(0, |bytes| bytes as u64);
        }
    }
    serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map })
}
