//! Whole runs through the binary, as a person starts, continues and breaks them.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use evenkeel_store::checkpoint::{Checkpoint, CheckpointWriter};
use support::{Place, TINY, metrics, stderr};

#[test]
fn a_run_leaves_a_model_that_others_can_use() {
    let place = Place::new(TINY);
    let said = place.stdout(&["train", "tiny.toml", "--output", "run", "--set", "output.tensorboard=true"]);
    for text in ["steps           20", "What it writes:\n  1 + 1 =", "evenkeel generate run/model"] {
        assert!(said.contains(text), "{said}");
    }
    let metrics = metrics(&place.path("run/metrics.jsonl"));
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

/// A Llama of bytes, with other keys put in.
fn llama_json(changes: &[(&str, serde_json::Value)]) -> String {
    let mut config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "vocab_size": 258, "max_position_embeddings": 64,
    });
    changes.iter().for_each(|(key, value)| config[*key] = value.clone());
    config.to_string()
}

/// `TINY` with a model from a file, or data of another kind.
fn changed(place: &Place, name: &str, replacements: &[(&str, &str)]) {
    let text = replacements.iter().fold(TINY.to_owned(), |text, (from, to)| {
        assert!(text.contains(from), "{from}");
        text.replace(from, to)
    });
    fs::write(place.path(name), text).unwrap();
}

const SIZES: &str = "hidden = 32\nlayers = 2\nheads = 2\nffn = 48\ntied = true";
const SYNTHETIC: &str = "source = \"synthetic\"\nrecords = 100_000";

#[test]
fn what_config_json_asks_for_in_vain_is_said() {
    let place = Place::new(TINY);
    changed(&place, "file.toml", &[(SIZES, "config = \"config.json\"")]);
    let write =
        |changes: &[(&str, serde_json::Value)]| fs::write(place.path("config.json"), llama_json(changes)).unwrap();
    let warnings = |arguments: &[&str]| -> Vec<String> {
        let output = place.run(arguments);
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output).lines().filter(|line| line.starts_with("warning")).map(str::to_owned).collect()
    };
    let train = ["train", "file.toml", "--steps", "2", "--set", "output.overwrite=true"];
    write(&[]);
    assert_eq!(warnings(&train), [""; 0]);
    let longer = [&train[..], &["--sequence", "65"]].concat();
    let positions = "warning: sequences of 65 tokens are longer than the model was made for, 64";
    assert_eq!(warnings(&longer), [positions]);
    write(&[("attention_dropout", 0.1.into()), ("hidden_dropout", 0.0.into())]);
    assert_eq!(warnings(&train), [""; 0]);
    write(&[("hidden_dropout", 0.1.into())]);
    let ignored = "warning: config.json sets `hidden_dropout`, for which training of a `llama` model drops nothing";
    assert_eq!(warnings(&train), [ignored]);
    assert_eq!(warnings(&["eval", "file.toml"]), [""; 0]);
    let warmup = [&train[..], &["--set", "train.warmup_steps=50"]].concat();
    assert_eq!(
        warnings(&warmup)[0],
        "warning: `train.warmup_steps` is 50, more than `train.steps`; it is shortened to 2"
    );
    write(&[("quantization_config", serde_json::json!({"quant_method": "awq"}))]);
    let output = place.run(&train);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("`quantization_config` is set (awq)"), "{}", stderr(&output));
}

fn write_png(path: &Path, grey: u8) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), 8, 8);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&[grey; 8 * 8 * 3]).unwrap();
}

/// Folders of classes, and a ViT without names for them.
fn pictures(place: &Place, classes: &[&str]) {
    for (label, class) in classes.iter().enumerate() {
        (0..6).for_each(|n| write_png(&place.path(&format!("pictures/{class}/{n}.png")), 60 * label as u8 + n));
    }
    let vit = serde_json::json!({
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 48, "image_size": 8, "patch_size": 4, "num_labels": 4,
    });
    fs::write(place.path("vit.json"), vit.to_string()).unwrap();
    let images = "source = \"images\"\npaths = [\"pictures\"]\ncrop = 1";
    let prompts = ("prompts = [\"1 + 1 =\"]", "");
    let holdout = ("holdout = 50", "holdout = 3");
    changed(place, "vit.toml", &[(SIZES, "config = \"vit.json\""), (SYNTHETIC, images), prompts, holdout]);
}

