//! Text and JSON Lines in chunks of every size, against a plain twin that reads the whole file.

mod forge;

use std::fs;
use std::path::Path;
use std::process::Command;

use evenkeel_store::{Error, Format, Record, Source, SourceSpec};
use fastrand::Rng;
use forge::{folder, message};
use serde_json::json;

const MOST_BYTES: u64 = 1 << 20;

fn open(path: &Path, format: &Format, chunk_bytes: u64, record_bytes: u64) -> Result<Source, Error> {
    Source::open(&SourceSpec { chunk_bytes, record_bytes, ..SourceSpec::new(format.clone(), [path]) })
}

fn read_all(source: &Source) -> Result<Vec<Record>, Error> {
    let chunks: Result<Vec<_>, _> = (0..source.chunks()).map(|chunk| source.read(chunk)).collect();
    Ok(chunks?.concat())
}

fn text(separator: &str) -> Format {
    Format::Text { separator: separator.to_owned() }
}

/// The plain twin: marks every byte of every occurrence of the separator and takes the rest.
fn documents(file: &[u8], separator: &str) -> Vec<String> {
    let file = file.strip_prefix(b"\xef\xbb\xbf").unwrap_or(file);
    let file = str::from_utf8(file).unwrap().replace("\r\n", "\n").into_bytes();
    let separator = separator.replace("\r\n", "\n").into_bytes();
    let mut is_separator = vec![false; file.len()];
    for begin in (0..file.len()).filter(|&begin| file[begin..].starts_with(&separator)) {
        is_separator[begin..begin + separator.len()].fill(true);
    }
    let mut documents = vec![Vec::new()];
    for (byte, is_separator) in file.into_iter().zip(is_separator) {
        match is_separator {
            true => documents.push(Vec::new()),
            false => documents.last_mut().unwrap().push(byte),
        }
    }
    let documents = documents.into_iter().map(|document| String::from_utf8(document).unwrap());
    documents.filter(|document| !document.trim_ascii().is_empty()).collect()
}

#[test]
fn chunks_of_any_size_make_up_the_whole_text() {
    let mut rng = Rng::with_seed(6);
    let words = ["a", "b", "aa", "\n", "\n\n", "\r\n", "\r", "ü", "🦀", " ", "<|end|>", "<|", "|>", "ab"];
    let separators = ["\n", "\n\n", "\r\n\r\n", "aa", "aba", "<|end|>", "🦀", "\n\n\n", " a"];
    for round in 0..400 {
        let mut file = if round % 3 == 0 { String::from("\u{feff}") } else { String::new() };
        file.extend((0..rng.usize(..60)).map(|_| rng.choice(words).unwrap()));
        let separator = rng.choice(separators).unwrap();
        let folder = folder(&[("a.txt", file.as_bytes())]);
        let expected: Vec<Record> = documents(file.as_bytes(), separator).into_iter().map(Record::Text).collect();
        for chunk_bytes in [1, 2, 3, 4, 5, 7, 8, 13, 16, 29, 64, 1000] {
            let source = open(folder.path(), &text(separator), chunk_bytes, MOST_BYTES).unwrap();
            assert_eq!(source.chunks() as u64, (file.len() as u64).div_ceil(chunk_bytes));
            assert_eq!(read_all(&source).unwrap(), expected, "{file:?} by {separator:?} in chunks of {chunk_bytes}");
        }
    }
}

#[test]
fn where_separators_cannot_overlap_documents_are_what_split_gives() {
    let file = "one<|end|>two\r\nlines<|end|><|end|>\n<|end|>ü<|en<|end|>last";
    let folder = folder(&[("a.txt", file.as_bytes())]);
    let source = open(folder.path(), &text("<|end|>"), 5, MOST_BYTES).unwrap();
    let file = file.replace("\r\n", "\n");
    let split = file.split("<|end|>").filter(|document| !document.trim().is_empty());
    assert_eq!(read_all(&source).unwrap(), split.map(|document| Record::Text(document.into())).collect::<Vec<_>>());
}

