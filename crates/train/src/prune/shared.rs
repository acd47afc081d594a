//! Selects columns if shards compute for one another. A shard then computes with other columns than it keeps: it asks others how
//! much those columns change, and the shard that keeps a column must know that it is pruned.
//!
//! All shards get all scores, a few numbers for each layer in each period, and select for all; so no shard has to announce its
//! selection.

use std::collections::HashMap;

use evenkeel_balance::{Scores, Selection};
use evenkeel_comm::Group;
use evenkeel_device::{DType, Device};
use evenkeel_model::{Intake, Model, ParamId, PrunedColumns, PrunedMask};
use evenkeel_store::Digest;

use super::{Place, Prune, Pruner};

/// Shards that compute with others than they keep.
#[derive(Clone, Copy)]
pub(crate) struct SharedWork<'a> {
    /// By shard: the model that it keeps, and the one that it computes with.
    pub home: &'a [Model],
    pub work: &'a [Model],
    /// One member per shard.
    pub group: &'a Group,
    pub device: &'a Device,
}

/// Scores of the columns that one shard keeps, by the first weight of their intake.
type ShardScores = HashMap<ParamId, Scores>;

/// The columns that one shard prunes, by intake of the shard that it computes with.
struct Pruned {
    shard: usize,
    columns: Vec<Vec<u32>>,
}

impl Pruner {
    pub(super) fn select_shared(&mut self, place: &Place, shared: &SharedWork) {
        let gammas = self.agree(shared.group);
        let scores = self.everybodys_scores(shared);
        let mut all_pruned: Vec<Pruned> = Vec::new();
        for (shard, work) in shared.work.iter().enumerate() {
            let (settings, is_own) = (Prune { gamma: gammas[shard], ..self.settings }, shard == shared.group.rank());
            if settings.gamma == 0.0 && !is_own {
                continue;
            }
            let mut columns = Vec::new();
            for (index, intake) in work.intakes().iter().enumerate() {
                let scores = scores.as_ref().map(|scores| work_scores(shared.home, scores, work, intake));
                let kept = settings.select(scores.as_ref(), index, self.period, intake.inputs);
                if is_own {
                    self.pruning.keep(place.queue, place.parameters.dtype(), index, &kept);
                }
                columns.push((0..intake.inputs as u32).filter(|column| kept.binary_search(column).is_err()).collect());
            }
            all_pruned.push(Pruned { shard, columns });
        }
        let mut left_out: Vec<PrunedColumns> = Vec::new();
        for Pruned { shard, columns } in &all_pruned {
            self.note_pruned(place.model, &shared.work[*shard], columns);
            let pruned = columns.iter().map(Vec::as_slice).collect();
            left_out.push(PrunedColumns { model: &shared.work[*shard], pruned });
        }
        if self.settings.freeze {
            self.mask = PrunedMask::new(place.queue, place.model, &left_out);
        }
    }

    /// By shard: the share that it prunes. Shards may differ in that and in nothing else.
    fn agree(&self, group: &Group) -> Vec<f64> {
        let rules = (Prune { gamma: 0.0, ..self.settings }, self.period, self.updates);
        let found = group.exchange(Digest::of(format!("{rules:?}").as_bytes()).short());
        let is_same = found.iter().all(|other| *other == found[0]);
        assert!(is_same, "ranks {:?} compute for one another and are pruned by different rules", group.ranks());
        group.exchange(self.settings.gamma.to_bits()).into_iter().map(f64::from_bits).collect()
    }

    /// By shard; `None` if selection is random or no shard has scores.
    fn everybodys_scores(&self, shared: &SharedWork) -> Option<Vec<ShardScores>> {
        let SharedWork { home, group, device, .. } = *shared;
        // A shard that keeps nothing has no scores.
        let has_scores = self.columns.iter().any(|columns| columns.scores.is_some());
        let some_have = group.exchange(has_scores.into()).contains(&1);
        if self.settings.selection == Selection::Random || !some_have {
            return None;
        }
        let intakes: Vec<Vec<Intake>> = home.iter().map(Model::intakes).collect();
        let inputs = |shards: &[Vec<Intake>]| shards.iter().flatten().map(|intake| intake.inputs).sum::<usize>();
        let mut numbers = vec![0.0f32; inputs(&intakes)];
        let own = self.columns.iter().flat_map(|columns| match &columns.scores {
            Some(scores) => scores.values().to_vec(),
            None => vec![0.0; columns.was_kept.len()],
        });
        let first = inputs(&intakes[..group.rank()]);
        numbers[first..].iter_mut().zip(own).for_each(|(number, score)| *number = score);
        let (compute, comm) = (device.compute(), device.comm());
        let tensor = compute.floats(1, numbers.len(), DType::F32, &numbers);
        comm.wait(&compute.record());
        // Every number comes from one shard and the others add zeros, so all shards get the same bits.
        group.all_reduce(comm, &tensor);
        compute.wait(&comm.record());
        let mut numbers = compute.read(&tensor).into_iter().map(f64::from);
        let mut of_intake = |intake: &Intake| {
            (intake.weights[0], Scores::of_all(numbers.by_ref().take(intake.inputs).collect::<Vec<f64>>()))
        };
        Some(intakes.iter().map(|intakes| intakes.iter().map(&mut of_intake).collect()).collect())
    }

    /// Notes that columns which another shard prunes were not kept.
    fn note_pruned(&mut self, home: &Model, work: &Model, pruned: &[Vec<u32>]) {
        for (intake, pruned) in work.intakes().iter().zip(pruned).filter(|(_, pruned)| !pruned.is_empty()) {
            let Some(index) = self.intakes.iter().position(|kept| kept.weights[0] == intake.weights[0]) else {
                continue;
            };
            let kept_columns = home_columns(home, work, intake);
            for column in pruned.iter().filter_map(|&column| kept_columns[column as usize]) {
                self.columns[index].was_kept[column] = false;
            }
        }
    }
}

/// How much the columns of a work shard's intake change: the sum over the home shards that keep some of its weights.
fn work_scores(home: &[Model], scores: &[ShardScores], work: &Model, intake: &Intake) -> Scores {
    let mut sums = vec![0.0; intake.inputs];
    for (model, scores) in home.iter().zip(scores) {
        let Some(scores) = scores.get(&intake.weights[0]) else { continue };
        for (sum, column) in sums.iter_mut().zip(home_columns(model, work, intake)) {
            *sum += column.map_or(0.0, |column| f64::from(scores.values()[column]));
        }
    }
    Scores::of_all(sums)
}

/// For each input column of a work shard's intake: the column of a home shard that it is, if that keeps any of it.
fn home_columns(home: &Model, work: &Model, intake: &Intake) -> Vec<Option<usize>> {
    let mut columns = vec![None; intake.inputs];
    let weight = intake.weights[0].0;
    for [kept, used] in home.specs[weight].slice.overlaps(&work.specs[weight].slice) {
        let [kept, used] = [kept, used].map(|region| if intake.transposed { region.rows } else { region.cols });
        kept.zip(used).for_each(|(kept, used)| columns[used] = Some(kept));
    }
    columns
}