#[test]
fn a_classifier_is_saved_with_the_names_of_its_classes_and_what_its_pictures_go_through() {
    let place = Place::new(TINY);
    pictures(&place, &["dog", "cat", "owl"]);
    let output = place.run(&["train", "vit.toml", "--steps", "3"]);
    let said = format!("{}{}", stderr(&output), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{said}");
    assert!(said.contains(" patches/s") && !said.contains("token") && !said.contains("perplexity"), "{said}");
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(place.path("run/model").join(name)).unwrap()).unwrap()
    };
    let config = read("config.json");
    assert_eq!(config["id2label"], serde_json::json!({"0": "cat", "1": "dog", "2": "owl", "3": "LABEL_3"}));
    assert_eq!(config["label2id"], serde_json::json!({"cat": 0, "dog": 1, "owl": 2, "LABEL_3": 3}));
    let preprocessor = read("preprocessor_config.json");
    assert_eq!(preprocessor["size"], serde_json::json!({"height": 8, "width": 8}));
    assert_eq!(preprocessor["image_mean"], serde_json::json!([0.5, 0.5, 0.5]));
    assert_eq!(preprocessor["image_std"], serde_json::json!([0.5, 0.5, 0.5]));
    assert_eq!(preprocessor["rescale_factor"], 1.0 / 255.0);
    let evaluated = place.stdout(&["eval", "vit.toml"]);
    assert!(evaluated.contains("images      ") && !evaluated.contains("perplexity"), "{evaluated}");
}

