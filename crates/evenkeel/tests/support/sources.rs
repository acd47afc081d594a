//! The sources of the workspace, for tests of its structure.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of all crates.
pub fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates/").to_owned()
}

/// The folders of the crates.
pub fn each_crate() -> Vec<PathBuf> {
    entries(&crates())
}

/// The Rust files below a folder.
pub fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let below = |path: PathBuf| match path.is_dir() {
        true => rust_files(&path),
        false => vec![path],
    };
    let files = entries(folder).into_iter().flat_map(below);
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder of the workspace");
    entries.map(|entry| entry.expect("an entry").path()).collect()
}
