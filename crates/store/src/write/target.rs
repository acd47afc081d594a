//! A path to write, the names used beside it meanwhile, and their leftovers after a crash.
//!
//! | name               | what it is                                                           |
//! | ------------------ | -------------------------------------------------------------------- |
//! | `NAME`             | complete, whenever it is there                                       |
//! | `.NAME.tmp-1234-0` | being written; its maker holds a lock on it                          |
//! | `.NAME.new`        | a folder, complete and on disk, about to take the place of `NAME`    |
//! | `.NAME.old`        | the folder that was `NAME` before a new one took its place           |
//! | `.NAME.gone`       | what was `NAME` and is being deleted, perhaps no longer whole        |

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::disk::{self, DiskFile};
use crate::{Defect, Error, regular_file};

pub(crate) struct Target {
    pub path: PathBuf,
    pub parent: PathBuf,
    name: OsString,
}

/// A file or folder under a temporary name. Dropping removes it, unless it was renamed.
pub(crate) struct Temporary {
    pub path: PathBuf,
    /// Open and locked, so that no process takes it for a leftover.
    _handle: Option<File>,
}

impl Target {
    pub fn new(path: &Path) -> Result<Target, Error> {
        let Some(name) = path.file_name() else {
            return Err(Defect::NamesNothing.of(path));
        };
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        Ok(Target { path: path.to_owned(), parent: parent.to_owned(), name: name.to_owned() })
    }

    /// Makes the folders above the target that are missing.
    pub fn make_parent(&self) -> Result<(), Error> {
        make_folders(&self.parent)
    }

    pub fn new_file(&self) -> Result<(Temporary, DiskFile), Error> {
        let handle = |_: &Path, file: &DiskFile| file.handle().try_clone();
        self.new_temporary(DiskFile::create_new, handle).map_err(|error| self.failure(error))
    }

    pub fn new_folder(&self) -> Result<Temporary, Error> {
        let handle = |path: &Path, (): &()| File::open(path);
        let (temporary, ()) = self.new_temporary(disk::create_folder, handle).map_err(|error| self.failure(error))?;
        Ok(temporary)
    }

    pub fn replacement(&self) -> PathBuf {
        self.beside(".new")
    }

    pub fn outgoing(&self) -> PathBuf {
        self.beside(".old")
    }

    pub fn condemned(&self) -> PathBuf {
        self.beside(".gone")
    }

    /// Entries of the parent folder that are named like temporaries of this target.
    pub fn temporaries(&self) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.parent)? {
            let entry = entry?;
            if self.is_temporary(&entry.file_name()) {
                found.push(entry.path());
            }
        }
        Ok(found)
    }

    /// Syncs the names in the parent folder.
    pub fn sync_parent(&self) -> Result<(), Error> {
        disk::sync_folder(&self.parent).map_err(|error| Defect::of_writing(error).of(&self.parent))
    }

    /// A missing parent folder is the parent's defect, anything else the target's.
    pub fn failure(&self, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::NotFound if !regular_file::is_listed(&self.parent) => Defect::NotThere.of(&self.parent),
            io::ErrorKind::NotADirectory => Defect::InTheWay.of(&self.parent),
            _ => Defect::of_writing(error).of(&self.path),
        }
    }

    /// Makes a file or folder under an unused name, and locks it.
    fn new_temporary<T>(
        &self,
        create: impl Fn(&Path) -> io::Result<T>,
        handle: impl Fn(&Path, &T) -> io::Result<File>,
    ) -> io::Result<(Temporary, T)> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = self.beside(&format!(".tmp-{}-{count}", process::id()));
            let made = match create(&path) {
                // A leftover of a process with the same number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            };
            let mut temporary = Temporary { path, _handle: None };
            if temporary.lock(handle(&temporary.path, &made))? {
                return Ok((temporary, made));
            }
        }
    }

    fn beside(&self, ending: &str) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(&self.name);
        name.push(ending);
        self.parent.join(name)
    }

    fn is_temporary(&self, name: &OsStr) -> bool {
        let rest = name.as_encoded_bytes().strip_prefix(b".");
        let rest = rest.and_then(|rest| rest.strip_prefix(self.name.as_encoded_bytes()));
        let Some(numbers) = rest.and_then(|rest| rest.strip_prefix(b".tmp-")) else { return false };
        let is_number = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
        numbers.split(|&byte| byte == b'-').count() == 2 && numbers.split(|&byte| byte == b'-').all(is_number)
    }
}

