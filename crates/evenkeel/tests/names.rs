//! One word for one thing: no two public types of the workspace share a name without a reason.

#[path = "support/sources.rs"]
mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use sources::{crates, each_crate, rust_files};

/// Names that may be there several times, and why.
const SHARED: [(&str, &str); 13] = [
    ("Arguments", "every command has its own"),
    ("Error", "every crate has its own"),
    ("Options", "of a crate or a module, always with its path"),
    ("Sizes", "of a new model, and of a benchmark's step"),
    ("Source", "of records in files, of records to train on, and of settings"),
    ("Count", "of kernels' work on a device, and of exchanged bytes"),
    ("Counts", "all of those"),
    ("AdamW", "a kernel, and the rule that launches it"),
    ("Rotary", "a kernel, and a model's settings of it"),
    ("Fill", "a kernel, and how rows are packed"),
    ("Images", "a batch on its way to a device, and what makes them from files"),
    ("Format", "of a file, and of the records in it"),
    ("Keep", "by a unit in a pass, and by a line of a schedule"),
];

/// By name: the files that declare a public type of it.
fn public_types() -> BTreeMap<String, BTreeSet<PathBuf>> {
    let mut types: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for path in each_crate().iter().flat_map(|folder| rust_files(&folder.join("src"))) {
        let text = fs::read_to_string(&path).expect("source is text");
        let declared = text.lines().filter_map(|line| {
            let words = line.trim_start().strip_prefix("pub ")?;
            let name = ["struct ", "enum ", "trait "].iter().find_map(|kind| words.strip_prefix(kind))?;
            let name = name.split(|c: char| !c.is_alphanumeric()).next().filter(|name| !name.is_empty());
            // A macro's types have none.
            name.map(str::to_owned)
        });
        for name in declared {
            types.entry(name).or_default().insert(path.strip_prefix(crates()).expect("inside").to_owned());
        }
    }
    types
}

#[test]
fn no_two_public_types_share_a_name_without_a_reason() {
    let types = public_types();
    assert!(types.len() > 300, "{} types were found", types.len());
    let shared: BTreeMap<_, _> = types.iter().filter(|(_, files)| files.len() > 1).collect();
    let allowed: BTreeSet<&str> = SHARED.iter().map(|(name, _)| *name).collect();
    let unexplained: Vec<_> = shared.iter().filter(|(name, _)| !allowed.contains(name.as_str())).collect();
    assert!(unexplained.is_empty(), "give one of each another name: {unexplained:#?}");
    let settled: Vec<_> = allowed.iter().filter(|name| !shared.contains_key(&(**name).to_owned())).collect();
    assert!(settled.is_empty(), "no longer shared, so no longer listed: {settled:?}");
}
