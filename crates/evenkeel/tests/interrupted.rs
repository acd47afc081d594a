//! Runs that are interrupted, killed or out of disk, and what the next one finds of them.

mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use evenkeel_store::checkpoint::{list, newest_good};
use support::{Place, TINY, losses, metrics, stderr, wait_for};

#[test]
#[cfg(unix)]
fn an_interrupted_run_saves_its_last_step_and_continues() {
    let place = Place::new(TINY);
    let mut child = place
        .command(&["train", "tiny.toml", "--output", "run", "--steps", "100000", "--set", "train.lr_decay=constant"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let metrics = place.path("run/metrics.jsonl");
    assert!(wait_for(&mut child, || losses(&metrics).len() >= 5), "the run makes steps");
    let second = place.run(&["train", "tiny.toml", "--output", "run", "--set", "output.overwrite=true"]);
    assert_eq!(second.status.code(), Some(2));
    assert!(stderr(&second).contains("another run is writing"), "{}", stderr(&second));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("continue with the same command and --resume"), "{}", stderr(&output));
    let before = losses(&metrics);
    let last = before.len();
    assert!(place.path(&format!("run/checkpoints/step-{last:08}/manifest.json")).exists());
    let until = (last + 3).to_string();
    place.stdout(&["train", "tiny.toml", "--output", "run", "--resume", "--steps", &until]);
    let after = losses(&metrics);
    assert_eq!(after.len(), last + 3);
    assert_eq!(after[..last], before, "what was written before stays");
}

/// Whether a process has said what is to happen at an interrupt; before that, the system ends it.
#[cfg(target_os = "linux")]
fn listens(process: u32) -> bool {
    const INTERRUPT: u64 = 1 << (2 - 1);
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.is_some_and(|mask| u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & INTERRUPT != 0))
}

#[test]
#[cfg(target_os = "linux")]
fn an_interruption_at_any_moment_can_be_continued_to_the_same_end() {
    let place = Place::new(TINY);
    let train = |run: &str| {
        let mut command = place.command(&["train", "tiny.toml", "--output", run, "--set", "output.checkpoint_every=3"]);
        command.args(["--set", "eval.every=4", "--set", "eval.batches=0", "--set", "data.records=3000"]);
        command
    };
    assert!(train("straight").output().unwrap().status.success());
    let weights = |run: &str| fs::read(place.path(run).join("model/model.safetensors")).unwrap();
    let losses = |run: &str| losses(&place.path(run).join("metrics.jsonl"));
    let mut interrupted = 0;
    // Before the first step, amid steps, evaluations and checkpoints, and perhaps behind the last.
    for steps in [0, 1, 4, 9, 20] {
        let run = format!("cut-{steps}");
        let mut child = train(&run).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let has_come_so_far = || losses(&run).len() >= steps;
        let process = child.id();
        if wait_for(&mut child, || listens(process) && has_come_so_far()) {
            Command::new("kill").args(["-INT", &process.to_string()]).output().unwrap();
        }
        let output = child.wait_with_output().unwrap();
        let said = stderr(&output);
        match output.status.code() {
            Some(130) => {
                interrupted += 1;
                assert!(said.contains("error: interrupted ") && said.contains("--resume"), "{steps} steps: {said}");
            }
            code => assert_eq!(code, Some(0), "{steps} steps: {said}"),
        }
        let resumed = train(&run).arg("--resume").output().unwrap();
        assert!(resumed.status.success(), "{steps} steps: {}", stderr(&resumed));
        assert_eq!(losses(&run), losses("straight"), "{steps} steps");
        assert!(weights(&run) == weights("straight"), "{steps} steps");
    }
    assert!(interrupted > 0, "every run was over before it was interrupted");
}

/// A run that is in the middle of an evaluation without end after its first step, whose curve is drawn.
#[cfg(target_os = "linux")]
fn evaluating(place: &Place, run: &str) -> std::process::Child {
    let endless = ["data.records=100000000", "data.holdout=2", "eval.every=1", "eval.batches=0"];
    let mut command = place.command(&["train", "tiny.toml", "--output", run, "--steps", "2"]);
    for set in endless {
        command.args(["--set", set]);
    }
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let has_drawn = || place.path(run).join("loss.svg").exists();
    assert!(wait_for(&mut child, has_drawn), "the run makes a step and draws it");
    child
}

