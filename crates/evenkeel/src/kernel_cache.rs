//! Compiled kernels in the user's cache folder, a file each.

use std::path::PathBuf;

use evenkeel_device::KernelCache;
use evenkeel_store::{read_bytes, write_file_atomically};

/// `$XDG_CACHE_HOME/evenkeel/kernels`, or the same under `~/.cache`.
pub struct CacheFolder(PathBuf);

/// No compiled kernel comes near this.
const MOST_BYTES: u64 = 64 << 20;

impl CacheFolder {
    /// `None` if the user has no home.
    pub fn of_user() -> Option<CacheFolder> {
        Some(CacheFolder(user_cache()?.join("kernels")))
    }
}

/// This program's folder in the user's cache; `None` without a home.
pub fn user_cache() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("evenkeel"))
}

impl KernelCache for CacheFolder {
    fn get(&self, key: &str) -> Option<Vec<u8>> {
        read_bytes(self.0.join(key), MOST_BYTES).ok()
    }

    fn put(&self, key: &str, bytes: &[u8]) {
        let written = write_file_atomically(self.0.join(key), |writer| writer.put(bytes));
        // A full or read-only disk costs the next start some seconds, and this one nothing.
        let _: Result<(), evenkeel_store::Error> = written;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_is_got_and_what_was_not_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = CacheFolder(folder.path().join("not").join("there yet"));
        assert_eq!(cache.get("a"), None);
        cache.put("a", b"code");
        cache.put("a", b"newer code");
        assert_eq!(cache.get("a").as_deref(), Some(&b"newer code"[..]));
        assert_eq!(cache.get("b"), None);
    }
}
