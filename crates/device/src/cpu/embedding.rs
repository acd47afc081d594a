//! Not written yet.
use super::{Run, Team};
use crate::kernel::{Embed, EmbedBackward};
impl Run for Embed { fn run(&self, _team: &mut Team) { unimplemented!() } }
impl Run for EmbedBackward { fn run(&self, _team: &mut Team) { unimplemented!() } }
