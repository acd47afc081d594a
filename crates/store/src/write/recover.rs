//! Recovery after a crash: finishes, undoes or removes leftovers beside a path.

use std::fs;
use std::path::Path;

use super::target::{self, Target};
use crate::{Defect, Error, disk, regular_file};

/// The outcome of [`recover`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// The path was intact. Temporaries beside it may have been removed.
    Nothing,
    /// A replacement had been interrupted with the new folder complete; the new folder is in its place now.
    Finished,
    /// The folder had been moved aside and nothing had taken its place; it is back.
    Undone,
}

/// Finishes or undoes an interrupted [`NewFolder::commit`](super::NewFolder::commit) to `path`, and deletes leftovers of dead
/// writers beside it. Call it before looking for a checkpoint.
///
/// A writer that is still at work is left alone, and so are temporaries on a file system without locks.
pub fn recover(path: impl AsRef<Path>) -> Result<Recovery, Error> {
    let target = Target::new(path.as_ref())?;
    if !target.parent.is_dir() {
        return Ok(Recovery::Nothing);
    }
    recover_target(&target)
}

/// [`recover`]s every path in a folder that was being written, also those without their name at the moment. It only touches
/// names that `is_ours` accepts: others may keep hidden files there.
pub fn recover_all(parent: impl AsRef<Path>, is_ours: impl Fn(&str) -> bool) -> Result<(), Error> {
    let parent = parent.as_ref();
    let failure = |error| Defect::Io(error).of(parent);
    let entries = match fs::read_dir(parent) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failure)?,
    };
    let mut names = std::collections::BTreeSet::new();
    for entry in entries {
        let name = entry.map_err(failure)?.file_name().to_string_lossy().into_owned();
        if let Some(name) = target::name_behind(&name).filter(|name| is_ours(name)) {
            names.insert(name.to_owned());
        }
    }
    names.into_iter().try_for_each(|name| recover(parent.join(name)).map(drop))
}

/// Deletes temporaries of the target's dead writers.
pub(super) fn remove_temporaries(target: &Target) -> Result<(), Error> {
    for path in target.temporaries().map_err(|error| Defect::Io(error).of(&target.parent))? {
        target::remove_leftover(&path).map_err(|error| Defect::of_writing(error).of(&path))?;
    }
    Ok(())
}

pub(super) fn recover_target(target: &Target) -> Result<Recovery, Error> {
    remove_temporaries(target)?;
    if regular_file::is_listed(&target.condemned()) {
        delete(target, &target.condemned())?;
    }
    let (replacement, outgoing) = (target.replacement(), target.outgoing());
    if regular_file::is_listed(&replacement) {
        if target::is_locked(&replacement) {
            return Ok(Recovery::Nothing);
        }
        finish_replacement(target)?;
        return Ok(Recovery::Finished);
    }
    if !regular_file::is_listed(&outgoing) {
        return Ok(Recovery::Nothing);
    }
    if regular_file::is_listed(&target.path) {
        delete(target, &outgoing)?;
        return Ok(Recovery::Nothing);
    }
    disk::rename(&outgoing, &target.path).map_err(|error| target.failure(error))?;
    target.sync_parent()?;
    Ok(Recovery::Undone)
}

/// Moves a complete `.NAME.new` to `NAME`. If that fails, `NAME` is what it was, and the new one, which may be the only copy,
/// waits for the next recovery.
pub(super) fn finish_replacement(target: &Target) -> Result<(), Error> {
    let (replacement, outgoing) = (target.replacement(), target.outgoing());
    if regular_file::is_listed(&target.path) && regular_file::is_listed(&outgoing) {
        delete(target, &outgoing)?;
    }
    let exchange = || {
        if regular_file::is_listed(&target.path) {
            disk::rename(&target.path, &outgoing)?;
        }
        disk::rename(&replacement, &target.path)
    };
    if let Err(error) = exchange() {
        if !regular_file::is_listed(&target.path) {
            let _ = disk::rename(&outgoing, &target.path);
        }
        return Err(target.failure(error));
    }
    delete(target, &outgoing)
}

/// Deletes a path that has lost the target's name, after syncing that loss: otherwise a loss of power could give the name back
/// to a half-deleted folder.
pub(super) fn delete(target: &Target, condemned: &Path) -> Result<(), Error> {
    target.sync_parent()?;
    disk::remove(condemned).map_err(|error| Defect::of_writing(error).of(condemned))
}
