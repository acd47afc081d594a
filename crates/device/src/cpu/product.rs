//! Not written yet.
use super::{Run, Team};
use crate::kernel::{Product};
impl Run for Product { fn run(&self, _team: &mut Team) { unimplemented!() } }
