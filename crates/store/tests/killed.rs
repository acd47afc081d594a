//! Runs that are killed while they save.

mod support;

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use evenkeel_store::checkpoint::keep_newest;
use fastrand::Rng;
use support::{PREFIX, checkpoint, checkpoints, names, save, scratch, start};

const PLACE: &str = "EVENKEEL_TEST_PLACE";
const KILLS: usize = 100;
const KEEP: usize = 3;
const STARTED: &str = "started";
const ANNOUNCED: &str = "saved ";

/// Not a test: what `a_run_that_is_killed…` starts and kills. It starts as a run does, and then saves for ever, each
/// second time in the place of the checkpoint before.
#[test]
fn victim() {
    let Some(root) = env::var_os(PLACE).map(PathBuf::from) else {
        println!("skipped: only another test gives this one something to do");
        return;
    };
    let say = |line: &str| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n{line}").and_then(|()| out.flush()).unwrap();
    };
    say(STARTED);
    let first = start(&root).map_or(1, |version| version + 1);
    for version in first.. {
        save(&checkpoint(&root, version / 2), version, 5000).unwrap();
        say(&format!("{ANNOUNCED}{version}"));
        assert!(keep_newest(checkpoints(&root), PREFIX, KEEP).unwrap().is_empty());
    }
}

/// Lets a run save for a while, kills it, and says which version it announced last.
fn run_and_kill(root: &Path, rng: &mut Rng) -> Option<u64> {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "victim", "--nocapture"])
        .env(PLACE, root)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.by_ref().any(|line| line == STARTED));
    sleep(Duration::from_micros(rng.u64(..30_000)));
    child.kill().unwrap();
    let announced = lines.filter_map(|line| line.strip_prefix(ANNOUNCED)?.parse().ok()).last();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), None, "it ended by itself");
    announced
}

#[test]
fn a_run_that_is_killed_at_any_moment_goes_on_with_what_it_announced() {
    let root = scratch();
    let mut rng = Rng::with_seed(4);
    let (mut announced, mut interrupted) = (0, 0);
    for _ in 0..KILLS {
        announced = run_and_kill(root.path(), &mut rng).unwrap_or(announced);
        let hidden = names(&checkpoints(root.path())).iter().filter(|name| name.starts_with('.')).count();
        assert!(hidden <= 3, "{:?}", names(&checkpoints(root.path())));
        interrupted += usize::from(hidden > 0);
        let found = start(root.path()).unwrap_or(0);
        assert!(found >= announced, "{announced} was announced, {found} is there");
        // One more than are kept, if it was killed before it could remove it.
        assert!(names(&checkpoints(root.path())).len() <= KEEP + 1);
    }
    println!("{interrupted} of {KILLS} kills hit a save, {announced} saves were announced");
    assert!(interrupted > 0 && announced > 0, "no kill hit a run at work");
}
