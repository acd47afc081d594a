//! config.json, with the description of an architecture that may lie beside it.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::printable;
use crate::{Defect, Error, json, limits, regular_file};

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
    toml::from_str(text).map_err(|error| Defect::NotToml { detail: printable(error.message()) })
}
