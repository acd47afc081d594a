//! A run's folder.
//!
//! ```text
//! run.toml        the resolved configuration, and the strategy that follows from it
//! metrics.jsonl   a line for each step and each evaluation
//! loss.svg        the loss curve
//! events.out…     TensorBoard's, if wanted
//! checkpoints/    step-00000500, …
//! model/          the trained model, a Hugging Face folder
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use evenkeel_report::is_event_file_name;
use evenkeel_step::Strategy;
use evenkeel_store::checkpoint::{Checkpoint, Damaged, keep_newest_and, list, newest_good};
use evenkeel_store::{FolderLock, exists, files, read_text, recover_all, remove, write_file_atomically};
use evenkeel_train::checkpoint::CheckpointState;
use evenkeel_train::{Best, Progress};

use crate::config::{RUN_CONFIG, RUN_STRATEGY, RawConfig, RunConfig, Settings, of_images};
use crate::{Failure, Mistake, warn};

const METRICS: &str = "metrics.jsonl";
const CURVE: &str = "loss.svg";
const CHECKPOINTS: &str = "checkpoints";
pub const RUN_MODEL: &str = "model";
/// The beginning of a checkpoint's name; its step follows.
const CHECKPOINT: &str = "step-";
const MOST_CONFIG_BYTES: u64 = 1 << 20;

pub struct RunFolder {
    root: PathBuf,
    keep_checkpoints: usize,
    keep_best: bool,
    _lock: FolderLock,
}

/// One of a run's checkpoints.
#[derive(Clone, Copy)]
pub enum Which {
    /// The newest that is whole.
    Newest,
    /// The one with the lowest loss in an evaluation.
    Best,
    Step(u64),
}

pub fn find_checkpoint(run: &Path, which: Which) -> Result<Checkpoint, Failure> {
    const HINT: &str = "give the folder of a run, its output.folder";
    if !exists(run) {
        let what = format!("`{}` does not exist", run.display());
        return Err(Mistake { what, hint: Some(HINT.to_owned()) }.into());
    }
    let checkpoints = run.join(CHECKPOINTS);
    let of_step = |step: u64| checkpoints.join(checkpoint_name(step));
    recover_all(&checkpoints, is_checkpoint_name)?;
    match which {
        Which::Newest => (),
        Which::Step(step) if exists(of_step(step)) => return Ok(Checkpoint::open(of_step(step))?),
        Which::Step(step) => return Err(no_such_step(run, step)?.into()),
        Which::Best => {
            let best = CheckpointState::of(&find_checkpoint(run, Which::Newest)?)?.progress.best;
            return match best.filter(|best| exists(of_step(best.step))) {
                Some(best) => Ok(Checkpoint::open(of_step(best.step))?),
                None => Err(no_best(run, best).into()),
            };
        }
    }
    let (newest, damaged) = newest_good(list(&checkpoints, CHECKPOINT)?);
    say_damaged(&damaged);
    newest.ok_or_else(|| {
        let what = format!("`{}` has no checkpoint", run.display());
        Mistake { what, hint: Some(HINT.to_owned()) }.into()
    })
}

fn no_such_step(run: &Path, step: u64) -> Result<Mistake, Failure> {
    let what = format!("`{}` has no checkpoint of step {step}", run.display());
    let mut steps: Vec<String> =
        list(run.join(CHECKPOINTS), CHECKPOINT)?.iter().filter_map(|path| step_of(path)).collect();
    steps.reverse();
    let hint = match &steps[..] {
        [] => "it has no checkpoint at all".to_owned(),
        [only] => format!("it has one of step {only}"),
        [first @ .., last] => format!("it has those of steps {} and {last}", first.join(", ")),
    };
    Ok(Mistake { what, hint: Some(hint) })
}

/// The step in a checkpoint's name, without zeros before it.
fn step_of(checkpoint: &Path) -> Option<String> {
    let digits = checkpoint.file_name()?.to_str()?.strip_prefix(CHECKPOINT)?;
    Some(digits.parse::<u64>().ok()?.to_string())
}

