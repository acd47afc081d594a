//! Runs on several ranks through the binary.

mod support;

use std::fs;

use support::{Place, compare_curves, stderr};

const TINY: &str = r#"
[model]
hidden = 32
layers = 2
heads = 4
kv_heads = 2
ffn = 48

[data]
source = "synthetic"
records = 100_000
sequence = 64
holdout = 50

[train]
steps = 12
batch = 4
lr = 1e-2

[output]
checkpoint_every = 6
"#;

fn losses(place: &Place, run: &str) -> Vec<f64> {
    support::losses(&place.path(run).join("metrics.jsonl"))
}

#[test]
fn shares_of_the_data_give_the_run_with_as_large_a_batch() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--output", "one", "--set", "train.accumulate=2"]);
    let alone = losses(&place, "one");
    let zero = |stage: &str| format!("parallel.zero={stage}");
    for (run, extra) in [
        ("two", vec!["--dp", "2"]),
        ("zero-1", vec!["--dp", "2", "--set", &zero("1")]),
        ("zero-2", vec!["--dp", "2", "--set", &zero("2"), "--set", "train.recompute=true"]),
        ("zero-3", vec!["--dp", "2", "--tp", "2", "--set", &zero("3"), "--set", "parallel.parts=2"]),
    ] {
        let output = place.run(&[vec!["train", "tiny.toml", "--output", run], extra].concat());
        let said = stderr(&output);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("4 × 1 accumulated × dp 2 = 8"), "{said}");
        compare_curves(run, &losses(&place, run), &alone, [1e-4, 0.0]);
    }
    // On another mesh than it was begun with, from the checkpoint in the middle.
    fs::remove_dir_all(place.path("zero-3/checkpoints/step-00000012")).unwrap();
    let said = stderr(&place.run(&["train", "tiny.toml", "--output", "zero-3", "--resume", "--dp", "2"]));
    assert!(said.contains("resumes from") && said.contains("changed settings") && said.contains("zero = 0"), "{said}");
    compare_curves("resumed", &losses(&place, "zero-3"), &alone, [1e-4, 0.0]);
    // A checkpoint is the model that its run saved.
    let text = place.stdout(&["export", "zero-3", "--output", "exported"]);
    assert!(text.contains("step 12"), "{text}");
    for file in ["config.json", "model.safetensors"] {
        let [saved, exported] =
            ["zero-3/model", "exported"].map(|folder| fs::read(place.path(folder).join(file)).unwrap());
        assert!(saved == exported, "{file}");
    }
    // Fewer or more replicas than before make another batch, and the run says so.
    for (run, flags, expected) in [
        ("two", &["--dp", "1"][..], Some("; a step's batch was 8 sequences and is now 4; --batch 8 keeps it")),
        ("zero-1", &["--dp", "1", "--batch", "8"], None),
        ("one", &["--dp", "3"], Some("; a step's batch was 8 sequences and is now 12\n")),
    ] {
        let said = stderr(&place.run(&[&["train", "tiny.toml", "--output", run, "--resume"], flags].concat()));
        assert!(said.contains("changed settings"), "{said}");
        assert_eq!(said.contains("a step's batch was"), expected.is_some(), "{said}");
        assert!(said.contains(expected.unwrap_or_default()), "{said}");
    }
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_used() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--output", "run", "--dp", "2", "--set", "parallel.zero=1"]);
    let file = place.path("run/checkpoints/step-00000012/rank-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    let output = place.run(&["train", "tiny.toml", "--output", "run", "--resume"]);
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("rank-00001.safetensors") && said.contains("step-00000006`"), "{said}");
    fs::remove_dir_all(place.path("run/checkpoints/step-00000012")).unwrap();
    fs::remove_file(place.path("run/checkpoints/step-00000006/manifest.json")).unwrap();
    let output = place.run(&["train", "tiny.toml", "--output", "run", "--resume"]);
    assert_ne!(output.status.code(), Some(0), "a run without a good checkpoint does not begin anew by itself");
}

