//! Python's functions for chat templates: `tojson` writes as `json.dumps`, dates as `strftime`.

use std::io::{self, Write};

use jiff::Timestamp;
use jiff::fmt::strtime;
use jiff::tz::TimeZone;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// If it were nested deeper, a value built by a template's loop could exhaust the stack when it is printed.
const DEEPEST: usize = 64;
/// JSON from data is bounded by its file; this bounds a template's own.
const JSON_BYTES: usize = 16 << 20;

/// The filter `tojson`: `json.dumps(value, ensure_ascii=False, indent=indent)`.
pub(crate) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    check_depth(value)?;
    let mut out = Bounded { bytes: Vec::new(), limit: JSON_BYTES };
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, PythonJson)),
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(indent.as_bytes())))
        }
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from(String::from_utf8_lossy(&out.bytes).into_owned()))
}

/// Refuses lists and tables nested too deep to print.
pub(crate) fn check_depth(value: &Value) -> Result<(), Error> {
    let mut level = vec![value.clone()];
    for _ in 0..DEEPEST {
        let nested = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Map);
        let mut next = Vec::new();
        for value in level.into_iter().filter(nested) {
            let is_map = value.kind() == ValueKind::Map;
            for item in value.try_iter()? {
                let item = if is_map { value.get_item(&item)? } else { item };
                if nested(&item) {
                    next.push(item);
                }
            }
            if next.len() > JSON_BYTES / 64 {
                return Err(Error::new(ErrorKind::InvalidOperation, "a value has too many parts to print"));
            }
        }
        if next.is_empty() {
            return Ok(());
        }
        level = next;
    }
    Err(Error::new(ErrorKind::InvalidOperation, format!("a value is nested deeper than {DEEPEST}")))
}

/// Python puts a space behind `,` and `:`.
struct PythonJson;

impl Formatter for PythonJson {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// Takes at most so many bytes.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {} bytes", self.limit)));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `strftime` for a time in seconds since 1970, UTC. `None` for a directive that is not known.
pub(crate) fn strftime(seconds: u64, format: &str) -> Option<String> {
    let time = Timestamp::from_second(i64::try_from(seconds).ok()?).ok()?;
    strtime::format(format, time.to_zoned(TimeZone::UTC).datetime()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let cases = [
            (0, "%Y-%m-%d %A", "1970-01-01 Thursday"),
            (951_782_400, "%d %b %Y, %a", "29 Feb 2000, Tue"),
            (1_709_251_199, "%F %T", "2024-02-29 23:59:59"),
            (1_709_251_200, "%-d %B %y %I%p", "1 March 24 12AM"),
            (4_107_542_400, "%F", "2100-03-01"),
            (1_735_732_800, "100%%", "100%"),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(strftime(seconds, format).as_deref(), Some(expected), "{format}");
        }
        assert_eq!(strftime(0, "%Q"), None);
        assert_eq!(strftime(0, "%"), None);
    }
}
