//! What evaluations and the model's own files decide about a run: the best checkpoint, an early end, keys that are refused.

mod support;

use std::fs;

use evenkeel_store::Digest;
use evenkeel_store::checkpoint::Checkpoint;
use support::{Place, stderr};

const TINY: &str = r#"
[model]
config = "config.json"

[data]
source = "synthetic"
sequence = 32
holdout = 50

[train]
steps = 4
batch = 2
lr = 1e-2

[eval]
every = 2
batches = 2

[output]
checkpoint_every = 0
keep_checkpoints = 1
"#;

/// A Llama of bytes, with more keys.
fn place(more: &[(&str, serde_json::Value)]) -> Place {
    let place = Place::new(TINY);
    let mut config = serde_json::json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 258, "max_position_embeddings": 64,
    });
    more.iter().for_each(|(key, value)| config[*key] = value.clone());
    fs::write(place.path("config.json"), config.to_string()).unwrap();
    place
}

fn checkpoints(place: &Place) -> Vec<String> {
    let entries = fs::read_dir(place.path("run/checkpoints")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn the_best_checkpoint_outlives_worse_ones_and_can_be_had() {
    let place = place(&[]);
    let said = place.stdout(&["train", "tiny.toml", "--set", "output.keep_best=true"]);
    assert!(said.contains("run/checkpoints/step-00000004, evaluation loss "), "{said}");
    assert_eq!(checkpoints(&place), ["step-00000004"]);
    let written = fs::read_to_string(place.path("run/run.toml")).unwrap();
    let (configuration, _) = written.split_once("\n# What follows from the above.").unwrap();
    let manifest = Checkpoint::open(place.path("run/checkpoints/step-00000004")).unwrap();
    assert_eq!(manifest.body()["configuration"], Digest::of(configuration.as_bytes()).to_string());

    // Everything gets worse from here on.
    let worse = ["train", "tiny.toml", "--resume", "--lr", "10", "--set", "output.keep_best=true", "--steps"];
    let said = place.stdout(&[&worse[..], &["10"]].concat());
    assert_eq!(checkpoints(&place), ["step-00000004", "step-00000010"]);
    assert!(said.contains("at step 4\n") && said.contains("step-00000004, evaluation loss "), "{said}");
    assert!(place.stdout(&["export", "run", "--best", "--output", "best"]).starts_with("step 4 of "));
    let weights = |folder: &str| fs::read(place.path(folder).join("model.safetensors")).unwrap();
    assert_ne!(weights("best"), weights("run/model"), "the model is that of the last step");

    let said = place.stdout(&[&worse[..], &["12", "--set", "output.save_best=true"]].concat());
    assert!(said.contains("run/model, of step 4\n"), "{said}");
    assert_eq!(checkpoints(&place), ["step-00000004", "step-00000012"]);
    assert_eq!(weights("best"), weights("run/model"));

    fs::remove_dir_all(place.path("run/checkpoints/step-00000004")).unwrap();
    let lost = place.run(&["export", "run", "--best", "--output", "lost"]);
    assert_eq!(lost.status.code(), Some(2));
    assert!(stderr(&lost).contains("was after step 4, and its checkpoint was not kept"), "{}", stderr(&lost));
    let resumed = place.run(&[&worse[..], &["14"]].concat());
    assert!(resumed.status.success() && stderr(&resumed).contains("the best from here on is kept"), "{resumed:?}");
    let again = place.run(&["export", "run", "--best", "--output", "again"]);
    assert!(again.status.success(), "{}", stderr(&again));
}

#[test]
fn without_evaluations_there_is_no_best_checkpoint() {
    let place = place(&[]);
    let without = TINY.replace("holdout = 50\n", "").replace("[eval]\nevery = 2\nbatches = 2\n", "");
    fs::write(place.path("tiny.toml"), without).unwrap();
    place.stdout(&["train", "tiny.toml", "--steps", "1"]);
    let output = place.run(&["export", "run", "--best"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("`run` has no evaluation") && stderr(&output).contains("output.keep_best"));
}

#[test]
fn a_run_that_no_longer_gains_ends_early_and_well() {
    let place = place(&[]);
    let patient = ["--set", "eval.patience=2", "--set", "eval.min_delta=100", "--steps", "40"];
    let train = |more: &[&str]| place.stdout(&[&["train", "tiny.toml"], &patient[..], more].concat());
    let said = train(&[]);
    let reason = "early: the last 2 evaluations were no better than that of step ";
    assert!(said.contains(reason) && said.contains("steps           6\n"), "{said}");
    let model = || fs::read(place.path("run/model/model.safetensors")).unwrap();
    let ended = model();
    // It does not go on by itself, but does where it is told to wait longer.
    assert!(train(&["--resume"]).contains(reason));
    assert_eq!(model(), ended);
    let said = train(&["--resume", "--set", "eval.patience=4"]);
    assert!(
        said.contains("the last 4 evaluations were") && said.contains("steps           10, 4 since step 6"),
        "{said}"
    );
}

#[test]
fn a_config_json_that_is_not_understood_trains_only_where_the_user_says_so() {
    let place = place(&[("residual_multiplier", 0.22.into()), ("mystery", "x".into())]);
    let output = place.run(&["train", "tiny.toml"]);
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("`residual_multiplier` is 0.22") && said.contains("model.ignore_keys"), "{said}");
    assert!(!place.path("run").join("model").exists());
    let misspelt = "model.ignore_keys=[\"residual_multiplier\", \"mistery\"]";
    let output = place.run(&["train", "tiny.toml", "--set", misspelt]);
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("`model.ignore_keys` names `mistery`, which config.json does not have"), "{said}");
    assert!(said.contains("hint: did you mean `mystery`?"), "{said}");
    let ignoring = "model.ignore_keys=[\"residual_multiplier\", \"mystery\"]";
    place.stdout(&["train", "tiny.toml", "--set", ignoring]);
    let saved = fs::read_to_string(place.path("run/model/config.json")).unwrap();
    assert!(!saved.contains("residual_multiplier"), "it was trained without: {saved}");
    assert!(place.stdout(&["inspect", "run/model"]).contains("LlamaForCausalLM"));
    assert!(place.stdout(&["eval", "tiny.toml", "--set", ignoring]).contains("loss"));

    // A folder with such keys can be looked at, too.
    fs::copy(place.path("config.json"), place.path("run/model/config.json")).unwrap();
    assert_eq!(place.run(&["inspect", "run/model"]).status.code(), Some(2));
    let misspelt = place.run(&["inspect", "run/model", "--ignore-keys", "residual_multiplier,mistery"]);
    assert!(stderr(&misspelt).contains("`--ignore-keys` names `mistery`"), "{}", stderr(&misspelt));
    let ignored = "residual_multiplier,mystery";
    assert!(place.stdout(&["inspect", "run/model", "--ignore-keys", ignored]).contains("LlamaForCausalLM"));
    place.stdout(&["generate", "run/model", "--prompt", "1", "--tokens", "1", "--ignore-keys", ignored]);
}

#[test]
fn a_plan_with_a_pattern_that_matches_nothing_is_refused() {
    let place = place(&[]);
    fs::write(place.path("plan.json"), r#"{"layers.*.mlp.upproj": "colwise"}"#).unwrap();
    let output = place.run(&["train", "tiny.toml", "--tp", "2", "--set", "parallel.tp_plan=plan.json"]);
    assert_eq!(output.status.code(), Some(2));
    let said = stderr(&output);
    assert!(said.contains("`layers.*.mlp.upproj` matches nothing"), "{said}");
    assert!(said.contains("hint: it has ") && said.contains("model.layers.*.mlp.up_proj"), "{said}");
}

#[test]
fn what_evaluations_decide_needs_evaluations() {
    let place = place(&[]);
    let refused = |settings: &[&str], expected: &str| {
        let settings = settings.iter().flat_map(|setting| ["--set", setting]).collect::<Vec<_>>();
        let output = place.run(&[&["train", "tiny.toml"], &settings[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{settings:?}");
        assert!(stderr(&output).contains(expected), "{settings:?}: {}", stderr(&output));
    };
    let nothing = ["data.holdout=0", "eval.every=2"];
    refused(&[&nothing[..], &["output.keep_best=true"]].concat(), "`output.keep_best` is set, but there is nothing");
    refused(&[&nothing[..], &["eval.patience=3"]].concat(), "`eval.patience` is set, but there is nothing");
    refused(&["eval.min_delta=0.1"], "set eval.patience, too");
    refused(&["output.save_best=true", "output.save_model=false"], "`output.save_best` is set");
    refused(&["output.save_best=true", "output.keep_best=false"], "leave output.keep_best out");
    refused(&["train.lr_power=2"], "it belongs to \"polynomial\"");
    refused(&["train.lr_decay=linear", "train.lr_cycles=2"], "it belongs to \"cosine-restarts\"");
    refused(&["train.lr_decay=cosine", "train.lr_decay_share=0.2"], "it belongs to \"wsd\"");
}

#[test]
fn schedules_are_resolved_with_the_defaults_of_transformers() {
    let place = place(&[]);
    for (decay, expected) in [
        ("cosine-restarts", "lr_cycles = 1\n"),
        ("polynomial", "lr_power = 1.0\n"),
        ("wsd", "lr_decay_share = 0.1\nlr_decay_form = \"cosine\"\n"),
    ] {
        let printed = place.stdout(&["config", "tiny.toml", "--set", &format!("train.lr_decay={decay}")]);
        assert!(printed.contains(expected), "{printed}");
    }
    let wsd =
        ["--set", "train.lr_decay=wsd", "--set", "train.lr_decay_share=0.5", "--set", "train.lr_decay_form=linear"];
    place.stdout(&[&["train", "tiny.toml"], &wsd[..]].concat());
    let metrics = fs::read_to_string(place.path("run/metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let rates: Vec<f64> = lines.filter_map(|line| line["lr"].as_f64()).collect();
    assert_eq!(rates, [1e-2, 1e-2, 1e-2, 5e-3]);
}
