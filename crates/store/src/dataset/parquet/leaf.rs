//! The values of one leaf column in some rows, with the levels that assign each to its row and list.

use std::ops::Range;

use parquet::column::page::PageReader;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_column_reader};
use parquet::data_type::{ByteArray, DataType};
use parquet::schema::types::ColumnDescPtr;

/// Values and levels, and the position reached in them.
pub(super) struct LeafValues {
    /// `None`: no value is null.
    definitions: Option<Vec<i16>>,
    /// `None`: each level is a row.
    repetitions: Option<Vec<i16>>,
    most_definition: i16,
    values: Values,
    levels: usize,
    next_level: usize,
    next_value: usize,
}

pub(super) enum Values {
    Booleans(Vec<bool>),
    Integers(Vec<i32>),
    LongIntegers(Vec<i64>),
    Floats(Vec<f32>),
    Doubles(Vec<f64>),
    Bytes(Vec<ByteArray>),
}

/// Reads these rows. It skips the pages before them, mostly without decompressing.
pub(super) fn read(
    description: ColumnDescPtr,
    pages: Box<dyn PageReader>,
    rows: &Range<u64>,
) -> Result<LeafValues, String> {
    let mut leaf = LeafValues {
        definitions: (description.max_def_level() > 0).then(Vec::new),
        repetitions: (description.max_rep_level() > 0).then(Vec::new),
        most_definition: description.max_def_level(),
        values: Values::Booleans(Vec::new()),
        levels: 0,
        next_level: 0,
        next_value: 0,
    };
    leaf.values = match get_column_reader(description, pages) {
        ColumnReader::BoolColumnReader(reader) => Values::Booleans(leaf.read(reader, rows)?),
        ColumnReader::Int32ColumnReader(reader) => Values::Integers(leaf.read(reader, rows)?),
        ColumnReader::Int64ColumnReader(reader) => Values::LongIntegers(leaf.read(reader, rows)?),
        ColumnReader::FloatColumnReader(reader) => Values::Floats(leaf.read(reader, rows)?),
        ColumnReader::DoubleColumnReader(reader) => Values::Doubles(leaf.read(reader, rows)?),
        ColumnReader::ByteArrayColumnReader(reader) => Values::Bytes(leaf.read(reader, rows)?),
        _ => return Err("a column is of another type than the file's schema says".to_owned()),
    };
    Ok(leaf)
}

impl LeafValues {
    /// The definition and repetition level of the next value, null or not; `None` after the last.
    pub fn peek(&self) -> Option<(i16, i16)> {
        let level = |levels: &Option<Vec<i16>>, otherwise| match levels {
            Some(levels) => levels.get(self.next_level).copied(),
            None => (self.next_level < self.levels).then_some(otherwise),
        };
        Some((level(&self.definitions, self.most_definition)?, level(&self.repetitions, 0)?))
    }

    /// Advances past the next level: `Some(None)` for a null, else the index of its value; `None` after the last.
    pub fn take(&mut self) -> Option<Option<usize>> {
        let (definition, _) = self.peek()?;
        self.next_level += 1;
        if definition < self.most_definition {
            return Some(None);
        }
        self.next_value += 1;
        Some(Some(self.next_value - 1))
    }

    pub fn values(&self) -> &Values {
        &self.values
    }

    fn read<T: DataType>(&mut self, mut reader: ColumnReaderImpl<T>, rows: &Range<u64>) -> Result<Vec<T::T>, String> {
        let text = |error: parquet::errors::ParquetError| error.to_string();
        let skipped = rows.start as usize;
        let wanted = (rows.end - rows.start) as usize;
        let mut values = Vec::new();
        if reader.skip_records(skipped).map_err(text)? != skipped {
            return Err(format!("a column ends before row {skipped} of its group"));
        }
        let read = reader.read_records(wanted, self.definitions.as_mut(), self.repetitions.as_mut(), &mut values);
        let (records, _, levels) = read.map_err(text)?;
        if records != wanted {
            return Err(format!("a column has {records} rows where its group has {wanted}"));
        }
        self.levels = levels;
        Ok(values)
    }
}
