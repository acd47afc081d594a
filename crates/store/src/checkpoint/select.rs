//! Which of a run's checkpoints to load, and which to keep.

use std::path::{Path, PathBuf};

use super::Checkpoint;
use crate::{Error, remove, subfolders};

/// A checkpoint that cannot be used, and why.
pub type Damaged = (PathBuf, Error);

/// The folders in `parent` that are named `prefix` and a number, as in `step-00000500`, the highest number first. Folders
/// of other names are the user's own. There are none where there is no such parent.
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

/// The first of these checkpoints that is whole, all of its files read and compared, and what is wrong with those before
/// it. Given the newest first, that is the one to go on with.
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

/// Removes the older ones of the checkpoints that [`list`] finds, so that `keep` remain that can be used, and one if that
/// is 0. Returns those that cannot be used and were not removed, because no usable one is newer.
///
/// The newest that is whole is never removed. To know which it is, the newest is read through, and if it is damaged the
/// next, and so on. Of the others it counts that they can be opened. Where nothing is in surplus, nothing is read.
pub fn keep_newest(parent: impl AsRef<Path>, prefix: &str, keep: usize) -> Result<Vec<Damaged>, Error> {
    keep_newest_and(None, parent, prefix, keep)
}

/// The same, and `spared` is not removed either, however old it is.
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
    // The oldest first: should this be interrupted, what remains has no gap.
    surplus.into_iter().rev().try_for_each(remove)?;
    Ok(damaged)
}

fn open_verified(path: &Path) -> Result<Checkpoint, Error> {
    let checkpoint = Checkpoint::open(path)?;
    checkpoint.verify()?;
    Ok(checkpoint)
}
