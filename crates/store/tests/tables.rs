//! Parquet files: written here in every form that is read, and damaged in thousands of ways.

mod forge;

use std::sync::Arc;

use evenkeel_store::{Defect, Error, Format, Record, Source, SourceSpec};
use fastrand::Rng;
use forge::{folder, message};
use parquet::basic::Compression;
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FloatType, Int32Type, Int64Type};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};
use tempfile::TempDir;

enum Values {
    Booleans(Vec<bool>),
    Integers(Vec<i32>),
    LongIntegers(Vec<i64>),
    Floats(Vec<f32>),
    Doubles(Vec<f64>),
    Bytes(Vec<Vec<u8>>),
}

/// A leaf column of one row group, shredded: definition levels, repetition levels, values.
struct Leaf(Vec<i16>, Vec<i16>, Values);

fn required(values: Values) -> Leaf {
    Leaf(vec![], vec![], values)
}

fn texts(texts: &[&str]) -> Values {
    Values::Bytes(texts.iter().map(|text| text.as_bytes().to_vec()).collect())
}

fn table(schema: &str, properties: WriterProperties, groups: &[Vec<Leaf>]) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties)).unwrap();
    for leaves in groups {
        let mut group = writer.next_row_group().unwrap();
        leaves.iter().for_each(|leaf| write_leaf(&mut group, leaf));
        group.close().unwrap();
    }
    writer.into_inner().unwrap()
}

fn write_leaf(group: &mut SerializedRowGroupWriter<Vec<u8>>, leaf: &Leaf) {
    match &leaf.2 {
        Values::Booleans(values) => write_values::<BoolType>(group, leaf, values),
        Values::Integers(values) => write_values::<Int32Type>(group, leaf, values),
        Values::LongIntegers(values) => write_values::<Int64Type>(group, leaf, values),
        Values::Floats(values) => write_values::<FloatType>(group, leaf, values),
        Values::Doubles(values) => write_values::<DoubleType>(group, leaf, values),
        Values::Bytes(values) => {
            let values: Vec<ByteArray> = values.iter().map(|value| value.clone().into()).collect();
            write_values::<ByteArrayType>(group, leaf, &values);
        }
    }
}

fn write_values<T: DataType>(group: &mut SerializedRowGroupWriter<Vec<u8>>, leaf: &Leaf, values: &[T::T]) {
    let Leaf(definitions, repetitions, _) = leaf;
    let levels = |levels: &'_ Vec<i16>| (!levels.is_empty()).then(|| levels.clone());
    let mut column = group.next_column().unwrap().unwrap();
    let (definitions, repetitions) = (levels(definitions), levels(repetitions));
    column.typed::<T>().write_batch(values, definitions.as_deref(), repetitions.as_deref()).unwrap();
    column.close().unwrap();
}

fn open(bytes: &[u8], columns: &[&str], chunk_bytes: u64) -> (TempDir, Result<Source, Error>) {
    let folder = folder(&[("a.parquet", bytes)]);
    let columns = columns.iter().map(|&column| column.to_owned()).collect();
    let spec = SourceSpec { chunk_bytes, columns, ..SourceSpec::new(Format::Parquet, [folder.path()]) };
    let source = Source::open(&spec);
    (folder, source)
}

fn read_all(source: &Source) -> Result<Vec<Value>, Error> {
    let mut rows = Vec::new();
    for chunk in 0..source.chunks() {
        rows.extend(source.read(chunk)?.into_iter().map(|record| match record {
            Record::Fields(fields) => Value::Object(fields),
            other => panic!("{other:?}"),
        }));
    }
    Ok(rows)
}

/// All rows of a table, or its error.
fn rows(bytes: &[u8], columns: &[&str]) -> Result<Vec<Value>, String> {
    let (folder, source) = open(bytes, columns, 1 << 20);
    source.and_then(|source| read_all(&source)).map_err(|error| message(&error, folder.path()))
}

const CONVERSATIONS: &str = "message schema {
    optional binary text (STRING);
    required int64 number;
    optional group messages (LIST) { repeated group list { optional group element {
        required binary role (STRING); optional binary content (STRING);
    } } }
}";

