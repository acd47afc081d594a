//! `evenkeel config`, and the flags that every command with a configuration takes.

use std::path::PathBuf;

use super::{RawConfig, RunConfig, deepspeed, explain};
use crate::{Failure, warn};

#[derive(clap::Args)]
pub struct Arguments {
    /// Lists every key: its type, default and meaning.
    #[arg(long, conflicts_with = "file")]
    explain: bool,
    #[command(flatten)]
    overrides: Overrides,
}

/// A file and what the command line changes in it. Values are read as `--set` reads them, so they have the same bounds.
#[derive(Default, clap::Args)]
pub struct Overrides {
    /// The run's configuration, TOML.
    file: Option<PathBuf>,
    /// Steps to train (train.steps).
    #[arg(long, value_name = "N")]
    steps: Option<String>,
    /// Learning rate after the warmup (train.lr).
    #[arg(long, value_name = "RATE")]
    lr: Option<String>,
    /// Sequences of a micro-batch (train.batch).
    #[arg(long, value_name = "N")]
    batch: Option<String>,
    /// Tokens of a sequence (data.sequence).
    #[arg(long, value_name = "N")]
    sequence: Option<String>,
    /// What is computed in, f32 or bf16 (train.dtype).
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// Folder of everything that is written (output.folder).
    #[arg(long, value_name = "FOLDER")]
    output: Option<String>,
    /// Seed of weights, data and training (model.seed, data.seed, train.seed).
    #[arg(long, value_name = "N")]
    seed: Option<String>,
    /// Shares of the data that are computed side by side (parallel.dp).
    #[arg(long, value_name = "N")]
    dp: Option<String>,
    /// Ranks that share every layer of the model (parallel.tp).
    #[arg(long, value_name = "N")]
    tp: Option<String>,
    /// Cores of each rank (parallel.cores_per_rank).
    #[arg(long, value_name = "N")]
    cores_per_rank: Option<String>,
    /// A DeepSpeed configuration, JSON, for what the run's own leaves open.
    #[arg(long, value_name = "FILE")]
    deepspeed: Option<PathBuf>,
    /// Changes any key; may be repeated, and comes after the other flags.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
}

impl Overrides {
    /// A file as it is.
    pub fn of_file(file: PathBuf) -> Overrides {
        Overrides { file: Some(file), ..Overrides::default() }
    }

    /// The configuration that a run has, or everything that is wrong with it.
    pub fn read(&self) -> Result<RunConfig, Failure> {
        const MOST_BYTES: u64 = 1 << 20;
        let mut raw = RawConfig::new();
        if let Some(file) = &self.file {
            match evenkeel_store::read_text(file, MOST_BYTES) {
                Ok(text) => raw.read_file(&file.display().to_string(), &text),
                Err(error) if error.is_fault() => return Err(error.into()),
                Err(error) => {
                    raw.note_unreadable(&error, "`evenkeel config --explain` says what a configuration can hold");
                }
            }
        }
        let flags: [(&'static str, &Option<String>, &[&str]); 10] = [
            ("--steps", &self.steps, &["train.steps"]),
            ("--lr", &self.lr, &["train.lr"]),
            ("--batch", &self.batch, &["train.batch"]),
            ("--sequence", &self.sequence, &["data.sequence"]),
            ("--dtype", &self.dtype, &["train.dtype"]),
            ("--output", &self.output, &["output.folder"]),
            ("--seed", &self.seed, &["model.seed", "data.seed", "train.seed"]),
            ("--dp", &self.dp, &["parallel.dp"]),
            ("--tp", &self.tp, &["parallel.tp"]),
            ("--cores-per-rank", &self.cores_per_rank, &["parallel.cores_per_rank"]),
        ];
        for (flag, value, keys) in flags {
            for (value, key) in value.iter().flat_map(|value| keys.iter().map(move |key| (value, key))) {
                raw.set(flag, &format!("{key}={value}"));
            }
        }
        for assignment in &self.set {
            raw.set("--set", assignment);
        }
        // Behind the flags: it asks what they say.
        if let Some(file) = &self.deepspeed {
            match evenkeel_store::read_json(file, deepspeed::MOST_BYTES) {
                Ok(content) => deepspeed::add(&mut raw, &file.display().to_string(), &content),
                Err(error) if error.is_fault() => return Err(error.into()),
                Err(error) => raw.note_unreadable(&error, "--deepspeed takes a DeepSpeed configuration, JSON"),
            }
        }
        let config = raw.check()?;
        config.warnings.iter().for_each(|warning| warn(warning));
        Ok(config)
    }
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    if arguments.explain {
        return Ok(explain());
    }
    Ok(arguments.overrides.read()?.to_toml().trim_end().to_owned())
}
