//! Runs with optimizers other than AdamW, through the binary.

mod support;

use std::fs;

use support::{Place, stderr};

const TINY: &str = r#"
[model]
hidden = 32
layers = 2
heads = 2
ffn = 48
tied = true

[data]
source = "synthetic"
records = 100_000
sequence = 32

[train]
steps = 12
batch = 4
warmup_steps = 2
lr_decay = "constant"

[output]
checkpoint_every = 6
"#;

/// Each with a learning rate that suits it, and ranks of its own kind.
const RUNS: [(&str, &str, &[&str]); 4] = [
    ("sgd", "0.1", &["--dp", "2", "--set", "parallel.zero=3"]),
    ("lion", "1e-3", &["--tp", "2"]),
    ("adafactor", "3e-2", &["--dp", "2", "--set", "parallel.zero=2"]),
    ("muon", "1e-2", &["--tp", "2"]),
];

#[test]
fn every_optimizer_learns_and_a_resumed_run_ends_with_the_bytes_of_a_straight_one() {
    let place = Place::new(TINY);
    for (name, lr, ranks) in RUNS {
        let optimizer = format!("train.optimizer={name}");
        let train = |output: &str, more: &[&str]| {
            let run = ["train", "tiny.toml", "--lr", lr, "--set", &optimizer, "--output", output];
            place.stdout(&[&run, ranks, more].concat())
        };
        let straight = format!("{name}-straight");
        train(&straight, &[]);
        let metrics = fs::read_to_string(place.path(&straight).join("metrics.jsonl")).unwrap();
        let losses: Vec<f64> = metrics
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64())
            .collect();
        assert!(losses[11] < losses[0] - 0.1, "{name} learns: {losses:?}");
        let resumed = format!("{name}-resumed");
        train(&resumed, &["--steps", "6"]);
        train(&resumed, &["--resume"]);
        let weights = |run: &str| fs::read(place.path(run).join("model/model.safetensors")).unwrap();
        assert!(weights(&straight) == weights(&resumed), "{name}");
        let refused = place.run(&["train", "tiny.toml", "--output", &resumed, "--resume", "--steps", "20"]);
        let said = stderr(&refused);
        assert_eq!(refused.status.code(), Some(2), "{said}");
        let expected = format!("holds the state of the optimizer \"{name}\", this run's is \"adamw\"");
        assert!(said.contains(&expected) && said.contains("hint: "), "{said}");
    }
}

#[test]
fn inspect_tells_the_memory_that_an_optimizer_takes() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--steps", "1", "--output", "run"]);
    let state_kib = |optimizer: &str| -> f64 {
        let said = place.stdout(&["inspect", "run/model", "--sequence", "16", "--optimizer", optimizer]);
        let row = said.lines().find(|line| line.starts_with("f32")).expect("a row of sizes");
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(cells[3], "KiB", "{row}");
        cells[2].parse().expect("a number")
    };
    let sizes = ["adafactor", "lion", "muon", "adamw"].map(state_kib);
    assert!(sizes.is_sorted() && sizes[0] < 0.6 * sizes[3], "{sizes:?}");
    assert_eq!(state_kib("sgd"), sizes[1]);
    let refused = place.run(&["inspect", "run/model", "--optimizer", "adam"]);
    assert!(stderr(&refused).contains("one of \"adamw\", \"sgd\""), "{}", stderr(&refused));
}
