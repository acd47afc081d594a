//! Folders of a crate that import each other, each pair with the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Crate, two of its folders, and why both know the other.
const MUTUAL: [(&str, [&str; 2], &str); 11] = [
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
    ("train", ["checkpoint", "ranks"], "a checkpoint is read from ranks, and loading one is a request to them"),
];

/// A source file with the folder that it belongs to at the top of its crate.
struct Source {
    top: String,
    text: String,
}

fn read(folder: &Path, root: &Path, found: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).expect("a folder of the workspace") {
        let path: PathBuf = entry.expect("an entry").path();
        if path.is_dir() {
            read(&path, root, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let inside = path.strip_prefix(root).expect("inside the crate");
            let top = inside.iter().next().expect("a name").to_string_lossy();
            let text = fs::read_to_string(&path).expect("source is text");
            let code = text.split("\n#[cfg(test)]").next().unwrap_or_default().to_owned();
            let is_tests = path.file_name().is_some_and(|name| name == "tests.rs");
            if !is_tests {
                found.push(Source { top: top.trim_end_matches(".rs").to_owned(), text: code });
            }
        }
    }
}

/// The folders of a crate that each folder imports.
fn imports(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut sources = Vec::new();
    read(root, root, &mut sources);
    sources.retain(|source| root.join(&source.top).is_dir());
    let tops: BTreeSet<String> = sources.iter().map(|source| source.top.clone()).collect();
    let mut imports: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for Source { top, text } in &sources {
        let named = text.split("crate::").skip(1).map(|rest| {
            rest.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect::<String>()
        });
        let others = named.filter(|name| tops.contains(name) && name != top);
        imports.entry(top.clone()).or_default().extend(others);
    }
    imports
}

#[test]
fn folders_of_a_crate_that_import_each_other_say_why() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates/").to_owned();
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(&crates).expect("crates/") {
        let folder = entry.expect("an entry").path();
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
