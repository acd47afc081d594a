//! Checkpoints: folders that can tell whether they are whole.
//!
//! A checkpoint is data files and `manifest.json`, which is written last and lists every file with its size and a digest for
//! each MiB of it. [`CheckpointWriter`] takes the digests while it writes; [`Checkpoint`] hands out no tensor before the
//! digests of its file were compared. The folder appears under its name as a [`NewFolder`](crate::NewFolder) does: whole and on
//! disk, or not at all. Digests find damage that happens afterwards, on the disk or in a copy.

mod manifest;
mod reader;
mod select;
mod verify;
mod writer;

pub use reader::Checkpoint;
pub use select::{Damaged, keep_newest, keep_newest_and, list, newest_good};
pub use writer::CheckpointWriter;
