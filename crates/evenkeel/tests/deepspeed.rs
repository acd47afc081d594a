//! `--deepspeed FILE`, as a person runs it.

mod support;

use std::fs;
use std::path::Path;
use std::process::Output;

use support::{Place, stderr};

const RUN: &str = "[model]\npath = \"m\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 10\n";

/// Runs `config` on the run's file, with these lines added to `[train]`, and a DeepSpeed file.
fn config(train: &str, json: &str, flags: &[&str]) -> Output {
    let place = Place::new(&format!("{RUN}{train}"));
    fs::write(place.path("ds.json"), json).unwrap();
    place.run(&[&["config", "tiny.toml", "--deepspeed", "ds.json"], flags].concat())
}

/// `section.key = value` of every setting.
fn settings(output: &Output) -> Vec<String> {
    let text = str::from_utf8(&output.stdout).expect("text");
    let mut section = "";
    let mut settings = Vec::new();
    for line in text.lines() {
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(name) => section = name,
            None => settings.push(format!("{section}.{line}")),
        }
    }
    settings
}

struct Accepted {
    train: &'static str,
    json: &'static str,
    flags: &'static [&'static str],
    settings: &'static [&'static str],
    /// Of what is told beside it.
    warnings: &'static [&'static str],
}

fn accept(cases: &[Accepted]) {
    for Accepted { train, json, flags, settings: expected, warnings } in cases {
        let output = config(train, json, flags);
        let (found, told) = (settings(&output), stderr(&output));
        assert_eq!(output.status.code(), Some(0), "{json} {flags:?}\n{told}");
        for expected in *expected {
            assert!(
                found.iter().any(|line| line == expected),
                "{json} {flags:?}: no {expected} in\n{}",
                found.join("\n")
            );
        }
        assert_eq!(told.lines().collect::<Vec<_>>(), *warnings, "{json}");
    }
}

/// Nothing is told, unless a case says so.
const PLAIN: Accepted = Accepted { train: "", json: "{}", flags: &[], settings: &[], warnings: &[] };

#[test]
fn keys_become_settings() {
    accept(&[
        Accepted { settings: &["train.steps = 10", "train.lr = 0.0003"], ..PLAIN },
        Accepted {
            json: r#"{"gradient_clipping": 0.5, "steps_per_print": 2e3, "bf16": {"enabled": true}}"#,
            settings: &["train.clip_norm = 0.5", "output.log_every = 2000", "train.dtype = \"bf16\""],
            ..PLAIN
        },
        Accepted {
            json: r#"{"bf16": {"enabled": false}, "fp16": {"enabled": false, "loss_scale": 0}}"#,
            settings: &["train.dtype = \"f32\""],
            ..PLAIN
        },
        Accepted { json: r#"{"fp32": {"enabled": true}}"#, settings: &["train.dtype = \"f32\""], ..PLAIN },
        Accepted { json: r#"{"bfloat16": {"enabled": true}}"#, settings: &["train.dtype = \"bf16\""], ..PLAIN },
        Accepted {
            json: r#"{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true,
                      "offload_param": {"device": "none", "pin_memory": true}, "offload_optimizer": {}}}"#,
            flags: &["--set", "parallel.dp=2"],
            settings: &["parallel.zero = 3", "output.save_model = true", "output.save_dtype = \"f32\""],
            ..PLAIN
        },
        Accepted {
            json: r#"{"bf16": {"enabled": true}, "zero_optimization": {"gather_16bit_weights_on_model_save": true}}"#,
            settings: &["train.dtype = \"bf16\"", "output.save_dtype = \"bf16\""],
            ..PLAIN
        },
        Accepted {
            json: r#"{"_comment": "supported models: …", "zero_optimization": {"stage": 0, "_why": {"a": [1]}},
                      "optimizer": {"_": 1, "type": "AdamW", "params": {"lr": 0.5, "_lr": 2, "betas": [0.9, 0.9],
                      "eps": 1e-8, "weight_decay": 0}}}"#,
            settings: &["train.lr = 0.5", "parallel.zero = 0"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"zero_optimization": {"stage": 0, "gather_16bit_weights_on_model_save": false}}"#,
            settings: &["parallel.zero = 0", "output.save_dtype = \"f32\""],
            ..PLAIN
        },
        Accepted { json: r#"{"tensor_parallel": {"autotp_size": 4}}"#, settings: &["parallel.tp = 4"], ..PLAIN },
        Accepted { json: r#"{"tensor_parallel": {"autotp_size": 0}}"#, settings: &["parallel.tp = 1"], ..PLAIN },
        Accepted {
            json: r#"{"activation_checkpointing": {"partition_activations": true}}"#,
            settings: &["train.recompute = true", "parallel.schedule = \"cross-pass\""],
            ..PLAIN
        },
        Accepted {
            json: r#"{"activation_checkpointing": {"partition_activations": false, "number_checkpoints": 4}}"#,
            settings: &["train.recompute = true"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"activation_checkpointing": {"partition_activations": false, "number_checkpoints": null}}"#,
            settings: &["train.recompute = false"],
            ..PLAIN
        },
        Accepted { json: r#"{"tensorboard": {"enabled": true}}"#, settings: &["output.tensorboard = true"], ..PLAIN },
    ]);
}

#[test]
fn two_of_the_batch_sizes_give_the_third() {
    const TWO: &[&str] = &["--set", "parallel.dp=2"];
    accept(&[
        Accepted {
            json: r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}"#,
            flags: TWO,
            settings: &["train.batch = 4", "train.accumulate = 4", "parallel.dp = 2"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}"#,
            flags: TWO,
            settings: &["train.batch = 4", "train.accumulate = 4"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"train_batch_size": 32, "gradient_accumulation_steps": 2}"#,
            flags: TWO,
            settings: &["train.batch = 8", "train.accumulate = 2"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}"#,
            settings: &["train.batch = 3", "train.accumulate = 2"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"train_batch_size": 32}"#,
            flags: TWO,
            settings: &["train.batch = 16", "train.accumulate = 1"],
            ..PLAIN
        },
        // The rest of the configuration has one of them.
        Accepted {
            train: "batch = 2\n",
            json: r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}"#,
            settings: &["train.batch = 2", "train.accumulate = 16"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}"#,
            flags: &["--batch", "1"],
            settings: &["train.batch = 1", "train.accumulate = 32"],
            ..PLAIN
        },
    ]);
}

