//! Whole runs through the binary, as a person starts, interrupts, continues and breaks them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A run of a model that takes milliseconds a step.
const TINY: &str = r#"
[model]
hidden = 32
layers = 2
heads = 2
ffn = 48
tied = true

[data]
source = "synthetic"
records = 100_000
sequence = 64
holdout = 50

[train]
steps = 20
batch = 4
lr = 1e-2
warmup_steps = 2

[eval]
every = 10
batches = 2

[output]
checkpoint_every = 10

[sample]
prompts = ["1 + 1 ="]
tokens = 8
"#;

struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let place = Place { folder: tempfile::tempdir().unwrap() };
        fs::write(place.path("tiny.toml"), TINY).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the binary starts")
    }

    /// Runs what must succeed.
    fn stdout(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).expect("text")
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn lines(path: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

#[test]
fn a_run_leaves_a_model_that_others_can_use() {
    let place = Place::new();
    let said = place.stdout(&["train", "tiny.toml", "--output", "run", "--set", "output.tensorboard=true"]);
    for text in ["steps           20", "What it writes:\n  1 + 1 =", "evenkeel generate run/model"] {
        assert!(said.contains(text), "{said}");
    }
    let metrics = lines(&place.path("run/metrics.jsonl"));
    let losses: Vec<f64> = metrics.iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert_eq!(losses.len(), 20);
    assert!(losses[19] < losses[0] - 0.5, "it learns: {losses:?}");
    assert_eq!(metrics.iter().filter(|line| line.get("eval_loss").is_some()).count(), 2);
    assert!(fs::read_to_string(place.path("run/loss.svg")).unwrap().contains("<svg"));
    let names: Vec<_> = fs::read_dir(place.path("run")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().any(|name| name.to_string_lossy().contains("tfevents")), "{names:?}");

    assert!(place.stdout(&["inspect", "run/model"]).contains("LlamaForCausalLM"));
    let greedy = ["generate", "run/model", "--prompt", "2 + 2 =", "--tokens", "6", "--greedy"];
    let text = place.stdout(&greedy);
    assert!(text.starts_with("2 + 2 ="), "{text}");
    assert_eq!(text, place.stdout(&greedy));
    let evaluated = place.stdout(&["eval", "tiny.toml", "--output", "run"]);
    assert!(evaluated.contains("model       run/model") && evaluated.contains("perplexity"), "{evaluated}");

    // The resolved configuration makes the same run again.
    let again = place.stdout(&["train", "run/run.toml", "--output", "again"]);
    assert!(again.contains("steps           20"));
    let weights = |run: &str| fs::read(place.path(run).join("model/model.safetensors")).unwrap();
    assert_eq!(weights("run"), weights("again"));
}

#[test]
fn ten_resumed_steps_end_with_the_bytes_of_twenty_straight_ones() {
    let place = Place::new();
    place.stdout(&["train", "tiny.toml", "--output", "straight"]);
    // Only what was there after step 10.
    fs::create_dir_all(place.path("cut/checkpoints")).unwrap();
    fs::rename(place.path("straight/checkpoints/step-00000010"), place.path("cut/checkpoints/step-00000010")).unwrap();
    fs::copy(place.path("straight/metrics.jsonl"), place.path("cut/metrics.jsonl")).unwrap();
    place.stdout(&["train", "tiny.toml", "--output", "cut", "--resume"]);
    for file in ["model/model.safetensors", "checkpoints/step-00000020/state.safetensors"] {
        let [straight, cut] = ["straight", "cut"].map(|run| fs::read(place.path(run).join(file)).unwrap());
        assert!(straight == cut, "{file}");
    }
    let steps = |run: &str| -> Vec<(u64, f64)> {
        let metrics = lines(&place.path(run).join("metrics.jsonl"));
        metrics.iter().filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?))).collect()
    };
    assert_eq!(steps("straight"), steps("cut"));
}

