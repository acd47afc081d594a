//! One [`Defect`] for each thing that can be wrong with a file, and the [`Error`] that adds which file it is.

use std::io;
use std::path::{Path, PathBuf};

use crate::limits;
use crate::{FileDtype, RecordPlace};

/// A defect of a file or folder.
#[derive(Debug, thiserror::Error)]
#[error("`{}`: {defect}", file.display())]
pub struct Error {
    /// The file or folder at fault.
    pub file: PathBuf,
    /// Its defect. Part of the message, therefore not also a source.
    pub defect: Defect,
}

/// A defect of a file. Text quoted from a file has its control characters escaped.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its variant and fields are")]
pub enum Defect {
    #[error("does not exist")]
    Missing,
    #[error("is a link to a file that does not exist")]
    BrokenLink,
    #[error("is not a folder")]
    NotAFolder,
    #[error("is {found}, expected a regular file")]
    NotARegularFile { found: &'static str },
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("is {found_bytes} bytes long, the limit is {limit_bytes}")]
    FileTooLarge { found_bytes: u64, limit_bytes: u64 },
    /// A missing file that need not be part of a model.
    #[error("does not exist")]
    NotThere,

    #[error("is not UTF-8 from byte {at} of its JSON on")]
    NotUtf8 { at: usize },
    #[error("is not UTF-8 text from byte {at} on")]
    NotText { at: usize },
    #[error("is not JSON: {detail}")]
    NotJson { detail: String },
    #[error("is not TOML in line {line}: {detail}")]
    NotToml { line: usize, detail: String },
    #[error("has the JSON key `{key}` twice in one object")]
    DuplicateKey { key: String },
    #[error("has JSON of the wrong form: {detail}")]
    WrongForm { detail: String },

