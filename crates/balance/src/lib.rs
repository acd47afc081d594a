//! Finds slow ranks and decides what to do about them: pure functions from measurements, costs and layouts to actions.
//!
//! ```text
//! observation  the time that each rank spent on each class of work in a step
//! watch        estimates speeds from observations: trimmed means, change-point test, shrinkage
//! overheads    estimates the work that does not grow with a rank's width
//! speeds       seconds of a rank for any width
//! statistics   trimmed mean, quantile
//! fill         divides a dim among ranks by speed
//! target       the best target of a mode: widths at home, widths at work, shares to prune
//! semi         splits a straggler's excess between migrating and pruning
//! balancer     acts when the gain is worth the cost
//! cut          the stages of a pipeline that take least time and fit
//! stages       cuts them anew when units or places turn out other than expected
//! selection    chooses the columns that a pruned layer keeps
//! tuning       every threshold, window and weight of the balancer
//! ```
//!
//! The same numbers give the same decisions, so a recorded run can be replayed. Nothing here knows devices, programs or files.

mod balancer;
mod cut;
mod fill;
mod observation;
mod overheads;
mod selection;
mod semi;
mod speeds;
mod stages;
mod statistics;
mod target;
mod tuning;
mod watch;

pub use evenkeel_widths::{Dim, Widths};

pub use balancer::{Balancer, Decision, Options, Prospect};
pub use cut::{best_cut, fits};
pub use fill::fill;
pub use observation::{Class, Observation};
pub use selection::{Scores, Selection, add_changes, kept_count, random_columns};
pub use speeds::Speeds;
pub use stages::{Fullness, Recut, StagePlace, StageWatch, Staging, UnitCost};
pub use statistics::trimmed_mean;
pub use target::{Mode, Rules, Target};
pub use tuning::Tuning;
pub use watch::Watch;
