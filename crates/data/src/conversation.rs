//! Conversations of a record as chat templates take them: messages, and the tools that the assistant may call.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::error::{Error, printable};
use crate::template::Template;
use crate::tokenizer::kind;

/// Messages with their roles. Contents that are lists of parts stay so for templates that read them, and become text for others.
///
/// Keys that are null are left out, except the content: a table has a column for every key that any message has, and templates
/// ask whether a message has the key.
pub(crate) fn messages(messages: &[Value], template: &Template) -> Result<Vec<Value>, Error> {
    messages.iter().enumerate().map(|(index, message)| self::message(index, message, template)).collect()
}

fn message(index: usize, message: &Value, template: &Template) -> Result<Value, Error> {
    let wrong = |expected, value| Error::WrongMessage { message: index, expected, found: kind(value) };
    let keys = message.as_object().ok_or_else(|| wrong("a table with `role` and `content`", message))?;
    let keys = &*with_role(keys);
    match keys.get("role") {
        Some(Value::String(_)) => (),
        Some(role) => return Err(wrong("a table whose `role` is a text", role)),
        None => return Err(missing(index, "role", keys)),
    }
    let mut kept: Map<String, Value> = keys
        .iter()
        .filter(|(key, value)| !value.is_null() || *key == "content")
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    if let Some(Value::Array(parts)) = keys.get("content") {
        let texts = parts.iter().map(|part| text_of(index, part)).collect::<Result<Vec<&str>, Error>>()?;
        if !template.reads_parts() {
            kept.insert("content".to_owned(), Value::String(texts.concat()));
        }
    }
    Ok(Value::Object(kept))
}

/// ShareGPT has `from` and `value` in place of `role` and `content`, and its own names for speakers.
fn with_role(keys: &Map<String, Value>) -> Cow<'_, Map<String, Value>> {
    let (Some(Value::String(from)), Some(value), None) = (keys.get("from"), keys.get("value"), keys.get("role")) else {
        return Cow::Borrowed(keys);
    };
    let role = match from.as_str() {
        "human" => "user",
        "gpt" => "assistant",
        "observation" => "tool",
        other => other,
    };
    let mut renamed = keys.clone();
    renamed.retain(|key, _| key != "from" && key != "value");
    renamed.insert("role".to_owned(), role.into());
    renamed.insert("content".to_owned(), value.clone());
    Cow::Owned(renamed)
}

/// A part is `{"type": "text", "text": …}`, or a text as it is.
fn text_of(index: usize, part: &Value) -> Result<&str, Error> {
    let wrong = |expected, value| Error::WrongMessage { message: index, expected, found: kind(value) };
    let keys = match part {
        Value::String(text) => return Ok(text),
        Value::Object(keys) => keys,
        other => return Err(wrong("a list of parts with `type` and `text`", other)),
    };
    match keys.get("type").and_then(Value::as_str) {
        Some("text") | None => (),
        Some(other) => return Err(Error::NotText { message: index, kind: printable(other) }),
    }
    match keys.get("text") {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(wrong("a list of parts whose `text` is a text", other)),
        None => Err(missing(index, "text", keys)),
    }
}

fn missing(message: usize, key: &'static str, keys: &Map<String, Value>) -> Error {
    Error::MissingKey { message, key, found: keys.keys().cloned().collect() }
}

/// A list of JSON schemas; the list, or each schema, may be JSON in a text, as tables have it. An empty text is no list.
pub(crate) fn tools(column: &str, value: &Value) -> Result<Option<Value>, Error> {
    const EXPECTED: &str = "a list of tools, each a JSON schema, or JSON of that";
    let wrong = |found| Error::WrongColumn { column: column.to_owned(), expected: EXPECTED, found };
    let parsed = |value: &Value| match value {
        Value::String(text) => serde_json::from_str(text).map_err(|_| wrong("a text that is not JSON")),
        other => Ok(other.clone()),
    };
    if value.as_str().is_some_and(|text| text.trim().is_empty()) {
        return Ok(None);
    }
    let tool = |value: &Value| match parsed(value)? {
        Value::Object(keys) => Ok(Value::Object(keys.into_iter().filter(|(_, value)| !value.is_null()).collect())),
        other => Err(wrong(kind(&other))),
    };
    match parsed(value)? {
        Value::Null => Ok(None),
        Value::Array(tools) => Ok(Some(Value::Array(tools.iter().map(tool).collect::<Result<_, _>>()?))),
        other => Err(wrong(kind(&other))),
    }
}

/// The user's message for an instruction: the input, if there is one, on a line of its own.
pub(crate) fn instruction<'a>(instruction: &'a str, input: Option<&str>) -> Cow<'a, str> {
    input.map_or(Cow::Borrowed(instruction), |input| Cow::Owned(format!("{instruction}\n{input}")))
}
