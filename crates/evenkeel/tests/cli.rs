//! The binary, as a person runs it.

#[path = "../../../golden/cases.rs"]
mod cases;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn evenkeel(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_evenkeel")).args(arguments).output().expect("the binary starts")
}

/// Runs with the arguments of a line.
fn run_line(line: &str) -> Output {
    evenkeel(&line.split(' ').collect::<Vec<_>>())
}

fn golden(case: &str) -> String {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden").join(case);
    path.to_str().expect("a readable path").to_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("text")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}

#[test]
fn doctor_says_how_products_are_computed() {
    let output = evenkeel(&["doctor"]);
    assert!(output.status.success());
    for line in ["cores", "memory", "vectors", "f32 products", "bf16 products"] {
        assert!(stdout(&output).contains(line), "{}", stdout(&output));
    }
}

#[test]
fn logs_are_written_on_request_alone() {
    let bench = |filter: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        command.args(["bench", "step", "--layers", "1", "--hidden", "32", "--heads", "2", "--vocab", "64"]);
        command.args(["--sequence", "8", "--steps", "1", "--threads", "1"]);
        command.env_remove("EVENKEEL_LOG").envs(filter.map(|filter| ("EVENKEEL_LOG", filter)));
        command.output().expect("the binary starts")
    };
    let logged = bench(Some("evenkeel_train=debug"));
    assert!(logged.status.success() && stderr(&logged).contains("wrote a program"), "{}", stderr(&logged));
    assert!(!stderr(&bench(None)).contains("wrote a program"));
    let refused = bench(Some("evenkeel=loud"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("EVENKEEL_LOG is `evenkeel=loud`"), "{}", stderr(&refused));
}

#[test]
fn inspect_describes_a_model_and_what_training_it_takes() {
    let output = evenkeel(&["inspect", &golden("gemma3"), "--batch", "2", "--sequence", "16"]);
    assert!(output.status.success(), "{}", stderr(&output));
    for text in ["Gemma3ForCausalLM", "vocabulary     128, tied", "layers         3", "peak memory", "bf16"] {
        assert!(stdout(&output).contains(text), "{}", stdout(&output));
    }
    assert!(stdout(&evenkeel(&["inspect", &golden("vit")])).contains("10 labels"));
}

#[test]
fn inspect_takes_every_golden_model_as_it_is() {
    for case in cases::CASES {
        let output = evenkeel(&["inspect", &golden(case)]);
        assert!(output.status.success(), "{case}: {}", stderr(&output));
    }
}

