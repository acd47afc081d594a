//! Disks that refuse each call of a save in turn.

mod support;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use evenkeel_store::checkpoint::{Checkpoint, CheckpointWriter, list, newest_good};
use evenkeel_store::faults::{self, DiskOperation};
use evenkeel_store::{Defect, Error, remove};
use serde_json::json;
use support::{PREFIX, checkpoint, checkpoints, names, save, scratch, start, version};

const ELEMENTS: usize = 100;
const ENOSPC: i32 = 28;
const EIO: i32 = 5;

/// The calls to refuse.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Refused {
    Only(usize),
    /// A disk that is full or broken is likely to stay so.
    From(usize),
}

/// Calls `run` on a disk that refuses calls. Returns its result and the first refused call with its path.
fn with_refusals<T>(
    root: &Path,
    refused: Refused,
    code: i32,
    run: impl FnOnce() -> T,
) -> (T, Option<(String, PathBuf)>) {
    let calls = AtomicUsize::new(0);
    let first = Arc::new(Mutex::new(None));
    let told = first.clone();
    let watch = faults::watch(root, move |operation| {
        let call = calls.fetch_add(1, Ordering::Relaxed);
        let is_refused = match refused {
            Refused::Only(place) => call == place,
            Refused::From(place) => call >= place,
        };
        if !is_refused {
            return Ok(());
        }
        if let DiskOperation::RemoveTree(path) = operation {
            // It fails half-way.
            let _ = fs::remove_file(path.join("manifest.json"));
        }
        let kind = format!("{operation:?}").split(['(', ' ']).next().unwrap().to_owned();
        told.lock().unwrap().get_or_insert((kind, operation.path().to_owned()));
        Err(io::Error::from_raw_os_error(code))
    });
    let result = run();
    drop(watch);
    let first = first.lock().unwrap().take();
    (result, first)
}

/// Refuses every call of a save of version 2 in turn, until the save makes no more calls.
fn refuse_each(code: i32, refused: fn(usize) -> Refused, step: u64, check: impl Fn(&Path, Error, &str, &Path)) {
    for place in 0.. {
        let root = scratch();
        save(&checkpoint(root.path(), 1), 1, ELEMENTS).unwrap();
        let path = checkpoint(root.path(), step);
        let (saved, first) = with_refusals(root.path(), refused(place), code, || save(&path, 2, ELEMENTS));
        let Some((kind, about)) = first else {
            saved.unwrap();
            assert_eq!(start(root.path()), Some(2));
            assert!(place > 20, "only {place} calls were seen");
            return;
        };
        let error = saved.expect_err(&format!("{kind} of {} was refused", about.display()));
        check(root.path(), error, &kind, &about);
        // Leftovers do not hinder the next save.
        save(&path, 3, ELEMENTS).unwrap();
        assert_eq!(start(root.path()), Some(3));
    }
}

fn check_defect(error: &Error, code: i32) {
    let found = (code, &error.defect);
    assert!(matches!(found, (ENOSPC, Defect::NoSpaceLeft) | (EIO, Defect::CannotBeWritten(_))), "{error:?}");
    assert!(error.is_fault());
}

fn check_message(error: &Error, code: i32, step: u64, kind: &str, about: &Path, root: &Path) {
    check_defect(error, code);
    let path = checkpoint(root, step);
    let expected = match about.parent() {
        // The error names a file of the new checkpoint by its final path.
        Some(parent) if parent.parent() == path.parent() => path.join(about.file_name().unwrap()),
        _ if kind == "SyncFolder" && !about.to_str().unwrap().contains(".tmp-") => about.to_owned(),
        _ if kind == "RemoveTree" => about.to_owned(),
        _ => path,
    };
    assert_eq!(error.file, expected, "{kind} of {}: {error}", about.display());
}

