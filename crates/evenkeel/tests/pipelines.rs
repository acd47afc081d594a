//! Runs in stages through the binary.

mod support;

use std::fs;

use support::{Place, compare_curves, stderr};

const TINY: &str = r#"
[model]
hidden = 32
layers = 4
heads = 4
kv_heads = 2
ffn = 48

[data]
source = "synthetic"
records = 100_000
sequence = 64
holdout = 50

[train]
steps = 8
batch = 2
accumulate = 4
lr = 1e-2

[output]
checkpoint_every = 4
"#;

fn losses(place: &Place, run: &str) -> Vec<f64> {
    support::losses(&place.path(run).join("metrics.jsonl"))
}

#[test]
fn stages_give_the_run_of_one_rank_and_resume_on_any_number_of_them() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--output", "one"]);
    let alone = losses(&place, "one");
    for (run, extra) in [
        ("1f1b", vec!["--pp", "2"]),
        ("zb-h1", vec!["--pp", "3", "--set", "parallel.order=zb-h1", "--set", "train.recompute=true"]),
        ("zb-v", vec!["--pp", "2", "--set", "parallel.order=zb-v", "--tp", "2"]),
        ("by-hand", vec!["--pp", "2", "--set", "parallel.order=gpipe", "--set", "parallel.stage_layers=[1, 3]"]),
    ] {
        let output = place.run(&[vec!["train", "tiny.toml", "--output", run], extra].concat());
        let said = stderr(&output);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("pp ") && said.contains("stages ("), "{said}");
        compare_curves(run, &losses(&place, run), &alone, [1e-4, 0.0]);
    }
    let said = stderr(&place.run(&[
        "train",
        "tiny.toml",
        "--output",
        "new",
        "--pp",
        "2",
        "--set",
        "parallel.stage_layers=[1,3]",
    ]));
    assert!(said.contains("embedding to mlp 0 | attention 1 to head"), "{said}");
    for (run, flags) in [("1f1b", &["--pp", "1"][..]), ("zb-h1", &["--pp", "2", "--set", "parallel.order=interleaved"])]
    {
        fs::remove_dir_all(place.path(run).join("checkpoints/step-00000008")).unwrap();
        let said = stderr(&place.run(&[&["train", "tiny.toml", "--output", run, "--resume"], flags].concat()));
        assert!(said.contains("resumes from") && said.contains("changed settings"), "{said}");
        compare_curves(run, &losses(&place, run), &alone, [1e-4, 0.0]);
    }
    // What is saved is an ordinary folder.
    place.stdout(&["generate", "zb-v/model", "--prompt", "1 + ", "--tokens", "3"]);
}

/// The messages of a run of two places whose second one is such a straggler.
fn said_of_straggler(place: &Place, straggler: &str, steps: &str) -> String {
    let straggler = format!("balance.stragglers=[\"{straggler}\"]");
    let slow = ["--set", &straggler, "--set", "model.layers=8", "--steps", steps];
    let output = place.run(&[&["train", "tiny.toml", "--output", "slow", "--pp", "2"][..], &slow].concat());
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn a_place_that_becomes_slow_gives_layers_away() {
    let place = Place::new(TINY);
    let said = said_of_straggler(&place, "1:8@3-100", "24");
    assert!(said.contains("as long at place 1 as at the fastest") && said.contains("cut anew after step"), "{said}");
    let metrics = fs::read_to_string(place.path("slow/metrics.jsonl")).unwrap();
    let steps = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let units = |step: &serde_json::Value| [0, 1].map(|place| step["ranks"][place]["units"].as_u64());
    let units: Vec<_> = steps.filter(|step| step["loss"].is_number()).map(|step| units(&step)).collect();
    let [Some(first), Some(last)] = [units[0][1], units[23][1]] else { panic!("{metrics}") };
    assert!(last < first, "{metrics}");
}

#[test]
fn a_place_that_is_slow_from_the_start_has_fewer_layers_before_the_first_step() {
    let said = said_of_straggler(&Place::new(TINY), "1:8", "2");
    assert!(
        said.contains("as long at place 1 as at the fastest") && said.contains("cut anew before the first step"),
        "{said}"
    );
}

#[test]
fn a_pipelines_program_is_printed_and_drawn() {
    let place = Place::new(TINY);
    let text = place.stdout(&["program", "tiny.toml", "--pp", "2", "--rank", "1"]);
    for expected in ["stages (1f1b): embedding to ", "pass     pass ", "compute  arrive ", "in `pp "] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let zb_v = ["program", "tiny.toml", "--pp", "2", "--set", "parallel.order=zb-v", "--svg", "program.svg"];
    place.stdout(&zb_v);
    let drawing = fs::read_to_string(place.path("program.svg")).unwrap();
    // Forward, backward and gradients of weights of four micro-batches at four stages.
    assert_eq!(drawing.matches("class=\"box\"").count(), 3 * 4 * 4, "{drawing}");
    assert!(drawing.contains("gradients of weights of micro-batch 3 at stage 2") && drawing.contains("place 1"));
    place.stdout(&[&zb_v[..], &["--tasks"]].concat());
    assert!(fs::read_to_string(place.path("program.svg")).unwrap().contains("pass to a stage"));
}

#[test]
fn what_a_pipeline_cannot_be_is_told() {
    let place = Place::new(TINY);
    for (flags, expected) in [
        (&["--pp", "2", "--dp", "2", "--set", "parallel.zero=2"][..], "it would move gradients for every micro-batch"),
        (&["--pp", "2", "--tp", "2", "--set", "balance.mode=reshard"], "does not work with `parallel.pp`"),
        (&["--pp", "2", "--set", "parallel.ahead=true"], "micro-batches of a pipeline begin in its own order"),
        (&["--pp", "2", "--set", "parallel.chunks=2"], "`parallel.chunks` is 2, but the order \"1f1b\" has 1"),
        (&["--pp", "2", "--set", "parallel.stage_layers=[4]"], "has 1 number, but there are 2 stages"),
        (&["--pp", "2", "--set", "parallel.stage_layers=[3, 3]"], "has 6 layers together, the model has 4"),
        (&["--pp", "3", "--set", "parallel.stage_layers=[2, 0, 2]"], "leaves a stage with nothing to compute"),
        (&["--pp", "12"], "12 stages, but the model has 10 units"),
    ] {
        place.refused(&[&["train", "tiny.toml", "--output", "no"], flags].concat(), &[expected]);
    }
    let said = stderr(&place.run(&["train", "tiny.toml", "--output", "few", "--pp", "4", "--steps", "1"]));
    assert!(said.contains("places compute about 57 % of the time. 16 would be better"), "{said}");
}