#[test]
fn a_runs_program_is_printed_and_drawn() {
    let place = Place::new(TINY);
    let oases = ["program", "tiny.toml", "--tp", "2", "--set", "parallel.schedule=oases"];
    let cut = ["--set", "parallel.parts=2", "--set", "parallel.sequence_parallel=true"];
    let text = place.stdout(&[&oases[..], &cut].concat());
    for expected in [
        "schedule oases, 2 parts, 2 ranks, stream split; rank 0",
        "that a task waits for overlap no computation",
        "compute  recompute attention 1, part 1",
        "reduce-scatter mlp 0, part 0",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let drawn = place.stdout(&[&oases[..], &["--svg", "program.svg"]].concat());
    assert!(drawn.contains("program.svg"), "{drawn}");
    assert!(fs::read_to_string(place.path("program.svg")).unwrap().contains("backward weight"));
    let output = place.run(&[&oases[..], &["--rank", "2"]].concat());
    assert!(output.status.code() == Some(2) && stderr(&output).contains("the last is 1"), "{}", stderr(&output));
}

/// Reductions over it take about as long as what is computed meanwhile.
const SLOW_LINK: [&str; 4] = ["--set", "parallel.link_gb_per_s=0.05", "--set", "train.recompute=true"];

#[test]
fn parts_and_stream_are_chosen_by_simulation_and_kept_when_a_run_is_resumed() {
    let place = Place::new(TINY);
    let chosen = |run: &str| {
        let text = fs::read_to_string(place.path(run).join("run.toml")).unwrap();
        let value = |key: &str| text.lines().find(|line| line.starts_with(key)).map(str::to_owned);
        [value("parts = "), value("sequence_parallel = ")].map(|value| value.expect("a choice"))
    };
    let train = |run: &str, extra: &[&str]| {
        let output = place.run(&[&["train", "tiny.toml", "--output", run, "--tp", "2"], extra].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let said = train("slow", &[&SLOW_LINK[..], &["--steps", "2"]].concat());
    assert!(said.contains("chosen by simulation, from estimated costs: "), "{said}");
    let slow = chosen("slow");
    assert_ne!(slow[0], "parts = 1", "a slow link has something to hide");
    let said = train("fast", &["--set", "train.recompute=true", "--steps", "2"]);
    assert!(said.contains("1 part, stream split"), "{said}");
    assert_eq!(chosen("fast"), ["parts = 1", "sequence_parallel = true"].map(str::to_owned));
    // The simulation would choose otherwise without the link, but what was begun goes on as it was.
    let said = train("slow", &["--set", "train.recompute=true", "--steps", "4", "--resume"]);
    assert!(!said.contains("chosen by simulation"), "{said}");
    assert_eq!(chosen("slow"), slow);
    // Whoever says what to do is asked nothing.
    let said =
        train("given", &["--steps", "1", "--set", "parallel.parts=2", "--set", "parallel.sequence_parallel=false"]);
    assert!(!said.contains("chosen by simulation"), "{said}");
    assert_eq!(chosen("given"), ["parts = 2", "sequence_parallel = false"].map(str::to_owned));
}

#[test]
fn the_default_program_hides_every_exchange_of_a_layer_behind_a_slow_link() {
    let place = Place::new(TINY);
    let bare = |extra: &[&str]| {
        let text = place.stdout(&[&["program", "tiny.toml", "--tp", "2"], &SLOW_LINK[..], extra].concat());
        let line = text.lines().find(|line| line.contains("overlap no computation")).expect("a summary").to_owned();
        let words: Vec<&str> = line.split(' ').collect();
        let of = words.iter().rposition(|&word| word == "of").expect("some of all");
        words[of - 1].parse::<usize>().expect("a number")
    };
    let as_it_was = bare(&["--set", "parallel.parts=2", "--set", "parallel.sequence_parallel=true"]);
    // The embedding's output, the statistics and the head's input wait bare in any schedule.
    assert!(bare(&[]) + 6 <= as_it_was, "{} by default, in two parts of a split stream {as_it_was}", bare(&[]));
}

#[test]
fn a_micro_batch_of_too_few_documents_to_overlap_is_told_of_once() {
    let place = Place::new(TINY);
    let parts =
        ["--tp", "2", "--set", "train.recompute=true", "--set", "parallel.parts=8", "--set", "data.packing=false"];
    let said = stderr(&place.run(&[&["train", "tiny.toml", "--output", "run", "--steps", "3"], &parts[..]].concat()));
    let told =
        "has a micro-batch of 4 documents, which cannot be cut in parallel.parts = 8: less of its exchanges is hidden";
    assert_eq!(said.matches(told).count(), 1, "{said}");
}

#[test]
fn a_run_on_several_ranks_is_the_run_on_one() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--output", "one"]);
    let alone = losses(&place, "one");
    for (run, extra) in [
        ("two", vec!["--tp", "2"]),
        ("three", vec!["--tp", "3", "--set", "parallel.tp_weights=[1, 1, 0.5]"]),
        ("whole", vec!["--tp", "2", "--set", "parallel.sequence_parallel=false", "--cores-per-rank", "1"]),
        ("linked", vec!["--tp", "2", "--set", "parallel.link_gb_per_s=10", "--set", "train.recompute=true"]),
        ("in-parts", vec!["--tp", "2", "--set", "parallel.parts=4"]),
        ("crossed", vec!["--tp", "2", "--set", "parallel.schedule=cross-pass"]),
    ] {
        let output = place.run(&[vec!["train", "tiny.toml", "--output", run], extra].concat());
        let said = stderr(&output);
        assert!(output.status.success(), "{said}");
        assert!(said.contains(", tp "), "{said}");
        assert_eq!(said.contains("emulated link"), run == "linked", "{said}");
        compare_curves(run, &losses(&place, run), &alone, [1e-4, 0.0]);
    }
    // On another number of ranks than it was begun with, from the checkpoint in the middle.
    fs::remove_dir_all(place.path("three/checkpoints/step-00000012")).unwrap();
    let said = stderr(&place.run(&["train", "tiny.toml", "--output", "three", "--resume"]));
    assert!(said.contains("resumes from") && said.contains("tp = 1"), "{said}");
    compare_curves("resumed", &losses(&place, "three"), &alone, [1e-4, 0.0]);
    let evaluated = |extra: &[&str]| {
        let output = place.run(&[&["eval", "tiny.toml", "--output", "two"], extra].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        (output.stdout, output.stderr)
    };
    assert_eq!(evaluated(&["--tp", "2"]), evaluated(&[]));
}

#[test]
fn a_run_and_its_checkpoints_tell_the_same_strategy() {
    let place = Place::new(TINY);
    let of_ranks = ["--dp", "2", "--tp", "2", "--set", "parallel.tp_weights=[2, 1]", "--set", "parallel.zero=1"];
    place.stdout(&[&["train", "tiny.toml", "--output", "run"], &of_ranks[..]].concat());
    let written: toml::Table = fs::read_to_string(place.path("run/run.toml")).unwrap().parse().unwrap();
    let strategy = serde_json::to_value(&written["strategy"]).unwrap();
    assert_eq!(strategy["dp"], 2);
    assert_eq!(strategy["zero"], 1);
    assert_eq!(strategy["cut"]["weights"], serde_json::json!([2.0, 1.0]));
    let manifest = fs::read(place.path("run/checkpoints/step-00000012/manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["body"]["strategy"], strategy, "{manifest}");
    // The file of a run is a configuration; elsewhere the section would be taken for one that decides something.
    place.stdout(&["config", "run/run.toml"]);
    fs::copy(place.path("run/run.toml"), place.path("copy.toml")).unwrap();
    let refused = stderr(&place.run(&["config", "copy.toml"]));
    assert!(refused.contains("unknown section `strategy`"), "{refused}");
}

#[test]
fn inspect_shows_who_holds_what() {
    let place = Place::new(TINY);
    place.stdout(&["train", "tiny.toml", "--output", "run", "--steps", "1"]);
    let shown = place.stdout(&["inspect", "run/model", "--tp", "3"]);
    for text in ["Cut over 3 ranks", "rank 2", "model.layers.*.self_attn.o_proj.weight", "columns", "nothing"] {
        assert!(shown.contains(text), "{shown}");
    }
    fs::write(place.path("plan.json"), r#"{"layers.*.mlp.*": "replicate"}"#).unwrap();
    let planned = place.stdout(&["inspect", "run/model", "--tp", "2", "--tp-plan", "plan.json"]);
    let row = planned.lines().find(|line| line.contains("mlp.up_proj")).unwrap();
    assert!(row.contains("nothing"), "{planned}");
}

#[test]
fn what_cannot_be_cut_is_refused_before_a_rank_starts() {
    let place = Place::new(TINY);
    fs::write(place.path("plan.json"), r#"{"layers.*.mlp.up_proj": "diagonal"}"#).unwrap();
    for (extra, expected) in [
        (vec!["--tp", "5"], "cannot be cut in 5: it has 4 attention heads"),
        (vec!["--tp", "2", "--set", "parallel.tp_weights=[1, 2, 3]"], "`parallel.tp_weights` has 3 numbers"),
        (vec!["--tp", "2", "--set", "parallel.tp_plan=plan.json"], "`layers.*.mlp.up_proj` has style \"diagonal\""),
        (
            vec!["--tp", "2", "--set", "parallel.whole_experts=true"],
            "`parallel.whole_experts` is set, but the model has no experts",
        ),
        (
            vec!["--tp", "2", "--set", "parallel.whole_experts=true", "--set", "balance.mode=migrate"],
            "`parallel.whole_experts` makes ranks with busy experts look slow",
        ),
    ] {
        let output = place.run(&[vec!["train", "tiny.toml", "--output", "run"], extra].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected) && said.contains("hint:"), "{said}");
        assert!(!place.path("run").exists());
    }
}

#[test]
fn inspect_tells_which_experts_a_rank_has_and_counts_their_share_of_the_work() {
    let place = Place::new(TINY);
    let mixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/mixtral");
    let flops = |extra: &[&str]| -> (f64, String) {
        let shown =
            place.stdout(&[&["inspect", mixture, "--tp", "2", "--batch", "4", "--sequence", "128"], extra].concat());
        let of_rank = |rank: &str| -> f64 {
            let row = shown.lines().find(|line| line.starts_with(rank)).expect("a row for each rank");
            let (number, unit) = row.rsplit_once(' ').expect("the work is last");
            assert_eq!(unit, "MFLOP", "{shown}");
            number.rsplit_once(' ').map_or(number, |(_, last)| last).parse().expect("a number")
        };
        (of_rank("0 ") + of_rank("1 "), shown)
    };
    let (by_columns, _) = flops(&[]);
    let (whole, shown) = flops(&["--whole-experts"]);
    assert!((whole / by_columns - 1.0).abs() < 0.02, "{whole} MFLOP, {by_columns} by columns");
    let header = shown.lines().find(|line| line.starts_with("rank")).expect("a table of ranks");
    assert!(header.contains("experts") && shown.contains("0–1") && shown.contains("2–3"), "{shown}");
    let refused = place.run(&["inspect", mixture, "--tp", "5", "--whole-experts"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
}

#[test]
fn ranks_that_do_not_come_in_time_end_the_run_with_code_3() {
    let place = Place::new(TINY);
    // Less than a byte a second: the first exchange would take hours.
    let late = ["--set", "parallel.link_gb_per_s=0.0000000001", "--set", "parallel.timeout_s=120"];
    let output = place.run(&[vec!["train", "tiny.toml", "--output", "run", "--tp", "2"], late.to_vec()].concat());
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("error: rank ") && said.contains("emulated link, the deadline is 120000 ms"), "{said}");
}