#[test]
#[cfg(target_os = "linux")]
fn a_signal_that_comes_twice_is_one() {
    let place = Place::new(TINY);
    // Different signals, for the system would make one of two that are the same. Either may be heard first.
    for (run, signals) in [("first", "kill -TERM $0; kill -INT $0"), ("second", "kill -INT $0; kill -TERM $0")] {
        let child = evaluating(&place, run);
        let is_saved = place.path(run).join("checkpoints").exists();
        Command::new("sh").args(["-c", signals, &child.id().to_string()]).status().unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(!is_saved, "the curve is drawn before there is a checkpoint");
        assert!(matches!(output.status.code(), Some(130 | 143)), "{}", stderr(&output));
        assert!(stderr(&output).contains("interrupted after step 1, which is saved"), "{}", stderr(&output));
        assert!(place.path(run).join("checkpoints/step-00000001/manifest.json").exists());
    }
    // The evaluation that was given up is made when the run goes on.
    let goes_on = ["--resume", "--set", "data.records=100000000", "--set", "data.holdout=2", "--set", "eval.every=1"];
    place.stdout(&[&["train", "tiny.toml", "--output", "first", "--steps", "2"], &goes_on[..]].concat());
    let metrics = metrics(&place.path("first/metrics.jsonl"));
    let evaluated: Vec<u64> = metrics
        .iter()
        .filter(|line| line.get("eval_loss").is_some())
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert_eq!(evaluated, [1, 2]);
}

