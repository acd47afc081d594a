//! Every file Evenkeel opens is opened here: Hugging Face model folders with `config.json`, safetensors files and the
//! index of a sharded checkpoint; the files and folders that a run writes; its checkpoints; the data that it trains on.
//!
//! A model folder comes from strangers, so [`Folder::open`] and [`SafeTensorsFile::open`] check everything before they return:
//! lengths, then bounds, then contents. Callers can trust the result, and nothing above this crate checks a file again. Tensors
//! stay in the memory map; their bytes are converted straight into the caller's buffer.
//!
//! This crate knows no architectures (it never looks inside the config), no layouts and no ranks (it reads the block it is
//! asked for), no devices and none of their tensors. It writes no message to a terminal; its errors are for the binary to
//! print.

#![deny(missing_docs)]

pub mod checkpoint;
mod config;
mod convert;
mod dataset;
mod digest;
mod disk;
mod dtype;
mod error;
mod folder;
mod header;
mod index;
mod json;
mod limits;
mod nearest;
mod regular_file;
mod safetensors_file;
mod shortened;
mod tensor;
mod text_file;
mod write;

pub use config::{DESCRIPTION, has_description, line_of_description, read_config};
pub use convert::Element;
pub use dataset::{Format, Record, RecordOrigin, RecordPlace, Source, SourceSpec, is_json_list};
pub use digest::Digest;
#[cfg(feature = "faults")]
pub use disk::faults;
pub use dtype::FileDtype;
pub use error::{Defect, Error};
pub use folder::Folder;
pub use nearest::nearest;
pub use safetensors_file::SafeTensorsFile;
pub use shortened::shortened;
pub use tensor::RawTensor;
pub use text_file::{read_bytes, read_json, read_text};
pub use write::{
    FileWriter, FolderLock, LogFile, NewFolder, Recovery, SHARD_BYTES, SafeTensorsWriter, TensorEntry, WeightShard,
    copy_file, cut_in_shards, exists, files, recover, recover_all, remove, save_model, save_tensors, subfolders,
    write_file_atomically, write_json,
};
