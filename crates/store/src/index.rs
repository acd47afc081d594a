//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::error::printable;
use crate::{Defect, Error, header, json, limits, regular_file};

/// Every tensor of the model and the shard that holds it, a plain file name.
pub(crate) struct Index {
    pub weight_map: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
#[serde(expecting = "an object with weight_map")]
struct RawIndex {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads the index and checks that each shard it names is in `folder`.
    ///
    /// Its `metadata.total_size` is not looked at: published checkpoints often have it wrong.
    pub fn open(path: &Path, folder: &Path) -> Result<Index, Error> {
        let RawIndex { weight_map } = json::read(path, limits::INDEX_BYTES)?;
        let index = Index { weight_map };
        index.check(folder).map_err(|defect| defect.of(path))?;
        Ok(index)
    }

    /// The shards' file names, sorted.
    pub fn shards(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }

    fn check(&self, folder: &Path) -> Result<(), Defect> {
        for (tensor, shard) in &self.weight_map {
            header::check_name(tensor)?;
            if !is_plain_file_name(shard) {
                return Err(Defect::ShardName { tensor: tensor.clone(), shard: printable(shard) });
            }
        }
        let shards = self.shards();
        if shards.len() > limits::SHARDS {
            return Err(Defect::TooManyShards { found: shards.len() });
        }
        let is_missing = |shard: &&&str| !regular_file::is_listed(&folder.join(shard));
        let missing: Vec<String> = shards.iter().filter(is_missing).map(|shard| printable(shard)).collect();
        if !missing.is_empty() {
            return Err(Defect::MissingShards { missing, total: shards.len() });
        }
        Ok(())
    }
}

/// A name that, joined to a folder, can only be an entry of that folder.
fn is_plain_file_name(name: &str) -> bool {
    let has_stem = name.strip_suffix(".safetensors").is_some_and(|stem| !stem.is_empty());
    has_stem && !name.contains(|character: char| matches!(character, '/' | '\\') || character.is_control())
}
