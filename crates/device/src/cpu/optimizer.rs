//! Not written yet.
use super::{Run, Team};
use crate::kernel::{AdamW, SquaredNorm, ClipFactor};
impl Run for AdamW { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for SquaredNorm { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for ClipFactor { fn run(&self, _team: &mut Team) { unimplemented!() } }
