//! A slow rank that computes with some columns of its linear layers: which ones, from period to period.

use std::hash::{Hash, Hasher};

use evenkeel_balance::{Scores, Selection, add_changes, kept_count, random_columns};
use evenkeel_device::Queue;
use evenkeel_model::{Imputation, Intake, Model, Parameters, Resizing};

/// How a rank's linear layers are resized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resize {
    /// The share of each layer's input columns that is pruned, in 0..1.
    pub gamma: f64,
    pub imputation: Imputation,
    pub selection: Selection,
    /// Updates between two selections.
    pub period_steps: u32,
    /// Of random selections.
    pub seed: u64,
}

impl Resize {
    /// The same for the same settings, and hardly so for others.
    pub(crate) fn hash(resize: Option<&Resize>) -> u64 {
        let parts = resize.map(|&Resize { gamma, imputation, selection, period_steps, seed }| {
            (gamma.to_bits(), imputation, selection, period_steps, seed)
        });
        let mut hasher = std::hash::DefaultHasher::new();
        parts.hash(&mut hasher);
        hasher.finish()
    }
}

/// A rank's resizing, and what is known of the columns.
pub(crate) struct Resizer {
    settings: Resize,
    resizing: Resizing,
    /// As the resizing lists them.
    columns: Vec<Columns>,
    /// The number of the period, and the updates made in it.
    period: u64,
    updates: u32,
    /// Whether the period's columns are still to be selected.
    is_new_period: bool,
}

/// What is known of the columns of an intake.
struct Columns {
    /// From the first whole period on.
    scores: Option<Scores>,
    /// The weights at the period's beginning, as the intake lists them; none while nobody asks for priorities.
    snapshot: Option<Vec<Vec<f32>>>,
    /// Kept all through the period so far.
    was_kept: Vec<bool>,
}

impl Resizer {
    pub fn new(model: &Model, settings: Resize, repeats_weights: bool) -> Resizer {
        let resizing = Resizing::new(model, settings.imputation, repeats_weights);
        let columns = |intake: &Intake| Columns { scores: None, snapshot: None, was_kept: vec![true; intake.inputs] };
        let columns = resizing.intakes().map(columns).collect();
        Resizer { settings, resizing, columns, period: 0, updates: 0, is_new_period: true }
    }

    /// From here on with other settings. What is known of the columns is kept, and used at once.
    pub fn with(mut self, settings: Resize, queue: &Queue, parameters: &Parameters) -> Resizer {
        assert!(settings.period_steps > 0, "a period has steps");
        self.resizing.set_imputation(settings.imputation);
        if settings.selection != self.settings.selection {
            // Snapshots are taken where a period begins.
            self.columns.iter_mut().for_each(|columns| columns.snapshot = None);
            (self.updates, self.is_new_period) = (0, true);
        }
        self.settings = settings;
        if !self.is_new_period {
            self.select(queue, parameters);
        }
        self
    }

    pub fn resizing(&self) -> &Resizing {
        &self.resizing
    }

    pub fn begin_step(&mut self, queue: &Queue, parameters: &Parameters) {
        if std::mem::take(&mut self.is_new_period) {
            if self.settings.selection == Selection::Priority {
                self.measure(queue, parameters);
            }
            self.columns.iter_mut().for_each(|columns| columns.was_kept.fill(true));
            self.select(queue, parameters);
        }
        self.resizing.begin_step();
    }

    pub fn end_step(&mut self, updated: bool) {
        if !updated {
            return self.resizing.forget();
        }
        self.updates += 1;
        if self.updates >= self.settings.period_steps {
            (self.updates, self.period, self.is_new_period) = (0, self.period + 1, true);
        }
    }

    /// Measures what the period that has ended changed, and takes the snapshots of the next.
    fn measure(&mut self, queue: &Queue, parameters: &Parameters) {
        for (intake, columns) in self.resizing.intakes().zip(&mut self.columns) {
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

    /// Keeps what scores or chance say: everything, while there are no scores.
    fn select(&mut self, queue: &Queue, parameters: &Parameters) {
        let Resize { gamma, selection, seed, .. } = self.settings;
        for (index, columns) in self.columns.iter_mut().enumerate() {
            let inputs = columns.was_kept.len();
            let count = kept_count(inputs, gamma);
            let kept = match (selection, &columns.scores) {
                (Selection::Random, _) => random_columns(seed, index as u64, self.period, inputs, count),
                (Selection::Priority, Some(scores)) => scores.highest(count),
                (Selection::Priority, None) => (0..inputs as u32).collect(),
            };
            for (column, was_kept) in columns.was_kept.iter_mut().enumerate() {
                *was_kept &= kept.binary_search(&(column as u32)).is_ok();
            }
            self.resizing.keep(queue, parameters, index, &kept);
        }
    }
}
