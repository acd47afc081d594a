//! Linear attention by the gated delta rule, and what stands around it: short convolutions before, gated norms behind.

mod convolution;
mod norm;
mod parameters;
mod rule;
mod sources;
mod stretches;
mod work;

use super::{Run, Stream};
pub(super) use sources::sources;
pub(crate) use work::{delta_backward_work_len, delta_work_len};
