//! Ranks that are threads of one process.
//!
//! ```text
//! world     shared state: the first failure, who has left, the groups
//! meeting   members arrive, act on one another's memory, and leave
//! transfer  a member's part of a collective
//! gpu       meetings of ranks on GPUs
//! signal    waiting: briefly awake, then asleep
//! ```

mod gpu;
mod meeting;
mod signal;
mod transfer;
mod world;

pub(crate) use gpu::meet_on_gpu;
pub(crate) use meeting::{Meeting, Post, Visit};
pub(crate) use transfer::{Parcels, parcels, part_of, piece, rows_of};
pub use world::{LibraryOfRank, Options, World};
pub(crate) use world::{RankHandle, Shared};
