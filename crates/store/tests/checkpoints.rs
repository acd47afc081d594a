//! Writing and reading checkpoints, and forged manifests.

mod forge;
mod support;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use evenkeel_store::checkpoint::{Checkpoint, CheckpointWriter};
use evenkeel_store::{Defect, Error};
use serde_json::{Value, json};
use support::{checkpoint, names, save, scratch, version};
use xxhash_rust::xxh3::xxh3_128;

fn put(writer: &CheckpointWriter, name: &str, bytes: &[u8]) -> Result<(), Error> {
    writer.file(name, |file| file.put(bytes))
}

/// The manifest with these lines after its first.
fn signed(contents: &str) -> String {
    format!("{{\"digest\":\"{:032x}\",\n{contents}", xxh3_128(contents.as_bytes()))
}

#[test]
fn a_checkpoint_comes_back_with_its_body_and_files() {
    let root = scratch();
    let path = root.path().join("made/on/the/way");
    let writer = CheckpointWriter::create(&path).unwrap();
    let tensors = forge::vectors(&["a", "b"]);
    put(&writer, "x.safetensors", &tensors).unwrap();
    put(&writer, "empty", b"").unwrap();
    put(&writer, "ü \"quoted\"", b"notes").unwrap();
    let body = json!({ "step": 7, "loss": 0.1, "text": "line\nbreak", "list": [1, null, {"a": true}] });
    assert!(!path.exists());
    writer.commit(&body).unwrap();
    fs::write(path.join("not listed"), "").unwrap();
    let opened = Checkpoint::open(&path).unwrap();
    assert_eq!((opened.path(), opened.body()), (&*path, &body));
    assert_eq!(opened.names().collect::<Vec<_>>(), ["empty", "x.safetensors", "ü \"quoted\""]);
    opened.verify().unwrap();
    let file = opened.tensors("x.safetensors").unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(file.path(), path.join("x.safetensors"));
    // A file that was written as something else is refused for what it is.
    assert!(matches!(opened.tensors("empty").unwrap_err().defect, Defect::FileTooShort { .. }));
    let error = opened.tensors("not listed").unwrap_err();
    assert_eq!(error.to_string(), format!("`{}`: lists no file `not listed`", path.join("manifest.json").display()));
}

#[test]
fn the_manifest_is_json_that_anyone_can_check() {
    let root = scratch();
    let path = root.path().join("c");
    let writer = CheckpointWriter::create(&path).unwrap();
    let bytes: Vec<u8> = (0..(1 << 20) + 5).map(|i: u32| i.to_le_bytes()[i as usize % 3]).collect();
    // In pieces that do not match blocks.
    writer.file("data", |file| bytes.chunks(9999).try_for_each(|piece| file.put(piece))).unwrap();
    writer.commit(&json!([])).unwrap();
    let text = fs::read_to_string(path.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&text).unwrap();
    let blocks = [xxh3_128(&bytes[..1 << 20]), xxh3_128(&bytes[1 << 20..])];
    let hex = |digest: u128| format!("{digest:032x}");
    let (_, contents) = text.split_once('\n').unwrap();
    assert_eq!(
        manifest,
        json!({
            "digest": hex(xxh3_128(contents.as_bytes())),
            "version": 1,
            "body": [],
            "files": [{
                "name": "data",
                "bytes": bytes.len(),
                "digest": hex(xxh3_128(&blocks.map(u128::to_be_bytes).concat())),
                "blocks": blocks.map(hex),
            }],
        })
    );
}

#[test]
fn a_checkpoint_replaces_one_of_the_same_name() {
    let root = scratch();
    let path = checkpoint(root.path(), 1);
    for round in 1..4 {
        save(&path, round, 50).unwrap();
        assert_eq!(version(&Checkpoint::open(&path).unwrap()), round);
        assert_eq!(names(path.parent().unwrap()).len(), 1);
    }
    drop(CheckpointWriter::create(&path).unwrap());
    assert_eq!(version(&Checkpoint::open(&path).unwrap()), 3);
}

