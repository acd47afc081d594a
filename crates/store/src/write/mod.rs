//! The writing half. A file or folder appears under its name complete and on disk, or not at all: a killed run, a loss of power
//! or a full disk leaves what was there before.
//!
//! Every change to a disk is made by [`disk`](crate::disk), so that tests can fail each of them and lose each of them.

mod atomic;
mod copy;
mod model;
mod new_folder;
mod recover;
mod round;
mod run_folder;
mod safetensors_writer;
mod target;

pub use atomic::{FileWriter, write_file_atomically, write_json};
pub use copy::copy_file;
pub use model::{SHARD_BYTES, WeightShard, cut_in_shards, save_model, save_tensors};
pub use new_folder::NewFolder;
pub(crate) use new_folder::check_name;
pub use recover::{Recovery, recover, recover_all};
pub use run_folder::{FolderLock, LogFile, exists, files, remove, subfolders};
pub use safetensors_writer::{SafeTensorsWriter, TensorEntry};
