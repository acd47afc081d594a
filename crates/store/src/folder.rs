//! A Hugging Face model folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::index::Index;
use crate::{Defect, Digest, Error, RawTensor, SafeTensorsFile, read_config, regular_file};

/// A model folder with its config read, its weights mapped and everything checked.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: Value,
    files: Vec<SafeTensorsFile>,
    /// Tensor name → position in `files`.
    places: BTreeMap<String, usize>,
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl Folder {
    /// Opens a folder with `config.json` and either `model.safetensors` or `model.safetensors.index.json` and its
    /// shards. Where both are present the single file counts, as in transformers.
    ///
    /// The index is the list of what the model has, as in transformers. Each tensor it names must be in the shard it
    /// names; a tensor that a shard holds but the index does not name is ignored.
    pub fn open(path: impl AsRef<Path>) -> Result<Folder, Error> {
        let path = path.as_ref();
        check_is_folder(path).map_err(|defect| defect.of(path))?;
        let config = read_config(path.join("config.json"))?;
        let (files, places) = open_weights(path)?;
        Ok(Folder { path: path.to_owned(), config, files, places })
    }

    /// Whether a folder has files of weights, whatever is in them.
    pub fn has_weights(path: &Path) -> bool {
        [SINGLE, INDEX].iter().any(|name| regular_file::is_listed(&path.join(name)))
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`, always an object, with the description of its architecture if one lies beside it.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// The tensor of this name, if the model has it.
    pub fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let &place = self.places.get(name)?;
        self.files[place].tensor(name)
    }

    /// A digest of the tensors' names, types and shapes, and of the bytes at the ends of each: it tells models apart and reads little
    /// of them.
    pub fn weights_digest(&self) -> Digest {
        const END: usize = 4096;
        let mut told = Vec::new();
        for tensor in self.names().filter_map(|name| self.tensor(name)) {
            told.extend(format!("{} {:?} {:?}", tensor.name(), tensor.dtype(), tensor.shape()).into_bytes());
            let bytes = tensor.bytes();
            told.extend(&bytes[..END.min(bytes.len())]);
            told.extend(&bytes[bytes.len().saturating_sub(END)..]);
        }
        Digest::of(&told)
    }

    /// Releases the memory of a tensor that was read, as [`SafeTensorsFile::release`] does.
    pub fn release(&self, name: &str) {
        if let Some(&place) = self.places.get(name) {
            self.files[place].release(name);
        }
    }
}

fn check_is_folder(path: &Path) -> Result<(), Defect> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(Defect::NotAFolder),
        Err(error) => Err(regular_file::absence(path, error)),
    }
}

type Weights = (Vec<SafeTensorsFile>, BTreeMap<String, usize>);

fn open_weights(folder: &Path) -> Result<Weights, Error> {
    let [single, index] = [SINGLE, INDEX].map(|name| folder.join(name));
    if regular_file::is_listed(&single) {
        open_single(&single)
    } else if regular_file::is_listed(&index) {
        open_sharded(&index, folder)
    } else if ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| folder.join(name).exists()) {
        Err(Defect::PickleWeights.of(folder))
    } else {
        Err(Defect::NoWeights.of(folder))
    }
}

fn open_single(path: &Path) -> Result<Weights, Error> {
    let file = SafeTensorsFile::open(path)?;
    let places = file.names().map(|name| (name.to_owned(), 0)).collect();
    Ok((vec![file], places))
}

fn open_sharded(index_path: &Path, folder: &Path) -> Result<Weights, Error> {
    let index = Index::open(index_path, folder)?;
    let mut files = Vec::new();
    let mut place_of_shard = BTreeMap::new();
    for shard in index.shards() {
        place_of_shard.insert(shard.to_owned(), files.len());
        files.push(SafeTensorsFile::open(folder.join(shard))?);
    }
    let mut places = BTreeMap::new();
    for (tensor, shard) in index.weight_map {
        let place = place_of_shard[&shard];
        if files[place].tensor(&tensor).is_none() {
            return Err(Defect::TensorNotInShard { tensor, shard }.of(index_path));
        }
        places.insert(tensor, place);
    }
    Ok((files, places))
}