#[test]
fn chunks_of_any_size_make_up_all_json_lines() {
    let mut rng = Rng::with_seed(7);
    for _ in 0..100 {
        let mut file = String::new();
        let mut expected = Vec::new();
        for index in 0..rng.usize(..12) {
            let text: String = (0..rng.usize(..20)).map(|_| rng.choice(['x', 'ü', '🦀', '"', '\n']).unwrap()).collect();
            let value = json!({ "index": index, "text": text, "list": [1, { "a": null }] });
            let Record::Fields(fields) = Record::Fields(value.as_object().unwrap().clone()) else { unreachable!() };
            expected.push(Record::Fields(fields));
            file += &value.to_string();
            file += rng.choice(["\n", "\r\n", "\n\n", "\r\n \r\n", "\n\t\n"]).unwrap();
        }
        if rng.bool() {
            file.truncate(file.trim_end().len());
        }
        let folder = folder(&[("a.jsonl", file.as_bytes())]);
        for chunk_bytes in [1, 2, 5, 16, 33, 100, 4096] {
            let source = open(folder.path(), &Format::Jsonl, chunk_bytes, MOST_BYTES).unwrap();
            assert_eq!(read_all(&source).unwrap(), expected, "{file:?} in chunks of {chunk_bytes}");
        }
    }
}

#[test]
fn a_record_is_in_the_chunk_in_which_it_begins() {
    let folder = folder(&[("a.txt", b"0\n23456789\nb\n\nef\n")]);
    let source = open(folder.path(), &text("\n"), 4, MOST_BYTES).unwrap();
    let texts = |chunk| {
        let to_text = |record| if let Record::Text(text) = record { text } else { unreachable!() };
        source.read(chunk).unwrap().into_iter().map(to_text).collect::<Vec<String>>()
    };
    let expected: [&[&str]; 5] = [&["0", "23456789"], &[], &["b"], &["ef"], &[]];
    assert_eq!([0, 1, 2, 3, 4].map(texts), expected.map(|texts| texts.to_vec()));
    let origin = source.origin(0, 1).unwrap();
    assert_eq!(origin.to_string().replace(folder.path().to_str().unwrap(), ""), "line 2 (byte 2) of `/a.txt`");
}