fn conversation(rng: &mut Rng) -> Value {
    let text = |rng: &mut Rng| -> Value {
        match rng.u8(..4) {
            0 => Value::Null,
            _ => (0..rng.usize(..30)).map(|_| rng.choice(['x', 'ü', '🦀']).unwrap()).collect::<String>().into(),
        }
    };
    let message = |rng: &mut Rng| match rng.u8(..6) {
        0 => Value::Null,
        _ => json!({ "role": rng.choice(["user", "assistant"]).unwrap(), "content": text(rng) }),
    };
    let messages = match rng.u8(..5) {
        0 => Value::Null,
        _ => Value::Array((0..rng.usize(..4)).map(|_| message(rng)).collect()),
    };
    json!({ "text": text(rng), "number": rng.i64(..), "messages": messages })
}

/// The leaves of some conversations, shredded as the format's papers say.
fn shred(rows: &[Value]) -> Vec<Leaf> {
    let bytes = |text: &Value| text.as_str().map(|text| text.as_bytes().to_vec());
    let mut text = (vec![], vec![]);
    let (mut role, mut content) = ((vec![], vec![], vec![]), (vec![], vec![], vec![]));
    for row in rows {
        text.0.push(i16::from(!row["text"].is_null()));
        text.1.extend(bytes(&row["text"]));
        let mut levels = |definitions: (i16, i16), repetition: i16| {
            role.0.push(definitions.0);
            content.0.push(definitions.1);
            role.1.push(repetition);
            content.1.push(repetition);
        };
        match &row["messages"] {
            Value::Array(messages) if messages.is_empty() => levels((1, 1), 0),
            Value::Array(messages) => {
                for (place, message) in messages.iter().enumerate() {
                    let definitions = match (message, &message["content"]) {
                        (Value::Null, _) => (2, 2),
                        (_, Value::Null) => (3, 3),
                        _ => (3, 4),
                    };
                    levels(definitions, i16::from(place > 0));
                }
                role.2.extend(messages.iter().filter_map(|message| bytes(&message["role"])));
                content.2.extend(messages.iter().filter_map(|message| bytes(&message["content"])));
            }
            _ => levels((0, 0), 0),
        }
    }
    let numbers = rows.iter().map(|row| row["number"].as_i64().unwrap()).collect();
    vec![
        Leaf(text.0, vec![], Values::Bytes(text.1)),
        required(Values::LongIntegers(numbers)),
        Leaf(role.0, role.1, Values::Bytes(role.2)),
        Leaf(content.0, content.1, Values::Bytes(content.2)),
    ]
}

#[test]
fn conversations_come_back_from_any_chunks_of_any_file() {
    let mut rng = Rng::with_seed(8);
    let compressions = [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::GZIP(Default::default())];
    for round in 0..60 {
        let groups: Vec<Vec<Value>> =
            (0..rng.usize(..4)).map(|_| (0..rng.usize(1..200)).map(|_| conversation(&mut rng)).collect()).collect();
        let properties = WriterProperties::builder()
            .set_compression(compressions[round % compressions.len()])
            .set_writer_version(rng.choice([WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0]).unwrap())
            .set_dictionary_enabled(rng.bool())
            .set_write_batch_size(7)
            .set_data_page_row_count_limit(rng.usize(1..60))
            .build();
        let shredded: Vec<Vec<Leaf>> = groups.iter().map(|rows| shred(rows)).collect();
        let bytes = table(CONVERSATIONS, properties, &shredded);
        let expected = groups.concat();
        for chunk_bytes in [1, 100, 1000, 1 << 20] {
            let (_folder, source) = open(&bytes, &[], chunk_bytes);
            let source = source.unwrap();
            assert!(source.chunks() <= expected.len());
            if chunk_bytes == 1 << 20 {
                assert_eq!(source.chunks(), groups.len());
            }
            assert_eq!(read_all(&source).unwrap(), expected);
        }
        let only = |name: &str| expected.iter().map(|row| json!({ name: row[name] })).collect::<Vec<_>>();
        for name in ["text", "number", "messages"] {
            assert_eq!(rows(&bytes, &[name]).unwrap(), only(name));
        }
    }
}

