//! The tail of a step: the norm of all gradients, the update, the exchange of updated values, and the norms of adapted rows.

use evenkeel_device::Stamp;
use evenkeel_model::ParamId;
use evenkeel_step::trace::Recording;
use evenkeel_step::{Lane, Task, ValueKind, Work, gather_values, measure_rows};

use super::Trainer;
use crate::optimizer::{Peers, Update};
use crate::prune::Pruner;

impl Trainer {
    /// The norm of the whole gradient, every parameter counted once, on all ranks the same.
    pub(super) fn measure_norm(&self, recording: Option<&mut Recording>, issued: impl FnMut(usize)) -> f64 {
        self.run_tail(None, recording, issued);
        let compute = self.device.compute();
        let squared_norm = compute.read(self.optimizer().add_up_squares(compute));
        (squared_norm[0] as f64).sqrt()
    }

    /// Updates what this rank keeps, and gathers the values that it computes with and others have updated.
    pub(super) fn update(&self, update: Update, recording: Option<&mut Recording>, issued: impl FnMut(usize)) {
        self.run_tail(Some(update), recording, issued);
    }

    /// Runs the tasks of the program's tail that measure the norm, or those that update. Calls `issued` with the place of each.
    fn run_tail(&self, update: Option<Update>, mut recording: Option<&mut Recording>, mut issued: impl FnMut(usize)) {
        let (program, compute, comm) = (self.program(), self.device.compute(), self.device.comm());
        let is_wanted = |task: &Task| matches!(task.work, Work::MeasureNorm | Work::SumNorm) == update.is_none();
        let tasks = program.tasks.iter().enumerate().skip(program.tail()).filter(|(_, task)| is_wanted(task));
        let mut last = Lane::Compute;
        for (index, task) in tasks {
            let lane = task.work.lane();
            let queue = if lane.exchanges() { comm } else { compute };
            match (last.exchanges(), lane.exchanges()) {
                (false, true) => comm.wait(&compute.record()),
                (true, false) => compute.wait(&comm.record()),
                _ => (),
            }
            let start = recording.is_some().then(|| queue.stamp());
            let came = self.run_task(task, update);
            if let (Some(recording), Some(start)) = (recording.as_deref_mut(), start) {
                recording.add(index, start, came, queue.stamp());
            }
            issued(index);
            last = lane;
        }
        if last.exchanges() {
            compute.wait(&comm.record());
        }
    }

    /// Returns the stamp at which the last member of an exchange comes.
    fn run_task(&self, task: &Task, update: Option<Update>) -> Option<Stamp> {
        let (compute, optimizer) = (self.device.compute(), self.optimizer());
        let group = || &self.groups[task.exchange.expect("an exchange has a group").group.0];
        match task.work {
            Work::MeasureNorm => {
                optimizer.measure_squares(compute, &self.parameters, &self.gradients, |id| self.counts(id));
                None
            }
            Work::SumNorm => Some(group().all_reduce(self.device.comm(), optimizer.squares())),
            Work::Update => {
                let update = update.expect("an update has its rate");
                let pruned = self.pruner.as_ref().map(Pruner::mask);
                let counts = |id| self.counts(id);
                let peers = (self.mesh().ranks() > 1).then(|| self.peers(&counts));
                optimizer.update_among(peers.as_ref(), compute, &self.parameters, &self.gradients, update, pruned);
                None
            }
            Work::GatherUpdated(bucket) => Some(gather_values(&self.parameters, bucket.0, group(), self.device.comm())),
            Work::MeasureRows => {
                self.model.measure_rows(&self.parameters, compute);
                for value in &task.frees {
                    if let ValueKind::ParametersGathered(bucket) = value.kind {
                        self.parameters.set_values(bucket.0, None);
                    }
                }
                None
            }
            Work::SumRows(bucket) => {
                let squares = self.parameters.values(bucket.0).expect("vectors are never split");
                Some(group().all_reduce(self.device.comm(), &squares))
            }
            other => unreachable!("{other:?} is not of the tail"),
        }
    }

    /// The ranks that keep the rest of the model.
    fn peers<'a>(&'a self, counts: &'a dyn Fn(ParamId) -> bool) -> Peers<'a> {
        Peers {
            device: &self.device,
            keepers: self.chain.keepers.iter().map(|group| &self.groups[group.0]).collect(),
            everybody: &self.everybody,
            counts,
        }
    }

    /// Completes the values after they were written other than by an update: those whose masters others keep, except those that
    /// are gathered as they are used, and the norms of adapted rows.
    pub(crate) fn complete_values(&self) {
        self.gather_values();
        let chain = &self.chain;
        measure_rows(&self.model, chain, &self.groups, &self.device, &self.parameters);
    }

    fn gather_values(&self) {
        let chain = &self.chain;
        let Some(group) = chain.data_group.map(|group| &self.groups[group.0]) else { return };
        let (compute, comm) = (self.device.compute(), self.device.comm());
        comm.wait(&compute.record());
        for (index, _) in chain.buckets.iter().enumerate().filter(|(_, bucket)| bucket.splits_update) {
            gather_values(&self.parameters, index, group, comm);
        }
        compute.wait(&comm.record());
    }
}
