//! The keys of a JSON object, checked as they are read: no number from a file is used before it is bounded.

use evenkeel_device::kernel::Activation;
use serde_json::Value;

use super::family::Choice;
use super::{LARGEST_SIZE, shorten};
use crate::error::Error;

/// The keys of a JSON object, checked as they are read.
pub(super) struct Keys<'a> {
    pub json: &'a Value,
}

impl Keys<'_> {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    pub fn size(&self, key: &str) -> Result<usize, Error> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key, "a size"))
    }

    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, Error> {
        let size = self.bounded(key, LARGEST_SIZE)?;
        self.require(size != Some(0), key, "a size above 0")?;
        Ok(size)
    }

    pub fn bounded(&self, key: &str, largest: u64) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().filter(|&size| size <= largest);
        size.map(|size| Some(size as usize)).ok_or_else(|| self.bad(key, &format!("a whole number up to {largest}")))
    }

    pub fn optional_float(&self, key: &str) -> Result<Option<f64>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().filter(|value| value.is_finite()).map(Some).ok_or_else(|| self.bad(key, "a number"))
    }

    /// A number that is positive in f32, too.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, Error> {
        let value = self.optional_float(key)?;
        let is_positive = |value: f64| value as f32 > 0.0 && (value as f32).is_finite();
        self.require(value.is_none_or(is_positive), key, "a positive number")?;
        Ok(value)
    }

    /// The same, where 0 asks for nothing.
    pub fn positive_or_zero(&self, key: &str) -> Result<Option<f64>, Error> {
        if self.optional_float(key)? == Some(0.0) { Ok(None) } else { self.positive(key) }
    }

    /// A number that is not negative, in f32.
    pub fn not_negative(&self, key: &str) -> Result<Option<f32>, Error> {
        let value = self.optional_float(key)?.map(|value| value as f32);
        self.require(
            value.is_none_or(|value| value >= 0.0 && value.is_finite()),
            key,
            "a number that is not negative",
        )?;
        Ok(value)
    }

    /// Whether the key is missing, not null.
    pub fn lacks(&self, key: &str) -> bool {
        self.json.get(key).is_none()
    }

    /// A list of whole numbers, empty if there is none.
    pub fn numbers(&self, key: &str) -> Result<Vec<usize>, Error> {
        let Some(list) = self.get(key) else { return Ok(Vec::new()) };
        let number = |value: &Value| value.as_u64().and_then(|value| usize::try_from(value).ok());
        let numbers = list.as_array().and_then(|list| list.iter().map(number).collect());
        numbers.ok_or_else(|| self.bad(key, "a list of whole numbers"))
    }

    /// The type of each layer, if config.json says.
    pub fn layer_types(&self, layers: usize) -> Result<Option<&Vec<Value>>, Error> {
        let Some(types) = self.get("layer_types") else { return Ok(None) };
        let types = types.as_array().filter(|types| types.len() == layers);
        types.map(Some).ok_or_else(|| self.bad("layer_types", &format!("a list of {layers}")))
    }

    /// So many positive numbers.
    pub fn factors(&self, key: &str, count: usize) -> Result<Vec<f64>, Error> {
        let list = self.get(key).ok_or_else(|| self.missing(key, &format!("a list of {count} numbers")))?;
        let list = list.as_array().filter(|list| list.len() == count);
        let number = |value: &Value| value.as_f64().filter(|value| value.is_finite() && *value > 0.0);
        let factors = list.and_then(|list| list.iter().map(number).collect::<Option<Vec<f64>>>());
        factors.ok_or_else(|| self.bad(key, &format!("a list of {count} positive numbers")))
    }

    pub fn optional_flag(&self, key: &str) -> Result<Option<bool>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.bad(key, "true or false"))
    }

    pub fn optional_text(&self, key: &str) -> Result<Option<&str>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.bad(key, "a text"))
    }

    pub fn choice(&self, choice: &Choice) -> Result<bool, Error> {
        match choice {
            Choice::Never => Ok(false),
            Choice::Always => Ok(true),
            Choice::Key(key) => Ok(self.optional_flag(key)?.unwrap_or(false)),
            Choice::KeyOrTrue(key) => Ok(self.optional_flag(key)?.unwrap_or(true)),
        }
    }

    pub fn activation(&self, key: &str) -> Result<Option<Activation>, Error> {
        let Some(name) = self.optional_text(key)? else { return Ok(None) };
        activation(name).map(Some).ok_or_else(|| self.bad(key, ACTIVATIONS))
    }

    pub fn require(&self, holds: bool, key: &str, expected: &str) -> Result<(), Error> {
        if holds { Ok(()) } else { Err(self.bad(key, expected)) }
    }

    pub fn bad(&self, key: &str, expected: &str) -> Error {
        let found = self.json.get(key).map_or("missing".to_owned(), Value::to_string);
        Error::BadConfig { key: key.to_owned(), expected: expected.to_owned(), found: shorten(&found) }
    }

    pub fn missing(&self, key: &str, expected: &str) -> Error {
        Error::MissingKey { key: key.to_owned(), expected: expected.to_owned() }
    }
}

/// The names that [`activation`] knows, but for other spellings.
pub(super) const ACTIVATIONS: &str = "silu, gelu, gelu_new, gelu_pytorch_tanh or relu";

/// The activation that transformers calls so.
pub(super) fn activation(name: &str) -> Option<Activation> {
    match name {
        "silu" | "swish" => Some(Activation::Silu),
        "relu" => Some(Activation::Relu),
        "gelu" => Some(Activation::GeluErf),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Some(Activation::GeluTanh),
        _ => None,
    }
}