#[test]
fn optimizers_and_schedulers_become_settings() {
    const DEFAULTS: &str = "warning: ds.json: DeepSpeed's defaults are taken: train.lr = 0.001, train.beta1 = 0.9, \
                    train.beta2 = 0.999, train.epsilon = 1e-8, train.weight_decay = 0.0";
    const WINS: &str = "warning: ds.json: `optimizer.params.lr` is 0.1, but `scheduler.params.warmup_max_lr` is 0.01 and wins in \
                DeepSpeed";
    accept(&[
        Accepted {
            json: r#"{"optimizer": {"type": "adam", "params": {"lr": 1e-4, "betas": [0.8, 0.99], "eps": 1e-6,
                      "weight_decay": 0.01, "bias_correction": true}}}"#,
            settings: &[
                "train.lr = 0.0001",
                "train.beta1 = 0.8",
                "train.beta2 = 0.99",
                "train.epsilon = 1e-6",
                "train.weight_decay = 0.01",
            ],
            ..PLAIN
        },
        Accepted {
            json: r#"{"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.95, 0.98], "weight_decay": 1}}}"#,
            settings: &[
                "train.optimizer = \"lion\"",
                "train.lr = 0.0001",
                "train.beta1 = 0.95",
                "train.beta2 = 0.98",
                "train.weight_decay = 1.0",
            ],
            ..PLAIN
        },
        Accepted {
            json: r#"{"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.8, "nesterov": true, "dampening": 0}}}"#,
            settings: &[
                "train.optimizer = \"sgd\"",
                "train.lr = 0.1",
                "train.momentum = 0.8",
                "train.nesterov = true",
                "train.weight_decay = 0.0",
            ],
            warnings: &["warning: ds.json: DeepSpeed's defaults are taken: train.weight_decay = 0.0"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"optimizer": {"type": "AdamW"}}"#,
            settings: &["train.lr = 0.001", "train.beta2 = 0.999", "train.weight_decay = 0.0"],
            warnings: &[DEFAULTS],
            ..PLAIN
        },
        Accepted {
            train: "lr = 0.002\nbeta1 = 0.8\nbeta2 = 0.9\nepsilon = 1e-7\n",
            json: r#"{"optimizer": {"type": "AdamW", "params": {"weight_decay": "auto"}}}"#,
            settings: &["train.lr = 0.002", "train.beta2 = 0.9", "train.weight_decay = 0.1"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.9], "eps": 1e-8,
                      "weight_decay": 0, "adam_w_mode": false, "torch_adam": true}}}"#,
            settings: &["train.weight_decay = 0.0"],
            warnings: &[
                "warning: ds.json: has no effect here: `optimizer.params.adam_w_mode`, `optimizer.params.torch_adam`",
            ],
            ..PLAIN
        },
        // By its name it is AdamW in DeepSpeed, whatever this key says.
        Accepted {
            json: r#"{"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.9], "eps": 1e-8,
                      "weight_decay": 0.2, "adam_w_mode": false}}}"#,
            settings: &["train.weight_decay = 0.2"],
            warnings: &["warning: ds.json: has no effect here: `optimizer.params.adam_w_mode`"],
            ..PLAIN
        },
        Accepted {
            json: r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01,
                      "warmup_num_steps": 5, "warmup_type": "linear"}}}"#,
            settings: &["train.lr = 0.01", "train.warmup_steps = 5", "train.lr_decay = \"constant\""],
            ..PLAIN
        },
        Accepted {
            json: r#"{"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": "auto", "eps": "auto",
                      "weight_decay": "auto"}}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10,
                      "warmup_max_lr": 0.01, "warmup_num_steps": 5, "warmup_type": "linear"}}}"#,
            settings: &["train.lr = 0.01", "train.lr_decay = \"linear\"", "train.min_lr = 0.0", "train.steps = 10"],
            warnings: &[WINS],
            ..PLAIN
        },
        // As the trainer of transformers fills it in.
        Accepted {
            train: "lr = 0.02\nwarmup_steps = 4\n",
            json: r#"{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                      "warmup_num_steps": "auto", "total_num_steps": "auto"}}}"#,
            settings: &["train.lr = 0.02", "train.warmup_steps = 4", "train.lr_decay = \"linear\"", "train.steps = 10"],
            ..PLAIN
        },
        Accepted {
            train: "lr = 0.02\n",
            json: r#"{"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 0,
                      "cos_min_ratio": 0.1}}}"#,
            settings: &["train.lr_decay = \"cosine\"", "train.min_lr = 0.002", "train.warmup_steps = 0"],
            ..PLAIN
        },
        // The ratio is of the rate that counts in the end.
        Accepted {
            json: r#"{"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto",
                      "cos_min_ratio": 0.5}}}"#,
            flags: &["--lr", "0.5"],
            settings: &["train.lr = 0.5", "train.min_lr = 0.25"],
            ..PLAIN
        },
    ]);
}

