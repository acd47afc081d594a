//! Files and folders that appear whole or not at all.

mod forge;

use std::fs;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use evenkeel_store::{
    Defect, Error, NewFolder, Recovery, copy_file, read_json, read_text, recover, recover_all, write_file_atomically,
    write_json,
};
use forge::{folder, message};
use tempfile::TempDir;

/// The names in a folder, hidden ones too, sorted.
fn listing(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn text(path: impl AsRef<Path>) -> String {
    read_text(path, 1 << 20).unwrap()
}

/// A made-up failure of the code that produces a file's contents.
#[derive(Debug)]
struct OutOfIdeas;

impl From<Error> for OutOfIdeas {
    fn from(error: Error) -> OutOfIdeas {
        panic!("{error}")
    }
}

#[test]
fn a_file_is_written_and_replaced() {
    let parent = TempDir::new().unwrap();
    let folder = parent.path().join("made/on/the/way");
    let path = folder.join("metrics.txt");
    for contents in ["", "first", "the second, which is longer", "3"] {
        let value = write_file_atomically(&path, |writer| {
            contents.bytes().try_for_each(|byte| writer.put(&[byte]))?;
            Ok::<_, Error>(contents.len())
        });
        assert_eq!(value.unwrap(), contents.len());
        assert_eq!(text(&path), contents);
        assert_eq!(listing(&folder), ["metrics.txt"]);
    }
}

#[test]
fn a_file_that_fails_half_way_leaves_the_old_one() {
    let folder = folder(&[("a.txt", b"old")]);
    let path = folder.path().join("a.txt");
    let large = vec![b'x'; 3 << 20];
    let failed = write_file_atomically(&path, |writer| {
        writer.put(&large)?;
        assert_eq!(listing(folder.path()).len(), 2, "large writes are under the temporary name");
        Err::<(), _>(OutOfIdeas)
    });
    assert!(matches!(failed, Err(OutOfIdeas)));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        write_file_atomically(&path, |writer| -> Result<(), Error> {
            writer.put(&large)?;
            panic!("on purpose")
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(listing(folder.path()), ["a.txt"]);
    assert_eq!(text(&path), "old");
}

#[test]
fn what_is_not_a_file_is_not_replaced_by_one() {
    let folder = folder(&[]);
    let device = folder.path().join("device");
    symlink("/dev/null", &device).unwrap();
    type Case<'a> = (&'a Path, fn(&Defect) -> bool);
    let cases: [Case; 4] = [
        (&device, |defect| matches!(defect, Defect::NotARegularFile { found: "a device" })),
        (folder.path(), |defect| matches!(defect, Defect::NotARegularFile { found: "a folder" })),
        (Path::new(".."), |defect| matches!(defect, Defect::NotARegularFile { .. } | Defect::NamesNothing)),
        (Path::new(""), |defect| matches!(defect, Defect::NamesNothing)),
    ];
    for (path, expected) in cases {
        let error = write_file_atomically(path, |writer| writer.put(b"x")).unwrap_err();
        assert!(expected(&error.defect), "{error:?}");
    }
    assert_eq!(listing(folder.path()), ["device"]);
}

#[test]
fn small_files_come_back() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("run.json");
    write_json(&path, &serde_json::json!({ "steps": 10 })).unwrap();
    assert_eq!(text(&path), "{\n  \"steps\": 10\n}\n");
    assert_eq!(read_json::<serde_json::Value>(&path, 100).unwrap()["steps"], 10);
    let refused = |error: Error, expected: fn(&Defect) -> bool| assert!(expected(&error.defect), "{error:?}");
    refused(read_text(&path, 3).unwrap_err(), |defect| matches!(defect, Defect::FileTooLarge { limit_bytes: 3, .. }));
    refused(read_text("/dev/zero", 3).unwrap_err(), |defect| matches!(defect, Defect::NotARegularFile { .. }));
    fs::write(&path, b"ab\xff").unwrap();
    refused(read_text(&path, 3).unwrap_err(), |defect| matches!(defect, Defect::NotText { at: 2 }));
    fs::write(&path, br#"{"a":1,"a":2}"#).unwrap();
    let twice = read_json::<serde_json::Value>(&path, 100).unwrap_err();
    refused(twice, |defect| matches!(defect, Defect::DuplicateKey { .. }));
}

#[test]
fn what_killed_writers_left_is_removed_by_the_next_one_and_what_is_not_theirs_stays() {
    const LEFT: [&str; 2] = [".a.txt.tmp-1-2", ".a.txt.tmp-77-0"];
    const OTHERS: [&str; 5] = [".a.txt.old", ".a.txt.tmp-1-2-3", ".a.txt.tmp-5-0", ".a.txt.tmp-mine", ".b.txt.tmp-1-2"];
    let folder = folder(&[]);
    let at = |name: &str| folder.path().join(name);
    LEFT.iter().chain(&OTHERS).for_each(|name| fs::write(at(name), "half a file").unwrap());
    let other_writer = fs::File::open(at(".a.txt.tmp-5-0")).unwrap();
    other_writer.lock().unwrap();
    write_file_atomically(at("a.txt"), |writer| writer.put(b"new")).unwrap();
    assert_eq!(listing(folder.path()), [&OTHERS[..], &["a.txt"]].concat());
}

#[test]
fn all_of_a_folder_is_recovered_that_is_ours_and_nothing_else_is_touched() {
    const OTHERS: [&str; 4] = [".notes.gone", ".notes.old", ".notes.tmp-1-2", ".step-1.tmp-mine"];
    let folder = folder(&[]);
    let at = |name: &str| folder.path().join(name);
    for name in [".step-1.tmp-1-2", ".step-2.old", ".step-3.gone", ".step-4.new", ".step-5.tmp-9-9"] {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("data"), name).unwrap();
    }
    OTHERS.iter().for_each(|name| fs::write(at(name), "").unwrap());
    recover_all(folder.path(), |name| name.starts_with("step-")).unwrap();
    assert_eq!(listing(folder.path()), [&OTHERS[..], &["step-2", "step-4"]].concat());
    assert_eq!(text(at("step-4/data")), ".step-4.new");
    recover_all(at("nowhere"), |_| true).unwrap();
}

#[test]
fn writers_of_the_same_file_do_not_take_one_another_for_leftovers() {
    let folder = folder(&[]);
    let path = folder.path().join("a.txt");
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..50 {
                    write_file_atomically(path, |file| file.put(&[b'0' + writer; 9])).unwrap();
                }
            });
        }
    });
    assert_eq!(listing(folder.path()), ["a.txt"]);
    assert_eq!(text(&path).len(), 9);
}

