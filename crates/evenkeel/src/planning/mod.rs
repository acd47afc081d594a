//! Plans: how a job runs on this machine by any strategy, and which is the fastest.

mod bars;
mod choice;
mod finals;
mod forecast;
mod job;
mod judging;
mod profile_file;
mod sample;

pub use bars::memory_bars;
pub use choice::{
    JudgedStep, Plan, TimedStep, choose, describe, help, looked_at, measured_plan, plan_by_profile, published_plan,
    shared_cores, speeds, timeline,
};
pub use forecast::Forecast;
pub use job::{Job, Seen};
pub use judging::{Judging, Source};
