//! Columns in checkpoints: a continued run selects those that it would have selected.
//!
//! Scores belong to a shard: how much a column changes in the rows that the shard keeps. A checkpoint stores them for the first
//! of those rows, which no other shard has. Only shards as wide as those that wrote them can use them.

use evenkeel_balance::{Scores, Selection};
use evenkeel_model::{Dim, Held, Intake, Model, ParamSpec, Ranges, Slice, Widths};
use serde::{Deserialize, Serialize};

use super::{Columns, Prune, Pruner};
use crate::Error;
use crate::checkpoint::Opened;

/// Progress of a rank's selection periods; part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Periods {
    selection: Selection,
    period: u64,
    updates: u32,
    is_new_period: bool,
}

impl Periods {
    /// Whether the numbers can be those of a run with so many updates.
    pub fn are_sound(&self, updates: u32) -> bool {
        self.updates <= updates && self.period <= u64::from(updates)
    }
}

/// The column history of a shard of these widths.
pub(crate) struct Remembered {
    widths: Widths,
    periods: Periods,
    columns: Vec<Columns>,
}

/// Numbers that a checkpoint stores for some elements of a parameter.
pub(crate) struct Told<'a> {
    /// Their kind, other than weights and moments.
    pub kind: &'static str,
    pub spec: &'a ParamSpec,
    pub held: Held,
    pub values: Vec<f32>,
}

const SNAPSHOT: &str = "snapshot";
const SCORES: &str = "scores";
const KEPT: &str = "kept";

impl Pruner {
    pub fn periods(&self) -> Periods {
        let Pruner { settings: Prune { selection, .. }, period, updates, is_new_period, .. } = *self;
        Periods { selection, period, updates, is_new_period }
    }

    /// This rank's columns, for a checkpoint.
    pub fn told<'a>(&self, model: &'a Model) -> Vec<Told<'a>> {
        let mut found = Vec::new();
        for (intake, columns) in self.intakes.iter().zip(&self.columns) {
            for (weight, values) in intake.weights.iter().zip(columns.snapshot.iter().flatten()) {
                let (spec, values) = (&model.specs[weight.0], values.clone());
                found.push(Told { kind: SNAPSHOT, spec, held: Held::all(spec.slice.clone()), values });
            }
            let (spec, Some(held)) = first_outputs(model, intake) else { continue };
            if let Some(scores) = &columns.scores {
                found.push(Told { kind: SCORES, spec, held: held.clone(), values: scores.values().to_vec() });
            }
            let values = columns.was_kept.iter().map(|&was_kept| f32::from(u8::from(was_kept))).collect();
            found.push(Told { kind: KEPT, spec, held, values });
        }
        found
    }

    /// Continues with `remembered`, if it belongs to a shard of these widths.
    pub fn restored(mut self, remembered: Option<Remembered>, widths: &Widths) -> Pruner {
        let is_of = |remembered: &Remembered| {
            let inputs = self.intakes.iter().map(|intake| intake.inputs);
            let fits = remembered.columns.iter().map(|columns| columns.was_kept.len()).eq(inputs);
            [Dim::Heads, Dim::Columns].iter().all(|&dim| remembered.widths.of(dim) == widths.of(dim)) && fits
        };
        if let Some(Remembered { periods, columns, .. }) = remembered.filter(is_of) {
            let Periods { selection, period, updates, is_new_period } = periods;
            (self.period, self.updates, self.is_new_period) = (period, updates, is_new_period);
            (self.settings.selection, self.columns, self.is_stale) = (selection, columns, true);
        }
        self
    }
}

impl Remembered {
    /// Reads a shard's columns from a checkpoint. The shard has the widths of those that wrote it.
    pub fn read(opened: &Opened, model: &Model, periods: Periods) -> Result<Remembered, Error> {
        let read = |kind: &str, spec: &ParamSpec, held: &Held| -> Result<Option<Vec<f32>>, Error> {
            if !opened.has(kind, &spec.name) {
                return Ok(None);
            }
            let mut values = vec![0.0; held.len()];
            opened.read(kind, spec, held, |elements, fill| fill(&mut values[elements]))?;
            Ok(Some(values))
        };
        let columns = |intake: &Intake| -> Result<Columns, Error> {
            let whole = |weight: &evenkeel_model::ParamId| {
                let spec = &model.specs[weight.0];
                read(SNAPSHOT, spec, &Held::all(spec.slice.clone()))
            };
            let snapshot = intake.weights.iter().map(whole).collect::<Result<Option<Vec<_>>, Error>>()?;
            let (spec, held) = first_outputs(model, intake);
            let of_columns = |kind| held.as_ref().map_or(Ok(None), |held| read(kind, spec, held));
            // A score is a sum of distances.
            let are_changes = |scores: &Vec<f32>| scores.iter().all(|score| score.is_finite() && *score >= 0.0);
            let scores = of_columns(SCORES)?.filter(are_changes);
            let was_kept = of_columns(KEPT)?.map(|kept| kept.iter().map(|&kept| kept != 0.0).collect());
            Ok(Columns {
                scores: scores.map(|scores| Scores::of_all(scores.into_iter().map(f64::from).collect())),
                snapshot,
                was_kept: was_kept.unwrap_or_else(|| vec![true; intake.inputs]),
            })
        };
        let columns = model.intakes().iter().map(columns).collect::<Result<Vec<Columns>, Error>>()?;
        Ok(Remembered { widths: opened.state.widths.clone(), periods, columns })
    }
}

/// The elements that stand for an intake's columns: those of its first layer's first output. `None` if the shard has none.
fn first_outputs<'a>(model: &'a Model, intake: &Intake) -> (&'a ParamSpec, Option<Held>) {
    let spec = &model.specs[intake.weights[0].0];
    let first = |ranges: &Ranges| ranges.first().map(|index| Ranges::from(index..index + 1));
    let Slice { rows, cols } = &spec.slice;
    let slice = if intake.transposed {
        first(cols).map(|cols| Slice { rows: rows.clone(), cols })
    } else {
        first(rows).map(|rows| Slice { rows, cols: cols.clone() })
    };
    (spec, slice.map(Held::all).filter(|held| !held.is_empty()))
}
