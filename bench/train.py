"""What data, metrics and checkpoints cost: `evenkeel train` beside the bare step, in turns, and start-up beside PyTorch's.

    python bench/train.py --binary target/release/evenkeel --python PYTHON_WITH_TORCH [--rounds 5]

The same Llama (hidden 512, 4 layers, 4 x 256 tokens) is trained on the synthetic corpus through the whole program, and by
`evenkeel bench step` on random tokens. Speed is that of the steps after the tenth. Start-up is from process start to the
end of the first step of examples/quickstart.toml; PyTorch's to the end of importing torch and transformers and one step of the
same model.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CONFIG = """
[model]
hidden = 512
layers = 4
heads = 8
kv_heads = 4
ffn = 1408
vocab = 4096
[data]
source = "synthetic"
records = 10_000_000
sequence = 256
[train]
steps = 40
batch = 4
lr = 3e-4
[output]
save_model = false
"""
TORCH_START = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                     intermediate_size=704, vocab_size=258, tie_word_embeddings=True)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 258, (16, 256))
model(ids, labels=ids).loss.backward()
optimizer.step()
"""


def steps_of(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def train(binary, dtype):
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(CONFIG)
        subprocess.run([binary, "train", str(config), "--dtype", dtype, "--output", f"{folder}/run"], check=True,
                       capture_output=True)
        steps = steps_of(f"{folder}/run")
        # Whole time between steps, so that whatever lies between them counts.
        seconds = [b["elapsed_s"] - a["elapsed_s"] for a, b in zip(steps[10:], steps[11:])]
        return 1024 / statistics.median(seconds)


def bare(binary, dtype):
    command = [binary, "bench", "step", "--json", "--dtype", dtype, "--steps", "30"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["tokens_per_s"]


def start(command):
    begin = time.time()
    subprocess.run(command, check=True, capture_output=True)
    return time.time() - begin


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for dtype in ("f32", "bf16"):
        pairs = [(train(options.binary, dtype), bare(options.binary, dtype)) for _ in range(options.rounds)]
        ours, bare_step = (statistics.median(pair[i] for pair in pairs) for i in range(2))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{dtype}: train {ours:,.0f} tokens/s, bare step {bare_step:,.0f}, median of ratios {ratio:.3f}")
    with tempfile.TemporaryDirectory() as folder:
        quickstart = [options.binary, "train", str(HERE.parent / "examples/quickstart.toml"), "--steps", "1", "--output",
                      f"{folder}/run", "--set", "output.overwrite=true", "--set", "output.save_model=false", "--set",
                      "sample.prompts=[]", "--set", "train.warmup_steps=0", "--set", "eval.batches=1"]
        ours = statistics.median(start(quickstart) for _ in range(options.rounds))
    environment_python = [options.python, "-c", TORCH_START]
    theirs = statistics.median(start(environment_python) for _ in range(max(1, options.rounds // 2)))
    print(f"whole process of one step: evenkeel {ours:.2f} s (evaluation and checkpoint included), PyTorch {theirs:.2f} s")


if __name__ == "__main__":
    main()
