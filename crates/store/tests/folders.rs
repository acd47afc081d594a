//! Model folders: those that open, those refused, and the errors.

mod forge;

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use evenkeel_store::{Defect, FileDtype, Folder};
use forge::{entry, folder, header, message, vectors, zeros};

const CONFIG: (&str, &[u8]) = ("config.json", br#"{"model_type":"llama","hidden_size":8}"#);
const INDEX: &str = "model.safetensors.index.json";
const ONE: &str = "model-00001-of-00002.safetensors";
const TWO: &str = "model-00002-of-00002.safetensors";

fn index_of(places: &[(&str, &str)]) -> Vec<u8> {
    let places: Vec<String> = places.iter().map(|(tensor, shard)| format!(r#""{tensor}":"{shard}""#)).collect();
    format!(r#"{{"metadata":{{"total_size":0}},"weight_map":{{{}}}}}"#, places.join(",")).into_bytes()
}

fn names(folder: &Path) -> Vec<String> {
    Folder::open(folder).unwrap().names().map(str::to_owned).collect()
}

fn defect(folder: &Path) -> Defect {
    Folder::open(folder).unwrap_err().defect
}

#[test]
fn a_single_file_opens() {
    let folder = folder(&[CONFIG, ("model.safetensors", &vectors(&["b", "a"]))]);
    let opened = Folder::open(folder.path()).unwrap();
    assert_eq!(opened.config()["hidden_size"], 8);
    assert_eq!(opened.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(opened.tensor("a").unwrap().file(), folder.path().join("model.safetensors"));
    assert!(opened.tensor("c").is_none());
}

#[test]
fn shards_open_as_one_model() {
    let index = index_of(&[("b", ONE), ("a", TWO), ("c", ONE)]);
    let folder = folder(&[CONFIG, (INDEX, &index), (ONE, &vectors(&["b", "c"])), (TWO, &vectors(&["a"]))]);
    let opened = Folder::open(folder.path()).unwrap();
    assert_eq!(opened.names().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(opened.tensor("a").unwrap().file(), folder.path().join(TWO));
    assert_eq!(opened.tensor("c").unwrap().file(), folder.path().join(ONE));
}

#[test]
fn the_single_file_counts_where_an_index_is_present_too() {
    let index = index_of(&[("b", ONE)]);
    let folder = folder(&[CONFIG, ("model.safetensors", &vectors(&["a"])), (INDEX, &index), (ONE, &vectors(&["b"]))]);
    assert_eq!(names(folder.path()), ["a"]);
}

#[test]
fn a_tensor_that_the_index_does_not_name_is_ignored() {
    let folder = folder(&[CONFIG, (INDEX, &index_of(&[("a", ONE)])), (ONE, &vectors(&["a", "stray"]))]);
    assert_eq!(names(folder.path()), ["a"]);
}

#[test]
fn of_two_shards_with_one_tensor_the_index_chooses() {
    let index = index_of(&[("a", TWO), ("b", ONE)]);
    let folder = folder(&[CONFIG, (INDEX, &index), (ONE, &vectors(&["a", "b"])), (TWO, &vectors(&["a"]))]);
    assert_eq!(Folder::open(folder.path()).unwrap().tensor("a").unwrap().file(), folder.path().join(TWO));
}

#[test]
fn a_download_cache_made_of_links_opens() {
    let blobs = folder(&[("c0ffee", CONFIG.1), ("f00d", &vectors(&["a"]))]);
    let snapshot = folder(&[]);
    symlink(blobs.path().join("c0ffee"), snapshot.path().join("config.json")).unwrap();
    symlink(blobs.path().join("f00d"), snapshot.path().join("model.safetensors")).unwrap();
    assert_eq!(names(snapshot.path()), ["a"]);
    fs::remove_file(blobs.path().join("f00d")).unwrap();
    assert!(matches!(defect(snapshot.path()), Defect::BrokenLink));
}

#[test]
fn golden_folders_written_by_transformers_open() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden");
    let mut opened = 0;
    let folders = fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path());
    for case in folders.filter(|path| path.join("config.json").exists()) {
        let folder = Folder::open(&case).unwrap();
        assert!(folder.config()["model_type"].is_string(), "{case:?}");
        for name in folder.names() {
            let tensor = folder.tensor(name).unwrap();
            // Codes of 4 bits are no numbers.
            if tensor.dtype() == FileDtype::U8 {
                continue;
            }
            let mut values = vec![f32::NAN; tensor.element_count()];
            tensor.read(0..values.len(), &mut values).unwrap();
            // Bounds of towers for sounds may be infinite.
            assert!(!values.iter().any(|value| value.is_nan()), "{name} of {case:?}");
        }
        opened += 1;
    }
    assert!(opened > 0);
}

#[test]
fn an_index_cannot_reach_outside_its_folder() {
    let cases = [
        "",
        ".safetensors",
        "..",
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "./model.safetensors",
        "model.bin",
        "model.safetensors/..",
        "model.SAFETENSORS",
    ];
    for shard in cases {
        let index = index_of(&[("a", &shard.replace('\\', "\\\\"))]);
        let folder = folder(&[CONFIG, (INDEX, &index)]);
        assert!(matches!(defect(folder.path()), Defect::ShardName { .. }), "{shard}");
    }
    let folder = folder(&[CONFIG, (INDEX, &index_of(&[("a", r"a\u0000.safetensors")]))]);
    assert!(matches!(defect(folder.path()), Defect::ShardName { .. }));
}

#[test]
fn an_index_of_the_wrong_form_is_refused() {
    let check = |index: &[u8], expected: fn(&Defect) -> bool| {
        let folder = folder(&[CONFIG, (INDEX, index), (ONE, &vectors(&["a"]))]);
        let found = defect(folder.path());
        assert!(expected(&found), "{found:?}");
    };
    check(b"", |defect| matches!(defect, Defect::NotJson { .. }));
    check(b"{}", |defect| matches!(defect, Defect::WrongForm { .. }));
    check(br#"{"weight_map":{"a":1}}"#, |defect| matches!(defect, Defect::WrongForm { .. }));
    check(br#"{"weight_map":{},"weight_map":{}}"#, |defect| matches!(defect, Defect::DuplicateKey { .. }));
    check(&index_of(&[("a", ONE), ("a", TWO)]), |defect| matches!(defect, Defect::DuplicateKey { .. }));
    check(&index_of(&[(r"\u001b[2J", ONE)]), |defect| matches!(defect, Defect::TensorName { .. }));
    check(&index_of(&[("b", ONE)]), |defect| matches!(defect, Defect::TensorNotInShard { .. }));
    let shards: Vec<String> = (0..=10_000).map(|i| format!("{i}.safetensors")).collect();
    let places: Vec<(&str, &str)> = shards.iter().map(|shard| (shard.as_str(), shard.as_str())).collect();
    check(&index_of(&places), |defect| matches!(defect, Defect::TooManyShards { found: 10_001 }));
}

#[test]
fn a_config_of_the_wrong_form_is_refused() {
    let check = |config: &[u8], expected: fn(&Defect) -> bool| {
        let folder = folder(&[("config.json", config), ("model.safetensors", &vectors(&["a"]))]);
        let found = defect(folder.path());
        assert!(expected(&found), "{found:?}");
    };
    check(b"", |defect| matches!(defect, Defect::NotJson { .. }));
    check(b"[]", |defect| matches!(defect, Defect::WrongForm { .. }));
    check(b"{\"a\":\"\xff\"}", |defect| matches!(defect, Defect::NotUtf8 { at: 6 }));
    check(br#"{"a":{"b":[{"c":1,"c":2}]}}"#, |defect| matches!(defect, Defect::DuplicateKey { key } if key == "c"));
    check("[".repeat(1 << 20).as_bytes(), |defect| matches!(defect, Defect::NotJson { .. }));
    check(&vec![b' '; (16 << 20) + 1], |defect| matches!(defect, Defect::FileTooLarge { .. }));
}

#[test]
fn what_is_not_a_regular_file_is_refused_and_never_waited_for() {
    let found = |name: &str, make: &dyn Fn(&Path)| {
        let folder = folder(&[CONFIG, ("model.safetensors", &vectors(&["a"]))]);
        let path = folder.path().join(name);
        fs::remove_file(&path).unwrap();
        make(&path);
        match defect(folder.path()) {
            Defect::NotARegularFile { found } => found,
            other => panic!("{other:?}"),
        }
    };
    for name in ["config.json", "model.safetensors"] {
        assert_eq!(found(name, &|path| fs::create_dir(path).unwrap()), "a folder");
        assert_eq!(found(name, &|path| symlink("/dev/zero", path).unwrap()), "a device");
        assert_eq!(found(name, &|path| drop(UnixListener::bind(path).unwrap())), "a socket");
        let pipe = |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        assert_eq!(found(name, &pipe), "a pipe");
    }
}

#[test]
fn errors_say_what_and_where_and_what_to_do() {
    let incomplete = "the download is incomplete, download the model again";
    let layout = "a model is a folder with config.json and model.safetensors, or an index and its shards";
    let cut = "the file looks cut short, download it again or compare its checksum";
    let shape = zeros(&[entry("wte.weight", "F32", &[2, 3], 0, 16)], 16);
    let beyond = forge::file(&header(&[entry("wte.weight", "F32", &[4], 0, 16)]), &[0; 12]);
    let places = [("a", ONE), ("b", TWO), ("c", "model-3.safetensors")];
    type Case<'a> = (&'a [(&'a str, &'a [u8])], &'a str, Option<&'a str>);
    let cases: [Case; 8] = [
        (&[], "`config.json`: does not exist", Some(layout)),
        (
            &[CONFIG, ("model.safetensors", &shape)],
            "`model.safetensors`: tensor `wte.weight` is F32 [2, 3] and needs 24 bytes, its offsets give 16",
            None,
        ),
        (
            &[CONFIG, ("model.safetensors", &beyond)],
            "`model.safetensors`: tensor `wte.weight` ends at byte 16, the file holds 12 bytes of tensors",
            Some(cut),
        ),
        (
            &[CONFIG, (INDEX, &index_of(&places)), (ONE, &vectors(&["a"]))],
            "`model.safetensors.index.json`: names 3 shards, of which 2 are missing: \
             model-00002-of-00002.safetensors, model-3.safetensors",
            Some(incomplete),
        ),
        (
            &[CONFIG, (INDEX, &index_of(&places[..2])), (ONE, &vectors(&["a"]))],
            "`model.safetensors.index.json`: names 2 shards, of which 1 is missing: model-00002-of-00002.safetensors",
            Some(incomplete),
        ),
        (
            &[CONFIG, (INDEX, &index_of(&places[..2])), (ONE, &vectors(&["a"])), (TWO, &vectors(&["a"]))],
            "`model.safetensors.index.json`: places tensor `b` in shard `model-00002-of-00002.safetensors`, \
             which does not hold it",
            Some("the index and the shards are from different checkpoints"),
        ),
        (
            &[CONFIG, (INDEX, &index_of(&[("a", r"\u001b]0;\u0007/x")]))],
            r"`model.safetensors.index.json`: names the shard `\u{1b}]0;\u{7}/x` for tensor `a`, expected a plain file name ending in `.safetensors`",
            None,
        ),
        (
            &[CONFIG, ("model.safetensors", b"")],
            "`model.safetensors`: is 0 bytes long, a safetensors file has at least 8",
            Some(cut),
        ),
    ];
    for (files, expected, hint) in cases {
        let folder = folder(files);
        let error = Folder::open(folder.path()).unwrap_err();
        assert_eq!((message(&error, folder.path()).as_str(), error.hint()), (expected, hint));
    }
}

#[test]
fn a_folder_without_safetensors_is_refused() {
    let bare = folder(&[CONFIG]);
    assert!(matches!(defect(bare.path()), Defect::NoWeights));
    let pickled = folder(&[CONFIG, ("pytorch_model.bin", b"")]);
    assert!(matches!(defect(pickled.path()), Defect::PickleWeights));
    assert!(matches!(defect(&bare.path().join("config.json")), Defect::NotAFolder));
    assert!(matches!(defect(&bare.path().join("nowhere")), Defect::Missing));
}
