//! Runs that are killed while they save.

mod support;

use evenkeel_store::checkpoint::keep_newest;
use fastrand::Rng;
use support::victim::{at_work, kill_after, say};
use support::{PREFIX, checkpoint, checkpoints, names, save, scratch, start};

const KILLS: usize = 100;
/// A save takes about thirty.
const MOST_OPERATIONS: usize = 150;
const KEEP: usize = 3;
const ANNOUNCED: &str = "saved ";
const REMOVED: &str = "removed the oldest";

/// Not a test: what `a_run_that_is_killed…` starts and kills. It starts as a run does, and then saves for ever, each
/// second time in the place of the checkpoint before.
#[test]
fn victim() {
    let Some((root, _watch)) = at_work() else { return };
    let first = start(&root).map_or(1, |version| version + 1);
    for version in first.. {
        save(&checkpoint(&root, version / 2), version, 5000).unwrap();
        say(&format!("{ANNOUNCED}{version}"));
        assert!(keep_newest(checkpoints(&root), PREFIX, KEEP).unwrap().is_empty());
        say(REMOVED);
    }
}

#[test]
fn a_run_that_is_killed_at_any_moment_goes_on_with_what_it_announced() {
    let root = scratch();
    let mut rng = Rng::with_seed(4);
    let (mut announced, mut interrupted, mut surplus) = (0, 0, 0);
    for _ in 0..KILLS {
        let said = kill_after(root.path(), rng.usize(..MOST_OPERATIONS));
        let last = said.iter().filter_map(|line| line.strip_prefix(ANNOUNCED)?.parse().ok()).next_back();
        announced = last.unwrap_or(announced);
        let hidden = names(&checkpoints(root.path())).iter().filter(|name| name.starts_with('.')).count();
        assert!(hidden <= 3, "{:?}", names(&checkpoints(root.path())));
        interrupted += usize::from(hidden > 0);
        let found = start(root.path()).unwrap_or(0);
        assert!(found >= announced, "{announced} was announced, {found} is there");
        // Each run that is killed between a save and the removal after it leaves one more; the next removal takes them all.
        surplus = if said.iter().any(|line| line == REMOVED) { 1 } else { surplus + 1 };
        assert!(names(&checkpoints(root.path())).len() <= KEEP + surplus);
    }
    println!("{interrupted} of {KILLS} kills hit a save, {announced} saves were announced");
    assert!(interrupted > 0 && announced > 0, "no kill hit a run at work");
}