#[test]
fn a_classifier_of_pictures_begins_its_head_anew_for_more_classes() {
    let place = Place::new(TINY);
    pictures(&place, &["dog", "cat", "owl"]);
    place.stdout(&["train", "vit.toml", "--steps", "1"]);
    for (label, class) in ["ant", "bee"].iter().enumerate() {
        (0..6).for_each(|n| write_png(&place.path(&format!("pictures/{class}/{n}.png")), 20 * label as u8 + n));
    }
    let text = fs::read_to_string(place.path("vit.toml")).unwrap();
    fs::write(place.path("more.toml"), text.replace("config = \"vit.json\"", "path = \"run/model\"")).unwrap();
    let train = ["train", "more.toml", "--steps", "2", "--set", "output.folder=more"];
    place.refused(&train, &["the data have 5 classes, the model has 4 labels", "model.new_head = true"]);
    let anew = [&train[..], &["--set", "model.new_head=true"]].concat();
    let names = |model: &str| -> serde_json::Value {
        let config = fs::read_to_string(place.path(model).join("config.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&config).unwrap()["id2label"].clone()
    };
    let expected = serde_json::json!({"0": "ant", "1": "bee", "2": "cat", "3": "dog", "4": "owl"});
    let output = place.run(&anew);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("`classifier` begins anew with random numbers, for 5 labels"));
    assert_eq!(names("more/model"), expected);
    let lora = ["--set", "adapter.kind=lora", "--set", "adapter.rank=2", "--set", "output.folder=lora"];
    place.stdout(&[&anew[..], &lora].concat());
    place.stdout(&["eval", "lora"]);
    place.stdout(&["export", "lora/model", "--merge", "--output", "merged"]);
    assert_eq!(names("merged"), expected);
}

#[test]
fn a_run_is_continued_with_its_own_data_only() {
    let place = Place::new(TINY);
    let jsonl = "source = \"jsonl\"\npaths = [\"a.jsonl\"]\nshuffle = false";
    changed(&place, "jsonl.toml", &[(SYNTHETIC, jsonl), ("holdout = 50", "holdout = 5")]);
    let records: String = (0..40).map(|n| format!("{{\"text\": \"{n} and {n} are {}\"}}\n", n + n)).collect();
    ["a.jsonl", "b.jsonl"].iter().for_each(|name| fs::write(place.path(name), &records).unwrap());
    let (tokenizer, config) = ("tok/tokenizer.json", "tok/tokenizer_config.json");
    fs::create_dir(place.path("tok")).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/saved");
    fs::copy(golden.join("tokenizer.json"), place.path(tokenizer)).unwrap();
    fs::copy(golden.join("tokenizer_config.json"), place.path(config)).unwrap();
    let train = ["train", "jsonl.toml", "--set", "data.tokenizer=tok", "--steps"];
    place.stdout(&[&train[..], &["2"]].concat());
    let refused = |more: &[&str], expected: &[&str]| {
        let output = place.run(&[&train[..], &["4", "--resume"], more].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {said}");
        assert!(expected.iter().all(|text| said.contains(text)), "{more:?}: {said}");
    };
    refused(&["--set", "data.paths=b.jsonl"], &["`data.paths` was a.jsonl and is b.jsonl"]);
    refused(&["--sequence", "32"], &["`data.sequence` was 64 and is 32"]);
    refused(
        &["--set", "data.packing=false", "--set", "data.seed=1"],
        &["`data.packing` was true and is false", "`data.seed` was 0 and is 1", "hint: give it the data"],
    );
    let before = fs::read_to_string(place.path(tokenizer)).unwrap();
    fs::write(place.path(tokenizer), format!("{before}\n")).unwrap();
    refused(&[], &["`data.tokenizer` was "]);
    fs::write(place.path(tokenizer), before).unwrap();
    // Where the files lie, and how they are read, may change.
    fs::create_dir(place.path("moved")).unwrap();
    fs::rename(place.path("a.jsonl"), place.path("moved/a.jsonl")).unwrap();
    let moved = ["4", "--resume", "--set", "data.paths=moved/a.jsonl", "--set", "data.workers=2"];
    let said = place.stdout(&[&train[..], &moved].concat());
    assert!(said.contains("steps           4, 2 since step 2"), "{said}");
}

#[test]
fn a_run_that_is_continued_tomorrow_reads_the_date_of_its_beginning() {
    let place = Place::new(TINY);
    let jsonl = "source = \"jsonl\"\npaths = [\"chat.jsonl\"]\nformat = \"messages\"\nchat_template = \"dated.jinja\"";
    let (holdout, eval) = (("holdout = 50", ""), ("[eval]\nevery = 10\nbatches = 2", ""));
    changed(
        &place,
        "chat.toml",
        &[(SYNTHETIC, jsonl), holdout, eval, ("checkpoint_every = 10", "checkpoint_every = 1")],
    );
    let turns =
        "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"ho\"}]}\n";
    fs::write(place.path("chat.jsonl"), turns.repeat(60)).unwrap();
    let template = "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}";
    fs::write(place.path("dated.jinja"), template).unwrap();
    place.stdout(&["train", "chat.toml", "--steps", "2", "--set", "output.keep_checkpoints=9"]);
    let saved =
        |run: &str, step: u64| Checkpoint::open(place.path(&format!("{run}/checkpoints/step-{step:08}"))).unwrap();
    let time = |run: &str, step: u64| saved(run, step).body()["feed"]["time_s"].as_u64().unwrap();
    let began = time("run", 1);
    let resumed = |name: &str, time_s: u64| -> f64 {
        let from = saved("run", 1);
        let writer = CheckpointWriter::create(place.path(&format!("{name}/checkpoints/step-00000001"))).unwrap();
        for file in from.names() {
            let bytes = fs::read(from.path().join(file)).unwrap();
            writer.file(file, |writer| writer.put(&bytes)).unwrap();
        }
        let mut body = from.body().clone();
        body["feed"]["time_s"] = time_s.into();
        writer.commit(&body).unwrap();
        place.stdout(&["train", "chat.toml", "--output", name, "--resume", "--steps", "2"]);
        assert_eq!(time(name, 2), time_s);
        metrics(&place.path(&format!("{name}/metrics.jsonl")))[0]["loss"].as_f64().unwrap()
    };
    let straight = metrics(&place.path("run/metrics.jsonl"))[1]["loss"].as_f64().unwrap();
    assert_eq!(resumed("today", began), straight);
    assert_ne!(resumed("long_ago", 1_709_200_000), straight, "the checkpoint's date is read");
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_it_is_loaded() {
    let place = Place::new(TINY);
    let huge = ["model.hidden=65536", "model.layers=1000", "model.heads=512"].map(|set| ["--set", set]).concat();
    let fitted = |arguments: &[&str], what: &str| {
        let output = place.run(arguments);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(what) && said.contains("of memory, this machine has"), "{arguments:?}: {said}");
    };
    fitted(&[&["eval", "tiny.toml"], &huge[..]].concat(), "an evaluation needs ");
    fitted(&[&["train", "tiny.toml"], &huge[..]].concat(), "training needs ");
    // A file of a terabyte of which nothing is on the disk.
    let shape = [1u64 << 24, 1 << 14];
    let sizes =
        [("hidden_size", 1 << 14), ("vocab_size", 1 << 24), ("num_hidden_layers", 0), ("num_attention_heads", 128)];
    let config = sizes.map(|(key, size)| (key, serde_json::json!(size)));
    let config = [&config[..], &[("tie_word_embeddings", true.into())]].concat();
    fs::create_dir(place.path("huge")).unwrap();
    fs::write(place.path("huge/config.json"), llama_json(&config)).unwrap();
    let (bytes, norm_bytes) = (4 * shape[0] * shape[1], 4 * shape[1]);
    let header = serde_json::json!({
        "model.embed_tokens.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, bytes]},
        "model.norm.weight": {"dtype": "F32", "shape": [shape[1]], "data_offsets": [bytes, bytes + norm_bytes]},
    });
    let header = header.to_string();
    let begin = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(place.path("huge/model.safetensors"), &begin).unwrap();
    let file = fs::OpenOptions::new().write(true).open(place.path("huge/model.safetensors")).unwrap();
    if file.set_len(begin.len() as u64 + bytes + norm_bytes).is_err() {
        println!("skipped: this file system has no files of a terabyte");
        return;
    }
    fitted(&["generate", "huge", "--prompt", "a", "--tokenizer", "bytes"], "generating needs ");
}

fn event_files(run: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(run).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.to_string_lossy().contains("tfevents")).collect()
}

/// The steps of all records of an event file: 12 bytes, then the time in 9, then the step behind its tag.
fn event_steps(path: &Path) -> Vec<u64> {
    let (bytes, mut at, mut steps) = (fs::read(path).unwrap(), 0, Vec::new());
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        assert_eq!(bytes[at + 21], 0x10);
        steps.push(bytes[at + 22].into());
        at += length + 16;
    }
    steps
}