#[test]
fn a_folder_appears_with_all_its_files() {
    let outside = folder(&[("tokenizer.json", b"{}")]);
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("runs/checkpoint-10");
    let new = NewFolder::create(&path).unwrap();
    new.write("a", b"1").unwrap();
    new.write_json("b.json", &[1, 2]).unwrap();
    copy_file(outside.path().join("tokenizer.json"), &new, "tokenizer.json").unwrap();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let new = &new;
            scope.spawn(move || new.write(&format!("rank-{rank}"), &[rank]).unwrap());
        }
    });
    assert!(!path.exists());
    new.commit(false).unwrap();
    assert_eq!(listing(&path), ["a", "b.json", "rank-0", "rank-1", "rank-2", "rank-3", "tokenizer.json"]);
    assert_eq!((text(path.join("a")), text(path.join("tokenizer.json"))), ("1".into(), "{}".into()));
    assert_eq!(listing(path.parent().unwrap()), ["checkpoint-10"]);
}

#[test]
fn a_folder_that_is_not_committed_leaves_nothing() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("checkpoint");
    let new = NewFolder::create(&path).unwrap();
    new.write("a", b"1").unwrap();
    assert_eq!(listing(parent.path()).len(), 1);
    drop(new);
    assert!(listing(parent.path()).is_empty());
}

