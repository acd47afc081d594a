//! Configurations that are checked by the binary.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::process::{Command, Output};

pub const GOOD: &str = "[model]\npath = \"m\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\n";
pub const NEW: &str = "[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\n[model]\n";

/// Runs in a folder of its own with the text as `run.toml`.
pub fn config(text: &str, flags: &[&str]) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("run.toml"), text).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
    command.current_dir(folder.path()).args(["config", "run.toml"]).args(flags);
    command.output().expect("the binary starts")
}

pub fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).expect("text")
}

/// The configuration must be refused with exactly these lines.
pub fn check(text_of_file: &str, flags: &[&str], expected: &[&str]) {
    let output = config(text_of_file, flags);
    let found: Vec<&str> = text(&output.stderr).lines().collect();
    assert_eq!(found, expected, "\n{text_of_file}\n{flags:?}");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), ""));
}
