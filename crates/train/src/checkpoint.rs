//! A run's whole state on disk: parameters, moments, how far it has come and where its data stand.
//!
//! Tensors are saved whole under their Hugging Face names, so a checkpoint does not say how many devices wrote it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use evenkeel_model::{Held, Move, ParamId, ParamSpec, Slice, moves};
use evenkeel_store::{FileDtype, NewFolder, SafeTensorsFile, SafeTensorsWriter, TensorEntry, read_json};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Error;
use crate::ranks::{Ranks, all_or_first_error};
use crate::run::Progress;
use crate::trainer::{Kind, Trainer};

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

const KINDS: [Kind; 3] = [Kind::Weight, Kind::Mean, Kind::Variance];

fn tensor_name(kind: Kind, spec: &ParamSpec) -> String {
    let kind = match kind {
        Kind::Weight => "weight",
        Kind::Mean => "mean",
        Kind::Variance => "variance",
    };
    format!("{kind}.{}", spec.name)
}

/// Writes a checkpoint folder. It appears under its name whole, or not at all.
pub fn save(path: &Path, ranks: &Ranks, progress: &Progress, feed: Value) -> Result<(), Error> {
    let updates = ranks.each(|trainer| trainer.updates)?[0];
    let folder = NewFolder::create(path)?;
    let places: BTreeMap<String, (Kind, ParamId)> =
        all(ranks.specs()).map(|(kind, id, spec)| (tensor_name(kind, spec), (kind, id))).collect();
    let entry = |(kind, _, spec): (Kind, ParamId, &ParamSpec)| {
        let (name, shape) = (tensor_name(kind, spec), spec.shape.clone());
        TensorEntry { name, dtype: FileDtype::F32, shape }
    };
    let entries: Vec<TensorEntry> = all(ranks.specs()).map(entry).collect();
    folder.file(TENSORS, |file| -> Result<(), Error> {
        let mut writer = SafeTensorsWriter::new(file, &entries, &BTreeMap::new())?;
        for name in writer.entries().iter().map(|entry| entry.name.clone()).collect::<Vec<_>>() {
            let (kind, id) = places[&name];
            write_pieces(&ranks.specs()[id.0], |rows| ranks.read_rows(kind, id, rows), &mut |piece| {
                writer.write_f32(piece)
            })?;
        }
        Ok(writer.finish()?)
    })?;
    folder.write_json(STATE, &State { version: VERSION, progress: *progress, updates, feed })?;
    Ok(folder.commit(true)?)
}

/// Puts the ranks in the state of a checkpoint, each reading its own slices, and says how far that was.
pub fn load(path: &Path, ranks: &Ranks) -> Result<State, Error> {
    let path = path.to_owned();
    let state = all_or_first_error(ranks.each(move |trainer| load_rank(&path, trainer))?)?.swap_remove(0);
    ranks.each(|trainer| trainer.gather_values())?;
    Ok(state)
}

fn load_rank(path: &Path, trainer: &mut Trainer) -> Result<State, Error> {
    let state: State = read_json(path.join(STATE), STATE_LIMIT_BYTES)?;
    if state.version != VERSION {
        return Err(Error::CheckpointVersion { path: path.to_owned(), found: state.version, known: VERSION });
    }
    state.check().map_err(|what| Error::BadState { path: path.join(STATE), what })?;
    let file = SafeTensorsFile::open(path.join(TENSORS))?;
    let mut found = Vec::new();
    for (kind, id, spec) in all(&trainer.model.specs) {
        let name = tensor_name(kind, spec);
        let raw = file.tensor(&name).filter(|raw| raw.shape() == spec.shape);
        let Some(raw) = raw else { return Err(Error::OtherModel { path: path.to_owned(), tensor: name }) };
        found.extend(trainer.kept(kind, id).map(|(held, kept)| (raw, spec, held, kept)));
    }
    let queue = trainer.device.compute();
    for (raw, spec, held, kept) in found {
        for start in (0..held.len()).step_by(PIECE_ELEMENTS) {
            let end = held.len().min(start + PIECE_ELEMENTS);
            let piece = Held { range: held.range.start + start..held.range.start + end, ..held.clone() };
            let whole = [Held::all(Slice::whole(spec.whole))];
            let moves = moves(&whole, &piece, spec.whole[1]).expect("a file has whole tensors");
            queue.write_rows(kept.col_range(start..end).view(), |_, values| -> Result<(), Error> {
                moves.iter().try_for_each(|&Move { from_start, to_start, len, .. }| {
                    Ok(raw.read(from_start..from_start + len, &mut values[to_start..to_start + len])?)
                })
            })?;
        }
    }
    trainer.parameters.refresh_copies(queue);
    trainer.updates = state.updates;
    Ok(state)
}

/// Every tensor of the state.
fn all(specs: &[ParamSpec]) -> impl Iterator<Item = (Kind, ParamId, &ParamSpec)> {
    let of = move |kind| specs.iter().enumerate().map(move |(index, spec)| (kind, ParamId(index), spec));
    KINDS.into_iter().flat_map(of)
}

/// Hands on the elements of a whole parameter, row-major, a few rows at a time.
pub(crate) fn write_pieces(
    spec: &ParamSpec,
    read_rows: impl Fn(Range<usize>) -> Result<Vec<f32>, Error>,
    put: &mut dyn FnMut(&[f32]) -> Result<(), evenkeel_store::Error>,
) -> Result<(), Error> {
    let [all, cols] = spec.whole;
    let rows = (PIECE_ELEMENTS / cols.max(1)).max(1);
    for first in (0..all).step_by(rows) {
        put(&read_rows(first..all.min(first + rows))?)?;
    }
    Ok(())
}