fn no_best(run: &Path, best: Option<Best>) -> Mistake {
    let (run, what) = (run.display(), "its checkpoint was not kept");
    let what = match best {
        Some(Best { step, .. }) => format!("the best evaluation of `{run}` was after step {step}, and {what}"),
        None => format!("`{run}` has no evaluation, so no checkpoint of it is the best"),
    };
    Mistake { what, hint: Some("train with output.keep_best = true and data to evaluate on".to_owned()) }
}

/// The earlier settings of the run in a configuration's folder, if they can be read.
pub fn configured_before(config: &RunConfig) -> Option<Settings> {
    let path = config.settings.output.folder.join(RUN_CONFIG);
    let text = read_text(&path, MOST_CONFIG_BYTES).ok()?;
    let mut raw = RawConfig::new();
    raw.read_file(&path.display().to_string(), &text);
    Some(raw.check().ok()?.settings)
}

fn say_damaged(damaged: &[Damaged]) {
    for (path, error) in damaged {
        warn(&format!("`{}` cannot be used: {error}", path.display()));
    }
}

fn checkpoint_name(step: u64) -> String {
    format!("{CHECKPOINT}{step:08}")
}

fn is_checkpoint_name(name: &str) -> bool {
    name.starts_with(CHECKPOINT)
}

fn is_file_of_a_run(name: &str) -> bool {
    [RUN_CONFIG, METRICS, CURVE, CHECKPOINTS, RUN_MODEL].contains(&name) || is_event_file_name(name)
}

impl RunFolder {
    /// Looks at the folder and removes only what killed runs left unfinished: an earlier run is to be continued, to be replaced,
    /// or a mistake. Returns the newest checkpoint that is whole, if the run is to be resumed and has one.
    pub fn open(config: &RunConfig, resume: bool) -> Result<(RunFolder, Option<Checkpoint>), Failure> {
        let output = &config.settings.output;
        let Some(lock) = FolderLock::take(&output.folder)? else {
            let what = format!("another run is writing to `{}`", output.folder.display());
            return Err(Mistake { what, hint: Some("wait for it, or choose another --output".to_owned()) }.into());
        };
        let folder = RunFolder {
            root: output.folder.clone(),
            keep_checkpoints: output.keep_checkpoints,
            keep_best: output.keep_best,
            _lock: lock,
        };
        recover_all(&folder.root, is_file_of_a_run)?;
        recover_all(folder.checkpoints(), is_checkpoint_name)?;
        let checkpoints = list(folder.checkpoints(), CHECKPOINT)?;
        let is_earlier_run = !checkpoints.is_empty() || exists(folder.model());
        if is_earlier_run && !resume && !output.overwrite {
            let what = format!("`{}` holds an earlier run", folder.root.display());
            let hint =
                "continue it with --resume, choose another --output, or replace it with --set output.overwrite=true";
            return Err(Mistake { what, hint: Some(hint.to_owned()) }.into());
        }
        if !resume {
            return Ok((folder, None));
        }
        let (newest, damaged) = newest_good(&checkpoints);
        say_damaged(&damaged);
        match damaged.into_iter().next() {
            Some((_, error)) if newest.is_none() => Err(error.into()),
            _ => Ok((folder, newest)),
        }
    }

    /// Makes the folder this run's: removes what an earlier one left, unless it is continued.
    pub fn claim(&self, config: &RunConfig, strategy: &Strategy, resume: bool) -> Result<(), Failure> {
        if !resume {
            let left = [self.checkpoints(), self.metrics(), self.curve(), self.model()];
            left.into_iter().chain(self.event_files()?).try_for_each(remove)?;
        }
        let text = format!("{}\n{}", config.to_toml(), in_section(strategy));
        Ok(write_file_atomically(self.config(), |file| file.put(text.as_bytes()))?)
    }

    /// Names the changed settings of a run that is continued with others than it was begun with.
    pub fn say_what_changed(&self, config: &RunConfig, before: Option<&Settings>) -> Result<(), Failure> {
        if !exists(self.config()) {
            return Ok(());
        }
        let batch = before.and_then(|before| other_batch(before, &config.settings)).unwrap_or_default();
        let before = read_text(self.config(), MOST_CONFIG_BYTES)?;
        let (before, now) = (settings_in(&before), settings_in(&config.to_toml()));
        let changed: Vec<&str> = now.iter().filter(|line| !before.contains(line)).map(String::as_str).collect();
        if !changed.is_empty() {
            warn(&format!("the run continues with changed settings: {}{batch}", changed.join(", ")));
        }
        Ok(())
    }

