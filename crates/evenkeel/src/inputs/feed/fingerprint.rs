//! A description of a run's data, so that a checkpoint is continued with the data it was made with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use evenkeel_store::Digest;
use serde::{Deserialize, Serialize};

use crate::config::{RecordFormat, Settings, in_toml, of_images};

/// Keys of `[data]` that decide what is read and what a position in it means. The others change how fast it is read or what
/// becomes of a picture, or the contents of their files stand for them.
const KEYS: [&str; 20] = [
    "source",
    "separator",
    "format",
    "text_column",
    "second_text_column",
    "label_column",
    "labels",
    "instruction_column",
    "input_column",
    "output_column",
    "messages_column",
    "tools_column",
    "sequence",
    "packing",
    "packing_strategy",
    "label_beyond_cut",
    "shuffle",
    "seed",
    "holdout",
    "records",
];

/// Keys about tokens, which images do not have.
const OF_TOKENS: [&str; 3] = ["sequence", "tools_column", "label_beyond_cut"];

/// Keys that only labelled texts have.
const OF_LABELS: [&str; 3] = ["second_text_column", "label_column", "labels"];

/// The behaviour of runs before these keys existed.
const BEFORE: [(&str, &str); 2] = [("data.packing_strategy", "\"cut\""), ("data.label_beyond_cut", "true")];
/// Only conversations have tools, which were dropped before this key existed.
const TOOLS: (&str, &str) = ("data.tools_column", "\"tools\"");

/// Names and values; part of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    pub fn new(settings: &Settings) -> Fingerprint {
        let sections = settings.values().into_iter().filter(|(section, _)| *section == "data");
        let (of_images, is_labelled) = (of_images(settings), settings.data.format == RecordFormat::Labelled);
        let is_meant =
            |key: &&str| !(of_images && OF_TOKENS.contains(key)) && (is_labelled || !OF_LABELS.contains(key));
        let counts = |key: &&str| KEYS.contains(key) && is_meant(key);
        let values = sections.flat_map(|(_, values)| values).filter(|(key, _)| counts(key));
        Fingerprint(values.map(|(key, value)| (format!("data.{key}"), in_toml(&value))).collect())
    }

    /// Base names in order: a data set may be moved, and its files may be touched.
    pub fn add_files(&mut self, files: &[&Path]) {
        const SHOWN: usize = 3;
        let names: Vec<String> =
            files.iter().map(|file| file.file_name().unwrap_or_default().to_string_lossy().into_owned()).collect();
        let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
        let value = match names.len() {
            0..=SHOWN => shown,
            count => {
                let parts: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
                format!("{shown} and {} more files ({})", count - SHOWN, digest(&parts))
            }
        };
        self.0.insert("data.paths".to_owned(), value);
    }

    pub fn add(&mut self, name: &str, value: &str) {
        self.0.insert(name.to_owned(), value.to_owned());
    }

    /// A digest of a file's contents, or of the parts of several.
    pub fn add_contents(&mut self, name: &str, parts: &[&[u8]]) {
        self.0.insert(name.to_owned(), digest(parts));
    }

    /// The differences from `before`, a phrase each.
    pub fn differences(&self, before: &Fingerprint) -> Vec<String> {
        let mut before = before.clone();
        let has_tools = self.0.get("data.format").is_some_and(|format| format == "\"messages\"");
        let defaults = BEFORE.into_iter().chain((!has_tools).then_some(TOOLS));
        for (name, value) in defaults.filter(|(name, _)| self.0.contains_key(*name)) {
            before.0.entry(name.to_owned()).or_insert(value.to_owned());
        }
        let names: BTreeSet<&String> = self.0.keys().chain(before.0.keys()).collect();
        let value = |of: &Fingerprint, name| of.0.get(name).map_or("not set".to_owned(), |value| shorten(value));
        let differ = names.into_iter().filter(|name| self.0.get(*name) != before.0.get(*name));
        differ.map(|name| format!("`{name}` was {} and is {}", value(&before, name), value(self, name))).collect()
    }
}

/// Names and separators come from the user and may be of any length.
fn shorten(value: &str) -> String {
    evenkeel_store::shortened(value, 120)
}

/// Lengths keep parts apart.
fn digest(parts: &[&[u8]]) -> String {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend_from_slice(&part.len().to_le_bytes());
        bytes.extend_from_slice(part);
    }
    Digest::of(&bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_files(names: &[&str]) -> Fingerprint {
        let mut fingerprint = Fingerprint::default();
        fingerprint.add_files(&names.iter().map(Path::new).collect::<Vec<_>>());
        fingerprint
    }

    #[test]
    fn files_are_known_by_their_names_and_their_order() {
        let few = of_files(&["a/x.txt", "a/y.txt"]);
        assert_eq!(few.differences(&of_files(&["/moved/x.txt", "y.txt"])), [""; 0]);
        assert_eq!(few.differences(&of_files(&["y.txt"])), ["`data.paths` was y.txt and is x.txt, y.txt"]);
        let many = of_files(&["1", "2", "3", "4", "5"]);
        assert_eq!(many.differences(&of_files(&["/1", "/2", "/3", "/4", "/5"])), [""; 0]);
        for other in [["1", "2", "3", "5", "4"], ["1", "2", "3", "45", ""], ["1", "2", "3", "4", "6"]] {
            assert_eq!(many.differences(&of_files(&other)).len(), 1, "{other:?}");
        }
    }

    #[test]
    fn what_was_saved_before_a_key_was_there_is_what_runs_did_then() {
        let of = |pairs: &[(&str, &str)]| {
            Fingerprint(pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
        };
        let old = of(&[("data.sequence", "64")]);
        let now = |strategy, label| {
            let keys = [("data.packing_strategy", strategy), ("data.label_beyond_cut", label)];
            of(&[&keys[..], &[("data.sequence", "64"), ("data.tools_column", "\"tools\"")]].concat())
        };
        assert_eq!(now("\"cut\"", "true").differences(&old), [""; 0]);
        assert_eq!(now("\"cut\"", "false").differences(&old), ["`data.label_beyond_cut` was true and is false"]);
        assert_eq!(
            now("\"best-fit\"", "true").differences(&old),
            ["`data.packing_strategy` was \"cut\" and is \"best-fit\""]
        );
        // Images have none of these.
        assert_eq!(old.differences(&old), [""; 0]);
    }

    #[test]
    fn contents_are_known_by_their_bytes() {
        let of = |parts: &[&[u8]]| {
            let mut fingerprint = Fingerprint::default();
            fingerprint.add_contents("tokenizer", parts);
            fingerprint
        };
        assert_eq!(of(&[b"ab"]), of(&[b"ab"]));
        assert_ne!(of(&[b"ab"]), of(&[b"a", b"b"]));
        assert!(of(&[b"ab"]).differences(&Fingerprint::default())[0].starts_with("`tokenizer` was not set and is "));
    }
}
