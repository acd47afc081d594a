//! A slow rank computes with some columns of its linear layers only: selects them from period to period.

mod remembered;
mod shared;

use evenkeel_balance::{Scores, Selection, add_changes, kept_count, random_columns};
use evenkeel_device::Queue;
use evenkeel_model::{Imputation, Intake, Model, Parameters, PrunedColumns, PrunedMask, PrunedWeights, Pruning};
use evenkeel_store::Digest;
use serde::{Deserialize, Serialize};

pub use remembered::Periods;
pub(crate) use remembered::{Remembered, Told};
pub(crate) use shared::SharedWork;

/// How a rank's linear layers are pruned.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prune {
    /// The share of each layer's input columns that is pruned, in 0..1.
    pub gamma: f64,
    pub imputation: Imputation,
    /// Whether the weights of pruned columns, and what the optimizer keeps of them, stay as they are.
    pub freeze: bool,
    pub selection: Selection,
    /// Updates between two selections.
    pub period_steps: u32,
    /// Seed of random selections.
    pub seed: u64,
}

impl Prune {
    /// Equal for equal settings, and almost never for others.
    pub(crate) fn digest(prune: Option<&Prune>) -> u64 {
        Digest::of(format!("{prune:?}").as_bytes()).short()
    }

    fn weights(&self, repeats: bool) -> PrunedWeights {
        if self.freeze { PrunedWeights::Stay } else { PrunedWeights::Move { repeats } }
    }

    /// The columns of an intake to keep, by scores or at random; by scores, all of them while there are none.
    fn select(&self, scores: Option<&Scores>, intake: usize, period: u64, inputs: usize) -> Vec<u32> {
        let count = kept_count(inputs, self.gamma);
        match (self.selection, scores) {
            (Selection::Random, _) => random_columns(self.seed, intake as u64, period, inputs, count),
            (Selection::Priority, Some(scores)) => scores.highest(count),
            (Selection::Priority, None) => (0..inputs as u32).collect(),
        }
    }
}

/// A rank's pruning, and its knowledge of the columns that it keeps.
pub(crate) struct Pruner {
    settings: Prune,
    /// For the shard that steps are computed with: the one that is kept here, or another.
    pruning: Pruning,
    /// For the shard that is kept here.
    mask: PrunedMask,
    intakes: Vec<Intake>,
    /// In the order of the shard's intakes.
    columns: Vec<Columns>,
    /// The number of the period, and the updates made in it.
    period: u64,
    updates: u32,
    /// Whether the period's columns are still to be selected.
    is_new_period: bool,
    /// Whether the selection belongs to other settings or another shard.
    is_stale: bool,
    repeats_weights: bool,
}

/// Scores and history of an intake's columns.
struct Columns {
    /// `None` before the end of the first whole period.
    scores: Option<Scores>,
    /// The weights at the period's beginning, in the intake's order; `None` unless columns are selected by priority.
    snapshot: Option<Vec<Vec<f32>>>,
    /// By column: whether it was kept all through the period so far.
    was_kept: Vec<bool>,
}

/// The inputs of a selection.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub queue: &'a Queue,
    /// The shard that is kept here.
    pub model: &'a Model,
    pub parameters: &'a Parameters,
    /// Present if shards compute for one another.
    pub shared: Option<SharedWork<'a>>,
}

impl Pruner {
    pub fn new(model: &Model, settings: Prune, repeats_weights: bool) -> Pruner {
        let intakes = model.intakes();
        let columns = |intake: &Intake| Columns { scores: None, snapshot: None, was_kept: vec![true; intake.inputs] };
        Pruner {
            settings,
            pruning: Pruning::new(model, settings.imputation, settings.weights(repeats_weights)),
            mask: PrunedMask::default(),
            columns: intakes.iter().map(columns).collect(),
            intakes,
            period: 0,
            updates: 0,
            is_new_period: true,
            is_stale: false,
            repeats_weights,
        }
    }

