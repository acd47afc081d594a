//! Checks how deeply a file's columns are nested before the Parquet reader sees its metadata.
//!
//! The reader (parquet 60) descends into the schema by recursion without a bound, so a footer of some ten thousand
//! groups within each other would overflow the stack, which ends the process. This walks the same bytes (Thrift's
//! compact protocol) with a bound of its own and keeps nothing.

/// The deepest nesting of a value in the metadata. Parquet's own has 6 levels.
const VALUE_DEPTH: usize = 32;
const SCHEMA_FIELD: i64 = 2;
const CHILDREN_FIELD: i64 = 5;

const BYTE: u8 = 3;
const INTEGERS: std::ops::RangeInclusive<u8> = 4..=6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const SET: u8 = 10;
const MAP: u8 = 11;
const STRUCT: u8 = 12;

/// The deepest level of the schema, or `None` if these bytes are not the metadata of a Parquet file.
pub(super) fn schema_depth(footer: &[u8]) -> Option<usize> {
    let mut walk = Walk { rest: footer };
    let mut deepest = 0;
    let mut field = 0;
    while let Some(kind) = walk.field(&mut field)? {
        if (field, kind) == (SCHEMA_FIELD, LIST) {
            deepest = deepest.max(walk.schema()?);
        } else {
            walk.skip(kind, 0)?;
        }
    }
    Some(deepest)
}

struct Walk<'footer> {
    rest: &'footer [u8],
}

impl Walk<'_> {
    /// The list of schema elements: each inner one is followed by as many children as it says.
    fn schema(&mut self) -> Option<usize> {
        let (count, kind) = self.list()?;
        let mut open: Vec<i64> = Vec::new();
        let mut deepest = 0;
        for _ in 0..count {
            if kind != STRUCT {
                return None;
            }
            let children = self.schema_element()?;
            if let Some(left) = open.last_mut() {
                *left -= 1;
            }
            if children > 0 {
                open.push(children);
            }
            deepest = deepest.max(open.len());
            while open.last() == Some(&0) {
                open.pop();
            }
        }
        Some(deepest)
    }

    fn schema_element(&mut self) -> Option<i64> {
        let mut children = 0;
        let mut field = 0;
        while let Some(kind) = self.field(&mut field)? {
            if field == CHILDREN_FIELD && INTEGERS.contains(&kind) {
                children = self.integer()?;
            } else {
                self.skip(kind, 0)?;
            }
        }
        Some(children)
    }

    /// The type of the next field of a struct, and its number; no type at the struct's end.
    fn field(&mut self, number: &mut i64) -> Option<Option<u8>> {
        let header = self.byte()?;
        if header == 0 {
            return Some(None);
        }
        *number = match header >> 4 {
            0 => self.integer()?,
            step => number.checked_add(step.into())?,
        };
        Some(Some(header & 0x0f))
    }

    fn list(&mut self) -> Option<(u64, u8)> {
        let header = self.byte()?;
        let count = match header >> 4 {
            15 => self.varint()?,
            count => count.into(),
        };
        Some((count, header & 0x0f))
    }

    /// Skips a value. A boolean field has no bytes; its type is its value.
    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        if depth > VALUE_DEPTH {
            return None;
        }
        match kind {
            1 | 2 => {}
            BYTE => self.bytes(1)?,
            kind if INTEGERS.contains(&kind) => drop(self.varint()?),
            DOUBLE => self.bytes(8)?,
            BINARY => {
                let length = self.varint()?;
                self.bytes(length)?;
            }
            LIST | SET => {
                let (count, kind) = self.list()?;
                (0..count).try_for_each(|_| self.skip_element(kind, depth))?;
            }
            MAP => {
                let count = self.varint()?;
                let kinds = if count > 0 { self.byte()? } else { 0 };
                (0..count).try_for_each(|_| {
                    self.skip_element(kinds >> 4, depth)?;
                    self.skip_element(kinds & 0x0f, depth)
                })?;
            }
            STRUCT => {
                let mut field = 0;
                while let Some(kind) = self.field(&mut field)? {
                    self.skip(kind, depth + 1)?;
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Within lists and maps a boolean is a byte. So each element has at least one, and the footer's length bounds a count.
    fn skip_element(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1 | 2 => self.bytes(1),
            kind => self.skip(kind, depth + 1),
        }
    }

    fn integer(&mut self) -> Option<i64> {
        let folded = self.varint()?;
        Some((folded >> 1) as i64 ^ -((folded & 1) as i64))
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    fn bytes(&mut self, count: u64) -> Option<()> {
        self.rest = self.rest.get(usize::try_from(count).ok()?..)?;
        Some(())
    }
}
