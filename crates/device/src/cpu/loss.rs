//! Not written yet.
use super::{Run, Team};
use crate::kernel::{LossStats, LossMerge, LossBackward};
impl Run for LossStats { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for LossMerge { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for LossBackward { fn run(&self, _team: &mut Team) { unimplemented!() } }
