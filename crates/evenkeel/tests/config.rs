//! `evenkeel config`, as a person runs it.

mod configured;

use std::process::Command;

use configured::{GOOD, check, config, text};

#[test]
fn every_mistake_is_reported_at_once_with_its_place() {
    let file = "lr = 3\n[model]\npath = \"m\"\nseed = -1\n[trian]\nbatch = 3\n[data]\nsource = \"jsonll\"\nsequence = 1\n\
                [train]\nlearning_rate = 2\nlr = \"3e-4\"\nmin_lr = 1e99\ndtype = \"fp16\"\nbeta1 = 1.0\n\
                [eval]\nbatch = 3\n[output]\nfolder = 3\n[sample]\nprompts = \"hello\"\ntop_p = nan\n";
    let flags = ["--steps", "many", "--set", "train.lr", "--set", "machine.cores=2", "--set", "device.thread=3"];
    let expected = [
        "error: run.toml:1: unknown key `lr`",
        "  hint: did you mean `train.lr`?",
        "error: run.toml:4: `model.seed` is -1, expected a whole number from 0",
        "error: run.toml:5: unknown section `trian`",
        "  hint: did you mean [train]?",
        "error: run.toml:8: `data.source` is \"jsonll\", expected one of \"synthetic\", \"text\", \"jsonl\", \"json\", \"parquet\", \
         \"images\", \"cifar10\"",
        "  hint: did you mean \"jsonl\"?",
        "error: run.toml:9: `data.sequence` is 1, expected a whole number from 2 to 1048576",
        "error: run.toml:11: unknown key `train.learning_rate`",
        "  hint: did you mean `train.lr`?",
        "error: run.toml:12: `train.lr` is \"3e-4\", expected a number above 0, up to 100",
        "  hint: write it without quotes",
        "error: run.toml:13: `train.min_lr` is 1e99, expected a number from 0 to 100",
        "error: run.toml:14: `train.dtype` is \"fp16\", expected one of \"f32\", \"bf16\"",
        "  hint: did you mean \"bf16\"?",
        "error: run.toml:15: `train.beta1` is 1.0, expected a number from 0 to 0.9999999",
        "error: run.toml:17: unknown key `eval.batch`",
        "  hint: did you mean `eval.batches`?",
        "error: run.toml:19: `output.folder` is 3, expected a path",
        "error: run.toml:21: `sample.prompts` is \"hello\", expected a list of texts",
        "  hint: put it in brackets",
        "error: run.toml:22: `sample.top_p` is nan, expected a number above 0, up to 1",
        "error: --set: `train.lr` is no assignment, expected section.key=value",
        "  hint: for example --set train.lr=1e-4",
        "error: --set: unknown section `machine`",
        "  hint: the sections are model, adapter, data, train, eval, output, sample, parallel, balance, device",
        "error: --set: unknown key `device.thread`",
        "  hint: did you mean `device.threads`?",
        "error: --steps: `train.steps` is \"many\", expected a whole number from 1 to 1000000000",
    ];
    check(file, &flags, &expected);
}

#[test]
fn a_number_below_zero_is_a_wrong_value_and_no_option() {
    check(GOOD, &["--lr", "-1"], &["error: --lr: `train.lr` is -1, expected a number above 0, up to 100"]);
}

