//! A model in parts: [`shard`] cuts it, by itself or by a [`plan`], and in [`strip`]s where groups of heads are shared.
//!
//! [`layout`] says which slice of a parameter is where and how to get from one layout to another; [`migration`] is work that
//! shards do for one another.

pub(crate) mod layout;
pub(crate) mod migration;
pub(crate) mod plan;
pub(crate) mod shard;
pub(crate) mod strip;
