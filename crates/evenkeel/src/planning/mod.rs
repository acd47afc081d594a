//! Plans: how a job runs on this machine by any strategy, and which is the fastest.

mod choice;
mod forecast;
mod job;
mod profile_file;

pub use choice::{JudgedStep, Plan, choose, describe, measured_plan, shared_cores};
pub use forecast::Forecast;
pub use job::Job;
