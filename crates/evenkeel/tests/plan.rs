//! Plans through the binary: measured once, the same from then on, and taken by a run.

mod support;

use std::fs;

use serde_json::Value;
use support::{Place, metrics, stderr};

const TINY: &str = r#"
[model]
hidden = 64
layers = 3
heads = 4
kv_heads = 2
ffn = 96

[data]
source = "synthetic"
records = 100_000
sequence = 64
holdout = 50

[train]
steps = 6
batch = 2
accumulate = 2
lr = 1e-2

[device]
threads = 2
"#;

/// The binary with a cache of its own.
fn run(place: &Place, arguments: &[&str]) -> (bool, String, String) {
    let output = place.command(arguments).env("XDG_CACHE_HOME", place.path("cache")).output().unwrap();
    (output.status.success(), String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output))
}

fn plan(place: &Place, extra: &[&str]) -> Value {
    let (is_fine, stdout, stderr) = run(place, &[&["plan", "tiny.toml", "--json", "--show", "1000"], extra].concat());
    assert!(is_fine, "{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

#[test]
fn a_plan_is_measured_once_and_the_same_from_then_on_and_its_flags_run() {
    let place = Place::new(TINY);
    let first = plan(&place, &[]);
    assert!(place.path("cache/evenkeel/profile-cpu.json").is_file());
    let steps = |plan: &Value| {
        let fitting = plan["fitting"].as_array().unwrap().iter();
        fitting.map(|judged| format!("{} {}", judged["strategy"], judged["step_s"])).collect::<Vec<_>>()
    };
    assert!(steps(&plan(&place, &[])) == steps(&first), "nothing is left to measure");
    let fitting = first["fitting"].as_array().unwrap();
    assert!(first["too_large"].as_array().unwrap().is_empty());
    for judged in fitting {
        let strategy = &judged["strategy"];
        let product =
            ["micro_batch", "accumulate", "dp"].map(|key| strategy[key].as_u64().unwrap()).iter().product::<u64>();
        assert_eq!(product, 4, "a step has as many sequences: {strategy}");
        assert!(judged["step_s"].as_f64().unwrap() > 0.0 && judged["fullness"].as_f64().unwrap() <= 1.0);
    }
    for axis in ["pp", "dp"] {
        assert!(fitting.iter().any(|judged| judged["strategy"][axis] == 2), "{axis} 2 was looked at");
    }
    // One strategy of each kind is run as the plan says, from a configuration that says otherwise.
    let is_recomputed = |judged: &Value| judged["strategy"]["arrangement"]["schedule"] != "none";
    type Kind<'a> = (&'a str, &'a dyn Fn(&Value) -> bool);
    let kinds: [Kind; 3] = [
        ("dp", &|judged| judged["strategy"]["dp"] == 2 && judged["strategy"]["zero"] == 2),
        ("pp", &|judged| judged["strategy"]["pp"] == 2 && judged["strategy"]["pipeline"]["order"] == "zb-h1"),
        ("tp", &|judged| judged["strategy"]["arrangement"]["parts"] == 2 && !is_recomputed(judged)),
    ];
    for (kind, is_of) in kinds {
        let judged = fitting.iter().find(|judged| is_of(judged)).unwrap_or_else(|| panic!("no {kind} in the plan"));
        let flags: Vec<&str> = judged["flags"].as_str().unwrap().split(' ').collect();
        let other = ["train", "tiny.toml", "--output", "as-planned", "--set", "parallel.parts=3"];
        let (is_fine, _, stderr) = run(&place, &[&other, &flags[..]].concat());
        assert!(is_fine, "{flags:?}: {stderr}");
        let written = fs::read_to_string(place.path("as-planned/run.toml")).unwrap();
        let strategy = &toml::from_str::<toml::Value>(&written).unwrap()["strategy"];
        for key in ["pp", "dp", "micro_batch", "accumulate", "zero"] {
            assert_eq!(strategy[key].to_string(), judged["strategy"][key].to_string(), "{kind}: {key}");
        }
        let schedule = |of: &str| of.replace('"', "");
        let planned = judged["strategy"]["arrangement"]["schedule"].to_string();
        assert_eq!(schedule(&strategy["arrangement"]["schedule"].to_string()), schedule(&planned), "{kind}");
        fs::remove_dir_all(place.path("as-planned")).unwrap();
    }
    let (is_fine, table, _) = run(&place, &["plan", "tiny.toml"]);
    assert!(
        is_fine && table.contains("tokens/s") && table.contains("To run the first: --set parallel.auto=false"),
        "{table}"
    );
}

#[test]
fn a_run_that_leaves_its_strategy_open_takes_the_fastest_and_says_so() {
    let place = Place::new(&format!("parallel = \"auto\"\n{TINY}"));
    let (is_fine, _, stderr) = run(&place, &["train", "tiny.toml", "--output", "run"]);
    assert!(is_fine, "{stderr}");
    assert!(stderr.contains("planned: ") && stderr.contains("a step foretold, the best of"), "{stderr}");
    let written = fs::read_to_string(place.path("run/run.toml")).unwrap();
    assert!(written.contains("auto = false"), "what was chosen is written down: {written}");
    let (is_fine, _, stderr) = run(&place, &["train", "tiny.toml", "--output", "run", "--resume", "--steps", "8"]);
    assert!(is_fine && !stderr.contains("planned: "), "it goes on as it was planned: {stderr}");
    let tokens = |run: &str| metrics(&place.path(run).join("metrics.jsonl"))[0]["tokens"].clone();
    assert_eq!(tokens("run"), 4 * 64, "a step has the sequences of the configuration");
    place.refused(&["train", "tiny.toml", "--dp", "2"], &["parallel.dp", "parallel.auto"]);
}

#[test]
fn a_damaged_profile_is_measured_anew_and_keys_that_no_plan_has_are_refused() {
    let place = Place::new(TINY);
    plan(&place, &["--batch", "1"]);
    let path = place.path("cache/evenkeel/profile-cpu.json");
    let profile = fs::read_to_string(&path).unwrap();
    let with_first = |seconds: &str| {
        let (before, behind) = profile.split_once("\"seconds\":[").unwrap();
        format!("{before}\"seconds\":[{seconds}{}", &behind[behind.find(']').unwrap()..])
    };
    for damaged in [profile[..profile.len() / 2].to_owned(), with_first("1e308"), with_first("-1"), with_first("")] {
        fs::write(&path, damaged).unwrap();
        let plan = plan(&place, &["--batch", "1"]);
        assert!(plan["fitting"].as_array().unwrap().iter().all(|judged| judged["step_s"].as_f64().unwrap() > 0.0));
    }
    place.refused(&["plan", "tiny.toml", "--tp", "2", "--set", "parallel.tp_weights=[1,2]"], &["parallel.tp_weights"]);
}

#[test]
fn what_fits_nowhere_is_told_before_anything_is_measured() {
    let place = Place::new(TINY);
    let huge = "--set model.hidden=65536 --set model.heads=512 --set model.ffn=262144 --set model.layers=8";
    let huge: Vec<&str> = huge.split(' ').collect();
    let (is_fine, _, stderr) = run(&place, &[&["plan", "tiny.toml"], &huge[..]].concat());
    assert!(
        !is_fine && stderr.contains("no strategy fits: the leanest") && stderr.contains("of the memory"),
        "{stderr}"
    );
}

#[test]
fn a_cluster_is_planned_by_its_figures_and_the_same_each_time() {
    let place = Place::new(TINY);
    let clusters = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters");
    let [alike, mixed] = ["8-h200.toml", "mixed.toml"].map(|name| format!("{clusters}/{name}"));
    let on = |cluster: &str, extra: &[&str]| plan(&place, &[&["--cluster", cluster], extra].concat());
    // With fewer sequences than devices, some devices may better rest.
    let many = ["--tokens-per-step", "1024"];
    let first = on(&alike, &[&many[..], &["--svg", "step.svg"]].concat());
    let drawn = fs::read_to_string(place.path("step.svg")).unwrap();
    assert!(drawn.contains("class=\"used\"") && drawn.contains("8 × h200"), "{drawn}");
    assert_eq!(first, on(&alike, &many));
    assert!(!place.path("cache").exists(), "nothing is measured");
    let strategies = |plan: &Value| -> Vec<Value> {
        plan["fitting"].as_array().unwrap().iter().map(|judged| judged["strategy"].clone()).collect()
    };
    for strategy in strategies(&first) {
        assert_eq!(strategy["devices"]["gpus"].as_array().unwrap().len(), 8, "{strategy}");
    }
    // Two of eight, four of eight, two of eight, and all.
    let mixed: Vec<usize> =
        strategies(&on(&mixed, &many)).iter().map(|it| it["devices"]["gpus"].as_array().unwrap().len()).collect();
    assert!([2, 4, 8].iter().all(|count| mixed.contains(count)), "{mixed:?}");
    let tokens = on(&alike, &["--tokens-per-step", "512", "--devices", "2"]);
    for strategy in strategies(&tokens) {
        let product = ["micro_batch", "accumulate", "dp"].map(|key| strategy[key].as_u64().unwrap());
        assert_eq!(product.iter().product::<u64>(), 512 / 64, "{strategy}");
    }
    place.refused(&["plan", "tiny.toml", "--cluster", &alike, "--devices", "9"], &["8 devices, not 9"]);
    place.refused(&["plan", "tiny.toml", "--cluster", &alike, "--tokens-per-step", "100"], &["--tokens-per-step 128"]);
    let huge = ["model.hidden=65536", "model.heads=512", "model.ffn=262144", "model.layers=8", "train.batch=8"];
    let huge: Vec<&str> = huge.iter().flat_map(|key| ["--set", key]).collect();
    let (is_fine, _, stderr) =
        run(&place, &[&["plan", "tiny.toml", "--cluster", &alike, "--devices", "1"], &huge[..]].concat());
    assert!(!is_fine && stderr.contains("no strategy fits") && stderr.contains("more than that has"), "{stderr}");
}

#[test]
fn a_plan_keeps_to_the_axes_that_the_command_line_asks_for() {
    let place = Place::new(TINY);
    let cluster = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters/8-h200.toml");
    let on = ["--cluster", cluster, "--tokens-per-step", "1024"];
    let found = plan(&place, &[&on[..], &["--pp", "2", "--tp", "2"]].concat());
    let fitting = found["fitting"].as_array().unwrap();
    assert!(!fitting.is_empty());
    for judged in fitting {
        let shards = judged["strategy"]["cut"]["weights"].as_array().unwrap().len();
        assert_eq!((&judged["strategy"]["pp"], shards), (&2.into(), 2), "{judged}");
    }
    let with = |axis: &'static str, count: &'static str| [&["plan", "tiny.toml"], &on[..], &[axis, count]].concat();
    place.refused(&with("--tp", "5"), &["no such strategy", "--tp"]);
    place.refused(&with("--dp", "none"), &["`--dp none` is no number of ranks"]);
}

#[test]
fn a_model_needs_no_weights_to_be_planned_and_replaces_that_of_the_file() {
    let place = Place::new(TINY);
    fs::create_dir(place.path("bare")).unwrap();
    let config = r#"{
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 300, "tie_word_embeddings": false
    }"#;
    fs::write(place.path("bare/config.json"), config).unwrap();
    let cluster = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters/8-h200.toml");
    let of = |first: &[&str]| {
        let rest = ["--model", "bare", "--cluster", cluster, "--devices", "2", "--json"];
        let (is_fine, stdout, stderr) = run(&place, &[&["plan"], first, &rest].concat());
        assert!(is_fine, "{stderr}");
        let plan: Value = serde_json::from_str(&stdout).unwrap();
        assert!(!plan["fitting"].as_array().unwrap().is_empty());
    };
    of(&["--tokens-per-step", "4096", "--sequence", "64"]);
    of(&["tiny.toml"]);
}

/// Makes every task, exchange and run of a profile take so many times as long.
/// The loss of balance is of whole micro-batches and of all layers.
#[test]
fn a_loss_of_balance_among_experts_is_planned_without_parts_and_places() {
    let place = Place::new(TINY);
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/qwen3_moe/config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(golden).unwrap()).unwrap();
    config["output_router_logits"] = true.into();
    config["vocab_size"] = 300.into();
    fs::create_dir(place.path("mixture")).unwrap();
    fs::write(place.path("mixture/config.json"), config.to_string()).unwrap();
    let cluster = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters/8-h200.toml");
    let sizes = ["--tokens-per-step", "4096", "--sequence", "64", "--devices", "2", "--show", "1000", "--json"];
    let (is_fine, stdout, stderr) =
        run(&place, &[&["plan", "--model", "mixture", "--cluster", cluster], &sizes[..]].concat());
    assert!(is_fine, "{stderr}");
    let plan: Value = serde_json::from_str(&stdout).unwrap();
    for strategy in plan["fitting"].as_array().unwrap() {
        let strategy = &strategy["strategy"];
        assert!(strategy["pp"] == 1 && strategy["arrangement"]["parts"] == 1, "{strategy}");
    }
    let sizes = "hidden = 64\nlayers = 3\nheads = 4\nkv_heads = 2\nffn = 96";
    fs::write(place.path("mixture.toml"), TINY.replace(sizes, "config = \"mixture/config.json\"")).unwrap();
    let train = ["train", "mixture.toml", "--tp", "2", "--set", "parallel.parts=2"];
    place.refused(&train, &["parallel.parts is 2", "whole micro-batches"]);
}

