//! Groups of ranks and the collectives between them.
//!
//! A [`Communicator`] is a rank's access to the ranks of a run; a [`Group`] is its membership in some of them. A collective is
//! issued on a queue and returns at once, like a kernel. The ranks of one process read and write one another's tensors in place
//! (`local`) and sum in the order of the members, so every member gets the same bits every time. Ranks that share a GPU do so
//! in its memory; for ranks on different GPUs NCCL moves the bytes (`nccl`), and they sum in the same order.
//!
//! Every wait ends: with an error when a rank aborts, fails, leaves or misses the deadline.
//!
//! This crate knows no models, no programs and no files.

mod call;
mod communicator;
mod counts;
mod group;
mod link;
mod local;
mod nccl;
mod ranks;

pub use call::ExchangeKind;
pub use communicator::Communicator;
pub use counts::{Count, Counts};
pub use group::Group;
pub use link::Link;
pub use local::{LibraryOfRank, Options, World};
pub use ranks::{RankFailure, run_ranks};
