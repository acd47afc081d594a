"""What balancing by leaving something out costs in accuracy: a small ViT on CIFAR-10, two ranks, one of them slowed down.

    python bench/cifar10.py data/cifar-10-batches-bin
    python bench/accuracy.py --binary target/release/evenkeel --data data/cifar-10-batches-bin [--epochs 8] [--side-by-side 1]

Every way trains the same model from the same seed on the same pictures for as many epochs, and the second rank takes twice as
long all the time (an emulated throttle). Prints a Markdown table: accuracy on the test pictures, loss, and the median step.
--side-by-side runs that many ways at a time, each on two cores of its own.
"""
import argparse
import itertools
import json
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

MODEL = {
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 512, "hidden_act": "gelu", "image_size": 32, "patch_size": 8,
    "num_channels": 3, "num_labels": 10, "qkv_bias": True, "layer_norm_eps": 1e-12, "initializer_range": 0.02,
}
RUN = """
[model]
config = "{folder}/vit.json"
[data]
source = "cifar10"
paths = {train}
eval_paths = ["{data}/test_batch.bin"]
packing = false
[train]
epochs = {epochs}
batch = 128
lr = 1e-3
warmup_steps = 100
weight_decay = 0.05
dtype = "bf16"
[parallel]
tp = 2
[balance]
calibrate = false
stragglers = ["1:2"]
{balance}
[eval]
every = 1000000
batches = 0
[output]
folder = "{folder}/run"
save_model = false
checkpoint_every = 0
"""


def ways():
    """By name, the lines of [balance]."""
    yield "off", 'mode = "off"'
    for mode in ("migrate", "reshard"):
        yield mode, f'mode = "{mode}"'
    for gamma, imputation, selection in itertools.product((0.25, 0.5), ("zero", "average", "same"), ("priority", "random")):
        lines = f'gamma_max = {gamma}\nimputation = "{imputation}"\nselection = "{selection}"'
        yield f"resize, γ ≤ {gamma}, {imputation}, {selection}", f'mode = "resize"\n{lines}'
    yield "semi, γ ≤ 0.5, zero, priority", 'mode = "semi"\ngamma_max = 0.5'


def train(options, balance, cores):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vit.json").write_text(json.dumps(MODEL))
        train = json.dumps([str(path) for path in sorted(Path(options.data).glob("data_batch_*.bin"))])
        run = RUN.format(folder=folder, data=options.data, train=train, epochs=options.epochs, balance=balance)
        (Path(folder) / "run.toml").write_text(run)
        command = ["taskset", "-c", ",".join(map(str, cores)), options.binary, "train", f"{folder}/run.toml"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{balance}\n{result.stderr}")
        return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]


def row(name, metrics):
    evaluated = [line for line in metrics if "eval_accuracy" in line][-1]
    steps = [line for line in metrics if "ranks" in line or "elapsed_s" in line]
    took = [after["elapsed_s"] - before["elapsed_s"] for before, after in zip(steps, steps[1:])]
    left_out = statistics.mean(line["ranks"][1]["left_out"] if line.get("ranks") else 0.0 for line in steps)
    accuracy, loss = 100 * evaluated["eval_accuracy"], evaluated["eval_loss"]
    return f"| {name} | {accuracy:.1f} % | {loss:.3f} | {1e3 * statistics.median(took):.1f} | {left_out:.2f} |"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/evenkeel")
    parser.add_argument("--data", default="data/cifar-10-batches-bin")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--first-core", type=int, default=0)
    parser.add_argument("--side-by-side", type=int, default=1)
    options = parser.parse_args()
    pairs = Queue()
    for pair in range(options.side_by_side):
        pairs.put([options.first_core + 2 * pair, options.first_core + 2 * pair + 1])

    def one(way):
        cores = pairs.get()
        try:
            line = row(way[0], train(options, way[1], cores))
        finally:
            pairs.put(cores)
        print(line, flush=True)

    print("| way | accuracy | loss | ms/step | left out by the slow rank |\n| --- | ---: | ---: | ---: | ---: |", flush=True)
    with ThreadPoolExecutor(options.side_by_side) as pool:
        list(pool.map(one, ways()))


if __name__ == "__main__":
    main()
