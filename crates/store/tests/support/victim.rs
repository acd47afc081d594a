//! A process that writes until it is killed. It announces each operation on its folder, so the test kills it after a number of
//! operations and needs no clock.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use evenkeel_store::faults::{self, DiskWatch};

const PLACE: &str = "EVENKEEL_TEST_PLACE";
const OPERATION: &str = "about to ";

/// The folder in which this process must write until it is killed, announcing each operation; `None` in an ordinary test
/// process.
pub fn at_work() -> Option<(PathBuf, DiskWatch)> {
    let Some(root) = env::var_os(PLACE).map(PathBuf::from) else {
        println!("skipped: only another test gives this one something to do");
        return None;
    };
    let watch = faults::watch(&root, |operation| {
        say(&format!("{OPERATION}{}", operation.path().display()));
        Ok(())
    });
    Some((root, watch))
}

/// Sends a line to the test that started this process.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{line}").and_then(|()| out.flush()).unwrap();
}

/// Runs the `victim` of this test binary below `root`, kills it after the given number of operations, and returns its output.
pub fn kill_after(root: &Path, operations: usize) -> Vec<String> {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "victim", "--nocapture"])
        .env(PLACE, root)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut said = Vec::new();
    let mut left = operations;
    while left > 0 {
        let line = lines.next().expect("it works until it is killed");
        left -= usize::from(line.starts_with(OPERATION));
        said.push(line);
    }
    child.kill().unwrap();
    said.extend(lines);
    let status = child.wait().unwrap();
    assert_eq!(status.code(), None, "it ended by itself");
    said
}
