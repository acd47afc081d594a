//! Data of a run through the binary: what it reads, shows, passes over and stops at.

mod support;

use std::fs;

use support::{Place, stderr};

const TINY: &str = r#"
[model]
hidden = 32
layers = 1
heads = 2
ffn = 48
tied = true

[data]
source = "jsonl"
paths = ["data.jsonl"]
sequence = 256
shuffle = false

[train]
steps = 4
batch = 2
lr = 1e-2

[output]
checkpoint_every = 2
"#;

fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", *setting]).collect()
}

fn place(data: &str) -> Place {
    let place = Place::new(TINY);
    fs::write(place.path("data.jsonl"), data).unwrap();
    place
}

const TASKS: &str = "{\"instruction\": \"Add.\", \"input\": \"1 2\", \"output\": \"3\"}\n";
const CHATML: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% endif %}";

/// What `evenkeel data` shows of the tokens that count, and of all.
fn shown(said: &str) -> (String, String) {
    let tokens = said.lines().skip_while(|line| !line.trim_start().starts_with("token")).skip(1);
    let mut texts = (String::new(), String::new());
    for line in tokens {
        let (columns, text) = line.split_once('"').unwrap();
        let text = serde_json::from_str::<String>(&format!("\"{text}")).unwrap();
        if columns.contains("yes") {
            texts.0.push_str(&text);
        }
        texts.1.push_str(&text);
    }
    texts
}

#[test]
fn the_first_sample_is_shown_with_its_prompt_and_the_tokens_that_count() {
    let place = place(TASKS);
    fs::write(place.path("chat.jinja"), CHATML).unwrap();
    let data = |settings: &[&str]| {
        let said = place.stdout(&[&["data", "tiny.toml"], &set(&["data.format=alpaca"])[..], &set(settings)].concat());
        (said.lines().next().unwrap().to_owned(), shown(&said))
    };
    let (prompt, (counted, all)) = data(&[]);
    assert_eq!(prompt, "instructions use Stanford Alpaca's prompt");
    assert!(all.starts_with("Below is an instruction that describes a task, paired with an input"), "{all}");
    assert!(all.ends_with("### Response:3<|end|>"), "{all}");
    assert_eq!(counted, "3<|end|>");
    let (prompt, (counted, all)) = data(&["data.chat_template=chat.jinja"]);
    assert_eq!(prompt, "instructions use the chat template");
    assert_eq!((&*counted, &*all), ("3\n<|end|>", "<user>Add.\n1 2\n<assistant>3\n<|end|>"));
    let said = place
        .run(&[&["data", "tiny.toml"], &set(&["data.format=alpaca", "data.instruction_prompt=chat"])[..]].concat());
    assert_eq!(said.status.code(), Some(2));
    assert!(stderr(&said).contains("the tokenizer has no chat template"), "{}", stderr(&said));
}

/// As sentencepiece has it: words begin with a space, and the decoder drops the first one of a text.
const WORDS: &str = r#"{
    "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "post_processor": null,
    "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
    "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
    "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "▁one": 1, "▁two": 2, "▁three": 3}}
}"#;

#[test]
fn spaces_between_words_are_shown_and_printed() {
    let place = place(&format!("{{\"text\": \"{}one\"}}\n", "one two three ".repeat(80)));
    fs::create_dir(place.path("words")).unwrap();
    fs::write(place.path("words/tokenizer.json"), WORDS).unwrap();
    let words = set(&["data.tokenizer=words", "data.sequence=16"]);
    let said = place.stdout(&[&["data", "tiny.toml"], &words[..]].concat());
    assert!(shown(&said).1.starts_with("one two three one two"), "{said}");
    let keys = set(&["sample.prompts=[\"one two\"]", "sample.tokens=2", "sample.temperature=0", "train.steps=30"]);
    let said = place.stdout(&[&["train", "tiny.toml"], &words[..], &keys].concat());
    assert!(said.contains("What it writes:\n  one two three one\n"), "{said}");
    let generate = ["generate", "run/model", "--greedy", "--tokens", "2", "--prompt"];
    assert_eq!(place.stdout(&[&generate[..], &["one two"]].concat()).trim_end(), "one two three one");
}

