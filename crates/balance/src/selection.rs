//! Chooses the input columns of a linear layer that a slow rank keeps when it prunes.

use std::cmp::Ordering;

use evenkeel_random::mixed;
use serde::{Deserialize, Serialize};

/// How a rank chooses the columns to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Selection {
    /// The columns that changed most when they were last measured.
    Priority,
    /// Random columns, new ones in every period.
    Random,
}

/// The number of `inputs` columns kept when the share `gamma` is pruned: at least one.
pub fn kept_count(inputs: usize, gamma: f64) -> usize {
    assert!((0.0..1.0).contains(&gamma), "a share of columns to prune is in 0..1, not {gamma}");
    // Even the largest `gamma` below 1 rounds down to fewer than all columns.
    inputs - (gamma * inputs as f64).floor() as usize
}

/// Adds Σ |weight − snapshot| over each column's elements to its change. Both matrices are row-major, with a layer's input
/// columns as columns, or as rows if `transposed`.
pub fn add_changes(changes: &mut [f64], weight: &[f32], snapshot: &[f32], transposed: bool) {
    assert_eq!(weight.len(), snapshot.len(), "a matrix and its snapshot");
    let inputs = changes.len();
    if inputs == 0 || weight.is_empty() {
        return;
    }
    assert_eq!(weight.len() % inputs, 0, "{} elements for {inputs} input columns", weight.len());
    let outputs = weight.len() / inputs;
    for (index, (&now, &then)) in weight.iter().zip(snapshot).enumerate() {
        let column = if transposed { index / outputs } else { index % inputs };
        changes[column] += (f64::from(now) - f64::from(then)).abs();
    }
}

/// How much each column changes, in the precision of files and messages.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores(Vec<f32>);

impl Scores {
    /// From a period that kept every column.
    pub fn of_all(changes: Vec<f64>) -> Scores {
        Scores(changes.into_iter().map(|change| change as f32).collect())
    }

    /// By column.
    pub fn values(&self) -> &[f32] {
        &self.0
    }

    /// A column that was pruned in the period could not change, so its score stays.
    pub fn refresh(&mut self, changes: &[f64], was_kept: &[bool]) {
        assert_eq!((changes.len(), was_kept.len()), (self.0.len(), self.0.len()), "one change for each column");
        for ((score, &change), &was_kept) in self.0.iter_mut().zip(changes).zip(was_kept) {
            if was_kept {
                *score = change as f32;
            }
        }
    }

    /// The `count` columns with the highest scores, in ascending order; the first of equal ones win.
    pub fn highest(&self, count: usize) -> Vec<u32> {
        highest(&self.0, count, f32::total_cmp)
    }
}

/// `count` of `inputs` columns, in ascending order: a function of seed, layer and period. A smaller count gives a subset.
pub fn random_columns(seed: u64, layer: u64, period: u64, inputs: usize, count: usize) -> Vec<u32> {
    let key = [seed, layer, period].into_iter().fold(0, |key, part| mixed(key ^ part));
    let numbers: Vec<u64> = (0..inputs as u64).map(|column| mixed(key.wrapping_add(column))).collect();
    highest(&numbers, count, u64::cmp)
}

