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

use evenkeel_store::{exists, recover, remove, subfolders, write_file_atomically};

use crate::config::RunConfig;
use crate::{Mistake, Mistakes};

pub struct RunFolder {
    root: PathBuf,
    keep_checkpoints: usize,
}

impl RunFolder {
    /// Claims the folder: an earlier run in it is continued, replaced, or a mistake. Returns the newest checkpoint, if
    /// the run is to be resumed and has one.
    pub fn open(config: &RunConfig, resume: bool) -> Result<(RunFolder, Option<PathBuf>), Mistakes> {
        let output = &config.settings.output;
        let folder = RunFolder { root: output.folder.clone(), keep_checkpoints: output.keep_checkpoints };
        let earlier = exists(folder.config());
        if earlier && !resume && !output.overwrite {
            let what = format!("`{}` holds an earlier run", folder.root.display());
            let hint =
                "continue it with --resume, choose another --output, or replace it with --set output.overwrite=true";
            return Err(Mistake { what, hint: Some(hint.to_owned()) }.into());
        }
        if earlier && !resume {
            for path in [folder.checkpoints(), folder.metrics(), folder.curve(), folder.model(), folder.config()] {
                remove(path)?;
            }
        }
        let checkpoint = if resume { folder.newest_checkpoint()? } else { None };
        write_file_atomically(folder.config(), |file| file.put(config.to_toml().as_bytes()))?;
        Ok((folder, checkpoint))
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

    fn newest_checkpoint(&self) -> Result<Option<PathBuf>, Mistakes> {
        let folder = self.checkpoints();
        // An interrupted replacement hides the folder until it is put right.
        for name in subfolders(&folder)? {
            recover(folder.join(name))?;
        }
        Ok(self.steps()?.last().map(|name| folder.join(name)))
    }

    fn steps(&self) -> Result<Vec<String>, evenkeel_store::Error> {
        let names = subfolders(self.checkpoints())?;
        Ok(names.into_iter().filter(|name| name.starts_with("step-")).collect())
    }

    /// Removes the oldest checkpoints beyond those to be kept.
    pub fn prune(&self) -> Result<(), evenkeel_store::Error> {
        let names = self.steps()?;
        let surplus = names.len().saturating_sub(self.keep_checkpoints);
        names[..surplus].iter().try_for_each(|name| remove(self.checkpoints().join(name)))
    }

    pub fn root(&self) -> &Path {
        &self.root
    }
}