fn scale_times(profile: &mut Value, factor: f64) {
    let scale = |times: &mut Vec<Value>| {
        times.iter_mut().for_each(|time| *time = (factor * time.as_f64().unwrap()).into());
    };
    match profile {
        Value::Object(keys) => {
            for (key, value) in keys {
                match value {
                    Value::Array(times) if key == "seconds" => scale(times),
                    Value::Object(runs) if key == "runs" => {
                        runs.values_mut().filter_map(Value::as_array_mut).for_each(scale);
                    }
                    value => scale_times(value, factor),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| scale_times(value, factor)),
        _ => {}
    }
}

#[test]
fn a_run_whose_plan_was_off_says_so_and_by_which_terms() {
    let place = Place::new(&format!("parallel = \"auto\"\n{TINY}"));
    plan(&place, &[]);
    let path = place.path("cache/evenkeel/profile-cpu.json");
    let mut profile: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    // What seems slow would be run again before it is taken; what seems fast is taken.
    scale_times(&mut profile, 0.02);
    fs::write(&path, profile.to_string()).unwrap();
    let (is_fine, _, stderr) = run(&place, &["train", "tiny.toml", "--output", "run", "--steps", "20"]);
    assert!(is_fine, "{stderr}");
    assert_eq!(stderr.matches("longer than the plan foretold").count(), 1, "{stderr}");
    let line = stderr.lines().find(|line| line.contains("by 5 timed steps, ")).unwrap_or_else(|| panic!("{stderr}"));
    for term in ["computing takes", "longer than foretold"] {
        assert!(line.contains(term), "{term}: {line}");
    }
}
