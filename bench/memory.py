"""The memory of runs: foretold by `inspect` and at their start, told at their end, and as the system counted it.

    python bench/memory.py --binary target/release/evenkeel [--only llama]

Models are random, of five architectures. Each is trained for a few steps on one rank without and with checkpoints, and from
the folder that the first of these saved, on two ranks: tp 2, dp 2, dp 2 with ZeRO 1 to 3. Figures are MiB.
"""
import argparse
import json
import os
import random
import re
import subprocess
import tempfile
from pathlib import Path

MODELS = {
    "llama": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408, vocab_size=32000, hidden_act="silu",
        max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False),
    "gemma3": dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_size=160, num_hidden_layers=6, head_dim=64,
        num_attention_heads=4, num_key_value_heads=1, intermediate_size=512, vocab_size=262144,
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=2048, rms_norm_eps=1e-6, query_pre_attn_scalar=64,
        layer_types=["sliding_attention"] * 5 + ["full_attention"], sliding_window=64, tie_word_embeddings=True,
        rope_parameters=dict(full_attention=dict(rope_theta=1e6, rope_type="default"),
                             sliding_attention=dict(rope_theta=1e4, rope_type="default"))),
    "gpt2": dict(
        architectures=["GPT2LMHeadModel"], model_type="gpt2", n_embd=384, n_head=6, n_layer=4, n_positions=512,
        vocab_size=50257, activation_function="gelu_new", layer_norm_epsilon=1e-5, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0),
    "qwen3": dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=384, num_hidden_layers=4, head_dim=64,
        num_attention_heads=6, num_key_value_heads=2, intermediate_size=1024, vocab_size=65536, hidden_act="silu",
        max_position_embeddings=1024, rms_norm_eps=1e-6, attention_bias=False, tie_word_embeddings=True,
        rope_parameters=dict(rope_theta=1e6, rope_type="default")),
    "vit": dict(
        architectures=["ViTForImageClassification"], model_type="vit", hidden_size=384, num_hidden_layers=6,
        num_attention_heads=6, intermediate_size=1536, image_size=224, patch_size=16, num_channels=3, hidden_act="gelu",
        layer_norm_eps=1e-12, qkv_bias=True, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
        id2label={str(label): f"LABEL_{label}" for label in range(10)}),
}
# Name, settings, options of inspect, whether a checkpoint is written while training goes on.
RUNS = [
    ("1 rank", [], [], False),
    ("1 rank, checkpoints", ["output.checkpoint_every=1"], [], True),
    ("bf16, recompute", ["train.dtype=\"bf16\"", "train.recompute=true"], [], False),
    ("tp 2", ["parallel.tp=2"], ["--tp", "2"], False),
    ("tp 2, checkpoints", ["parallel.tp=2", "output.checkpoint_every=1"], ["--tp", "2"], True),
    ("dp 2", ["parallel.dp=2"], ["--dp", "2"], False),
    ("dp 2, ZeRO 1", ["parallel.dp=2", "parallel.zero=1"], ["--dp", "2", "--zero", "1"], False),
    ("dp 2, ZeRO 2, checkpoints", ["parallel.dp=2", "parallel.zero=2", "output.checkpoint_every=1"],
     ["--dp", "2", "--zero", "2"], True),
    ("dp 2, ZeRO 3, checkpoints", ["parallel.dp=2", "parallel.zero=3", "output.checkpoint_every=1"],
     ["--dp", "2", "--zero", "3"], True),
]
FEW = ["1 rank", "1 rank, checkpoints", "tp 2", "dp 2, ZeRO 2, checkpoints"]
CONFIG = """
[model]
{model}
[data]
{data}
[train]
steps = 2
batch = {batch}
[output]
folder = "{folder}"
overwrite = true
checkpoint_every = 0
keep_checkpoints = 1
"""


def run(command, folder):
    """stdout and stderr, and the most memory in MiB that the process ever had."""
    with open(folder / "out.txt", "w") as out, open(folder / "err.txt", "w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
    texts = [(folder / name).read_text() for name in ("out.txt", "err.txt")]
    if status != 0:
        raise SystemExit(f"{command}: {texts[1]}")
    return *texts, usage.ru_maxrss / 1024


def number(pattern, text):
    return int(re.search(pattern, text, re.MULTILINE)[1])


def inspected(binary, folder, options, name, checkpoints):
    text, _, _ = run([binary, "inspect", str(folder / "first/model"), *options], folder)
    row = r"^bf16 +yes" if name.startswith("bf16") else r"^f32 +no"
    cells = re.findall(r"(\d+) MiB", re.search(row + r".*", text, re.MULTILINE)[0].split("iB", 1)[1])
    return int(cells[1 if checkpoints else 0])


def measure(binary, architecture, folder, few):
    images = architecture == "vit"
    batch, sequence = (8, 0) if images else (4, 128)
    (folder / "config.json").write_text(json.dumps(MODELS[architecture]))
    data = f"source = \"synthetic\"\nsequence = {sequence}"
    if images:
        record = lambda: bytes([random.randrange(10)]) + random.randbytes(3072)
        (folder / "data_batch_1.bin").write_bytes(b"".join(record() for _ in range(500)))
        data = f"source = \"cifar10\"\npaths = [\"{folder}\"]"
    tokenizer = "" if images else "\ntokenizer = \"bytes\""
    models = {"new.toml": f"config = \"{folder}/config.json\"", "saved.toml": f"path = \"{folder}/first/model\""}
    for name, model in models.items():
        output = folder / ("first" if name == "new.toml" else "other")
        text = CONFIG.format(model=model, data=data + tokenizer, batch=batch, folder=output)
        (folder / name).write_text(text)
    of_batch = ["--batch", str(batch)] + ([] if images else ["--sequence", str(sequence)])
    runs = [run for run in RUNS if not few or run[0] in FEW]
    for at, (name, sets, options, checkpoints) in enumerate(runs):
        config = "new.toml" if at == 0 else "saved.toml"
        sets = sets + ([] if at == 0 else ["output.save_model=false"])
        command = [binary, "train", str(folder / config)] + [part for one in sets for part in ("--set", one)]
        summary, said, real = run(command, folder)
        before = inspected(binary, folder, of_batch + options, name, checkpoints)
        foretold, told = number(r"^peak memory: (\d+) MiB", said), number(r"^peak memory +(\d+) MiB", summary)
        parts = re.search(r"MiB: (.*)", said)[1]
        cells = [f"{value} ({value / real - 1:+.1%})" for value in (before, foretold, told)]
        print(f"| {architecture} | {name} | {' | '.join(cells)} | {real:.0f} | {parts} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--few", action="store_true", help="one rank, tp 2, and ZeRO 2, with and without checkpoints")
    options = parser.parse_args()
    print("| model | run | inspect | start | end | VmHWM | foretold |\n| --- | --- | --- | --- | --- | --- | --- |")
    for architecture in options.only or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            measure(options.binary, architecture, Path(folder), options.few)


if __name__ == "__main__":
    main()