#[test]
fn every_kind_of_leaf_becomes_its_json() {
    let schema = "message schema {
        required boolean yes; required int32 small; required int64 large; required float half; required double third;
        required binary plain; required binary kind (ENUM); required int32 unsigned (UINT_32);
        required int64 large_unsigned (UINT_64); required int32 tiny (INT_8);
    }";
    let leaves = vec![
        required(Values::Booleans(vec![true, false])),
        required(Values::Integers(vec![-1, i32::MAX])),
        required(Values::LongIntegers(vec![i64::MIN, 1 << 60])),
        required(Values::Floats(vec![0.5, f32::NAN])),
        required(Values::Doubles(vec![1.0 / 3.0, f64::INFINITY])),
        required(texts(&["a", ""])),
        required(texts(&["b", "c"])),
        required(Values::Integers(vec![-1, 1])),
        required(Values::LongIntegers(vec![-1, 1])),
        required(Values::Integers(vec![-128, 1])),
    ];
    let expected = [
        json!({ "yes": true, "small": -1, "large": i64::MIN, "half": 0.5, "third": 1.0 / 3.0, "plain": "a",
            "kind": "b", "unsigned": u32::MAX, "large_unsigned": u64::MAX, "tiny": -128 }),
        json!({ "yes": false, "small": i32::MAX, "large": 1_i64 << 60, "half": null, "third": null, "plain": "",
            "kind": "c", "unsigned": 1, "large_unsigned": 1, "tiny": 1 }),
    ];
    assert_eq!(rows(&table(schema, Default::default(), &[leaves]), &[]).unwrap(), expected);
}

#[test]
fn lists_of_old_and_new_writers_are_lists() {
    let check = |schema: &str, leaf: Leaf, expected: [Value; 2]| {
        let bytes = table(&format!("message schema {{ {schema} }}"), Default::default(), &[vec![leaf]]);
        let expected = expected.map(|value| json!({ "a": value }));
        assert_eq!(rows(&bytes, &["a"]).unwrap(), expected, "{schema}");
    };
    let numbers = || Values::Integers(vec![1, 2]);
    let bare = || Leaf(vec![1, 1, 0], vec![0, 1, 0], numbers());
    check("repeated int32 a;", bare(), [json!([1, 2]), json!([])]);
    check("required group a (LIST) { repeated int32 array; }", bare(), [json!([1, 2]), json!([])]);
    check(
        "required group a (LIST) { repeated group list { required int32 element; } }",
        bare(),
        [json!([1, 2]), json!([])],
    );
    check(
        "required group a (LIST) { repeated group array { required int32 x; } }",
        bare(),
        [json!([{ "x": 1 }, { "x": 2 }]), json!([])],
    );
    check(
        "optional group a { optional int32 x; }",
        Leaf(vec![2, 1], vec![], Values::Integers(vec![1])),
        [json!({ "x": 1 }), json!({ "x": null })],
    );
    // Null fields of a nested group are omitted.
    check(
        "optional group a { optional group b { optional int32 x; } }",
        Leaf(vec![3, 2], vec![], Values::Integers(vec![1])),
        [json!({ "b": { "x": 1 } }), json!({ "b": {} })],
    );
    let nested = "optional group a (LIST) { repeated group list { optional group element (LIST) {
        repeated group list { optional int32 element; } } } }";
    // [[1], [], null], [[null, 2]]
    let leaf = Leaf(vec![5, 3, 2, 4, 5], vec![0, 1, 1, 0, 2], numbers());
    check(nested, leaf, [json!([[1], [], null]), json!([[null, 2]])]);
}

