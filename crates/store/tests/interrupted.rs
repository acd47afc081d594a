//! Writers that are killed and disks that are full, for real.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use evenkeel_store::{Defect, Error, NewFolder, Recovery, read_text, recover, write_file_atomically};
use fastrand::Rng;
use support::victim::{at_work, kill_after};
use support::{names, scratch};
use tempfile::TempDir;

const FILES: [&str; 3] = ["a", "b", "c"];
const ROUNDS: u64 = 25;
/// More operations than a replacement of the folder and the file takes.
const OPERATIONS: usize = 30;

/// Not a test: what `a_killed_writer…` starts and kills. It replaces a folder and a file for ever.
#[test]
fn victim() {
    let Some((root, _watch)) = at_work() else { return };
    let path = root.join("checkpoint");
    for version in 1_u64.. {
        let contents = version.to_string().repeat(10_000);
        let new = NewFolder::create(&path).unwrap();
        FILES.iter().for_each(|name| new.write(name, contents.as_bytes()).unwrap());
        new.commit(true).unwrap();
        write_file_atomically(path.with_file_name("latest"), |writer| writer.put(contents.as_bytes())).unwrap();
    }
}

#[test]
fn a_killed_writer_leaves_the_old_or_the_new_one_whole() {
    let folder = scratch();
    let path = folder.path().join("checkpoint");
    let latest = folder.path().join("latest");
    let mut rng = Rng::with_seed(3);
    let mut leftovers = 0;
    let _alone = alone();
    for round in 0..ROUNDS {
        // From the second round on there is something to lose from the first moment.
        let fewest = if round == 0 { 2 * OPERATIONS } else { 0 };
        kill_after(folder.path(), fewest + rng.usize(..3 * OPERATIONS));
        leftovers += names(folder.path()).iter().filter(|name| name.starts_with('.')).count();
        recover(&path).unwrap();
        recover(&latest).unwrap();
        let contents: Vec<String> = FILES.iter().map(|name| read_text(path.join(name), 1 << 20).unwrap()).collect();
        assert!(contents.iter().all(|text| *text == contents[0]), "files of different versions");
        assert!(contents[0].len() >= 10_000);
        assert!(read_text(&latest, 1 << 20).unwrap().len() >= 10_000);
        assert_eq!(names(folder.path()), ["checkpoint", "latest"], "something was left");
    }
    assert!(leftovers > 0, "no kill hit a writer at work");
}

/// A starting process briefly holds a copy of every open file, and the space of removed ones. So tests that start processes and
/// tests that fill a disk run one after another.
static PROCESSES: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    PROCESSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file system of one megabyte, unmounted at the end.
struct SmallDisk(PathBuf, #[expect(dead_code, reason = "held until the disk is gone")] MutexGuard<'static, ()>);

impl SmallDisk {
    fn mount(place: &Path) -> Option<SmallDisk> {
        let alone = alone();
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "evenkeel-test"]).arg(place).output();
        match mount {
            Ok(output) if output.status.success() => Some(SmallDisk(place.to_owned(), alone)),
            other => {
                println!("skipped: a small disk cannot be mounted here: {other:?}");
                None
            }
        }
    }

    fn make_read_only(&self) {
        assert!(Command::new("mount").args(["-o", "remount,ro"]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_folder_that_cannot_take_its_place_at_once_takes_it_at_the_next_recovery() {
    let parent = TempDir::new().unwrap();
    let path = parent.path().join("checkpoint");
    fs::create_dir(&path).unwrap();
    // A mount point cannot be renamed.
    let Some(disk) = SmallDisk::mount(&path) else { return };
    let new = NewFolder::create(&path).unwrap();
    new.write("a", b"new").unwrap();
    let error = new.commit(true).unwrap_err();
    assert!(error.is_fault(), "{error}");
    drop(disk);
    assert!(!path.join("a").exists());
    assert_eq!(recover(&path).unwrap(), Recovery::Finished);
    assert_eq!(read_text(path.join("a"), 9).unwrap(), "new");
    assert_eq!(visible(parent.path()), ["checkpoint"]);
}

fn visible(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_full_disk_is_said_and_leaves_what_was_there() {
    let folder = TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(folder.path()) else { return };
    let path = disk.0.join("file");
    write_file_atomically(&path, |writer| writer.put(b"old")).unwrap();
    let full = |error: Error| {
        assert!(matches!(error.defect, Defect::NoSpaceLeft), "{error:?}");
        assert_eq!(error.hint(), Some("free some space or write to another disk; what was there before is unchanged"));
        error.to_string()
    };
    // In pieces below and above the size of the buffer: the first fails when flushed at the end.
    for pieces in [1500, 3 << 20] {
        let failed = write_file_atomically(&path, |writer| {
            (0..(6 << 20) / pieces).try_for_each(|_| writer.put(&vec![1; pieces]))
        });
        assert_eq!(
            full(failed.unwrap_err()),
            format!("`{}`: cannot be written: no space is left on its disk", path.display())
        );
        assert_eq!(visible(&disk.0), ["file"]);
        assert_eq!(read_text(&path, 9).unwrap(), "old");
    }
    let small_but_too_much = write_file_atomically(&path, |writer| writer.put(&vec![1; (1 << 20) - 1]));
    full(small_but_too_much.unwrap_err());
    let new = NewFolder::create(disk.0.join("checkpoint")).unwrap();
    new.write("fits", b"1").unwrap();
    full(new.write("does not", &vec![1; 2 << 20]).unwrap_err());
    drop(new);
    assert_eq!(visible(&disk.0), ["file"]);
}

#[test]
fn a_read_only_disk_is_said() {
    let folder = TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(folder.path()) else { return };
    write_file_atomically(disk.0.join("file"), |writer| writer.put(b"old")).unwrap();
    disk.make_read_only();
    refused_for_permission(&disk.0);
}

#[test]
fn a_folder_without_permission_is_said() {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("file"), "old").unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    if fs::create_dir(folder.path().join("probe")).is_ok() {
        println!("skipped: this user may write anywhere");
        return;
    }
    refused_for_permission(folder.path());
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
}

fn refused_for_permission(folder: &Path) {
    let errors = [
        write_file_atomically(folder.join("file"), |writer| writer.put(b"")).unwrap_err(),
        write_file_atomically(folder.join("other"), |writer| writer.put(b"")).unwrap_err(),
        NewFolder::create(folder.join("checkpoint")).err().unwrap(),
        NewFolder::create(folder.join("runs/checkpoint")).err().unwrap(),
    ];
    for error in errors {
        assert!(matches!(error.defect, Defect::MayNotBeWritten(_)), "{error:?}");
        assert_eq!(error.hint(), Some("check the owner and the permissions of the folder it is in"));
    }
    assert_eq!(read_text(folder.join("file"), 9).unwrap(), "old");
}