#[test]
fn a_model_that_was_taught_stanfords_prompt_is_asked_by_it() {
    let place = place(&TASKS.repeat(8));
    let keys = ["data.format=alpaca", "sample.prompts=[\"Add.\"]"];
    let output = place.run(&[&["train", "tiny.toml"], &set(&keys)[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("instructions use Stanford Alpaca's prompt"), "{}", stderr(&output));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("through its chat template") && said.contains("--chat --prompt \"Add.\""), "{said}");
    let template = fs::read_to_string(place.path("run/model/chat_template.jinja")).unwrap();
    assert!(template.contains("### Response:"), "{template}");
    place.stdout(&["generate", "run/model", "--chat", "--prompt", "Add.", "--tokens", "2", "--greedy"]);
    // And trained on by it, without being told.
    let more = ["data.format=alpaca", "output.folder=more"];
    let new = "hidden = 32\nlayers = 1\nheads = 2\nffn = 48\ntied = true";
    fs::write(place.path("more.toml"), TINY.replace(new, "path = \"run/model\"")).unwrap();
    let output = place.run(&[&["train", "more.toml"], &set(&more)[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("instructions use Stanford Alpaca's prompt"), "{}", stderr(&output));
}

#[test]
fn a_bad_record_ends_a_run_which_says_what_is_saved_and_how_it_goes_on() {
    let text = |n: usize| format!("{{\"text\": \"{}\"}}\n", "ab ".repeat(60 + n % 7));
    let texts: String = (1..=40).map(|n| if n == 33 { "{\"words\": 1}\n".to_owned() } else { text(n) }).collect();
    let place = place(&texts);
    let train = ["train", "tiny.toml", "--steps", "100", "--set", "train.epochs=1"];
    let output = place.run(&train);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let saved = said.split("the run ends after step ").nth(1).unwrap_or_else(|| panic!("{said}"));
    let step: u64 = saved.split(',').next().unwrap().parse().unwrap();
    // 32 texts of about 190 tokens come before it.
    assert!(step == 11 && said.contains("line 33") && said.contains("which is saved in `run`"), "{said}");
    assert!(said.contains("--resume --set data.on_bad_record=skip"), "{said}");
    assert!(place.path(&format!("run/checkpoints/step-{step:08}/manifest.json")).exists());
    let output = place.run(&[&train[..], &["--resume", "--set", "data.on_bad_record=skip"]].concat());
    let (said, summary) = (stderr(&output), String::from_utf8_lossy(&output.stdout).into_owned());
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("skipped a bad record: ") && said.contains("data.jsonl") && said.contains("line 33"),
        "{said}"
    );
    assert!(summary.contains("records         1 bad ones skipped"), "{summary}");
    let metrics = |run: &str| fs::read_to_string(place.path(run).join("metrics.jsonl")).unwrap();
    assert!(metrics("run").lines().last().unwrap().contains("\"records_skipped\":1"), "{}", metrics("run"));
    // No sample of the step that failed is lost.
    place.stdout(&[&train[..], &["--output", "straight", "--set", "data.on_bad_record=skip"]].concat());
    let losses = |run: &str| -> Vec<f64> {
        let of_line = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap();
        metrics(run).lines().map(of_line).collect()
    };
    assert_eq!(losses("run"), losses("straight"));
}

#[test]
fn a_file_of_other_records_is_not_skipped_in_silence() {
    let place = place(&TASKS.repeat(500));
    let train =
        |limit: &str| place.run(&[&["train", "tiny.toml"], &set(&["data.on_bad_record=skip", limit])[..]].concat());
    for (limit, expected) in [
        ("data.bad_record_limit=100", "an epoch has more than 100 bad records"),
        ("data.bad_record_limit=1000", "500 bad ones were skipped"),
    ] {
        let output = train(limit);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected) && !place.path("run/checkpoints").exists(), "{said}");
    }
}

