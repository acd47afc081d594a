//! The types of keys' values, read from TOML within bounds and written back.

use std::fmt;
use std::path::PathBuf;

use evenkeel_balance::Mode;
use toml::Value;

/// A type that a key can have.
pub trait Setting: Sized {
    fn kind(bounds: Bounds) -> SettingKind;

    /// `None` if the value is of another type or out of bounds.
    fn read(value: &Value, bounds: Bounds) -> Option<Self>;

    /// `None` for a key that is not set.
    fn write(&self) -> Option<Value>;

    /// The value of a key without default that is not given; `None` makes the key required.
    fn absent() -> Option<Self> {
        None
    }

    /// Stands in for a value that could not be read, while other mistakes are looked for.
    fn placeholder() -> Self;
}

/// The numbers that a key accepts. Every bound is small enough for an f64 to hold it exactly.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    least: f64,
    most: f64,
    least_excluded: bool,
    most_excluded: bool,
}

pub fn anything() -> Bounds {
    Bounds { least: f64::NEG_INFINITY, most: f64::INFINITY, least_excluded: false, most_excluded: false }
}

/// This and more.
pub fn from(least: impl Into<f64>) -> Bounds {
    Bounds { least: least.into(), ..anything() }
}

/// More than this.
pub fn above(least: impl Into<f64>) -> Bounds {
    Bounds { least_excluded: true, ..from(least) }
}

impl Bounds {
    pub fn to(self, most: impl Into<f64>) -> Bounds {
        Bounds { most: most.into(), most_excluded: false, ..self }
    }

    pub fn below(self, most: impl Into<f64>) -> Bounds {
        Bounds { most_excluded: true, ..self.to(most) }
    }

    fn contains(self, value: f64) -> bool {
        let least = if self.least_excluded { value > self.least } else { value >= self.least };
        let most = if self.most_excluded { value < self.most } else { value <= self.most };
        least && most && value.is_finite()
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.least.is_finite() {
            write!(out, " {} {}", if self.least_excluded { "above" } else { "from" }, self.least)?;
        }
        if self.most.is_finite() {
            let words = match (self.least_excluded, self.most_excluded) {
                (_, true) => ", below",
                (true, false) => ", up to",
                (false, false) => " to",
            };
            write!(out, "{words} {}", self.most)?;
        }
        Ok(())
    }
}

/// The form of a key's values, for messages, for `--explain` and for the words after `--set`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SettingKind {
    Flag,
    Whole(Bounds),
    Number(Bounds),
    Text,
    Path,
    Texts,
    Paths,
    Numbers(Bounds),
    WholeNumbers(Bounds),
    Choice(&'static [&'static str]),
}

impl SettingKind {
    /// Whether `--set` takes the words as they are, without quotes.
    pub fn is_text(self) -> bool {
        matches!(self, SettingKind::Text | SettingKind::Path | SettingKind::Choice(_))
    }

    pub fn is_list(self) -> bool {
        matches!(self, SettingKind::Texts | SettingKind::Paths | SettingKind::Numbers(_) | SettingKind::WholeNumbers(_))
    }

    /// For `expected …` in a message.
    pub fn expected(self) -> String {
        match self {
            SettingKind::Flag => self.to_string(),
            SettingKind::Choice([_]) => self.to_string(),
            SettingKind::Choice(_) => format!("one of {self}"),
            _ => format!("a {self}"),
        }
    }
}

impl fmt::Display for SettingKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingKind::Flag => out.write_str("true or false"),
            SettingKind::Whole(bounds) => write!(out, "whole number{bounds}"),
            SettingKind::Number(bounds) => write!(out, "number{bounds}"),
            SettingKind::Text => out.write_str("text"),
            SettingKind::Path => out.write_str("path"),
            SettingKind::Texts => out.write_str("list of texts"),
            SettingKind::Paths => out.write_str("list of paths"),
            SettingKind::Numbers(bounds) => write!(out, "list of numbers{bounds}"),
            SettingKind::WholeNumbers(bounds) => write!(out, "list of whole numbers{bounds}"),
            SettingKind::Choice(names) => {
                let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
                out.write_str(&quoted.join(", "))
            }
        }
    }
}

/// A value as written in a file. Small and large numbers keep their exponent.
pub fn in_toml(value: &Value) -> String {
    match value {
        Value::Float(number) if number.is_finite() => format!("{number:?}"),
        value => value.to_string(),
    }
}

impl Setting for bool {
    fn kind(_: Bounds) -> SettingKind {
        SettingKind::Flag
    }

    fn read(value: &Value, _: Bounds) -> Option<bool> {
        value.as_bool()
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Boolean(*self))
    }

    fn placeholder() -> bool {
        false
    }
}