impl Temporary {
    /// False if another process took it for a leftover first.
    fn lock(&mut self, handle: io::Result<File>) -> io::Result<bool> {
        let handle = match handle {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            handle => handle?,
        };
        if matches!(handle.try_lock(), Err(TryLockError::WouldBlock)) {
            return Ok(false);
        }
        // Some network file systems have no locks; then leftovers stay until someone deletes them.
        self._handle = Some(handle);
        Ok(regular_file::is_listed(&self.path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // The next recovery finds what stays.
        let _ = disk::remove(&self.path);
    }
}

/// Removes a path unless a live process has locked it or the file system cannot tell. It holds the lock meanwhile, so that a
/// writer that has just made the path does not use it.
pub(crate) fn remove_leftover(path: &Path) -> io::Result<()> {
    match try_lock(path) {
        Some((_lock, Ok(()))) => disk::remove(path),
        _ => Ok(()),
    }
}

/// Whether a live process has locked it.
pub(crate) fn is_locked(path: &Path) -> bool {
    matches!(try_lock(path), Some((_, Err(TryLockError::WouldBlock))))
}

/// `None` if it cannot be locked.
fn try_lock(path: &Path) -> Option<(File, Result<(), TryLockError>)> {
    let kind = fs::symlink_metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        return None;
    }
    let handle = File::open(path).ok()?;
    let locked = handle.try_lock();
    Some((handle, locked))
}

/// The final name of a temporary, a replacement or a path being deleted.
pub(crate) fn name_behind(hidden: &str) -> Option<&str> {
    let inner = hidden.strip_prefix('.')?;
    let ended = [".new", ".old", ".gone"].iter().find_map(|ending| inner.strip_suffix(ending));
    ended.or_else(|| inner.rsplit_once(".tmp-").map(|(name, _)| name)).filter(|name| !name.is_empty())
}

/// Makes a folder and the missing ones above it, and syncs their names: files in a folder are lost with it.
pub(crate) fn make_folders(path: &Path) -> Result<(), Error> {
    let failure = |error: io::Error, folder: &Path| match error.kind() {
        io::ErrorKind::AlreadyExists => Defect::InTheWay.of(folder),
        _ => Defect::of_writing(error).of(folder),
    };
    let ancestors = || path.ancestors().filter(|folder| !folder.as_os_str().is_empty());
    let missing: Vec<&Path> = ancestors().take_while(|folder| !folder.exists()).collect();
    if let Some(deepest) = ancestors().nth(missing.len()) {
        if !deepest.is_dir() {
            return Err(Defect::InTheWay.of(deepest));
        }
        sync_name_of(deepest)?;
    }
    for folder in missing.into_iter().rev() {
        match disk::create_folder(folder) {
            // Another process made it first.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
            made => made.map_err(|error| failure(error, folder))?,
        }
        sync_name_of(folder)?;
    }
    Ok(())
}

/// The maker of a folder may have died before syncing its name. Folders are made one by one, so the names above it are synced
/// already.
fn sync_name_of(folder: &Path) -> Result<(), Error> {
    let above = match folder.parent() {
        Some(above) if above.as_os_str().is_empty() => Path::new("."),
        Some(above) => above,
        None => return Ok(()),
    };
    match disk::sync_folder(above) {
        // We did not make a folder that we may not list.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        synced => synced.map_err(|error| Defect::of_writing(error).of(above)),
    }
}