    /// TensorBoard's files, of this run and of those that it continues.
    pub fn event_files(&self) -> Result<Vec<PathBuf>, evenkeel_store::Error> {
        let names = files(&self.root)?.into_iter().filter(|name| is_event_file_name(name));
        Ok(names.map(|name| self.root.join(name)).collect())
    }

    pub fn config(&self) -> PathBuf {
        self.root.join(RUN_CONFIG)
    }

    pub fn metrics(&self) -> PathBuf {
        self.root.join(METRICS)
    }

    pub fn curve(&self) -> PathBuf {
        self.root.join(CURVE)
    }

    pub fn model(&self) -> PathBuf {
        self.root.join(RUN_MODEL)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn checkpoints(&self) -> PathBuf {
        self.root.join(CHECKPOINTS)
    }

    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(checkpoint_name(step))
    }

    /// The best checkpoint so far, if it is kept.
    pub fn best(&self, progress: &Progress) -> Option<PathBuf> {
        let best = progress.best.filter(|_| self.keep_best)?;
        Some(self.checkpoint(best.step))
    }

    /// A continued run may have had its best evaluation while it kept no best checkpoint, or may have lost that: then the best
    /// from here on is kept.
    pub fn forget_lost_best(&self, progress: &mut Progress) {
        if let Some(path) = self.best(progress).filter(|path| Checkpoint::open(path).is_err()) {
            warn(&format!(
                "the best evaluation so far has no checkpoint, `{}`; the best from here on is kept",
                path.display()
            ));
            progress.best = None;
        }
    }

    /// Removes the oldest checkpoints beyond those to be kept.
    pub fn pruning(&self, progress: &Progress) -> impl FnOnce() -> Result<(), evenkeel_store::Error> + Send + use<> {
        let (checkpoints, keep, best) = (self.checkpoints(), self.keep_checkpoints, self.best(progress));
        move || keep_newest_and(best.as_deref(), checkpoints, CHECKPOINT, keep).map(drop)
    }

    /// The run's name, for people.
    pub fn name(&self) -> String {
        let whole = std::path::absolute(&self.root).unwrap_or_else(|_| self.root.clone());
        whole.file_name().map_or_else(|| whole.display().to_string(), |name| name.to_string_lossy().into_owned())
    }

    pub fn root(&self) -> &Path {
        &self.root
    }
}

/// For people and programs that read it: the settings above decide.
fn in_section(strategy: &Strategy) -> String {
    let section = BTreeMap::from([(RUN_STRATEGY, strategy)]);
    format!("# What follows from the above.\n{}", toml::to_string(&section).expect("a strategy has a form in TOML"))
}

/// Says how another number of replicas changes a step's batch, and what keeps it.
fn other_batch(before: &Settings, now: &Settings) -> Option<String> {
    let per_batch = |settings: &Settings| settings.train.accumulate * settings.parallel.dp;
    let batch = |settings: &Settings| settings.train.batch * per_batch(settings);
    let (was, is) = (batch(before), batch(now));
    if before.parallel.dp == now.parallel.dp || was == is {
        return None;
    }
    let keeps = if was.is_multiple_of(per_batch(now)) {
        format!("; --batch {} keeps it", was / per_batch(now))
    } else {
        String::new()
    };
    let of = if of_images(now) { "images" } else { "sequences" };
    Some(format!("; a step's batch was {was} {of} and is now {is}{keeps}"))
}

/// The settings in a run's configuration, a line each, with the names that `--set` takes.
fn settings_in(toml: &str) -> Vec<String> {
    let mut section = String::new();
    let mut settings = Vec::new();
    for line in toml.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(name) => section = format!("{name}."),
            None => settings.push(format!("{section}{line}")),
        }
    }
    settings
}