#[test]
fn several_threads_read_one_source() {
    let file: String = (0..500).map(|index| format!("{{\"index\":{index}}}\n")).collect();
    let folder = folder(&[("a.jsonl", file.as_bytes())]);
    let source = open(folder.path(), &Format::Jsonl, 100, MOST_BYTES).unwrap();
    let read = |first: usize| -> Vec<(usize, Vec<Record>)> {
        (first..source.chunks()).step_by(4).map(|chunk| (chunk, source.read(chunk).unwrap())).collect()
    };
    let mut chunks: Vec<(usize, Vec<Record>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|first| scope.spawn(move || read(first))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    chunks.sort_by_key(|(chunk, _)| *chunk);
    assert_eq!(chunks.into_iter().flat_map(|(_, records)| records).collect::<Vec<_>>(), read_all(&source).unwrap());
}

#[test]
fn folders_are_read_by_name_and_files_as_they_are_given() {
    let folder = folder(&[("b.txt", b"2"), ("a.TXT", b"1"), (".hidden.txt", b"?"), ("c.md", b"3"), ("empty.txt", b"")]);
    fs::create_dir(folder.path().join("folder.txt")).unwrap();
    let other = forge::folder(&[("x", b"0")]);
    std::os::unix::fs::symlink(other.path().join("x"), folder.path().join("link.txt")).unwrap();
    let paths = [folder.path().join("c.md"), folder.path().to_owned()];
    let source = Source::open(&SourceSpec::new(text("\n"), paths)).unwrap();
    assert_eq!(source.chunks(), 4);
    let expected = ["3", "1", "2", "0"].map(|text| Record::Text(text.into()));
    assert_eq!(read_all(&source).unwrap(), expected);
}

#[test]
fn without_a_separator_a_file_is_a_document() {
    let folder = folder(&[("a.txt", b"one\r\n\n\ntwo\n"), ("b.txt", b"\n"), ("c.txt", "\u{feff}three".as_bytes())]);
    let source = open(folder.path(), &text(""), 2, 16).unwrap();
    assert_eq!(source.chunks(), 3);
    let expected = ["one\n\n\ntwo\n", "three"].map(|text| Record::Text(text.into()));
    assert_eq!(read_all(&source).unwrap(), expected);
    let source = open(folder.path(), &text(""), 2, 10).unwrap();
    let error = source.read(0).unwrap_err();
    assert_eq!(message(&error, folder.path()), "`a.txt`: is 11 bytes long, the limit is 10");
}

#[test]
fn a_bad_record_is_named_by_line_and_byte() {
    let limit = "check the format and the separator of the data, or cut the record in several";
    let object = "in a JSON Lines file every line is an object with named fields";
    let nested = format!("{{}}\n{}", "[".repeat(30));
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(130), "]".repeat(130));
    type Case<'a> = (Format, &'a [u8], u64, Option<&'a str>, Option<&'a str>);
    let cases: [Case; 18] = [
        (text("\n"), b"ab\nc\r\nd\xff\n", 9, Some("line 3 (byte 7) is not UTF-8"), None),
        (text("\n\n"), b"a\r\n\r\n\xe2\x82", 9, Some("line 3 (byte 5) is not UTF-8"), None),
        (text("\n\n"), b"a\r\nb\r\n\xff", 9, Some("line 3 (byte 6) is not UTF-8"), None),
        (text("\n"), b"\n12345\n\n", 5, None, None),
        (
            text("\n"),
            b"\n123456",
            5,
            Some("the record at line 2 (byte 1) is longer than the limit of 5 bytes"),
            Some(limit),
        ),
        (
            text("<>"),
            b"123456<>",
            5,
            Some("the record at line 1 (byte 0) is longer than the limit of 5 bytes"),
            Some(limit),
        ),
        (text("<>"), b"12345<>", 5, None, None),
        (Format::Jsonl, b"{}\r\n{\"a\":\"\xc3\"}", 99, Some("line 2 (byte 10) is not UTF-8"), None),
        (Format::Jsonl, b"{}\n\n[1]", 99, Some("line 3 (byte 4) is a list, expected a JSON object"), Some(object)),
        (Format::Jsonl, b"\"x\"", 99, Some("line 1 (byte 0) is a text, expected a JSON object"), Some(object)),
        (Format::Jsonl, b"1", 99, Some("line 1 (byte 0) is a number, expected a JSON object"), Some(object)),
        (Format::Jsonl, b"true", 99, Some("line 1 (byte 0) is a boolean, expected a JSON object"), Some(object)),
        (Format::Jsonl, b"null", 99, Some("line 1 (byte 0) is null, expected a JSON object"), Some(object)),
        (Format::Jsonl, b"{}\n{\"a\":}", 99, Some("line 2 (byte 3) is not JSON: expected value at column 6"), None),
        (Format::Jsonl, b"{} {}", 99, Some("line 1 (byte 0) is not JSON: trailing characters at column 4"), None),
        (
            Format::Jsonl,
            nested.as_bytes(),
            99,
            Some("line 2 (byte 3) is not JSON: EOF while parsing a list at column 30"),
            None,
        ),
        (
            Format::Jsonl,
            deep.as_bytes(),
            999,
            Some("line 1 (byte 0) is not JSON: recursion limit exceeded at column 132"),
            None,
        ),
        (Format::Jsonl, b"{\"a\":1,\"a\":2}", 13, None, None),
    ];
    for (format, contents, record_bytes, expected, hint) in cases {
        let folder = folder(&[("a", contents)]);
        for chunk_bytes in [3, 1 << 20] {
            let source = open(&folder.path().join("a"), &format, chunk_bytes, record_bytes).unwrap();
            let error = read_all(&source).err();
            let found = error.as_ref().map(|error| message(error, folder.path()).replace("`a`: ", ""));
            assert_eq!((found.as_deref(), error.as_ref().and_then(Error::hint)), (expected, hint));
        }
    }
}

