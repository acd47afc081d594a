//! Ranks that are threads of one process.
//!
//! ```text
//! world     what all ranks share: the first failure, who has left, the groups
//! meeting   members come together, act on one another's memory, and part
//! transfer  what a member does to that memory
//! card      the same in a card's memory
//! signal    waiting: briefly awake, then asleep
//! ```

mod card;
mod meeting;
mod signal;
mod transfer;
mod world;

pub(crate) use card::meet_on_card;
pub(crate) use meeting::{Meeting, Post, Visit};
pub(crate) use transfer::{Parcels, parcels, part_of, piece, rows_of};
pub use world::{LibraryOfRank, Options, World};
pub(crate) use world::{Place, Shared};
