//! Adapters from a configuration to a merged model, as a person uses them.

mod support;

use std::fs;

use support::{Place, TINY, metrics, stderr};

/// A place with a trained model in `base`, and a configuration that adapts it.
fn adapted() -> Place {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--steps", "3", "--set", "sample.prompts=[]", "--output", "first"]);
    fs::rename(place.path("first/model"), place.path("base")).unwrap();
    let sizes = "hidden = 32\nlayers = 2\nheads = 2\nffn = 48\ntied = true";
    assert!(TINY.contains(sizes));
    let text = TINY.replace(sizes, "path = \"base\"");
    fs::write(place.path("lora.toml"), format!("{text}\n[adapter]\nkind = \"lora\"\nrank = 4\n")).unwrap();
    place
}

/// The rate does not depend on how many steps there are.
const TRAIN: [&str; 8] = [
    "train",
    "lora.toml",
    "--set",
    "sample.prompts=[]",
    "--set",
    "output.checkpoint_every=4",
    "--set",
    "train.lr_decay=constant",
];

#[test]
fn an_adapter_is_trained_saved_used_and_merged() {
    let place = adapted();
    let base = fs::read(place.path("base/model.safetensors")).unwrap();
    let run = |more: &[&str]| place.stdout(&[&TRAIN, more].concat());
    let told = run(&["--steps", "8"]);
    assert!(told.contains("evenkeel generate run/model"), "{told}");
    let losses: Vec<f64> =
        metrics(&place.path("run/metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert!(losses.last() < losses.first(), "{losses:?}");
    assert!(fs::read(place.path("base/model.safetensors")).unwrap() == base, "the base is not written to");
    let config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(place.path("run/model/adapter_config.json")).unwrap()).unwrap();
    assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(4), Some(8.0)));
    assert_eq!(config["target_modules"].as_array().map(Vec::len), Some(14));

    // Resumed on two ranks, it ends where one rank ends.
    let adapter = |run: &str| fs::read(place.path(run).join("model/adapter_model.safetensors")).unwrap();
    run(&["--steps", "4", "--output", "halves"]);
    run(&["--steps", "8", "--output", "halves", "--resume"]);
    assert!(adapter("halves") == adapter("run"), "a resumed run ends in other bits");
    let mut other = base.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(place.path("base/model.safetensors"), other).unwrap();
    let again = [&TRAIN[..], &["--steps", "9", "--output", "halves", "--resume"]].concat();
    place.refused(&again, &["has other weights than those whose adapter", "the model that the run began with"]);
    fs::write(place.path("base/model.safetensors"), &base).unwrap();
    run(&["--steps", "8", "--output", "cut", "--tp", "2"]);
    let losses_of = |run: &str| -> Vec<f64> {
        metrics(&place.path(run).join("metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    let last = |run: &str| *losses_of(run).last().unwrap();
    assert!((last("cut") - last("run")).abs() < 1e-4, "{} and {}", last("cut"), last("run"));

    let generate = |model: &[&str]| {
        place.stdout(&[&["generate"], model, &["--greedy", "--tokens", "12", "--prompt", "12 + "]].concat())
    };
    place.stdout(&["export", "run", "--merge", "--output", "merged"]);
    let (alone, beside) = (generate(&["run/model"]), generate(&["base", "--adapter", "run/model"]));
    assert_eq!(alone, beside);
    assert_eq!(alone, generate(&["merged"]));
    let loss = |model: &str| {
        let told = place.stdout(&["eval", "lora.toml", "--model", model]);
        let line = told.lines().find_map(|line| line.strip_prefix("loss")).unwrap_or_else(|| panic!("{told}"));
        line.trim().parse::<f64>().unwrap()
    };
    assert_eq!(loss("run/model"), loss("merged"));
    assert!(loss("run/model") != loss("base"));
    let inspected = place.stdout(&["inspect", "run/model"]);
    assert!(inspected.contains("are trained") && inspected.contains("adapters of 14 layers"), "{inspected}");

    // A saved adapter goes on.
    let text = fs::read_to_string(place.path("lora.toml")).unwrap();
    let text = text.replace("kind = \"lora\"\nrank = 4", "path = \"run/model\"");
    fs::write(place.path("more.toml"), text).unwrap();
    place.stdout(&[
        "train",
        "more.toml",
        "--set",
        "sample.prompts=[]",
        "--output",
        "more",
        "--steps",
        "2",
        "--lr",
        "1e-5",
    ]);
    let first = metrics(&place.path("more/metrics.jsonl"))[0]["loss"].as_f64().unwrap();
    assert!(first < losses[0], "{first} is not below {}", losses[0]);
}

#[test]
fn dora_is_trained_saved_used_and_merged() {
    let place = adapted();
    let run = |more: &[&str]| place.stdout(&[&TRAIN, &["--set", "adapter.dora=true"][..], more].concat());
    let losses = |run: &str| -> Vec<f64> {
        metrics(&place.path(run).join("metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    run(&["--steps", "8"]);
    assert!(losses("run").last() < losses("run").first(), "{:?}", losses("run"));
    let config = fs::read_to_string(place.path("run/model/adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["use_dora"].as_bool(), Some(true));
    let adapter = |run: &str| fs::read(place.path(run).join("model/adapter_model.safetensors")).unwrap();
    run(&["--steps", "4", "--output", "halves"]);
    run(&["--steps", "8", "--output", "halves", "--resume"]);
    assert!(adapter("halves") == adapter("run"), "a resumed run ends in other bits");
    let replicas = ["--set", "parallel.dp=2", "--set", "parallel.zero=3"];
    let accumulated = ["--set", "train.accumulate=2"];
    for (output, more) in [("cut", &["--tp", "2"][..]), ("replicas", &replicas), ("accumulated", &accumulated)] {
        run(&[&["--steps", "8", "--output", output, "--set", "train.batch=2"][..], more].concat());
    }
    run(&["--steps", "8", "--output", "small", "--set", "train.batch=2"]);
    let last = |run: &str| *losses(run).last().unwrap();
    assert!((last("cut") - last("small")).abs() < 1e-4, "{} and {}", last("cut"), last("small"));
    let [split, whole] = ["replicas", "accumulated"].map(last);
    assert!((split - whole).abs() < 1e-4, "{split} and {whole}");

    let generate = |model: &[&str]| {
        place.stdout(&[&["generate"], model, &["--greedy", "--tokens", "12", "--prompt", "12 + "]].concat())
    };
    place.stdout(&["export", "run", "--merge", "--output", "merged"]);
    let alone = generate(&["run/model"]);
    assert_eq!(alone, generate(&["base", "--adapter", "run/model"]));
    assert_eq!(alone, generate(&["merged"]));
    let loss = |model: &str| {
        let told = place.stdout(&["eval", "lora.toml", "--model", model]);
        let line = told.lines().find_map(|line| line.strip_prefix("loss")).unwrap_or_else(|| panic!("{told}"));
        line.trim().parse::<f64>().unwrap()
    };
    assert!((loss("run/model") - loss("merged")).abs() < 2e-4, "{} and {}", loss("run/model"), loss("merged"));
    assert!((loss("run/model") - loss("base")).abs() > 1e-3);

    // 14 layers of rank 4, and a magnitude for each output.
    let inspected = place.stdout(&["inspect", "run/model", "--tp", "2"]);
    assert!(inspected.contains("lora_magnitude_vector") && !inspected.contains("squared_norm"), "{inspected}");

    // With a dropout, PEFT's folder can be used but not trained.
    let text = fs::read_to_string(place.path("lora.toml")).unwrap();
    let text = text.replace("kind = \"lora\"\nrank = 4", "path = \"run/model\"");
    fs::write(place.path("more.toml"), text).unwrap();
    let more = ["train", "more.toml", "--set", "sample.prompts=[]", "--steps", "1", "--output", "more"];
    place.stdout(&[&more[..], &["--set", "parallel.dp=2", "--set", "parallel.zero=3"]].concat());
    place.stdout(&["inspect", "run/model", "--dp", "2", "--zero", "3"]);
    let mut config = config;
    config["lora_dropout"] = 0.1.into();
    fs::write(place.path("run/model/adapter_config.json"), config.to_string()).unwrap();
    assert_eq!(alone, generate(&["run/model"]));
    place.refused(&more, &["a dropout of 0.1, with which it cannot be trained", "use a dropout of 0"]);
}

#[test]
fn what_cannot_be_is_told_before_anything_is_trained() {
    let place = adapted();
    place.refused(
        &["train", "lora.toml", "--set", "adapter.targets=[\"query\"]"],
        &[
            "`query` matches nothing in this model",
            "it has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ],
    );
    place.refused(
        &["train", "lora.toml", "--set", "adapter.modules_to_save=[\"lm_head\"]"],
        &["`lm_head` has no weights of its own in this model", "hint: name `embed_tokens`"],
    );
    place.refused(
        &["train", "lora.toml", "--set", "adapter.rank_pattern=[\"query=8\"]"],
        &["the adapter's pattern `query` matches none of the layers", "hint: these are q_proj, k_proj, "],
    );
    place.refused(&["generate", "base", "--adapter", "base", "--prompt", "x"], &["adapter_config.json"]);
    fs::create_dir(place.path("elsewhere")).unwrap();
    place.stdout(&[&TRAIN[..], &["--steps", "1"]].concat());
    let config = fs::read_to_string(place.path("run/model/adapter_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["base_model_name_or_path"] = "meta-llama/Llama-3.2-1B".into();
    fs::write(place.path("elsewhere/adapter_config.json"), config.to_string()).unwrap();
    let weights = place.path("elsewhere/adapter_model.safetensors");
    fs::copy(place.path("run/model/adapter_model.safetensors"), weights).unwrap();
    place.refused(
        &["generate", "elsewhere", "--prompt", "x"],
        &["belongs to the model \"meta-llama/Llama-3.2-1B\", which is no folder here", "--adapter \"elsewhere\""],
    );
    place.stdout(&["train", "tiny.toml", "--steps", "1", "--set", "sample.prompts=[]", "--output", "plain"]);
    place.refused(
        &["export", "plain", "--merge", "--output", "m"],
        &["there is no adapter to merge", "leave out --merge"],
    );
}

/// A copy of a saved adapter as PEFT has it: without a tokenizer.
fn copy_as_peft(place: &Place, from: &str, to: &str) {
    fs::create_dir(place.path(to)).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(place.path(from).join(file), place.path(to).join(file)).unwrap();
    }
}

#[test]
fn the_folder_of_an_adapter_has_the_tokenizer_of_its_base_and_is_merged_without_a_run() {
    let place = adapted();
    place.stdout(&[&TRAIN[..], &["--steps", "4"]].concat());
    copy_as_peft(&place, "run/model", "peft");
    place.stdout(&["export", "run", "--merge", "--output", "expected"]);

    let generate = |model: &str| place.stdout(&["generate", model, "--greedy", "--tokens", "8", "--prompt", "12 + "]);
    assert_eq!(generate("peft"), generate("run/model"));
    assert_eq!(loss(&place, "lora.toml", "peft"), loss(&place, "lora.toml", "run/model"));
    let text = fs::read_to_string(place.path("lora.toml")).unwrap().replace("path = \"base\"", "path = \"peft\"");
    fs::write(place.path("more.toml"), text.split("[adapter]").next().unwrap()).unwrap();
    place.stdout(&["train", "more.toml", "--steps", "1", "--set", "sample.prompts=[]", "--output", "more"]);
    let same = |one: &str, other: &str| fs::read(place.path(one)).unwrap() == fs::read(place.path(other)).unwrap();
    assert!(same("more/model/tokenizer.json", "base/tokenizer.json"));

    // PEFT keeps patterns that match nothing.
    let text = fs::read_to_string(place.path("peft/adapter_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["rank_pattern"] = serde_json::json!({ "query": 8 });
    config["exclude_modules"] = serde_json::json!(["query"]);
    fs::write(place.path("peft/adapter_config.json"), config.to_string()).unwrap();
    assert_eq!(generate("peft"), generate("run/model"));

    let told = place.stdout(&["export", "peft", "--merge", "--output", "merged"]);
    assert!(told.contains("the adapter in `peft` is merged into its model, which is now in `merged`"), "{told}");
    for file in ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert!(same(&format!("merged/{file}"), &format!("expected/{file}")), "{file}");
    }
    place.stdout(&["export", "peft", "--merge", "--output", "merged", "--overwrite", "--dtype", "bf16"]);
    assert!(!same("merged/model.safetensors", "expected/model.safetensors"));

    place.refused(&["export", "peft", "--output", "m"], &["`peft` is the folder of an adapter", "with --merge"]);
    place.refused(&["export", "peft", "--merge"], &["--output is missing", "name a folder for the merged model"]);
    place.refused(&["export", "peft", "--merge", "--output", "merged"], &["`merged` exists already"]);
    place.refused(&["export", "peft", "--merge", "--best", "--output", "m"], &["which has no checkpoints"]);
    place.refused(
        &["export", "run", "--merge", "--model", "base", "--output", "m"],
        &["--model is for the folder of an adapter", "leave --model out"],
    );
    fs::rename(place.path("base"), place.path("moved")).unwrap();
    let merge = ["export", "peft", "--merge", "--output", "again"];
    place.refused(&merge, &["which is no folder here", "hint: give the model's folder with --model FOLDER"]);
    place.stdout(&[&merge[..], &["--model", "moved"]].concat());
    assert!(same("again/model.safetensors", "expected/model.safetensors"));
}

/// A configuration that begins an adapter trains a saved one on, unless it contradicts what that one is.
#[test]
fn a_saved_adapter_goes_on_by_the_configuration_that_it_was_begun_with() {
    let place = adapted();
    let keys = ["--set", "adapter.targets=[\"q_proj\", \"v_proj\"]", "--set", "adapter.rank_pattern=[\"v_proj=2\"]"];
    let begun = [&TRAIN[..], &["--steps", "4", "--set", "adapter.alpha=6"], &keys].concat();
    place.stdout(&begun);
    let losses = |run: &str| -> Vec<f64> {
        metrics(&place.path(run).join("metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    for (run, saved) in [("beside", "adapter.path=run/model"), ("instead", "model.path=run/model")] {
        place.stdout(&[&begun[..], &["--set", saved, "--output", run]].concat());
        assert!(losses(run)[0] < losses("run")[0], "{run}: {:?}", losses(run));
        let config = fs::read_to_string(place.path(run).join("run.toml")).unwrap();
        assert!(config.contains("rank = 4") && config.contains("alpha = 6.0"), "{config}");
        place.stdout(&["export", run, "--merge", "--output", &format!("{run}-merged")]);
    }
    // Keys that are left out are the adapter's.
    let few = ["--steps", "1", "--set", "adapter.path=run/model", "--output", "few", "--set", "adapter.rank=4"];
    let output = place.run(&[&TRAIN[..], &few].concat());
    assert!(output.status.success() && stderr(&output).contains("continues the adapter in \"run/model\""));
    let refused = |more: &[&str], expected: &[&str]| {
        let on = ["--steps", "4", "--set", "adapter.path=run/model", "--output", "refused"];
        place.refused(&[&TRAIN[..], &on, more].concat(), expected);
    };
    let hint = "hint: leave it out to train that adapter on, or begin a new one with its base as model.path";
    refused(
        &["--set", "adapter.rank=8", "--set", "adapter.dropout=0.5"],
        &[
            "`adapter.rank` is 8, but the adapter in \"run/model\" has 4",
            "`adapter.dropout` is 0.5, but the adapter in \"run/model\" has 0",
            hint,
        ],
    );
    for key in [
        "targets=[\"q_proj\", \"k_proj\"]",
        "target_pattern=.*q_proj",
        "rank_pattern=[\"q_proj=2\"]",
        "alpha_pattern=[\"q_proj=2\"]",
        "modules_to_save=[\"norm\"]",
        "layers=[1]",
        "targets=[\"none\"]",
        "target_parameters=[\"mlp.experts.down_proj\"]",
    ] {
        let name = key.split('=').next().unwrap();
        let expected = format!("`adapter.{name}` describes other parameters than the adapter in \"run/model\" has");
        refused(&["--set", &format!("adapter.{key}")], &[&expected, hint]);
    }
}

/// A base whose files have a tensor for each expert, while an adapter has one for all.
#[test]
fn adapters_of_experts_are_trained_resumed_and_merged() {
    let place = Place::new(TINY);
    let sizes = "hidden = 32\nlayers = 2\nheads = 2\nffn = 48\ntied = true";
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
        "num_key_value_heads": 1, "intermediate_size": 48, "vocab_size": 258, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": true,
    });
    fs::write(place.path("config.json"), config.to_string()).unwrap();
    fs::write(place.path("tiny.toml"), TINY.replace(sizes, "config = \"config.json\"")).unwrap();
    place.stdout(&["train", "tiny.toml", "--steps", "3", "--set", "sample.prompts=[]", "--output", "first"]);
    fs::rename(place.path("first/model"), place.path("base")).unwrap();
    let text = TINY.replace(sizes, "path = \"base\"");
    let experts = "target_parameters = [\"experts.gate_up_proj\", \"experts.down_proj\"]\ntargets = [\"none\"]";
    fs::write(place.path("lora.toml"), format!("{text}\n[adapter]\nkind = \"lora\"\nrank = 4\n{experts}\n")).unwrap();
    let run = |more: &[&str]| place.stdout(&[&TRAIN, more].concat());
    run(&["--steps", "8"]);
    let losses: Vec<f64> =
        metrics(&place.path("run/metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert!(losses.last() < losses.first(), "{losses:?}");
    let config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(place.path("run/model/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(config["target_modules"], serde_json::json!([]));
    assert_eq!(config["target_parameters"], serde_json::json!(["experts.gate_up_proj", "experts.down_proj"]));
    let adapter = |run: &str| fs::read(place.path(run).join("model/adapter_model.safetensors")).unwrap();
    run(&["--steps", "4", "--output", "halves"]);
    run(&["--steps", "8", "--output", "halves", "--resume"]);
    assert!(adapter("halves") == adapter("run"), "a resumed run ends in other bits");
    run(&["--steps", "8", "--output", "cut", "--tp", "2"]);
    place.stdout(&["export", "run", "--merge", "--output", "merged"]);
    let told = place.stdout(&["inspect", "run/model"]);
    assert!(told.contains("adapters of 0 layers and 4 parameters of experts"), "{told}");
    let loss = |model: &str| {
        let told = place.stdout(&["eval", "lora.toml", "--model", model]);
        let line = told.lines().find_map(|line| line.strip_prefix("loss")).unwrap_or_else(|| panic!("{told}"));
        line.trim().parse::<f64>().unwrap()
    };
    let (adapted, cut) = (loss("run/model"), loss("cut/model"));
    assert!((adapted - loss("merged")).abs() < 1e-5 && (adapted - cut).abs() < 1e-4, "{adapted}, {cut}");
    assert!((adapted - loss("base")).abs() > 1e-3);
    let on = ["--steps", "1", "--set", "adapter.path=run/model", "--output", "on"];
    place.stdout(&[&TRAIN[..], &on].concat());
    let other = ["--set", "adapter.target_parameters=[\"experts.down_proj\"]"];
    place.refused(
        &[&TRAIN[..], &on, &other].concat(),
        &["`adapter.target_parameters` describes other parameters than the adapter in \"run/model\" has"],
    );
    for (key, value) in [("dropout", "0.1"), ("dora", "true")] {
        place.refused(
            &[&TRAIN[..], &["--set", &format!("adapter.{key}={value}")]].concat(),
            &[&format!("`adapter.{key}` and `adapter.target_parameters` are both set")],
        );
    }
}

#[test]
fn trained_modules_are_told_apart_from_adapters() {
    let place = adapted();
    let whole = ["--set", "adapter.modules_to_save=[\"embed_tokens\", \"norm\"]", "--set", "adapter.keep_tie=true"];
    place.stdout(&[&TRAIN[..], &["--steps", "1"], &whole].concat());
    let told = place.stdout(&["inspect", "run/model"]);
    // 258 tokens and five norms, of 32 numbers each. Adapters of rank 4: four matrices of 32 × 32 and three of 32 × 48 in each layer.
    assert!(told.contains("4.0 K in adapters of 14 layers, 8.4 K whole (embed_tokens, norm). Frozen: "), "{told}");
}

#[test]
fn a_run_and_an_adapter_that_do_not_fit_are_told_the_numbers() {
    let place = adapted();
    place.stdout(&[&TRAIN[..], &["--steps", "4"]].concat());
    place.refused(
        &[&TRAIN[..], &["--steps", "8", "--resume", "--set", "adapter.rank=8"]].concat(),
        &[
            "lora_A.weight` as [4, 32], this run needs [8, 32]",
            "has rank 4 there and this run's has 8: set adapter.rank",
        ],
    );
    let deeper = ["--set", "model.layers=3", "--output", "deeper", "--steps", "1", "--set", "sample.prompts=[]"];
    place.stdout(&[&["train", "tiny.toml"], &deeper[..]].concat());
    let of_depth = ["--set", "model.layers=1", "--output", "flat", "--steps", "1", "--set", "sample.prompts=[]"];
    place.stdout(&[&["train", "tiny.toml"], &of_depth[..]].concat());
    place.refused(
        &["inspect", "flat/model", "--adapter", "run/model"],
        &["has layers up to number 1, this model's last is number 0", "the model that the adapter was trained on, \"/"],
    );
    let text = fs::read_to_string(place.path("run/model/adapter_config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["target_modules"] = "all-linear".into();
    fs::write(place.path("run/model/adapter_config.json"), config.to_string()).unwrap();
    place.refused(
        &["inspect", "deeper/model", "--adapter", "run/model"],
        &["has layers up to number 1, this model's last is number 2"],
    );
}

/// The loss that `eval` tells.
fn loss(place: &Place, config: &str, model: &str) -> f64 {
    let told = place.stdout(&["eval", config, "--model", model]);
    let line = told.lines().find_map(|line| line.strip_prefix("loss")).unwrap_or_else(|| panic!("{told}"));
    line.trim().parse().unwrap()
}

#[test]
fn an_adapter_on_a_base_in_4_bits_is_trained_used_and_merged() {
    let place = adapted();
    let text = fs::read_to_string(place.path("lora.toml")).unwrap();
    fs::write(place.path("qlora.toml"), text.replace("kind = \"lora\"", "kind = \"lora\"\nbase = \"nf4\"")).unwrap();
    let train = |more: &[&str]| place.stdout(&[&["train", "qlora.toml"], &TRAIN[2..], more].concat());
    let told = train(&["--steps", "8"]);
    assert!(told.contains("evenkeel generate run/model --base nf4"), "{told}");
    let losses: Vec<f64> =
        metrics(&place.path("run/metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert!(losses.last() < losses.first(), "{losses:?}");
    let adapter = |run: &str| fs::read(place.path(run).join("model/adapter_model.safetensors")).unwrap();
    train(&["--steps", "4", "--output", "halves"]);
    train(&["--steps", "8", "--output", "halves", "--resume"]);
    assert!(adapter("halves") == adapter("run"), "a resumed run ends in other bits");

    let told = place.stdout(&["export", "run", "--merge", "--output", "merged", "--dtype", "f32"]);
    assert!(told.contains("merged into what the 4-bit weights stand for"), "{told}");
    let generate = |model: &[&str]| {
        place.stdout(&[&["generate"], model, &["--greedy", "--tokens", "12", "--prompt", "12 + "]].concat())
    };
    assert_eq!(generate(&["run/model", "--base", "nf4"]), generate(&["merged"]));
    assert_eq!(loss(&place, "qlora.toml", "run/model"), loss(&place, "qlora.toml", "merged"));
    // The base is another if it is not held in 4 bits.
    assert!(loss(&place, "qlora.toml", "run/model") != loss(&place, "lora.toml", "run/model"));
    let inspected = place.stdout(&["inspect", "run/model", "--base", "nf4"]);
    assert!(inspected.contains("in 4.5 bits each"), "{inspected}");
    // DoRA's magnitudes begin as the norms of what the 4-bit weights stand for.
    let dora = ["--steps", "4", "--set", "adapter.dora=true", "--output"];
    train(&[&dora[..], &["dora"]].concat());
    let of_dora: Vec<f64> =
        metrics(&place.path("dora/metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert!((of_dora[0] - losses[0]).abs() < 1e-4, "{of_dora:?} {losses:?}");
    place.stdout(&["export", "dora", "--merge", "--output", "merged-dora", "--dtype", "f32"]);
    let [alone, merged] = ["dora/model", "merged-dora"].map(|model| loss(&place, "qlora.toml", model));
    assert!((alone - merged).abs() < 2e-4, "{alone} and {merged}");
    let output = place.run(&["train", "qlora.toml", "--tp", "2", "--steps", "1", "--output", "cut"]);
    let told = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(
        told.contains("is held in 4 bits, in blocks of 64 numbers, and only whole blocks can be cut off"),
        "{told}"
    );
}

/// The golden folder as transformers and bitsandbytes saved it, with the tokenizer of bytes.
#[test]
fn a_folder_in_4_bits_is_inspected_evaluated_adapted_and_merged() {
    let place = adapted();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/llama_nf4");
    let text = fs::read_to_string(place.path("lora.toml")).unwrap();
    assert!(text.contains("path = \"base\""));
    let text = text.replace("path = \"base\"", &format!("path = {golden:?}"));
    let text = text.replace("[data]", "[data]\ntokenizer = \"bytes\"");
    fs::write(place.path("folder.toml"), &text).unwrap();
    let inspected = place.stdout(&["inspect", golden, "--lora", "4", "--tp", "2"]);
    assert!(inspected.contains("131.1 K in 4.5 bits each") && inspected.contains("To train it"), "{inspected}");
    let inspected = place.stdout(&["inspect", golden]);
    let not_trained = "Weights in 4 bits cannot be trained themselves: --lora RANK tells";
    assert!(inspected.contains(not_trained) && !inspected.contains("To train it"), "{inspected}");
    fs::write(place.path("whole.toml"), text.split("[adapter]").next().unwrap()).unwrap();
    place.refused(&["train", "whole.toml"], &["the model's weights are in 4 bits, which cannot be trained themselves"]);
    place.refused(
        &["train", "folder.toml", "--tp", "2", "--set", "balance.mode=auto"],
        &["`balance.mode` moves or prunes columns of layers"],
    );
    place.refused(
        &["train", "folder.toml", "--set", "adapter.base=bf16", "--set", "train.dtype=bf16"],
        &["but the weights of `model.path` are in 4 bits"],
    );
    let train = |more: &[&str]| {
        place.stdout(&[&["train", "folder.toml", "--set", "sample.prompts=[]", "--steps", "4"], more].concat())
    };
    let told = train(&["--set", "adapter.base=nf4", "--output", "named"]);
    assert!(told.contains("evenkeel generate named/model --prompt"), "{told}");
    train(&[]);
    train(&["--tp", "2", "--output", "cut"]);
    train(&["--dp", "2", "--set", "parallel.zero=3", "--output", "replicas"]);
    let losses = |run: &str| -> Vec<f64> {
        metrics(&place.path(run).join("metrics.jsonl")).iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    for (ours, theirs) in losses("run").iter().zip(losses("cut")) {
        assert!((ours - theirs).abs() < 1e-4, "{ours} and {theirs}");
    }
    place.stdout(&["export", "run", "--merge", "--output", "merged", "--dtype", "f32"]);
    let config = fs::read_to_string(place.path("merged/config.json")).unwrap();
    assert!(!config.contains("quantization_config"), "{config}");
    assert_eq!(loss(&place, "folder.toml", "run/model"), loss(&place, "folder.toml", "merged"));
}