#[test]
fn values_of_the_wrong_form_are_named() {
    let cases = [
        ("[train]\nsteps = 3\nsteps = 4\n", "run.toml:3: is not TOML: duplicate key"),
        ("[train]\nlr = .5\n", "run.toml:2: is not TOML: "),
        ("train = 5\n", "run.toml:1: `train` is 5, expected a section"),
        ("[[train]]\n", "run.toml:1: `train` is [{}], expected a section"),
        ("[train.lr]\nx = 1\n", "run.toml:1: `train.lr` is a table, expected a number above 0, up to 100"),
        ("[data]\npaths = [\"a\", 1]\n", "run.toml:2: `data.paths` is [\"a\", 1], expected a list of paths"),
        ("[data]\npaths = [\"\"]\n", "run.toml:2: `data.paths` is [\"\"], expected a list of paths"),
        ("[output]\nfolder = \"\\u0000\"\n", "run.toml:2: `output.folder` is \" \", expected a path"),
        ("[train]\nbatch = 1.5\n", "run.toml:2: `train.batch` is 1.5, expected a whole number from 1 to 65536"),
        (
            "[train]\ntokens = 99999999999999999999\n",
            "run.toml:2: `train.tokens` is 1e20, expected a whole number from 1",
        ),
        ("[train]\nminutes = inf\n", "run.toml:2: `train.minutes` is inf, expected a number above 0, up to 10000000"),
        ("[train]\nlr = 1979-05-27\n", "run.toml:2: `train.lr` is 1979-05-27, expected a number above 0, up to 100"),
    ];
    for (file, expected) in cases {
        let output = config(file, &[]);
        let lines: Vec<&str> = text(&output.stderr).lines().collect();
        assert_eq!(output.status.code(), Some(2), "{file}");
        assert!(lines.iter().any(|line| line.starts_with(&format!("error: {expected}"))), "{file}: {lines:#?}");
    }
}

#[test]
fn names_of_other_trainers_are_understood() {
    let cases = [
        (
            "train.warmup_ratio=0.1",
            "unknown key `train.warmup_ratio`",
            "set `train.warmup_steps` to the ratio times the steps of the run",
        ),
        ("data.max_length=512", "unknown key `data.max_length`", "did you mean `data.sequence`?"),
        ("train.max_seq_length=512", "unknown key `train.max_seq_length`", "did you mean `data.sequence`?"),
        (
            "train.gradient_accumulation_steps=2",
            "unknown key `train.gradient_accumulation_steps`",
            "did you mean `train.accumulate`?",
        ),
        ("train.save_steps=2", "unknown key `train.save_steps`", "did you mean `output.checkpoint_every`?"),
        ("train.bf16=true", "unknown key `train.bf16`", "did you mean `train.dtype`?"),
        ("adapter.r=8", "unknown key `adapter.r`", "did you mean `adapter.rank`?"),
        ("train.lora_r=8", "unknown key `train.lora_r`", "did you mean `adapter.rank`?"),
        ("adapter.lora_alpha=8", "unknown key `adapter.lora_alpha`", "did you mean `adapter.alpha`?"),
        ("adapter.lora_dropout=0.1", "unknown key `adapter.lora_dropout`", "did you mean `adapter.dropout`?"),
        ("adapter.target_modules=x", "unknown key `adapter.target_modules`", "did you mean `adapter.targets`?"),
        (
            "adapter.layers_to_transform=1",
            "unknown key `adapter.layers_to_transform`",
            "did you mean `adapter.layers`?",
        ),
        ("adapter.use_dora=true", "unknown key `adapter.use_dora`", "did you mean `adapter.dora`?"),
        ("adapter.q=1", "unknown key `adapter.q`", "`evenkeel config --explain` lists every key"),
        ("train.num_train_epochs=2", "unknown key `train.num_train_epochs`", "did you mean `train.epochs`?"),
        (
            "train.dtype=bfloat16",
            "`train.dtype` is \"bfloat16\", expected one of \"f32\", \"bf16\"",
            "did you mean \"bf16\"?",
        ),
        (
            "train.dtype=float16",
            "`train.dtype` is \"float16\", expected one of \"f32\", \"bf16\"",
            "did you mean \"bf16\"?",
        ),
        (
            "train.dtype=float32",
            "`train.dtype` is \"float32\", expected one of \"f32\", \"bf16\"",
            "did you mean \"f32\"?",
        ),
        ("device.kind=gpu", "`device.kind` is \"gpu\", expected one of \"cpu\", \"cuda\"", "did you mean \"cuda\"?"),
    ];
    for (set, what, hint) in cases {
        check(GOOD, &["--set", set], &[&format!("error: --set: {what}"), &format!("  hint: {hint}")]);
    }
    for (flag, hint) in [
        ("--max-length", Some("  hint: use --set data.sequence=…")),
        ("--warmup-ratio", Some("  hint: use --set train.warmup_steps=…")),
        ("--save-model", Some("  hint: use --set output.save_model=…")),
        ("--zzzzzzzzz", None),
    ] {
        let output = config(GOOD, &[flag, "3"]);
        assert_eq!(output.status.code(), Some(2));
        let told = text(&output.stderr);
        assert!(told.starts_with(&format!("error: unexpected argument '{flag}'")), "{told}");
        assert_eq!(told.lines().find(|line| line.contains("hint")), hint, "{told}");
    }
}