#[test]
fn a_checkpoint_that_lacks_a_file_that_was_begun_is_not_committed() {
    let root = scratch();
    let path = root.path().join("c");
    type Attempt = fn(&CheckpointWriter);
    let attempts: [Attempt; 2] = [
        |writer| {
            let failed = writer.file("b", |file| {
                file.put(b"half of")?;
                Err(Defect::NoSpaceLeft).map_err(|defect| Error { file: "b".into(), defect })
            });
            assert!(failed.is_err());
        },
        |writer| {
            let panicked =
                catch_unwind(AssertUnwindSafe(|| writer.file("b", |_| -> Result<(), Error> { panic!("on purpose") })));
            assert!(panicked.is_err());
        },
    ];
    for attempt in attempts {
        let writer = CheckpointWriter::create(&path).unwrap();
        put(&writer, "a", b"1").unwrap();
        attempt(&writer);
        let error = writer.commit(&json!({})).unwrap_err();
        let expected = format!("`{}`: cannot be finished: its file `b` was begun and not completed", path.display());
        assert_eq!(error.to_string(), expected);
        assert!(names(root.path()).is_empty());
    }
    let writer = CheckpointWriter::create(&path).unwrap();
    attempts[0](&writer);
    put(&writer, "b", b"2").unwrap();
    // A second file of a name is refused and takes nothing from the first.
    assert!(matches!(put(&writer, "b", b"3").unwrap_err().defect, Defect::ExistsAlready));
    writer.commit(&json!({})).unwrap();
    Checkpoint::open(&path).unwrap().verify().unwrap();
    assert_eq!(fs::read(path.join("b")).unwrap(), b"2");
}

#[test]
fn names_that_are_not_plain_are_refused() {
    let root = scratch();
    let writer = CheckpointWriter::create(root.path().join("c")).unwrap();
    for name in ["", ".", "..", "/etc/x", "a/b", "../x", "a\\b", "a\0b", "a\nb"] {
        assert!(matches!(put(&writer, name, b"").unwrap_err().defect, Defect::NotAFileName { .. }), "{name:?}");
    }
    assert!(matches!(put(&writer, "manifest.json", b"").unwrap_err().defect, Defect::ReservedName { .. }));
    writer.commit(&json!(1)).unwrap();
    assert_eq!(names(&root.path().join("c")), ["manifest.json"]);
}

#[test]
fn what_a_reader_would_refuse_is_not_written() {
    let root = scratch();
    let path = root.path().join("c");
    let deep = |levels: usize| (0..levels).fold(json!(1), |inner, _| json!([inner]));
    let commit = |body: &Value| CheckpointWriter::create(&path).unwrap().commit(body);
    commit(&deep(100)).unwrap();
    let error = commit(&deep(200)).unwrap_err();
    assert!(matches!(error.defect, Defect::NotJson { .. }) && error.file == path.join("manifest.json"), "{error}");
    let error = commit(&json!("x".repeat(64 << 20))).unwrap_err();
    assert!(matches!(error.defect, Defect::FileTooLarge { limit_bytes: 0x400_0000, .. }), "{error}");
    assert_eq!(Checkpoint::open(&path).unwrap().body(), &deep(100));
}

