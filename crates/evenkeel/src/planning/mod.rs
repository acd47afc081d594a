//! Plans: which strategy to run a job with on this machine, from measurements.

mod command;
mod job;
mod profile_file;

pub use command::{Arguments, choose, describe, run};
pub use job::Job;
