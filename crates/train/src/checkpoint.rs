//! A run's whole state on disk: parameters, moments, how far it has come and where its data stand.
//!
//! Tensors are saved whole under their Hugging Face names, so a checkpoint does not say how many devices wrote it.

use std::collections::BTreeMap;
use std::path::Path;

use evenkeel_device::{Queue, Tensor};
use evenkeel_model::{ParamId, ParamSpec};
use evenkeel_store::{FileDtype, NewFolder, RawTensor, SafeTensorsFile, SafeTensorsWriter, TensorEntry, read_json};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Error;
use crate::run::Progress;
use crate::trainer::Trainer;

const TENSORS: &str = "state.safetensors";
const STATE: &str = "state.json";
const VERSION: u32 = 1;
const STATE_LIMIT_BYTES: u64 = 64 << 10;
/// No run takes so many steps, tokens or seconds.
const MOST: u64 = 1 << 48;
/// Values on their way from device to file at a time.
const PIECE_ELEMENTS: usize = 4 << 20;

/// `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    version: u32,
    pub progress: Progress,
    updates: u32,
    /// What the feed needs to go on with the next sample.
    pub feed: Value,
}

impl State {
    /// Whether the numbers can be those of a run.
    fn check(&self) -> Result<(), &'static str> {
        let Progress { step, tokens, seconds, warmup_share, nonfinite_in_a_row } = self.progress;
        let checks = [
            ("step", step < MOST),
            ("tokens", tokens < MOST),
            ("seconds", (0.0..MOST as f64).contains(&seconds)),
            ("warmup_share", (0.0..=1.0).contains(&warmup_share)),
            ("nonfinite_in_a_row", nonfinite_in_a_row < u32::MAX / 2),
            ("updates", u64::from(self.updates) <= step && self.updates < u32::MAX / 2),
        ];
        checks.into_iter().find(|(_, sound)| !sound).map_or(Ok(()), |(what, _)| Err(what))
    }
}

/// What is kept of each parameter.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Weight,
    Mean,
    Variance,
}

const KINDS: [Kind; 3] = [Kind::Weight, Kind::Mean, Kind::Variance];

impl Kind {
    fn name(self, spec: &ParamSpec) -> String {
        let kind = match self {
            Kind::Weight => "weight",
            Kind::Mean => "mean",
            Kind::Variance => "variance",
        };
        format!("{kind}.{}", spec.name)
    }

    fn tensor<'a>(self, trainer: &'a Trainer, id: ParamId) -> &'a Tensor {
        match self {
            Kind::Weight => trainer.parameters.master(id),
            Kind::Mean => trainer.optimizer.mean(id),
            Kind::Variance => trainer.optimizer.variance(id),
        }
    }
}

/// Writes a checkpoint folder. It appears under its name whole, or not at all.
pub fn save(path: &Path, trainer: &Trainer, progress: &Progress, feed: Value) -> Result<(), Error> {
    let folder = NewFolder::create(path)?;
    let tensors: BTreeMap<String, &Tensor> = all(trainer).map(|(name, _, tensor)| (name, tensor)).collect();
    let entries: Vec<TensorEntry> = all(trainer)
        .map(|(name, spec, _)| TensorEntry { name, dtype: FileDtype::F32, shape: spec.shape.clone() })
        .collect();
    folder.file(TENSORS, |file| -> Result<(), Error> {
        let mut writer = SafeTensorsWriter::new(file, &entries, &BTreeMap::new())?;
        for name in writer.entries().iter().map(|entry| entry.name.clone()).collect::<Vec<_>>() {
            write_pieces(trainer.device.compute(), tensors[&name], &mut |piece| writer.write_f32(piece))?;
        }
        Ok(writer.finish()?)
    })?;
    let state = State { version: VERSION, progress: *progress, updates: trainer.updates, feed };
    folder.write_json(STATE, &state)?;
    Ok(folder.commit(true)?)
}

/// Puts the trainer in the state of a checkpoint, and says how far that was.
pub fn load(path: &Path, trainer: &mut Trainer) -> Result<State, Error> {
    let state: State = read_json(path.join(STATE), STATE_LIMIT_BYTES)?;
    if state.version != VERSION {
        return Err(Error::CheckpointVersion { path: path.to_owned(), found: state.version, known: VERSION });
    }
    state.check().map_err(|what| Error::BadState { path: path.join(STATE), what })?;
    let file = SafeTensorsFile::open(path.join(TENSORS))?;
    let mut found = Vec::new();
    for (name, spec, tensor) in all(trainer) {
        let raw = file.tensor(&name).filter(|raw| raw.shape() == spec.shape);
        let Some(raw) = raw else { return Err(Error::OtherModel { path: path.to_owned(), tensor: name }) };
        found.push((raw, tensor));
    }
    let queue = trainer.device.compute();
    for (raw, tensor) in found {
        read_tensor(queue, raw, tensor)?;
    }
    trainer.parameters.refresh_copies(queue);
    trainer.updates = state.updates;
    Ok(state)
}

/// Every tensor of the state: its name, its parameter, and where it is.
fn all<'a>(trainer: &'a Trainer) -> impl Iterator<Item = (String, &'a ParamSpec, &'a Tensor)> {
    let of = move |kind: Kind, id: ParamId| {
        let spec = &trainer.parameters.specs[id.0];
        (kind.name(spec), spec, kind.tensor(trainer, id))
    };
    KINDS.into_iter().flat_map(move |kind| trainer.parameters.ids().map(move |id| of(kind, id)))
}

fn read_tensor(queue: &Queue, raw: RawTensor, tensor: &Tensor) -> Result<(), Error> {
    let cols = tensor.cols;
    queue.write_rows(tensor, |first, rows| raw.read(first * cols..first * cols + rows.len(), rows).map_err(Error::from))
}

/// Hands on the elements of a tensor, row-major, a few rows at a time.
pub(crate) fn write_pieces(
    queue: &Queue,
    tensor: &Tensor,
    put: &mut dyn FnMut(&[f32]) -> Result<(), evenkeel_store::Error>,
) -> Result<(), Error> {
    let rows = (PIECE_ELEMENTS / tensor.cols.max(1)).max(1);
    for first in (0..tensor.rows).step_by(rows) {
        put(&queue.read(&tensor.row_range(first..tensor.rows.min(first + rows))))?;
    }
    Ok(())
}
