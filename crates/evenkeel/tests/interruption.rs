//! Runs that are interrupted, as a person or a scheduler does it, and continued.

#![cfg(unix)]

mod support;
mod tiny;

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::{Place, stderr};
use tiny::{TINY, lines};

#[test]
fn an_interrupted_run_saves_its_last_step_and_continues() {
    let place = Place::new(TINY);
    let mut child = place
        .command(&["train", "tiny.toml", "--output", "run", "--steps", "100000", "--set", "train.lr_decay=constant"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let metrics = place.path("run/metrics.jsonl");
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::read_to_string(&metrics).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline && child.try_wait().unwrap().is_none(), "the run makes steps");
        std::thread::sleep(Duration::from_millis(10));
    }
    let second = place.run(&["train", "tiny.toml", "--output", "run", "--set", "output.overwrite=true"]);
    assert_eq!(second.status.code(), Some(2));
    assert!(stderr(&second).contains("another run is writing"), "{}", stderr(&second));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("continue with the same command and --resume"), "{}", stderr(&output));
    let last = lines(&metrics).iter().filter_map(|line| line["step"].as_u64()).max().unwrap();
    assert!(place.path(&format!("run/checkpoints/step-{last:08}/manifest.json")).exists());
    let until = (last + 3).to_string();
    let output = place.run(&["train", "tiny.toml", "--output", "run", "--resume", "--steps", &until]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(lines(&metrics).iter().filter_map(|line| line["loss"].as_f64()).count() as u64, last + 3);
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
    let begun = Instant::now();
    assert!(train("straight").output().unwrap().status.success());
    let whole = begun.elapsed();
    let weights = |run: &str| fs::read(place.path(run).join("model/model.safetensors")).unwrap();
    let losses = |run: &str| -> Vec<f64> {
        lines(&place.path(run).join("metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    for number in 0..8u64 {
        let run = format!("cut-{number}");
        // One in each eighth of the run, and somewhere in it.
        let within = (seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
        let moment = whole.mul_f64((number as f64 + within as f64 / (1u64 << 24) as f64) / 8.0);
        let child = train(&run).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        while !listens(child.id()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(moment);
        Command::new("kill").args(["-INT", &child.id().to_string()]).output().unwrap();
        let output = child.wait_with_output().unwrap();
        let said = stderr(&output);
        match output.status.code() {
            Some(130) => {
                assert!(said.contains("error: interrupted ") && said.contains("--resume"), "{moment:?}: {said}")
            }
            code => assert_eq!(code, Some(0), "{moment:?}: {said}"),
        }
        let resumed = train(&run).arg("--resume").output().unwrap();
        assert!(resumed.status.success(), "{moment:?}: {}", stderr(&resumed));
        assert_eq!(losses(&run), losses("straight"), "{moment:?}");
        assert!(weights(&run) == weights("straight"), "{moment:?}");
    }
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
    let deadline = Instant::now() + Duration::from_secs(120);
    while !place.path(run).join("loss.svg").exists() {
        if Instant::now() > deadline || child.try_wait().unwrap().is_some() {
            child.kill().unwrap();
            panic!("the run makes a step and draws it: {}", stderr(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
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
    let metrics = lines(&place.path("first/metrics.jsonl"));
    let evaluated: Vec<u64> = metrics
        .iter()
        .filter(|line| line.get("eval_loss").is_some())
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert_eq!(evaluated, [1, 2]);
}