    #[error("is a Git LFS pointer, not the file it points to")]
    GitLfsPointer,
    #[error("is {found_bytes} bytes long, a safetensors file has at least 8")]
    FileTooShort { found_bytes: u64 },
    #[error("announces a header of {found_bytes} bytes, the limit is {}", limits::HEADER_BYTES)]
    HeaderTooLarge { found_bytes: u64 },
    #[error("announces a header of {header_bytes} bytes, only {left_bytes} follow")]
    HeaderBeyondFile { header_bytes: u64, left_bytes: u64 },
    #[error("has a header that starts with byte {found:#04x}, expected `{{`")]
    HeaderStart { found: u8 },
    #[error("has an empty header, expected at least `{{}}`")]
    HeaderEmpty,
    #[error("has {found} tensors, the limit is {}", limits::TENSORS)]
    TooManyTensors { found: usize },
    #[error(
        "has a tensor named `{name}`, expected 1 to {} bytes without control characters",
        limits::TENSOR_NAME_BYTES
    )]
    TensorName { name: String },
    #[error("tensor `{tensor}` has dtype `{found}`, expected one of {}", FileDtype::list())]
    UnknownDtype { tensor: String, found: String },
    #[error("tensor `{tensor}` has {found} dims, the limit is {}", limits::DIMS)]
    TooManyDims { tensor: String, found: usize },
    #[error("tensor `{tensor}` is {dtype} {shape:?}, more bytes than a computer can count")]
    SizeOverflow { tensor: String, dtype: FileDtype, shape: Vec<usize> },
    #[error("tensor `{tensor}` begins at byte {begin} and ends before it, at {end}")]
    OffsetsReversed { tensor: String, begin: usize, end: usize },
    #[error("tensor `{tensor}` ends at byte {end}, the file holds {data_bytes} bytes of tensors")]
    TensorBeyondFile { tensor: String, end: usize, data_bytes: usize },
    #[error("tensor `{tensor}` is {dtype} {shape:?} and needs {expected_bytes} bytes, its offsets give {found_bytes}")]
    SizeMismatch { tensor: String, dtype: FileDtype, shape: Vec<usize>, expected_bytes: usize, found_bytes: usize },
    #[error("tensor `{tensor}` begins at byte {begin}, inside the tensor that ends at {previous_end}")]
    Overlap { tensor: String, begin: usize, previous_end: usize },
    #[error("tensor `{tensor}` begins at byte {begin}, but the tensor before it ends at {previous_end}")]
    Hole { tensor: String, begin: usize, previous_end: usize },
    #[error("its tensors end at byte {end}, the file holds {data_bytes} bytes of tensors")]
    TrailingBytes { end: usize, data_bytes: usize },

    #[error("has neither `model.safetensors` nor `model.safetensors.index.json`")]
    NoWeights,
    #[error("has weights in PyTorch's pickle format only, expected safetensors")]
    PickleWeights,
    #[error("names the shard `{shard}` for tensor `{tensor}`, expected a plain file name ending in `.safetensors`")]
    ShardName { tensor: String, shard: String },
    #[error("names {found} shards, the limit is {}", limits::SHARDS)]
    TooManyShards { found: usize },
    #[error("names {total} shards, of which {} missing: {}", are(missing.len()), first_few(missing))]
    MissingShards { missing: Vec<String>, total: usize },
    #[error("places tensor `{tensor}` in shard `{shard}`, which does not hold it")]
    TensorNotInShard { tensor: String, shard: String },

    #[error("tensor `{tensor}` has dtype {dtype}, which cannot be read as {wanted}")]
    CannotConvert { tensor: String, dtype: FileDtype, wanted: &'static str },
    #[error("tensor `{tensor}` holds the value {value}, which does not fit {wanted}")]
    DoesNotFit { tensor: String, value: i128, wanted: &'static str },

    #[error("cannot be written: {0}")]
    CannotBeWritten(io::Error),
    #[error("cannot be written: no space is left on its disk")]
    NoSpaceLeft,
    #[error("cannot be written: the user's quota on its disk is used up")]
    QuotaUsedUp,
    #[error("may not be written: {0}")]
    MayNotBeWritten(io::Error),
    #[error("exists already")]
    ExistsAlready,
    #[error("is not a folder, but stands where one must be")]
    InTheWay,
    #[error("names no file or folder")]
    NamesNothing,
    #[error("the name `{name}` cannot be used in a folder, expected a plain file name")]
    NotAFileName { name: String },
    #[error("tensor `{tensor}` is to be written as {dtype}, expected F32, BF16 or F16")]
    CannotWriteAs { tensor: String, dtype: FileDtype },
    #[error("tensor `{tensor}` holds the value {value}, which {dtype} turns into infinity")]
    BeyondDtype { tensor: String, value: f32, dtype: FileDtype },
    #[error("tensor `{tensor}` needs {expected_bytes} bytes, was given {found_bytes}")]
    TensorIncomplete { tensor: String, expected_bytes: usize, found_bytes: usize },
    #[error("was given {found_bytes} bytes after its last tensor")]
    BeyondLastTensor { found_bytes: usize },

    #[error("has no `manifest.json`")]
    NoManifest,
    #[error("does not begin with its own digest, as the manifest of a checkpoint does")]
    ManifestUnsigned,
    #[error("is damaged: its contents do not have the digest in its first line")]
    ManifestDamaged,
    #[error("is a manifest of version {found}, expected {known}")]
    ManifestVersion { found: u64, known: u64 },
    #[error("lists the file `{name}` twice")]
    ListedTwice { name: String },
    #[error("lists no file `{name}`")]
    NotListed { name: String },
    #[error("lists `{name}` with {bytes} bytes and {found} digests, expected one for each MiB begun")]
    DigestCount { name: String, bytes: u64, found: usize },
    #[error("lists `{name}` with a digest that is not that of its blocks")]
    DigestsDisagree { name: String },
    #[error("does not exist, but the checkpoint's manifest lists it")]
    ListedButMissing,
    #[error("is {found_bytes} bytes long, the checkpoint's manifest says {expected_bytes}")]
    NotAsListed { expected_bytes: u64, found_bytes: u64 },
    #[error("is damaged at bytes {begin}..{end}: its digest differs from the manifest's")]
    Damaged { begin: u64, end: u64 },
    #[error("is damaged at bytes {begin}..{end}: they cannot be read: {error}")]
    Unreadable { begin: u64, end: u64, error: io::Error },
    #[error("the name `{name}` is kept for the checkpoint's manifest")]
    ReservedName { name: String },
    #[error("cannot be finished: its file `{name}` was begun and not completed")]
    FileNotCompleted { name: String },

    #[error("has no data: no {expected}")]
    NoData { expected: &'static str },
    #[error("holds {found} files, the limit is {}", limits::DATA_FILES)]
    TooManyFiles { found: usize },
    #[error("was {expected_bytes} bytes long when it was opened and is {found_bytes} now")]
    Changed { expected_bytes: u64, found_bytes: u64 },
    #[error("{place} is not UTF-8")]
    RecordNotUtf8 { place: RecordPlace },
    #[error("the record at {place} is longer than the limit of {limit_bytes} bytes")]
    RecordTooLong { place: RecordPlace, limit_bytes: u64 },
    #[error("{place} is not JSON: {detail}")]
    RecordNotJson { place: RecordPlace, detail: String },
    #[error("{place} is {found}, expected a JSON object")]
    RecordNotObject { place: RecordPlace, found: &'static str },
    #[error("is one JSON list, expected a JSON object on every line")]
    ListNotLines,
    #[error("begins with a JSON object, expected a list of them")]
    ObjectNotList,
    #[error("is not a Parquet file that can be read: {detail}")]
    NotParquet { detail: String },
    #[error("has no column `{column}`; its columns are {present}")]
    NoSuchColumn { column: String, present: String },
    #[error("column `{column}` is {found}, expected text, numbers, booleans, or lists or groups of them")]
    ColumnType { column: String, found: String },
    #[error("column `{column}` is compressed with {found}, expected SNAPPY, GZIP or UNCOMPRESSED")]
    ColumnCompression { column: String, found: String },
    #[error("is not an image that can be read: {detail}")]
    NotAnImage { detail: String },
    #[error("is an image of {width} × {height} pixels, the limit is {}", limits::IMAGE_PIXELS)]
    ImageTooLarge { width: usize, height: usize },
    #[error("is named in characters that are not UTF-8")]
    NameNotUtf8,
    #[error("is {found_bytes} bytes long, expected a multiple of {record_bytes}, the size of an image and its label")]
    NotWholeImages { found_bytes: u64, record_bytes: u64 },
    #[error("{place} has label {found}, expected 0 to 9")]
    UnknownLabel { place: RecordPlace, found: u8 },
}

impl Error {
    /// Whether the machine is at fault (a disk that is full, failing or read-only) and not the file's contents or path.
    pub fn is_fault(&self) -> bool {
        match &self.defect {
            Defect::CannotBeWritten(_) | Defect::MayNotBeWritten(_) | Defect::NoSpaceLeft | Defect::QuotaUsedUp => true,
            Defect::Unreadable { .. } => true,
            // For these the user can name another file or path.
            Defect::Io(error) => !matches!(
                error.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename
            ),
            _ => false,
        }
    }

    /// What to do about it, for the `hint:` line.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match &self.defect {
            Defect::Missing | Defect::NotAFolder => {
                "a model is a folder with config.json and model.safetensors, or an index and its shards"
            }
            Defect::BrokenLink | Defect::MissingShards { .. } => "the download is incomplete, download the model again",
            Defect::FileTooShort { .. } | Defect::HeaderBeyondFile { .. } | Defect::TensorBeyondFile { .. } => {
                "the file looks cut short, download it again or compare its checksum"
            }
            Defect::GitLfsPointer => "fetch the real file with `git lfs pull`",
            Defect::HeaderTooLarge { .. } | Defect::HeaderStart { .. } => {
                "this does not look like a safetensors file, check what was downloaded"
            }
            Defect::UnknownDtype { .. } | Defect::CannotConvert { wanted: "f32", .. } => {
                "quantized checkpoints cannot be trained, use the model's F32, BF16 or F16 weights"
            }
            Defect::PickleWeights => {
                "pickle files can run code when loaded; save the model again with `safe_serialization=True`"
            }
            Defect::TensorNotInShard { .. } => "the index and the shards are from different checkpoints",
            Defect::NotThere => "check the path; a relative one begins where the command was started",
            Defect::NoSpaceLeft | Defect::QuotaUsedUp => {
                "free some space or write to another disk; what was there before is unchanged"
            }
            Defect::MayNotBeWritten(_) => "check the owner and the permissions of the folder it is in",
            Defect::ExistsAlready => "choose another name, or ask for it to be replaced",
            Defect::RecordTooLong { .. } => {
                "check the format and the separator of the data, or cut the record in several"
            }
            Defect::RecordNotObject { .. } => "in a JSON Lines file every line is an object with named fields",
            Defect::ListNotLines => "a file that holds a list of objects is read with data.source = \"json\"",
            Defect::ObjectNotList => {
                "one object on every line is read with data.source = \"jsonl\"; of a list within an object, save the list alone"
            }
            Defect::ColumnType { .. } => "name the columns that are needed, so that others are left out",
            Defect::ColumnCompression { .. } => "write the file again, compressed with snappy or gzip",
            Defect::Changed { .. } => "data must not change during a run; start it again",
            Defect::BeyondDtype { .. } => "save the model as BF16 or F32",
            Defect::NoManifest => "a checkpoint is a folder with a manifest; check the path",
            Defect::ManifestVersion { .. } => "it is from another version of Evenkeel; use that one",
            Defect::ManifestUnsigned
            | Defect::ManifestDamaged
            | Defect::ListedButMissing
            | Defect::NotAsListed { .. }
            | Defect::Damaged { .. }
            | Defect::Unreadable { .. } => "an older checkpoint may be whole",
            _ => return None,
        })
    }
}

impl Defect {
    pub(crate) fn of(self, file: &Path) -> Error {
        Error { file: file.to_owned(), defect: self }
    }

    /// The defect of a failed write.
    pub(crate) fn of_writing(error: io::Error) -> Defect {
        match error.kind() {
            io::ErrorKind::StorageFull => Defect::NoSpaceLeft,
            io::ErrorKind::QuotaExceeded => Defect::QuotaUsedUp,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Defect::MayNotBeWritten(error),
            io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty => Defect::ExistsAlready,
            io::ErrorKind::NotFound => Defect::NotThere,
            io::ErrorKind::NotADirectory => Defect::InTheWay,
            _ => Defect::CannotBeWritten(error),
        }
    }
}

/// Text from a file, made safe to print: terminals obey control characters, and a name can be megabytes long.
pub(crate) fn printable(text: &str) -> String {
    const CHARS: usize = 200;
    let mut shown = String::new();
    for character in text.chars().take(CHARS) {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    if text.chars().nth(CHARS).is_some() {
        shown.push('…');
    }
    shown
}

fn are(count: usize) -> String {
    if count == 1 { "1 is".to_owned() } else { format!("{count} are") }
}

fn first_few(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
