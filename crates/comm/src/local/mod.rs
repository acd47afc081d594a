//! Ranks that are threads of one process.
//!
//! ```text
//! world     what all ranks share: the first failure, who has left, the groups
//! meeting   members come together, act on one another's memory, and part
//! transfer  what a member does to that memory
//! signal    waiting: briefly awake, then asleep
//! ```

mod meeting;
mod signal;
mod transfer;
mod world;

pub(crate) use meeting::{Meeting, Post, Visit};
pub(crate) use transfer::{Parcels, act};
pub use world::{Options, World};
pub(crate) use world::{Place, Shared};
