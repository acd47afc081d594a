//! Folders of models that also read pictures or sounds. Their config.json has the text model's in `text_config`; all else that they
//! have is carried over untouched.

use serde_json::{Map, Value};

use super::family::{Family, Multimodal};
use super::keys::Keys;
use super::known_keys::refuse_unknown_around_text;
use super::shorten;
use crate::error::Error;

/// Keys that the text model's config takes from around it.
const SHARED: [&str; 4] = ["architectures", "tie_word_embeddings", "quantization_config", "initializer_range"];

/// The text model's config, with what is said of it around it.
pub(super) fn text_config(json: &Value, family: &Family, multimodal: &Multimodal) -> Result<Value, Error> {
    refuse_unknown_around_text(json, family, multimodal)?;
    let around = Keys { json };
    let text = around.get("text_config").ok_or_else(|| around.missing("text_config", "an object"))?;
    let mut text: Map<String, Value> = text.as_object().ok_or_else(|| around.bad("text_config", "an object"))?.clone();
    let found = text.get("model_type").and_then(Value::as_str).unwrap_or(multimodal.text_type);
    if found != multimodal.text_type {
        let what = format!("a `{}` with text by `{}`", family.model_type, shorten(found));
        return Err(Error::Unsupported { what });
    }
    text.insert("model_type".to_owned(), family.model_type.into());
    text.remove("architectures");
    for key in SHARED {
        if let Some(value) = around.get(key) {
            text.insert(key.to_owned(), value.clone());
        }
    }
    for (key, value) in multimodal.defaults {
        text.entry(*key).or_insert_with(|| (*value).into());
    }
    Ok(Value::Object(text))
}

impl Multimodal {
    /// A tensor's name in folders of older versions.
    pub(crate) fn older_name(&self, name: &str) -> String {
        let renamed = self.older.iter().find_map(|(now, older)| Some(format!("{older}{}", name.strip_prefix(now)?)));
        renamed.unwrap_or_else(|| name.to_owned())
    }
}