fn highest<T>(numbers: &[T], count: usize, compare: impl Fn(&T, &T) -> Ordering) -> Vec<u32> {
    assert!(count <= numbers.len(), "{count} of {} columns", numbers.len());
    let mut columns: Vec<u32> = (0..numbers.len() as u32).collect();
    // A stable sort keeps equal ones in order.
    columns.sort_by(|&a, &b| compare(&numbers[b as usize], &numbers[a as usize]));
    columns.truncate(count);
    columns.sort_unstable();
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kept_are_all_less_the_floor_of_the_share() {
        for (inputs, gamma, kept) in [
            (10, 0.0, 10),
            (10, 0.25, 8),
            (10, 0.5, 5),
            (7, 0.5, 4),
            (3, 0.33, 3),
            (3, 0.34, 2),
            (8, 0.999, 1),
            (1, 0.9, 1),
            (0, 0.5, 0),
            (5, 1.0 - f64::EPSILON / 2.0, 1),
            (1 << 20, 1.0 - f64::EPSILON / 2.0, 1),
            ((1 << 20) + 1, 1.0 - f64::EPSILON / 2.0, 1),
        ] {
            assert_eq!(kept_count(inputs, gamma), kept, "{inputs} columns, {gamma}");
        }
    }

    #[test]
    fn a_share_that_prunes_everything_is_refused() {
        for gamma in [1.0, -0.1, f64::NAN] {
            assert!(std::panic::catch_unwind(|| kept_count(4, gamma)).is_err(), "{gamma}");
        }
    }

    #[test]
    fn changes_are_summed_by_input_column_however_the_matrix_is_stored() {
        // [2 outputs, 3 inputs], and the same matrix transposed.
        let weight = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let snapshot = [1.0, 0.0, 4.0, 1.0, 5.0, 6.5];
        let transpose = |matrix: &[f32; 6]| [0, 3, 1, 4, 2, 5].map(|index: usize| matrix[index]);
        let mut changes = vec![0.0; 3];
        add_changes(&mut changes, &weight, &snapshot, false);
        assert_eq!(changes, [3.0, 2.0, 1.5]);
        add_changes(&mut changes, &transpose(&weight), &transpose(&snapshot), true);
        assert_eq!(changes, [6.0, 4.0, 3.0], "those of a second matrix are added");
    }

    #[test]
    fn a_layer_without_inputs_or_outputs_changes_nothing() {
        add_changes(&mut [], &[], &[], false);
        let mut changes = [0.0; 2];
        add_changes(&mut changes, &[], &[], true);
        assert_eq!(changes, [0.0; 2]);
    }

    #[test]
    fn the_highest_scores_are_kept_in_ascending_order_and_ties_by_place() {
        for (scores, count, kept) in [
            (vec![1.0, 3.0, 2.0, 4.0], 2, vec![1, 3]),
            (vec![4.0, 3.0, 2.0, 1.0], 3, vec![0, 1, 2]),
            (vec![1.0, 1.0, 1.0, 1.0], 2, vec![0, 1]),
            (vec![0.0, 1.0, 0.0, 1.0, 0.0], 3, vec![0, 1, 3]),
            (vec![2.0, 1.0], 0, vec![]),
            (vec![2.0, 1.0], 2, vec![0, 1]),
        ] {
            assert_eq!(Scores::of_all(scores.clone()).highest(count), kept, "{scores:?}");
        }
    }

    #[test]
    fn the_score_of_a_column_that_was_pruned_stays() {
        let mut scores = Scores::of_all(vec![5.0, 4.0, 3.0]);
        scores.refresh(&[1.0, 9.0, 0.0], &[true, false, false]);
        assert_eq!(scores, Scores(vec![1.0, 4.0, 3.0]));
        assert_eq!(scores.highest(2), [1, 2]);
    }

    #[test]
    fn random_columns_depend_on_seed_layer_and_period_alone() {
        let chosen = |seed, layer, period| random_columns(seed, layer, period, 100, 40);
        let first = chosen(1, 2, 3);
        assert_eq!(chosen(1, 2, 3), first);
        assert!(first.len() == 40 && first.is_sorted_by(|a, b| a < b) && first.iter().all(|&column| column < 100));
        for other in [chosen(2, 2, 3), chosen(1, 3, 3), chosen(1, 2, 4), chosen(2, 1, 3)] {
            assert_ne!(other, first);
        }
        let fewer = random_columns(1, 2, 3, 100, 20);
        assert!(fewer.iter().all(|column| first.contains(column)), "fewer are among more");
    }

    #[test]
    fn every_column_has_the_same_chance() {
        let mut counts = [0; 20];
        for period in 0..2000 {
            random_columns(7, 0, period, 20, 5).iter().for_each(|&column| counts[column as usize] += 1);
        }
        assert!(counts.iter().all(|count| (400..600).contains(count)), "{counts:?}");
    }
}
