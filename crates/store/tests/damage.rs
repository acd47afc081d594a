//! Checkpoints damaged by a disk or a copy.

mod support;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use evenkeel_store::checkpoint::{Checkpoint, keep_newest, keep_newest_and, list, newest_good};
use evenkeel_store::{Defect, Error};
use fastrand::Rng;
use support::{FILES, PREFIX, checkpoint, checkpoints, names, save, scratch, start, version};

const MIB: usize = 1 << 20;

fn open_all(path: &Path) -> Result<(), Error> {
    let checkpoint = Checkpoint::open(path)?;
    FILES.iter().try_for_each(|name| checkpoint.tensors(name).map(drop))
}

/// Changes one byte of a file, checks the outcome, and changes it back.
fn with_flipped(path: &Path, place: usize, mask: u8, look: impl FnOnce()) {
    flip(path, place, mask);
    look();
    flip(path, place, mask);
}

fn length(path: &Path) -> usize {
    fs::metadata(path).unwrap().len() as usize
}

fn flip(path: &Path, place: usize, mask: u8) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, place as u64).unwrap();
    file.write_all_at(&[byte[0] ^ mask], place as u64).unwrap();
}

#[test]
fn every_flipped_byte_of_a_small_checkpoint_is_noticed() {
    let mut rng = Rng::with_seed(1);
    let root = scratch();
    let path = checkpoint(root.path(), 1);
    save(&path, 1, 3).unwrap();
    for name in FILES.iter().chain(&["manifest.json"]) {
        let file = path.join(name);
        for place in 0..length(&file) {
            // One that changes the case of letters, and any.
            for mask in [0x20, rng.u8(1..)] {
                with_flipped(&file, place, mask, || {
                    let error = open_all(&path).expect_err(&format!("{name} at {place} with {mask:#x}"));
                    assert_eq!(error.file, file);
                    assert_eq!(error.hint(), Some("an older checkpoint may be whole"), "{error}");
                });
            }
        }
    }
    open_all(&path).unwrap();
}

#[test]
fn flipped_bytes_of_a_large_checkpoint_are_noticed_and_told() {
    let mut rng = Rng::with_seed(2);
    let root = scratch();
    let path = checkpoint(root.path(), 1);
    // More blocks than one thread compares alone; the last one is not full.
    save(&path, 1, 17 * MIB / 4).unwrap();
    let file = path.join(FILES[1]);
    let last = length(&file) - 1;
    assert!(last > 17 * MIB && last < 18 * MIB);
    let places = [0, MIB - 1, MIB, last, rng.usize(..last), rng.usize(..last), rng.usize(..last)];
    for place in places {
        with_flipped(&file, place, 1 << rng.u8(..8), || {
            let begin = place / MIB * MIB;
            let end = (begin + MIB).min(last + 1);
            let error = Checkpoint::open(&path).unwrap().tensors(FILES[1]).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "`{}`: is damaged at bytes {begin}..{end}: its digest differs from the manifest's",
                    file.display()
                )
            );
        });
    }
    // The first of several is reported, whichever thread finds it.
    for place in [3, 5, 6, 16] {
        flip(&file, place * MIB, 1);
    }
    let checkpoint = Checkpoint::open(&path).unwrap();
    for _ in 0..5 {
        let defect = checkpoint.verify().unwrap_err().defect;
        assert!(matches!(defect, Defect::Damaged { begin, .. } if begin == 3 * MIB as u64), "{defect}");
    }
    checkpoint.tensors(FILES[0]).unwrap();
}

