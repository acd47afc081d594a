//! Not written yet.
use super::{Run, Team};
use crate::kernel::{Attention, AttentionBackward};
impl Run for Attention { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for AttentionBackward { fn run(&self, _team: &mut Team) { unimplemented!() } }
