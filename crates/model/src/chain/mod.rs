//! The chain of units: [`build`] makes a [`model`] from a config, [`pass`] runs it plainly.
//!
//! A [`unit`](mod@unit) is an [`entry`] and a [`body`], a list of operations ([`op`]); the last one has the [`head`] instead of a
//! body. [`attention`], [`linear`], [`lookup`], [`norm`], [`rotary`], [`dropout`], [`adapted`], [`on_rows`], [`experts`],
//! [`adapted_experts`], [`delta`] and [`pooler`] are parts of them; they read a [`batch`].

pub(crate) mod adapted;
pub(crate) mod adapted_experts;
pub(crate) mod attention;
pub(crate) mod balance;
pub(crate) mod batch;
pub(crate) mod body;
pub(crate) mod build;
pub(crate) mod delta;
pub(crate) mod dropout;
pub(crate) mod entry;
pub(crate) mod experts;
pub(crate) mod handed;
pub(crate) mod head;
pub(crate) mod linear;
pub(crate) mod lookup;
pub(crate) mod model;
pub(crate) mod norm;
pub(crate) mod on_rows;
pub(crate) mod op;
pub mod pass;
pub(crate) mod pooler;
pub(crate) mod rotary;
pub(crate) mod unit;
