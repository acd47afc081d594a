//! Classifiers of texts through the binary.

mod support;

use std::fs;
use std::path::Path;

use support::{Place, compare_curves, losses, metrics, stderr};

const CONFIG: &str = r#"
[model]
path = "bert"

[data]
source = "jsonl"
format = "labelled"
paths = ["texts.jsonl"]
labels = ["a", "b", "c", "d", "e"]
sequence = 24
holdout = 5

[train]
steps = 12
batch = 3
lr = 5e-3

[eval]
every = 6
"#;

/// Words, `[CLS]` before a text and `[SEP]` behind it.
const TOKENIZER: &str = r#"{
    "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "decoder": null,
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "unk_token": "?", "vocab": {
        "?": 0, "[CLS]": 1, "[SEP]": 2, "one": 3, "two": 4, "three": 5, "four": 6, "five": 7, "and": 8, "more": 9
    }},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 1}}],
        "special_tokens": {
            "[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]},
            "[SEP]": {"id": "[SEP]", "ids": [2], "tokens": ["[SEP]"]}
        }
    }
}"#;

const WORDS: [&str; 5] = ["one", "two", "three", "four", "five"];
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// A golden model with a tokenizer, and texts in which one word says the label.
fn place() -> Place {
    let place = Place::new(CONFIG);
    fs::create_dir(place.path("bert")).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/bert");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(file), place.path("bert").join(file)).unwrap();
    }
    fs::write(place.path("bert/tokenizer.json"), TOKENIZER).unwrap();
    let text = |n: usize| {
        let (more, label) = ("more and ".repeat(n % 4), NAMES[n % 5]);
        format!("{{\"text\": \"{more}{}\", \"other\": \"and more\", \"label\": \"{label}\"}}\n", WORDS[n % 5])
    };
    fs::write(place.path("texts.jsonl"), (0..200).map(text).collect::<String>()).unwrap();
    place
}

fn set<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", *setting]).collect()
}

