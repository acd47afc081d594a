//! JSON from files that are not trusted: bounded in length, bounded in depth (by serde_json, at 128), no key twice.
//!
//! Readers disagree on which of two equal keys counts, so a file with both can show one thing to a scanner and another
//! to the trainer.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::error::printable;
use crate::{Defect, Error, regular_file};

pub(crate) fn read<T: DeserializeOwned>(path: &Path, limit_bytes: u64) -> Result<T, Error> {
    let text = regular_file::read(path, limit_bytes).map_err(|defect| defect.of(path))?;
    parse(&text).map_err(|defect| defect.of(path))
}

pub(crate) fn parse<'text, T: Deserialize<'text>>(bytes: &'text [u8]) -> Result<T, Defect> {
    let text = str::from_utf8(bytes).map_err(|error| Defect::NotUtf8 { at: error.valid_up_to() })?;
    let detail = |error: serde_json::Error| printable(&error.to_string());
    let FirstDuplicate(duplicate) =
        serde_json::from_str(text).map_err(|error| Defect::NotJson { detail: detail(error) })?;
    match duplicate {
        Some(key) => Err(Defect::DuplicateKey { key: printable(&key) }),
        None => serde_json::from_str(text).map_err(|error| Defect::WrongForm { detail: detail(error) }),
    }
}

/// Walks any JSON value and keeps only the first key that one object has twice.
struct FirstDuplicate(Option<String>);

impl<'de> Deserialize<'de> for FirstDuplicate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DuplicateVisitor)
    }
}

struct DuplicateVisitor;

impl<'de> Visitor<'de> for DuplicateVisitor {
    type Value = FirstDuplicate;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("any JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<FirstDuplicate, E> {
        Ok(FirstDuplicate(None))
    }

    fn visit_i64<E>(self, _: i64) -> Result<FirstDuplicate, E> {
        Ok(FirstDuplicate(None))
    }

    fn visit_u64<E>(self, _: u64) -> Result<FirstDuplicate, E> {
        Ok(FirstDuplicate(None))
    }

    fn visit_f64<E>(self, _: f64) -> Result<FirstDuplicate, E> {
        Ok(FirstDuplicate(None))
    }

    fn visit_str<E>(self, _: &str) -> Result<FirstDuplicate, E> {
        Ok(FirstDuplicate(None))
    }

    fn visit_unit<E>(self) -> Result<FirstDuplicate, E> {
        Ok(FirstDuplicate(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<FirstDuplicate, A::Error> {
        let mut first = None;
        while let Some(FirstDuplicate(inner)) = values.next_element()? {
            first = first.or(inner);
        }
        Ok(FirstDuplicate(first))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<FirstDuplicate, A::Error> {
        let mut first = None;
        let mut keys = HashSet::new();
        while let Some((key, FirstDuplicate(inner))) = entries.next_entry::<String, FirstDuplicate>()? {
            first = first.or(inner);
            if let Some(key) = keys.replace(key) {
                first = first.or(Some(key));
            }
        }
        Ok(FirstDuplicate(first))
    }
}