#[test]
fn files_that_are_missing_cut_or_longer_are_noticed_when_opened() {
    let root = scratch();
    let path = checkpoint(root.path(), 1);
    let file = path.join(FILES[2]);
    type Case = (fn(&Path), &'static str);
    let cases: [Case; 4] = [
        (|file| fs::remove_file(file).unwrap(), "does not exist, but the checkpoint's manifest lists it"),
        (
            |file| File::options().write(true).open(file).unwrap().set_len(9).unwrap(),
            "is 9 bytes long, the checkpoint's manifest says 472",
        ),
        (
            |file| File::options().write(true).open(file).unwrap().set_len(473).unwrap(),
            "is 473 bytes long, the checkpoint's manifest says 472",
        ),
        (
            |file| {
                fs::remove_file(file).unwrap();
                fs::create_dir(file).unwrap();
            },
            "is a folder, expected a regular file",
        ),
    ];
    for (damage, expected) in cases {
        let _ = fs::remove_dir_all(&path);
        save(&path, 1, 100).unwrap();
        damage(&file);
        let error = Checkpoint::open(&path).unwrap_err();
        assert_eq!(error.to_string(), format!("`{}`: {expected}", file.display()));
    }
}

#[test]
fn the_newest_checkpoint_that_is_whole_is_chosen_and_the_others_are_told() {
    let root = scratch();
    (1..5).for_each(|step| save(&checkpoint(root.path(), step), step, 10).unwrap());
    let choose = || newest_good(list(checkpoints(root.path()), PREFIX).unwrap());
    let check = |expected: Option<u64>, damaged_steps: &[u64]| {
        let (newest, damaged) = choose();
        assert_eq!(newest.as_ref().map(version), expected);
        let steps: Vec<_> = damaged_steps.iter().map(|&step| checkpoint(root.path(), step)).collect();
        assert_eq!(damaged.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>(), steps);
        assert!(damaged.iter().all(|(path, error)| error.file.starts_with(path)), "{damaged:?}");
    };
    let damage = |step, name: &str| {
        let file = checkpoint(root.path(), step).join(name);
        flip(&file, length(&file) - 1, 1);
    };
    check(Some(4), &[]);
    damage(4, FILES[3]);
    check(Some(3), &[4]);
    fs::remove_file(checkpoint(root.path(), 3).join("manifest.json")).unwrap();
    check(Some(2), &[4, 3]);
    damage(2, "manifest.json");
    damage(1, FILES[0]);
    check(None, &[4, 3, 2, 1]);
    // Without a whole one, nothing is surplus.
    assert_eq!(keep_newest(checkpoints(root.path()), PREFIX, 1).unwrap().len(), 4);
    check(None, &[4, 3, 2, 1]);
}

#[test]
fn damaged_checkpoints_do_not_count_when_old_ones_are_removed() {
    // Damaged ones of steps 1 to 6, number to keep, remaining ones, number reported.
    type Case<'a> = (&'a [u64], usize, &'a [u64], usize);
    let cases: [Case; 8] = [
        (&[], 2, &[5, 6], 0),
        (&[], 0, &[6], 0),
        (&[], 6, &[1, 2, 3, 4, 5, 6], 0),
        (&[6], 1, &[5, 6], 1),
        (&[6], 2, &[4, 5, 6], 1),
        (&[5, 6], 3, &[2, 3, 4, 5, 6], 2),
        (&[5], 2, &[4, 6], 0),
        (&[2, 3, 4, 5, 6], 1, &[1, 2, 3, 4, 5, 6], 5),
    ];
    for (damaged, keep, left, told) in cases {
        let root = scratch();
        for step in 1..7 {
            save(&checkpoint(root.path(), step), step, 10).unwrap();
        }
        for &step in damaged {
            // Too short, which shows without reading it through.
            fs::write(checkpoint(root.path(), step).join(FILES[1]), "").unwrap();
        }
        let found = keep_newest(checkpoints(root.path()), PREFIX, keep).unwrap();
        let expected: Vec<String> = left.iter().map(|step| format!("{PREFIX}{step:08}")).collect();
        assert_eq!((names(&checkpoints(root.path())), found.len()), (expected, told), "{damaged:?} {keep}");
    }
}

#[test]
fn a_spared_checkpoint_stays_however_old_it_is_and_beside_those_that_are_kept() {
    // The spared one, number to keep, remaining ones of steps 1 to 5.
    let cases: [(u64, usize, &[u64]); 4] = [(1, 1, &[1, 5]), (2, 2, &[2, 4, 5]), (4, 2, &[4, 5]), (9, 1, &[5])];
    for (spared, keep, left) in cases {
        let root = scratch();
        (1..6).for_each(|step| save(&checkpoint(root.path(), step), step, 10).unwrap());
        keep_newest_and(Some(&checkpoint(root.path(), spared)), checkpoints(root.path()), PREFIX, keep).unwrap();
        let expected: Vec<String> = left.iter().map(|step| format!("{PREFIX}{step:08}")).collect();
        assert_eq!(names(&checkpoints(root.path())), expected, "{spared} {keep}");
    }
}

#[test]
fn checkpoints_are_listed_by_number_and_other_folders_left_alone() {
    let root = scratch();
    let parent = checkpoints(root.path());
    assert!(list(&parent, PREFIX).unwrap().is_empty());
    for step in [9, 10, 100_000_000, 2] {
        save(&checkpoint(root.path(), step), step, 10).unwrap();
    }
    for other in ["step-", "step-+7", "step-7b", "step--7", "best", "xstep-8", "step-99999999999999999999"] {
        fs::create_dir(parent.join(other)).unwrap();
    }
    fs::write(parent.join("step-00000011"), "a file").unwrap();
    // By its number it is below, by its name above that of step 100,000,000.
    fs::create_dir(parent.join("step-11")).unwrap();
    let [first, others @ ..] = [100_000_000, 10, 9, 2].map(|step| checkpoint(root.path(), step));
    assert_eq!(list(&parent, PREFIX).unwrap(), [&[first, parent.join("step-11")], &others[..]].concat());
    keep_newest(&parent, PREFIX, 1).unwrap();
    assert_eq!(names(&parent).len(), 1 + 8);
    assert_eq!(list(&parent, PREFIX).unwrap().len(), 1);
}

#[test]
fn a_removal_that_was_interrupted_is_finished_and_not_undone() {
    let root = scratch();
    (1..3).for_each(|step| save(&checkpoint(root.path(), step), step, 10).unwrap());
    let condemned = checkpoints(root.path()).join(".step-00000002.gone");
    fs::rename(checkpoint(root.path(), 2), &condemned).unwrap();
    fs::remove_file(condemned.join(FILES[0])).unwrap();
    assert_eq!(start(root.path()), Some(1));
}
