//! A run's folder.
//!
//! ```text
//! run.toml        the resolved configuration
//! metrics.jsonl   a line for each step and each evaluation
//! loss.svg        the loss curve
//! events.out…     TensorBoard's, if wanted
//! checkpoints/    step-00000500, …
//! model/          the trained model, a Hugging Face folder
//! ```

use std::path::{Path, PathBuf};

use evenkeel_store::{FolderLock, exists, files, recover_all, remove, subfolders, write_file_atomically};
use evenkeel_train::report::is_event_file_name;

use crate::config::RunConfig;
use crate::{Failure, Mistake};

pub struct RunFolder {
    root: PathBuf,
    keep_checkpoints: usize,
    _lock: FolderLock,
}

impl RunFolder {
    /// Looks at the folder and changes nothing in it: an earlier run is to be continued, to be replaced, or a mistake.
    /// Returns the newest checkpoint, if the run is to be resumed and has one.
    pub fn open(config: &RunConfig, resume: bool) -> Result<(RunFolder, Option<PathBuf>), Failure> {
        let output = &config.settings.output;
        let Some(lock) = FolderLock::take(&output.folder)? else {
            let what = format!("another run is writing to `{}`", output.folder.display());
            return Err(Mistake { what, hint: Some("wait for it, or choose another --output".to_owned()) }.into());
        };
        let folder = RunFolder { root: output.folder.clone(), keep_checkpoints: output.keep_checkpoints, _lock: lock };
        recover_all(folder.checkpoints())?;
        let newest = folder.checkpointed_steps()?.last().map(|&step| folder.checkpoint(step));
        let is_earlier_run = newest.is_some() || exists(folder.model());
        if is_earlier_run && !resume && !output.overwrite {
            let what = format!("`{}` holds an earlier run", folder.root.display());
            let hint =
                "continue it with --resume, choose another --output, or replace it with --set output.overwrite=true";
            return Err(Mistake { what, hint: Some(hint.to_owned()) }.into());
        }
        Ok((folder, newest.filter(|_| resume)))
    }

    /// Makes the folder this run's: what an earlier one left is removed, unless it is continued.
    pub fn claim(&self, config: &RunConfig, resume: bool) -> Result<(), Failure> {
        if !resume {
            let left = [self.checkpoints(), self.metrics(), self.curve(), self.model()];
            left.into_iter().chain(self.event_files()?).try_for_each(remove)?;
        }
        Ok(write_file_atomically(self.config(), |file| file.put(config.to_toml().as_bytes()))?)
    }

    /// TensorBoard's, of this run and of those that it continues.
    pub fn event_files(&self) -> Result<Vec<PathBuf>, evenkeel_store::Error> {
        let names = files(&self.root)?.into_iter().filter(|name| is_event_file_name(name));
        Ok(names.map(|name| self.root.join(name)).collect())
    }

    pub fn config(&self) -> PathBuf {
        self.root.join("run.toml")
    }

    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    pub fn curve(&self) -> PathBuf {
        self.root.join("loss.svg")
    }

    pub fn model(&self) -> PathBuf {
        self.root.join("model")
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(format!("step-{step:08}"))
    }

    /// Sorted. Folders of other names are the user's own.
    fn checkpointed_steps(&self) -> Result<Vec<u64>, evenkeel_store::Error> {
        let names = subfolders(self.checkpoints())?;
        let step = |name: &String| name.strip_prefix("step-")?.parse().ok();
        let mut steps: Vec<u64> = names.iter().filter_map(step).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Removes the oldest checkpoints beyond those to be kept.
    pub fn prune(&self) -> Result<(), evenkeel_store::Error> {
        let steps = self.checkpointed_steps()?;
        let surplus = steps.len().saturating_sub(self.keep_checkpoints);
        steps[..surplus].iter().try_for_each(|&step| remove(self.checkpoint(step)))
    }

    pub fn root(&self) -> &Path {
        &self.root
    }
}
