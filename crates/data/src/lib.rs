//! From records to batches: what a run reads, in which order, cut into rows of tokens or batches of images.
//!
//! ```text
//! Source → RecordOrder → Encoder → Packer → Loader::next
//! chunks   places  documents rows     (worker threads up to here)
//! ```
//!
//! Everything is a function of the seed and the place in the data. The number of workers changes nothing, and a
//! [`DataPosition`] taken after any row continues with the next one, bit for bit.
//!
//! This crate knows no models, devices or ranks. It opens no file: contents come in as bytes, or through a [`Source`].

mod alpaca;
mod best_fit;
mod byte_files;
mod continuation;
mod conversation;
mod corpus;
mod encode;
mod error;
mod images;
mod loader;
mod meter;
mod order;
mod packing;
mod pipeline;
mod python;
mod source;
mod template;
mod tokenizer;

pub use alpaca::alpaca_template;
pub use byte_files::byte_tokenizer_files;
pub use continuation::Continuation;
pub use corpus::Corpus;
pub use encode::{Document, Encoder, Format, Labels, OPTIONAL_COLUMNS};
pub use error::{Error, RecordAt};
pub use images::{Augment, BATCHES_READY, ImageBatch, ImageOptions, Images};
pub use loader::{Loader, LoaderOptions};
pub use order::{Cursor, DataPosition, OrderOptions, PackedGroup, RecordCounts, RecordOrder, Subset, WINDOW_CHUNKS};
pub use packing::{Fill, Packing, Row};
pub use pipeline::OnBadRecord;
pub use source::{Record, Source};
pub use template::{Clock, Template, Turns};
pub use tokenizer::{Encoded, Tokenizer, TokenizerConfig, Whole};

/// The label of a token whose successor does not count in the loss.
pub const IGNORE: u32 = u32::MAX;
