//! A run's whole state on disk: parameters, moments, its progress and its position in the data.
//!
//! Each rank's part is a file of its own; the manifest says which elements of which tensor lie where. Any number of ranks can
//! load it: each reads the elements that it needs from whichever file has them.

mod opened;
mod saver;
mod snapshot;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use evenkeel_model::{Held, ParamId, ParamSpec, Widths};
use evenkeel_step::Strategy;
use evenkeel_store::checkpoint::Checkpoint;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use opened::Opened;
pub use saver::Saver;
pub use snapshot::RankState;
use snapshot::Snapshot;
pub(crate) use snapshot::write_pieces;

use crate::Error;
use crate::prune::{Periods, Remembered};
use crate::ranks::Ranks;
use crate::run::Progress;
use crate::state_kind::StateKind;
use crate::trainer::Trainer;

const VERSION: u32 = 3;
/// No run takes so many steps, tokens or seconds.
const MOST: u64 = 1 << 48;

/// What a run was begun with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOrigin {
    /// A digest of its configuration.
    pub configuration: String,
    /// A digest of the weights that its adapters lie beside, which checkpoints do not have.
    pub base: Option<String>,
}

/// The manifest's content beside its files' digests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointState {
    version: u32,
    pub progress: Progress,
    updates: u32,
    /// The name of the rule whose state it holds.
    #[serde(default = "adamw", skip_serializing_if = "is_adamw")]
    optimizer: String,
    /// The feed's state, to continue with the next sample.
    pub feed: Value,
    /// Digests of what the run was begun with; see [`RunOrigin`].
    pub configuration: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The strategy of the run when it was written; absent in older checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<Strategy>,
    /// The widths of the ranks that wrote it, for a run that continues with as many.
    pub widths: Widths,
    /// Progress of the selection periods, if ranks may prune.
    #[serde(default, rename = "resize", skip_serializing_if = "Option::is_none")]
    prune: Option<Periods>,
    /// By parameter.
    shapes: BTreeMap<String, Vec<usize>>,
    /// By file and tensor: which elements it holds.
    layout: BTreeMap<String, BTreeMap<String, Held>>,
}

impl CheckpointState {
    /// Reads a checkpoint's manifest, not its files.
    pub fn of(checkpoint: &Checkpoint) -> Result<CheckpointState, Error> {
        let path = || checkpoint.path().to_owned();
        let found = checkpoint.body().get("version").and_then(Value::as_u64).unwrap_or(0);
        if found != u64::from(VERSION) {
            let found = found.try_into().unwrap_or(u32::MAX);
            return Err(Error::CheckpointVersion { path: path(), found, known: VERSION });
        }
        let state: CheckpointState = serde_json::from_value(checkpoint.body().clone())
            .map_err(|error| Error::BadManifest { path: path(), what: "body", why: error.to_string() })?;
        state.check().map_err(|what| Error::BadState { path: path(), what })?;
        Ok(state)
    }

    /// Fails with the name of a number that no run can have.
    fn check(&self) -> Result<(), &'static str> {
        let Progress {
            step,
            tokens,
            seconds,
            warmup_share,
            nonfinite_in_a_row,
            best,
            evaluations_without_gain,
            evaluated,
        } = self.progress;
        let checks = [
            ("step", step < MOST),
            ("tokens", tokens < MOST),
            ("seconds", (0.0..MOST as f64).contains(&seconds)),
            ("warmup_share", (0.0..=1.0).contains(&warmup_share)),
            ("nonfinite_in_a_row", nonfinite_in_a_row < u32::MAX / 2),
            ("best", best.is_none_or(|best| best.step <= step && best.loss.is_finite())),
            ("evaluations_without_gain", evaluations_without_gain < u32::MAX / 2),
            ("evaluated", evaluated.is_none_or(|evaluated| evaluated <= step)),
            ("updates", u64::from(self.updates) <= step && self.updates < u32::MAX / 2),
            ("resize", self.prune.is_none_or(|periods| periods.are_sound(self.updates))),
        ];
        checks.into_iter().find(|(_, sound)| !sound).map_or(Ok(()), |(what, _)| Err(what))
    }
}

/// The rule of older checkpoints, which do not name theirs.
const ADAMW: &str = "adamw";

fn adamw() -> String {
    ADAMW.to_owned()
}

fn is_adamw(name: &str) -> bool {
    name == ADAMW
}

/// A file's name for one kind of a parameter's state.
fn tensor_name(kind: &str, parameter: &str) -> String {
    format!("{kind}.{parameter}")
}

/// Writes a checkpoint folder directly from the ranks' state, and returns when it is complete. It appears under its name whole,
/// or not at all.
pub fn save(path: &Path, ranks: &Ranks, progress: &Progress, feed: Value) -> Result<(), Error> {
    Snapshot::in_place(ranks, progress, feed, &RunOrigin::default())?.write(path)
}

/// Loads a checkpoint into the ranks, each reading what it keeps, and returns the checkpoint's state.
pub fn load(path: &Path, ranks: &Ranks) -> Result<CheckpointState, Error> {
    load_from(&Checkpoint::open(path)?, ranks)
}

pub fn load_from(checkpoint: &Checkpoint, ranks: &Ranks) -> Result<CheckpointState, Error> {
    let opened = Arc::new(Opened::new(checkpoint)?);
    ranks.load(opened.clone())?;
    Ok(opened.state.clone())
}

/// Loads a checkpoint into a rank. Refuses one of another model or another rule.
pub(crate) fn load_rank(opened: &Opened, trainer: &mut Trainer) -> Result<(), Error> {
    opened.check_trained(&trainer.model.specs)?;
    trainer.rule_name().map_or(Ok(()), |rule| opened.check_rule(rule))?;
    let queue = trainer.device.compute();
    for (kind, id, spec) in all(&trainer.model.specs) {
        let Some((held, kept)) = trainer.kept(kind, id) else { continue };
        opened.read(kind.name(), spec, &held, |elements, fill| {
            queue.write_rows(kept.col_range(elements).view(), |_, values| fill(values))
        })?;
    }
    trainer.parameters.refresh_copies(queue);
    trainer.updates = opened.state.updates;
    if let Some(periods) = opened.state.prune {
        trainer.remember(&opened.state.widths, |model| Remembered::read(opened, model, periods))?;
    }
    Ok(())
}

/// Every tensor of the state. Frozen parameters have none: they are as the run began with them.
fn all(specs: &[ParamSpec]) -> impl Iterator<Item = (StateKind, ParamId, &ParamSpec)> {
    let trained = move || specs.iter().enumerate().filter(|(_, spec)| spec.is_trained);
    let of = move |kind| trained().map(move |(index, spec)| (kind, ParamId(index), spec));
    StateKind::ALL.into_iter().flat_map(of)
}