#[test]
fn a_file_that_fails_is_not_in_the_folder() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("checkpoint");
    let new = NewFolder::create(&path).unwrap();
    let failed = new.file("bad", |writer| {
        writer.put(b"half of ")?;
        Err::<(), _>(OutOfIdeas)
    });
    assert!(matches!(failed, Err(OutOfIdeas)));
    new.write("good", b"1").unwrap();
    new.commit(false).unwrap();
    assert_eq!(listing(&path), ["good"]);
}

#[test]
fn a_folder_takes_plain_names_only_and_each_once() {
    let parent = TempDir::new().unwrap();
    let new = NewFolder::create(parent.path().join("checkpoint")).unwrap();
    for name in ["", ".", "..", "/etc/x", "a/b", "../x", "a\0b", "a\nb"] {
        let error = new.write(name, b"").unwrap_err();
        assert!(matches!(error.defect, Defect::NotAFileName { .. }), "{error:?}");
    }
    new.write("a", b"1").unwrap();
    assert!(matches!(new.write("a", b"2").unwrap_err().defect, Defect::ExistsAlready));
    new.commit(false).unwrap();
    assert_eq!(text(parent.path().join("checkpoint/a")), "1");
}

#[test]
fn an_existing_folder_is_refused_or_replaced() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("checkpoint");
    let write = |contents: &str, replace| {
        let new = NewFolder::create(&path).unwrap();
        new.write("a", contents.as_bytes()).unwrap();
        new.commit(replace)
    };
    write("1", true).unwrap();
    fs::write(path.join("other"), "").unwrap();
    let error = write("2", false).unwrap_err();
    assert!(matches!(error.defect, Defect::ExistsAlready), "{error:?}");
    assert_eq!((listing(&path), text(path.join("a"))), (vec!["a".to_owned(), "other".to_owned()], "1".to_owned()));
    write("3", true).unwrap();
    assert_eq!((listing(&path), text(path.join("a"))), (vec!["a".to_owned()], "3".to_owned()));
    assert_eq!(listing(parent.path()), ["checkpoint"]);

    fs::remove_dir_all(&path).unwrap();
    fs::write(&path, "a file").unwrap();
    assert!(matches!(write("4", true).unwrap_err().defect, Defect::InTheWay));
    assert_eq!((listing(parent.path()), text(&path)), (vec!["checkpoint".to_owned()], "a file".to_owned()));
}

#[test]
fn a_link_to_a_folder_is_replaced_and_its_end_left_alone() {
    let elsewhere = folder(&[("precious", b"1")]);
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("checkpoint");
    symlink(elsewhere.path(), &path).unwrap();
    NewFolder::create(&path).unwrap().commit(true).unwrap();
    assert_eq!(listing(elsewhere.path()), ["precious"]);
    assert!(listing(&path).is_empty());
}

#[test]
fn every_state_an_interruption_can_leave_is_recovered() {
    const OTHERS: [&str; 5] = [".x.tmp-1", ".x.tmp-1-2-3", ".x.tmp-1-b", ".x.tmp-mine", ".xy.tmp-1-2"];
    // The contents of NAME, NAME.new and NAME.old; the outcome of recovery; the contents of NAME then.
    type Case<'a> = (Option<&'a str>, Option<&'a str>, Option<&'a str>, Recovery, Option<&'a str>);
    let cases: [Case; 8] = [
        (None, None, None, Recovery::Nothing, None),
        (Some("1"), None, None, Recovery::Nothing, Some("1")),
        (Some("1"), Some("2"), None, Recovery::Finished, Some("2")),
        (None, Some("2"), Some("1"), Recovery::Finished, Some("2")),
        (Some("2"), None, Some("1"), Recovery::Nothing, Some("2")),
        (Some("1"), Some("2"), Some("0"), Recovery::Finished, Some("2")),
        (None, None, Some("1"), Recovery::Undone, Some("1")),
        (None, Some("2"), None, Recovery::Finished, Some("2")),
    ];
    for (place, replacement, outgoing, expected, then) in cases {
        let parent = folder(&[(".x.tmp-1-2", b"half a file")]);
        OTHERS.iter().for_each(|name| fs::write(parent.path().join(name), "").unwrap());
        for (name, version) in [("x", place), (".x.new", replacement), (".x.old", outgoing), (".x.tmp-77-0", Some("?"))]
        {
            if let Some(version) = version {
                fs::create_dir(parent.path().join(name)).unwrap();
                fs::write(parent.path().join(name).join("version"), version).unwrap();
            }
        }
        let path = parent.path().join("x");
        assert_eq!(recover(&path).unwrap(), expected, "{place:?} {replacement:?} {outgoing:?}");
        let mut names = OTHERS.to_vec();
        names.extend(then.map(|_| "x"));
        assert_eq!(listing(parent.path()), names);
        assert_eq!(path.exists().then(|| text(path.join("version"))).as_deref(), then);
        assert_eq!(recover(&path).unwrap(), Recovery::Nothing);
    }
    assert_eq!(recover("/nowhere/at/all").unwrap(), Recovery::Nothing);
}

