//! Keys of a configuration that contradict each other.

mod configured;

use configured::{GOOD, NEW, check};

#[test]
fn keys_that_contradict_each_other_are_refused() {
    let cases: &[(&str, &[&str], &[&str])] = &[
        (
            GOOD,
            &["--set", "model.config=c"],
            &[
                "--set: `model.path` and `model.config` are both set, expected one of them",
                "hint: `model.path` starts from the folder's weights, `model.config` from random ones",
            ],
        ),
        (
            GOOD,
            &["--set", "model.hidden=64", "--set", "model.tied=true"],
            &["--set: `model.hidden`, `model.tied` are set, but `model.path` has a model's sizes already"],
        ),
        (
            GOOD,
            &["--set", "adapter.rank=4"],
            &["--set: `adapter.rank` is set, but there is no adapter", "hint: set adapter.kind = \"lora\""],
        ),
        (
            GOOD,
            &["--set", "adapter.kind=lora", "--set", "adapter.rank_pattern=[\"q_proj\"]"],
            &[
                "--set: `adapter.rank_pattern` has \"q_proj\", expected \"PATTERN=NUMBER\"",
                "hint: for example \"q_proj=32\"",
            ],
        ),
        (
            GOOD,
            &["--set", "adapter.kind=lora", "--set", "adapter.dora=true", "--set", "adapter.dropout=0.1"],
            &[
                "--set: `adapter.dropout` is 0.1, but `adapter.dora` is set",
                "hint: PEFT's dropout changes what DoRA adds to, not only the adapter: use a dropout of 0",
            ],
        ),
        (
            GOOD,
            &["--set", "adapter.kind=lora", "--set", "adapter.targets=[\"q\"]", "--set", "adapter.target_pattern=q"],
            &["--set: `adapter.targets` and `adapter.target_pattern` are both set, expected one of them"],
        ),
        (
            GOOD,
            &[
                "--set",
                "adapter.kind=lora",
                "--tp",
                "2",
                "--set",
                "balance.mode=auto",
                "--set",
                "balance.gamma_max=0.5",
            ],
            &[
                "--set: `balance.gamma_max` prunes the gradients of layers, but an adapter's layers are frozen",
                "hint: set balance.gamma_max = 0: \"reshard\", \"migrate\" and \"auto\" work without it",
            ],
        ),
        (
            GOOD,
            &["--set", "adapter.kind=lora", "--set", "adapter.base=bf16", "--set", "train.dtype=f32"],
            &[
                "--set: `adapter.base` is \"bf16\", but the run computes in f32",
                "hint: set train.dtype = \"bf16\", or leave adapter.base out",
            ],
        ),
        (
            GOOD,
            &["--set", "adapter.kind=lora", "--set", "adapter.base=nf4", "--tp", "2", "--set", "balance.mode=reshard"],
            &[
                "--set: `balance.mode` moves or prunes columns of layers, but the base is held in blocks of 4-bit numbers",
                "hint: set balance.mode = \"off\"; parallel.tp_weights divides the work once",
            ],
        ),
        (
            NEW,
            &["--set", "adapter.kind=lora", "--set", "model.config=c"],
            &[
                "--set: an adapter is trained beside a model's weights, but `model.path` is not set",
                "hint: give the folder of a model to adapt",
            ],
        ),
        (
            NEW,
            &[],
            &[
                "there is no model to train",
                "hint: set model.path, model.config, or model.hidden, layers, heads and ffn",
            ],
        ),
        (
            NEW,
            &["--set", "model.hidden=60", "--set", "model.heads=8", "--set", "model.kv_heads=3"],
            &[
                "--set: `model.hidden` is 60, which 8 heads cannot share in even parts",
                "hint: hidden must be heads times an even number",
                "--set: `model.kv_heads` is 3, which does not divide the 8 heads",
                "`model.layers` is missing, a new model needs it",
                "`model.ffn` is missing, a new model needs it",
            ],
        ),
        (
            GOOD,
            &["--set", "parallel.recompute_units=mlp"],
            &[
                "--set: `parallel.recompute_units` is \"mlp\", but the schedule \"none\" cannot choose what to recompute",
                "hint: schedules that can are \"oases\" (train.recompute = true) and \"saved-comm\"",
            ],
        ),
        (
            GOOD,
            &["--tp", "2", "--set", "train.recompute=true", "--set", "parallel.ahead=true"],
            &[
                "--set: `parallel.ahead` is true, but a step has one micro-batch",
                "hint: set train.accumulate, or leave parallel.ahead out",
            ],
        ),
        (
            GOOD,
            &[
                "--tp",
                "2",
                "--set",
                "train.accumulate=2",
                "--set",
                "parallel.schedule=saved-comm",
                "--set",
                "parallel.ahead=true",
            ],
            &[
                "--set: `parallel.ahead` is true, but the schedule \"saved-comm\" overlaps nothing",
                "hint: schedules that do are \"oases\", \"cross-pass\" and \"none\"",
            ],
        ),
        (
            GOOD,
            &["--set", "train.accumulate=2", "--set", "parallel.ahead=true"],
            &[
                "--set: `parallel.ahead` is true, but there is one rank, which exchanges nothing",
                "hint: set parallel.tp or parallel.dp, or leave parallel.ahead out",
            ],
        ),
        (GOOD, &["--set", "data.source=text"], &["--set: `data.source` is \"text\", but `data.paths` has no files"]),
        (
            GOOD,
            &["--set", "data.paths=a", "--set", "data.format=alpaca"],
            &[
                "--set: `data.paths` is set, but the source \"synthetic\" reads no files",
                "--set: `data.format` is set, but the source \"synthetic\" has no records of several columns",
            ],
        ),
        (
            GOOD,
            &[
                "--set",
                "data.source=jsonl",
                "--set",
                "data.paths=a",
                "--set",
                "data.records=5",
                "--set",
                "data.separator=x",
            ],
            &[
                "--set: `data.records` is set, but the source \"jsonl\" has as many records as its files",
                "--set: `data.separator` is set, but the source \"jsonl\" needs no separator",
            ],
        ),
        (
            GOOD,
            &["--set", "data.chat_template=t"],
            &[
                "--set: `data.chat_template` is set, but `data.format` is \"text\"",
                "hint: a template is for formats \"messages\" and \"alpaca\"",
            ],
        ),
        (
            NEW,
            &[
                "--set",
                "data.source=images",
                "--set",
                "data.paths=a",
                "--set",
                "data.packing=true",
                "--set",
                "model.layers=2",
            ],
            &[
                "--set: `data.packing` is for text, but `data.source` is \"images\"",
                "--set: `model.layers` is for text, but `data.source` is \"images\"",
                "hint: a model of images comes from model.path or model.config",
                "`model.hidden` is missing, a new model needs it",
                "`model.heads` is missing, a new model needs it",
                "`model.ffn` is missing, a new model needs it",
            ],
        ),
        (
            "[model]\npath = \"m\"\n[data]\nsource = \"synthetic\"\n",
            &[],
            &["training has no end", "hint: set train.steps, train.epochs, train.tokens or train.minutes"],
        ),
        (
            GOOD,
            &["--set", "train.optimizer=sgd", "--set", "train.beta2=0.9", "--set", "train.muon_scale=original"],
            &[
                "--set: `train.beta2` is set, but `train.optimizer` is \"sgd\", which does not use it",
                "hint: it is for \"adamw\", \"lion\", \"muon\"; leave it out",
                "--set: `train.muon_scale` is set, but `train.optimizer` is \"sgd\", which does not use it",
                "hint: it is for \"muon\"; leave it out",
            ],
        ),
        (
            GOOD,
            &["--set", "train.momentum=0", "--set", "train.optimizer=sgd", "--set", "train.nesterov=true"],
            &["--set: `train.nesterov` is true, but `train.momentum` is 0", "hint: 0.9 is usual"],
        ),
        (
            GOOD,
            &[
                "--set",
                "train.optimizer=muon",
                "--tp",
                "2",
                "--set",
                "balance.mode=resize",
                "--set",
                "balance.gamma_max=0.5",
            ],
            &[
                "--set: `balance.gamma_max` prunes elements of updates, but \"muon\" updates whole matrices",
                "hint: set balance.gamma_max = 0, or train.optimizer = \"adamw\", \"sgd\" or \"lion\"",
            ],
        ),
        (
            GOOD,
            &["--lr", "1e-5", "--set", "train.min_lr=1e-4"],
            &["--set: `train.min_lr` is 0.0001, more than `train.lr`, 0.00001"],
        ),
        (
            GOOD,
            &["--batch", "65536", "--sequence", "1048576"],
            &[
                "--batch: a micro-batch has 68719476736 tokens, the limit is 67108864",
                "hint: lower train.batch or data.sequence and raise train.accumulate",
            ],
        ),
        (
            GOOD,
            &["--set", "eval.every=5"],
            &[
                "--set: `eval.every` is 5, but there is nothing to evaluate on",
                "hint: set data.holdout or data.eval_paths",
            ],
        ),
        (
            GOOD,
            &[
                "--set",
                "data.source=text",
                "--set",
                "data.paths=a",
                "--set",
                "data.holdout=1",
                "--set",
                "data.eval_paths=b",
            ],
            &[
                "--set: `data.holdout` and `data.eval_paths` are both set, expected one of them",
                "--set: `data.holdout` is 1, which leaves nothing to train on",
                "hint: use 2 or more, or 0 to keep no records back",
            ],
        ),
        (
            GOOD,
            &["--set", "device.kind=cuda", "--set", "parallel.tp=8", "--set", "parallel.dp=4"],
            &[
                "--set: there are 32 ranks (pp × dp × tp), but on GPUs there can be 16 at most",
                "hint: use fewer, or compute on the cores with device.kind = \"cpu\"",
            ],
        ),
        (
            GOOD,
            &["--set", "device.kind=cuda", "--set", "parallel.tp=4", "--set", "device.virtual_gpus=[40, 40]"],
            &[
                "--set: `device.virtual_gpus` has 2 parts, but there are 4 ranks (pp × dp × tp)",
                "hint: give one for each rank",
            ],
        ),
        (
            GOOD,
            &["--set", "device.cards=[1]"],
            &["--set: `device.cards` are GPUs, but `device.kind` is \"cpu\"", "hint: set device.kind = \"cuda\""],
        ),
        (
            GOOD,
            &["--set", "device.kind=cuda", "--set", "parallel.tp=4", "--set", "device.cards=[0, 1]"],
            &[
                "--set: `device.cards` has 2 numbers, but there are 4 ranks (pp × dp × tp)",
                "hint: give one for each rank, or a single one for all",
            ],
        ),
        (
            GOOD,
            &["--set", "device.kind=cuda", "--set", "parallel.tp=4", "--set", "device.cards=[0, 0, 1, 1]"],
            &[
                "--set: `device.cards` has 4 ranks on 2 GPUs",
                "hint: give each rank a GPU of its own, or all the same one",
            ],
        ),
        (
            GOOD,
            &[
                "--set",
                "device.kind=cuda",
                "--set",
                "parallel.tp=2",
                "--set",
                "device.cards=[0, 1]",
                "--set",
                "device.virtual_gpus=[40, 24]",
            ],
            &[
                "--set: `device.virtual_gpus` are parts of one GPU, but `device.cards` has 2",
                "hint: name a single GPU, or leave device.virtual_gpus out",
            ],
        ),
        (
            GOOD,
            &["--set", "device.virtual_gpus=[40]"],
            &[
                "--set: `device.virtual_gpus` are parts of a GPU, but `device.kind` is \"cpu\"",
                "hint: set device.kind = \"cuda\", or parallel.cores_per_rank",
            ],
        ),
        (
            GOOD,
            &["--set", "device.graph=false"],
            &[
                "--set: `device.graph` is about a GPU, but `device.kind` is \"cpu\"",
                "hint: set device.kind = \"cuda\", or leave device.graph out",
            ],
        ),
        (
            GOOD,
            &["--set", "device.virtual_gpus=[40.5]"],
            &["--set: `device.virtual_gpus` is [40.5], expected a list of whole numbers from 1 to 65536"],
        ),
        (
            GOOD,
            &["--set", "device.kind=cuda", "--set", "parallel.tp=2", "--set", "parallel.link_gb_per_s=1"],
            &[
                "--set: `parallel.link_gb_per_s` is emulated between ranks on a CPU's cores, but `device.kind` is \"cuda\"",
            ],
        ),
        (
            GOOD,
            &["--set", "device.kind=cuda", "--set", "device.threads=3", "--set", "balance.stragglers=[\"0:2\"]"],
            &[
                "--set: `device.threads` is about a CPU's cores, but `device.kind` is \"cuda\"",
                "--set: `balance.stragglers` is about a CPU's cores, but `device.kind` is \"cuda\"",
            ],
        ),
        (
            GOOD,
            &["--set", "device.kind=cudaa"],
            &["--set: `device.kind` is \"cudaa\", expected one of \"cpu\", \"cuda\"", "hint: did you mean \"cuda\"?"],
        ),
        (
            GOOD,
            &["--output", "g.gguf"],
            &[
                "--output: `output.folder` is \"g.gguf\", the name of a file, expected a folder's",
                "hint: llama.cpp's convert_hf_to_gguf.py makes a GGUF file of a folder with a model",
            ],
        ),
        (
            GOOD,
            &["--set", "output.folder=a/model.safetensors"],
            &[
                "--set: `output.folder` is \"a/model.safetensors\", the name of a file, expected a folder's",
                "hint: leave out the ending; a folder with a model has its weights in it",
            ],
        ),
        (
            GOOD,
            &["--set", "output.save_model=false", "--set", "output.save_dtype=f32"],
            &["--set: `output.save_dtype` is set, but `output.save_model` is false"],
        ),
    ];
    for (file, flags, expected) in cases {
        let line = |line: &&str| if line.starts_with("hint") { format!("  {line}") } else { format!("error: {line}") };
        let expected: Vec<String> = expected.iter().map(line).collect();
        check(file, flags, &expected.iter().map(String::as_str).collect::<Vec<_>>());
    }
}
