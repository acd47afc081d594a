//! The CPU device: two worker threads, each an in-order queue; the compute worker leads a team of the rank's cores.
//!
//! A kernel divides its work into tasks by shape alone and never learns how many threads there are, so its result has
//! the same bits on one core and on many.

mod features;
mod matrix;
mod memory;
mod simd;
mod team;
mod worker;
mod working;

mod activation;
mod adafactor;
mod attention;
mod balance;
mod cached_attention;
mod clamped_gate;
mod delta;
mod elementwise;
mod embedding;
mod expert_biases;
mod experts;
mod loss;
mod magnitude;
mod math;
mod muon;
mod nf4;
mod norm;
mod optimizer;
mod product;
mod random;
mod reduction;
mod rotary;
mod rows;
mod selected_rows;

pub use features::{CpuReport, allowed_cores, core_flops_per_s, cpu_report};
pub(crate) use reduction::sum;
pub(crate) use team::Team;
pub use worker::CpuOptions;
pub(crate) use worker::{CpuBackend, Flag};
pub use working::WorkingMemory;

/// A kernel's computation on this device.
pub(crate) trait Run {
    fn run(&self, team: &mut Team);

    /// The memory that the team needs for it on this CPU.
    fn working_memory(&self) -> WorkingMemory {
        WorkingMemory::default()
    }
}
