//! Less work than the model asks for: with [`prune`], linear layers compute with some of their input columns.
//!
//! [`intake`] says which layers can and which go together, [`selected`] gathers columns, and [`pruned_mask`] marks the elements
//! that updates skip.

pub(crate) mod intake;
pub(crate) mod prune;
pub(crate) mod pruned_mask;
pub(crate) mod selected;
