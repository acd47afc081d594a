//! The other ranks of a run, for rules that look at whole parameters.

use evenkeel_comm::Group;
use evenkeel_device::{Device, Tensor};
use evenkeel_model::ParamId;

use crate::relocation::Route;

pub(crate) struct Peers<'a> {
    pub device: &'a Device,
    /// Groups whose sums, one after another, cover all ranks that keep other elements.
    pub keepers: Vec<&'a Group>,
    pub everybody: &'a Group,
    /// Whether this rank speaks for its elements of a parameter, if others keep the same.
    pub counts: &'a dyn Fn(ParamId) -> bool,
}

impl Peers<'_> {
    /// Replaces every rank's tensor by the sum over all ranks that keep other elements.
    pub fn sum(&self, tensor: &Tensor) {
        if self.keepers.is_empty() {
            return;
        }
        let (compute, comm) = (self.device.compute(), self.device.comm());
        comm.wait(&compute.record());
        self.keepers.iter().for_each(|group| drop(group.all_reduce(comm, tensor)));
        compute.wait(&comm.record());
    }

    pub fn relocate(&self, route: &Route, from: &[Option<Tensor>], to: &[Option<Tensor>]) {
        route.run(from, to, self.everybody, self.device);
    }
}
