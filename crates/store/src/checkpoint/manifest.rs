//! `manifest.json`: the list of a checkpoint's files.
//!
//! ```text
//! {"digest":"…",
//! "version":1,
//! "body":…,
//! "files":[
//! {"name":"…","bytes":…,"digest":"…","blocks":["…",…]}
//! ]}
//! ```
//!
//! Its first line has a fixed form, so the reader can split it off before it trusts anything: the digest in it covers all bytes
//! after the line.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::digest::{BLOCK_BYTES, Digest, FileDigests};
use crate::error::printable;
use crate::write::check_name;
use crate::{Defect, json, limits, regular_file};

pub(super) const NAME: &str = "manifest.json";
const VERSION: u64 = 1;
const BEFORE_DIGEST: &[u8] = b"{\"digest\":\"";
const AFTER_DIGEST: &[u8] = b"\",\n";

/// A checked manifest.
#[derive(Debug)]
pub(super) struct Manifest {
    pub body: Value,
    pub files: Vec<ListedFile>,
}

/// A file of the checkpoint. Its name is plain, and it has as many blocks as its size needs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListedFile {
    pub name: String,
    pub bytes: u64,
    digest: Digest,
    pub blocks: Vec<Digest>,
}

impl ListedFile {
    pub fn new(name: String, FileDigests { bytes, blocks }: FileDigests) -> ListedFile {
        ListedFile { name, bytes, digest: Digest::of_blocks(&blocks), blocks }
    }

    fn check(&self) -> Result<(), Defect> {
        check_file_name(&self.name)?;
        if self.blocks.len() as u64 != self.bytes.div_ceil(BLOCK_BYTES as u64) {
            let name = printable(&self.name);
            let found = self.blocks.len();
            return Err(Defect::DigestCount { name, bytes: self.bytes, found });
        }
        if self.digest != Digest::of_blocks(&self.blocks) {
            return Err(Defect::DigestsDisagree { name: printable(&self.name) });
        }
        Ok(())
    }
}

/// Whether a data file may have this name, in a checkpoint that is written or one that is read.
pub(super) fn check_file_name(name: &str) -> Result<(), Defect> {
    check_name(name)?;
    match name {
        NAME => Err(Defect::ReservedName { name: NAME.to_owned() }),
        _ if name.contains('\\') => Err(Defect::NotAFileName { name: printable(name) }),
        _ => Ok(()),
    }
}

/// The text of a manifest, if a reader will accept it.
pub(super) fn write(body: &Value, files: &[ListedFile]) -> Result<Vec<u8>, Defect> {
    let listed: Vec<String> = files.iter().map(json_of).collect();
    let contents =
        format!("\"version\":{VERSION},\n\"body\":{},\n\"files\":[\n{}\n]}}\n", json_of(body), listed.join(",\n"));
    let digest = Digest::of(contents.as_bytes()).to_string();
    let text = [BEFORE_DIGEST, digest.as_bytes(), AFTER_DIGEST, contents.as_bytes()].concat();
    // A body nested too deep, or too many digests, must fail now and not when the checkpoint is read.
    parse(&text)?;
    Ok(text)
}

/// Reads the manifest of a checkpoint: checks its length, then its digest, then its contents.
pub(super) fn read(path: &Path) -> Result<Manifest, Defect> {
    parse(&regular_file::read_any(path, limits::MANIFEST_BYTES)?)
}

fn parse(text: &[u8]) -> Result<Manifest, Defect> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u64,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct RawManifest {
        #[serde(rename = "digest")]
        _digest: Digest,
        #[serde(rename = "version")]
        _version: u64,
        body: Value,
        files: Vec<ListedFile>,
    }
    if text.len() as u64 > limits::MANIFEST_BYTES {
        return Err(Defect::FileTooLarge { found_bytes: text.len() as u64, limit_bytes: limits::MANIFEST_BYTES });
    }
    let (digest, contents) = split(text).ok_or(Defect::ManifestUnsigned)?;
    if digest != Digest::of(contents) {
        return Err(Defect::ManifestDamaged);
    }
    let Versioned { version } = json::parse(text)?;
    if version != VERSION {
        return Err(Defect::ManifestVersion { found: version, known: VERSION });
    }
    let RawManifest { body, files, .. } = json::parse(text)?;
    let mut names = BTreeSet::new();
    for file in &files {
        file.check()?;
        if !names.insert(&file.name) {
            return Err(Defect::ListedTwice { name: printable(&file.name) });
        }
    }
    Ok(Manifest { body, files })
}

/// The digest in the first line, and all bytes after that line.
fn split(text: &[u8]) -> Option<(Digest, &[u8])> {
    let (digest, rest) = text.strip_prefix(BEFORE_DIGEST)?.split_first_chunk::<32>()?;
    Some((Digest::from_hex(digest)?, rest.strip_prefix(AFTER_DIGEST)?))
}

fn json_of(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("values of JSON and lists of files have a form that JSON can hold")
}
