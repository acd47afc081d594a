//! Checkpoints beside training: the ranks wait while a snapshot is taken, and continue while it is written.

use std::path::PathBuf;
use std::thread::JoinHandle;

use serde_json::Value;

use super::RunOrigin;
use super::snapshot::Snapshot;
use crate::Error;
use crate::ranks::Ranks;
use crate::run::Progress;

/// Writes checkpoints one after another; at most one is on its way.
#[derive(Default)]
pub struct Saver {
    pending: Option<JoinHandle<Result<(), Error>>>,
}

impl Saver {
    /// Begins a checkpoint at `path`, once the previous one is complete; `then` runs when this one is. An error is the previous
    /// one's, or that of taking the snapshot.
    pub fn begin(
        &mut self,
        path: PathBuf,
        ranks: &Ranks,
        progress: &Progress,
        feed: Value,
        origin: &RunOrigin,
        then: impl FnOnce() -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        self.finish()?;
        let snapshot = Snapshot::copy(ranks, progress, feed, origin)?;
        tracing::debug!(path = %path.display(), step = progress.step, "copied the ranks' state");
        let write = move || {
            snapshot.write(&path)?;
            tracing::debug!(path = %path.display(), "wrote a checkpoint");
            then()
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        self.pending = Some(thread.expect("the system starts a thread"));
        Ok(())
    }

    /// Writes a checkpoint at `path` while the ranks wait, without a copy of their state, once the previous one is complete.
    pub fn save(
        &mut self,
        path: PathBuf,
        ranks: &Ranks,
        progress: &Progress,
        feed: Value,
        origin: &RunOrigin,
        then: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.finish()?;
        Snapshot::in_place(ranks, progress, feed, origin)?.write(&path)?;
        tracing::debug!(path = %path.display(), step = progress.step, "wrote a checkpoint while the ranks waited");
        then()
    }

    /// Waits for the checkpoint on its way.
    pub fn finish(&mut self) -> Result<(), Error> {
        match self.pending.take() {
            Some(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => Ok(()),
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        if let Some(thread) = self.pending.take() {
            let _ = thread.join();
        }
    }
}
