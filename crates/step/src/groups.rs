//! A rank's memberships in the groups of its program.

use evenkeel_comm::{Communicator, Group};

use crate::program::Members;

/// Joins the groups, in their order.
pub fn join(communicator: &Communicator, groups: &[Members]) -> Vec<Group> {
    groups.iter().map(|members| communicator.group(&members.name, &members.ranks)).collect()
}