#[test]
fn what_cannot_be_is_refused_without_a_panic() {
    let gpt2 = golden("gpt2");
    let vit = golden("vit");
    let cases: [(&[&str], &str); 24] = [
        (&["inspect", &gpt2, "--sequence", "33"], "32 positions"),
        (&["inspect", &vit, "--batch", "65536"], "too large"),
        (&["bench", "step", "--layers", "4096"], "this machine has"),
        (&["bench", "step", "--batch", "65536", "--sequence", "1048576"], "at most"),
        (&["bench", "step", "--sequence", "1"], "from 2"),
        (&["bench", "step", "--threads", "0"], "from 1"),
        (&["bench", "step", "--steps", "18446744073709551615"], "from 1"),
        (&["bench", "step", "--heads", "0"], "num_attention_heads"),
        (&["bench", "schedules", "--link-gb-per-s", "0"], "above 0"),
        (&["bench", "schedules", "--link-latency-us", "3"], "--link-gb-per-s"),
        (&["bench", "schedules", "--parts", "0"], "from 1"),
        (&["bench", "schedules", "--dp", "8"], "4 sequences"),
        (&["bench", "schedules", "--batch", "65536", "--sequence", "1048576"], "at most"),
        (&["bench", "pipelines", "--pp", "1"], "from 2"),
        (&["bench", "pipelines", "--micros", "8"], "--micros is 8, a step has 4 sequences"),
        (&["bench", "pipelines", "--orders", "2f2b"], "there are gpipe, 1f1b"),
        (&["bench", "pipelines", "--cuts", "cost,2x2"], "layers such as 1+3"),
        (&["bench", "pipelines", "--cuts", "1+1+2"], "no order has as many stages"),
        (&["bench", "pipelines", "--cuts", "1+2"], "--cuts has 3 layers together"),
        (&["bench", "pipelines", "--pp", "16"], "lower --pp"),
        (&["bench", "pipelines", "--slow", "2:2"], "the last is 1"),
        (&["bench", "all-reduce", "--ranks", "256", "--mib", "65536"], "this machine has"),
        (&["bench", "all-reduce", "--ranks", "1"], "from 2"),
        (&["bench", "all-reduce", "--mib", "4,0"], "from 1"),
    ];
    for (arguments, expected) in cases {
        let output = evenkeel(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{arguments:?}: {}", stderr(&output));
    }
}

#[test]
fn mistakes_exit_with_2_and_a_hint() {
    let output = evenkeel(&["inspect", "no-such-folder"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).starts_with("error: ") && stderr(&output).contains("no-such-folder"),
        "{}",
        stderr(&output)
    );
    let output = evenkeel(&["bench", "step", "--heads", "7"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("hidden_size"), "{}", stderr(&output));
}

#[test]
fn bench_step_reports_speed_memory_and_a_finite_loss() {
    let tiny = "bench step --hidden 32 --layers 1 --heads 2 --kv-heads 1 --ffn 48 --vocab 64 --batch 2 --sequence 16";
    for dtype in ["f32", "bf16"] {
        let line = format!("{tiny} --steps 3 --warmup 1 --json --dtype {dtype}");
        let output = run_line(&line);
        assert!(output.status.success(), "{}", stderr(&output));
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
        assert!(json["tokens_per_s"].as_f64().unwrap() > 0.0 && json["peak_bytes"].as_u64().unwrap() > 0);
        assert!(json["last_loss"].as_f64().unwrap().is_finite(), "{json}");
    }
    let output = run_line(&format!("{tiny} --roofline --recompute"));
    assert!(stdout(&output).contains("AdamW") && stdout(&output).contains("of the step"), "{}", stdout(&output));
}

#[test]
fn bench_schedules_compares_them_and_writes_what_ran_when() {
    let folder = tempfile::tempdir().unwrap();
    let traces = folder.path().join("traces");
    let sizes = "--hidden 32 --layers 2 --heads 2 --vocab 64 --batch 4 --sequence 16 --rounds 2 --parts 1,2";
    let line = format!("bench schedules {sizes} --link-gb-per-s 1 --trace {}", traces.display());
    let output = run_line(&line);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for expected in ["emulated link", "cross-pass", "A run with schedule oases would take"] {
        assert!(text.contains(expected), "{text}");
    }
    for name in ["default-1.svg", "oases-2.svg", "oases-2.json"] {
        assert!(traces.join(name).metadata().unwrap().len() > 1000, "{name}");
    }
    let line = format!("bench schedules {sizes} --whole-stream --references --json");
    let json: serde_json::Value = serde_json::from_str(&stdout(&run_line(&line))).expect("one JSON object");
    let per_layer = |json: &serde_json::Value, schedule: &str, parts: u64, key: &str| {
        let mut rows = json["schedules"].as_array().expect("a list").iter();
        let row = rows.find(|row| row["schedule"] == schedule && row["parts"] == parts).expect("a row");
        row[key].as_u64().expect("a number")
    };
    let found = [
        ("default", 1),
        ("saved-comm", 1),
        ("cross-pass", 2),
        ("oases", 2),
        ("default-reference", 1),
        ("cross-pass-reference", 2),
    ]
    .map(|(name, parts)| per_layer(&json, name, parts, "reductions_per_layer"));
    assert_eq!(found, [5, 4, 10, 8, 6, 12]);
    // Split, what is left to others is gathered behind every reduction, and once more to compute from again.
    let line = format!("bench schedules {sizes} --split-stream --json");
    let split: serde_json::Value = serde_json::from_str(&stdout(&run_line(&line))).expect("one JSON object");
    let keys = ["reductions_per_layer", "gathers_per_layer", "traffic_bytes_per_layer"];
    let of = |json, name, parts| keys.map(|key| per_layer(json, name, parts, key));
    let stream = 32 * 4 * 4 * 16;
    assert_eq!(of(&json, "oases", 2), [8, 0, 4 * stream]);
    assert_eq!(of(&split, "oases", 2), [8, 12, 5 * stream]);
    assert_eq!(of(&split, "none", 1), [4, 4, 4 * stream]);
    assert_eq!([&json, &split].map(|json| json["stream_is_split"].as_bool()), [Some(false), Some(true)]);
}

#[test]
fn bench_pipelines_compares_orders_and_cuts_with_one_rank_and_draws_the_fastest() {
    let folder = tempfile::tempdir().unwrap();
    let drawing = folder.path().join("fastest.svg");
    let sizes = "--hidden 32 --layers 3 --heads 2 --vocab 64 --batch 4 --rounds 1 --threads 2";
    let line = format!("bench pipelines {sizes} --sequence 16 --svg {}", drawing.display());
    let output = run_line(&line);
    assert!(output.status.success(), "{}", stderr(&output));
    for expected in
        ["pp 2 × 1 core", "one rank × 1 core", "one rank × 2 cores", "1f1b", "interleaved", "zb-v", "simulated"]
    {
        assert!(stdout(&output).contains(expected), "{}", stdout(&output));
    }
    let drawn = std::fs::read_to_string(&drawing).unwrap();
    assert!(drawn.contains("on 2 places, 4 × 16 tokens in 4 micro-batches"), "{drawn}");
    let cases = "--orders gpipe,1f1b --cuts cost,1+2 --micros 2,4 --lengths 8,16 --slow 1:3";
    let line = format!("bench pipelines {sizes} {cases} --json");
    let output = run_line(&line);
    assert!(output.status.success(), "{}", stderr(&output));
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
    let cases = json["cases"].as_array().expect("a list");
    assert_eq!(cases.len(), 2 * 2 * (1 + 2 * 2), "{json}");
    for case in cases {
        let places = if case["order"].is_null() { 1 } else { 2 };
        assert_eq!([&case["units"], &case["peak_bytes"]].map(|list| list.as_array().unwrap().len()), [places; 2]);
        assert!(case["tokens_per_s"].as_f64().unwrap() > 0.0, "{case}");
        let shares = ["idle_share", "simulated_idle_share"].map(|key| case[key].as_f64().unwrap());
        assert!(shares.iter().all(|share| (0.0..1.0).contains(share)), "{case}");
    }
    let by_hand = cases.iter().find(|case| case["cut"] == "1+2").expect("a case");
    assert_eq!(by_hand["units"], serde_json::json!([3, 5]));
    // GPipe keeps every micro-batch until it goes backward.
    let peak = |order: &str| {
        let mut cases = cases.iter();
        let case =
            cases.find(|it| it["order"] == order && it["micros"] == 4 && it["sequence"] == 16 && it["cut"] == "1+2");
        case.expect("a case")["peak_bytes"][1].as_u64().unwrap()
    };
    assert!(peak("gpipe") > peak("1f1b"));
}

#[test]
fn bench_pipelines_has_windows_and_frozen_parameters() {
    let run = |options: &str| {
        let sizes = "--hidden 32 --layers 3 --heads 2 --vocab 64 --batch 2 --sequence 16 --rounds 1 --threads 2";
        let line = format!("bench pipelines {sizes} --micros 2 --orders 1f1b {options}");
        let output = run_line(&line);
        assert!(output.status.success(), "{options}: {}", stderr(&output));
        stdout(&output)
    };
    let json = |options: &str| -> serde_json::Value { serde_json::from_str(&run(options)).expect("one JSON object") };
    let windows = "--window 8 --dense 1";
    let cases = "--cuts cost,1+2 --json";
    let trained = json(&format!("{windows} {cases}"));
    let frozen = json(&format!("{windows} --frozen mlp {cases}"));
    let again = json(&format!("{windows} --recompute {cases}"));
    assert_eq!([&frozen["window"], &frozen["dense_layers"]], [&serde_json::json!(8), &serde_json::json!([1])]);
    assert_eq!(frozen["parameters"], trained["parameters"]);
    // Gate, up and down of three layers.
    assert_eq!([&trained, &frozen].map(|run| run["frozen_parameters"].as_u64().unwrap()), [0, 3 * 3 * 32 * 88]);
    assert_eq!([&frozen, &again].map(|run| run["recompute"].as_bool().unwrap()), [false, true]);
    let peaks = |run: &serde_json::Value| -> Vec<u64> {
        let by_hand = run["cases"].as_array().unwrap().iter().find(|case| case["cut"] == "1+2").expect("a case");
        by_hand["peak_bytes"].as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap()).collect()
    };
    for smaller in [&frozen, &again] {
        assert!(peaks(smaller).iter().zip(peaks(&trained)).all(|(ours, whole)| *ours < whole), "{smaller} {trained}");
    }
    let text = run("--window 8 --dense 0,2 --frozen mlp,embed_tokens");
    for expected in ["of them frozen", "windows of 8 tokens except in layers [0, 2]"] {
        assert!(text.contains(expected), "{text}");
    }
    assert!(!run("--window 8 --recompute").contains("frozen"));
}

#[test]
fn bench_pipelines_refuses_what_does_not_suit_the_layers_or_the_device() {
    let cases = [
        ("--frozen mlp,expert", "--frozen has `expert`", "model.layers.0.mlp.up_proj.weight"),
        ("--frozen model,lm_head", "leaves nothing to train", "lm_head.weight"),
        ("--window 8 --dense 1,4", "--dense names layer 4, but there are 4", "use more --layers"),
        ("--dense 1", "--window <TOKENS>", "--help"),
        ("--device cuda --slow 1:2", "--slow slows down the kernels of cores", "use --virtual-gpus of unequal sizes"),
        ("--device cuda --virtual-gpus 80", "--virtual-gpus has 1 numbers", "give one for each rank"),
        ("--device cuda --threads 2", "--threads are a CPU's", "use --device cpu"),
        ("--device cuda --pp 17 --layers 17", "on GPUs there can be 16 at most", "use fewer"),
        ("--virtual-gpus 80,40", "--virtual-gpus are parts of a GPU", "use --device cuda, too"),
    ];
    for (options, what, hint) in cases {
        let line = format!("bench pipelines {options}");
        let output = run_line(&line);
        assert_eq!(output.status.code(), Some(2), "{options}: {}", stderr(&output));
        for expected in [what, hint] {
            assert!(stderr(&output).contains(expected), "{options}: {}", stderr(&output));
        }
    }
}

#[test]
fn bench_all_reduce_reports_each_size() {
    for dtype in ["f32", "bf16"] {
        let line = format!("bench all-reduce --ranks 3 --mib 1,2 --turns 2 --json --dtype {dtype}");
        let output = run_line(&line);
        assert!(output.status.success(), "{}", stderr(&output));
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
        let sizes = json["sizes"].as_array().expect("a list");
        assert_eq!(sizes.len(), 2, "{json}");
        for (size, mib) in sizes.iter().zip([1, 2]) {
            assert_eq!(size["bytes"], mib << 20);
            let [best, median] = ["min_s", "median_s"].map(|key| size[key].as_f64().expect("a number"));
            assert!(0.0 < best && best <= median && size["bytes_per_s"].as_f64().unwrap() > 0.0, "{json}");
        }
    }
    let text = stdout(&evenkeel(&["bench", "all-reduce", "--mib", "1", "--turns", "1"]));
    assert!(text.contains("1.0 MiB") && text.contains("GB/s"), "{text}");
}
