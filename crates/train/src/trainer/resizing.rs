//! What a rank leaves out of its steps, and what checkpoints keep of that.

use evenkeel_model::{Cut, Model, Resizing, Widths};

use super::Trainer;
use crate::Error;
use crate::optimizer::Optimizer;
use crate::resize::{Periods, Place, Remembered, Resize, Resizer, SharedWork, Told};

impl Trainer {
    /// Has this rank's linear layers compute with some of their input columns only, from the next step on, or with all of them
    /// again. Other ranks may do otherwise, but for those that hold the same shard for other samples: they are told the same at
    /// the same time; and where ranks compute for one another, all are resized, by shares of their own. Evaluations compute with
    /// all columns.
    pub fn resize(&mut self, resize: Option<Resize>) {
        assert!(
            !self.parameters.split.splits_state(),
            "resized layers need their optimizer state whole: parallel.zero = 0"
        );
        if let (Some(_), Some(rule)) = (resize, self.optimizer.as_ref().map(Optimizer::rule)) {
            let name = rule.name();
            assert!(
                rule.is_elementwise(),
                "resized layers need an optimizer that can leave elements out, {name} cannot"
            );
        }
        if let Some(group) = self.data_group() {
            let settings = group.exchange(Resize::digest(resize.as_ref()));
            let is_same = settings.iter().all(|other| *other == settings[0]);
            assert!(is_same, "ranks {:?} hold the same shard and are resized differently", group.ranks());
        }
        self.resizer = resize.map(|resize| {
            let before = self.resizer.take();
            let resizer = before.unwrap_or_else(|| {
                let resizer = Resizer::new(&self.model, resize, self.mesh().replica(self.rank) == 0);
                let mut resizer = resizer.restored(self.remembered.take(), &self.widths());
                if let Some(migrated) = &self.migrated {
                    resizer.compute_with(migrated.model(), false);
                }
                resizer
            });
            resizer.with(resize, &self.place())
        });
    }

    /// What of the linear layers' inputs this rank computes with.
    pub fn resizing(&self) -> Option<&Resizing> {
        self.resizer.as_ref().map(Resizer::resizing)
    }

    /// What a checkpoint needs to go on with the same selections: nothing where nothing is resized.
    pub(crate) fn periods(&self) -> Option<Periods> {
        self.resizer.as_ref().map(Resizer::periods)
    }

    /// The same of this rank's columns, where it speaks for them.
    pub(crate) fn told(&self) -> Vec<Told<'_>> {
        let resizer = self.resizer.as_ref().filter(|_| self.mesh().replica(self.rank) == 0);
        resizer.map_or_else(Vec::new, |resizer| resizer.told(&self.model))
    }

    /// Takes in what `read` finds in a checkpoint whose ranks had these widths, for a model of such a shard. Only ranks that
    /// have them, too, when they are resized can use it. Where shards hold the same heads, widths do not say which.
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
        let cut = Cut {
            widths: Some(widths.clone()),
            split_sequence: shard.split_sequence,
            uncut: shard.uncut.clone(),
            ..Cut::even(shard.count)
        };
        let model = self.model.cut(&cut).expect("widths that fit").swap_remove(shard.index);
        self.remembered = Some(read(&model)?);
        Ok(())
    }

    /// What columns to leave out are selected for.
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
