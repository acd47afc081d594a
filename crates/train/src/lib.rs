//! Training: what turns gradients into better parameters.
//!
//! This crate opens no files and knows no network.

mod optimizer;

pub use optimizer::{AdamW, AdamWOptions, Update};