#[test]
fn what_has_no_effect_is_listed_once() {
    accept(&[Accepted {
        json: r#"{"zero_optimization": {"stage": 0, "overlap_comm": true, "contiguous_gradients": false,
                  "reduce_bucket_size": 5e8, "allgather_bucket_size": "auto", "round_robin_gradients": true},
                  "wall_clock_breakdown": false, "flops_profiler": {"enabled": false, "top_modules": 1},
                  "comms_logger": {"enabled": true}, "wandb": {}}"#,
        warnings: &["warning: ds.json: has no effect here: `comms_logger`, `zero_optimization.overlap_comm`, \
                     `zero_optimization.reduce_bucket_size`, `zero_optimization.round_robin_gradients`"],
        ..PLAIN
    }]);
}

#[test]
fn flags_win_and_files_must_agree() {
    accept(&[
        Accepted {
            train: "clip_norm = 2.0\n",
            json: r#"{"gradient_clipping": 3}"#,
            flags: &["--set", "train.clip_norm=4"],
            settings: &["train.clip_norm = 4.0"],
            ..PLAIN
        },
        Accepted {
            train: "clip_norm = 2\n",
            json: r#"{"gradient_clipping": 2.0}"#,
            settings: &["train.clip_norm = 2.0"],
            ..PLAIN
        },
        Accepted {
            train: "clip_norm = 2\n",
            json: r#"{"gradient_clipping": "auto"}"#,
            settings: &["train.clip_norm = 2.0"],
            ..PLAIN
        },
    ]);
}

/// The lines of the run's file, the DeepSpeed file, and every line that refuses it.
type Refused = (&'static str, &'static str, &'static [&'static str]);

