//! The ranks' state at one moment: copied, to be written while they continue, or in place, while they wait.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use evenkeel_model::{Held, ParamId, ParamSpec, Widths};
use evenkeel_step::Strategy;
use evenkeel_store::checkpoint::CheckpointWriter;
use evenkeel_store::{FileDtype, SafeTensorsWriter, TensorEntry};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ADAMW, CheckpointState, RunOrigin, VERSION, all, tensor_name};
use crate::Error;
use crate::prune::{Periods, Told};
use crate::ranks::Ranks;
use crate::run::Progress;
use crate::state_kind::StateKind;
use crate::trainer::Trainer;

/// Values passed on at a time.
const PIECE_ELEMENTS: usize = 1 << 20;

/// The state of all ranks.
pub struct Snapshot<'ranks> {
    state: CheckpointState,
    /// By file and tensor.
    files: BTreeMap<String, BTreeMap<String, Values<'ranks>>>,
}

enum Values<'ranks> {
    Copied(Vec<f32>),
    InPlace { ranks: &'ranks Ranks, rank: usize, place: Place },
}

/// The part of a rank's state that a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    kind: StateKind,
    id: ParamId,
    len: usize,
}

/// A rank's part of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankState {
    updates: u32,
    strategy: Strategy,
    widths: Widths,
    prune: Option<Periods>,
    /// The name of the optimizer's rule, if there is one.
    rule: Option<String>,
    /// By tensor: the elements that the rank keeps and speaks for, and their values or their place.
    kept: BTreeMap<String, (Held, Kept)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Kept {
    Values(Vec<f32>),
    InPlace(Place),
}

impl RankState {
    /// With a copy of all values, or with the places of those on the device.
    pub(crate) fn of(trainer: &Trainer, copies: bool) -> RankState {
        RankState {
            updates: trainer.updates,
            strategy: trainer.strategy().clone(),
            widths: trainer.widths(),
            prune: trainer.periods(),
            rule: trainer.rule_name().map(str::to_owned),
            kept: kept(trainer, copies),
        }
    }
}

impl Snapshot<'static> {
    /// A copy: the ranks need not wait until it is written.
    pub fn copy(ranks: &Ranks, progress: &Progress, feed: Value, origin: &RunOrigin) -> Result<Self, Error> {
        Snapshot::take(ranks, progress, feed, origin, true, |_, _| unreachable!("everything is copied"))
    }
}

impl<'ranks> Snapshot<'ranks> {
    /// Reads the ranks' state as it is written. It must not change meanwhile; no other memory is taken.
    pub fn in_place(ranks: &'ranks Ranks, progress: &Progress, feed: Value, origin: &RunOrigin) -> Result<Self, Error> {
        let in_place = |rank, place| Values::InPlace { ranks, rank, place };
        Snapshot::take(ranks, progress, feed, origin, false, in_place)
    }

    fn take(
        ranks: &Ranks,
        progress: &Progress,
        feed: Value,
        origin: &RunOrigin,
        copies: bool,
        in_place: impl Fn(usize, Place) -> Values<'ranks>,
    ) -> Result<Self, Error> {
        let states = ranks.states(copies)?;
        let first = &states[0];
        let shape = |spec: &ParamSpec| (spec.name.clone(), spec.shape.clone());
        let mut state = CheckpointState {
            version: VERSION,
            progress: *progress,
            updates: first.updates,
            optimizer: first.rule.as_deref().unwrap_or(ADAMW).to_owned(),
            feed,
            configuration: origin.configuration.clone(),
            base: origin.base.clone(),
            strategy: Some(first.strategy.clone()),
            widths: first.widths.clone(),
            prune: first.prune,
            shapes: ranks.specs().iter().filter(|spec| spec.is_trained).map(shape).collect(),
            layout: BTreeMap::new(),
        };
        let mut files = BTreeMap::new();
        for (rank, RankState { kept, .. }) in states.into_iter().enumerate().filter(|(_, rank)| !rank.kept.is_empty()) {
            let name = format!("rank-{rank:05}.safetensors");
            let (mut layout, mut tensors) = (BTreeMap::new(), BTreeMap::new());
            for (tensor, (held, kept)) in kept {
                layout.insert(tensor.clone(), held);
                let values = match kept {
                    Kept::Values(values) => Values::Copied(values),
                    Kept::InPlace(place) => in_place(rank, place),
                };
                tensors.insert(tensor, values);
            }
            state.layout.insert(name.clone(), layout);
            files.insert(name, tensors);
        }
        Ok(Snapshot { state, files })
    }

    /// Writes it as a checkpoint folder, each file in its own thread.
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

impl Values<'_> {
    fn len(&self) -> usize {
        match self {
            Values::Copied(values) => values.len(),
            Values::InPlace { place, .. } => place.len,
        }
    }

    fn piece(&self, elements: Range<usize>) -> Result<Cow<'_, [f32]>, Error> {
        match *self {
            Values::Copied(ref values) => Ok(Cow::Borrowed(&values[elements])),
            Values::InPlace { ranks, rank, place: Place { kind, id, .. } } => {
                Ok(Cow::Owned(ranks.read_kept(rank, kind, id, elements)?))
            }
        }
    }
}

fn kept(trainer: &Trainer, copies: bool) -> BTreeMap<String, (Held, Kept)> {
    let queue = trainer.device.compute();
    let mut kept = BTreeMap::new();
    for (kind, id, spec) in all(&trainer.model.specs).filter(|&(kind, id, _)| trainer.speaks_for(kind, id)) {
        if let Some((held, tensor)) = trainer.kept(kind, id) {
            let place = Place { kind, id, len: held.len() };
            let values = if copies { Kept::Values(queue.read(&tensor)) } else { Kept::InPlace(place) };
            kept.insert(tensor_name(kind.name(), &spec.name), (held, values));
        }
    }
    for Told { kind, spec, held, values } in trainer.told() {
        kept.insert(tensor_name(kind, &spec.name), (held, Kept::Values(values)));
    }
    kept
}

fn write_file(writer: &CheckpointWriter, name: &str, tensors: &BTreeMap<String, Values>) -> Result<(), Error> {
    let entry = |(name, values): (&String, &Values)| TensorEntry {
        name: name.clone(),
        dtype: FileDtype::F32,
        shape: vec![values.len()],
    };
    let entries: Vec<TensorEntry> = tensors.iter().map(entry).collect();
    writer.file(name, |file| -> Result<(), Error> {
        let mut writer = SafeTensorsWriter::new(file, &entries, &BTreeMap::new())?;
        for name in writer.entries().iter().map(|entry| entry.name.clone()).collect::<Vec<_>>() {
            let values = &tensors[&name];
            for start in (0..values.len()).step_by(PIECE_ELEMENTS) {
                writer.write_f32(&values.piece(start..values.len().min(start + PIECE_ELEMENTS))?)?;
            }
        }
        Ok(writer.finish()?)
    })
}

/// Passes the elements of some rows of a whole parameter to `put`, row-major, a few rows at a time.
pub(crate) fn write_pieces(
    spec: &ParamSpec,
    wanted: Range<usize>,
    read_rows: impl Fn(Range<usize>) -> Result<Vec<f32>, Error>,
    put: &mut dyn FnMut(&[f32]) -> Result<(), evenkeel_store::Error>,
) -> Result<(), Error> {
    let rows = (PIECE_ELEMENTS / spec.whole[1].max(1)).max(1);
    for first in wanted.clone().step_by(rows) {
        put(&read_rows(first..wanted.end.min(first + rows))?)?;
    }
    Ok(())
}
