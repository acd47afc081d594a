//! The form of a description: its keys are known, and their values are of the right kind. Mistakes name the key.

use std::collections::BTreeMap;

use evenkeel_store::nearest;
use serde::de::value::Error as Stopped;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Map, Value};

use super::{Description, NewNames, NewOptions, bad, bad_with_hint};
use crate::config::shorten;
use crate::error::Error;

pub(super) fn check(description: &Value) -> Result<(), Error> {
    check_table::<Description>(description, "", &["keys", "names", "options"])?;
    for (table, check) in [
        ("keys", check_table::<BTreeMap<String, String>> as fn(&Value, &str, &[&str]) -> Result<(), Error>),
        ("names", check_table::<NewNames>),
        ("options", check_table::<NewOptions>),
    ] {
        description.get(table).map_or(Ok(()), |value| check(value, table, &[]))?;
    }
    Ok(())
}

/// Checks each key by itself, but for the `inner` ones, whose values are tables.
fn check_table<T: DeserializeOwned>(value: &Value, table: &str, inner: &[&str]) -> Result<(), Error> {
    let Some(object) = value.as_object() else {
        let name = if table.is_empty() { "it".to_owned() } else { format!("`{table}`") };
        return Err(bad(table, format!("{name} is {}, expected a table", shorten(&value.to_string()))));
    };
    let known = fields_of::<T>();
    for (key, value) in object {
        let path = within(table, key);
        if known.is_some_and(|known| !known.contains(&key.as_str())) {
            return Err(bad_with_hint(&path, format!("unknown key `{}`", shorten(&path)), Some(hint(table, key))));
        }
        if inner.contains(&key.as_str()) {
            continue;
        }
        if let Err(error) = T::deserialize(&Value::Object(Map::from_iter([(key.clone(), value.clone())]))) {
            return Err(wrong_value(&path, value, &error.to_string()));
        }
    }
    Ok(())
}

fn within(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

/// `error` is serde's; it ends with what was expected.
fn wrong_value(path: &str, value: &Value, error: &str) -> Error {
    let expected = match error.rsplit_once("expected ").map_or(error, |(_, expected)| expected) {
        "a boolean" => "true or false",
        "a string" => "a text",
        "a sequence" => "a list of texts",
        "f64" => "a number",
        "usize" => "a whole number",
        other => other,
    };
    let choices = expected.split('`').skip(1).step_by(2);
    let meant = value.as_str().and_then(|text| nearest(text, choices));
    let what = format!("`{}` is {}, expected {expected}", shorten(path), shorten(&value.to_string()));
    bad_with_hint(path, what, meant.map(|meant| format!("did you mean \"{meant}\"?")))
}

/// The key of this table or of another one that is probably meant.
fn hint(table: &str, key: &str) -> String {
    let fields = [
        ("", fields_of::<Description>().unwrap_or_default()),
        ("names", fields_of::<NewNames>().unwrap_or_default()),
        ("options", fields_of::<NewOptions>().unwrap_or_default()),
    ];
    let of_table = fields.iter().filter(|(other, _)| *other == table).flat_map(|(_, keys)| keys.iter().copied());
    let here = nearest(key, of_table.clone()).map(|meant| within(table, meant));
    let elsewhere = || fields.iter().find(|(_, keys)| keys.contains(&key)).map(|(other, _)| within(other, key));
    match here.or_else(elsewhere) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => format!("the keys here are {}", of_table.collect::<Vec<_>>().join(", ")),
    }
}

/// The fields of a struct; `None` for a map.
fn fields_of<T: DeserializeOwned>() -> Option<&'static [&'static str]> {
    /// Notes the fields that it is asked for.
    struct Asked<'a>(&'a mut Option<&'static [&'static str]>);

    impl<'de> Deserializer<'de> for Asked<'_> {
        type Error = Stopped;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Stopped> {
            Err(Stopped::custom("it has no values"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Stopped> {
            *self.0 = Some(fields);
            self.deserialize_any(visitor)
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut fields = None;
    // It stops as soon as the fields are known.
    let _stopped = T::deserialize(Asked(&mut fields));
    fields
}
