//! Rows from files.

use std::path::Path;
use std::sync::Arc;

use evenkeel_data::*;
use evenkeel_store::SourceSpec;

const OPTIONS: LoaderOptions = LoaderOptions {
    order: OrderOptions { seed: 5, shuffle: true, held_out_every: None, part: Subset::Train },
    epochs: Some(1),
    workers: 3,
    on_bad_record: OnBadRecord::Stop,
};

fn loader(file: &Path) -> Loader<Row> {
    let mut spec = SourceSpec::new(evenkeel_store::Format::Jsonl, [file]);
    spec.chunk_bytes = 200;
    let source = Arc::new(evenkeel_store::Source::open(&spec).unwrap());
    let encoder = Encoder::new(Tokenizer::Bytes, None, Format::Text { column: "text".into() }, 258).unwrap();
    Loader::rows(
        source,
        Arc::new(encoder),
        Packing { sequence: 100, fill: Fill::Single, label_beyond_cut: false },
        OPTIONS,
        None,
    )
    .unwrap()
}

#[test]
fn every_line_of_a_file_becomes_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.jsonl");
    let texts: Vec<String> = (0..100).map(|line| format!("this is line {line:03}")).collect();
    std::fs::write(&file, texts.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect::<String>()).unwrap();
    let mut loader = loader(&file);
    let mut read = Vec::new();
    while let Some(row) = loader.next().unwrap() {
        read.push(Tokenizer::Bytes.decode(&row.ids).unwrap());
    }
    assert_ne!(read, texts, "shuffled");
    read.sort();
    assert_eq!(read, texts);
}

#[test]
fn a_bad_record_is_named_by_its_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.jsonl");
    std::fs::write(&file, "{\"text\": \"a\"}\n{\"text\": \"b\"}\n{\"body\": \"c\"}\n").unwrap();
    let mut loader = loader(&file);
    let error = loop {
        match loader.next() {
            Ok(row) => assert!(row.is_some(), "an error before the end"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("line 3") && error.contains("lines.jsonl"), "{error}");
    assert!(error.contains("no column `text`; it has `body`"), "{error}");
}
