//! Parquet files. A row group is one chunk, or several if it is large. Columns are read separately and assembled into rows.

mod footer;
mod leaf;
mod rows;
mod schema;
mod window;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData};
use parquet::file::serialized_reader::SerializedPageReader;

use self::leaf::LeafValues;
use self::schema::Column;
use self::window::Window;
use super::chunk_index::ChunkIndex;
use super::data_file::{self, DataFile, Pattern, has_ending};
use super::guard::guarded;
use super::place::{RecordOrigin, RecordPlace};
use super::{Chunks, OnBad, Placed, Record, SourceSpec};
use crate::error::printable;
use crate::{Defect, Error, limits};

const PATTERN: Pattern = Pattern { is_match: |name| has_ending(name, &["parquet"]), shown: "*.parquet" };

/// A billion nulls take a few bytes in a file and far more in memory.
const ROWS_PER_CHUNK: u64 = 1 << 16;

pub(super) struct ParquetChunks {
    tables: Vec<Table>,
    /// All row groups of all tables.
    groups: Vec<Group>,
    index: ChunkIndex,
    record_bytes: u64,
}

struct Table {
    file: DataFile,
    metadata: ParquetMetaData,
    columns: Vec<Column>,
}

/// A row group.
struct Group {
    table: usize,
    place: usize,
    rows: u64,
    /// Rows of the table before it.
    rows_before: u64,
    parts: u64,
}

impl ParquetChunks {
    pub fn open(spec: &SourceSpec) -> Result<ParquetChunks, Error> {
        let mut tables = Vec::new();
        let mut groups = Vec::new();
        for file in data_file::find(&spec.paths, &PATTERN)? {
            let metadata = read_metadata(&file)?;
            let columns =
                schema::choose(metadata.file_metadata().schema_descr(), &spec.columns, &spec.optional_columns);
            let columns = columns.map_err(|defect| file.fail(defect))?;
            let mut rows_before = 0u64;
            for (place, group) in metadata.row_groups().iter().enumerate() {
                check_compression(&columns, group).map_err(|defect| file.fail(defect))?;
                let not_a_count = |what| bad(&file, format!("row group {place} has {what}"));
                let rows = u64::try_from(group.num_rows()).map_err(|_| not_a_count("a negative number of rows"))?;
                let bytes = u64::try_from(group.total_byte_size()).unwrap_or(0);
                let parts = bytes.div_ceil(spec.chunk_bytes).max(rows.div_ceil(ROWS_PER_CHUNK)).min(rows);
                groups.push(Group { table: tables.len(), place, rows, rows_before, parts });
                rows_before = rows_before.checked_add(rows).ok_or_else(|| not_a_count("too many rows"))?;
            }
            tables.push(Table { file, metadata, columns });
        }
        let index = ChunkIndex::new(groups.iter().map(|group| group.parts));
        Ok(ParquetChunks { tables, groups, index, record_bytes: spec.record_bytes })
    }
}

impl Chunks for ParquetChunks {
    fn count(&self) -> usize {
        self.index.count()
    }

    fn read(&self, chunk: usize, _: OnBad) -> Result<Vec<Placed>, Error> {
        let (group, part) = self.index.locate(chunk);
        let group = &self.groups[group];
        let table = &self.tables[group.table];
        let range = group.part(part as u64);
        let first = group.rows_before + range.start;
        let mut leaves = table.read(group, &range)?;
        let too_long = |row: u64| {
            let place = RecordPlace::Row { row: row + 1 };
            table.file.fail(Defect::RecordTooLong { place, limit_bytes: self.record_bytes })
        };
        let mut records = Vec::new();
        for row in first..first + (range.end - range.start) {
            let fields = rows::next(&table.columns, &mut leaves, self.record_bytes);
            let fields = fields.map_err(|reason| match reason {
                rows::Reason::TooLong => too_long(row),
                rows::Reason::NotUtf8 => {
                    table.file.fail(Defect::RecordNotUtf8 { place: RecordPlace::Row { row: row + 1 } })
                }
                rows::Reason::ColumnsDisagree => {
                    bad(&table.file, format!("its columns end at different rows, near {row}"))
                }
            })?;
            records.push((row, Ok(Record::Fields(fields))));
        }
        Ok(records)
    }

    fn files(&self) -> Vec<&Path> {
        self.tables.iter().map(|table| table.file.path.as_path()).collect()
    }

    fn origin(&self, chunk: usize, position: u64) -> Result<RecordOrigin, Error> {
        let table = &self.tables[self.groups[self.index.locate(chunk).0].table];
        Ok(RecordOrigin { file: table.file.path.clone(), place: RecordPlace::Row { row: position + 1 } })
    }
}

impl Group {
    /// The rows of one of its parts, counted within the group.
    fn part(&self, part: u64) -> Range<u64> {
        let begin = |part: u64| (u128::from(self.rows) * u128::from(part) / u128::from(self.parts)) as u64;
        begin(part)..begin(part + 1)
    }
}

impl Table {
    /// The values of the wanted columns' leaves in some rows of a group, in the order in which the columns name them.
    fn read(&self, group: &Group, rows: &Range<u64>) -> Result<Vec<LeafValues>, Error> {
        let window = Arc::new(Window::new(self.file.open()?, self.file.size_bytes));
        let metadata = self.metadata.row_group(group.place);
        let read_leaf = |&leaf: &usize| {
            let column = metadata.columns().get(leaf).ok_or("a row group lacks a column")?;
            let text = |error: parquet::errors::ParquetError| error.to_string();
            // The page reader's upper bound; a count, not a size.
            let total_rows = usize::try_from(group.rows).map_err(|_| "too many rows")?;
            let pages = SerializedPageReader::new(window.clone(), column, total_rows, None).map_err(text)?;
            leaf::read(column.column_descr_ptr(), Box::new(pages), rows)
        };
        let leaves = self.columns.iter().flat_map(|column| column.leaves());
        leaves.map(|leaf| guarded(|| read_leaf(leaf)).map_err(|detail| bad(&self.file, detail))).collect()
    }
}

fn read_metadata(file: &DataFile) -> Result<ParquetMetaData, Error> {
    let window = Window::new(file.open()?, file.size_bytes);
    check_footer(&window).map_err(|detail| bad(file, detail))?;
    let parse = || ParquetMetaDataReader::new().parse_and_finish(&window).map_err(|error| error.to_string());
    guarded(parse).map_err(|detail| bad(file, detail))
}

fn check_footer(window: &Window) -> Result<(), String> {
    let footer = window.footer().map_err(|error| error.to_string())?;
    let footer = footer.ok_or("it does not end like one")?;
    match footer::schema_depth(&footer) {
        Some(depth) if depth <= limits::PARQUET_DEPTH => Ok(()),
        Some(depth) => Err(format!("its columns are nested {depth} deep, the limit is {}", limits::PARQUET_DEPTH)),
        None => Err("its metadata are damaged".to_owned()),
    }
}

fn check_compression(columns: &[Column], group: &RowGroupMetaData) -> Result<(), Defect> {
    for column in columns {
        for &leaf in column.leaves() {
            let compression = group.columns().get(leaf).map(|chunk| chunk.compression());
            if let Some(found) = compression
                && !matches!(found, Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_))
            {
                // Some names come with a level.
                let found = found.to_string().split('(').next().unwrap_or_default().to_owned();
                return Err(Defect::ColumnCompression { column: printable(&column.name), found });
            }
        }
    }
    Ok(())
}

fn bad(file: &DataFile, detail: String) -> Error {
    file.fail(Defect::NotParquet { detail: printable(&detail) })
}
