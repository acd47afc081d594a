//! Folders of a crate that import each other, each pair with the reason.

#[path = "support/sources.rs"]
#[allow(dead_code, reason = "each test file uses its part")]
mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use sources::{each_crate, rust_files};

/// Crate, two of its folders, and why both know the other.
const MUTUAL: [(&str, [&str; 2], &str); 14] = [
    (
        "comm",
        ["local", "nccl"],
        "members meet in local whatever carries their bytes, and NCCL does what a meeting agreed on",
    ),
    ("device", ["cpu", "kernel"], "the enum of all kernels has each run on a team, which runs kernels"),
    ("device", ["cuda", "kernel"], "the enum of all kernels has each run on a stream, which runs kernels"),
    (
        "model",
        ["chain", "config"],
        "a config holds the settings of dropout and rotary tables, and a chain is built from a config",
    ),
    (
        "model",
        ["chain", "generation"],
        "a batch carries the cache that its attention reads, and a generator runs the chain",
    ),
    ("model", ["chain", "lossy"], "linear operations compute pruned, and pruning is planned from a chain's operations"),
    (
        "model",
        ["chain", "parameters"],
        "operations read values and add gradients, and a model's list of parameters is laid out in buckets",
    ),
    (
        "model",
        ["chain", "sharding"],
        "a chain is built for a shard, and plans and migrations are of the chains of all shards",
    ),
    (
        "model",
        ["parameters", "sharding"],
        "parameters are laid out by slices, and a migration names the parameters that it moves",
    ),
    (
        "train",
        ["checkpoint", "prune"],
        "a checkpoint keeps the selections of pruned columns, and a pruner goes on with them",
    ),
    (
        "model",
        ["adapter", "chain"],
        "a config says which layers are adapted, and a saved adapter is compared with the chain",
    ),
    ("model", ["adapter", "parameters"], "parameters are loaded from a saved adapter, which names them"),
    (
        "model",
        ["nf4", "parameters"],
        "parameters hold weights in 4 bits, and a packed weight is a shard's part of a parameter",
    ),
    ("train", ["checkpoint", "ranks"], "a checkpoint is read from ranks, and loading one is a request to them"),
];

/// The folder at the top of a crate that each of its files belongs to, with the file's code.
fn files_by_folder(root: &Path) -> Vec<(String, String)> {
    let of_file = |path: PathBuf| {
        let inside = path.strip_prefix(root).expect("inside the crate");
        let folder = inside.iter().next().filter(|name| root.join(name).is_dir())?.to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).expect("source is text");
        let code = text.split("\n#[cfg(test)]").next().unwrap_or_default().to_owned();
        (!path.ends_with("tests.rs")).then_some((folder, code))
    };
    rust_files(root).into_iter().filter_map(of_file).collect()
}

/// The folders of a crate that each folder imports.
fn imports(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let files = files_by_folder(root);
    let folders: BTreeSet<&String> = files.iter().map(|(folder, _)| folder).collect();
    let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (folder, code) in &files {
        let is_of_name = |letter: &char| letter.is_alphanumeric() || *letter == '_';
        let named = code.split("crate::").skip(1).map(|rest| rest.chars().take_while(is_of_name).collect::<String>());
        let others = named.filter(|name| folders.contains(name) && name != folder);
        imports.entry(folder.clone()).or_default().extend(others);
    }
    imports
}

#[test]
fn folders_of_a_crate_that_import_each_other_say_why() {
    let mut found = BTreeSet::new();
    for folder in each_crate() {
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let imports = imports(&folder.join("src"));
        for (one, others) in &imports {
            for other in others.iter().filter(|other| one < *other) {
                if imports.get(other).is_some_and(|back| back.contains(one)) {
                    found.insert((name.clone(), one.clone(), other.clone()));
                }
            }
        }
    }
    let explained: BTreeSet<_> =
        MUTUAL.iter().map(|(name, [one, other], _)| (name.to_string(), one.to_string(), other.to_string())).collect();
    let unexplained: Vec<_> = found.difference(&explained).collect();
    assert!(unexplained.is_empty(), "take one of the imports away, or say why both are there: {unexplained:#?}");
    let settled: Vec<_> = explained.difference(&found).collect();
    assert!(settled.is_empty(), "no longer mutual, so no longer listed: {settled:#?}");
}
