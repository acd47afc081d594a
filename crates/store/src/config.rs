//! config.json, with the description of an architecture that may lie beside it.

use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value};
use toml::de::DeTable;

use crate::error::printable;
use crate::{Defect, Error, json, limits, read_text, regular_file};

/// The key of config.json that has such a description. A file beside config.json takes its place.
pub const DESCRIPTION: &str = "evenkeel_architecture";

const DESCRIPTION_FILE: &str = "architecture.toml";

/// Reads a config.json, and `architecture.toml` in its folder if there is one. It is an object.
pub fn read_config(path: impl AsRef<Path>) -> Result<Value, Error> {
    let path = path.as_ref();
    let mut config: Map<String, Value> = json::read(path, limits::CONFIG_BYTES)?;
    let file = path.with_file_name(DESCRIPTION_FILE);
    if regular_file::is_listed(&file) {
        config.insert(DESCRIPTION.to_owned(), read_toml(&file).map_err(|defect| defect.of(&file))?);
    }
    Ok(Value::Object(config))
}

fn read_toml(path: &Path) -> Result<Value, Defect> {
    let bytes = regular_file::read(path, limits::CONFIG_BYTES)?;
    let text = str::from_utf8(&bytes).map_err(|error| Defect::NotText { at: error.valid_up_to() })?;
    toml::from_str(text).map_err(|error| Defect::NotToml {
        line: line_of(text, error.span().unwrap_or(0..0)),
        detail: printable(error.message()),
    })
}

/// Whether a description lies in a folder.
pub fn has_description(folder: &Path) -> bool {
    regular_file::is_listed(&folder.join(DESCRIPTION_FILE))
}

/// The line of `key`, or of `table.key`, in the description that lies in a folder, counted from 1.
pub fn line_of_description(folder: &Path, key: &str) -> Option<usize> {
    let text = read_text(folder.join(DESCRIPTION_FILE), limits::CONFIG_BYTES).ok()?;
    let document = DeTable::parse(&text).ok()?;
    let found = match key.split_once('.') {
        None => document.get_ref().get_key_value(key),
        Some((table, key)) => document.get_ref().get(table)?.get_ref().as_table()?.get_key_value(key),
    };
    found.map(|(key, _)| line_of(&text, key.span()))
}

fn line_of(text: &str, span: Range<usize>) -> usize {
    text.as_bytes()[..span.start.min(text.len())].iter().filter(|&&byte| byte == b'\n').count() + 1
}
