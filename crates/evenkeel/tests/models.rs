//! Models before and after a run: where they come from, what they answer, how they are evaluated and handed on.

mod support;

use std::fs;
use std::path::Path;

use support::{Place, TINY, metrics, stderr};

/// `TINY` with a model from a folder.
fn from_folder(place: &Place, name: &str, folder: &str) {
    let sizes = "hidden = 32\nlayers = 2\nheads = 2\nffn = 48\ntied = true";
    assert!(TINY.contains(sizes));
    fs::write(place.path(name), TINY.replace(sizes, &format!("path = {folder:?}"))).unwrap();
}

/// Ways to put a model's folder and a file together that ask for nothing else.
#[test]
fn a_folder_is_evaluated_on_a_file_without_a_word_of_training() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--steps", "3", "--set", "sample.prompts=[]"]);
    let records: String = (0..600).map(|n| format!("{{\"text\": \"{n} and {n} are {}\"}}\n", n + n)).collect();
    fs::write(place.path("held.jsonl"), &records).unwrap();
    fs::write(place.path("held.txt"), &records).unwrap();
    let told = |arguments: &[&str]| place.stdout(&[&["eval"], arguments, &["--sequence", "64"]].concat());
    let labels = |told: &str| -> u64 {
        let line = told.lines().find_map(|line| line.strip_prefix("labels"));
        line.and_then(|line| line.trim().parse().ok()).unwrap_or_else(|| panic!("{told}"))
    };
    let named = told(&["run/model", "--data", "held.jsonl"]);
    assert!(named.starts_with("model       run/model\n"), "{named}");
    const SIXTEEN_BATCHES: u64 = 16 * 8 * 64;
    assert!(labels(&named) > SIXTEEN_BATCHES, "all of the file: {named}");
    let batches = told(&["run/model", "--data", "held.jsonl", "--set", "eval.batches=1"]);
    assert!(labels(&batches) < labels(&named), "{batches}");
    for files in ["data.eval_paths=held.jsonl", "data.paths=held.jsonl"] {
        let by_keys = told(&["--model", "run/model", "--set", "data.source=jsonl", "--set", files]);
        assert_eq!(by_keys, named, "{files}");
    }
    // A configuration's data give way, and a run's folder is its configuration.
    for subject in ["tiny.toml", "run"] {
        assert_eq!(told(&[subject, "--data", "held.jsonl"]), named, "{subject}");
    }
    assert!(labels(&told(&["run/model", "--data", "held.txt"])) > labels(&named), "of text, the braces count, too");
    assert_eq!(told(&["run"]), told(&["tiny.toml"]));
    // A list is known by how it begins.
    let list = format!("[{}]", records.trim_end().replace('\n', ",\n"));
    fs::write(place.path("list.json"), list).unwrap();
    assert_eq!(labels(&told(&["run/model", "--data", "list.json"])), labels(&named));
    let config = place.path("run/model/config.json");
    let strange = fs::read_to_string(&config).unwrap().replacen('{', "{\"mystery\": 2,", 1);
    fs::write(&config, strange).unwrap();
    let ignoring = ["--set", "model.ignore_keys=[\"mystery\"]"];
    assert_eq!(told(&[&["run/model", "--data", "held.jsonl"], &ignoring[..]].concat()), named);

    let mistakes: [(&[&str], &str); 5] = [
        (&["run/model"], "`data.source` is missing"),
        (&["run/model", "--set", "data.source=jsonl"], "hint: name them: --data FILE"),
        (&["--data", "held.jsonl"], "hint: name its folder: evenkeel eval FOLDER --data FILE"),
        (&["run/model", "--model", "run/model", "--data", "held.jsonl"], "two models are given"),
        (&["nobody/nothing", "--data", "held.jsonl"], "`hf download nobody/nothing --local-dir nothing`"),
    ];
    for (arguments, expected) in mistakes {
        let output = place.run(&[&["eval"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let said = stderr(&output);
        assert!(said.contains(expected) && !said.contains("training"), "{arguments:?}: {said}");
    }
}

#[test]
fn an_evaluation_whose_loss_is_no_number_fails() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--steps", "1", "--set", "sample.prompts=[]"]);
    let file = place.path("run/model/model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].fill(0xff);
    fs::write(&file, bytes).unwrap();
    let output = place.run(&["eval", "tiny.toml"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(output.stdout.is_empty());
    assert!(stderr(&output).contains("error: the loss is NaN: the model's weights"), "{}", stderr(&output));
}

#[test]
fn a_name_of_the_hub_is_told_how_it_becomes_a_folder() {
    let place = Place::new(TINY);
    from_folder(&place, "hub.toml", "Qwen/Qwen2.5-0.5B");
    let said = |arguments: &[&str]| {
        let output = place.command(arguments).env("HF_HOME", place.path("cache")).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        stderr(&output)
    };
    let commands: [&[&str]; 4] = [
        &["train", "hub.toml"],
        &["eval", "tiny.toml", "--model", "Qwen/Qwen2.5-0.5B"],
        &["generate", "Qwen/Qwen2.5-0.5B", "--prompt", "a"],
        &["inspect", "Qwen/Qwen2.5-0.5B"],
    ];
    let cached = place.path("cache/hub/models--Qwen--Qwen2.5-0.5B");
    for command in commands {
        let said = said(command);
        assert!(said.starts_with("error: `Qwen/Qwen2.5-0.5B`: does not exist\n"), "{said}");
        assert!(said.contains("`hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B`"), "{said}");
        assert!(said.contains(&format!("it would be in `{}`", cached.display())), "{said}");
    }
    let snapshot = cached.join("snapshots/0123");
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("config.json"), "{}").unwrap();
    for command in commands {
        let said = said(command);
        assert!(said.contains(&format!("has this one: `{}`", snapshot.display())), "{said}");
    }
}

#[test]
fn a_wrong_model_is_named_before_its_tokenizer_is_missed() {
    let place = Place::new(TINY);
    let golden =
        |case: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(case).display().to_string();
    fs::create_dir_all(place.path("models/empty")).unwrap();
    fs::create_dir_all(place.path("models/old")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(&golden("llama2")).join(file), place.path("models/old").join(file)).unwrap();
    }
    fs::write(place.path("models/old/tokenizer.model"), "").unwrap();
    let copy = "hint: copy tokenizer.json from where the model came from, or set";
    let cases: [(&str, &[&str]); 5] = [
        ("models/nope", &["error: `models/nope`: does not exist", "a model is a folder with config.json"]),
        ("models/empty", &["error: `models/empty/config.json`: does not exist"]),
        (&golden("vit"), &["golden/vit` classifies images, the data are text"]),
        (&golden("llama2"), &["golden/llama2/tokenizer.json` does not exist", copy, "set data.tokenizer to a folder"]),
        ("models/old", &["`models/old/tokenizer.json` does not exist", "AutoTokenizer"]),
    ];
    for (folder, expected) in cases {
        from_folder(&place, "wrong.toml", folder);
        let output = place.run(&["train", "wrong.toml"]);
        assert_eq!(output.status.code(), Some(2), "{folder}");
        let said = stderr(&output);
        for text in expected {
            assert!(said.contains(text), "{folder} should say {text:?}: {said}");
        }
    }
    let said = stderr(&place.run(&["generate", &golden("llama2"), "--prompt", "a"]));
    assert!(said.contains(copy) && said.contains("set --tokenizer to a folder"), "{said}");
}

#[test]
fn a_prompt_that_cannot_be_read_is_not_printed() {
    let place = Place::new(TINY);
    // Its vocabulary has fewer tokens than there are bytes.
    let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/llama2").display().to_string();
    let output = place.run(&["generate", &small, "--tokenizer", "bytes", "--prompt", "é"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("outside the vocabulary"), "{}", stderr(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
}

#[test]
fn records_of_another_format_are_told_which() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--steps", "1", "--set", "sample.prompts=[]"]);
    for (record, expected) in [
        (r#"{"instruction": "Add.", "output": "3"}"#, "set data.format = \"alpaca\","),
        (r#"{"messages": []}"#, "set data.format = \"messages\","),
        (r#"{"conversations": []}"#, "set data.format = \"messages\" and data.messages_column = \"conversations\","),
        (r#"{"words": "a"}"#, "set data.format to what the records hold, or name the columns: data.text_column"),
    ] {
        fs::write(place.path("other.jsonl"), format!("{record}\n")).unwrap();
        let output = place.run(&["eval", "run/model", "--data", "other.jsonl"]);
        assert_eq!(output.status.code(), Some(2), "{record}");
        assert!(stderr(&output).contains(expected), "{record}: {}", stderr(&output));
    }
}

#[test]
fn samples_of_a_chat_model_are_answers() {
    let place = Place::new(TINY);
    let template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}\
                    {% if add_generation_prompt %}[assistant: {% endif %}";
    place.stdout(&["train", "tiny.toml", "--steps", "3"]);
    fs::rename(place.path("run"), place.path("base")).unwrap();
    fs::write(place.path("base/model/chat_template.jinja"), template).unwrap();
    from_folder(&place, "chat.toml", "base/model");
    let greedy = ["train", "chat.toml", "--steps", "2", "--set", "sample.temperature=0"];
    let generate = |arguments: &[&str]| {
        place.stdout(&[&["generate", "run/model", "--greedy", "--tokens", "8"], arguments].concat())
    };
    let told = place.stdout(&greedy);
    let answer = generate(&["--chat", "--prompt", "1 + 1 ="]);
    let answer = answer.trim_end().replace('\n', "\n  ");
    let expected = format!("What it answers through its chat template:\n  1 + 1 =\n  {answer}");
    assert!(told.contains(expected.trim_end()), "{told}\nshould have\n{expected}");
    assert!(told.contains("evenkeel generate run/model --chat --prompt \"1 + 1 =\""), "{told}");

    let again = [&greedy[..], &["--set", "output.overwrite=true"]].concat();
    let told = place.stdout(&[&again[..], &["--set", "sample.chat=false"]].concat());
    let continued = generate(&["--prompt", "1 + 1 ="]);
    let continued = continued.trim_end().replace('\n', "\n  ");
    assert!(told.contains(&format!("What it writes:\n  {continued}")), "{told}");
    assert!(told.contains("evenkeel generate run/model --prompt"), "{told}");

    fs::write(place.path("base/model/chat_template.jinja"), "{% broken").unwrap();
    assert!(place.stdout(&again).contains("What it writes:"), "text can be trained on beside a broken template");
    fs::remove_file(place.path("base/model/chat_template.jinja")).unwrap();
    let output = place.run(&[&again[..], &["--set", "sample.chat=true"]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("has no chat template"), "{}", stderr(&output));
}

#[test]
fn weights_are_exported_to_a_folder_and_not_under_the_name_of_a_file() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--steps", "1", "--set", "sample.prompts=[]"]);
    let output = place.run(&["export", "run", "--output", "g.gguf"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("hint: llama.cpp's convert_hf_to_gguf.py"), "{}", stderr(&output));
    assert!(!place.path("g.gguf").exists());
    place.stdout(&["export", "run", "--output", "v1.5"]);
}

#[test]
fn what_processors_read_is_saved_with_a_model_that_had_it() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--steps", "1", "--set", "sample.prompts=[]"]);
    for file in ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"] {
        assert!(!place.path("run/model").join(file).exists(), "{file}");
        fs::write(place.path("run/model").join(file), format!("{{\"of\": {file:?}}}")).unwrap();
    }
    from_folder(&place, "again.toml", "run/model");
    place.stdout(&["train", "again.toml", "--steps", "1", "--set", "sample.prompts=[]", "--output", "again"]);
    for file in ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"] {
        let [had, has] = ["run/model", "again/model"].map(|folder| fs::read(place.path(folder).join(file)).unwrap());
        assert_eq!(had, has, "{file}");
    }
}

#[test]
fn a_checkpoint_that_is_not_there_is_told_which_are() {
    let place = Place::new(TINY);
    let train = ["train", "tiny.toml", "--set", "sample.prompts=[]", "--set", "output.checkpoint_every=2"];
    place.stdout(&[&train[..], &["--steps", "4", "--output", "two"]].concat());
    place.stdout(&[&train[..], &["--steps", "2", "--output", "one"]].concat());
    fs::create_dir(place.path("empty")).unwrap();
    let cases: [(&[&str], &str, &str); 5] = [
        (&["two", "--step", "22"], "`two` has no checkpoint of step 22", "it has those of steps 2 and 4"),
        (&["one", "--step", "22"], "`one` has no checkpoint of step 22", "it has one of step 2"),
        (&["empty", "--step", "22"], "`empty` has no checkpoint of step 22", "it has no checkpoint at all"),
        (&["empty"], "`empty` has no checkpoint", "give the folder of a run"),
        (&["runs/nope"], "`runs/nope` does not exist", "give the folder of a run"),
    ];
    for (arguments, what, hint) in cases {
        let output = place.run(&[&["export"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let said = stderr(&output);
        assert!(said.starts_with(&format!("error: {what}\n  hint: {hint}")), "{arguments:?}: {said}");
    }
}

#[test]
fn epochs_in_metrics_grow_with_every_step() {
    let place = Place::new(TINY);
    let data = ["--set", "data.records=100", "--set", "train.steps=100000", "--epochs", "2"];
    let output = place.run(&[&["train", "tiny.toml", "--set", "sample.prompts=[]"], &data[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let metrics = metrics(&place.path("run/metrics.jsonl"));
    let epochs: Vec<f64> = metrics.iter().filter_map(|line| line["epoch"].as_f64()).collect();
    assert!(epochs.len() > 4 && epochs[0] > 0.0 && epochs[0] < 1.0, "{epochs:?}");
    assert!(epochs.is_sorted_by(|a, b| a < b), "{epochs:?}");
    assert_eq!(epochs.last(), Some(&2.0));
}