#[test]
fn ten_resumed_steps_end_with_the_bytes_of_twenty_straight_ones() {
    let place = Place::new(TINY);
    let straight = ["train", "tiny.toml", "--output", "straight", "--set", "output.tensorboard=true"];
    place.stdout(&straight);
    // Only what was there after step 10.
    fs::create_dir_all(place.path("cut/checkpoints")).unwrap();
    fs::rename(place.path("straight/checkpoints/step-00000010"), place.path("cut/checkpoints/step-00000010")).unwrap();
    fs::copy(place.path("straight/metrics.jsonl"), place.path("cut/metrics.jsonl")).unwrap();
    let events = event_files(&place.path("straight"));
    assert_eq!(events.len(), 1);
    assert_eq!(event_steps(&events[0]).last(), Some(&20));
    fs::copy(&events[0], place.path("cut").join(events[0].file_name().unwrap())).unwrap();
    place.stdout(&["train", "tiny.toml", "--output", "cut", "--resume"]);
    let cut = event_files(&place.path("cut"));
    assert_eq!(event_steps(&cut[0]), (0..=10).chain([10]).collect::<Vec<u64>>(), "a head, ten steps, an evaluation");
    for file in ["model/model.safetensors", "checkpoints/step-00000020/rank-00000.safetensors"] {
        let [straight, cut] = ["straight", "cut"].map(|run| fs::read(place.path(run).join(file)).unwrap());
        assert!(straight == cut, "{file}");
    }
    let steps = |run: &str| -> Vec<(u64, f64)> {
        let metrics = metrics(&place.path(run).join("metrics.jsonl"));
        metrics.iter().filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?))).collect()
    };
    assert_eq!(steps("straight"), steps("cut"));
    place.stdout(&["train", "tiny.toml", "--output", "cut", "--steps", "1", "--set", "output.overwrite=true"]);
    assert_eq!(event_files(&place.path("cut")), Vec::<PathBuf>::new(), "another run's events are not this one's");
}

