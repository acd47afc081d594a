//! Not written yet.
use super::{Run, Team};
use crate::kernel::{Activate, ActivateBackward, Gated, GatedBackward};
impl Run for Activate { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for ActivateBackward { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for Gated { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for GatedBackward { fn run(&self, _team: &mut Team) { unimplemented!() } }
