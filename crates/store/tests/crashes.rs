//! Losses of power during a save, at every point and with every outcome that the model of a disk allows.

mod support;

use std::fs;
use std::path::Path;

use evenkeel_store::checkpoint::keep_newest;
use evenkeel_store::{recover, write_file_atomically};
use fastrand::Rng;
use support::model::{Disk, Loss};
use support::recording::{Recorded, record};
use support::{PREFIX, checkpoint, checkpoints, names, save, scratch, start};

/// More than one block of the model disk.
const ELEMENTS: usize = 300;
const RANDOM_LOSSES: usize = 20;

/// A way to save, given the version to save.
#[derive(Clone, Copy, Debug)]
enum Save {
    /// Replaces the one before.
    Replacing,
    /// Keeps those before.
    Adding,
    /// Removes the one before afterwards.
    AddingAndRemoving,
}

impl Save {
    const ALL: [Save; 3] = [Save::Replacing, Save::Adding, Save::AddingAndRemoving];
    /// And the version that was there before.
    const CASES: [(Save, Option<u64>); 4] = [
        (Save::Replacing, Some(1)),
        (Save::Adding, Some(1)),
        (Save::AddingAndRemoving, Some(1)),
        // The first save also makes the folders above it.
        (Save::Adding, None),
    ];

    fn run(self, root: &Path, version: u64) {
        match self {
            Save::Replacing => save(&checkpoint(root, 1), version, ELEMENTS).unwrap(),
            Save::Adding => save(&checkpoint(root, version), version, ELEMENTS).unwrap(),
            Save::AddingAndRemoving => {
                save(&checkpoint(root, version), version, ELEMENTS).unwrap();
                assert!(keep_newest(checkpoints(root), PREFIX, 1).unwrap().is_empty());
            }
        }
    }
}

/// Visits every possible state of a disk, each in its own folder.
fn for_each_loss(disk: &Disk, rng: &mut Rng, mut look: impl FnMut(&Path)) {
    let show = |loss: Loss, look: &mut dyn FnMut(&Path)| {
        let after = scratch();
        disk.show_after(loss, after.path());
        look(after.path());
    };
    for loss in [Loss::AllLost, Loss::AllKept, Loss::EmptyFiles, Loss::Holes] {
        show(loss, &mut look);
    }
    (0..RANDOM_LOSSES).for_each(|_| show(Loss::Random(rng), &mut look));
}

/// Records the save of a version, after an earlier one if any.
fn record_save(how: Save, before: Option<u64>, version: u64) -> (Disk, Vec<Recorded>) {
    let root = scratch();
    if let Some(before) = before {
        how.run(root.path(), before);
    }
    let disk = Disk::of(root.path());
    let operations = record(root.path(), || how.run(root.path(), version));
    (disk, operations)
}

#[test]
fn the_old_or_the_new_checkpoint_survives_a_loss_of_power_at_any_point() {
    let mut rng = Rng::with_seed(1);
    for (how, before) in Save::CASES {
        let (mut disk, operations) = record_save(how, before, 2);
        let (mut old, mut new) = (0, 0);
        for point in 0..=operations.len() {
            if point > 0 {
                disk.apply(&operations[point - 1]);
            }
            for_each_loss(&disk, &mut rng, |root| {
                let found = start(root);
                let told = || format!("{how:?} after {before:?}, power lost behind {:#?}", &operations[..point]);
                assert!(found == before || found == Some(2), "{found:?}: {}", told());
                assert!(found == Some(2) || point < operations.len(), "what was announced is lost: {}", told());
                *(if found == before { &mut old } else { &mut new }) += 1;
                how.run(root, 3);
                assert_eq!(start(root), Some(3));
            });
        }
        assert!(old > 100 && new > 20, "{how:?}: the old one {old} times and the new one {new} times");
    }
}

/// The next process sees the operations of a killed one, synced or not.
#[test]
fn a_save_after_a_killed_one_survives_a_loss_of_power() {
    let mut rng = Rng::with_seed(2);
    for (how, before) in Save::CASES {
        let (mut disk, operations) = record_save(how, before, 2);
        for point in 0..=operations.len() {
            if point > 0 {
                disk.apply(&operations[point - 1]);
            }
            let root = scratch();
            disk.show(root.path());
            let mut second = disk.clone();
            let next = record(root.path(), || {
                start(root.path());
                how.run(root.path(), 3);
            });
            for (place, operation) in next.iter().enumerate() {
                second.apply(operation);
                let after = scratch();
                second.show_after(Loss::Random(&mut rng), after.path());
                let found = start(after.path());
                let is_last = place + 1 == next.len();
                assert!(
                    found == before || matches!(found, Some(2 | 3)),
                    "{found:?} after {point}, {:?}",
                    &next[..=place]
                );
                assert!(found == Some(3) || !is_last, "{how:?}: what was announced is lost: {found:?} {next:#?}");
            }
        }
    }
}

#[test]
fn nothing_gathers_over_many_losses_of_power() {
    let mut rng = Rng::with_seed(3);
    for how in Save::ALL {
        let mut root = scratch();
        how.run(root.path(), 1);
        for version in 2..32 {
            let mut disk = Disk::of(root.path());
            let operations = record(root.path(), || how.run(root.path(), version));
            operations[..rng.usize(..operations.len())].iter().for_each(|operation| disk.apply(operation));
            let after = scratch();
            disk.show_after(Loss::Random(&mut rng), after.path());
            root = after;
            // It looks for leftovers among the checkpoints.
            assert!(start(root.path()).unwrap() <= version);
            if matches!(how, Save::AddingAndRemoving) {
                keep_newest(checkpoints(root.path()), PREFIX, 1).unwrap();
                assert_eq!(names(&checkpoints(root.path())).len(), 1);
            }
        }
        assert_eq!(names(root.path()), ["runs"]);
        assert_eq!(names(&root.path().join("runs")), ["first"]);
    }
}

#[test]
fn a_single_file_is_the_old_or_the_new_one_after_a_loss_of_power() {
    let mut rng = Rng::with_seed(5);
    let contents = |version: u8| vec![version; 3000];
    let write = |root: &Path, version: u8| {
        write_file_atomically(root.join("runs/latest"), |file| file.put(&contents(version))).unwrap();
    };
    for before in [Some(1), None] {
        let root = scratch();
        before.inspect(|version| write(root.path(), *version));
        let mut disk = Disk::of(root.path());
        let operations = record(root.path(), || write(root.path(), 2));
        for (place, operation) in operations.iter().enumerate() {
            disk.apply(operation);
            for_each_loss(&disk, &mut rng, |root| {
                let path = root.join("runs/latest");
                recover(&path).unwrap();
                let found = fs::read(&path).ok();
                assert!(found == before.map(contents) || found == Some(contents(2)), "{:#?}", &operations[..=place]);
                assert!(found == Some(contents(2)) || place + 1 < operations.len(), "what was announced is lost");
                assert_eq!(names(&root.join("runs")).len(), usize::from(found.is_some()));
            });
        }
    }
}