#[test]
fn epochs_are_a_flag_and_end_a_run_that_has_steps_no_later() {
    let output = config(&GOOD.replace("steps = 10", ""), &["--epochs", "3"]);
    assert!(text(&output.stdout).contains("epochs = 3\n"), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    let output = config(GOOD, &["--epochs", "3"]);
    assert!(text(&output.stdout).contains("steps = 10\nepochs = 3\n"), "{}", text(&output.stdout));
    let told = "warning: `train.steps` is set, too: training ends at the first of --epochs and it\n";
    assert_eq!(text(&output.stderr), told);
}

#[test]
fn a_file_of_another_form_is_one_mistake() {
    let yaml = "# a run\n---\nmodel:\n  path: m\ntrain:\n  steps: 3\n";
    let as_toml = "  hint: write `[train]` for `train:` and `lr = 1e-4` for `lr: 1e-4`; `evenkeel config --explain` lists \
                   every key";
    check(yaml, &[], &["error: run.toml:1: is YAML, expected TOML", as_toml]);
    check("learning_rate: 1e-4\n", &[], &["error: run.toml:1: is YAML, expected TOML", as_toml]);
    let deepspeed = "  hint: a DeepSpeed configuration goes behind --deepspeed, beside the run's own";
    check("{\"train\": {\"steps\": 3}}\n", &[], &["error: run.toml:1: is JSON, expected TOML", deepspeed]);
    // A slip in a file that is TOML is told where it is.
    let output = config(&GOOD.replace("steps = 10", "steps: 10"), &[]);
    assert!(text(&output.stderr).starts_with("error: run.toml:6: is not TOML: "), "{}", text(&output.stderr));
}

#[test]
fn a_key_that_cannot_be_read_starts_no_second_error() {
    let flags = ["--set", "train.lr=fast", "--set", "train.min_lr=50"];
    check(GOOD, &flags, &["error: --set: `train.lr` is \"fast\", expected a number above 0, up to 100"]);
    // The file has a source, though on a broken line.
    let file = "[model]\npath = \"m\"\n[data]\nsource = text\n[train]\nsteps = 0\n";
    let output = config(file, &[]);
    let lines: Vec<&str> = text(&output.stderr).lines().collect();
    assert_eq!(lines.len(), 2, "{lines:#?}");
    assert!(lines[0].starts_with("error: run.toml:4: is not TOML: "), "{lines:#?}");
    assert_eq!(lines[1], "error: run.toml:6: `train.steps` is 0, expected a whole number from 1 to 1000000000");
}

#[test]
fn a_file_that_is_no_text_is_refused_before_it_is_parsed() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("bytes"), [b'a', 0xff]).expect("a file");
    std::fs::write(folder.path().join("large"), vec![b'\n'; (1 << 20) + 1]).expect("a file");
    let cases = [
        ("missing", "`missing`: does not exist"),
        (".", "`.`: is a folder, expected a regular file"),
        ("bytes", "`bytes`: is not UTF-8 text from byte 1 on"),
        ("large", "`large`: is 1048577 bytes long, the limit is 1048576"),
    ];
    for (name, expected) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        let output = command.current_dir(folder.path()).args(["config", name]).output().expect("the binary starts");
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(text(&output.stderr).lines().next(), Some(&*format!("error: {expected}")));
    }
}

