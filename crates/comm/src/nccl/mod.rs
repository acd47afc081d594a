//! Ranks on cards of their own, which NCCL connects.
//!
//! ```text
//! steps  what a member does for a collective: transfers, and sums and copies on its own card
//! way    connects the members of a meeting when they first need it, and has steps done
//! watch  a thread that ends what takes too long, and everything once the run has failed
//! ```
//!
//! The hosts meet as they do for one card, so everybody issues the same before anybody issues it to NCCL, and nobody waits there
//! for a call that never comes. NCCL moves bytes and adds nothing. What is summed is sent to the member that sums it, who adds in
//! f32 in the order of the members and rounds once: the bits are those of ranks that share a card or a machine's memory, on any
//! number of links between the cards. As many bytes travel as in NCCL's rings; what switches and trees could do is given up.

mod steps;
mod watch;
mod way;

pub(crate) use watch::Watch;
pub(crate) use way::{End, Way, needs_nccl};
