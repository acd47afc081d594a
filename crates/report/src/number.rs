//! Numbers that may not be finite, for which JSON has no form: they are the texts "NaN", "Infinity" and "-Infinity", which
//! Python's `float` reads. This module and those in it are for `#[serde(with = …)]`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The text that stands for a number in JSON, if it is not finite.
pub(crate) fn text(value: f64) -> Option<&'static str> {
    match value {
        f64::INFINITY => Some("Infinity"),
        f64::NEG_INFINITY => Some("-Infinity"),
        _ => value.is_nan().then_some("NaN"),
    }
}

pub(crate) fn serialize<S: Serializer>(value: &f64, out: S) -> Result<S::Ok, S::Error> {
    Number(*value).serialize(out)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Number::deserialize(from).map(f64::from)
}

pub(crate) mod option {
    use super::*;

    pub fn serialize<S: Serializer>(value: &Option<f64>, out: S) -> Result<S::Ok, S::Error> {
        value.map(Number).serialize(out)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<Number>::deserialize(from)?.map(f64::from))
    }
}

pub(crate) mod list {
    use super::*;

    pub fn serialize<S: Serializer>(values: &[f64], out: S) -> Result<S::Ok, S::Error> {
        out.collect_seq(values.iter().copied().map(Number))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
        Ok(Vec::<Number>::deserialize(from)?.into_iter().map(f64::from).collect())
    }
}

pub(crate) mod named {
    use std::borrow::Cow;

    use super::*;

    pub fn serialize<S: Serializer>(values: &[(Cow<'static, str>, f64)], out: S) -> Result<S::Ok, S::Error> {
        out.collect_seq(values.iter().map(|(name, value)| (name, Number(*value))))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(Cow<'static, str>, f64)>, D::Error> {
        let values = Vec::<(String, Number)>::deserialize(from)?;
        Ok(values.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

struct Number(f64);

impl From<Number> for f64 {
    fn from(Number(value): Number) -> f64 {
        value
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        match text(self.0) {
            Some(text) => out.serialize_str(text),
            None => out.serialize_f64(self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Number, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Finite(f64),
            Other(NotFinite),
        }
        #[derive(Deserialize)]
        enum NotFinite {
            NaN,
            Infinity,
            #[serde(rename = "-Infinity")]
            NegativeInfinity,
        }
        Ok(Number(match Form::deserialize(from)? {
            Form::Finite(value) => value,
            Form::Other(NotFinite::NaN) => f64::NAN,
            Form::Other(NotFinite::Infinity) => f64::INFINITY,
            Form::Other(NotFinite::NegativeInfinity) => f64::NEG_INFINITY,
        }))
    }
}
