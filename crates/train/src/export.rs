//! The trained model as an ordinary Hugging Face folder's weights.

use std::collections::BTreeMap;

use evenkeel_device::Queue;
use evenkeel_model::{ParamId, Parameters};
use evenkeel_store::{FileDtype, NewFolder, SHARD_BYTES, TensorEntry, save_model};

use crate::Error;
use crate::checkpoint::write_pieces;

/// Writes the weights, rounded to `dtype`, as transformers names and shards them.
pub fn save_weights(folder: &NewFolder, parameters: &Parameters, dtype: FileDtype, queue: &Queue) -> Result<(), Error> {
    let entry =
        |spec: &evenkeel_model::ParamSpec| TensorEntry { name: spec.name.clone(), dtype, shape: spec.shape.clone() };
    let entries: Vec<TensorEntry> = parameters.specs.iter().map(entry).collect();
    let places: BTreeMap<&str, ParamId> =
        parameters.ids().map(|id| (parameters.specs[id.0].name.as_str(), id)).collect();
    // What transformers writes, and what older versions of it insist on.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    save_model(folder, &entries, &metadata, SHARD_BYTES, |name, put| {
        write_pieces(queue, parameters.master(places[name]), put)
    })
}
