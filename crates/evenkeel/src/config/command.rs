//! `evenkeel config`, and the flags that every command with a configuration takes.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use evenkeel_store::{Folder, exists};
use toml::Value;

use super::{DataSource, RUN_CONFIG, RawConfig, RunConfig, deepspeed, explain, explain_in_markdown};
use crate::{Failure, Mistake, warn};

#[derive(clap::Args)]
pub struct Arguments {
    /// Lists every key with its default, type and meaning.
    #[arg(long, conflicts_with = "file")]
    explain: bool,
    /// Writes the list as a page of Markdown: docs/configuration.md.
    #[arg(long, requires = "explain")]
    markdown: bool,
    #[command(flatten)]
    overrides: Overrides,
}

/// A file and what the command line changes in it. Values are read as `--set` reads them, so they have the same bounds.
#[derive(Clone, Default, clap::Args)]
pub struct Overrides {
    /// The run's configuration, TOML.
    pub file: Option<PathBuf>,
    /// Steps to train (train.steps).
    #[arg(long, value_name = "N")]
    steps: Option<String>,
    /// Passes over the data (train.epochs).
    #[arg(long, value_name = "N")]
    epochs: Option<String>,
    /// Learning rate after the warmup (train.lr).
    #[arg(long, value_name = "RATE")]
    lr: Option<String>,
    /// Sequences of a micro-batch (train.batch).
    #[arg(long, value_name = "N")]
    batch: Option<String>,
    /// Tokens of a sequence (data.sequence).
    #[arg(long, value_name = "N")]
    sequence: Option<String>,
    /// Compute dtype, f32 or bf16 (train.dtype).
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// Folder for everything that the run writes (output.folder).
    #[arg(long, value_name = "FOLDER")]
    output: Option<String>,
    /// Seed of weights, data and training (model.seed, data.seed, train.seed).
    #[arg(long, value_name = "N")]
    seed: Option<String>,
    /// Replicas of the model, for data parallelism (parallel.dp).
    #[arg(long, value_name = "N")]
    dp: Option<String>,
    /// Ranks that share every layer, for tensor parallelism (parallel.tp).
    #[arg(long, value_name = "N")]
    tp: Option<String>,
    /// Places of a pipeline, for pipeline parallelism (parallel.pp).
    #[arg(long, value_name = "N")]
    pp: Option<String>,
    /// Cores of each rank (parallel.cores_per_rank).
    #[arg(long, value_name = "N")]
    cores_per_rank: Option<String>,
    /// A DeepSpeed configuration, JSON; sets what the run's own file leaves open.
    #[arg(long, value_name = "FILE")]
    deepspeed: Option<PathBuf>,
    /// Sets any key; may be repeated; applied after the other flags.
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,
}

impl Overrides {
    /// A file without changes.
    pub fn of_file(file: PathBuf) -> Overrides {
        Overrides { file: Some(file), ..Overrides::default() }
    }

    /// The same flags beside another file, or none.
    pub fn with_file(&self, file: Option<PathBuf>) -> Overrides {
        Overrides { file, ..self.clone() }
    }

    /// The configuration of a run, or all of its mistakes.
    pub fn read(&self) -> Result<RunConfig, Failure> {
        checked(self.raw()?)
    }

    /// The configuration of an evaluation, which needs no keys about training. `model` is evaluated if the rest names none, on
    /// the files `data`, if any are given.
    pub fn read_to_evaluate(&self, model: Option<&Path>, data: &[PathBuf]) -> Result<RunConfig, Failure> {
        let mut raw = self.raw()?;
        raw.evaluates = true;
        if let Some(model) = model.filter(|_| !raw.names_a_model()) {
            raw.give_by_flag("--model", "model.path", in_words(model));
        }
        if let [first, ..] = data {
            // These files are all there is to read, whatever the run was trained on.
            ["data.records", "data.holdout"].iter().for_each(|setting| raw.forget(setting));
            let files = Value::Array(data.iter().map(|path| in_words(path)).collect());
            ["data.paths", "data.eval_paths"]
                .iter()
                .for_each(|setting| raw.give_by_flag("--data", setting, files.clone()));
            if !raw.is_given_by_flag("data.source") {
                raw.give_by_flag("--data", "data.source", Value::String(source_of(first).name().to_owned()));
            }
        }
        let is_all_meant = self.file.is_none() || !data.is_empty();
        if is_all_meant && !raw.is_given_by_flag("eval.batches") {
            raw.give_by_flag("--data", "eval.batches", Value::Integer(0));
        }
        let mut config = checked(raw)?;
        let files = &mut config.settings.data;
        if files.paths.is_empty() {
            files.paths = files.eval_paths.clone();
        } else if is_all_meant && files.holdout == 0 && files.eval_paths.is_empty() {
            files.eval_paths = files.paths.clone();
        }
        Ok(config)
    }

