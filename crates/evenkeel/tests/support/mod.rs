//! A folder of its own for each test, and the binary run in it.

#![allow(dead_code, reason = "every test file uses its own part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// A run of a model that takes milliseconds a step.
pub const TINY: &str = r#"
[model]
hidden = 32
layers = 2
heads = 2
ffn = 48
tied = true

[data]
source = "synthetic"
records = 100_000
sequence = 64
holdout = 50

[train]
steps = 20
batch = 4
lr = 1e-2
warmup_steps = 2

[eval]
every = 10
batches = 2

[output]
checkpoint_every = 10

[sample]
prompts = ["1 + 1 ="]
tokens = 8
"#;

pub struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// With a configuration in `tiny.toml`.
    pub fn new(config: &str) -> Place {
        let place = Place { folder: tempfile::tempdir().unwrap() };
        fs::write(place.path("tiny.toml"), config).unwrap();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Asserts that a command is a mistake, and that its message has these words.
    #[track_caller]
    pub fn refused(&self, arguments: &[&str], expected: &[&str]) {
        let output = self.run(arguments);
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {told}");
        expected.iter().for_each(|words| assert!(told.contains(words), "{arguments:?}: {told}"));
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the binary starts")
    }

    /// Runs what must succeed.
    pub fn stdout(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).expect("text")
    }
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a run has written down so far; a line that it is just writing is left out.
pub fn metrics(path: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// The losses of a run, step by step.
pub fn losses(path: &Path) -> Vec<f64> {
    metrics(path).iter().filter_map(|line| line["loss"].as_f64()).collect()
}

/// Asserts that both have as many steps, none of them further off than `absolute` and `relative` of it allow.
#[track_caller]
pub fn compare_curves(what: &str, ours: &[f64], expected: &[f64], [absolute, relative]: [f64; 2]) {
    assert_eq!(ours.len(), expected.len(), "{what}: {ours:?}, expected {expected:?}");
    assert!(!ours.is_empty(), "{what}: no steps");
    for (step, (ours, expected)) in ours.iter().zip(expected).enumerate() {
        let is_close = (ours - expected).abs() <= absolute + relative * expected.abs();
        assert!(is_close, "{what}, step {}: {ours}, expected {expected}", step + 1);
    }
}

/// Waits for something that a process does, as long as that takes. False if the process ended before.
pub fn wait_for(child: &mut Child, mut is_so: impl FnMut() -> bool) -> bool {
    loop {
        let has_ended = child.try_wait().expect("a child").is_some();
        if is_so() {
            return true;
        }
        if has_ended {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
