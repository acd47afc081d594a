//! A small run, and what it records.

use std::fs;
use std::path::Path;

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

pub fn lines(path: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}