#[test]
fn a_classifier_of_texts_learns_is_evaluated_and_is_saved_with_its_labels() {
    let place = place();
    let output = place.run(&["train", "tiny.toml", "--steps", "60"]);
    let said = format!("{}{}", stderr(&output), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{said}");
    assert!(said.contains(" tokens/s") && !said.contains("perplexity"), "{said}");
    let lines = metrics(&place.path("run/metrics.jsonl"));
    let accuracy = lines.iter().filter_map(|line| line["eval_accuracy"].as_f64()).next_back().unwrap();
    assert!(accuracy > 0.9, "{said}");
    let config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(place.path("run/model/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], serde_json::json!(["BertForSequenceClassification"]));
    assert_eq!(config["id2label"]["1"], "b");
    assert_eq!(config["label2id"]["e"], 4);
    let evaluated = place.stdout(&["eval", "run"]);
    assert!(evaluated.contains("texts       40") && !evaluated.contains("perplexity"), "{evaluated}");
    let shown = place.stdout(&["data", "tiny.toml"]);
    assert!(shown.contains(" tokens, label ") && shown.contains("\"[CLS]\""), "{shown}");
    // A second text has tokens of the second type.
    let shown = place.stdout(&[&["data", "tiny.toml"], &set(&["data.second_text_column=other"])[..]].concat());
    assert!(shown.contains("       9  1       "), "{shown}");
    place.stdout(&["inspect", "run/model", "--tp", "3"]);
}

#[test]
fn ranks_replicas_and_places_train_the_same_classifier() {
    let place = place();
    let train = |run: &str, settings: &[&str]| {
        let output = format!("output.folder={run}");
        place.stdout(&[&["train", "tiny.toml"], &set(&[&output])[..], &set(settings)].concat());
        losses(&place.path(run).join("metrics.jsonl"))
    };
    let alone = train("alone", &["train.accumulate=2"]);
    for (run, settings) in [
        ("tp", &["parallel.tp=2", "train.accumulate=2"][..]),
        ("tp-whole", &["parallel.tp=3", "parallel.sequence_parallel=false", "train.accumulate=2"]),
        ("pp", &["parallel.pp=2", "train.accumulate=2"]),
        ("zero", &["parallel.dp=2", "parallel.zero=3"]),
        ("recomputed", &["train.recompute=true", "train.accumulate=2"]),
        ("parts", &["parallel.tp=2", "parallel.parts=2", "parallel.schedule=oases", "train.accumulate=2"]),
    ] {
        compare_curves(run, &train(run, settings), &alone, [2e-4, 0.0]);
    }
}

#[test]
fn a_run_is_resumed_with_the_bits_of_one_that_was_not_stopped() {
    let place = place();
    let train = |settings: &[&str], more: &[&str]| {
        place.stdout(&[&["train", "tiny.toml"], &set(settings)[..], more].concat());
    };
    let cut = ["output.folder=cut", "output.checkpoint_every=5", "train.lr_decay=constant"];
    train(&["output.folder=straight", "train.lr_decay=constant"], &[]);
    train(&cut, &["--steps", "5"]);
    train(&cut, &["--resume", "--steps", "12"]);
    let [straight, cut] = ["straight", "cut"].map(|run| losses(&place.path(run).join("metrics.jsonl")));
    assert_eq!(straight.len(), 12);
    assert_eq!(straight, cut);
}

#[test]
fn a_network_without_labels_gets_a_head_and_says_so_also_beside_an_adapter() {
    let place = place();
    let config = fs::read_to_string(place.path("bert/config.json")).unwrap();
    fs::write(place.path("bert/config.json"), config.replace("BertForSequenceClassification", "BertForMaskedLM"))
        .unwrap();
    let bytes = fs::read(place.path("bert/model.safetensors")).unwrap();
    // The name of the head becomes one of another head, which is as long.
    let text = |from: &str, to: &str, bytes: Vec<u8>| -> Vec<u8> {
        let (from, to) = (from.as_bytes(), to.as_bytes());
        assert_eq!(from.len(), to.len());
        let mut bytes = bytes;
        while let Some(at) = bytes.windows(from.len()).position(|part| part == from) {
            bytes[at..at + from.len()].copy_from_slice(to);
        }
        bytes
    };
    let bytes = text("\"classifier.", "\"cls.other2.", bytes);
    fs::write(place.path("bert/model.safetensors"), bytes).unwrap();
    let output = place.run(&["train", "tiny.toml"]);
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("has no `classifier`: training begins with random numbers there"), "{said}");
    place.stdout(&["eval", "run"]);
    let adapter = set(&["adapter.kind=lora", "adapter.rank=2", "output.folder=lora"]);
    place.stdout(&[&["train", "tiny.toml"], &adapter[..]].concat());
    let saved: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(place.path("lora/model/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((&saved["task_type"], &saved["modules_to_save"][0]), (&"SEQ_CLS".into(), &"classifier".into()));
    place.stdout(&["eval", "lora"]);
    place.stdout(&["export", "lora", "--merge", "--output", "merged"]);
    let of_adapter = place.stdout(&["eval", "lora"]);
    let merged = place.stdout(&["eval", "tiny.toml", "--model", "merged"]);
    let loss = |said: &str| said.lines().find(|line| line.starts_with("loss")).unwrap().to_owned();
    assert_eq!(loss(&of_adapter), loss(&merged));
}

#[test]
fn a_head_begins_anew_for_other_labels_where_the_user_says_so_and_their_names_are_kept() {
    let place = place();
    let six = "data.labels=[\"a\", \"b\", \"c\", \"d\", \"e\", \"f\"]";
    place.refused(
        &["train", "tiny.toml", "--set", six],
        &["has 5 labels, and 6 are asked for", "model.new_head = true"],
    );
    let anew = ["train", "tiny.toml", "--set", six, "--set", "model.new_head=true"];
    let label = |model: &str| -> serde_json::Value {
        let config = fs::read_to_string(place.path(model).join("config.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&config).unwrap()["id2label"]["5"].clone()
    };
    let lora = set(&["adapter.kind=lora", "adapter.rank=2", "output.folder=lora"]);
    for (run, more) in [("run", &[][..]), ("lora", &lora)] {
        let output = place.run(&[&anew[..], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        let said = "warning: `classifier` begins anew with random numbers, for 6 labels";
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
        place.stdout(&["eval", run]);
    }
    assert_eq!(label("run/model"), "f");
    place.stdout(&["export", "lora/model", "--merge", "--output", "merged"]);
    assert_eq!(label("merged"), "f");
    // The folder's five labels have names of their own; the adapter's are kept.
    let other = "data.labels=[\"a\", \"b\", \"c\", \"d\", \"e\"]";
    let renamed = [&["train", "tiny.toml", "--set", other], &lora[..4], &["--set", "output.folder=same"]].concat();
    place.stdout(&renamed);
    place.stdout(&["export", "same/model", "--merge", "--output", "same-merged"]);
    let config = fs::read_to_string(place.path("same-merged/config.json")).unwrap();
    assert!(config.contains("\"e\": 4"), "{config}");
    place.refused(
        &["train", "tiny.toml", "--set", "adapter.path=lora/model", "--set", "model.new_head=true"],
        &["the adapter was trained with its own head"],
    );
}

#[test]
fn models_data_and_labels_that_do_not_go_together_are_refused() {
    let place = place();
    let sizes = "hidden = 32\nlayers = 1\nheads = 2\nffn = 48";
    fs::write(place.path("llama.toml"), CONFIG.replace("path = \"bert\"", sizes)).unwrap();
    place.refused(&["train", "llama.toml"], &["describes a new Llama", "a classifier of texts comes from model.path"]);
    let train = |settings: &[&'static str]| [&["train", "tiny.toml"], &set(settings)[..]].concat();
    place.refused(
        &train(&["data.format=text", "data.labels=[]"]),
        &["the model labels texts", "data.format = \"labelled\""],
    );
    place.refused(&train(&["data.format=text"]), &["`data.labels` is set", "it is for format \"labelled\""]);
    place.refused(&train(&["data.labels=[\"a\", \"a\"]"]), &["`data.labels` needs two names or more, all different"]);
    place.refused(&train(&["data.labels=[]"]), &["has label \"a\"", "expected a number from 0 to 4"]);
    place.refused(&train(&["data.packing_strategy=cut"]), &["`data.packing_strategy` is for texts that are continued"]);
    place.refused(&train(&["data.sequence=100"]), &["80 positions"]);
    place.refused(&train(&["data.labels=[\"a\", \"b\"]"]), &["has 5 labels, and 2 are asked for", "data.labels"]);
    place.refused(&["generate", "bert", "--prompt", "x"], &["classifies texts and generates no text"]);
}