macro_rules! whole_numbers {
    ($($type:ty),+) => {$(
        impl Setting for $type {
            fn kind(bounds: Bounds) -> SettingKind {
                SettingKind::Whole(bounds)
            }

            fn read(value: &Value, bounds: Bounds) -> Option<$type> {
                let whole = value.as_integer().filter(|&whole| bounds.contains(whole as f64))?;
                whole.try_into().ok()
            }

            fn write(&self) -> Option<Value> {
                // Read from an i64, or a small default.
                Some(Value::Integer(*self as i64))
            }

            fn placeholder() -> $type {
                1
            }
        }
    )+};
}

whole_numbers!(usize, u64, u32);

impl Setting for f64 {
    fn kind(bounds: Bounds) -> SettingKind {
        SettingKind::Number(bounds)
    }

    fn read(value: &Value, bounds: Bounds) -> Option<f64> {
        let number = value.as_float().or(value.as_integer().map(|whole| whole as f64))?;
        Some(number).filter(|&number| bounds.contains(number))
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Float(*self))
    }

    fn placeholder() -> f64 {
        1.0
    }
}

impl Setting for String {
    fn kind(_: Bounds) -> SettingKind {
        SettingKind::Text
    }

    fn read(value: &Value, _: Bounds) -> Option<String> {
        value.as_str().map(str::to_owned)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.clone()))
    }

    fn placeholder() -> String {
        String::new()
    }
}

impl Setting for PathBuf {
    fn kind(_: Bounds) -> SettingKind {
        SettingKind::Path
    }

    fn read(value: &Value, _: Bounds) -> Option<PathBuf> {
        value.as_str().filter(|path| !path.is_empty() && !path.contains('\0')).map(PathBuf::from)
    }

    fn write(&self) -> Option<Value> {
        // Read from a text, so nothing is lost.
        Some(Value::String(self.to_string_lossy().into_owned()))
    }

    fn placeholder() -> PathBuf {
        PathBuf::new()
    }
}

impl<T: Setting> Setting for Vec<T> {
    fn kind(bounds: Bounds) -> SettingKind {
        match T::kind(bounds) {
            SettingKind::Path => SettingKind::Paths,
            SettingKind::Number(bounds) => SettingKind::Numbers(bounds),
            SettingKind::Whole(bounds) => SettingKind::WholeNumbers(bounds),
            _ => SettingKind::Texts,
        }
    }

    fn read(value: &Value, bounds: Bounds) -> Option<Vec<T>> {
        value.as_array()?.iter().map(|value| T::read(value, bounds)).collect()
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Array(self.iter().filter_map(T::write).collect()))
    }

    fn placeholder() -> Vec<T> {
        Vec::new()
    }
}

impl<T: Setting> Setting for Option<T> {
    fn kind(bounds: Bounds) -> SettingKind {
        T::kind(bounds)
    }

    fn read(value: &Value, bounds: Bounds) -> Option<Option<T>> {
        T::read(value, bounds).map(Some)
    }

    fn write(&self) -> Option<Value> {
        self.as_ref().and_then(T::write)
    }

    fn absent() -> Option<Option<T>> {
        Some(None)
    }

    fn placeholder() -> Option<T> {
        None
    }
}

impl Setting for Mode {
    fn kind(_: Bounds) -> SettingKind {
        SettingKind::Choice(&Mode::NAMES)
    }

    fn read(value: &Value, _: Bounds) -> Option<Mode> {
        value.as_str().and_then(Mode::named)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::String(self.name().to_owned()))
    }

    fn placeholder() -> Mode {
        Mode::Off
    }
}

/// Settings of types whose values have one name each.
macro_rules! named {
    ($($type:ident { $first:expr => $first_name:literal $(, $other:expr => $name:literal)* })+) => {$(
        impl $crate::config::setting::Setting for $type {
            fn kind(_: $crate::config::setting::Bounds) -> $crate::config::setting::SettingKind {
                $crate::config::setting::SettingKind::Choice(&[$first_name $(, $name)*])
            }

            fn read(value: &toml::Value, _: $crate::config::setting::Bounds) -> Option<$type> {
                match value.as_str()? {
                    $first_name => Some($first),
                    $($name => Some($other),)*
                    _ => None,
                }
            }

            fn write(&self) -> Option<toml::Value> {
                let names = [($first, $first_name) $(, ($other, $name))*];
                let name = names.into_iter().find_map(|(value, name)| (value == *self).then_some(name));
                name.map(|name| toml::Value::String(name.to_owned()))
            }

            fn placeholder() -> $type {
                $first
            }
        }
    )+};
}

/// An enum whose values have one name each.
macro_rules! choices {
    ($($(#[$attribute:meta])* $type:ident { $first:ident = $first_name:literal $(, $other:ident = $name:literal)* })+) => {$(
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $type { $first $(, $other)* }

        impl $type {
            #[allow(dead_code, reason = "not every choice is named outside of settings")]
            pub fn name(self) -> &'static str {
                match self { $type::$first => $first_name $(, $type::$other => $name)* }
            }
        }

        $crate::config::setting::named! { $type { $type::$first => $first_name $(, $type::$other => $name)* } }
    )+};
}

pub(super) use {choices, named};