#[test]
fn a_file_that_changes_its_size_is_refused() {
    let folder = folder(&[("a.jsonl", b"{}\n")]);
    let source = open(folder.path(), &Format::Jsonl, 10, MOST_BYTES).unwrap();
    fs::write(folder.path().join("a.jsonl"), "{}\n{}\n").unwrap();
    let error = source.read(0).unwrap_err();
    assert_eq!(message(&error, folder.path()), "`a.jsonl`: was 3 bytes long when it was opened and is 6 now");
    fs::remove_file(folder.path().join("a.jsonl")).unwrap();
    assert_eq!(message(&source.read(0).unwrap_err(), folder.path()), "`a.jsonl`: does not exist");
}

#[test]
fn what_is_not_data_is_refused_when_opened() {
    let folder = folder(&[("a.txt", b"")]);
    let path = |name: &str| folder.path().join(name);
    assert!(Command::new("mkfifo").arg(path("pipe.jsonl")).status().unwrap().success());
    fs::create_dir(path("empty")).unwrap();
    std::os::unix::fs::symlink("nowhere", path("broken")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", path("zero")).unwrap();
    let cases = [
        ("missing", "`missing`: does not exist"),
        ("pipe.jsonl", "`pipe.jsonl`: is a pipe, expected a regular file"),
        ("empty", "`empty`: has no data: no *.jsonl or *.ndjson"),
        ("broken", "`broken`: is a link to a file that does not exist"),
        ("zero", "`zero`: is a device, expected a regular file"),
        (".", "`./pipe.jsonl`: is a pipe, expected a regular file"),
    ];
    for (name, expected) in cases {
        let error = open(&path(name), &Format::Jsonl, 1, 1).err().unwrap();
        assert_eq!(message(&error, folder.path()), expected);
    }
}

#[test]
fn chunks_of_any_size_make_up_a_json_list() {
    let mut rng = Rng::with_seed(8);
    for _ in 0..100 {
        let text = |rng: &mut Rng| -> String {
            (0..rng.usize(..20)).map(|_| rng.choice(['x', 'ü', '🦀', '"', '\\', '[', '}', ',']).unwrap()).collect()
        };
        let record =
            |index| json!({ text(&mut rng): index, "list": [1, { "a": [text(&mut rng)] }], "b": text(&mut rng) });
        let records: Vec<serde_json::Value> = (0..12).map(record).collect();
        let records = &records[..rng.usize(..12)];
        let expected: Vec<Record> =
            records.iter().map(|record| Record::Fields(record.as_object().unwrap().clone())).collect();
        let compact = serde_json::to_string(records).unwrap();
        let pretty = format!("\u{feff} {}\n\n", serde_json::to_string_pretty(records).unwrap().replace('\n', "\r\n"));
        for file in [compact, pretty] {
            let folder = folder(&[("a.json", file.as_bytes())]);
            for chunk_bytes in [1, 5, 33, 100, 4096] {
                let source = open(folder.path(), &Format::Json, chunk_bytes, MOST_BYTES).unwrap();
                assert_eq!(read_all(&source).unwrap(), expected, "{file:?} in chunks of {chunk_bytes}");
                assert!(chunk_bytes > 1 || source.chunks() == records.len());
            }
        }
    }
}

#[test]
fn a_json_file_that_is_no_list_of_objects_says_so() {
    let cases: [(&[u8], u64, &str); 8] = [
        (b"{\"data\": []}", 99, "`a.json`: begins with a JSON object, expected a list of them"),
        (b" 7", 99, "`a.json`: is not JSON: expected a list of objects"),
        (b"", 99, "`a.json`: is not JSON: expected a list of objects"),
        (b"[{\"a\": \"]}", 99, "`a.json`: is not JSON: its list does not end"),
        (b"[{}] {}", 99, "`a.json`: is not JSON: something follows its list"),
        (b"[{},\n 7]", 99, "`a.json`: line 2 (byte 6) is a number, expected a JSON object"),
        (b"[{},\n {\"a\" 7}]", 99, "`a.json`: line 2 (byte 6) is not JSON: expected `:` at column 6"),
        (b"[{}, {\"a\": 1}]", 5, "`a.json`: the record at line 1 (byte 5) is longer than the limit of 5 bytes"),
    ];
    for (contents, record_bytes, expected) in cases {
        let folder = folder(&[("a.json", contents)]);
        let source = open(folder.path(), &Format::Json, 3, record_bytes);
        let error = source.and_then(|source| read_all(&source)).unwrap_err();
        assert_eq!(message(&error, folder.path()), expected);
    }
}

#[test]
fn a_list_taken_for_lines_is_told_how_to_be_read() {
    for list in ["[{\"a\": 1}, {\"a\": 2}]", "\n [\n  {\n    \"a\": 1\n  }\n]\n"] {
        let folder = folder(&[("a.jsonl", list.as_bytes())]);
        let source = open(folder.path(), &Format::Jsonl, 1 << 20, MOST_BYTES).unwrap();
        for error in [source.read(0).unwrap_err(), source.read_each(0).unwrap_err()] {
            assert_eq!(
                message(&error, folder.path()),
                "`a.jsonl`: is one JSON list, expected a JSON object on every line"
            );
            assert!(error.hint().unwrap().contains("data.source = \"json\""));
        }
    }
}

#[test]
fn those_behind_a_bad_record_are_read_all_the_same() {
    let lines = b"{\"a\": 1}\n{\"a\": \n{\"a\": \"\xff\"}\n{\"a\": \"123456789\"}\n7\n{\"a\": 2}\n";
    let list = b"[{\"a\": 1},\n{\"a\" 3},\n{\"a\": \"\xff\"},\n{\"a\": \"123456789\"},\n7,\n{\"a\": 2}]\n";
    let expected = [
        None,
        Some("line 2 (byte 9) is not JSON"),
        Some("is not UTF-8"),
        Some("is longer than the limit of 12 bytes"),
        Some("is a number, expected a JSON object"),
        None,
    ];
    for (format, contents) in [(Format::Jsonl, &lines[..]), (Format::Json, &list[..])] {
        let folder = folder(&[("a", contents)]);
        for chunk_bytes in [3, 20, 1 << 20] {
            let source = open(&folder.path().join("a"), &format, chunk_bytes, 12).unwrap();
            assert!((0..source.chunks()).any(|chunk| source.read(chunk).is_err()));
            let mut found = Vec::new();
            for chunk in 0..source.chunks() {
                for (record, read) in source.read_each(chunk).unwrap().into_iter().enumerate() {
                    let line = found.len() + 1;
                    assert!(source.origin(chunk, record).unwrap().to_string().starts_with(&format!("line {line} ")));
                    found.push(read.err().map(|error| error.to_string()));
                }
            }
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (found, expected) in found.iter().zip(expected) {
                let agrees = expected.is_none_or(|expected| {
                    let expected =
                        if format == Format::Json { expected.replace("byte 9", "byte 11") } else { expected.into() };
                    found.as_ref().is_some_and(|found| found.contains(&expected))
                });
                assert!(agrees && found.is_some() == expected.is_some(), "{found:?} should say {expected:?}");
            }
        }
    }
}