    /// The configuration of a plan: of a file or, without one, of `model` and made-up data.
    pub fn read_to_plan(&self, model: Option<&Path>) -> Result<RunConfig, Failure> {
        let mut raw = self.raw()?;
        if let Some(model) = model {
            raw.forget_model();
            let config = model.join("config.json");
            // A plan needs no weights.
            match exists(&config) && !Folder::has_weights(model) {
                true => raw.give_by_flag("--model", "model.config", in_words(&config)),
                false => raw.give_by_flag("--model", "model.path", in_words(model)),
            }
        }
        if self.file.is_none() && model.is_some() {
            raw.evaluates = true;
            if !raw.is_given_by_flag("data.source") {
                raw.give_by_flag("--model", "data.source", Value::String("synthetic".to_owned()));
            }
        }
        checked(raw)
    }

    /// Takes out the places, replicas and shards that the command line asks for: a plan keeps to them, and they are no part of the
    /// configuration that it plans for.
    pub fn split_axes(&self) -> Result<(Overrides, [Option<usize>; 3]), Mistake> {
        let count = |(flag, given): (&str, &Option<String>)| {
            let Some(text) = given else { return Ok(None) };
            let wrong = || Mistake { what: format!("`{flag} {text}` is no number of ranks"), hint: None };
            text.parse::<NonZeroUsize>().map(|count| Some(count.get())).map_err(|_| wrong())
        };
        let axes = [count(("--pp", &self.pp))?, count(("--dp", &self.dp))?, count(("--tp", &self.tp))?];
        Ok((Overrides { pp: None, dp: None, tp: None, ..self.clone() }, axes))
    }

    /// Everything that the file and the command line give.
    fn raw(&self) -> Result<RawConfig, Failure> {
        const MOST_BYTES: u64 = 1 << 20;
        let mut raw = RawConfig::new();
        if let Some(file) = &self.file {
            match evenkeel_store::read_text(file, MOST_BYTES) {
                Ok(text) => raw.read_file(&file.display().to_string(), &text),
                Err(error) if error.is_fault() => return Err(error.into()),
                Err(error) => {
                    raw.note_unreadable(&error, &instead_of(file));
                }
            }
        }
        let flags: [(&'static str, &Option<String>, &[&str]); 12] = [
            ("--steps", &self.steps, &["train.steps"]),
            ("--epochs", &self.epochs, &["train.epochs"]),
            ("--lr", &self.lr, &["train.lr"]),
            ("--batch", &self.batch, &["train.batch"]),
            ("--sequence", &self.sequence, &["data.sequence"]),
            ("--dtype", &self.dtype, &["train.dtype"]),
            ("--output", &self.output, &["output.folder"]),
            ("--seed", &self.seed, &["model.seed", "data.seed", "train.seed"]),
            ("--dp", &self.dp, &["parallel.dp"]),
            ("--tp", &self.tp, &["parallel.tp"]),
            ("--pp", &self.pp, &["parallel.pp"]),
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
        // After the flags, since it asks for their values.
        if let Some(file) = &self.deepspeed {
            match evenkeel_store::read_json(file, deepspeed::MOST_BYTES) {
                Ok(content) => deepspeed::add(&mut raw, &file.display().to_string(), &content),
                Err(error) if error.is_fault() => return Err(error.into()),
                Err(error) => raw.note_unreadable(&error, "--deepspeed takes a DeepSpeed configuration, JSON"),
            }
        }
        for (flag, other, is_given) in
            [("--epochs", "train.steps", self.epochs.is_some()), ("--steps", "train.epochs", self.steps.is_some())]
        {
            if is_given && raw.is_given(other) {
                raw.notes.push(format!("`{other}` is set, too: training ends at the first of {flag} and it"));
            }
        }
        Ok(raw)
    }
}

/// The hint for a configuration that cannot be read.
fn instead_of(file: &Path) -> String {
    let inside = file.join(RUN_CONFIG);
    if evenkeel_store::exists(&inside) {
        let inside = inside.display();
        return format!("it is the folder of a run; `evenkeel train {inside} --resume` continues the run");
    }
    "`evenkeel config --explain` lists every key of a configuration".to_owned()
}

fn checked(raw: RawConfig) -> Result<RunConfig, Failure> {
    let config = raw.check()?;
    config.warnings.iter().for_each(|warning| warn(warning));
    Ok(config)
}

fn in_words(path: &Path) -> Value {
    Value::String(path.to_string_lossy().into_owned())
}

/// The kind of a file's contents, by its name; a folder holds images.
fn source_of(path: &Path) -> DataSource {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("json") if evenkeel_store::is_json_list(path) => DataSource::Json,
        Some("jsonl" | "ndjson" | "json") => DataSource::Jsonl,
        Some("parquet") => DataSource::Parquet,
        _ if evenkeel_store::exists(path.join(".")) => DataSource::Images,
        _ => DataSource::Text,
    }
}

pub fn run(arguments: &Arguments) -> Result<String, Failure> {
    if arguments.markdown {
        return Ok(explain_in_markdown());
    }
    if arguments.explain {
        return Ok(explain());
    }
    Ok(arguments.overrides.read()?.to_toml().trim_end().to_owned())
}
