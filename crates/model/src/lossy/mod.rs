//! Less work than the model asks for: [`prune`] has linear layers compute with some of their input columns.
//!
//! [`intake`] says which layers can and which go together, [`selected`] gathers columns, and [`pruned_mask`] marks what
//! updates skip.

pub(crate) mod intake;
pub(crate) mod prune;
pub(crate) mod pruned_mask;
pub(crate) mod selected;
