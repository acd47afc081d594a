//! The chain of units: [`build`] makes a [`model`] from a config, [`pass`] runs it plainly.
//!
//! A [`unit`](mod@unit) is an [`entry`] and a [`body`], a list of operations ([`op`]); the last one has the [`head`] instead of a
//! body. [`linear`], [`norm`], [`rotary`], [`dropout`], [`adapted`] and [`on_rows`], [`experts`] are parts of them; they read a [`batch`].

pub(crate) mod adapted;
pub(crate) mod batch;
pub(crate) mod body;
pub(crate) mod build;
pub(crate) mod dropout;
pub(crate) mod entry;
pub(crate) mod experts;
pub(crate) mod head;
pub(crate) mod linear;
pub(crate) mod model;
pub(crate) mod norm;
pub(crate) mod on_rows;
pub(crate) mod op;
pub mod pass;
pub(crate) mod rotary;
pub(crate) mod unit;