#[test]
fn what_cannot_be_had_is_refused_with_the_reason() {
    let cases: &[Refused] = &[
        (
            "clip_norm = 2.0\n",
            r#"{"gradient_clipping": 3}"#,
            &[
                "error: ds.json: `gradient_clipping`: `train.clip_norm` is 3 by this, but 2.0 in tiny.toml:7",
                "  hint: leave one of them out, write \"auto\", or decide with --set train.clip_norm=…",
            ],
        ),
        (
            "",
            r#"{"bf16": {"enabled": true}, "fp32": {"enabled": true}}"#,
            &[
                "error: ds.json: `fp32.enabled`: `train.dtype` is \"f32\" by this, but \"bf16\" in ds.json: \
                 `bf16.enabled`",
                "  hint: leave one of them out, write \"auto\", or decide with --set train.dtype=…",
            ],
        ),
        (
            "",
            r#"{"fp16": {"enabled": true}}"#,
            &["error: ds.json: `fp16.enabled`: is not supported: there is no f16", "  hint: set bf16.enabled"],
        ),
        (
            "",
            r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}"#,
            &[
                "error: ds.json: `train_batch_size`: is 32, but 4 (train.batch) × 4 (train.accumulate) × 1 (parallel.dp) \
                 = 16",
                "  hint: leave one of them out, and it is computed from the others",
            ],
        ),
        (
            "accumulate = 3\n",
            r#"{"train_batch_size": 32}"#,
            &[
                "error: ds.json: `train_batch_size`: is 32, which is no multiple of 3 (train.accumulate) × 1 (parallel.dp) \
               = 3",
            ],
        ),
        (
            "",
            r#"{"train_batch_size": 0.5, "zero_optimization": {"stage": 4}, "steps_per_print": "many"}"#,
            &[
                "error: ds.json: `steps_per_print`: `output.log_every` is \"many\", expected a whole number from 1 to \
                 1000000000",
                "error: ds.json: `train_batch_size`: is 0.5, expected a whole number from 1",
                "error: ds.json: `zero_optimization.stage`: `parallel.zero` is 4, expected a whole number from 0 to 3",
            ],
        ),
        (
            "",
            r#"{"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"},
                "zero_quantized_gradients": true}}"#,
            &[
                "error: ds.json: `zero_optimization.offload_optimizer`: is not supported: there is no \
                 offloading",
                "  hint: parallel.zero, parallel.tp and train.recompute save memory",
                "error: ds.json: `zero_optimization.offload_param`: is not supported: there is no offloading",
                "  hint: parallel.zero, parallel.tp and train.recompute save memory",
                "error: ds.json: `zero_optimization.zero_quantized_gradients`: is not supported: communication is not \
                 quantised",
            ],
        ),
        (
            "",
            r#"{"optimizer": {"type": "Lamb", "params": {"max_coeff": 3}}, "scheduler": {"type": "OneCycle"}}"#,
            &[
                "error: ds.json: `optimizer.type`: is \"Lamb\", which is not supported: AdamW, Lion and SGD are \
                 supported, and train.optimizer has others",
                "  hint: use one of Adam, AdamW, Lion, SGD",
                "error: ds.json: `scheduler.type`: is \"OneCycle\", which is not supported: the rate rises once, then \
                 stays or falls",
                "  hint: use one of WarmupLR, WarmupDecayLR, WarmupCosineLR",
            ],
        ),
        (
            "",
            r#"{"optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9], "eps": "auto",
                "weight_decay": 0.1, "adam_w_mode": false, "amsgrad": true}}}"#,
            &[
                "error: ds.json: `optimizer.params.adam_w_mode`: is not supported: weight decay is decoupled \
                 from the gradient",
                "  hint: set it to true, or optimizer.params.weight_decay to 0",
                "error: ds.json: `optimizer.params.amsgrad`: is not supported: the largest variance so far is not kept",
                "error: ds.json: `optimizer.params.betas`: is [0.9], expected a list of two numbers",
            ],
        ),
        (
            "",
            r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_min_lr": 1e-6}}}"#,
            &[
                "error: ds.json: `scheduler.params.warmup_min_lr`: is not supported: the rate rises from 0",
                "error: ds.json: `scheduler.params.warmup_type`: is missing, and DeepSpeed's default is \"log\", which is \
                 not supported: the rate rises linearly",
                "  hint: set it to \"linear\"",
            ],
        ),
        (
            "",
            r#"{"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": "auto", "eps": "auto",
                "weight_decay": 0}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}}"#,
            &[
                "error: ds.json: `scheduler.params.warmup_max_lr`: is missing: DeepSpeed would train with 0.001, not with \
                 `optimizer.params.lr`",
                "  hint: give it the rate that is meant, or \"auto\"",
            ],
        ),
        (
            "",
            r#"{"trian_batch_size": 3, "stage": 2, "zero_optimization": {"stagee": 2}, "unheard_of": {},
                "optimizer": {"type": "AdamW", "lr": 3, "params": {"learning_rate": 3}}}"#,
            &[
                "error: ds.json: `optimizer.lr`: unknown key",
                "  hint: did you mean `optimizer.params.lr`?",
                "error: ds.json: `optimizer.params.learning_rate`: unknown key",
                "  hint: did you mean `optimizer.params.lr`?",
                "error: ds.json: `stage`: unknown key",
                "  hint: did you mean `zero_optimization.stage`?",
                "error: ds.json: `trian_batch_size`: unknown key",
                "  hint: did you mean `train_batch_size`?",
                "error: ds.json: `unheard_of`: unknown key",
                "error: ds.json: `zero_optimization.stagee`: unknown key",
                "  hint: did you mean `zero_optimization.stage`?",
            ],
        ),
        (
            "",
            r#"{"bf16": true, "zero_optimization": {"stage3_gather_16bit_weights_on_model_save": 1}}"#,
            &[
                "error: ds.json: `bf16`: is true, expected an object",
                "error: ds.json: `zero_optimization.stage3_gather_16bit_weights_on_model_save`: is 1, expected true or \
                 false",
            ],
        ),
        (
            "",
            r#"{"bf16": {"enabled": true}, "bf16": {"enabled": false}}"#,
            &[
                "error: `ds.json`: has the JSON key `bf16` twice in one object",
                "  hint: --deepspeed takes a DeepSpeed configuration, JSON",
            ],
        ),
        ("", "[1]", &["error: ds.json:1: is [1], expected an object"]),
    ];
    for (train, json, expected) in cases {
        let output = config(train, json, &[]);
        assert_eq!(stderr(&output).lines().collect::<Vec<_>>(), *expected, "{json}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{json}");
    }
}

