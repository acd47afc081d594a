//! Not written yet.
use super::{Run, Team};
use crate::kernel::{Add, ColumnSum, Copy, Fill, GatherColumns, ScatterColumns};
impl Run for Add { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for ColumnSum { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for Copy { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for Fill { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for GatherColumns { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for ScatterColumns { fn run(&self, _team: &mut Team) { unimplemented!() } }