#[test]
fn a_chat_is_asked_by_the_template_of_the_folder() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--set", "model.vocab=300"]);
    let ask = |arguments: &[&str]| {
        place.stdout(&[&["generate", "run/model", "--greedy", "--tokens", "12"], arguments].concat())
    };
    let output = place.run(&["generate", "run/model", "--prompt", "hi", "--chat"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("has no chat template"), "{}", stderr(&output));
    let template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}\
                    {% if add_generation_prompt %}[assistant: {% endif %}";
    fs::write(place.path("run/model/chat_template.jinja"), template).unwrap();
    let written = "[system: Be kind=brief.][user: 1 + 1 =][assistant: ";
    let plain = ask(&["--prompt", written]);
    let answer = plain.strip_prefix(written).unwrap();
    let system = ["--chat", "--message", "system=Be kind=brief."];
    assert_eq!(ask(&[&system[..], &["--prompt", "1 + 1 ="]].concat()), answer);
    assert_eq!(ask(&[&system[..], &["--message", "user=1 + 1 ="]].concat()), answer);
    let mut child = place
        .command(&["generate", "run/model", "--greedy", "--tokens", "12", "--prompt", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), format!("{written}\n").as_bytes()).unwrap();
    assert_eq!(String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap(), plain);
    for (wrong, expected) in [(&["--chat", "--message", "hi"][..], "role=content"), (&["--message", "a=b"], "--chat")] {
        let output = place.run(&[&["generate", "run/model", "--prompt", "x"], wrong].concat());
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
    let output = place.run(&["generate", "run/model", "--greedy", "--tokens", "80", "--prompt", "x"]);
    let longer = "warning: sequences of 81 tokens are longer than the model was made for, 64; ";
    let said = stderr(&output);
    assert!(said.contains(&format!("{longer}the prompt has 1, and up to 80 are new\n")), "{said}");
    let output = place.run(&["generate", "run/model", "--greedy", "--tokens", "61", "--chat", "--prompt", "x"]);
    let said = stderr(&output);
    assert!(said.contains("; the prompt has 21, 20 of them the chat template's, and up to 61 are new\n"), "{said}");
}

#[test]
fn the_examples_that_need_no_download_run() {
    let place = Place::new(TINY);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for example in ["quickstart", "finetune-instructions", "lora", "qlora", "pretrain-text", "classify-texts"] {
        let (file, output) = (format!("examples/{example}.toml"), place.path(example));
        let mut command = place.command(&["train", &file, "--steps", "2", "--batch", "2"]);
        let output = command.args(["--output", output.to_str().unwrap()]).current_dir(&root).output().unwrap();
        assert!(output.status.success(), "{example}: {}", stderr(&output));
    }
}

#[test]
fn the_large_examples_make_sound_programs_without_computing() {
    let place = Place::new(TINY);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for example in ["vit-1b", "vit-3b"] {
        let mut command = place.command(&["program", &format!("examples/{example}.toml")]);
        let output = command.current_dir(&root).output().unwrap();
        assert!(output.status.success(), "{example}: {}", stderr(&output));
        assert!(String::from_utf8_lossy(&output.stdout).contains("8 ranks"), "{example}");
    }
}

#[test]
fn mistakes_are_said_before_anything_is_written() {
    let place = Place::new(TINY);
    fs::write(place.path("empty.jsonl"), "").unwrap();
    let empty = "data.paths=[\"empty.jsonl\"]";
    fs::write(
        place.path("empty.toml"),
        TINY.replace("source = \"synthetic\"\nrecords = 100_000", "source = \"jsonl\""),
    )
    .unwrap();
    let cases: [(&[&str], &[&str]); 7] = [
        (&["train", "empty.toml", "--set", empty], &["hold no records"]),
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
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--output", "run", "--steps", "3"]);
    let before = fs::read(place.path("run/metrics.jsonl")).unwrap();
    let output = place.run(&["train", "tiny.toml", "--output", "run"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("holds an earlier run") && stderr(&output).contains("--resume"));
    assert_eq!(before, fs::read(place.path("run/metrics.jsonl")).unwrap());
    let output = place.run(&["train", "run", "--resume"]);
    assert_eq!(output.status.code(), Some(2));
    let hint = "hint: it is the folder of a run; `evenkeel train run/run.toml --resume` continues the run";
    assert!(stderr(&output).contains(hint), "{}", stderr(&output));
    // A mistake that shows late does not cost the earlier run either.
    let late =
        ["train", "tiny.toml", "--output", "run", "--set", "output.overwrite=true", "--set", "data.holdout=1000000"];
    let output = place.run(&late);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert_eq!(before, fs::read(place.path("run/metrics.jsonl")).unwrap());
    place.stdout(&["train", "tiny.toml", "--output", "run", "--steps", "4", "--set", "output.overwrite=true"]);
    assert_eq!(metrics(&place.path("run/metrics.jsonl")).iter().filter(|line| line.get("loss").is_some()).count(), 4);
}

#[test]
fn data_that_cannot_be_used_are_named_and_placed() {
    let place = Place::new(TINY);
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
    jsonl("long.jsonl", b"{\"text\": \"fine\"}\n{\"text\": \"");
    // A line of a gigabyte, of which nothing is on the disk.
    fs::OpenOptions::new().write(true).open(place.path("long.jsonl")).unwrap().set_len(1 << 30).unwrap();
    fs::write(
        place.path("endless.jinja"),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    )
    .unwrap();
    let cases: [(&str, &[&str], &[&str]); 5] = [
        ("column.jsonl", &[], &["column.jsonl", "line 2", "no column `text`", "`words`"]),
        ("utf8.jsonl", &[], &["utf8.jsonl", "UTF-8"]),
        ("broken.jsonl", &[], &["broken.jsonl", "line 2"]),
        ("long.jsonl", &[], &["long.jsonl", "line 2 (byte 17) is longer than the limit of 16777216 bytes", "hint: "]),
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
