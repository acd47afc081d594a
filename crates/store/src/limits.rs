//! Bounds on what a file may hold. Real checkpoints stay far below each; a file above one is broken or hostile.

/// The safetensors format's own limit.
pub(crate) const HEADER_BYTES: u64 = 100_000_000;

/// A mixture of 384 experts in 61 layers has about 140,000 tensors, and it is spread over dozens of files.
pub(crate) const TENSORS: usize = 262_144;

/// A three-dimensional convolution has 5.
pub(crate) const DIMS: usize = 8;

pub(crate) const TENSOR_NAME_BYTES: usize = 1024;

/// Classifiers with thousands of labels carry them all in `config.json`, about a megabyte.
pub(crate) const CONFIG_BYTES: u64 = 16 << 20;

pub(crate) const INDEX_BYTES: u64 = 64 << 20;

/// Each shard is one memory map, and Linux gives a process 65,530.
pub(crate) const SHARDS: usize = 10_000;

/// ImageNet with all its classes has 14 million images.
pub(crate) const DATA_FILES: usize = 1 << 25;

/// A table of a thousand columns and ten thousand row groups needs about this much.
pub(crate) const PARQUET_FOOTER_BYTES: u64 = 1 << 30;

/// Groups within each other; a list is two of them. JSON, which rows become, is bounded at 128.
pub(crate) const PARQUET_DEPTH: usize = 60;

/// The largest cameras have 150 million; each takes 3 bytes here.
pub(crate) const IMAGE_PIXELS: usize = 1 << 26;

/// The digests of two terabytes need about this much.
pub(crate) const MANIFEST_BYTES: u64 = 64 << 20;
