//! Who is slow, and what to do about it: pure functions from measurements, costs and layouts to actions.
//!
//! ```text
//! observation  what ranks spent on each kind of work in a step
//! watch        how fast each rank is at it: smoothed, and since when
//! fixed        what ranks do whatever their widths are
//! fill         how to divide work among ranks of given speeds
//! target       what a mode makes of speeds, costs and limits: widths at home, widths at work, shares to leave out
//! balancer     when it is worth it; holds still otherwise
//! semi         how much a straggler lends and how much it leaves out, where it may do both
//! selection    which columns a resized layer leaves out
//! ```
//!
//! Whoever is given the same numbers decides the same, so a recorded run can be replayed. Nothing here knows devices,
//! programs or files.

mod balancer;
mod fill;
mod fixed;
mod observation;
mod selection;
mod semi;
mod target;
mod watch;

pub use balancer::{Balancer, Decision, Options, Prospect};
pub use fill::fill;
pub use observation::{Class, Dim, Division, Observation};
pub use selection::{Scores, Selection, add_changes, kept_count, random_columns};
pub use target::{Mode, Rules, Target};
pub use watch::{Speeds, Watch, middle};
