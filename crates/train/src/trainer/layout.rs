//! The layout of state and work, and how it changes between two steps.

use evenkeel_device::Tensor;
use evenkeel_model::{Gradients, Model, ParamId, Parameters, Widths, widths_of};
use evenkeel_step::join;
use evenkeel_step::schedule::Chain;

use super::{Trainer, gradients};
use crate::migration::Migrated;
use crate::relocation::{Keeping, Route};

impl Trainer {
    /// The widths of the present cut.
    pub fn widths(&self) -> Widths {
        widths_of(self.shards.iter().map(|model| &model.shard))
    }

    /// Cuts the model differently, for good: weights and optimizer state move to the ranks that keep them from here on. All ranks
    /// do it together, between two steps. Nothing is computed anew, so training goes on as it would have. Migration ends, and so
    /// does pruning if state has moved.
    pub fn reshard(&mut self, shards: &[Model]) {
        let before = Keeping::of_all(&self.shards, &self.strategy);
        self.keep(shards, &before);
    }

    /// Keeps the rank's part of these shards from here on, instead of what ranks kept before.
    fn keep(&mut self, shards: &[Model], before: &[Keeping]) {
        let whole = shards.iter().all(|model| !model.shard.is_shared_by_samples());
        assert!(whole, "heads that ranks share by samples are kept by nobody");
        let keeping = Keeping::of_all(shards, &self.strategy);
        let model = self.strategy.model(shards, self.rank);
        if keeping != before {
            self.relocate(&model, [before, &keeping]);
            self.pruner = None;
        }
        self.chain = Chain::of(&shards[self.mesh().shard(self.rank)], &self.strategy, self.rank);
        self.all_chains.take();
        self.groups = join(&self.communicator, &self.chain.groups);
        self.model = model;
        self.shards = shards.to_vec();
        self.strategy.cut.widths = Some(self.widths());
        self.complete_values();
        self.compute_with(None);
    }

    /// Cuts the chain in other stages, for good: units move between the places of the pipeline as in [`Trainer::reshard`].
    pub fn recut(&mut self, cuts: Vec<usize>) {
        assert!(self.model.units_can_move(), "weights that lie in no bucket stay where they are");
        let before = Keeping::of_all(&self.shards, &self.strategy);
        self.strategy = self.strategy.clone().cut_at(&cuts);
        self.keep(&self.shards.clone(), &before);
    }

    /// Moves the state from the ranks that kept it to those that keep it from here on.
    fn relocate(&mut self, model: &Model, [before, keeping]: [&[Keeping]; 2]) {
        // Gradients and copies make room for state that exists twice while it moves.
        self.gradients = Gradients::none();
        let (dtype, split, compute) = (self.parameters.dtype(), self.parameters.split, self.device.compute().clone());
        let nothing = Parameters::none(dtype, split);
        let masters = std::mem::replace(&mut self.parameters, nothing).into_masters();
        self.parameters = Parameters::allocate(model, dtype, split, &compute);
        let moved = |is_moved: &dyn Fn(ParamId) -> bool, from: &[Option<Tensor>], to: &[Option<Tensor>]| {
            Route::new(before, keeping, self.rank, is_moved).run(from, to, &self.everybody, &self.device);
        };
        let masters: Vec<Option<Tensor>> = masters.into_iter().map(Some).collect();
        let new_masters: Vec<Option<Tensor>> =
            (0..model.buckets.len()).map(|bucket| Some(self.parameters.masters(bucket).clone())).collect();
        moved(&|_| true, &masters, &new_masters);
        drop(masters);
        let optimizer = self.optimizer.take().map(|optimizer| optimizer.moved(&self.parameters, &compute, moved));
        self.optimizer = optimizer.map(|optimizer| optimizer.among(model, || keeping.to_vec(), self.rank));
        self.parameters.refresh_copies(&compute);
        self.gradients = gradients(self.optimizer.is_some(), &self.parameters, &compute);
    }

    /// From here on, ranks compute their steps with these widths of heads and FFN columns, and keep what they have; `None`: they
    /// compute with what they keep. All ranks do so together, between two steps.
    pub fn migrate(&mut self, work: Option<Widths>) {
        assert!(
            work.is_none() || !self.parameters.split.splits_gradients(),
            "what ranks compute for one another with split gradients: expected stage 0 or 1 of ZeRO, found {}",
            self.strategy.zero.number()
        );
        let (dtype, shard) = (self.parameters.dtype(), self.model.shard.index);
        assert_eq!(self.shards[shard].shard, self.model.shard, "what this rank keeps is its shard of the mesh's");
        self.compute_with(
            work.and_then(|work| Migrated::new(&self.shards, self.chains(), &self.mesh(), work, dtype, shard)),
        );
    }

    /// From here on steps are computed with `migrated`, or with what ranks keep.
    fn compute_with(&mut self, migrated: Option<Migrated>) {
        let was_migrated = std::mem::replace(&mut self.migrated, migrated).is_some();
        let work = self.migrated.as_ref().map(Migrated::model);
        if let Some(pruner) = self.pruner.as_mut().filter(|_| was_migrated || work.is_some()) {
            pruner.compute_with(work.unwrap_or(&self.model), work.is_none());
        }
        self.programs.clear();
        self.evaluations.clear();
        // From here on the peak is that of this rank's new work.
        self.device.reset_peak();
    }
}