#[test]
#[cfg(target_os = "linux")]
fn a_second_signal_ends_a_run_at_once_where_nothing_is_lost_by_it() {
    let place = Place::new(TINY);
    // The first step has no end that anybody waits for.
    let mut command = place.command(&["train", "tiny.toml", "--output", "run", "--set", "train.accumulate=20000"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let process = child.id();
    assert!(wait_for(&mut child, || listens(process)), "the run begins");
    let signal = || Command::new("kill").args(["-TERM", &process.to_string()]).status().unwrap();
    signal();
    std::thread::sleep(std::time::Duration::from_millis(2100));
    signal();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    assert!(stderr(&output).contains("interrupted again, and ended at once"), "{}", stderr(&output));
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn hidden(folder: &Path) -> Vec<String> {
    names(folder).into_iter().filter(|name| name.starts_with('.')).collect()
}

#[test]
#[cfg(unix)]
fn a_run_that_is_killed_at_any_moment_loses_no_more_than_promised_and_leaves_nothing_that_grows() {
    use std::os::unix::fs::MetadataExt;
    const EVERY: u64 = 3;
    let kills: u64 = std::env::var("EVENKEEL_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(6);
    let place = Place::new(TINY);
    let every = format!("output.checkpoint_every={EVERY}");
    let endless = ["train", "tiny.toml", "--output", "run", "--resume", "--steps", "100000", "--set", &every];
    let arguments =
        [&endless[..], &["--set", "train.lr_decay=constant", "--dp", "2", "--set", "parallel.zero=2"]].concat();
    let checkpoints = place.path("run/checkpoints");
    let records = place.path("run/metrics.jsonl");
    let (mut state, mut reached) = (0x2545_f491_4f6c_dd1du64, 0);
    for kill in 0..kills {
        let before = fs::metadata(&records).map_or(0, |metadata| metadata.ino());
        let mut child = place.command(&arguments).stderr(Stdio::null()).spawn().unwrap();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // So many steps after it has begun: none, or up to three checkpoints. Every fourth has not even begun.
        let steps = if kill == 0 { 3 * EVERY } else { state % (3 * EVERY) };
        let begun = || fs::metadata(&records).is_ok_and(|metadata| metadata.ino() != before);
        let last_step = || metrics(&records).iter().filter_map(|line| line["step"].as_u64()).max().unwrap_or(0);
        let is_still_there = kill % 4 == 3 || wait_for(&mut child, || begun() && last_step() >= reached + steps);
        assert!(is_still_there, "the run goes on until it is killed");
        child.kill().unwrap();
        child.wait().unwrap();
        // Opening it is what the next start does first.
        evenkeel_store::recover_all(&checkpoints, |name| name.starts_with("step-")).unwrap();
        let (newest, damaged) = newest_good(list(&checkpoints, "step-").unwrap());
        assert!(damaged.is_empty(), "{damaged:?}");
        let saved = newest.map_or(0, |newest| newest.body()["progress"]["step"].as_u64().unwrap());
        assert!(saved >= reached, "from step {reached} back to {saved}");
        reached = saved;
        // One checkpoint may be on its way, and the next not yet due.
        let last = last_step();
        assert!(last < saved + 2 * EVERY + 1, "step {last} was made, {saved} is saved");
        let left = fs::read_dir(&checkpoints).map_or(0, |entries| entries.count());
        assert!(left <= 4, "{left} entries");
        assert!(hidden(&place.path("run")).len() <= 3, "{:?}", hidden(&place.path("run")));
    }
    assert!(reached > 0, "three checkpoints were due before the first kill");
    let until = (reached + 2).to_string();
    place.stdout(&["train", "tiny.toml", "--output", "run", "--resume", "--steps", &until]);
    assert_eq!(hidden(&place.path("run")), [".lock"]);
}

#[test]
fn what_killed_runs_left_unfinished_is_removed_by_the_next_and_what_is_not_theirs_stays() {
    let place = Place::new(TINY);
    let run = place.path("run");
    let train = ["train", "tiny.toml", "--resume", "--set", "output.tensorboard=true"];
    place.stdout(&[&train[..], &["--steps", "1"]].concat());
    let events = names(&run).into_iter().find(|name| name.contains("tfevents")).unwrap();
    let others = [".loss.svg.tmp-mine", ".notes.gone", ".notes.old", ".notes.tmp-1-2"];
    others.iter().for_each(|name| fs::write(run.join(name), "a user's").unwrap());
    for name in ["run.toml", "metrics.jsonl", "loss.svg", &events] {
        fs::write(run.join(format!(".{name}.tmp-99-7")), "half a file").unwrap();
        fs::write(run.join(format!(".{name}.gone")), "an earlier run's").unwrap();
    }
    for name in [".model.tmp-99-8", ".model.old", ".checkpoints.gone", "checkpoints/.step-00000001.tmp-99-9"] {
        fs::create_dir(run.join(name)).unwrap();
        fs::write(run.join(name).join("model.safetensors"), "half a file").unwrap();
    }
    place.stdout(&[&train[..], &["--steps", "2"]].concat());
    let kept = [&[".lock"], &others[..]].concat();
    assert_eq!(hidden(&run), kept);
    assert_eq!(hidden(&run.join("checkpoints")), [""; 0]);
    // A run that another one is writing keeps what it has.
    let lock = evenkeel_store::FolderLock::take(&run).unwrap();
    fs::write(run.join(".loss.svg.tmp-99-7"), "being written").unwrap();
    assert_eq!(place.run(&train).status.code(), Some(2));
    assert!(run.join(".loss.svg.tmp-99-7").exists());
    drop(lock);
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_ends_the_run_and_keeps_the_last_good_checkpoint() {
    let place = Place::new(TINY);
    let disk = place.path("disk");
    fs::create_dir(&disk).unwrap();
    // Room for one checkpoint (about 0.3 MB) and half of the next.
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=500k", "none"]).arg(&disk).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        println!("skipped: a small disk cannot be mounted here");
        return;
    }
    let output = place.run(&["train", "tiny.toml", "--output", "disk/run", "--set", "output.checkpoint_every=5"]);
    let said = stderr(&output);
    let kept = fs::read_dir(disk.join("run/checkpoints")).map(|entries| entries.count()).unwrap_or(0);
    let whole = disk.join("run/checkpoints/step-00000005/manifest.json").exists();
    Command::new("umount").arg(&disk).status().unwrap();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("no space is left"), "{said}");
    assert!(whole && kept == 1, "the first checkpoint stays, {kept} are there");
}