#[test]
fn nesting_without_end_is_an_error_and_no_crash() {
    for file in
        [format!("a = {}", "[".repeat(500_000)), format!("a = {}", "{a=".repeat(300_000)), "[a.".repeat(300_000)]
    {
        let output = config(&file, &[]);
        assert_eq!(output.status.code(), Some(2), "{:?}", output.status);
    }
}

#[test]
fn the_resolved_configuration_is_a_configuration() {
    let first = config(GOOD, &["--lr", "0.01", "--seed", "7", "--dtype", "bf16", "--output", "out", "--batch", "2"]);
    assert!(first.status.success(), "{}", text(&first.stderr));
    let resolved = text(&first.stdout);
    for line in ["lr = 0.01", "seed = 7", "dtype = \"bf16\"", "folder = \"out\"", "batch = 2", "epsilon = 1e-8"] {
        assert!(resolved.lines().any(|found| found == line), "{line} is not in\n{resolved}");
    }
    assert_eq!(resolved.matches("seed = 7").count(), 3);
    let again = config(resolved, &[]);
    assert_eq!(text(&again.stdout), resolved, "{}", text(&again.stderr));
}

#[test]
fn an_optimizer_is_resolved_with_the_keys_that_it_has() {
    let keys = ["beta1", "beta2", "epsilon", "momentum", "nesterov", "muon_scale", "weight_decay"];
    for (name, expected) in [
        ("adamw", "beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, weight_decay = 0.1"),
        ("sgd", "momentum = 0.9, nesterov = false, weight_decay = 0.0"),
        ("lion", "beta1 = 0.9, beta2 = 0.99, weight_decay = 0.1"),
        ("adafactor", "weight_decay = 0.0"),
        (
            "muon",
            "beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, momentum = 0.95, nesterov = true, \
             muon_scale = \"match_rms_adamw\", weight_decay = 0.1",
        ),
    ] {
        let first = config(GOOD, &["--set", &format!("train.optimizer={name}")]);
        let resolved = text(&first.stdout);
        let is_of_optimizer = |line: &&str| keys.iter().any(|key| line.starts_with(&format!("{key} = ")));
        let found: Vec<&str> = resolved.lines().filter(is_of_optimizer).collect();
        assert_eq!(found.join(", "), expected, "{name}: {}", text(&first.stderr));
        let again = config(resolved, &[]);
        assert_eq!(text(&again.stdout), resolved, "{}", text(&again.stderr));
    }
}

#[test]
fn explain_lists_every_key_of_a_resolved_file_in_its_section() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
    let output = command.args(["config", "--explain"]).output().expect("the binary starts");
    assert!(output.status.success());
    let mut sections = Vec::new();
    let mut keys = Vec::new();
    for line in text(&output.stdout).lines() {
        assert!(line.chars().count() <= 120, "{line}");
        if let Some((name, meaning)) = line.strip_prefix('[').and_then(|line| line.split_once("]  ")) {
            assert!(!meaning.is_empty());
            sections.push(name);
        } else if let Some(row) = line.strip_prefix("  ").filter(|row| !row.starts_with(' ')) {
            let cells: Vec<&str> = row.split("  ").filter(|cell| !cell.is_empty()).collect();
            assert_eq!(cells.len(), 4, "a key, a default, a type and a meaning: {row}");
            keys.push(format!("{}.{}", sections.last().expect("a section"), cells[0]));
        }
    }
    assert_eq!(
        sections,
        ["model", "adapter", "data", "train", "eval", "output", "sample", "parallel", "balance", "device"]
    );
    let resolved = config(GOOD, &["--set", "data.holdout=2"]);
    let mut section = "";
    for line in text(&resolved.stdout).lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match (line.strip_prefix('['), line.split_once(" = ")) {
            (Some(name), _) => section = name.trim_end_matches(']'),
            (None, Some((key, _))) => assert!(keys.contains(&format!("{section}.{key}")), "{section}.{key}"),
            (None, None) => panic!("{line}"),
        }
    }
    for key in &keys {
        let output = config("", &["--set", &format!("{key}=1")]);
        assert!(!text(&output.stderr).contains("unknown"), "{key}: {}", text(&output.stderr));
    }
}
