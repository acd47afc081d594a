//! A path that is to be written, the names its making uses beside it, and what is left of them after a crash.
//!
//! | name               | what it is                                                           |
//! | ------------------ | -------------------------------------------------------------------- |
//! | `NAME`             | complete, whenever it is there                                       |
//! | `.NAME.tmp-1234-0` | being written; its maker holds a lock on it                          |
//! | `.NAME.new`        | a folder, complete and on disk, about to take the place of `NAME`    |
//! | `.NAME.old`        | the folder that was `NAME` before, on its way out                    |

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Defect, Error, regular_file};

pub(crate) struct Target {
    pub path: PathBuf,
    pub parent: PathBuf,
    name: OsString,
}

/// Something under a temporary name. Removed when dropped, unless it was renamed away.
pub(crate) struct Temporary {
    pub path: PathBuf,
    /// Open and locked, so that nobody takes it for a leftover.
    pub handle: File,
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

    pub fn new_file(&self) -> Result<Temporary, Error> {
        let create = |path: &Path| OpenOptions::new().write(true).create_new(true).open(path);
        self.new_temporary(create).map_err(|error| self.failure(error))
    }

    pub fn new_folder(&self) -> Result<Temporary, Error> {
        let create = |path: &Path| {
            fs::create_dir(path)?;
            File::open(path)
        };
        self.new_temporary(create).map_err(|error| self.failure(error))
    }

    pub fn replacement(&self) -> PathBuf {
        self.beside(".new")
    }

    pub fn outgoing(&self) -> PathBuf {
        self.beside(".old")
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

    /// Makes what was created in or renamed within the parent folder last.
    pub fn sync_parent(&self) -> Result<(), Error> {
        sync_folder(&self.parent).map_err(|error| Defect::of_writing(error).of(&self.parent))
    }

    /// A missing parent folder is the parent's defect, anything else the target's.
    pub fn failure(&self, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::NotFound if !regular_file::is_listed(&self.parent) => Defect::NotThere.of(&self.parent),
            io::ErrorKind::NotADirectory => Defect::InTheWay.of(&self.parent),
            _ => Defect::of_writing(error).of(&self.path),
        }
    }

    fn new_temporary(&self, create: impl Fn(&Path) -> io::Result<File>) -> io::Result<Temporary> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = self.beside(&format!(".tmp-{}-{count}", process::id()));
            match create(&path) {
                // Left behind by a process that had the same number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(handle) => {
                    // Some network file systems have no locks; then leftovers stay until someone deletes them.
                    let _ = handle.try_lock();
                    return Ok(Temporary { path, handle });
                }
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

impl Drop for Temporary {
    fn drop(&mut self) {
        // Nobody is left to tell; what stays is found by the next recovery.
        let _ = remove(&self.path);
    }
}

/// Whether a process that still runs has it locked. `None` where the file system cannot tell.
pub(crate) fn is_locked(path: &Path) -> Option<bool> {
    let kind = fs::symlink_metadata(path).ok()?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        return None;
    }
    match File::open(path).ok()?.try_lock() {
        Ok(()) => Some(false),
        Err(TryLockError::WouldBlock) => Some(true),
        Err(TryLockError::Error(_)) => None,
    }
}

/// The name that a temporary, a replacement or an outgoing folder stands for.
pub(crate) fn name_behind(hidden: &str) -> Option<&str> {
    let inner = hidden.strip_prefix('.')?;
    let ended = inner.strip_suffix(".new").or(inner.strip_suffix(".old"));
    ended.or_else(|| inner.rsplit_once(".tmp-").map(|(name, _)| name)).filter(|name| !name.is_empty())
}

/// Removes a file, a link or a folder with all that is in it. That it is gone already is fine.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes a folder and those above it that are missing, and makes them last: what is written into a folder is lost with it.
pub(crate) fn make_folders(path: &Path) -> Result<(), Error> {
    let missing: Vec<&Path> =
        path.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).collect();
    fs::create_dir_all(path).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Defect::InTheWay.of(path),
        _ => Defect::of_writing(error).of(path),
    })?;
    for made in missing {
        let parent = made.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sync_folder(parent).map_err(|error| Defect::of_writing(error).of(parent))?;
    }
    Ok(())
}

pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    match File::open(path)?.sync_all() {
        // File systems that cannot sync a folder say so, and have nothing to sync.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        synced => synced,
    }
}