#[test]
#[cfg(unix)]
fn an_interrupted_run_saves_its_last_step_and_continues() {
    let place = Place::new();
    let mut child = place
        .command(&["train", "tiny.toml", "--output", "run", "--steps", "100000", "--set", "train.schedule=constant"])
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
    assert!(place.path(&format!("run/checkpoints/step-{last:08}/state.json")).exists());
    let until = (last + 3).to_string();
    let output = place.run(&["train", "tiny.toml", "--output", "run", "--resume", "--steps", &until]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(lines(&metrics).iter().filter_map(|line| line["loss"].as_f64()).count() as u64, last + 3);
}

#[test]
fn the_examples_that_need_no_download_run() {
    let place = Place::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for example in ["quickstart", "finetune-instructions", "pretrain-text"] {
        let (file, output) = (format!("examples/{example}.toml"), place.path(example));
        let mut command =
            place.command(&["train", &file, "--steps", "2", "--batch", "2", "--set", "train.warmup_steps=1"]);
        let output = command.args(["--output", output.to_str().unwrap()]).current_dir(&root).output().unwrap();
        assert!(output.status.success(), "{example}: {}", stderr(&output));
    }
}

#[test]
fn mistakes_are_said_before_anything_is_written() {
    let place = Place::new();
    fs::write(place.path("empty.jsonl"), "").unwrap();
    let empty = "data.paths=[\"empty.jsonl\"]";
    fs::write(
        place.path("empty.toml"),
        TINY.replace("source = \"synthetic\"\nrecords = 100_000", "source = \"jsonl\""),
    )
    .unwrap();
    let cases: [(&[&str], &[&str]); 7] = [
        (&["train", "empty.toml", "--set", empty], &["no chunks"]),
        (&["train", "missing.toml"], &["missing.toml", "does not exist"]),
        (&["train", "tiny.toml", "--set", "train.stepz=3"], &["unknown key `train.stepz`", "did you mean", "steps"]),
        (&["train", "tiny.toml", "--set", "model.path=x"], &["model.path"]),
        (&["train", "tiny.toml", "--set", "train.batch=4096", "--set", "data.sequence=16384"], &["memory"]),
        (&["train", "tiny.toml", "--set", "data.source=jsonl"], &["data.paths"]),
        (&["train", "tiny.toml", "--output", "/proc/run"], &["/proc"]),
    ];
    for (arguments, expected) in cases {
        let output = place.run(arguments);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        for text in expected {
            assert!(said.contains(text), "{arguments:?}: {said}");
        }
        let written = fs::read_dir(place.path("run")).map_or(0, |entries| {
            entries.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.file_name() != ".lock")).count()
        });
        assert_eq!(written, 0, "{arguments:?} wrote something");
    }
}

#[test]
fn an_earlier_run_is_neither_mixed_nor_lost() {
    let place = Place::new();
    place.stdout(&["train", "tiny.toml", "--output", "run", "--steps", "3"]);
    let before = fs::read(place.path("run/metrics.jsonl")).unwrap();
    let output = place.run(&["train", "tiny.toml", "--output", "run"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("holds an earlier run") && stderr(&output).contains("--resume"));
    assert_eq!(before, fs::read(place.path("run/metrics.jsonl")).unwrap());
    // A mistake that shows late does not cost the earlier run either.
    let late =
        ["train", "tiny.toml", "--output", "run", "--set", "output.overwrite=true", "--set", "data.holdout=1000000"];
    let output = place.run(&late);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert_eq!(before, fs::read(place.path("run/metrics.jsonl")).unwrap());
    place.stdout(&["train", "tiny.toml", "--output", "run", "--steps", "4", "--set", "output.overwrite=true"]);
    assert_eq!(lines(&place.path("run/metrics.jsonl")).iter().filter(|line| line.get("loss").is_some()).count(), 4);
}

#[test]
fn data_that_cannot_be_used_are_named_and_placed() {
    let place = Place::new();
    let toml = TINY
        .replace("source = \"synthetic\"\nrecords = 100_000", "source = \"jsonl\"\nshuffle = false")
        .replace("holdout = 50", "")
        .replace("[eval]\nevery = 10\nbatches = 2", "");
    fs::write(place.path("jsonl.toml"), toml).unwrap();
    let jsonl = |name: &str, bytes: &[u8]| fs::write(place.path(name), bytes).unwrap();
    jsonl("column.jsonl", b"{\"text\": \"fine\"}\n{\"words\": \"lost\"}\n");
    jsonl("utf8.jsonl", b"{\"text\": \"fine\"}\n{\"text\": \"\xff\xfe\"}\n");
    jsonl("broken.jsonl", b"{\"text\": \"fine\"}\n{\"text\": \n");
    jsonl("chat.jsonl", b"{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"ho\"}]}\n");
    jsonl("long.jsonl", format!("{{\"text\": \"{}\"}}\n", "x".repeat(40 << 20)).as_bytes());
    fs::write(
        place.path("endless.jinja"),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    )
    .unwrap();
    let cases: [(&str, &[&str], &[&str]); 5] = [
        ("column.jsonl", &[], &["column.jsonl", "line 2", "no column `text`", "`words`"]),
        ("utf8.jsonl", &[], &["utf8.jsonl", "UTF-8"]),
        ("broken.jsonl", &[], &["broken.jsonl", "line 2"]),
        ("long.jsonl", &[], &["long.jsonl", "limit"]),
        (
            "chat.jsonl",
            &["--set", "data.format=messages", "--set", "data.chat_template=endless.jinja"],
            &["did not end within"],
        ),
    ];
    for (file, more, expected) in cases {
        let paths = format!("data.paths=[\"{file}\"]");
        let mut arguments = vec!["train", "jsonl.toml", "--output", "run", "--set", paths.as_str()];
        arguments.extend(["--set", "output.overwrite=true"]);
        arguments.extend(more);
        let output = place.run(&arguments);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{file}: {said}");
        for text in expected {
            assert!(said.contains(text), "{file} should say {text:?}: {said}");
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_ends_the_run_and_keeps_the_last_good_checkpoint() {
    let place = Place::new();
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
    let whole = disk.join("run/checkpoints/step-00000005/state.json").exists();
    Command::new("umount").arg(&disk).status().unwrap();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("no space is left"), "{said}");
    assert!(whole && kept == 1, "the first checkpoint stays, {kept} are there");
}