#[test]
fn a_new_folder_begins_by_recovering() {
    let parent = TempDir::new().unwrap();
    fs::create_dir(parent.path().join(".x.new")).unwrap();
    fs::create_dir(parent.path().join(".x.old")).unwrap();
    drop(NewFolder::create(parent.path().join("x")).unwrap());
    assert_eq!(listing(parent.path()), ["x"]);
}

#[test]
fn a_replacement_under_way_is_not_taken_for_an_interrupted_one() {
    let parent = TempDir::new().unwrap();
    let replacement = parent.path().join(".x.new");
    fs::create_dir(&replacement).unwrap();
    let writer = fs::File::open(&replacement).unwrap();
    writer.lock().unwrap();
    assert_eq!(recover(parent.path().join("x")).unwrap(), Recovery::Nothing);
    assert_eq!(listing(parent.path()), [".x.new"]);
    drop(writer);
    assert_eq!(recover(parent.path().join("x")).unwrap(), Recovery::Finished);
}

#[test]
fn a_writer_at_work_is_not_taken_for_a_leftover() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("checkpoint");
    let new = NewFolder::create(&path).unwrap();
    new.write("a", b"1").unwrap();
    assert_eq!(recover(&path).unwrap(), Recovery::Nothing);
    let second = NewFolder::create(&path).unwrap();
    second.write("a", b"2").unwrap();
    new.commit(false).unwrap();
    second.commit(true).unwrap();
    assert_eq!(text(path.join("a")), "2");
    assert_eq!(listing(parent.path()), ["checkpoint"]);
    let file = parent.path().join("file");
    write_file_atomically(&file, |writer| {
        recover(&file)?;
        writer.put(b"3")
    })
    .unwrap();
    assert_eq!(text(file), "3");
}

#[test]
fn errors_of_writing_say_what_to_do() {
    let parent = folder(&[("file", b"")]);
    let check = |error: Error, expected: &str, hint: Option<&str>| {
        assert_eq!((message(&error, parent.path()).as_str(), error.hint()), (expected, hint));
    };
    let at = |name: &str| parent.path().join(name);
    let write = |name: &str| write_file_atomically(at(name), |writer| writer.put(b"")).unwrap_err();
    let path_hint = Some("check the path; a relative one begins where the command was started");
    check(write("file/below"), "`file`: is not a folder, but stands where one must be", None);
    check(read_text(at("missing"), 9).unwrap_err(), "`missing`: does not exist", path_hint);
    let below = NewFolder::create(at("file/below")).err().unwrap();
    check(below, "`file`: is not a folder, but stands where one must be", None);
    let new = NewFolder::create(at("x")).unwrap();
    check(
        new.write("../y", b"").unwrap_err(),
        "`x`: the name `../y` cannot be used in a folder, expected a plain file name",
        None,
    );
    fs::create_dir(at("x")).unwrap();
    let exists = "choose another name, or ask for it to be replaced";
    check(new.commit(false).unwrap_err(), "`x`: exists already", Some(exists));
}
