//! Names on the Hugging Face hub, which are no paths.

use std::path::{Path, PathBuf};

use evenkeel_store::{exists, read_text, subfolders};

use crate::Mistake;

/// Refuses a path that does not exist but may be a name on the hub, and says how to get a folder for it.
pub fn check(path: &Path) -> Result<(), Mistake> {
    match name(path) {
        Some(name) if !exists(path) => {
            Err(Mistake { what: format!("`{name}`: does not exist"), hint: Some(hint(name, cache().as_deref())) })
        }
        _ => Ok(()),
    }
}

/// `owner/name`, or `name` alone as the oldest models are called.
fn name(path: &Path) -> Option<&str> {
    let name = path.to_str()?;
    let is_letter = |c: char| c.is_ascii_alphanumeric();
    let is_part = |part: &str| {
        part.starts_with(is_letter) && part.chars().all(|c| is_letter(c) || "._-".contains(c)) && part.len() <= 96
    };
    let parts: Vec<&str> = name.split('/').collect();
    let is_name = match parts[..] {
        [one] => is_part(one),
        [owner, one] => is_part(owner) && is_part(one) && !exists(owner),
        _ => false,
    };
    let is_file =
        path.extension().is_some_and(|extension| ["json", "jinja", "toml"].iter().any(|&file| extension == file));
    (is_name && !is_file).then_some(name)
}

fn hint(name: &str, cache: Option<&Path>) -> String {
    let cached = cache.map(|cache| cache.join(format!("models--{}", name.replace('/', "--"))));
    if let Some(snapshot) = cached.as_deref().and_then(newest_snapshot) {
        return format!("a model is a folder; the Hugging Face cache has this one: `{}`", snapshot.display());
    }
    let folder = name.rsplit('/').next().unwrap_or(name);
    let cached = cached.map_or_else(String::new, |cached| {
        format!("; the Hugging Face cache does not have it, it would be in `{}`", cached.display())
    });
    format!(
        "a model is a folder; if this is a name of the Hugging Face hub, `hf download {name} --local-dir {folder}` \
         makes `{folder}` one{cached}"
    )
}

/// The folder of `huggingface_hub`'s downloads.
fn cache() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let user_cache = || path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
    let home = || path("HF_HOME").or_else(|| Some(user_cache()?.join("huggingface")));
    path("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")))
}

/// The main branch's snapshot, else any; one without a config.json is an unfinished download.
fn newest_snapshot(cached: &Path) -> Option<PathBuf> {
    const MOST_BYTES: u64 = 256;
    let main = read_text(cached.join("refs/main"), MOST_BYTES).ok();
    let others = subfolders(cached.join("snapshots")).unwrap_or_default();
    let snapshots = main.into_iter().chain(others).map(|hash| cached.join("snapshots").join(hash.trim()));
    snapshots.into_iter().find(|snapshot| exists(snapshot.join("config.json")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        for found in ["gpt2", "Qwen/Qwen2.5-0.5B", "no-such-owner/a_b.c"] {
            assert_eq!(name(Path::new(found)), Some(found));
        }
        // `src` is a folder where this test runs.
        for path in ["/a/b", "./gpt2", "../a", "~/models", "a/b/c", "src/model", "a b/c", "a/", "tokenizer.json", ""] {
            assert_eq!(name(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn what_was_downloaded_is_named_and_what_was_not_is_how_to() {
        let cache = tempfile::tempdir().expect("a folder");
        let found = hint("Qwen/Qwen2.5-0.5B", Some(cache.path()));
        let folder = cache.path().join("models--Qwen--Qwen2.5-0.5B");
        for part in ["`hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B`", folder.to_str().expect("text")] {
            assert!(found.contains(part), "{found}");
        }
        let put = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        };
        put("snapshots/aaa/model.safetensors", "");
        assert!(hint("Qwen/Qwen2.5-0.5B", Some(cache.path())).contains("hf download"), "only begun");
        put("snapshots/bbb/config.json", "{}");
        put("snapshots/ccc/config.json", "{}");
        assert!(hint("Qwen/Qwen2.5-0.5B", Some(cache.path())).ends_with("snapshots/bbb`"));
        put("refs/main", "ccc\n");
        assert!(hint("Qwen/Qwen2.5-0.5B", Some(cache.path())).ends_with("snapshots/ccc`"));
    }
}
