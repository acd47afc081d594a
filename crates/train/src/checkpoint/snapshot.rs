//! What the ranks keep at one moment, to be written while they go on.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use evenkeel_model::{Held, ParamSpec};
use evenkeel_store::checkpoint::CheckpointWriter;
use evenkeel_store::{FileDtype, SafeTensorsWriter, TensorEntry};
use serde_json::Value;

use super::{ADAMW, State, VERSION, all, tensor_name};
use crate::Error;
use crate::ranks::Ranks;
use crate::resize::Told;
use crate::run::Progress;
use crate::trainer::Trainer;

/// Values that are handed on at a time.
const PIECE_ELEMENTS: usize = 4 << 20;

/// The state of all ranks, on the host.
pub struct Snapshot {
    state: State,
    /// By file and tensor.
    files: BTreeMap<String, BTreeMap<String, Vec<f32>>>,
}

/// By tensor: which elements a rank keeps and speaks for, and their values.
type Kept = BTreeMap<String, (Held, Vec<f32>)>;

impl Snapshot {
    pub fn take(ranks: &Ranks, progress: &Progress, feed: Value, configuration: String) -> Result<Snapshot, Error> {
        let kept = ranks.each(|trainer| {
            (trainer.updates, trainer.widths(), trainer.periods(), trainer.rule_name(), kept(trainer))
        })?;
        let shape = |spec: &ParamSpec| (spec.name.clone(), spec.shape.clone());
        let mut state = State {
            version: VERSION,
            progress: *progress,
            updates: kept[0].0,
            optimizer: kept[0].3.unwrap_or(ADAMW).to_owned(),
            feed,
            configuration,
            widths: kept[0].1.clone(),
            resize: kept[0].2,
            shapes: ranks.specs().iter().map(shape).collect(),
            layout: BTreeMap::new(),
        };
        let mut files = BTreeMap::new();
        for (rank, (.., kept)) in kept.into_iter().enumerate().filter(|(_, (.., kept))| !kept.is_empty()) {
            let name = format!("rank-{rank:05}.safetensors");
            let (layout, values) =
                kept.into_iter().map(|(tensor, (held, values))| ((tensor.clone(), held), (tensor, values))).unzip();
            state.layout.insert(name.clone(), layout);
            files.insert(name, values);
        }
        Ok(Snapshot { state, files })
    }

    /// Writes it as a checkpoint folder, every file by a thread of its own.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let writer = CheckpointWriter::create(path)?;
        std::thread::scope(|scope| {
            let writer = &writer;
            let files = self.files.iter();
            let threads: Vec<_> =
                files.map(|(name, tensors)| scope.spawn(move || write_file(writer, name, tensors))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<(), Error>>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect::<Vec<_>>().into_iter().collect::<Result<(), Error>>()
        })?;
        let body = serde_json::to_value(&self.state).expect("a state has a form that JSON can hold");
        Ok(writer.commit(&body)?)
    }
}

fn kept(trainer: &mut Trainer) -> Kept {
    let queue = trainer.device.compute();
    let mut kept = Kept::new();
    for (kind, id, spec) in all(&trainer.model.specs).filter(|&(kind, id, _)| trainer.speaks_for(kind, id)) {
        if let Some((held, tensor)) = trainer.kept(kind, id) {
            kept.insert(tensor_name(kind.name(), &spec.name), (held, queue.read(&tensor)));
        }
    }
    for Told { kind, spec, held, values } in trainer.told() {
        kept.insert(tensor_name(kind, &spec.name), (held, values));
    }
    kept
}

fn write_file(writer: &CheckpointWriter, name: &str, tensors: &BTreeMap<String, Vec<f32>>) -> Result<(), Error> {
    let entry = |(name, values): (&String, &Vec<f32>)| TensorEntry {
        name: name.clone(),
        dtype: FileDtype::F32,
        shape: vec![values.len()],
    };
    let entries: Vec<TensorEntry> = tensors.iter().map(entry).collect();
    writer.file(name, |file| -> Result<(), Error> {
        let mut writer = SafeTensorsWriter::new(file, &entries, &BTreeMap::new())?;
        for name in writer.entries().iter().map(|entry| entry.name.clone()).collect::<Vec<_>>() {
            tensors[&name].chunks(PIECE_ELEMENTS).try_for_each(|piece| writer.write_f32(piece))?;
        }
        Ok(writer.finish()?)
    })
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