#[test]
fn forged_manifests_are_refused() {
    let digest = |bytes: &[u8]| format!("{:032x}", xxh3_128(bytes));
    let file = |name: &str, bytes: u64, blocks: &[u128]| {
        let all: Vec<u8> = blocks.iter().flat_map(|block| block.to_be_bytes()).collect();
        let blocks: Vec<String> = blocks.iter().map(|block| format!("{block:032x}")).collect();
        json!({ "name": name, "bytes": bytes, "digest": digest(&all), "blocks": blocks }).to_string()
    };
    let one = [xxh3_128(b"1")];
    let of = |version: &str, files: &[String]| {
        format!("\"version\":{version},\n\"body\":{{}},\n\"files\":[{}]}}\n", files.join(","))
    };
    let wrong_digest = file("a", 1, &one).replacen(&digest(&one[0].to_be_bytes()), &digest(b"?"), 1);
    let short_digest = file("a", 1, &one).replacen(&format!("{:032x}", one[0]), "12", 1);
    let not_json = |text: &str| format!("is not JSON: {text}");
    let wrong_form = |text: &str| format!("has JSON of the wrong form: {text}");
    let name = |name: &str| format!("the name `{name}` cannot be used in a folder, expected a plain file name");
    let cases: Vec<(String, String)> = vec![
        (of("2", &[]), "is a manifest of version 2, expected 1".into()),
        (of("1", &[file("../a", 1, &one)]), name("../a")),
        (of("1", &[file("/etc/passwd", 1, &one)]), name("/etc/passwd")),
        (of("1", &[file("..", 1, &one)]), name("..")),
        (of("1", &[file("", 1, &one)]), name("")),
        (of("1", &[file("b\\a", 1, &one)]), name("b\\a")),
        (of("1", &[file("a\0", 1, &one)]), name("a\\u{0}")),
        (
            of("1", &[file("manifest.json", 1, &one)]),
            "the name `manifest.json` is kept for the checkpoint's manifest".into(),
        ),
        (of("1", &[file("a", 1, &one), file("a", 1, &one)]), "lists the file `a` twice".into()),
        (of("1", &[file("a", 1, &[])]), "lists `a` with 1 bytes and 0 digests, expected one for each MiB begun".into()),
        (
            of("1", &[file("a", 0, &one)]),
            "lists `a` with 0 bytes and 1 digests, expected one for each MiB begun".into(),
        ),
        (
            of("1", &[file("a", u64::MAX, &one)]),
            "lists `a` with 18446744073709551615 bytes and 1 digests, expected one for each MiB begun".into(),
        ),
        (of("1", &[wrong_digest]), "lists `a` with a digest that is not that of its blocks".into()),
        (of("1", &[short_digest]), wrong_form("expected a digest of 32 hexadecimal digits")),
        (
            of("1", &[file("a", 1, &one).replace("\"bytes\":1", "\"bytes\":-1")]),
            wrong_form("invalid value: integer `-1`, expected u64"),
        ),
        (of("1", &[]).replace("\"body\"", "\"more\":1,\"body\""), wrong_form("unknown field `more`")),
        (
            of("1", &[]).replace("\"body\"", "\"version\":1,\"body\""),
            "has the JSON key `version` twice in one object".into(),
        ),
        (of("1", &[]).replace("\"body\":{},", ""), wrong_form("missing field `body`")),
        (of("1", &[]).replace("]}", "]"), not_json("EOF while parsing")),
    ];
    for (contents, expected) in cases {
        let folder = forge::folder(&[("a", b"1"), ("manifest.json", signed(&contents).as_bytes())]);
        let error = Checkpoint::open(folder.path()).unwrap_err();
        assert_eq!(error.file, folder.path().join("manifest.json"));
        assert!(error.defect.to_string().starts_with(&expected), "{error}\nexpected {expected}");
    }
    let sound = forge::folder(&[("a", b"1"), ("manifest.json", signed(&of("1", &[file("a", 1, &one)])).as_bytes())]);
    Checkpoint::open(sound.path()).unwrap().verify().unwrap();
}

#[test]
fn what_is_no_checkpoint_says_so() {
    let open = |path: &Path| Checkpoint::open(path).unwrap_err();
    let folder = forge::folder(&[("other", b"")]);
    assert!(matches!(open(folder.path()).defect, Defect::NoManifest));
    assert!(matches!(open(&folder.path().join("missing")).defect, Defect::NotThere));
    assert!(open(&folder.path().join("other")).file.starts_with(folder.path()));
    let manifest = folder.path().join("manifest.json");
    for text in
        ["", "{}", "{\"digest\":\"", "{\"digest\": \"0\",\n", "{\"digest\":\"99aa06d3014798d86001c324468d497f\",\n"]
    {
        fs::write(&manifest, text).unwrap();
        let error = open(folder.path());
        let is_told = matches!(error.defect, Defect::ManifestUnsigned | Defect::NotJson { .. });
        assert!(is_told && error.file == manifest, "{text:?}: {error}");
    }
    // It is not read.
    fs::File::create(&manifest).unwrap().set_len((64 << 20) + 1).unwrap();
    assert!(matches!(open(folder.path()).defect, Defect::FileTooLarge { .. }));
}