#[test]
fn a_table_that_cannot_be_read_says_why() {
    let schema = "message schema { required binary text (STRING); required int64 when (TIMESTAMP_MILLIS); }";
    let leaves = || vec![required(texts(&["a", "b"])), required(Values::LongIntegers(vec![1, 2]))];
    let bytes = table(schema, Default::default(), &[leaves()]);
    let said = |columns: &[&str]| rows(&bytes, columns).unwrap_err();
    assert_eq!(said(&["txt"]), "`a.parquet`: has no column `txt`; its columns are text, when");
    let not_supported = "`a.parquet`: column `when` is INT64 of TIMESTAMP_MILLIS, \
                         expected text, numbers, booleans, or lists or groups of them";
    assert_eq!(said(&[]), not_supported);
    assert_eq!(rows(&bytes, &["text"]).unwrap(), [json!({ "text": "a" }), json!({ "text": "b" })]);

    let binary = table(
        "message schema { required binary text; }",
        Default::default(),
        &[vec![required(texts(&["a"]))], vec![required(Values::Bytes(vec![b"b".to_vec(), vec![0xff]]))]],
    );
    assert_eq!(rows(&binary, &[]).unwrap_err(), "`a.parquet`: row 3 is not UTF-8");
    let map = "message schema { required group a (MAP) { repeated group key_value { required binary key; required int32 value; } } }";
    let map = table(map, Default::default(), &[]);
    assert!(rows(&map, &[]).unwrap_err().contains("column `a` is a MAP"), "{:?}", rows(&map, &[]));
    for bytes in [&b""[..], b"PAR1", b"PAR1\0\0\0\0PAR1", b"not a table at all"] {
        let said = rows(bytes, &[]).unwrap_err();
        assert!(said.starts_with("`a.parquet`: is not a Parquet file that can be read: "), "{said}");
    }
}

#[test]
fn a_compression_that_is_not_built_in_is_named() {
    let leaf = required(Values::Integers(vec![1]));
    let mut bytes = table("message schema { required int32 a; }", Default::default(), &[vec![leaf]]);
    // The column's path, a list of `a`, and behind it the codec: 0, which is none. 4 is Brotli, in Thrift's words 8.
    let path = [0x19, 0x18, 1, b'a', 0x15, 0];
    let at = bytes.windows(path.len()).position(|window| window == path).unwrap();
    bytes[at + 5] = 8;
    let said = "`a.parquet`: column `a` is compressed with BROTLI, expected SNAPPY, GZIP or UNCOMPRESSED";
    assert_eq!(rows(&bytes, &[]).unwrap_err(), said);
}

#[test]
fn columns_are_read_to_a_depth_and_refused_below() {
    let nested = |depth: usize| {
        let open = "required group a { ".repeat(depth - 1);
        let close = "}".repeat(depth - 1);
        let schema = format!("message schema {{ {open} required int32 a; {close} }}");
        rows(&table(&schema, Default::default(), &[vec![required(Values::Integers(vec![1]))]]), &[])
    };
    let value = nested(60).unwrap();
    assert_eq!(value.len(), 1);
    let said = nested(61).unwrap_err();
    assert!(said.ends_with("its columns are nested 61 deep, the limit is 60"), "{said}");
    let groups: String = (0..100).map(|i| format!("required group g{i} {{ required int32 a; }} ")).collect();
    let leaves = (0..100).map(|i| required(Values::Integers(vec![i]))).collect();
    let wide = rows(&table(&format!("message schema {{ {groups} }}"), Default::default(), &[leaves]), &["g99"]);
    assert_eq!(wide.unwrap(), [json!({ "g99": { "a": 99 } })]);
}

#[test]
fn a_schema_beyond_the_stack_is_refused() {
    const DEPTH: u32 = 1_000_000;
    // In Thrift's words: a version, then a list of schema elements, each the only child of the one before.
    let group = [0x35, 0, 0x18, 1, b'a', 0x15, 2, 0];
    let mut footer = vec![0x15, 2, 0x19, 0xfc];
    footer.extend([DEPTH as u8 | 0x80, (DEPTH >> 7) as u8 | 0x80, (DEPTH >> 14) as u8]);
    footer.extend(group.repeat(DEPTH as usize));
    footer.extend([0x16, 0, 0x19, 0x0c, 0]);
    let length = (footer.len() as u32).to_le_bytes();
    let said = rows(&[b"PAR1", &footer[..], &length, b"PAR1"].concat(), &[]).unwrap_err();
    assert!(said.ends_with("its columns are nested 1000000 deep, the limit is 60"), "{said}");
}

