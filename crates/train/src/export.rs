//! The trained model as an ordinary Hugging Face folder's weights.

use std::collections::BTreeMap;
use std::ops::Range;

use evenkeel_model::{ADAPTER_WEIGHTS, LABEL_NAMES, ParamId, ParamSpec};
use evenkeel_store::{FileDtype, NewFolder, RawTensor, SHARD_BYTES, TensorEntry, save_model, save_tensors};

use crate::Error;
use crate::checkpoint::write_pieces;

/// Writes what an adapter's training changed, rounded to `dtype`, as one file. `names` are those of the file, `labels` the table of
/// a classifier's labels.
pub fn save_adapter(
    folder: &NewFolder,
    names: &[(String, ParamId)],
    specs: &[ParamSpec],
    dtype: FileDtype,
    labels: Option<String>,
    read_rows: impl Fn(ParamId, Range<usize>) -> Result<Vec<f32>, Error>,
) -> Result<(), Error> {
    let mut metadata = of_pytorch();
    metadata.extend(labels.map(|labels| (LABEL_NAMES.to_owned(), labels)));
    let entry = |(name, id): &(String, ParamId)| TensorEntry {
        name: name.clone(),
        dtype,
        shape: specs[id.0].shape_in_adapter_file(),
    };
    let entries: Vec<TensorEntry> = names.iter().map(entry).collect();
    let places: BTreeMap<&str, ParamId> = names.iter().map(|(name, id)| (name.as_str(), *id)).collect();
    save_tensors(folder, ADAPTER_WEIGHTS, &entries, &metadata, |name, put| {
        let id = places[name];
        let rows = 0..specs[id.0].whole[0];
        if specs[id.0].expert_factor.is_some() {
            return Ok(put(&specs[id.0].in_adapter_file(read_rows(id, rows)?))?);
        }
        write_pieces(&specs[id.0], rows, |rows| read_rows(id, rows), put)
    })
}

/// transformers writes this, and older versions of it insist on it.
fn of_pytorch() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

/// Writes the weights, rounded to `dtype`, as transformers names and shards them, and the tensors that are carried over. `read_rows`
/// returns rows of whole parameters.
pub fn save_weights(
    folder: &NewFolder,
    specs: &[ParamSpec],
    dtype: FileDtype,
    carried: &[RawTensor],
    read_rows: impl Fn(ParamId, Range<usize>) -> Result<Vec<f32>, Error>,
) -> Result<(), Error> {
    let mut entries = Vec::new();
    let mut places = BTreeMap::new();
    for (index, spec) in specs.iter().enumerate() {
        for (tensor, rows) in spec.in_files() {
            places.insert(tensor.name.clone(), (ParamId(index), rows));
            entries.push(TensorEntry { name: tensor.name, dtype, shape: tensor.shape });
        }
    }
    save_model(folder, &entries, carried, &of_pytorch(), SHARD_BYTES, |name, put| {
        let (id, rows) = &places[name];
        write_pieces(&specs[id.0], rows.clone(), |rows| read_rows(*id, rows), put)
    })
}
