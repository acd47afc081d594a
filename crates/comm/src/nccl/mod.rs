//! Collectives of ranks on different GPUs, connected by NCCL.
//!
//! ```text
//! steps  a member's part of a collective: transfers, and sums and copies on its own GPU
//! way    connects the members of a meeting when they first need it, and runs the steps
//! watch  a watchdog thread that ends transfers that take too long, and all of them once the run has failed
//! ```
//!
//! The hosts meet as they do on one GPU, so all members agree on a call before any of them issues it to NCCL, and none waits
//! there for a call that never comes. NCCL moves bytes and sums nothing. Each member receives the parts that it sums, adds them
//! in f32 in the order of the members and rounds once: the bits are those of ranks that share a GPU or a machine's memory, on
//! any number of links between the GPUs. As many bytes travel as in NCCL's rings; sums in switches and trees are given up.

mod steps;
mod watch;
mod way;

pub(crate) use watch::Watchdog;
pub(crate) use way::{End, Way, needs_nccl};