#[test]
fn a_row_longer_than_the_limit_is_refused() {
    let bytes = table(
        "message schema { required binary text (STRING); }",
        Default::default(),
        &[vec![required(texts(&["short", &"x".repeat(1000)]))]],
    );
    let folder = folder(&[("a.parquet", &bytes)]);
    let spec = SourceSpec { record_bytes: 1000, ..SourceSpec::new(Format::Parquet, [folder.path()]) };
    let source = Source::open(&spec).unwrap();
    let error = source.read(0).unwrap_err();
    assert!(matches!(error.defect, Defect::RecordTooLong { limit_bytes: 1000, .. }), "{error}");
    assert_eq!(
        message(&error, folder.path()),
        "`a.parquet`: the record at row 2 is longer than the limit of 1000 bytes"
    );
    let spec = SourceSpec { record_bytes: 1100, ..spec };
    let source = Source::open(&spec).unwrap();
    assert_eq!(source.read(0).unwrap().len(), 2);
    assert_eq!(source.origin(0, 1).unwrap().place.to_string(), "row 2");
}

#[test]
fn millions_of_nulls_are_many_chunks() {
    let bytes = table(
        "message schema { optional int32 a; }",
        Default::default(),
        &[vec![Leaf(vec![0; 1_000_000], vec![], Values::Integers(vec![]))]],
    );
    assert!(bytes.len() < 10_000);
    let (_folder, source) = open(&bytes, &[], 1 << 20);
    let source = source.unwrap();
    assert_eq!(source.chunks(), 16);
    assert_eq!(source.read(15).unwrap().len(), 62_500);
}

#[test]
fn damaged_tables_are_refused_or_read_and_never_end_the_run() {
    let mut rng = Rng::with_seed(9);
    let rows: Vec<Value> = (0..40).map(|_| conversation(&mut rng)).collect();
    let mut accepted = 0;
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::GZIP(Default::default())] {
        let properties =
            WriterProperties::builder().set_compression(compression).set_data_page_row_count_limit(10).build();
        let original = table(CONVERSATIONS, properties, &[shred(&rows[..20]), shred(&rows[20..])]);
        for round in 0..1000 {
            let mut bytes = original.clone();
            for _ in 0..rng.usize(1..4) {
                let at = rng.usize(..bytes.len());
                match rng.u8(..5) {
                    0 => bytes[at] ^= 1 << rng.u8(..8),
                    1 => bytes[at] = rng.choice([0, 1, 0x7f, 0x80, 0xff]).unwrap(),
                    // Most damage to the footer is caught there; half of it should get past.
                    2 => bytes[at / 2] = rng.u8(..),
                    3 if round % 10 == 0 => bytes.truncate(at),
                    _ => bytes[at] = rng.u8(..),
                }
            }
            let (_folder, source) = open(&bytes, &[], 200);
            // A claim of a billion rows makes many chunks; each is an error by itself.
            let read = |source: Source| (0..source.chunks().min(100)).all(|chunk| source.read(chunk).is_ok());
            accepted += usize::from(source.is_ok_and(read));
        }
    }
    assert!((50..2700).contains(&accepted), "{accepted} accepted");
}

#[test]
fn optional_columns_are_read_where_they_are() {
    let schema = "message schema { required binary text (STRING); required int64 number; }";
    let leaves = vec![required(texts(&["a"])), required(Values::LongIntegers(vec![1]))];
    let folder = folder(&[("a.parquet", &table(schema, Default::default(), &[leaves]))]);
    let read = |optional: &[&str]| {
        let optional_columns = optional.iter().map(|&column| column.to_owned()).collect();
        let spec = SourceSpec::new(Format::Parquet, [folder.path()]);
        let spec = SourceSpec { columns: vec!["text".to_owned()], optional_columns, ..spec };
        read_all(&Source::open(&spec).unwrap()).unwrap()
    };
    assert_eq!(read(&["tools"]), [json!({ "text": "a" })]);
    assert_eq!(read(&["tools", "number", "text"]), [json!({ "text": "a", "number": 1 })]);
}
