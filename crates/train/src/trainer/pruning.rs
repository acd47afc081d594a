//! Pruning of a rank's steps, and its part of checkpoints.

use evenkeel_model::{Model, Pruning, Widths};

use super::Trainer;
use crate::Error;
use crate::optimizer::Optimizer;
use crate::prune::{Periods, Place, Prune, Pruner, Remembered, SharedWork, Told};

impl Trainer {
    /// Prunes this rank's linear layers from the next step on: they compute with some of their input columns only; `None`: with
    /// all of them again. Other ranks may do otherwise, except those that hold the same shard for other samples: they are told
    /// the same at the same time. If ranks compute for one another, all are pruned, by shares of their own. Evaluations compute
    /// with all columns.
    pub fn prune(&mut self, prune: Option<Prune>) {
        assert!(
            !self.parameters.split.splits_state(),
            "pruned layers need their optimizer state whole: parallel.zero = 0"
        );
        if let (Some(_), Some(rule)) = (prune, self.optimizer.as_ref().map(Optimizer::rule)) {
            let name = rule.name();
            assert!(
                rule.is_elementwise(),
                "pruned layers need an optimizer that can leave elements out, {name} cannot"
            );
        }
        if let Some(group) = self.data_group() {
            let settings = group.exchange(Prune::digest(prune.as_ref()));
            let is_same = settings.iter().all(|other| *other == settings[0]);
            assert!(is_same, "ranks {:?} hold the same shard and are pruned differently", group.ranks());
        }
        self.pruner = prune.map(|prune| {
            let before = self.pruner.take();
            let pruner = before.unwrap_or_else(|| {
                let pruner = Pruner::new(&self.model, prune, self.mesh().replica(self.rank) == 0);
                let mut pruner = pruner.restored(self.remembered.take(), &self.widths());
                if let Some(migrated) = &self.migrated {
                    pruner.compute_with(migrated.model(), false);
                }
                pruner
            });
            pruner.with(prune, &self.place())
        });
    }

    /// The inputs of linear layers that this rank computes with.
    pub fn pruning(&self) -> Option<&Pruning> {
        self.pruner.as_ref().map(Pruner::pruning)
    }

    /// The periods for a checkpoint, to continue with the same selections; `None` if nothing is pruned.
    pub(crate) fn periods(&self) -> Option<Periods> {
        self.pruner.as_ref().map(Pruner::periods)
    }

    /// This rank's columns for a checkpoint, if it speaks for them.
    pub(crate) fn told(&self) -> Vec<Told<'_>> {
        let pruner = self.pruner.as_ref().filter(|_| self.mesh().replica(self.rank) == 0);
        pruner.map_or_else(Vec::new, |pruner| pruner.told(&self.model))
    }

    /// Remembers what `read` finds in a checkpoint whose ranks had these widths, for a model of such a shard. Only ranks that
    /// also have these widths when they are pruned can use it. If shards hold the same heads, widths do not say which.
    pub(crate) fn remember(
        &mut self,
        widths: &Widths,
        read: impl FnOnce(&Model) -> Result<Remembered, Error>,
    ) -> Result<(), Error> {
        let shard = &self.model.shard;
        let holds_own_heads = self.model.config.kv_heads >= shard.count && !widths.share_heads_by_samples();
        if !holds_own_heads || !self.model.config.can_be_cut(widths, shard.count) {
            return Ok(());
        }
        let model = self.model.cut(&shard.cut_of(widths.clone())).expect("widths that fit").swap_remove(shard.index);
        self.remembered = Some(read(&model)?);
        Ok(())
    }

    /// The inputs of a selection of columns.
    pub(super) fn place(&self) -> Place<'_> {
        let shared = self.migrated.as_ref().map(|migrated| SharedWork {
            home: &self.shards,
            work: &migrated.shards,
            group: &self.groups[0],
            device: &self.device,
        });
        Place { queue: self.device.compute(), model: &self.model, parameters: &self.parameters, shared }
    }
}
