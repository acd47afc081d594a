//! Selects the checkpoint of a run to load, and those to keep.

use std::path::{Path, PathBuf};

use super::Checkpoint;
use crate::{Error, remove, subfolders};

/// A checkpoint that cannot be used, and why.
pub type Damaged = (PathBuf, Error);

/// The folders in `parent` named `prefix` and a number, as in `step-00000500`, the highest number first. Folders of other names
/// are the user's own. Empty if there is no such parent.
pub fn list(parent: impl AsRef<Path>, prefix: &str) -> Result<Vec<PathBuf>, Error> {
    let parent = parent.as_ref();
    let number = |name: &String| -> Option<u64> {
        let digits = name.strip_prefix(prefix)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let names = subfolders(parent)?.into_iter();
    let mut numbered: Vec<(u64, String)> = names.filter_map(|name| Some((number(&name)?, name))).collect();
    numbered.sort_unstable();
    Ok(numbered.into_iter().rev().map(|(_, name)| parent.join(name)).collect())
}

/// The first of these checkpoints that is whole, all of its files read and compared, and the damaged ones before it. Callers
/// give the newest first and continue with the result.
pub fn newest_good<P: AsRef<Path>>(folders: impl IntoIterator<Item = P>) -> (Option<Checkpoint>, Vec<Damaged>) {
    let mut damaged = Vec::new();
    for folder in folders {
        match open_verified(folder.as_ref()) {
            Ok(checkpoint) => return (Some(checkpoint), damaged),
            Err(error) => damaged.push((folder.as_ref().to_owned(), error)),
        }
    }
    (None, damaged)
}

/// Removes the oldest of the checkpoints that [`list`] finds, so that `keep` usable ones remain, and one if that is 0. Returns
/// the unusable ones that it kept because no usable one is newer.
///
/// The newest whole checkpoint is never removed. To find it, this reads the newest through, and if it is damaged the next, and
/// so on. The others count as usable if they can be opened. Without surplus, nothing is read.
pub fn keep_newest(parent: impl AsRef<Path>, prefix: &str, keep: usize) -> Result<Vec<Damaged>, Error> {
    keep_newest_and(None, parent, prefix, keep)
}

/// Like [`keep_newest`], and keeps `spared`, however old it is.
pub fn keep_newest_and(
    spared: Option<&Path>,
    parent: impl AsRef<Path>,
    prefix: &str,
    keep: usize,
) -> Result<Vec<Damaged>, Error> {
    let folders = list(parent, prefix)?;
    let keep = keep.max(1);
    if folders.len() <= keep {
        return Ok(Vec::new());
    }
    let (newest, damaged) = newest_good(&folders);
    if newest.is_none() {
        return Ok(damaged);
    }
    let mut kept = 1;
    let mut surplus = Vec::new();
    for folder in &folders[damaged.len() + 1..] {
        if kept < keep && Checkpoint::open(folder).is_ok() {
            kept += 1;
        } else if spared != Some(folder) {
            surplus.push(folder);
        }
    }
    // The oldest first, so an interruption leaves no gap.
    surplus.into_iter().rev().try_for_each(remove)?;
    Ok(damaged)
}

fn open_verified(path: &Path) -> Result<Checkpoint, Error> {
    let checkpoint = Checkpoint::open(path)?;
    checkpoint.verify()?;
    Ok(checkpoint)
}
