//! The trained model as an ordinary Hugging Face folder's weights.

use std::collections::BTreeMap;
use std::ops::Range;

use evenkeel_model::{ParamId, ParamSpec};
use evenkeel_store::{FileDtype, NewFolder, SHARD_BYTES, TensorEntry, save_model};

use crate::Error;
use crate::checkpoint::write_pieces;

/// Writes the weights, rounded to `dtype`, as transformers names and shards them. `read_rows` returns rows of whole parameters.
pub fn save_weights(
    folder: &NewFolder,
    specs: &[ParamSpec],
    dtype: FileDtype,
    read_rows: impl Fn(ParamId, Range<usize>) -> Result<Vec<f32>, Error>,
) -> Result<(), Error> {
    let entry = |spec: &ParamSpec| TensorEntry { name: spec.name.clone(), dtype, shape: spec.shape.clone() };
    let entries: Vec<TensorEntry> = specs.iter().map(entry).collect();
    let places: BTreeMap<&str, ParamId> =
        specs.iter().enumerate().map(|(index, spec)| (spec.name.as_str(), ParamId(index))).collect();
    // transformers writes this, and older versions of it insist on it.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    save_model(folder, &entries, &metadata, SHARD_BYTES, |name, put| {
        let id = places[name];
        write_pieces(&specs[id.0], |rows| read_rows(id, rows), put)
    })
}