    /// Switches to other settings. Knowledge of the columns is kept and used at once; if shards compute for one another, in the
    /// next step, which they make together.
    pub fn with(mut self, settings: Prune, place: &Place) -> Pruner {
        assert!(settings.period_steps > 0, "a period has steps");
        self.pruning.set_imputation(settings.imputation);
        if settings.selection != self.settings.selection {
            // Snapshots are taken when a period begins.
            self.columns.iter_mut().for_each(|columns| columns.snapshot = None);
            (self.updates, self.is_new_period) = (0, true);
        }
        self.settings = settings;
        if place.shared.is_some() {
            self.is_stale = true;
        } else if !self.is_new_period {
            self.select(place);
        }
        self
    }

    /// From here on steps are computed with this shard: the one that is kept here if `is_kept`, or another.
    pub fn compute_with(&mut self, model: &Model, is_kept: bool) {
        // The last step's gradients of pruned columns are still there only if this rank keeps those columns.
        let repeats_weights = self.repeats_weights && is_kept;
        self.pruning = Pruning::new(model, self.settings.imputation, self.settings.weights(repeats_weights));
        self.is_stale = true;
    }

    pub fn pruning(&self) -> &Pruning {
        &self.pruning
    }

    /// The elements that the optimizer leaves as they are.
    pub fn mask(&self) -> &PrunedMask {
        &self.mask
    }

    pub fn begin_step(&mut self, place: &Place) {
        let is_new_period = std::mem::take(&mut self.is_new_period);
        if is_new_period {
            if self.settings.selection == Selection::Priority {
                self.measure(place.queue, place.parameters);
            }
            self.columns.iter_mut().for_each(|columns| columns.was_kept.fill(true));
        }
        if std::mem::take(&mut self.is_stale) || is_new_period {
            self.select(place);
        }
        self.pruning.begin_step();
    }

    pub fn end_step(&mut self, updated: bool) {
        if !updated {
            return self.pruning.forget();
        }
        self.updates += 1;
        if self.updates >= self.settings.period_steps {
            (self.updates, self.period, self.is_new_period) = (0, self.period + 1, true);
        }
    }

    /// Measures how much the columns changed in the period that has ended, and takes the snapshots of the next.
    fn measure(&mut self, queue: &Queue, parameters: &Parameters) {
        for (intake, columns) in self.intakes.iter().zip(&mut self.columns) {
            let now: Vec<Vec<f32>> = intake.weights.iter().map(|&id| queue.read(&parameters.master(id))).collect();
            if let Some(before) = columns.snapshot.replace(now) {
                let mut changes = vec![0.0; intake.inputs];
                let now = columns.snapshot.iter().flatten();
                now.zip(&before).for_each(|(now, before)| add_changes(&mut changes, now, before, intake.transposed));
                match &mut columns.scores {
                    Some(scores) => scores.refresh(&changes, &columns.was_kept),
                    None => columns.scores = Some(Scores::of_all(changes)),
                }
            }
        }
    }

    fn select(&mut self, place: &Place) {
        match &place.shared {
            Some(shared) => self.select_shared(place, shared),
            None => self.select_alone(place),
        }
    }

    /// For a shard that is both kept here and computed with.
    fn select_alone(&mut self, place: &Place) {
        for (index, columns) in self.columns.iter_mut().enumerate() {
            let inputs = columns.was_kept.len();
            let kept = self.settings.select(columns.scores.as_ref(), index, self.period, inputs);
            for (column, was_kept) in columns.was_kept.iter_mut().enumerate() {
                *was_kept &= kept.binary_search(&(column as u32)).is_ok();
            }
            self.pruning.keep(place.queue, place.parameters.dtype(), index, &kept);
        }
        if self.settings.freeze {
            let pruned = (0..self.columns.len()).map(|index| self.pruning.pruned(index)).collect();
            self.mask = PrunedMask::new(place.queue, place.model, &[PrunedColumns { model: place.model, pruned }]);
        }
    }
}
