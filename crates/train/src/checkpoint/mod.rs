//! A run's whole state on disk: parameters, moments, how far it has come and where its data stand.
//!
//! Each rank's part is a file of its own; the manifest says which elements of which tensor lie where. Nothing depends on how
//! many ranks wrote it: whoever loads takes what it needs from wherever it is.

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

/// What the manifest says beside its files' digests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointState {
    version: u32,
    pub progress: Progress,
    updates: u32,
    /// The rule whose state it holds.
    #[serde(default = "adamw", skip_serializing_if = "is_adamw")]
    optimizer: String,
    /// What the feed needs to go on with the next sample.
    pub feed: Value,
    /// What the run was configured as, in a few digits.
    pub configuration: String,
    /// How the model was run when it was written; older checkpoints do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<Strategy>,
    /// How the model was cut among the ranks that wrote it, for those who go on with as many.
    pub widths: Widths,
    /// Where ranks may leave something out, how far the periods of their selections have come.
    #[serde(default, rename = "resize", skip_serializing_if = "Option::is_none")]
    prune: Option<Periods>,
    /// By parameter.
    shapes: BTreeMap<String, Vec<usize>>,
    /// By file and tensor: which elements it holds.
    layout: BTreeMap<String, BTreeMap<String, Held>>,
}

impl CheckpointState {
    /// What a checkpoint's manifest says; its files are not looked at.
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

    /// Whether the numbers can be those of a run.
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

/// Older checkpoints do not say which rule they are of.
const ADAMW: &str = "adamw";

fn adamw() -> String {
    ADAMW.to_owned()
}

fn is_adamw(name: &str) -> bool {
    name == ADAMW
}

/// What a file calls the elements of a parameter that are of this kind.
fn tensor_name(kind: &str, parameter: &str) -> String {
    format!("{kind}.{parameter}")
}

/// Writes a checkpoint folder from where the ranks keep their state, and returns when it is there. It appears under its name
/// whole, or not at all.
pub fn save(path: &Path, ranks: &Ranks, progress: &Progress, feed: Value) -> Result<(), Error> {
    Snapshot::in_place(ranks, progress, feed, String::new())?.write(path)
}

/// Puts the ranks in the state of a checkpoint, each reading what it keeps, and says how far that was.
pub fn load(path: &Path, ranks: &Ranks) -> Result<CheckpointState, Error> {
    load_from(&Checkpoint::open(path)?, ranks)
}

pub fn load_from(checkpoint: &Checkpoint, ranks: &Ranks) -> Result<CheckpointState, Error> {
    let opened = Arc::new(Opened::new(checkpoint)?);
    ranks.load(opened.clone())?;
    Ok(opened.state.clone())
}

/// Puts a rank in the state of a checkpoint, if that is of its model and its rule.
pub(crate) fn load_rank(opened: &Opened, trainer: &mut Trainer) -> Result<(), Error> {
    trainer.model.specs.iter().try_for_each(|spec| opened.check(spec))?;
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

/// Every tensor of the state.
fn all(specs: &[ParamSpec]) -> impl Iterator<Item = (StateKind, ParamId, &ParamSpec)> {
    let of = move |kind| specs.iter().enumerate().map(move |(index, spec)| (kind, ParamId(index), spec));
    StateKind::ALL.into_iter().flat_map(of)
}
