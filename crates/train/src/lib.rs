//! Training: what turns gradients into better parameters.
//!
//! This crate knows no files of its own and no network; it opens the ones through `store`, the other through `comm`.

mod optimizer;

pub use optimizer::{AdamW, AdamWOptions, Update};
