//! Not written yet.
use super::{Run, Team};
use crate::kernel::{Rotary};
impl Run for Rotary { fn run(&self, _team: &mut Team) { unimplemented!() } }