#[test]
fn a_call_that_is_refused_once_leaves_the_old_checkpoint_in_its_place() {
    for (code, step) in [(ENOSPC, 1), (EIO, 1), (ENOSPC, 2), (EIO, 2)] {
        refuse_each(code, Refused::Only, step, |root, error, kind, about| {
            check_message(&error, code, step, kind, about, root);
            // Without any recovery.
            let folders = list(checkpoints(root), PREFIX).unwrap();
            let (newest, damaged) = newest_good(&folders);
            assert!(damaged.is_empty(), "{damaged:?}");
            assert!(matches!(version(&newest.unwrap()), 1 | 2));
            // A leftover is either complete and waits for its name, or is the old one being deleted.
            let is_waiting = |name: &String| name.ends_with(".new") || name.ends_with(".old");
            let hidden: Vec<String> =
                names(&checkpoints(root)).into_iter().filter(|name| name.starts_with('.')).collect();
            assert!(hidden.len() <= 1 && hidden.iter().all(is_waiting), "{kind} of {}: {hidden:?}", about.display());
            assert!(matches!(start(root), Some(1 | 2)));
        });
    }
}

#[test]
fn a_disk_that_refuses_everything_from_some_call_on_leaves_the_old_or_the_new_checkpoint() {
    for (code, step) in [(ENOSPC, 1), (EIO, 2)] {
        refuse_each(code, Refused::From, step, |root, error, kind, about| {
            check_defect(&error, code);
            // Either of two failing threads may report.
            assert!(error.file.starts_with(checkpoints(root)) || error.file == about, "{kind}: {error}");
            assert!(matches!(start(root), Some(1 | 2)));
        });
    }
}

#[test]
fn a_removal_that_is_refused_leaves_a_whole_checkpoint_or_none() {
    for place in 0.. {
        let root = scratch();
        (1..3).for_each(|step| save(&checkpoint(root.path(), step), step, ELEMENTS).unwrap());
        let path = checkpoint(root.path(), 2);
        let (removed, first) = with_refusals(root.path(), Refused::Only(place), EIO, || remove(&path));
        if first.is_none() {
            removed.unwrap();
            assert!(place >= 3, "only {place} calls were seen");
            return;
        }
        assert!(removed.unwrap_err().is_fault());
        let is_there = path.exists();
        assert_eq!(start(root.path()), Some(if is_there { 2 } else { 1 }));
        remove(&path).unwrap();
        assert_eq!(start(root.path()), Some(1));
    }
}

/// Folders are made one by one, each with its name made to last before the next.
#[test]
fn folders_that_cannot_be_made_to_last_are_tried_again() {
    for place in 0.. {
        let root = scratch();
        let path = checkpoint(root.path(), 1);
        let (created, first) =
            with_refusals(root.path(), Refused::Only(place), EIO, || CheckpointWriter::create(&path).map(drop));
        let Some((_, about)) = first else {
            // Three folders and the new one, each name synced but the last; then that is dropped again.
            assert!(created.is_ok() && place >= 8, "only {place} calls were seen");
            return;
        };
        if let Err(error) = created {
            assert!(error.file == about || about.starts_with(checkpoints(root.path())), "{error} {}", about.display());
        }
        save(&path, 3, ELEMENTS).unwrap();
        assert_eq!(start(root.path()), Some(3));
    }
}

#[test]
fn a_file_whose_writer_goes_on_after_a_failure_is_not_completed() {
    let root = scratch();
    let path = checkpoint(root.path(), 1);
    let writer = CheckpointWriter::create(&path).unwrap();
    let careless = |writer: &CheckpointWriter| {
        writer.file("data", |file| {
            for _ in 0..3 {
                let _ = file.put(&vec![7; 2 << 20]);
            }
            Ok::<(), Error>(())
        })
    };
    // The first is the creation of the file.
    let (written, _) = with_refusals(root.path(), Refused::Only(2), EIO, || careless(&writer));
    let error = written.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("`{}`: cannot be written: an earlier part of it could not be", path.join("data").display())
    );
    careless(&writer).unwrap();
    writer.commit(&json!(null)).unwrap();
    Checkpoint::open(&path).unwrap().verify().unwrap();
}