#[test]
fn data_of_one_record_are_told_how_they_become_several() {
    let place = place("");
    fs::write(place.path("book.txt"), "Once upon a time.\n\n".repeat(40)).unwrap();
    fs::write(place.path("few.jsonl"), "{\"text\": \"one\"}\n{\"text\": \"two\"}\n").unwrap();
    let text = ["data.source=text", "data.paths=book.txt", "data.holdout=8"];
    let few = ["data.paths=few.jsonl", "data.holdout=1000"];
    let split = "hint: the data has only 1 record: split the text with data.separator, such as \"\\n\\n\" for blank lines, \
                 or give data.eval_paths";
    let add = "hint: the data has only 2 records: add some, or choose another data.holdout, or give data.eval_paths";
    for (settings, expected) in [(&text[..], split), (&few[..], add)] {
        let output = place.run(&[&["train", "tiny.toml"], &set(settings)[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{settings:?}");
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
    let blank_lines = set(&["data.separator=\"\\n\\n\""]);
    place.stdout(&[&["train", "tiny.toml"], &set(&text)[..], &blank_lines].concat());
}

#[test]
fn the_first_line_that_cannot_be_read_is_named_though_data_are_shuffled() {
    let place = place(&TASKS.repeat(50));
    let output = place.run(&[&["train", "tiny.toml"], &set(&["data.shuffle=true"])[..]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("line 1 ") && stderr(&output).contains("no column `text`"), "{}", stderr(&output));
}

#[test]
fn records_that_are_cut_are_counted() {
    let place = place(&format!("{{\"text\": \"{}\"}}\n{{\"text\": \"short\"}}\n", "long ".repeat(100)));
    let output = place.run(&[&["train", "tiny.toml"], &set(&["data.packing=false"])[..]].concat());
    let (told, said) = (stderr(&output), String::from_utf8_lossy(&output.stdout));
    assert_eq!(told.matches("cut at data.sequence tokens so far").count(), 1, "{told}");
    assert!(said.contains("records         4 cut at the length of a sequence"), "{said}");
    let said = place.stdout(&["train", "tiny.toml", "--output", "cut"]);
    assert!(!said.contains("records  "), "{said}");
    fs::write(place.path("data.jsonl"), TASKS.repeat(3)).unwrap();
    let short = set(&["data.format=alpaca", "data.sequence=64", "output.folder=none"]);
    let output = place.run(&[&["train", "tiny.toml"], &short[..]].concat());
    let said = stderr(&output);
    assert!(
        said.contains("; 3 were cut at the length of a sequence") && said.contains("raise data.sequence"),
        "{said}"
    );
}

#[test]
fn a_list_of_objects_is_read_and_named_where_it_is_taken_for_lines() {
    let place = place("[{\"text\": \"one\"},\n {\"text\": \"two\"}]\n");
    let output = place.run(&["train", "tiny.toml"]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("is one JSON list") && said.contains("hint: ") && said.contains("data.source = \"json\""),
        "{said}"
    );
    fs::rename(place.path("data.jsonl"), place.path("data.json")).unwrap();
    let list = set(&["data.source=json", "data.paths=data.json"]);
    place.stdout(&[&["train", "tiny.toml"], &list[..]].concat());
}

#[test]
fn how_records_share_sequences_follows_from_their_format_and_belongs_to_a_run() {
    let place = place(&TASKS.repeat(8));
    let resolved = |settings: &[&str]| place.stdout(&[&["config", "tiny.toml"], &set(settings)[..]].concat());
    for (format, strategy) in [("text", "cut"), ("alpaca", "best-fit"), ("messages", "best-fit")] {
        let said = resolved(&[&format!("data.format={format}")]);
        assert!(said.contains(&format!("packing_strategy = \"{strategy}\"")), "{said}");
    }
    assert!(!resolved(&["data.packing=false"]).contains("packing_strategy"));
    let alpaca = set(&["data.format=alpaca"]);
    place.stdout(&[&["train", "tiny.toml", "--steps", "2"], &alpaca[..]].concat());
    let resume = [&["train", "tiny.toml", "--resume"], &alpaca[..]].concat();
    fs::write(place.path("chat.jinja"), CHATML).unwrap();
    for (setting, expected) in [
        ("data.packing_strategy=cut", "`data.packing_strategy` was \"best-fit\" and is \"cut\""),
        ("data.label_beyond_cut=true", "`data.label_beyond_cut` was false and is true"),
        ("data.chat_template=chat.jinja", "`data.instruction_prompt` was alpaca and is chat"),
    ] {
        let output = place.run(&[&resume[..], &["--set", setting]].concat());
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
    place.stdout(&resume);
}

#[test]
fn keys_that_contradict_each_other_are_named() {
    let place = place(TASKS);
    for (settings, expected) in [
        (&["data.packing=false", "data.packing_strategy=cut"][..], "but `data.packing` is false"),
        (&["data.bad_record_limit=5"], "but `data.on_bad_record` is \"stop\""),
        (&["data.instruction_prompt=alpaca"], "but `data.format` is \"text\""),
        (
            &["data.format=alpaca", "data.instruction_prompt=alpaca", "data.chat_template=x"],
            "but `data.instruction_prompt` is \"alpaca\"",
        ),
        (&["data.chat_template=x"], "but `data.format` is \"text\""),
    ] {
        let output = place.run(&[&["config", "tiny.toml"], &set(settings)[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{settings:?}");
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
}
