//! Slow ranks through the binary.

mod support;

use std::fs;

use support::{Place, compare_curves, metrics, stderr};

const TINY: &str = r#"
[model]
hidden = 64
layers = 2
heads = 4
ffn = 256

[data]
source = "synthetic"
records = 100_000
sequence = 64
holdout = 50

[train]
steps = 40
batch = 8
lr = 1e-2

[parallel]
tp = 2

[balance]
mode = "reshard"
stragglers = ["1:6@1-30"]

[output]
checkpoint_every = 20
"#;

/// What was written down of each step.
fn steps(place: &Place, run: &str) -> Vec<serde_json::Value> {
    let lines = metrics(&place.path(run).join("metrics.jsonl"));
    lines.into_iter().filter(|line| line["loss"].is_f64()).collect()
}

fn losses(steps: &[serde_json::Value]) -> Vec<f64> {
    steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

fn columns(line: &serde_json::Value) -> Vec<u64> {
    line["ranks"].as_array().unwrap().iter().map(|rank| rank["columns"].as_u64().unwrap()).collect()
}

#[test]
fn a_slow_rank_gets_less_to_do_and_the_curve_stays() {
    let place = Place::new(TINY);
    let off = place.run(&["train", "tiny.toml", "--output", "off", "--set", "balance.mode=off"]);
    assert!(off.status.success(), "{}", stderr(&off));
    assert!(stderr(&off).contains("emulated slow ranks: rank 1 6×"), "{}", stderr(&off));
    let on = place.run(&["train", "tiny.toml", "--output", "on", "--set", "balance.calibrate=false"]);
    let said = stderr(&on);
    assert!(on.status.success(), "{said}");
    assert!(said.contains("rank 1 computes") && said.contains("slower than the fastest"), "{said}");
    let (off, on) = (steps(&place, "off"), steps(&place, "on"));
    compare_curves("balanced", &losses(&on), &losses(&off), [0.0, 1e-4]);
    assert_eq!(columns(&on[0]), [128, 128]);
    assert!(on.iter().any(|step| columns(step)[1] < 90), "{said}");
    assert!(on.iter().all(|step| columns(step).iter().sum::<u64>() == 256), "{said}");
    for rank in on.iter().flat_map(|step| step["ranks"].as_array().unwrap()) {
        assert!(rank["compute_s"].as_f64().unwrap() > 0.0 && rank["wait_s"].as_f64().unwrap() >= 0.0, "{rank}");
    }
    assert!(off[0].get("ranks").is_none());
}

#[test]
fn ranks_are_timed_before_the_first_step_and_a_resumed_run_keeps_its_widths() {
    let place = Place::new(TINY);
    let output = place.run(&["train", "tiny.toml", "--output", "run", "--steps", "20"]);
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("ranks are unequal: the work is divided"), "{said}");
    let before = steps(&place, "run");
    assert!(columns(&before[0])[1] < 128, "{}", before[0]);
    let last = columns(&before[19]);
    let output = place.run(&["train", "tiny.toml", "--output", "run", "--steps", "22", "--resume"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(columns(&steps(&place, "run")[20]), last);
}

#[test]
fn every_exact_mode_on_every_kind_of_cut_keeps_the_curve() {
    let place = Place::new(TINY);
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let parallel_residual = fs::read_to_string(root.join("golden/gpt_neox/config.json")).unwrap();
    let mut parallel_residual: serde_json::Value = serde_json::from_str(&parallel_residual).unwrap();
    parallel_residual["vocab_size"] = 300.into();
    fs::write(place.path("neox.json"), parallel_residual.to_string()).unwrap();
    let sizes = TINY.find("[data]").unwrap();
    fs::write(place.path("neox.toml"), format!("[model]\nconfig = \"neox.json\"\n\n{}", &TINY[sizes..])).unwrap();
    let few_heads: &[&str] = &["tiny.toml", "--set", "model.kv_heads=1"];
    let split_state: &[&str] = &["tiny.toml", "--dp", "2", "--set", "parallel.zero=3", "--set", "train.batch=4"];
    let cases: [(&[&str], &[&str]); 5] = [
        (&["tiny.toml"], &["migrate", "semi", "auto"]),
        (few_heads, &["reshard", "auto"]),
        (split_state, &["reshard"]),
        (&["neox.toml", "--set", "data.sequence=32"], &["reshard", "auto"]),
        (&["tiny.toml", "--set", "parallel.sequence_parallel=false"], &["auto"]),
    ];
    for (run, modes) in cases {
        let train = |mode: &str| {
            let set = format!("balance.mode={mode}");
            // Ranks that were timed beforehand would have nothing to move.
            let slow = ["--set", "balance.stragglers=[\"1:6\"]", "--set", "balance.calibrate=false"];
            let more = ["--steps", "16", "--set", &set, "--set", "output.overwrite=true", "--output", "run"];
            let output = place.run(&[&["train"], run, &more, &slow].concat());
            assert!(output.status.success(), "{run:?} {mode}: {}", stderr(&output));
            steps(&place, "run")
        };
        let expected = losses(&train("off"));
        for mode in modes {
            // When a rank has been slow for long enough is a matter of timing.
            let has_moved = (0..5).any(|_| {
                let found = train(mode);
                compare_curves(&format!("{run:?} {mode}"), &losses(&found), &expected, [0.0, 1e-4]);
                found.iter().any(|step| columns(step) != columns(&found[0]))
            });
            assert!(has_moved, "{run:?} {mode}: nothing was done about a rank that is slow");
        }
    }
}

#[test]
fn a_rank_that_may_leave_something_out_does_and_says_so() {
    let place = Place::new(TINY);
    let set = ["balance.mode=resize", "balance.gamma_max=0.5", "balance.period=4", "balance.calibrate=false"];
    let set: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
    let output = place.run(&[vec!["train", "tiny.toml", "--output", "run"], set].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("rank 1 prunes 50 %"), "{}", stderr(&output));
    let left_out = |step: &serde_json::Value| step["ranks"][1]["left_out"].as_f64().unwrap();
    let steps = steps(&place, "run");
    assert!(left_out(&steps[0]) == 0.0 && steps.iter().any(|step| left_out(step) > 0.45), "{}", stderr(&output));
}

#[test]
fn a_rank_that_may_do_both_is_relieved_and_keeps_to_its_limit() {
    let place = Place::new(TINY);
    let set = [
        "balance.mode=semi",
        "balance.gamma_max=0.5",
        "balance.period=4",
        "balance.calibrate=false",
        "balance.stragglers=[\"1:6\"]",
    ];
    let set: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
    let output = place.run(&[vec!["train", "tiny.toml", "--output", "run"], set].concat());
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    // How much of each it does is a matter of timing.
    let is_relieved =
        |line: &str| line.contains("rank 1 computes") && (line.contains("migrated") || line.contains("prunes"));
    assert!(said.lines().any(is_relieved), "{said}");
    let steps = steps(&place, "run");
    let left_out = |step: &serde_json::Value| step["ranks"][1]["left_out"].as_f64().unwrap();
    assert_eq!(steps.len(), 40);
    assert!(steps.iter().all(|step| (0.0..=0.5).contains(&left_out(step))), "{said}");
    assert!(steps.iter().any(|step| columns(step)[1] < 128 || left_out(step) > 0.05), "{said}");
}

#[test]
fn a_run_that_ends_soon_after_a_change_says_what_is_known_of_it() {
    let place = Place::new(TINY);
    let mut said = String::new();
    // When ranks are slow for long enough is a matter of timing, and not before the sixth step.
    for last in ["7", "8", "9", "10", "12", "16", "24"] {
        let set = ["--set", "balance.calibrate=false", "--set", "output.overwrite=true"];
        let output = place.run(&[&["train", "tiny.toml", "--output", "run", "--steps", last], &set[..]].concat());
        said = stderr(&output);
        assert!(output.status.success(), "{said}");
        let steps = steps(&place, "run");
        if columns(&steps[0]) != columns(&steps[steps.len() - 1]) {
            assert!(said.contains("rank 1 computes") && said.contains("moved"), "{said}");
            return;
        }
    }
    panic!("nothing was done about a rank that is slow: {said}");
}

#[test]
fn settings_that_contradict_each_other_are_told() {
    let place = Place::new(TINY);
    for (extra, expected) in [
        (&["balance.mode=auto", "parallel.tp=1", "balance.stragglers=[]"][..], "no other rank to share work with"),
        (&["balance.mode=resize"], "gamma_max"),
        (&["balance.gamma_max=0.5"], "prunes nothing"),
        (&["balance.mode=auto", "balance.selection=random"], "is 0, which prunes nothing"),
        (&["balance.stragglers=[\"5:2\"]"], "ranks are 0 to 1"),
        (&["balance.stragglers=[\"1x2\"]"], "is no straggler"),
        (&["balance.mode=migrate", "parallel.dp=2", "parallel.zero=2"], "works with `parallel.zero` <= 1 only"),
        (&["balance.mode=fast"], "reshard"),
    ] {
        let set: Vec<&str> = extra.iter().flat_map(|set| ["--set", set]).collect();
        let output = place.run(&[vec!["train", "tiny.toml"], set].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{extra:?}: {said}");
        assert!(said.contains(expected), "{extra:?}: {said}");
    }
}

#[test]
fn the_bench_compares_modes_and_draws_them() {
    let place = Place::new(TINY);
    let sizes = ["--hidden", "128", "--layers", "1", "--heads", "4", "--ffn", "512", "--vocab", "256"];
    let step = ["--batch", "2", "--sequence", "64", "--steps", "20", "--modes", "reshard"];
    let bench = |more: &[&str]| place.stdout(&[&["bench", "stragglers"], &sizes[..], &step, more].concat());
    let table = bench(&["--case", "1,4", "--svg", "out.svg"]);
    assert!(table.contains("an emulated throttle") && table.contains("rank 1 of 2 at 4"), "{table}");
    let drawing = fs::read_to_string(place.path("out.svg")).unwrap();
    roxmltree::Document::parse(&drawing).expect("an SVG is XML");
    let json: serde_json::Value = serde_json::from_str(&bench(&["--simulate", "4", "--json"])).unwrap();
    assert!(json["what"].as_str().unwrap().contains("simulated"), "{json}");
    let modes = json["cases"][0]["modes"].as_array().unwrap();
    let slowed =
        |mode: &serde_json::Value| mode["slowed_s"].as_f64().unwrap() / mode["undisturbed_s"].as_f64().unwrap();
    // Without noise, doing nothing is as slow as the slowest, and doing something is not.
    assert!((slowed(&modes[0]) - 2.0).abs() < 1e-9, "{json}");
    assert!(slowed(&modes[1]) < 2.0, "{json}");
}

#[test]
fn what_watching_costs_is_measured_beside_steps_without() {
    let place = Place::new(TINY);
    let sizes = ["--hidden", "128", "--layers", "1", "--heads", "4", "--ffn", "512", "--vocab", "256", "--steps", "10"];
    let told = place.stdout(&[&["bench", "stragglers", "--overhead", "--json"], &sizes[..]].concat());
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let [plain_s, watched_s, decision_s] =
        ["plain_s", "watched_s", "decision_s"].map(|key| told[key].as_f64().unwrap());
    assert!(plain_s > 0.0 && watched_s > 0.0 && decision_s > 0.0, "{told}");
    assert_eq!(told["decision_ranks"], 64);
    assert!(told["overhead"].is_f64(), "{told}");
}