#[test]
fn files_that_are_no_configuration_are_refused() {
    let deep = format!("{}1{}", "[".repeat(1000), "]".repeat(1000));
    let long = format!("{{\"a\": \"{}\"}}", "x".repeat(1 << 16));
    let keys: Vec<String> = (0..1500).map(|key| format!("\"train_batch_siz_{key}\": {{}}")).collect();
    let many = format!("{{{}}}", keys.join(","));
    for (json, expected) in [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        (&deep, "recursion limit"),
        (&long, "65536"),
        (&many, "unknown key"),
    ] {
        let output = config("", json, &[]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(expected), "{expected}: {}", stderr(&output));
    }
    let place = Place::new(RUN);
    let output = place.run(&["config", "tiny.toml", "--deepspeed", "nowhere.json"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("nowhere.json"), "{}", stderr(&output));
}

#[test]
fn the_resolved_configuration_stands_alone() {
    let place = Place::new(RUN);
    let json = r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"},
                   "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}}"#;
    fs::write(place.path("ds.json"), json).unwrap();
    let resolved = place.stdout(&["config", "tiny.toml", "--deepspeed", "ds.json"]);
    assert!(resolved.contains("\naccumulate = 8\n"), "{resolved}");
    fs::write(place.path("resolved.toml"), &resolved).unwrap();
    assert_eq!(place.stdout(&["config", "resolved.toml"]), resolved);
    assert_eq!(place.stdout(&["config", "resolved.toml", "--deepspeed", "ds.json"]), resolved);
}

#[test]
fn the_example_goes_with_the_quick_start() {
    let place = Place::new(RUN);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let arguments = ["config", "examples/quickstart.toml", "--deepspeed", "examples/deepspeed.json"];
    let mut command = place.command(&[&arguments[..], &["--set", "parallel.dp=2"]].concat());
    let output = command.current_dir(root).output().expect("the binary starts");
    assert!(output.status.success(), "{}", stderr(&output));
    let found = settings(&output);
    for expected in ["train.accumulate = 2", "train.dtype = \"bf16\"", "train.min_lr = 0.0002", "parallel.zero = 1"] {
        assert!(found.iter().any(|line| line == expected), "no {expected} in\n{}", found.join("\n"));
    }
}
